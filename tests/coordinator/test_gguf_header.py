import os
import random
import re
import struct
import time
import tracemalloc
from pathlib import Path

import handmade_gguf as made
import numpy as np
import pytest
from gguf import GGUFWriter
from handmade_gguf import ARRAY, BOOL, F32, STRING, U8, U32, U64, array, gguf, key, scalar, string, tensor
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_coord.coordinator.gguf_header import parse_header, read_header
from strata_coord.ipc.errors import ModelError

ARCH = key("general.architecture", STRING, string("qwen3moe"))
# Two F32 tensors: 4 x 8 values at 0, 8 values at 128.
TENSORS = [tensor("a.weight", [8, 4], 0, 0), tensor("b.weight", [8], 0, 128)]
VALID = gguf(
    [
        ARCH,
        key("x.flags", ARRAY, array(BOOL, [True, False])),
        key("x.words", ARRAY, array(STRING, ["one", "", "drei"])),
        key("x.big", ARRAY, array(U64, [(1 << 64) - 1, 0])),
        key("x.real", F32, scalar(F32, 0.5)),
    ],
    TENSORS,
    bytes(160),
)


def parse(data: bytes):
    return parse_header(lambda count, at: data[at : at + count], len(data), "m.gguf")


def refusal(data: bytes) -> str:
    """The one-line message; the refusal must come fast and without large allocations."""
    tracemalloc.start()
    start = time.perf_counter()
    try:
        with pytest.raises(ModelError) as info:
            parse(data)
        elapsed, peak = time.perf_counter() - start, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64 << 20
    assert elapsed < 0.5  # the bound of one file is 50 ms; tracing and other processes slow it down
    message = str(info.value)
    assert message.startswith("m.gguf: ")
    assert "\n" not in message
    return message


# --- what is read -------------------------------------------------------------------------------------


def test_values_and_extents_of_a_valid_file_are_read() -> None:
    metadata, tensors = parse(VALID)
    assert metadata["general.architecture"] == "qwen3moe"
    assert list(metadata["x.flags"]) == [1, 0]
    assert list(metadata["x.words"]) == ["one", "", "drei"]
    assert metadata.integers("x.big", low=0, high=(1 << 64) - 1) == ((1 << 64) - 1, 0)
    assert metadata["x.real"] == 0.5
    start = len(VALID) - 160
    assert [(t.name, t.shape, t.offset_bytes, t.num_bytes) for t in tensors] == [
        ("a.weight", (4, 8), start, 128),
        ("b.weight", (8,), start + 128, 32),
    ]


