import dataclasses
import json
import math
import types
import typing
from pathlib import Path
from typing import Any, Literal

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strata_coord.ipc import codec
from strata_coord.ipc.assignment import StageAssignment
from strata_coord.ipc.errors import InvariantError, ProtocolError
from strata_coord.ipc.messages import (
    PROTOCOL_VERSION,
    Grant,
    Message,
    RunSuperChunk,
    SampledToken,
    SamplingSettings,
    Segment,
    StageFailed,
    StateOperation,
    SuperChunk,
)
from strata_coord.ipc.schema import schema_of

GOLDEN = Path(__file__).parents[1] / "data" / f"golden_messages_v{PROTOCOL_VERSION}.json"


HANDLE_BYTES = 64
_OF_ONE_LENGTH = ("handle",)  # bytes fields that are empty or a device memory handle


def example(hint: Any, name: str = "") -> Any:
    """One fixed value of every annotation that records use; golden bytes depend on it."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        return hint(**{f.name: example(hints[f.name], f.name) for f in dataclasses.fields(hint)})
    if origin is tuple:
        return (example(arguments[0], name),)
    if origin in {types.UnionType, typing.Union}:
        return example(next(a for a in arguments if a is not type(None)), name)
    if origin is Literal:
        return arguments[0]
    return {int: len(name), float: 0.5, bool: True, str: name, bytes: _example_bytes(name)}[hint]


def _example_bytes(name: str) -> bytes:
    return name.encode().ljust(HANDLE_BYTES, b".") if name in _OF_ONE_LENGTH else name.encode()


def strategy(hint: Any, name: str = "") -> st.SearchStrategy[Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        return st.builds(hint, **{f.name: strategy(hints[f.name], f.name) for f in dataclasses.fields(hint)})
    if origin is tuple:
        return st.lists(strategy(arguments[0]), max_size=3).map(tuple)
    if origin in {types.UnionType, typing.Union}:
        return st.none() | strategy(next(a for a in arguments if a is not type(None)))
    if origin is Literal:
        return st.sampled_from(arguments)
    if hint is bytes and name in _OF_ONE_LENGTH:
        return st.just(b"") | st.binary(min_size=HANDLE_BYTES, max_size=HANDLE_BYTES)
    return {
        int: st.integers(0, 2**63 - 1),
        float: st.floats(allow_nan=False, allow_infinity=False),
        bool: st.booleans(),
        str: st.text(st.characters(exclude_categories=["Cs"]), max_size=50),
        bytes: st.binary(max_size=50),
    }[hint]


def wire(name: object, fields: object, version: object = PROTOCOL_VERSION) -> bytes:
    return msgpack.packb([version, name, fields])


GRANT = {"generation": 1, "epoch": 2, "slot": 3}


@pytest.mark.parametrize("cls", codec.MESSAGE_CLASSES, ids=lambda cls: cls.__name__)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_every_message_survives_the_round_trip(cls, data):
    message = data.draw(strategy(cls))
    assert codec.decode_message(codec.encode_message(message)) == message


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(strategy(StageAssignment))
def test_an_assignment_survives_the_round_trip(record):
    assert codec.decode_record(StageAssignment, codec.encode_record(record)) == record


def test_the_registry_holds_every_message_once():
    members = [c for union in typing.get_args(Message) for c in (typing.get_args(union) or (union,))]
    assert sorted(codec.REGISTRY) == sorted(cls.__name__ for cls in members)
    assert len(codec.REGISTRY) == len(codec.MESSAGE_CLASSES)


def test_golden_bytes_of_this_protocol_version():
    found = {cls.__name__: codec.encode_message(example(cls)).hex() for cls in codec.MESSAGE_CLASSES}
    assert found == json.loads(GOLDEN.read_text()), (
        "the wire form changed: raise PROTOCOL_VERSION and write new golden bytes"
    )


@pytest.mark.parametrize("cls", codec.MESSAGE_CLASSES, ids=lambda cls: cls.__name__)
def test_every_field_is_due_and_no_other_is_known(cls):
    plain = msgpack.unpackb(codec.encode_message(example(cls)))[2]
    for name in plain:
        with pytest.raises(ProtocolError, match="missing"):
            codec.decode_message(wire(cls.__name__, {k: v for k, v in plain.items() if k != name}))
    with pytest.raises(ProtocolError, match="does not know"):
        codec.decode_message(wire(cls.__name__, plain | {"extra": 1}))


@pytest.mark.parametrize("cls", codec.MESSAGE_CLASSES, ids=lambda cls: cls.__name__)
def test_every_field_refuses_every_other_type(cls):
    plain = msgpack.unpackb(codec.encode_message(example(cls)))[2]
    for name, good in plain.items():
        for bad in (None, True, 1, 0.5, "text", b"bytes", [1], {"a": 1}, -5, 2**64 - 1):
            fields = {f.name: f.type for f in dataclasses.fields(cls)}
            if type(bad) is type(good) and type(bad) is not dict and bad != -5:
                continue
            if bad is None and "None" in str(fields[name]):
                continue
            with pytest.raises(ProtocolError, match=name):
                codec.decode_message(wire(cls.__name__, plain | {name: bad}))


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"", "not msgpack"),
        (b"\xc1", "not msgpack"),
        (wire("Grant", GRANT)[:-1], "not msgpack"),
        (wire("Grant", GRANT) + b"\x00", "not msgpack"),
        (b"\x80", "protocol version"),
        (b"\x90", "protocol version"),
        (wire("Grant", GRANT, version=True), "protocol version"),
        (wire("Grant", GRANT, version=PROTOCOL_VERSION + 1), f"version {PROTOCOL_VERSION + 1}"),
        (msgpack.packb([PROTOCOL_VERSION, "Grant"]), "2 parts"),
        (msgpack.packb([PROTOCOL_VERSION, "Grant", GRANT, 1]), "4 parts"),
        (wire("grant", GRANT), "unknown message"),
        (wire("StageAssignment", GRANT), "unknown message"),
        (wire(["Grant"], GRANT), "not version, name"),
        (wire("Grant", [1, 2, 3]), "map of Grant"),
        (wire("Grant", GRANT | {"slot": True}), r"Grant\.slot\b"),
        (wire("Grant", GRANT | {"slot": -1}), "outside 0"),
        (b"\x93\x01\xa5Grant\x84" + b"\xa4slot\x01" * 2 + b"\xa5epoch\x01\xaageneration\x01", "not msgpack"),
        (wire("Grant", GRANT | {"slot": msgpack.ExtType(4, b"x")}), "not msgpack"),
        (wire("Grant", GRANT | {"slot": msgpack.ExtType(4, b"")}), "not msgpack"),
        (wire("Grant", GRANT | {"slot": msgpack.Timestamp(0)}), "not msgpack"),
        (wire("Grant", {**GRANT, 5: 1}), "not msgpack"),
        (wire("Grant", {b"slot": 1, "epoch": 1, "generation": 1}), "missing"),
        (b"\xdd\xff\xff\xff\xff", "not msgpack"),
        (b"\x91" * 900 + b"\x90", "protocol version"),
        (b"\x91" * 60_000 + b"\x90", "not msgpack"),
        (wire("Grant", [0] * 1025), "not msgpack"),
        (wire("Grant", {str(n): n for n in range(65)}), "not msgpack"),
        (wire("x" * 4097, GRANT), "not msgpack"),
        (msgpack.packb([PROTOCOL_VERSION, b"x" * 16385]), "not msgpack"),
        (b"\x93\x01\xa2\xff\xfe\x80", "not msgpack"),
        (b"\x00" * (codec.MAX_MESSAGE_BYTES + 1), "at most"),
    ],
)
def test_bytes_that_are_no_message_are_refused(data, complaint):
    with pytest.raises(ProtocolError, match=complaint):
        codec.decode_message(data)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_damaged_messages_raise_nothing_but_protocol_errors(data):
    good = bytearray(codec.encode_message(example(data.draw(st.sampled_from(codec.MESSAGE_CLASSES)))))
    for _ in range(data.draw(st.integers(1, 4))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    try:
        message = codec.decode_message(bytes(good))
    except ProtocolError:
        return
    assert type(message) in codec.MESSAGE_CLASSES


@pytest.mark.parametrize("name", ["SlotsReady", "Relink"])
@pytest.mark.parametrize("length", [1, 63, 65, 4096])
def test_a_device_memory_handle_has_its_one_length_both_ways(name, length):
    good = example(codec.REGISTRY[name])
    assert codec.decode_message(codec.encode_message(dataclasses.replace(good, handle=b""))).handle == b""
    with pytest.raises(ProtocolError, match=rf"{name}\.handle: {length} bytes where 0 or 64"):
        codec.encode_message(dataclasses.replace(good, handle=bytes(length)))
    plain = msgpack.unpackb(codec.encode_message(good))[2]
    with pytest.raises(ProtocolError, match=rf"{name}\.handle: {length} bytes where 0 or 64"):
        codec.decode_message(wire(name, plain | {"handle": bytes(length)}))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_floats_have_to_be_finite_both_ways(value):
    with pytest.raises(ProtocolError, match=r"tokens\[0\]\.logprob: .* not finite"):
        codec.encode_message(
            dataclasses.replace(
                example(codec.REGISTRY["SuperChunkDone"]),
                tokens=(SampledToken(sequence=0, position=0, token=0, logprob=value),),
            )
        )
    plain = msgpack.unpackb(codec.encode_message(example(codec.REGISTRY["StageReady"])))[2]
    with pytest.raises(ProtocolError, match="not finite"):
        codec.decode_message(wire("StageReady", plain | {"load_seconds": value}))


def run_message(num_segments: int) -> RunSuperChunk:
    segment = Segment(sequence=0, seat=0, first_position=0, count=1, sample=SamplingSettings(temperature=1))
    return RunSuperChunk(
        incarnation=1,
        super_chunk=SuperChunk(
            epoch=1,
            index=0,
            operations=(StateOperation(kind="create", sequence=0, seat=0),),
            segments=(segment,) * num_segments,
            sub_chunk_tokens=64,
            slot_rows=64,
            upload="stream-all",
        ),
    )


def test_a_message_that_the_peer_would_refuse_is_not_sent():
    assert codec.decode_message(codec.encode_message(run_message(256))) == run_message(256)
    with pytest.raises(ProtocolError, match="at most"):
        codec.encode_message(run_message(1000))
    with pytest.raises(ProtocolError, match=r"Grant\.slot"):
        codec.encode_message(Grant(generation=1, epoch=1, slot=-1))
    with pytest.raises(ProtocolError, match="not a message"):
        codec.encode_message(SamplingSettings())  # type: ignore[arg-type]


def test_a_list_longer_than_the_limit_is_not_sent():
    done = example(codec.REGISTRY["RunSuperChunk"])
    operations = (StateOperation(kind="drop", sequence=0, seat=0),) * 1025
    chunk = dataclasses.replace(done.super_chunk, operations=operations)
    with pytest.raises(ProtocolError, match="a list of 1025"):
        codec.encode_message(dataclasses.replace(done, super_chunk=chunk))


def test_an_assignment_may_be_longer_than_a_message():
    record = example(StageAssignment)
    record = dataclasses.replace(record, tensors=record.tensors * 5000)
    data = codec.encode_record(record)
    assert len(data) > codec.MAX_MESSAGE_BYTES
    assert codec.decode_record(StageAssignment, memoryview(data)) == record
    with pytest.raises(ProtocolError, match="at most 1000"):
        codec.decode_record(StageAssignment, data, max_bytes=1000)
    with pytest.raises(ProtocolError, match="unknown message name"):
        codec.decode_record(SuperChunk, data)


def test_the_largest_unsigned_multiplier_survives():
    record = example(StageAssignment)
    ngram = dataclasses.replace(record.geometry.ngram, multipliers=(2**64 - 1,))
    record = dataclasses.replace(record, geometry=dataclasses.replace(record.geometry, ngram=ngram))
    assert codec.decode_record(StageAssignment, codec.encode_record(record)) == record


@pytest.mark.parametrize("keep", ["start", "end"])
@pytest.mark.parametrize("text", ["", "short", "ü" * 5000, "\ud800" * 3, "a" + "€" * 3000])
def test_clipped_text_fits_its_field(text, keep):
    clipped = codec.clip_text(text, keep=keep)
    failed = dataclasses.replace(example(StageFailed), trace=clipped)
    assert codec.decode_message(codec.encode_message(failed)) == failed
    assert len(clipped.encode()) > 4090 or len(clipped) == len(text)


def test_an_open_ended_annotation_has_no_schema():
    @dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
    class Loose:
        values: dict[str, int]

    with pytest.raises(InvariantError, match=r"Loose\.values"):
        schema_of(Loose)
