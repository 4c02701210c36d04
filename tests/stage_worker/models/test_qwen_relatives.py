"""qwen2moe, qwen3vlmoe, qwen3next and qwen35moe against transformers, in every form that their files take.

Logits come through the production stages, from a file. The prompts are searched for: no router decision in
them is a near tie, so nothing is dropped from a comparison.
"""

import functools
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle.clear_ids import find_clear_ids
from oracle.export import ExportOptions, export_gguf
from oracle.reference import reference_logits
from oracle.tiny import TinyOptions, tiny_model
from stage_chain import StageChain, Tiers, relative_error
from torch import nn

BARS = {"f32": 1e-5, "quantised": 5e-5}
PLAIN = ("qwen2moe", "qwen3vlmoe")
RECURRENT = ("qwen3next", "qwen35moe")
# Shorter than the convolution's history, one more than a chunk of the delta rule, and a one-row tail.
ODD_CUTS = (1, 2, 1, 65, 30, 1)
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
ALL_OF_YARN = YARN | {"factor": 16.0, "attention_factor": 1.3, "beta_fast": 8.0, "beta_slow": 2.0}


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


class Case:
    """A file, and what transformers makes of a prompt with the file's weights."""

    def __init__(self, path: Path, model: nn.Module, num_tokens: int) -> None:
        self.path = path
        self.ids = find_clear_ids(model, num_tokens=num_tokens)
        self.expected = reference_logits(model, self.ids)

    def assert_equal(
        self, folder: Path, bar: float, *, cuts: Sequence[int] = (), boundaries: Sequence[int] = ()
    ) -> None:
        with StageChain(self.path, boundaries=boundaries, tiers=Tiers(resident=3, arena=7)) as chain:
            found = chain.prompt_logits(self.ids.tolist(), folder, cuts or [len(self.ids)])
        assert relative_error(found, self.expected) <= bar
        assert torch.equal(found.argmax(-1), self.expected.argmax(-1))


def make_case(
    folder: Path,
    architecture: str,
    tiny: TinyOptions | None = None,
    export: ExportOptions | None = None,
    *,
    num_tokens: int = 40,
) -> Case:
    model = tiny_model(architecture, tiny)
    path = folder / f"{len(list(folder.iterdir()))}.gguf"
    return Case(export_gguf(model, path, export)[0], model, num_tokens)


@pytest.fixture(scope="module")
def case_of(folder: Path) -> Any:
    @functools.cache
    def case(architecture: str, recipe: str) -> Case:
        tiny = TinyOptions(num_layers=5 if architecture in RECURRENT else None)
        return make_case(folder, architecture, tiny, ExportOptions(recipe=recipe), num_tokens=100)

    return case


@pytest.mark.parametrize(
    ("cuts", "boundaries"),
    [((), ()), (ODD_CUTS, ()), ((64, 36), (2,)), (ODD_CUTS, (1, 2))],
    ids=["whole", "chunked", "2 stages", "3 stages"],
)
@pytest.mark.parametrize("recipe", ["f32", "quantised"])
@pytest.mark.parametrize("architecture", [*PLAIN, *RECURRENT])
def test_logits_are_those_of_transformers(
    case_of: Any,
    folder: Path,
    architecture: str,
    recipe: str,
    cuts: tuple[int, ...],
    boundaries: tuple[int, ...],
) -> None:
    case_of(architecture, recipe).assert_equal(folder, BARS[recipe], cuts=cuts, boundaries=boundaries)


FORMS = {
    "qwen2moe, fused qkv with fused biases": ("qwen2moe", {}, {"fused_qkv": True}),
    "qwen2moe, gate row, tied": ("qwen2moe", {"tied_output": True}, {"shared_gate_row": True}),
    "qwen2moe, fused gate and up": ("qwen2moe", {}, {"fused_gate_up": True, "recipe": "quantised"}),
    "qwen3vlmoe, fused qkv": ("qwen3vlmoe", {}, {"fused_qkv": True, "recipe": "quantised"}),
    "qwen3next, legacy ssm_in": ("qwen3next", {}, {"legacy_ssm_in": True}),
    "qwen3next, legacy ssm_in, quantised": (
        "qwen3next",
        {},
        {"legacy_ssm_in": True, "recipe": "quantised", "nextn_layers": 1},
    ),
    "qwen3next, everything fused, tied": (
        "qwen3next",
        {"tied_output": True},
        {"fused_qkv": True, "fused_gate_up": True, "shared_gate_row": True, "recurrent_layers": True},
    ),
    "qwen3next, widths by layer": ("qwen3next", {"expert_widths": (64, 32, 48, 32, 64)}, {}),
    "qwen35moe, fused qkv with gates": ("qwen35moe", {}, {"fused_qkv": True, "recipe": "quantised"}),
    "qwen35moe, MTP block, array of recurrent layers": (
        "qwen35moe",
        {},
        {"nextn_layers": 1, "recurrent_layers": True, "expert_width_array": True},
    ),
    "qwen35moe, shards, tied": (
        "qwen35moe",
        {"tied_output": True},
        {"shards": 3, "empty_first_shard": True, "fused_gate_up": True},
    ),
    "qwen4exp, fused qkv with gates": ("qwen4exp", {}, {"fused_qkv": True, "shared_gate_row": True}),
    "qwen4exp, every ratio 0": ("qwen4exp", {"dense_attention_layers": (3,)}, {"nextn_layers": 1}),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_tensor(tmp_path: Path, form: str) -> None:
    architecture, tiny, export = FORMS[form]
    layers = None if architecture in PLAIN else 5
    case = make_case(tmp_path, architecture, TinyOptions(num_layers=layers, **tiny), ExportOptions(**export))
    bar = BARS[export.get("recipe", "f32")]
    case.assert_equal(tmp_path, bar, cuts=(16, 24), boundaries=(2,))


@pytest.mark.parametrize(
    ("architecture", "scaling"),
    [("qwen3moe", YARN), ("qwen3moe", ALL_OF_YARN), ("qwen35moe", ALL_OF_YARN), ("qwen4exp", ALL_OF_YARN)],
    ids=["qwen3moe, defaults", "qwen3moe", "qwen35moe", "qwen4exp"],
)
def test_yarn_is_that_of_transformers(tmp_path: Path, architecture: str, scaling: dict[str, Any]) -> None:
    """In qwen4exp the prompt is past the budget, so the indexer, with the same angles, takes part."""
    layers = 2 if architecture == "qwen3moe" else 4
    plain = tiny_model(architecture, TinyOptions(num_layers=layers))
    config = {"rope_parameters": plain.config.rope_parameters | scaling}
    tiny = TinyOptions(num_layers=layers, config=config)
    case = make_case(tmp_path, architecture, tiny, num_tokens=36)
    case.assert_equal(tmp_path, BARS["f32"], cuts=(18, 17, 1), boundaries=(1,))
    without = reference_logits(plain, case.ids)
    assert relative_error(without, case.expected) > 1e-2