def test_a_file_of_the_gguf_package_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = GGUFWriter(path, "qwen3moe")
    writer.add_uint32("qwen3moe.block_count", 7)
    writer.add_float32("qwen3moe.eps", 0.25)
    writer.add_bool("qwen3moe.yes", True)
    writer.add_array("words", ["a", "東京", "🙂"])
    writer.add_array("numbers", [-1, 2])
    writer.add_custom_alignment(64)
    values = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    writer.add_tensor("t.weight", values)
    writer.add_tensor("q.weight", np.arange(36, dtype=np.uint8).reshape(2, 18), raw_dtype=2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header = read_header(path)
    assert header.files == (str(path),)
    assert header.metadata["qwen3moe.block_count"] == 7
    assert header.metadata["qwen3moe.yes"] is True
    assert header.metadata.strings("words") == ["a", "東京", "🙂"]
    assert header.metadata.integers("numbers", low=-5, high=5) == (-1, 2)
    t, q = header.tensors
    data = path.read_bytes()
    assert t.shape == (2, 3, 4)
    assert t.offset_bytes % 64 == 0
    assert data[t.offset_bytes : t.offset_bytes + t.num_bytes] == values.tobytes()
    assert (q.shape, q.num_bytes, q.ggml_type) == ((2, 32), 36, 2)


def test_version_2_is_read_and_others_are_refused() -> None:
    parse(gguf([ARCH], [], version=2))
    assert "version: 1, supported are 2 and 3" in refusal(gguf([ARCH], [], version=1))
    assert "big-endian" in refusal(gguf([ARCH], [], version=3 << 24))


def test_type_42_is_known() -> None:
    _, tensors = parse(gguf([ARCH], [tensor("t", [128], 42, 0)], bytes(36)))
    assert tensors[0].num_bytes == 36


def test_a_large_vocabulary_is_scanned_in_milliseconds(tmp_path: Path) -> None:
    words = b"".join(struct.pack("<Q", 8) + b"%08d" % number for number in range(250_000))
    block = struct.pack("<IQ", STRING, 250_000) + words
    path = tmp_path / "v.gguf"
    path.write_bytes(gguf([ARCH, key("tokens", ARRAY, block), key("merges", ARRAY, block)], []))
    start = time.perf_counter()
    header = read_header(path)
    elapsed = time.perf_counter() - start
    assert header.metadata["tokens"][249_999] == "00249999"
    assert elapsed < 2.0  # 0.1 s on an idle core; gguf's own reader needs tens of seconds


# --- hostile files, each named for what once went wrong somewhere ------------------------------------


def test_the_51_byte_file_that_hangs_gguf_py_is_refused() -> None:
    data = gguf([string("a" * 3) + struct.pack("<IIQ", ARRAY, U8, 1 << 40)], [])
    assert len(data) == 51
    assert f"aaa: array of {1 << 40} elements" in refusal(data)


def test_an_array_of_many_elements_within_the_limit_but_past_the_end_is_refused() -> None:
    message = refusal(gguf([string("aaa") + struct.pack("<IIQ", ARRAY, U64, 1 << 24)], []))
    assert f"needs {8 << 24} bytes, 0 are left" in message


def test_an_offset_that_wraps_to_the_header_is_refused() -> None:
    data = gguf([ARCH], [tensor("t", [8], 0, (1 << 64) - 32)], bytes(32))
    assert "ends at byte" in refusal(data)


def test_n_dims_of_2_to_the_32_minus_1_is_refused() -> None:
    message = refusal(gguf([ARCH], [tensor("t", [8], 0, 0, num_dims=(1 << 32) - 1)], bytes(32)))
    assert "n_dims 4294967295, the limit is 1 to 4" in message


@pytest.mark.parametrize("num_dims", [0, 5])
def test_a_tensor_has_one_to_four_dims(num_dims: int) -> None:
    assert "the limit is 1 to 4" in refusal(gguf([ARCH], [tensor("t", [8] * num_dims, 0, 0)], bytes(32)))


def test_nested_arrays_are_refused() -> None:
    inner = struct.pack("<IQ", ARRAY, 1) + array(U32, [1])
    assert "array of arrays" in refusal(gguf([key("x", ARRAY, inner)], []))


@pytest.mark.parametrize("dims", [[1 << 32, 1 << 32], [1 << 39, 1 << 39, 1 << 39, 1 << 39], [1 << 20] * 4])
def test_products_that_overflow_64_bits_are_refused(dims: list[int]) -> None:
    assert "elements, the limit is" in refusal(gguf([ARCH], [tensor("t", dims, 0, 0)], bytes(32)))


@pytest.mark.parametrize("dim", [0, 1 << 40, (1 << 64) - 1])
def test_a_dimension_out_of_range_is_refused(dim: int) -> None:
    assert f"dimension {dim}, the limit is" in refusal(gguf([ARCH], [tensor("t", [dim, 1], 0, 0)], bytes(32)))


@pytest.mark.parametrize("count", [65_537, 1 << 63])
def test_more_keys_than_the_limit_are_refused(count: int) -> None:
    assert f"n_kv: {count}" in refusal(gguf([ARCH], [], num_keys=count))


def test_counts_that_the_file_cannot_hold_are_refused() -> None:
    assert "n_kv: 60000 needs at least" in refusal(gguf([ARCH], [], num_keys=60_000))
    assert "n_tensors: 131072 needs at least" in refusal(gguf([ARCH], [], num_tensors=131_072))
    assert "n_tensors: 131073, the limit is 131072" in refusal(gguf([ARCH], [], num_tensors=131_073))


def test_a_tensor_larger_than_the_file_is_refused() -> None:
    data = gguf([ARCH], [tensor("t", [1 << 30], 0, 0)], bytes(32))
    assert "damaged or not fully downloaded" in refusal(data)


def test_overlapping_tensors_are_refused() -> None:
    data = gguf([ARCH], [tensor("a", [16], 0, 0), tensor("b", [16], 0, 32)], bytes(128))
    assert "inside a which ends at" in refusal(data)


def test_duplicate_keys_and_names_are_refused() -> None:
    assert "general.architecture: key 1 of 2 repeats it" in refusal(gguf([ARCH, ARCH], []))
    data = gguf([ARCH], [tensor("a", [8], 0, 0), tensor("a", [8], 0, 32)], bytes(64))
    assert "its name occurs twice" in refusal(data)


@pytest.mark.parametrize("name", [b"", b"\xc3\xa9", b"k" * 257, b"\xff"])
def test_keys_are_short_ascii_and_not_empty(name: bytes) -> None:
    refusal(gguf([key(name, U8, b"\0")], []))


def test_long_and_empty_tensor_names_are_refused() -> None:
    assert "129 bytes, the limit is 128" in refusal(gguf([ARCH], [tensor("n" * 129, [8], 0, 0)], bytes(32)))
    assert "its name is empty" in refusal(gguf([ARCH], [tensor("", [8], 0, 0)], bytes(32)))


def test_a_string_of_more_than_16_mib_is_refused() -> None:
    data = gguf([string("x") + struct.pack("<IQ", STRING, (16 << 20) + 1)], [])
    assert "the limit is 16777216" in refusal(data)
    inside = struct.pack("<IQ", STRING, 1) + struct.pack("<Q", 1 << 62)
    assert "x[0]: string of" in refusal(gguf([key("x", ARRAY, inside)], []))


def test_unknown_types_of_values_elements_and_tensors_are_refused() -> None:
    assert "value type 13" in refusal(gguf([key("x", 13, b"\0" * 8)], []))
    assert "array element type 77" in refusal(gguf([key("x", ARRAY, struct.pack("<IQ", 77, 0))], []))
    assert "type 4 is unknown" in refusal(gguf([ARCH], [tensor("t", [32], 4, 0)], bytes(32)))


def test_a_boolean_is_zero_or_one() -> None:
    assert "boolean with value 2" in refusal(gguf([key("x", BOOL, b"\2")], []))
    assert "booleans holds 255" in refusal(gguf([key("x", ARRAY, array(BOOL, [0, 255]))], []))


def test_rows_fill_whole_blocks() -> None:
    message = refusal(gguf([ARCH], [tensor("t", [640, 2], 12, 0)], bytes(2048)))
    assert "rows of 640 values do not fill blocks of 256 (Q4_K)" in message


@pytest.mark.parametrize(
    ("kind", "value"), [(U32, 0), (U32, 24), (U32, 1 << 31), (U64, 1 << 63), (STRING, "32")]
)
def test_the_alignment_is_a_power_of_two_from_8_to_65536(kind: int, value: int | str) -> None:
    payload = string(value) if isinstance(value, str) else scalar(kind, value)
    assert "general.alignment" in refusal(gguf([key("general.alignment", kind, payload)], []))


def test_offsets_are_multiples_of_the_alignment() -> None:
    assert "not a multiple of the alignment" in refusal(gguf([ARCH], [tensor("t", [8], 0, 8)], bytes(64)))


def test_a_file_cut_at_any_byte_is_refused() -> None:
    for length in range(len(VALID)):
        with pytest.raises(ModelError):
            parse(VALID[:length])


def test_strings_that_are_not_utf8_are_refused_when_they_are_asked_for() -> None:
    assert "x: not UTF-8 at byte 1" in refusal(gguf([key("x", STRING, string(b"a\xff"))], []))
    metadata, _ = parse(gguf([key("x", ARRAY, array(STRING, [b"fine", b"\xc3"]))], []))
    with pytest.raises(ModelError, match=re.escape("m.gguf: x[1]: not UTF-8")):
        metadata.strings("x")


def test_control_characters_never_reach_a_message() -> None:
    message = refusal(gguf([ARCH], [tensor("\x1b[2J\u202eevil", [8], 99, 0)], bytes(32)))
    assert message.isprintable()
    assert "\\x1b[2J\\u202eevil" in message


MUTATION = st.tuples(
    st.integers(0, len(VALID) - 1), st.one_of(st.integers(0, 255), st.sampled_from([0xFF, 0x7F, 0]))
)


@settings(max_examples=600, deadline=None)
@given(st.lists(MUTATION, min_size=1, max_size=4), st.integers(0, len(VALID)))
def test_a_mutated_file_is_read_or_refused_and_never_leaves_the_file(
    changes: list[tuple[int, int]], cut: int
) -> None:
    data = bytearray(VALID)
    for at, value in changes:
        data[at] = value
    del data[max(cut, len(VALID) // 2) :]
    check_one(bytes(data))


def test_random_64_bit_words_anywhere_are_read_or_refused_fast() -> None:
    rng = random.Random(20)
    words = [
        0,
        1,
        1 << 31,
        (1 << 32) - 1,
        1 << 40,
        1 << 62,
        (1 << 63) - 1,
        1 << 63,
        (1 << 64) - 1,
        (1 << 64) - 32,
    ]
    start = time.perf_counter()
    for _ in range(3_000):
        data = bytearray(VALID)
        at = rng.randrange(len(data) - 8)
        data[at : at + 8] = struct.pack("<Q", rng.choice(words))
        check_one(bytes(data))
    assert time.perf_counter() - start < 15


def check_one(data: bytes) -> None:
    message, tensors = "", ()
    try:
        _, tensors = parse(data)
    except ModelError as error:
        message = str(error)
    assert message.isprintable()
    for extent in tensors:
        assert extent.offset_bytes >= 0
        assert extent.offset_bytes + extent.num_bytes <= len(data)


# --- files and shards -----------------------------------------------------------------------------------


def test_what_is_not_a_readable_file_is_refused_without_waiting(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be opened: No such file"):
        read_header(tmp_path / "none.gguf")
    with pytest.raises(ModelError, match="not a regular file"):
        read_header(tmp_path)
    pipe = tmp_path / "pipe.gguf"
    os.mkfifo(pipe)
    with pytest.raises(ModelError, match="not a regular file"):
        read_header(pipe)
    empty = tmp_path / "empty.gguf"
    empty.write_bytes(b"")
    with pytest.raises(ModelError, match="magic: needs 4 bytes at offset 0, the file has 0 left"):
        read_header(empty)
    text = tmp_path / "text.gguf"
    text.write_text("hello world")
    with pytest.raises(ModelError, match="this is not a GGUF file"):
        read_header(text)


def write_shards(folder: Path, count: int = 3, **changes: object) -> list[Path]:
    """Write shards: the first without tensors, each other one with one tensor."""
    paths = []
    for number in range(count):
        keys = {
            "split.no": number,
            "split.count": count,
            "split.tensors.count": count - 1,
        }
        if number == 0:
            keys = {"general.architecture": "qwen3moe"} | keys
        keys |= changes.get(f"shard{number}", {})
        path = folder / f"m-{number + 1:05d}-of-{count:05d}.gguf"
        made.write_model(path, keys, {f"t{number}.weight": (2, 8)} if number else {})
        paths.append(path)
    return paths


def test_the_first_shard_finds_the_others(tmp_path: Path) -> None:
    paths = write_shards(tmp_path)
    header = read_header(paths[0])
    assert header.files == tuple(map(str, paths))
    assert [(t.name, t.file) for t in header.tensors] == [("t1.weight", 1), ("t2.weight", 2)]
    assert header.metadata.path == str(paths[0])


def test_another_shard_says_which_is_the_first(tmp_path: Path) -> None:
    paths = write_shards(tmp_path)
    with pytest.raises(ModelError, match=re.escape(f"this is shard 2 of 3, name the first: {paths[0]}")):
        read_header(paths[1])


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    paths = write_shards(tmp_path)
    paths[2].unlink()
    with pytest.raises(ModelError, match=re.escape(str(paths[2]))):
        read_header(paths[0])


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"shard0": {"split.tensors.count": 5}}, "split.tensors.count: 5, the 3 shards hold 2"),
        ({"shard1": {"split.no": 2}}, "split.no: 2, expected 1"),
        ({"shard2": {"split.count": 4}}, "split.count: 4, the first shard says 3"),
        ({"shard0": {"split.count": 2}}, "split.count: 2, but the file is called"),
        ({"shard0": {"split.count": 100_000}}, "split.count: 100000 is outside 0 to 1024"),
    ],
)
def test_shards_that_contradict_each_other_are_refused(tmp_path: Path, changes: dict, expected: str) -> None:
    paths = write_shards(tmp_path, **changes)
    with pytest.raises(ModelError, match=re.escape(expected)):
        read_header(paths[0])


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    paths = write_shards(tmp_path)
    renamed = paths[1].read_bytes().replace(b"t1.weight", b"t2.weight")
    paths[1].write_bytes(renamed)
    with pytest.raises(ModelError, match="is in two shards"):
        read_header(paths[0])


def test_a_file_that_shrinks_while_it_is_read_is_refused() -> None:
    shown = len(VALID)
    with pytest.raises(ModelError, match="the file ended at"):
        parse_header(lambda count, at: VALID[:100][at : at + count], shown, "m.gguf")
