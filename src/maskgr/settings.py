"""`--set key=value` texts as arguments of the configuration dataclasses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, fields
from typing import Any

from maskgr.errors import RequestError


def parse_settings(config: type[Any], pairs: Sequence[str]) -> dict[str, Any]:
    """The arguments of one dataclass."""
    return split_settings(pairs, config)[0]


def split_settings(pairs: Sequence[str], *configs: type[Any]) -> list[dict[str, Any]]:
    """The arguments of each dataclass; a key belongs to the first that has it."""
    values: list[dict[str, Any]] = [{} for _ in configs]
    for pair in pairs:
        key, equals, text = pair.partition("=")
        owner = next((n for n, c in enumerate(configs) if key in _defaults(c)), None)
        if owner is None or not equals:
            known = ", ".join(name for config in configs for name in _defaults(config))
            raise RequestError(f"--set {pair} is not key=value with a key of {known}")
        values[owner][key] = _value(pair, text, _defaults(configs[owner])[key])
    return values


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
