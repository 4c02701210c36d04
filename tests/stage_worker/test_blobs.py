from dataclasses import replace
from pathlib import Path

import pytest
from stage_files import F32, Q8_0, ExpertFile

from strata_coord.ipc.assignment import TensorExtent
from strata_coord.ipc.errors import ModelError
from strata_coord.stage_worker.blobs import BLOB_ALIGNMENT_BYTES, aligned, expert_blob_layout


@pytest.mark.parametrize("fused", [False, True])
def test_a_blob_is_the_parts_one_after_the_other(tmp_path: Path, fused: bool) -> None:
    experts = ExpertFile(tmp_path / "experts.bin", fused=fused)
    whole = (tmp_path / "experts.bin").read_bytes()
    for layout in experts.layouts():
        for expert in range(6):
            blob = bytearray(layout.num_bytes)
            for part in layout.parts:
                file, offset = part.file_place(expert)
                assert file == 0
                blob[part.offset_bytes : part.offset_bytes + part.num_bytes] = whole[
                    offset : offset + part.num_bytes
                ]
            assert blob == experts.blob(layout.layer, expert)


def test_neighbours_of_one_type_expand_together(tmp_path: Path) -> None:
    all_q8, down_f32 = ExpertFile(tmp_path / "experts.bin").layouts()
    assert [(run.ggml_type, len(run.parts)) for run in all_q8.runs] == [(Q8_0, 3)]
    assert [(run.ggml_type, len(run.parts)) for run in down_f32.runs] == [(Q8_0, 2), (F32, 1)]
    for layout in (all_q8, down_f32):
        assert [run.offset_bytes for run in layout.runs] == [run.parts[0].offset_bytes for run in layout.runs]
        assert sum(run.num_bytes for run in layout.runs) == layout.num_bytes
        assert sum(run.num_elements for run in layout.runs) == 3 * 32 * 64


def single(part: str, expert: int) -> TensorExtent:
    shape = (64, 32) if part == "ffn_down" else (32, 64)
    return TensorExtent(
        name=f"blk.0.{part}.{expert}.weight",
        file=expert % 2,
        offset_bytes=10_000 * expert + (0 if part == "ffn_gate" else 5_000),
        num_bytes=32 * 64 * 4,
        ggml_type=F32,
        shape=shape,
    )


def test_a_tensor_for_each_expert_may_lie_anywhere() -> None:
    extents = [single(part, expert) for part in ("ffn_gate", "ffn_up", "ffn_down") for expert in range(4)]
    layout = expert_blob_layout(0, {extent.name: extent for extent in extents}, num_experts=4)
    assert layout.num_bytes == 3 * 32 * 64 * 4
    assert layout.parts[0].file_place(3) == (1, 30_000)
    assert layout.parts[2].file_place(2) == (0, 25_000)
    assert (layout.parts[2].out_features, layout.parts[2].in_features) == (64, 32)


def test_single_experts_that_differ_are_refused() -> None:
    extents = [single(part, expert) for part in ("ffn_gate", "ffn_up", "ffn_down") for expert in range(4)]
    extents[2] = replace(extents[2], ggml_type=Q8_0)
    with pytest.raises(ModelError, match=r"blk\.0\.ffn_gate\.2\.weight and .* differ in type or shape"):
        expert_blob_layout(0, {extent.name: extent for extent in extents}, num_experts=4)


@pytest.mark.parametrize("missing", ["ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"])
def test_a_missing_part_is_refused(tmp_path: Path, missing: str) -> None:
    experts = ExpertFile(tmp_path / "experts.bin")
    del experts.extents[f"blk.1.{missing}.weight"]
    with pytest.raises(ModelError, match="layer 1: the experts' gate, up and down tensors are not all there"):
        experts.layouts()


def test_a_layer_without_experts_has_an_empty_blob() -> None:
    layout = expert_blob_layout(3, {}, num_experts=0)
    assert (layout.num_bytes, layout.parts, layout.runs) == (0, (), ())


def test_alignment_rounds_up() -> None:
    sizes = (0, 1, BLOB_ALIGNMENT_BYTES, BLOB_ALIGNMENT_BYTES + 1)
    assert [aligned(size) for size in sizes] == [
        0,
        BLOB_ALIGNMENT_BYTES,
        BLOB_ALIGNMENT_BYTES,
        2 * BLOB_ALIGNMENT_BYTES,
    ]
