"""Settings as the command is given them: `key=value` texts on top of a configuration.

A configuration is a frozen dataclass that may hold others. A key is a dotted path to a setting,
such as `fit.learning_rate`; any ending of the path that names one setting alone will do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from numbers import Integral, Real
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from maskgr.errors import RequestError

T = TypeVar("T")


def apply_settings(config: T, pairs: Sequence[str]) -> T:
    """`config` with the settings that `pairs` change."""
    changes: dict[tuple[str, ...], Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals:
            raise RequestError(f"--set {pair} is not KEY=VALUE; write for example seed=1")
        path = _find(config, key, pair)
        changes[path] = _parsed(config, path, text, pair)
    changed: T = _changed(config, changes)
    return changed


def setting_paths(config: Any) -> list[tuple[str, ...]]:
    """The path of every setting that a text can change."""
    paths: list[tuple[str, ...]] = []
    for f in fields(config):
        value = getattr(config, f.name)
        if is_dataclass(value):
            paths += [(f.name, *path) for path in setting_paths(value)]
        elif f.name != "name":  # which model it is; chosen by --model
            paths.append((f.name,))
    return paths


def _find(config: Any, key: str, pair: str) -> tuple[str, ...]:
    wanted = tuple(key.split("."))
    paths = setting_paths(config)
    if wanted in paths:
        return wanted
    found = [path for path in paths if path[-len(wanted) :] == wanted]
    if len(found) == 1:
        return found[0]
    names = ", ".join(".".join(path) for path in found or paths)
    if found:
        raise RequestError(f"--set {pair}: {key} is ambiguous; use one of {names}")
    raise RequestError(f"--set {pair}: there is no setting {key}; the settings are {names}")


def _parsed(config: Any, path: tuple[str, ...], text: str, pair: str) -> Any:
    """`text` in the type of the setting's current value."""
    for name in path[:-1]:
        config = getattr(config, name)
    current, kind = getattr(config, path[-1]), get_type_hints(type(config))[path[-1]]
    if get_origin(kind) is Literal and text not in get_args(kind):
        raise RequestError(f"--set {pair}: use one of {', '.join(get_args(kind))}")
    if isinstance(current, bool):
        if text not in ("true", "false"):
            raise RequestError(f"--set {pair}: {text!r} is neither true nor false")
        return text == "true"
    if current is None:
        return text
    if isinstance(current, tuple):
        return tuple(part.strip() for part in text.split(",") if part.strip())
    try:
        return type(current)(text)
    except ValueError:
        raise RequestError(
            f"--set {pair}: {text!r} is not a valid {type(current).__name__}"
        ) from None


def _changed(config: Any, changes: Mapping[tuple[str, ...], Any]) -> Any:
    """All changes at once: a configuration may check two settings against each other."""
    values: dict[str, Any] = {}
    for name in dict.fromkeys(path[0] for path in changes):
        inner = {path[1:]: value for path, value in changes.items() if path[0] == name}
        values[name] = inner[()] if () in inner else _changed(getattr(config, name), inner)
    return replace(config, **values)


def require_choice(key: str, value: object, choices: Any) -> None:
    if value not in get_args(choices):
        raise RequestError(f"{key} is {value!r}; choose one of {', '.join(get_args(choices))}")


def require_numbers(config: Any, prefix: str = "", **bounds: tuple[float, float]) -> None:
    """Raises where a setting is no number of its type, or outside its bounds, which it may reach.

    Bounds are wide: they keep out what can only be a slip, or would end in an error elsewhere.
    """
    kinds = {f.name: f.type for f in fields(config)}
    for name, (low, high) in bounds.items():
        value, whole = getattr(config, name), kinds[name] in ("int", int)
        fits = isinstance(value, Integral if whole else Real) and not isinstance(value, bool)
        if not fits or not low <= value <= high:  # false for NaN, too
            kind = "whole number" if whole else "number"
            raise RequestError(
                f"{prefix}{name} is {value!r}; give a {kind} from {low:,} to {high:,}"
            )
