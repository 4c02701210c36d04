"""Faults of the field that make wrong numbers, each as a test: see docs/field-cases.md for what happened.

Stages are chained in this process; the same faults with real processes are in test_sessions.py.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from oracle.clear_ids import find_clear_ids
from oracle.export import export_gguf
from oracle.fixtures import TinyCase
from oracle.reference import reference_logits
from oracle.tiny import TinyOptions, tiny_model
from stage_chain import StageChain, Tiers

from strata_coord.coordinator.super_chunks import even_super_chunks
from strata_coord.ipc.errors import InvariantError
from strata_coord.kernels.router import route
from strata_coord.kernels.sampling import sample
from strata_coord.stage_worker.expert_half import group_by_expert
from strata_coord.stage_worker.stage import Stage

SAME = 1e-5  # of a row's norm
HYBRID = "tiny_qwen4exp_f32"


@pytest.fixture(params=["tiny_qwen3moe_f32", HYBRID])
def case(request: pytest.FixtureRequest) -> TinyCase:
    found: TinyCase = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def two_stages(case: TinyCase) -> Iterator[StageChain]:
    with StageChain(case.path, boundaries=(2,), sub_chunk_tokens=64) as chain:
        yield chain


def worst_row(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest relative error of a row."""
    error = (found.double() - expected.double()).norm(dim=1) / expected.double().norm(dim=1)
    return float(error.max())


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert worst_row(found, expected) <= SAME
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


# --- borders between chunks ----------------------------------------------------------------------------

S = 8


@pytest.mark.parametrize("sub_chunk", [1, 2, 3, 7, 8, 9])
def test_fc_003_sub_chunks_of_any_size_under_one_super_chunk_size(
    case: TinyCase, tmp_path: Path, sub_chunk: int
) -> None:
    ids, expected = case.ids[: 2 * S + 3].tolist(), case.reference.logits[: 2 * S + 3]
    with StageChain(case.path, boundaries=(2,), sub_chunk_tokens=sub_chunk) as chain:
        assert_same(chain.prompt_logits(ids, tmp_path, [S, S, 3]), expected)


def test_fc_003_super_chunks_of_any_size_under_one_sub_chunk_size(case: TinyCase, tmp_path: Path) -> None:
    ids, expected = case.ids[: 2 * S + 3].tolist(), case.reference.logits[: 2 * S + 3]
    with StageChain(case.path, boundaries=(2,), sub_chunk_tokens=4) as chain:
        for size in (1, 2, 3, S - 1, S, S + 1, 2 * S + 3):
            cuts = [min(size, len(ids) - start) for start in range(0, len(ids), size)]
            assert_same(chain.prompt_logits(ids, tmp_path, cuts), expected)


