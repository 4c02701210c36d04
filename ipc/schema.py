"""Exact schemas, compiled once per record class from its annotations: the only shapes that cross a socket.

A record is a map from field name to value with every field present and none added. Allowed annotations: int,
float, bool, str, bytes, Literal of strings, tuple[X, ...], X | None and other record classes. Anything else
is refused when the schema is compiled, so an open-ended field cannot slip in. Both directions are
checked: what a peer would refuse is not sent.

Nesting is bounded by the schema itself: values are visited only as deep as the annotations reach.
"""

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable
from typing import Any, Literal

from strata_coord.ipc.errors import InvariantError, ProtocolError

MAX_DEPTH = 8  # containers in containers, the message's own envelope included
MAX_STRING_BYTES = 4096
MAX_BYTES_FIELD = 16384
_MAX_UNSIGNED = (1 << 64) - 1
_MAX_SIGNED = (1 << 63) - 1

# Counts, indexes, sizes and times are never negative; these fields use -1 for "none" or "not finite".
_MINUS_ONE_MEANS_NONE = frozenset(
    {
        ("Hello", "numa_node"),
        ("Bootstrap", "numa_node"),
        ("SampledToken", "token"),
        ("NotFinite", "layer"),
        ("StageFailed", "layer"),
        ("StageFailed", "super_chunk"),
        ("StageAssignment", "numa_node"),
        ("NgramGeometry", "eos_token"),
    }
)

# Bytes fields of a fixed length: a CUDA IPC memory handle is 64 bytes, and b"" stands for none.
_BYTES_LENGTHS: dict[tuple[str, str], tuple[int, ...]] = {
    ("SlotsReady", "handle"): (0, 64),
    ("Relink", "handle"): (0, 64),
}

