"""Model files of the field that were read wrongly, as tests: see docs/field-cases.md for what happened.

Most are built byte by byte or by the gguf package, none by the product's own constants.
"""

import re
import shutil
import struct
from pathlib import Path

import gguf
import handmade_gguf as made
import numpy as np
import pytest
import torch
from oracle.export import ExportOptions, export_gguf
from oracle.fixtures import TinyCase
from oracle.tiny import tiny_model
from stage_chain import StageChain

from strata_coord.coordinator.ggml_types import GGML_TYPES
from strata_coord.coordinator.gguf_header import read_header
from strata_coord.coordinator.model_index import ModelIndex, load_model_index
from strata_coord.ipc.errors import ModelError

Model = tuple[dict[str, object], dict[str, tuple[int, ...]]]


def refusal(path: Path) -> str:
    """The one line that a file is refused with."""
    with pytest.raises(ModelError) as info:
        load_model_index(path)
    message = str(info.value)
    assert str(path.name) in message
    assert message.isprintable()
    return message


def refused_model(folder: Path, keys: dict[str, object], shapes: dict[str, tuple[int, ...]]) -> str:
    return refusal(made.write_model(folder / "m.gguf", keys, shapes))


def rewritten(source: Path, target: Path, *, alignment: int = 32, big_endian: bool = False) -> Path:
    """The same model, written by the gguf package with another layout."""
    reader = gguf.GGUFReader(source)
    order = gguf.GGUFEndian.BIG if big_endian else gguf.GGUFEndian.LITTLE
    writer = gguf.GGUFWriter(target, "", endianess=order)
    for field in reader.fields.values():
        if field.name.startswith("GGUF."):
            continue
        element = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], element)
    if alignment != 32:
        writer.add_custom_alignment(alignment)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


# --- keys ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["expert_count", "expert_used_count", "block_count"])
def test_fc_066_a_key_without_its_prefix_is_no_key_and_no_zero(tmp_path: Path, key: str) -> None:
    keys, shapes = made.qwen3moe()
    keys[key] = keys.pop(f"qwen3moe.{key}")
    assert f"qwen3moe.{key}: missing" in refused_model(tmp_path, keys, shapes)


def test_fc_066_a_made_up_architecture_is_refused(tmp_path: Path) -> None:
    keys, shapes = made.qwen3moe()
    keys["general.architecture"] = "madeup"
    assert '"madeup" is not supported; supported are' in refused_model(tmp_path, keys, shapes)


def test_fc_042_an_output_matrix_is_not_required_and_ties_are_told(tmp_path: Path) -> None:
    keys, shapes = made.qwen3moe()
    del shapes["output.weight"]
    assert load_model_index(made.write_model(tmp_path / "m.gguf", keys, shapes)).tied


# --- shards --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A model in three shards, written by the gguf package."""
    folder = tmp_path_factory.mktemp("shards")
    return export_gguf(tiny_model("qwen3moe"), folder / "tiny.gguf", ExportOptions(shards=3))


def copied(shards: list[Path], folder: Path) -> list[Path]:
    return [Path(shutil.copy(shard, folder)) for shard in shards]


def test_fc_112_shards_that_were_joined_byte_by_byte_are_refused(shards: list[Path], tmp_path: Path) -> None:
    joined = tmp_path / "joined.gguf"
    joined.write_bytes(b"".join(shard.read_bytes() for shard in shards))
    message = refusal(joined)
    assert 'split.count: 3, but the file is called "joined.gguf", not NAME-00001-of-00003.gguf' in message


