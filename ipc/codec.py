"""Messages and records to msgpack bytes and back. The one place that knows the wire form.

Wire form: the array [protocol version, class name, {field: value}]. A decoder looks the name up in a closed
table, so a peer can name a message and never a class. No extension types, no duplicate keys, no
open-ended fields; every length is bounded before memory is taken for it.
"""

import typing
from collections.abc import Iterable
from typing import Any, Literal, TypeVar

import msgpack

from strata_coord.ipc.errors import InvariantError, ProtocolError
from strata_coord.ipc.messages import PROTOCOL_VERSION, BetweenNeighbours, Message, ToCoordinator, ToStage
from strata_coord.ipc.schema import MAX_BYTES_FIELD, MAX_DEPTH, MAX_STRING_BYTES, MismatchError, schema_of

R = TypeVar("R")

# A message with its signature header and routing frame fits the 64 KiB that a socket accepts per frame.
MAX_MESSAGE_BYTES = 65_536 - 256
MAX_RECORD_BYTES = 64 << 20
_MAX_ARRAY = 1024
_MAX_MAP = 64

MESSAGE_CLASSES: tuple[type, ...] = tuple(
    cls for union in (ToCoordinator, ToStage, BetweenNeighbours) for cls in typing.get_args(union)
)
REGISTRY: dict[str, type] = {cls.__name__: cls for cls in MESSAGE_CLASSES}


def encode_message(message: Message) -> bytes:
    """Return the wire form of a control message, at most MAX_MESSAGE_BYTES.

    Raises:
        ProtocolError: a field does not fit its schema, or the message is too long. Nothing was sent.
    """
    if REGISTRY.get(type(message).__name__) is not type(message):
        error = f"{type(message).__name__} is not a message"
        raise ProtocolError(error)
    return _pack(message, max_bytes=MAX_MESSAGE_BYTES, max_array=_MAX_ARRAY)


def decode_message(data: bytes) -> Message:
    """Return the message of one frame.

    Raises:
        ProtocolError: the bytes are not exactly one message of this protocol version.
    """
    return typing.cast("Message", _unpack(data, REGISTRY, max_bytes=MAX_MESSAGE_BYTES, max_array=_MAX_ARRAY))


def encode_record(record: object, *, max_bytes: int = MAX_RECORD_BYTES) -> bytes:
    """Return the wire form of a record that lies in a memfd, such as a StageAssignment.

    Raises:
        ProtocolError: a field does not fit its schema, or the record is longer than max_bytes.
    """
    return _pack(record, max_bytes=max_bytes, max_array=max_bytes)


def decode_record(cls: type[R], data: bytes | memoryview, *, max_bytes: int = MAX_RECORD_BYTES) -> R:
    """Return a record of the class that the caller expects.

    Raises:
        ProtocolError: the bytes are not exactly one such record of this protocol version.
    """
    return typing.cast("R", _unpack(data, {cls.__name__: cls}, max_bytes=max_bytes, max_array=max_bytes))


def clip_text(
    text: str, max_bytes: int = MAX_STRING_BYTES, *, keep: Literal["start", "end"] = "start"
) -> str:
    """Return text that fits a string field: lone surrogates replaced, cut to max_bytes of UTF-8."""
    data = text.encode(errors="replace")
    if len(data) > max_bytes:
        data = data[:max_bytes] if keep == "start" else data[len(data) - max_bytes :]
    return data.decode(errors="ignore")


def _pack(record: object, *, max_bytes: int, max_array: int) -> bytes:
    cls: type = type(record)
    schema = schema_of(cls)
    if schema.depth + 1 > MAX_DEPTH:  # the envelope is one container more
        error = f"{cls.__name__} nests {schema.depth + 1} deep, at most {MAX_DEPTH} are allowed"
        raise InvariantError(error)
    try:
        plain = schema.to_plain(record)
    except MismatchError as mismatch:
        error = f"cannot send {mismatch.inside(cls.__name__)}"
        raise ProtocolError(error) from None
    data: bytes = msgpack.packb([PROTOCOL_VERSION, cls.__name__, plain], use_bin_type=True)
    if len(data) > max_bytes:
        error = f"cannot send {cls.__name__}: {len(data)} bytes, at most {max_bytes} are allowed"
        raise ProtocolError(error)
    if max_array < max_bytes:
        longest = _longest_array(plain)
        if longest > max_array:
            error = f"cannot send {cls.__name__}: a list of {longest}, at most {max_array} are allowed"
            raise ProtocolError(error)
    return data


def _longest_array(plain: object) -> int:
    if type(plain) is list:
        return max([len(plain), *(_longest_array(item) for item in plain)])
    if type(plain) is dict:
        return max((_longest_array(item) for item in plain.values()), default=0)
    return 0


def _unpack(data: bytes | memoryview, known: dict[str, type], *, max_bytes: int, max_array: int) -> object:
    size = len(data)
    if size > max_bytes:
        error = f"message of {size} bytes, at most {max_bytes} are allowed"
        raise ProtocolError(error)
    try:
        envelope = msgpack.unpackb(
            data,
            raw=False,
            use_list=True,
            strict_map_key=True,
            object_pairs_hook=_map_without_repeats,
            ext_hook=_refuse_extension,
            max_array_len=max_array,
            max_map_len=_MAX_MAP,
            max_str_len=MAX_STRING_BYTES,
            max_bin_len=MAX_BYTES_FIELD,
            max_ext_len=0,
        )
    # Everything that the unpacker raises for bad input; the hooks below raise ValueError too.
    except (ValueError, TypeError, OverflowError, msgpack.exceptions.UnpackException) as cause:
        error = f"message of {size} bytes is not msgpack within the limits ({type(cause).__name__})"
        raise ProtocolError(error) from None
    if type(envelope) is not list or not envelope or type(envelope[0]) is not int:
        error = f"message of {size} bytes does not open with a protocol version"
        raise ProtocolError(error)
    if envelope[0] != PROTOCOL_VERSION:
        error = f"protocol version {envelope[0]}, this program speaks {PROTOCOL_VERSION}"
        raise ProtocolError(error)
    if len(envelope) != 3 or type(envelope[1]) is not str:
        error = f"message of {size} bytes has {len(envelope)} parts, not version, name and fields"
        raise ProtocolError(error)
    cls = known.get(envelope[1])
    if cls is None:
        error = f"unknown message name of {len(envelope[1])} characters: {envelope[1][:40]!a}"
        raise ProtocolError(error)
    try:
        return schema_of(cls).to_record(envelope[2])
    except MismatchError as mismatch:
        error = f"refused {mismatch.inside(cls.__name__)}"
        raise ProtocolError(error) from None


def _map_without_repeats(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    items = list(pairs)
    found = dict(items)
    if len(found) != len(items):
        error = f"{len(items)} map entries name {len(found)} keys"
        raise ValueError(error)
    return found


def _refuse_extension(code: int, data: bytes) -> object:
    error = f"extension type {code} of {len(data)} bytes"
    raise ValueError(error)
