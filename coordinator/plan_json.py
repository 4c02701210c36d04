"""Builds frozen records from decoded JSON, checked against their annotations. Pure."""

from __future__ import annotations

import math
import types
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Literal, NoReturn, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from strata_coord.ipc.errors import ConfigError

__all__ = ["record_from"]

RecordT = TypeVar("RecordT")


def record_from(cls: type[RecordT], value: object, *, what: str) -> RecordT:
    """Build a dataclass from decoded JSON.

    Args:
        cls: A dataclass of numbers, texts, literals, tuples and dataclasses.
        value: What json.loads returned.
        what: The value's name, for errors.

    Raises:
        ConfigError: A field is missing, unknown or of the wrong type; names its path.
    """
    return cast("RecordT", _value(cls, value, what))


def _value(kind: Any, value: object, path: str) -> object:
    origin = get_origin(kind)
    if isinstance(kind, type) and is_dataclass(kind):
        return _record(kind, value, path)
    if origin in (Union, types.UnionType):
        others = [one for one in get_args(kind) if one is not type(None)]
        return None if value is None and len(others) < len(get_args(kind)) else _value(others[0], value, path)
    if origin is tuple:
        if not isinstance(value, list):
            _refuse(path, "an array", value)
        item = get_args(kind)[0]
        return tuple(_value(item, one, f"{path}.{number}") for number, one in enumerate(value))
    return _plain(kind, value, path)


def _plain(kind: Any, value: object, path: str) -> object:
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            _refuse(path, " or ".join(map(repr, get_args(kind))), value)
    elif kind is float:
        if type(value) not in (int, float) or not math.isfinite(cast("float", value)):
            _refuse(path, "a finite number", value)
        return float(cast("float", value))
    elif type(value) is not kind:
        _refuse(path, {int: "a whole number", str: "a text"}.get(kind, str(kind)), value)
    return value


def _record(cls: type, value: object, path: str) -> object:
    if not isinstance(value, dict):
        _refuse(path, "an object", value)
    names = [field.name for field in fields(cls)]
    for name in names:
        if name not in value:
            message = f"{path}.{name}: missing"
            raise ConfigError(message)
    for name in value:
        if name not in names:
            message = f"{path}.{name}: unknown"
            raise ConfigError(message)
    kinds = _kinds(cls)
    return cls(**{name: _value(kinds[name], value[name], f"{path}.{name}") for name in names})


@cache
def _kinds(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def _refuse(path: str, expected: str, found: object) -> NoReturn:
    shown = repr(found)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    message = f"{path}: expected {expected}, got {shown}"
    raise ConfigError(message)
