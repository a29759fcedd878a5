"""A configuration as the command is asked for it: a preset, and `--set key=value` texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, fields, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

from maskgr.config import TrainConfig, preset_config
from maskgr.errors import RequestError


def train_config(
    preset: str,
    pairs: Sequence[str] = (),
    *,
    model: str | None = None,
    minutes: float | None = None,
    seed: int | None = None,
) -> TrainConfig:
    """The preset with what is asked otherwise."""
    start = preset_config(preset)
    parts = ("network", "dense", "objective", "loop", "encoder", "quantizer", "decoding")
    kinds = [type(getattr(start, part)) for part in parts]
    own, *changes = split_settings(pairs, TrainConfig, *kinds)
    own |= {k: v for k, v in (("model", model), ("seed", seed)) if v is not None}
    loop = changes[parts.index("loop")]
    if "steps" in loop:
        loop.setdefault("minutes", 0.0)  # asking for steps ends a preset's minutes
    if minutes is not None:
        loop["minutes"] = minutes
    changed = {
        part: replace(getattr(start, part), **change)
        for part, change in zip(parts, changes, strict=True)
    }
    return replace(start, **own, **changed)


def parse_settings(config: type[Any], pairs: Sequence[str]) -> dict[str, Any]:
    """The arguments of one dataclass."""
    return split_settings(pairs, config)[0]


def split_settings(pairs: Sequence[str], *configs: type[Any]) -> list[dict[str, Any]]:
    """The arguments of each dataclass.

    A key may name its dataclass, as `network.width` does NetworkConfig; without, it belongs to
    the first that has it.
    """
    values: list[dict[str, Any]] = [{} for _ in configs]
    for pair in pairs:
        key, equals, text = pair.partition("=")
        part, _, name = key.rpartition(".")
        owner = next(
            (
                n
                for n, config in enumerate(configs)
                if name in _defaults(config) and part in ("", _part(config))
            ),
            None,
        )
        if owner is None or not equals:
            known = ", ".join(name for config in configs for name in _defaults(config))
            raise RequestError(f"--set {pair} is not key=value with a key of {known}")
        kind = get_type_hints(configs[owner])[name]
        if get_origin(kind) is Literal and text not in get_args(kind):
            raise RequestError(f"--set {pair}: use one of {', '.join(get_args(kind))}")
        values[owner][name] = _value(pair, text, _defaults(configs[owner])[name])
    return values


def _part(config: type[Any]) -> str:
    return config.__name__.removesuffix("Config").lower()


def _defaults(config: type[Any]) -> dict[str, Any]:
    """The settings that one word can hold: not the nested dataclasses."""
    return {f.name: f.default for f in fields(config) if f.default is not MISSING}


def _value(pair: str, text: str, default: Any) -> Any:
    """`text` in the type of the setting's default."""
    if isinstance(default, bool):
        if text not in ("true", "false"):
            raise RequestError(f"--set {pair}: {text!r} is neither true nor false")
        return text == "true"
    if default is None:
        return text
    try:
        if isinstance(default, tuple):
            return tuple(type(default[0])(part) for part in text.split(","))
        return type(default)(text)
    except ValueError:
        kind = "list of numbers" if isinstance(default, tuple) else type(default).__name__
        raise RequestError(f"--set {pair}: {text!r} is not a valid {kind}") from None
