"""llama, glm4moe and gpt-oss against transformers: whole and cut prompts, stages, forms of files."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from oracle.clear_ids import find_clear_ids
from oracle.export import ExportOptions, export_gguf
from oracle.reference import reference_logits
from oracle.tiny import TinyOptions, tiny_model
from stage_chain import StageChain, Tiers

from strata_coord.coordinator.model_index import load_model_index
from strata_coord.ipc.errors import ModelError
from strata_coord.stage_worker.blobs import expert_blob_layout

BARS = {"f32": 1e-5, "quantised": 5e-5}

Q = ExportOptions(recipe="quantised")
CASES: dict[str, tuple[str, TinyOptions, ExportOptions]] = {
    f"{architecture} {recipe}": (architecture, TinyOptions(), ExportOptions(recipe=recipe))
    for architecture in ("llama", "glm4moe", "gpt-oss")
    for recipe in ("f32", "quantised")
} | {
    "llama, an expert a tensor": ("llama", TinyOptions(), ExportOptions(single_experts=True, shards=3)),
    "llama, tied": ("llama", TinyOptions(tied_output=True), Q),
    "glm4moe, no head norms, no biases": (
        "glm4moe",
        TinyOptions(config={"use_qk_norm": False, "attention_bias": False}),
        Q,
    ),
    "glm4moe, groups, not renormalised": (
        "glm4moe",
        TinyOptions(config={"n_group": 4, "topk_group": 2, "norm_topk_prob": False}),
        ExportOptions(),
    ),
    "glm4moe, two layers without experts, MTP block": (
        "glm4moe",
        TinyOptions(config={"first_k_dense_replace": 2, "n_shared_experts": 1}),
        ExportOptions(nextn_layers=1),
    ),
    "glm4moe, experts everywhere": (
        "glm4moe",
        TinyOptions(config={"first_k_dense_replace": 0}),
        ExportOptions(),
    ),
    "gpt-oss, plain rotations": (
        "gpt-oss",
        TinyOptions(config={"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
        ExportOptions(),
    ),
}


def assert_same_logits(found: torch.Tensor, expected: torch.Tensor, bar: float) -> None:
    error = (found.double() - expected.double()).norm(dim=1) / expected.double().norm(dim=1)
    worst = int(error.argmax())
    assert float(error[worst]) <= bar, f"position {worst} differs by {float(error[worst]):.2e}"
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    architecture, tiny, export = CASES[case]
    model = tiny_model(architecture, tiny)
    files = export_gguf(model, tmp_path / "model.gguf", export)
    ids = find_clear_ids(model, num_tokens=60)
    expected = reference_logits(model, ids)
    for boundaries, cuts, upload in (
        ((), [60], "stream-all"),
        ((1,), [16, 7, 37], "routed-only"),
        ((1, 2), [33, 1, 1, 25], "stream-all"),
    ):
        with StageChain(
            files[0], boundaries=boundaries, sub_chunk_tokens=16, tiers=Tiers(resident=3, arena=5)
        ) as chain:
            found = chain.prompt_logits(ids.tolist(), tmp_path, cuts, upload=upload)
            assert chain.is_at_rest
        assert_same_logits(found, expected, BARS[export.recipe])


def test_layers_without_experts_upload_nothing_and_count_no_rows(tmp_path: Path) -> None:
    model = tiny_model("glm4moe", TinyOptions(config={"first_k_dense_replace": 2}))
    files = export_gguf(model, tmp_path / "model.gguf")
    with StageChain(files[0], boundaries=(2,), tiers=Tiers(arena=0, window_slots=1)) as chain:
        loaded = [stage.counters.snapshot().file_read for stage in chain.stages]
        chain.prompt_logits(list(range(40)), tmp_path, [24, 16])
        read = [
            stage.counters.snapshot().file_read - before
            for stage, before in zip(chain.stages, loaded, strict=True)
        ]
        assert read == [0, 2 * 16 * chain.index.expert_blob_bytes(2)]
        assert [sum(counts) for _, counts in chain.logs[0].done] == [0, 0, 0, 0]
        assert [sum(counts) for _, counts in chain.logs[1].done] == [4 * 24, 4 * 16]


def test_windows_and_clamps_bind_in_the_tiny_model() -> None:
    """Else the cases above would hold without them."""
    ids = torch.arange(40)
    plain = reference_logits(tiny_model("gpt-oss"), ids)
    for change in ({"sliding_window": 1000}, {"swiglu_limit": 1000.0}):
        without = reference_logits(tiny_model("gpt-oss", TinyOptions(config=change)), ids)
        assert (plain - without).abs().max() > 1e-2, change


def test_single_experts_of_different_types_are_refused(tmp_path: Path) -> None:
    export_gguf(tiny_model("llama"), tmp_path / "model.gguf", ExportOptions(single_experts=True))
    tensors = dict(load_model_index(tmp_path / "model.gguf").tensors)
    name = "blk.0.ffn_up.3.weight"
    tensors[name] = replace(tensors[name], ggml_type=8)
    with pytest.raises(
        ModelError, match=r"layer 0: blk\.0\.ffn_up\.3\.weight and .* differ in type or shape"
    ):
        expert_blob_layout(0, tensors, num_experts=16)