Check = Callable[[Any], Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """Two checked translations: record to plain values, and back."""

    to_plain: Check
    to_record: Check
    depth: int  # containers on the longest path


class MismatchError(ProtocolError):
    """A value does not fit its schema. Carries the path of the field, innermost name last."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def inside(self, name: str) -> "MismatchError":
        """Return the same complaint, one level further out."""
        separator = "" if self.reason.startswith(("[", ":")) else "."
        return MismatchError(f"{name}{separator}{self.reason}")

    def inside_item(self, index: int) -> "MismatchError":
        """Return the same complaint, inside an item of a tuple."""
        return self.inside(f"[{index}]")


def _refuse(found: object, wanted: str) -> MismatchError:
    return MismatchError(f": {type(found).__name__} where {wanted} is due")


@functools.cache
def schema_of(cls: type) -> Schema:
    """Return the compiled schema of a record class.

    Raises:
        InvariantError: an annotation is not of the closed set, or records nest deeper than MAX_DEPTH.
    """
    if not dataclasses.is_dataclass(cls):
        message = f"{cls.__name__} is not a record class"
        raise InvariantError(message)
    hints = typing.get_type_hints(cls)
    names = tuple(field.name for field in dataclasses.fields(cls))
    fields = {name: _compile(hints[name], owner=cls.__name__, name=name) for name in names}
    depth = 1 + max((schema.depth for schema in fields.values()), default=0)
    if depth > MAX_DEPTH:
        message = f"{cls.__name__} nests {depth} deep, at most {MAX_DEPTH} are allowed"
        raise InvariantError(message)
    outward = tuple((name, schema.to_plain) for name, schema in fields.items())
    inward = tuple((name, schema.to_record) for name, schema in fields.items())
    known = frozenset(names)

    def to_plain(record: Any) -> dict[str, Any]:
        if type(record) is not cls:
            raise _refuse(record, cls.__name__)
        plain = {}
        for name, check in outward:
            try:
                plain[name] = check(getattr(record, name))
            except MismatchError as error:
                raise error.inside(name) from None
        return plain

    def to_record(plain: Any) -> Any:
        if type(plain) is not dict:
            raise _refuse(plain, f"the map of {cls.__name__}")
        if len(plain) != len(inward) or plain.keys() != known:
            reason = f": {_field_difference(cls.__name__, known, plain)}"
            raise MismatchError(reason)
        values = {}
        for name, check in inward:
            try:
                values[name] = check(plain[name])
            except MismatchError as error:
                raise error.inside(name) from None
        return cls(**values)

    return Schema(to_plain=to_plain, to_record=to_record, depth=depth)


def _field_difference(owner: str, known: frozenset[str], found: dict[Any, Any]) -> str:
    missing = sorted(known - found.keys())
    extra = len(found.keys() - known)
    first = f", first {missing[0]}" if missing else ""
    return f"{owner} has {len(missing)} fields missing{first}, and {extra} that it does not know"


def _compile(hint: Any, *, owner: str, name: str) -> Schema:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        schema = schema_of(hint)
    elif origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        schema = _tuple_schema(_compile(arguments[0], owner=owner, name=name))
    elif origin in {types.UnionType, typing.Union} and len(arguments) == 2 and type(None) in arguments:
        inner = next(argument for argument in arguments if argument is not type(None))
        schema = _optional_schema(_compile(inner, owner=owner, name=name))
    elif origin is Literal and all(type(value) is str for value in arguments):
        schema = _leaf(_literal_check(frozenset(arguments)))
    elif hint is int and (owner, name) in _MINUS_ONE_MEANS_NONE:
        schema = _leaf(_integer_check(-1, _MAX_SIGNED))
    elif hint is bytes and (owner, name) in _BYTES_LENGTHS:
        schema = _leaf(_bytes_check(_BYTES_LENGTHS[owner, name]))
    elif hint in _LEAVES:
        schema = _LEAVES[hint]
    else:
        message = f"{owner}.{name}: the annotation {hint} has no wire form"
        raise InvariantError(message)
    return schema


def _leaf(check: Check) -> Schema:
    return Schema(to_plain=check, to_record=check, depth=0)


def _integer_check(lowest: int, highest: int) -> Check:
    def check(value: Any) -> int:
        if type(value) is not int:  # bool is a subclass and is refused
            raise _refuse(value, "an integer")
        if not lowest <= value <= highest:
            reason = f": {value} is outside {lowest} to {highest}"
            raise MismatchError(reason)
        return value

    return check


def _literal_check(allowed: frozenset[str]) -> Check:
    def check(value: Any) -> str:
        if type(value) is not str or value not in allowed:
            raise _refuse(value, " or ".join(sorted(allowed)))
        return value

    return check


def _float_to_plain(value: Any) -> float:
    # Type checkers let an int pass for a float; the wire form is always a float.
    return _check_float(float(value) if type(value) is int else value)


def _check_float(value: Any) -> float:
    if type(value) is not float:
        raise _refuse(value, "a float")
    if not math.isfinite(value):
        reason = f": {value} is not finite"
        raise MismatchError(reason)
    return value


def _check_bool(value: Any) -> bool:
    if type(value) is not bool:
        raise _refuse(value, "true or false")
    return value


def _check_string(value: Any) -> str:
    if type(value) is not str:
        raise _refuse(value, "text")
    try:
        size = len(value) if value.isascii() else len(value.encode())
    except UnicodeEncodeError:
        reason = ": text with a lone surrogate"
        raise MismatchError(reason) from None
    if size > MAX_STRING_BYTES:
        reason = f": text of {size} bytes, at most {MAX_STRING_BYTES} are allowed"
        raise MismatchError(reason)
    return value


def _check_bytes(value: Any) -> bytes:
    if type(value) is not bytes:
        raise _refuse(value, "bytes")
    if len(value) > MAX_BYTES_FIELD:
        reason = f": {len(value)} bytes, at most {MAX_BYTES_FIELD} are allowed"
        raise MismatchError(reason)
    return value


def _bytes_check(lengths: tuple[int, ...]) -> Check:
    def check(value: Any) -> bytes:
        if len(_check_bytes(value)) not in lengths:
            reason = f": {len(value)} bytes where {' or '.join(map(str, lengths))} are due"
            raise MismatchError(reason)
        return typing.cast("bytes", value)

    return check


_LEAVES: dict[Any, Schema] = {
    int: _leaf(_integer_check(0, _MAX_UNSIGNED)),
    float: Schema(to_plain=_float_to_plain, to_record=_check_float, depth=0),
    bool: _leaf(_check_bool),
    str: _leaf(_check_string),
    bytes: _leaf(_check_bytes),
}


def _tuple_schema(item: Schema) -> Schema:
    def walk(check: Check, values: Any) -> list[Any]:
        done: list[Any] = []
        try:
            for value in values:
                done.append(check(value))
        except MismatchError as error:
            raise error.inside_item(len(done)) from None
        return done

    def to_plain(values: Any) -> list[Any]:
        if type(values) is not tuple:
            raise _refuse(values, "a tuple")
        return walk(item.to_plain, values)

    def to_record(values: Any) -> tuple[Any, ...]:
        if type(values) is not list:
            raise _refuse(values, "an array")
        return tuple(walk(item.to_record, values))

    return Schema(to_plain=to_plain, to_record=to_record, depth=1 + item.depth)


def _optional_schema(inner: Schema) -> Schema:
    def to_plain(value: Any) -> Any:
        return None if value is None else inner.to_plain(value)

    def to_record(value: Any) -> Any:
        return None if value is None else inner.to_record(value)

    return Schema(to_plain=to_plain, to_record=to_record, depth=inner.depth)