@pytest.mark.parametrize("count", [63, 64, 65, 127, 128, 129, 192])
def test_fc_004_exact_multiples_of_super_chunk_and_page(
    two_stages: StageChain, case: TinyCase, tmp_path: Path, count: int
) -> None:
    cuts = even_super_chunks(count, max_tokens=64)
    assert len(cuts) == -(-count // 64)
    assert min(cuts) > 0  # no empty trailing part
    found = two_stages.prompt_logits(case.ids[:count].tolist(), tmp_path, cuts)
    assert_same(found, case.reference.logits[:count])


def test_fc_006_every_token_is_embedded_once_and_in_order(
    two_stages: StageChain, case: TinyCase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    embed = Stage._embed

    def spy(stage: Stage, ids: torch.Tensor) -> torch.Tensor:
        seen.extend(ids.tolist())
        return embed(stage, ids)

    monkeypatch.setattr(Stage, "_embed", spy)
    prompt = case.ids[:67].tolist()
    two_stages.prompt_logits(prompt, tmp_path, [8, 8, 32, 1, 18])
    assert seen == prompt


@pytest.mark.parametrize("num_chunks", [1, 2, 3, 5])
def test_fc_007_every_super_chunk_passes_every_layer_of_every_stage(
    two_stages: StageChain, case: TinyCase, tmp_path: Path, num_chunks: int
) -> None:
    two_stages.prompt_logits(case.ids[: 4 * num_chunks].tolist(), tmp_path, [4] * num_chunks)
    for stage, log in zip(two_stages.stages, two_stages.logs, strict=True):
        layers = range(stage.assignment.first_layer, stage.assignment.last_layer)
        assert [layer for layer, _ in log.done] == list(layers) * num_chunks


def test_fc_007_a_missing_super_chunk_is_an_error_and_no_short_answer(
    two_stages: StageChain, case: TinyCase
) -> None:
    two_stages.run([(1, 4)], operations=[two_stages.open(1, case.ids[:20].tolist())])
    two_stages.positions[1] += 4  # rows 4 to 7 never come
    with pytest.raises(InvariantError, match="rows start at 8, the state ends at 4"):
        two_stages.run([(1, 4)])


def test_fc_008_side_inputs_are_cut_with_a_last_chunk_of_one_row(
    two_stages: StageChain, case: TinyCase, tmp_path: Path
) -> None:
    """Positions, n-gram ids and router weights per row: one row would broadcast over anything in silence."""
    found = two_stages.prompt_logits(case.ids[: S + 1].tolist(), tmp_path, [S, 1])
    assert_same(found, case.reference.logits[: S + 1])


@pytest.mark.parametrize("max_rows", [128, 1024])
def test_fc_010_large_super_chunks_equal_small_ones(
    tiny_qwen3moe_f32: TinyCase, tmp_path: Path, max_rows: int
) -> None:
    """Expert groups of one row leave no rounding between the two, so an index that overflows would show."""
    ids = (tiny_qwen3moe_f32.ids.tolist() * 6)[: max_rows + 17]
    logits = []
    for size in (16, max_rows):
        with StageChain(
            tiny_qwen3moe_f32.path,
            sub_chunk_tokens=16,
            max_rows=size,
            group_rows=1,
            max_sequences=1,
            context_tokens=2048,
        ) as chain:
            cuts = [min(size, len(ids) - start) for start in range(0, len(ids), size)]
            logits.append(chain.prompt_logits(ids, tmp_path, cuts)[-17:])
    assert torch.equal(*logits)


@pytest.mark.parametrize("count", [15, 16, 17])
def test_fc_020_no_other_path_below_one_sub_chunk(case: TinyCase, tmp_path: Path, count: int) -> None:
    with StageChain(case.path, boundaries=(2,), sub_chunk_tokens=16) as chain:
        found = chain.prompt_logits(case.ids[:count].tolist(), tmp_path, [count])
        assert_same(found, case.reference.logits[:count])
        assert all(len(log.done) == len(set(log.done)) for log in chain.logs)  # one walk, whatever the size


def test_fc_015_reading_at_once_and_token_by_token_differ_by_rounding_only(
    two_stages: StageChain, case: TinyCase, tmp_path: Path
) -> None:
    for count in range(2, 22, 4 if case.path.stem == HYBRID else 2):
        ids = case.ids[:count].tolist()
        whole = two_stages.prompt_logits(ids, tmp_path, [count])
        for cuts in ([count - 1, 1], [1] * count):
            assert_same(two_stages.prompt_logits(ids, tmp_path, cuts), whole)


# --- sequences that must not know of each other --------------------------------------------------------


def test_fc_016_four_sequences_in_one_batch_answer_as_they_do_alone(tiny_qwen4exp_f32: TinyCase) -> None:
    ids = tiny_qwen4exp_f32.ids.tolist()
    prompts = {1: ids[:12], 2: ids[20:32], 3: ids[40:43], 4: ids[60:95]}  # equal and unequal lengths
    with StageChain(tiny_qwen4exp_f32.path, boundaries=(4,)) as chain:
        alone = {}
        for number, prompt in prompts.items():
            alone[number] = chain.greedy(number, prompt, 5)
            chain.run([], operations=[chain.drop(number)])
        tokens = chain.run(
            [(number, len(prompt)) for number, prompt in prompts.items()],
            operations=[chain.open(number, prompt) for number, prompt in prompts.items()],
        )
        for _ in range(4):
            for token in tokens:
                chain.token_ids[token.sequence].append(token.token)
            tokens = chain.run([(number, 1) for number in prompts], upload="routed-only")
        together = {
            token.sequence: [*chain.token_ids[token.sequence][len(prompts[token.sequence]) :], token.token]
            for token in tokens
        }
    assert together == alone


def test_fc_031_nothing_of_an_unrelated_conversation_is_left(
    case: TinyCase, two_stages: StageChain, tmp_path: Path
) -> None:
    marker, other = [7] * 40, case.ids[:23].tolist()
    with StageChain(case.path, boundaries=(2,), sub_chunk_tokens=64) as chain:
        fresh = chain.prompt_logits(other, tmp_path, [23])
    two_stages.greedy(1, marker, 3)
    two_stages.run([], operations=[two_stages.drop(1)])
    assert torch.equal(two_stages.prompt_logits(other, tmp_path, [23]), fresh)
    # The same after a conversation that was given up in the middle of a walk.
    two_stages.run([(2, 20)], operations=[two_stages.open(2, marker)])
    two_stages.run([(2, 20)], cancel=lambda stage, _segment: stage == 1)
    two_stages.run([], operations=[two_stages.drop(2)])
    assert torch.equal(two_stages.prompt_logits(other, tmp_path, [23]), fresh)


def test_fc_032_the_same_prompt_gives_the_same_bits_every_time(
    two_stages: StageChain, case: TinyCase, tmp_path: Path
) -> None:
    ids = case.ids[: 2 * S + 1].tolist()
    logits = [two_stages.prompt_logits(ids, tmp_path, [S, S, 1]) for _ in range(3)]
    two_stages.greedy(5, case.ids[60:99].tolist(), 3)  # still open while the prompt is read again
    logits.append(two_stages.prompt_logits(ids, tmp_path, [S, S, 1]))
    assert all(torch.equal(logits[0], again) for again in logits[1:])


def test_fc_033_a_prompt_that_shares_a_beginning_equals_its_cold_run(
    two_stages: StageChain, case: TinyCase, tmp_path: Path
) -> None:
    ids = case.ids.tolist()
    new = [*ids[:5], *ids[100:120]]
    cold = two_stages.prompt_logits(new, tmp_path, [25])
    answer = two_stages.greedy(1, ids[:60], 10)  # over a page's edge
    two_stages.run([], operations=[two_stages.drop(1)])
    two_stages.greedy(2, [*ids[:60], *answer[:3]], 2)
    two_stages.run([], operations=[two_stages.drop(2)])
    assert torch.equal(two_stages.prompt_logits(new, tmp_path, [25]), cold)


# --- memory nobody wrote -------------------------------------------------------------------------------


@pytest.fixture
def no_memory_is_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh float tensors hold NaN, as recycled memory may."""

    def spoilt(make: object) -> object:
        def made(*arguments: object, **settings: object) -> torch.Tensor:
            tensor: torch.Tensor = make(*arguments, **settings)  # type: ignore[operator]
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor.fill_(0)

        return made

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, spoilt(getattr(torch, name)))


@pytest.mark.parametrize("upload", ["stream-all", "routed-only"])
def test_fc_037_experts_without_rows_leave_nothing_in_the_sum(
    request: pytest.FixtureRequest, case: TinyCase, tmp_path: Path, upload: str
) -> None:
    ids = case.ids[:2].tolist()  # at most 8 of 16 experts get a row

    def read() -> torch.Tensor:
        with StageChain(case.path, boundaries=(2,), tiers=Tiers(resident=4, arena=6)) as chain:
            found = chain.prompt_logits(ids, tmp_path, [1, 1], upload=upload)
            assert all(0 in counts for log in chain.logs for _, counts in log.done)
            return found

    clean = read()
    request.getfixturevalue("no_memory_is_clean")
    assert torch.equal(read(), clean)


# --- router, sampler -----------------------------------------------------------------------------------

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    "logits", [[NAN] * 4, [0.0, NAN, 1.0, 2.0], [-INF] * 4, [INF, 0.0, INF, 1.0], [-INF, -INF, 3.0, -INF]]
)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_fc_013_no_token_is_drawn_from_logits_that_are_not_finite(
    logits: list[float], temperature: float
) -> None:
    with pytest.raises(ValueError, match="of 4 logits for position 5 are not finite"):
        draw(logits, temperature)


def test_fc_013_ties_go_to_the_lowest_id() -> None:
    assert draw([1.0, 4.0, 4.0, 0.0], 0.0) == 1


def draw(logits: list[float], temperature: float) -> int:
    return sample(
        torch.tensor(logits),
        temperature=temperature,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        seed=1,
        position=5,
        num_real_tokens=len(logits),
    )[0]


@pytest.mark.parametrize("value", [0.0, -1e30, 1e30])
@pytest.mark.parametrize("renormalised", [True, False])
def test_fc_014_equal_router_logits_give_equal_weights(value: float, renormalised: bool) -> None:
    ids, weights = route(torch.ones(2, 1), torch.full((8, 1), value), 2, renormalised=renormalised)
    assert ids.tolist() == [[0, 1]] * 2
    assert torch.equal(weights, torch.full((2, 2), 0.5 if renormalised else 0.125))


@pytest.mark.parametrize("value", [INF, -INF, NAN])
def test_fc_014_router_logits_that_are_not_finite_spoil_their_own_row_only(value: float) -> None:
    x, router = torch.tensor([[value], [1.0]]), torch.tensor([[1.0], [3.0], [2.0]])
    ids, weights = route(x, router, 2)
    assert bool(torch.isnan(weights[0]).all())  # ends the request in the walk, with the layer named
    assert len(set(ids[0].tolist()) & {0, 1, 2}) == 2  # still experts that exist
    assert ids[1].tolist() == [1, 2]
    assert bool(torch.isfinite(weights[1]).all())


def test_fc_014_an_expert_with_a_logit_of_minus_infinity_has_no_weight() -> None:
    bias = torch.tensor([-INF, 0.0, -INF])
    ids, weights = route(torch.zeros(1, 1), torch.zeros(3, 1), 2, bias_E=bias)
    assert ids.tolist() == [[1, 0]]
    assert weights.tolist() == [[1.0, 0.0]]


@pytest.mark.parametrize("count", [1, 2, 8])
def test_fc_039_ties_of_the_router_go_to_the_lowest_ids_in_any_batch(count: int) -> None:
    zeros = torch.zeros(8, 4)
    at_the_cut = torch.tensor([[2.0], [1.0], [3.0], [1.0], [1.0], [0.0], [1.0], [0.0]])
    colliding = (torch.randn(8, 4, generator=torch.Generator().manual_seed(3)) * 1e-3 + 1).bfloat16().float()
    for router in (zeros, at_the_cut, colliding):
        x = torch.ones(33, router.shape[1])
        scores = torch.softmax(torch.nn.functional.linear(x[:1], router), -1)[0].tolist()
        want = sorted(range(8), key=lambda expert: (-scores[expert], expert))[:count]
        batch, _ = route(x, router, count)  # as in a prompt
        row, _ = route(x[:1], router, count)  # as in decode
        assert row.tolist() == [want]
        assert batch.tolist() == [want] * 33


@pytest.mark.parametrize("bad", [-1, 8])
def test_fc_040_an_expert_that_does_not_exist_is_refused_before_any_byte_is_addressed_by_it(bad: int) -> None:
    ids = torch.tensor([[0, 3], [bad, 2]])
    with pytest.raises(InvariantError, match="experts 0 to 7"):
        group_by_expert(ids, torch.full((2, 2), 0.5), num_experts=8)


# --- weights that two stages need ----------------------------------------------------------------------


@pytest.mark.parametrize("is_tied", [True, False])
def test_fc_041_tied_and_untied_outputs_on_any_number_of_stages(tmp_path: Path, is_tied: bool) -> None:
    """Untied, the two matrices differ, so the wrong one would show."""
    model = tiny_model("qwen3moe", TinyOptions(tied_output=is_tied))
    export_gguf(model, tmp_path / "model.gguf")
    ids = find_clear_ids(model, num_tokens=24)
    expected = reference_logits(model, ids)
    held = []
    for boundaries in ((), (1,), (1, 2)):
        with StageChain(tmp_path / "model.gguf", boundaries=boundaries) as chain:
            assert chain.index.tied == is_tied
            assert_same(chain.prompt_logits(ids.tolist(), tmp_path, [24]), expected)
            held.append(
                sum(
                    extent.name in {"token_embd.weight", "output.weight"}
                    for stage in chain.stages
                    for extent in stage.assignment.tensors
                )
            )
    assert held == ([1, 2, 2] if is_tied else [2, 2, 2])