def test_fc_113_incomplete_and_mixed_sets_are_refused(shards: list[Path], tmp_path: Path) -> None:
    first, second, third = copied(shards, tmp_path)
    assert load_model_index(first).geometry.num_layers == 3
    assert f"name the first: {first}" in refusal(second)
    with pytest.raises(ModelError, match="not a regular file"):
        load_model_index(tmp_path)
    shutil.copy(second, third)  # two of one number
    with pytest.raises(ModelError, match=re.escape("split.no: 1, expected 2 by the file's name")):
        load_model_index(first)
    other = export_gguf(tiny_model("qwen4exp"), tmp_path / "other.gguf", ExportOptions(shards=3))
    shutil.copy(other[2], third)  # of two models
    with pytest.raises(ModelError, match=r"split\.tensors\.count|is in two shards"):
        load_model_index(first)
    third.unlink()
    with pytest.raises(ModelError, match=re.escape(third.name)):
        load_model_index(first)


@pytest.mark.parametrize("name", ["best-of-breed.gguf", "a-00001-of-00001.gguf", "a-00002-of-00007.gguf"])
def test_fc_114_without_split_keys_a_name_means_nothing(tmp_path: Path, name: str) -> None:
    path = made.write_model(tmp_path / name, *made.qwen3moe())
    assert load_model_index(path).files == (str(path),)


@pytest.mark.parametrize(
    "name", ["a-00000-of-00002.gguf", "a-00003-of-00002.gguf", "a-1-of-2.gguf", "A-00001-OF-00002.GGUF"]
)
def test_fc_114_with_split_keys_only_the_true_pattern_counts(tmp_path: Path, name: str) -> None:
    keys, shapes = made.qwen3moe()
    keys |= {"split.no": 0, "split.count": 2}
    assert re.search(r"split\.(no|count): ", refusal(made.write_model(tmp_path / name, keys, shapes)))


def test_fc_115_links_named_as_shards_work_and_a_renamed_one_says_what_was_looked_for(
    shards: list[Path], tmp_path: Path
) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    for number, shard in enumerate(shards):  # as hub caches lay files out
        blob = blobs / f"{number:064x}"
        shutil.copy(shard, blob)
        (snapshot / shard.name).symlink_to(blob)
    assert len(load_model_index(snapshot / shards[0].name).files) == 3
    renamed = tmp_path / "model.gguf"
    renamed.symlink_to(shards[0])
    assert "NAME-00001-of-00003.gguf" in refusal(renamed)


# --- damage --------------------------------------------------------------------------------------------


