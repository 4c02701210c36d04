"""llama, glm4moe and gpt-oss against transformers: whole and cut prompts, stages, forms of files."""

from pathlib import Path

import pytest
import torch
from oracle.clear_ids import find_clear_ids
from oracle.export import ExportOptions, export_gguf
from oracle.reference import reference_logits
from oracle.tiny import TinyOptions, tiny_model
from stage_chain import StageChain, Tiers

BARS = {"f32": 1e-5, "quantised": 5e-5}

CASES: dict[str, tuple[str, TinyOptions, ExportOptions]] = {
    f"{architecture} {recipe}": (architecture, TinyOptions(), ExportOptions(recipe=recipe))
    for architecture in ("llama", "glm4moe", "gpt-oss")
    for recipe in ("f32", "quantised")
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
