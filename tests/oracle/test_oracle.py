"""The oracle itself: each file holds exactly the weights of its transformers model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import gguf
import numpy as np
import pytest
import torch
from oracle.clear_ids import END_OF_TEXT_POSITIONS, SMALLEST_GAP
from oracle.export import ExportOptions, export_gguf, tensor_links
from oracle.fixtures import TINY_FIXTURES, TinyCase
from oracle.links import tiled_heads
from oracle.reference import reference, reference_logits
from oracle.tiny import TinyOptions, tiny_model
from oracle.vocabulary import tiny_vocabulary

if TYPE_CHECKING:
    from pathlib import Path


def _values(files: list[Path]) -> dict[str, np.ndarray]:
    values = {}
    for file in files:
        for tensor in gguf.GGUFReader(file).tensors:
            shape = tuple(int(size) for size in reversed(tensor.shape))
            values[tensor.name] = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(shape)
    return values


def _assert_file_equals_model(files: list[Path], model: torch.nn.Module, options: ExportOptions) -> None:
    expected = tensor_links(model, options)
    found = _values(files)
    assert set(found) - set(expected) == {name for name in found if ".nextn." in name}
    for name, value in expected.items():
        assert np.array_equal(found[name], value.numpy()), name


@pytest.fixture(params=TINY_FIXTURES)
def case(request: pytest.FixtureRequest) -> TinyCase:
    return request.getfixturevalue(request.param)


def test_file_holds_the_weights_of_the_model(case: TinyCase) -> None:
    _assert_file_equals_model([case.path], case.model, ExportOptions())


def test_prompt_has_no_near_tie_and_logits_are_sane(case: TinyCase) -> None:
    assert float(case.reference.gap.min()) >= SMALLEST_GAP / 2
    assert 0.5 < float(case.reference.logits.std()) < 2.5
    assert [int(at) for at in (case.ids == tiny_vocabulary().end_of_text).nonzero()] == list(
        END_OF_TEXT_POSITIONS
    )


def test_quantised_file_uses_the_types_of_real_files(tiny_qwen4exp_q: TinyCase) -> None:
    types = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(tiny_qwen4exp_q.path).tensors}
    assert types["blk.0.ffn_gate_exps.weight"] == "Q4_K"
    assert types["blk.0.ffn_down_exps.weight"] == "Q8_0"
    assert types["blk.3.attn_k.weight"] == "F16"
    assert types["blk.3.indexer.q_proj.weight"] == "BF16"
    assert types["blk.0.ffn_gate_inp.weight"] == types["blk.0.ssm_a"] == "F32"


def test_random_blocks_keep_the_standard_deviation(
    tiny_qwen3moe_f32: TinyCase, tiny_qwen3moe_q: TinyCase
) -> None:
    name = "blk.1.ffn_gate_exps.weight"
    plain, blocks = (tensor_links(case.model)[name] for case in (tiny_qwen3moe_f32, tiny_qwen3moe_q))
    assert float(blocks.std()) == pytest.approx(float(plain.std()), rel=0.05)
    assert abs(float(blocks.mean())) < 0.05 * float(blocks.std())


@pytest.mark.parametrize("empty_first", [False, True])
def test_shards_cut_a_layer(tmp_path: Path, *, empty_first: bool) -> None:
    model = tiny_model("qwen3moe")
    options = ExportOptions(shards=3, empty_first_shard=empty_first)
    files = export_gguf(model, tmp_path / "m.gguf", options)
    assert [file.name for file in files] == [f"m-0000{index}-of-00003.gguf" for index in (1, 2, 3)]
    _assert_file_equals_model(files, model, options)
    names = [{tensor.name for tensor in gguf.GGUFReader(file).tensors} for file in files]
    layers = [{name.split(".")[1] for name in shard if name.startswith("blk.")} for shard in names]
    assert layers[1] & layers[2]
    assert empty_first == (not names[0])
    counts = [gguf.GGUFReader(file).fields["split.count"].contents() for file in files]
    assert counts == [3, 3, 3]


@pytest.mark.parametrize(
    ("tiny", "export"),
    [
        (TinyOptions(num_layers=4, tied_output=True), ExportOptions(recipe="quantised")),
        (TinyOptions(num_layers=4, dense_attention_layers=(3,)), ExportOptions(recurrent_layers=True)),
        (TinyOptions(num_layers=4, expert_widths=(64, 32, 64, 32)), ExportOptions(recipe="quantised")),
        (TinyOptions(num_layers=4), ExportOptions(recipe="quantised", fused_gate_up=True)),
        (TinyOptions(num_layers=4), ExportOptions(expert_width_array=True, nextn_layers=1)),
    ],
)
def test_other_forms_hold_the_weights_of_the_model(
    tmp_path: Path, tiny: TinyOptions, export: ExportOptions
) -> None:
    model = tiny_model("qwen4exp", tiny)
    files = export_gguf(model, tmp_path / "m.gguf", export)
    _assert_file_equals_model(files, model, export)
    names = set(_values(files))
    assert ("output.weight" in names) != tiny.tied_output
    assert ("blk.0.ffn_gate_up_exps.weight" in names) == export.fused_gate_up
    assert ("blk.3.indexer.q_proj.weight" in names) == (tiny.dense_attention_layers == ())
    fields = gguf.GGUFReader(files[0]).fields
    assert fields["qwen4exp.block_count"].contents() == 4 + export.nextn_layers
    widths = fields["qwen4exp.expert_feed_forward_length"].contents()
    assert isinstance(widths, list) == (export.expert_width_array or tiny.expert_widths is not None)
    assert reference_logits(model, [1, 2, 3]).isfinite().all()


def test_ple_keys_are_exact_unsigned_64_bit(tiny_qwen4exp_f32: TinyCase) -> None:
    fields = gguf.GGUFReader(tiny_qwen4exp_f32.path).fields
    table = tiny_qwen4exp_f32.model.model.layers[1].ple.ple_embedding
    assert fields["qwen4exp.ple.layer_multipliers"].contents() == table.layer_multipliers.tolist()
    assert max(table.layer_multipliers.tolist()) > 2**53
    assert fields["qwen4exp.ple.layer_multipliers"].types[-1] == gguf.GGUFValueType.UINT64
    assert fields["qwen4exp.ple.layers"].contents() == [1]


def test_tiled_heads_put_neighbours_on_different_key_heads() -> None:
    order = tiled_heads(2, 6).tolist()
    assert sorted(order) == list(range(6))
    assert [head // 3 for head in order] == [tiled % 2 for tiled in range(6)]


def test_the_selection_of_the_small_budget_changes_the_logits(tiny_qwen4exp_f32: TinyCase) -> None:
    ids = tiny_qwen4exp_f32.ids[:40]
    sparse = reference(tiny_qwen4exp_f32.model, ids)
    dense = reference_logits(tiny_model("qwen4exp", TinyOptions(indexer_budget=64)), ids)
    # Up to position budget + ratio - 2 every block is visible.
    assert torch.allclose(sparse.logits[:19], dense[:19], atol=1e-5)
    assert (sparse.logits[19:] - dense[19:]).abs().max() > 1e-2
    assert sparse.block_gap[:19].isinf().all()
    assert sparse.block_gap[19:].isfinite().all()


def test_models_are_the_same_for_a_seed_and_differ_between_seeds() -> None:
    same = [tiny_model("qwen3moe", TinyOptions(num_layers=1, seed=seed)).lm_head.weight for seed in (3, 3, 4)]
    assert torch.equal(same[0], same[1])
    assert not torch.equal(same[0], same[2])
