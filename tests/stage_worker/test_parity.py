"""Logits of chained stages: against transformers, and the same prompt read in any way against itself.

What is bit-equal, as measured (fp32, one thread): with the same cut into super-chunks, the same sub-chunk
rows and the same expert group rows, everything else is free: number of stages, slot_rows, tiers, window
slots and upload policy change no bit. Another cut changes how many rows an expert multiplies at once, and the
matrix product then adds in another order: rows differ by at most 2.2e-6 of their norm. With expert groups of
one row, cuts on multiples of the sub-chunk are bit-equal too: nothing but that product differs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle.clear_ids import find_clear_ids
from oracle.export import ExportOptions, export_gguf
from oracle.fixtures import TINY_FIXTURES, TinyCase
from oracle.reference import reference_logits
from oracle.tiny import TinyOptions, tiny_model
from stage_chain import StageChain, Tiers

NUM_EXPERTS = 16
SAME = 1e-5  # of each row's norm
BARS = {"f32": 1e-5, "q": 5e-5}


@pytest.fixture(params=TINY_FIXTURES)
def case(request: pytest.FixtureRequest) -> TinyCase:
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parity")


def boundaries_of(num_layers: int, num_stages: int) -> tuple[int, ...]:
    return tuple(num_layers * stage // num_stages for stage in range(1, num_stages))


def assert_same_logits(found: torch.Tensor, expected: torch.Tensor, bar: float) -> None:
    """Each row within bar of its norm, and the same best token."""
    error = (found.double() - expected.double()).norm(dim=1) / expected.double().norm(dim=1)
    worst = int(error.argmax())
    assert float(error[worst]) <= bar, f"position {worst} differs by {float(error[worst]):.2e}"
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_logits_are_those_of_transformers(case: TinyCase, folder: Path, num_stages: int) -> None:
    expected = case.reference.logits
    with StageChain(case.path) as chain:
        num_layers = chain.index.geometry.num_layers
    if num_stages > num_layers:
        pytest.skip(f"every stage needs a layer, and this model has {num_layers}")
    with StageChain(case.path, boundaries=boundaries_of(num_layers, num_stages)) as chain:
        found = chain.prompt_logits(case.ids.tolist(), folder, [128, 72])
        assert [len(log.done) for log in chain.logs] == [
            2 * (stage.assignment.last_layer - stage.assignment.first_layer) for stage in chain.stages
        ]
    assert_same_logits(found, expected, BARS[case.path.stem.rsplit("_", 1)[1]])


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One way to read a prompt of sum(cuts) tokens."""

    cuts: tuple[int, ...]
    sub_chunk_tokens: int
    group_rows: int
    num_stages: int
    slot_rows: int
    tiers: Tiers
    upload: str