def test_fc_116_a_file_cut_short_anywhere_is_refused_before_any_worker(
    tiny_qwen3moe_f32: TinyCase, tmp_path: Path
) -> None:
    data = tiny_qwen3moe_f32.path.read_bytes()
    index = load_model_index(tiny_qwen3moe_f32.path)
    first = min(extent.offset_bytes for extent in index.tensors.values())
    end = max(extent.offset_bytes + extent.num_bytes for extent in index.tensors.values())
    path = tmp_path / "cut.gguf"
    for length in (0, 3, 20, 200, first // 2, first - 1, first, end // 2, end - 1):
        path.write_bytes(data[:length])
        message = refusal(path)
        if length > first:
            assert f"the file has {length}: damaged or not fully downloaded" in message
    path.write_bytes(data[:end])  # without the last padding it is whole
    load_model_index(path)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"<!DOCTYPE html><html>not found</html>", "a web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "a Git LFS pointer"),
        (b"hello world, this is text\n" * 9, "a text file"),
        (b"", "the file has 0 left"),
        (struct.pack("<Q", 64) + b'{"a":{"dtype":"F32"}}' + bytes(99), "a safetensors file"),
        (b"PK\x03\x04" + bytes(200), "a zip archive or PyTorch checkpoint"),
        (bytes(4096), "an unfinished download"),
        (b"\x93\xf0\x01\xff" * 9, "this is not a GGUF file"),
        (made.gguf([], [], version=1), "version: 1, supported are 2 and 3"),
        (made.gguf([], [], version=99), "version: 99, supported are 2 and 3"),
    ],
)
def test_fc_118_the_wrong_content_is_named(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    assert expected in refusal(path)


@pytest.mark.parametrize("name", ["extra.weight", "blk.0.ffn_gate_exps.weight"])
def test_fc_119_a_tensor_without_elements_is_refused_by_name(tmp_path: Path, name: str) -> None:
    keys, shapes = made.qwen3moe()
    shapes[name] = (0, 16, 32)
    message = refused_model(tmp_path, keys, shapes)
    assert f"tensor {name}: dimension 0, the limit is 1 to" in message


def test_fc_120_the_other_byte_order_is_refused_by_its_name(
    tiny_qwen3moe_f32: TinyCase, tmp_path: Path
) -> None:
    path = rewritten(tiny_qwen3moe_f32.path, tmp_path / "big.gguf", big_endian=True)
    assert "a big-endian file" in refusal(path)


def test_fc_121_a_file_of_another_writer_gives_the_numbers_of_the_oracle(
    tiny_qwen3moe_f32: TinyCase, tmp_path: Path
) -> None:
    """The tiny models come from gguf-py; their magic and sizes are not the product's own constants."""
    data = tiny_qwen3moe_f32.path.read_bytes()
    assert data[:8] == b"GGUF\x03\x00\x00\x00"
    with StageChain(tiny_qwen3moe_f32.path) as chain:
        found = chain.prompt_logits(tiny_qwen3moe_f32.ids[:9].tolist(), tmp_path, [9])
    torch.testing.assert_close(found, tiny_qwen3moe_f32.reference.logits[:9], rtol=1e-4, atol=1e-4)


# --- types and shapes ----------------------------------------------------------------------------------


def with_type(source: Path, target: Path, name: str, kind: int) -> Path:
    """A copy in which one tensor claims another type."""
    data = bytearray(source.read_bytes())
    at = data.index(made.string(name)) + 8 + len(name)
    (num_dims,) = struct.unpack_from("<I", data, at)
    struct.pack_into("<I", data, at + 4 + 8 * num_dims, kind)
    target.write_bytes(data)
    return target


@pytest.mark.parametrize("kind", ["Q8_1", "Q8_K", "I8", "I16", "I32"])
def test_fc_123_a_type_that_has_a_size_but_holds_no_weights_is_refused_before_loading(
    tiny_qwen3moe_f32: TinyCase, tmp_path: Path, kind: str
) -> None:
    number = gguf.GGMLQuantizationType[kind]
    path = with_type(tiny_qwen3moe_f32.path, tmp_path / "m.gguf", "blk.0.attn_q.weight", number)
    assert f"tensor blk.0.attn_q.weight: type {kind} is not a type of weights" in refusal(path)


def test_fc_123_the_types_that_are_let_in_are_those_that_can_be_expanded() -> None:
    """Else a worker would find out, after minutes of loading."""
    from strata_coord.coordinator.model_tensors import is_supported_type
    from strata_coord.kernels.dequant import EXPANDERS

    assert {number for number in GGML_TYPES if is_supported_type(number)} == set(EXPANDERS)


@pytest.mark.parametrize(
    "shape", [(3, 16, 32), (5, 16, 32), (4, 32, 16), (16, 32, 4), (4, 8, 32), (4, 16, 64), (64, 32)]
)
@pytest.mark.parametrize("part", ["gate", "up"])
def test_fc_134_expert_tensors_of_another_shape_are_refused_by_name(
    tmp_path: Path, shape: tuple[int, ...], part: str
) -> None:
    keys, shapes = made.qwen3moe()
    name = f"blk.1.ffn_{part}_exps.weight"
    shapes[name] = shape
    message = refused_model(tmp_path, keys, shapes)
    assert f"tensor {name}: shape {list(shape)}, the metadata asks for [4, 16, 32]" in message


def test_fc_135_rows_that_do_not_fill_blocks_are_refused_with_the_rule(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(
        made.gguf(
            [made.auto_key("general.architecture", "qwen3moe")],
            [made.tensor("t", [100, 2], 12, 0)],
            bytes(512),
        )
    )
    assert "rows of 100 values do not fill blocks of 256 (Q4_K)" in refusal(path)


def test_fc_135_sizes_are_those_of_the_real_tensors(
    tiny_qwen3moe_q: TinyCase, tiny_qwen4exp_q: TinyCase
) -> None:
    """Types differ between the parts of an expert: Q4_K and Q8_0 here, by the gguf package's count."""
    for case in (tiny_qwen3moe_q, tiny_qwen4exp_q):
        index = load_model_index(case.path)
        sizes = {tensor.name: int(tensor.n_bytes) for tensor in gguf.GGUFReader(case.path).tensors}
        for layer in range(index.geometry.num_layers):
            parts = [size for name, size in sizes.items() if name.startswith(f"blk.{layer}.ffn_")]
            experts = [size for name, size in sizes.items() if re.match(rf"blk\.{layer}\..*_exps\.", name)]
            assert index.expert_blob_bytes(layer) * index.geometry.experts.num_experts == sum(experts)
            assert sum(parts) > sum(experts)
        assert sum(tensor.num_bytes for tensor in index.tensors.values()) == sum(sizes.values())


def test_fc_136_fused_and_single_expert_tensors_give_the_same_numbers(
    tiny_qwen3moe_f32: TinyCase, tmp_path: Path
) -> None:
    ids = tiny_qwen3moe_f32.ids[:12].tolist()
    fused = export_gguf(tiny_model("qwen3moe"), tmp_path / "fused.gguf", ExportOptions(fused_gate_up=True))
    with StageChain(fused[0]) as chain:
        found = chain.prompt_logits(ids, tmp_path, [12])
    torch.testing.assert_close(found, tiny_qwen3moe_f32.reference.logits[:12], rtol=1e-4, atol=1e-4)


def test_fc_136_a_mixture_of_both_forms_and_unknown_extras_are_refused(tmp_path: Path) -> None:
    keys, shapes = made.qwen3moe()
    extra = shapes | {"blk.0.ffn_gate_up_exps.weight": (4, 32, 32)}
    assert "1 that this architecture does not have: blk.0.ffn_gate_up_exps.weight" in refused_model(
        tmp_path, keys, extra
    )
    del shapes["blk.0.ffn_up_exps.weight"]
    assert "1 missing: blk.0.ffn_up_exps.weight" in refused_model(tmp_path, keys, shapes)


# --- alignment -----------------------------------------------------------------------------------------


def test_fc_130_an_alignment_of_64_moves_every_tensor_and_changes_no_number(
    tiny_qwen3moe_f32: TinyCase, tmp_path: Path
) -> None:
    path = rewritten(tiny_qwen3moe_f32.path, tmp_path / "m.gguf", alignment=64)
    assert all(extent.offset_bytes % 64 == 0 for extent in index_of(path).tensors.values())
    ids = tiny_qwen3moe_f32.ids[:9].tolist()
    logits = []
    for file in (tiny_qwen3moe_f32.path, path):
        with StageChain(file) as chain:
            logits.append(chain.prompt_logits(ids, tmp_path, [9]))
    assert torch.equal(*logits)


@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        (made.U32, made.scalar(made.U32, 0)),
        (made.U32, made.scalar(made.U32, 3)),
        (made.U32, made.scalar(made.U32, 1 << 31)),
        (made.I32, made.scalar(made.I32, -32)),
        (made.STRING, made.string("32")),
        (made.F32, made.scalar(made.F32, 32.0)),
    ],
)
def test_fc_130_an_alignment_that_is_none_is_refused(tmp_path: Path, kind: int, payload: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(made.gguf([made.key("general.alignment", kind, payload)], []))
    assert "general.alignment" in refusal(path)


@pytest.mark.parametrize("second", ["qwen3moe", "qwen4exp"])
def test_fc_132_a_repeated_key_is_one_line(tmp_path: Path, second: str) -> None:
    path = tmp_path / "m.gguf"
    keys = [made.auto_key("general.architecture", name) for name in ("qwen3moe", second)]
    path.write_bytes(made.gguf(keys, []))
    assert "general.architecture: key 1 of 2 repeats it" in refusal(path)


def index_of(path: Path) -> ModelIndex:
    assert read_header(path).files == (str(path),)
    return load_model_index(path)