@st.composite
def cuts(draw: st.DrawFn) -> tuple[int, ...]:
    """A prompt's super-chunks: exact multiples, one-row tails, single rows, anything."""
    kind = draw(st.sampled_from(["multiples", "one-row tail", "rows", "any"]))
    if kind == "rows":
        return (1,) * draw(st.integers(1, 24))
    if kind == "any":
        sizes = draw(st.lists(st.integers(1, 130), min_size=1, max_size=5))
        total, kept = 0, []
        for size in sizes:
            if total + size <= 200:
                kept.append(size)
                total += size
        return tuple(kept)
    step = draw(st.sampled_from([8, 16, 32, 64]))
    number = draw(st.integers(1, min(199 // step, 5)))
    return (step,) * number + ((1,) if kind == "one-row tail" else ())


@st.composite
def tiers(draw: st.DrawFn) -> Tiers:
    resident, arena = draw(
        st.one_of(
            st.sampled_from([(NUM_EXPERTS, 0), (0, NUM_EXPERTS), (0, 0)]),
            st.tuples(st.integers(0, NUM_EXPERTS), st.integers(0, NUM_EXPERTS)),
        )
    )
    return Tiers(resident=resident, arena=arena, window_slots=draw(st.integers(1, 5)))


placements = st.fixed_dictionaries(
    {
        "num_stages": st.integers(1, 4),
        "slot_rows": st.sampled_from([1, 8, 64, 96, 256]),
        "tiers": tiers(),
        "upload": st.sampled_from(["stream-all", "routed-only"]),
    }
)
shapes = st.fixed_dictionaries(
    {
        "cuts": cuts(),
        "sub_chunk_tokens": st.sampled_from([8, 16, 64, 128]),
        "group_rows": st.sampled_from([1, 2, 7, 48, 256]),
    }
)


def read(case: TinyCase, folder: Path, reading: Reading) -> torch.Tensor:
    with StageChain(case.path) as chain:
        num_layers = chain.index.geometry.num_layers
    with StageChain(
        case.path,
        boundaries=boundaries_of(num_layers, min(reading.num_stages, num_layers)),
        sub_chunk_tokens=reading.sub_chunk_tokens,
        group_rows=reading.group_rows,
        tiers=reading.tiers,
    ) as chain:
        ids = case.ids[: sum(reading.cuts)].tolist()
        found = chain.prompt_logits(
            ids, folder, reading.cuts, slot_rows=reading.slot_rows, upload=reading.upload
        )
        assert chain.is_at_rest
    return found


@pytest.fixture(scope="module")
def whole_runs(folder: Path) -> dict[Path, torch.Tensor]:
    """Filled by whole_run: the 200 tokens in one super-chunk on one stage, per model."""
    return {}


def whole_run(case: TinyCase, folder: Path, known: dict[Path, torch.Tensor]) -> torch.Tensor:
    if case.path not in known:
        with StageChain(case.path) as chain:
            known[case.path] = chain.prompt_logits(case.ids.tolist(), folder, [200])
    return known[case.path]


@settings(deadline=None, derandomize=True, max_examples=16)
@given(shape=shapes, placement=placements)
@pytest.mark.parametrize("name", TINY_FIXTURES)
def test_any_reading_gives_the_logits_of_the_whole_prompt(
    request: pytest.FixtureRequest,
    name: str,
    folder: Path,
    whole_runs: dict[Path, torch.Tensor],
    shape: dict,
    placement: dict,
) -> None:
    case = request.getfixturevalue(name)
    reading = Reading(**shape, **placement)
    expected = whole_run(case, folder, whole_runs)[: sum(reading.cuts)]
    assert_same_logits(read(case, folder, reading), expected, SAME)


@settings(deadline=None, derandomize=True, max_examples=8)
@given(shape=shapes, one=placements, other=placements)
@pytest.mark.parametrize("name", ["tiny_qwen3moe_q", "tiny_qwen4exp_f32"])
def test_placement_changes_no_bit(
    request: pytest.FixtureRequest, name: str, folder: Path, shape: dict, one: dict, other: dict
) -> None:
    case = request.getfixturevalue(name)
    found = [read(case, folder, Reading(**shape, **placement)) for placement in (one, other)]
    assert torch.equal(*found)


@pytest.mark.parametrize("name", ["tiny_qwen3moe_f32", "tiny_qwen4exp_f32"])
@pytest.mark.parametrize("sub_chunk_tokens", [16, 64])
def test_with_groups_of_one_row_cuts_on_sub_chunk_edges_change_no_bit(
    request: pytest.FixtureRequest, name: str, folder: Path, sub_chunk_tokens: int
) -> None:
    case = request.getfixturevalue(name)
    ids = case.ids.tolist()
    with StageChain(case.path, sub_chunk_tokens=sub_chunk_tokens, group_rows=1) as chain:
        whole = chain.prompt_logits(ids, folder, [200])
        for parts in ([64, 64, 72], [128, 72], [192, 8]):
            assert torch.equal(chain.prompt_logits(ids, folder, parts), whole), parts


@pytest.mark.parametrize("num_tokens", [17, 18, 19, 20, 21, 22, 23])
def test_around_the_budget_of_sparse_attention(
    tiny_qwen4exp_f32: TinyCase, folder: Path, num_tokens: int
) -> None:
    """Budget 16, blocks of 4: the first row that does not see every block is row 19 (20 tokens)."""
    case = tiny_qwen4exp_f32
    ids, expected = case.ids[:num_tokens].tolist(), case.reference.logits[:num_tokens]
    with StageChain(case.path, boundaries=(4,), sub_chunk_tokens=8) as chain:
        for parts in (
            [num_tokens],
            [num_tokens - 1, 1],
            [16, num_tokens - 16],
            [3, 14, *[1] * (num_tokens - 17)],
        ):
            assert_same_logits(chain.prompt_logits(ids, folder, parts), expected, BARS["f32"])


FORMS = {
    "tied": ("qwen3moe", TinyOptions(tied_output=True), ExportOptions()),
    "fused gate and up": ("qwen3moe", TinyOptions(), ExportOptions(fused_gate_up=True, recipe="quantised")),
    "fused gate and up, hyper": ("qwen4exp", TinyOptions(num_layers=4), ExportOptions(fused_gate_up=True)),
    "shards": ("qwen3moe", TinyOptions(), ExportOptions(shards=3, recipe="quantised")),
    "shards, empty first": (
        "qwen4exp",
        TinyOptions(num_layers=4),
        ExportOptions(shards=3, empty_first_shard=True),
    ),
    "widths": (
        "qwen4exp",
        TinyOptions(num_layers=4, expert_widths=(64, 32, 64, 32)),
        ExportOptions(expert_width_array=True),
    ),
    "dense attention layer": (
        "qwen4exp",
        TinyOptions(dense_attention_layers=(3,)),
        ExportOptions(recurrent_layers=True, nextn_layers=1),
    ),
    "n-gram layer on a later stage": (
        "qwen4exp",
        TinyOptions(num_layers=4, ple_layers=(2,)),
        ExportOptions(),
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_real_files(form: str, tmp_path: Path) -> None:
    architecture, tiny, export = FORMS[form]
    model = tiny_model(architecture, tiny)
    files = export_gguf(model, tmp_path / "model.gguf", export)
    ids = find_clear_ids(model, num_tokens=40)
    expected = reference_logits(model, ids)
    bar = BARS["f32" if export.recipe == "f32" else "q"]
    for boundaries, streamed in (((), Tiers(resident=3, arena=5)), ((2,), Tiers(arena=0, window_slots=3))):
        with StageChain(files[0], boundaries=boundaries, tiers=streamed) as chain:
            found = chain.prompt_logits(ids.tolist(), tmp_path, [16, 24])
        assert_same_logits(found, expected, bar)


def test_a_layer_of_the_sharded_file_straddles_two_files(tmp_path: Path) -> None:
    architecture, tiny, export = FORMS["shards"]
    files = export_gguf(tiny_model(architecture, tiny), tmp_path / "model.gguf", export)
    with StageChain(files[0]) as chain:
        files_of_layer = _files_of_layers(chain)
    assert len(files) == 3
    assert max(map(len, files_of_layer)) > 1


def _files_of_layers(chain: StageChain) -> Sequence[set[int]]:
    tensors = chain.stages[0].assignment.tensors
    return [
        {tensor.file for tensor in tensors if tensor.name.startswith(f"blk.{layer}.")}
        for layer in range(chain.index.geometry.num_layers)
    ]
