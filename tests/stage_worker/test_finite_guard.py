"""Values that are not finite: the sequence is found where it happens, ends alone, and leaves no trace."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle.export import export_gguf
from oracle.fixtures import TinyCase
from oracle.tiny import tiny_model
from stage_chain import StageChain

from strata_coord.ipc.messages import NotFinite, SampledToken, Segment
from strata_coord.stage_worker.finite_guard import ARRIVED, FiniteGuard

NAN, INF = float("nan"), float("inf")
BOUNDARIES = {"tiny_qwen3moe_f32": (2,), "tiny_qwen4exp_f32": (3,)}
BAD_TOKEN = 3  # of the models with a spoilt embedding row; occurs in no prompt here

# --- the guard alone ----------------------------------------------------------------------------------


def segments(*counts: int) -> list[Segment]:
    return [
        Segment(sequence=10 + number, seat=number, first_position=0, count=count)
        for number, count in enumerate(counts)
    ]


def passed(guard: FiniteGuard, layer: int, rows: torch.Tensor, spoil: Callable[..., None]) -> None:
    """One layer of a walk; spoil may change what either half leaves."""
    x, weights = torch.ones(len(rows), 3), torch.full((len(rows), 2), 0.5)
    spoil(layer, "attention", x, weights)
    guard.after_attention(layer, rows_SW=rows, x_SD=x, weights_SK=weights)
    assert bool(torch.isfinite(x).all())
    assert bool(torch.isfinite(weights).all())
    spoil(layer, "experts", rows, weights)
    guard.after_experts(layer, rows)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize(
    ("layer", "half", "tensor"),
    [(4, "attention", 0), (5, "attention", 1), (4, "experts", 0), (6, "experts", 0)],
)
def test_the_layer_where_it_happened_is_named_and_other_rows_are_untouched(
    value: float, layer: int, half: str, tensor: int
) -> None:
    rows = torch.arange(24.0).view(6, 4)
    before = rows.clone()
    guard = FiniteGuard(segments(2, 3, 1), rows)

    def spoil(at: int, which: str, *tensors: torch.Tensor) -> None:
        if (at, which) == (layer, half):
            tensors[tensor][3, 1] = value

    for at in (4, 5, 6):
        passed(guard, at, rows, spoil)
    assert guard.finish(rows) == (NotFinite(sequence=11, layer=layer),)
    assert bool(torch.isnan(rows[2:5]).all())
    assert torch.equal(rows[[0, 1, 5]], before[[0, 1, 5]])


def test_rows_that_arrive_not_finite_are_told_from_those_that_become_it() -> None:
    rows = torch.ones(4, 2)
    rows[0, 0], rows[3, 1] = INF, NAN

    def spoil(layer: int, half: str, x: torch.Tensor, _weights: torch.Tensor) -> None:
        if (layer, half) == (3, "attention"):
            x[1:] = NAN

    guard = FiniteGuard(segments(1, 2, 1), rows)
    passed(guard, 3, rows, spoil)
    assert set(guard.finish(rows)) == {
        NotFinite(sequence=10, layer=ARRIVED),
        NotFinite(sequence=11, layer=3),
        NotFinite(sequence=12, layer=ARRIVED),
    }


def test_opposite_infinities_do_not_cancel_and_huge_values_are_no_alarm() -> None:
    rows = torch.tensor([[INF, -INF], [3e38, 3e38], [1e30, -1e30]])
    guard = FiniteGuard(segments(1, 1, 1), rows)
    passed(guard, 0, rows, lambda *_: None)
    assert [found.sequence for found in guard.finish(rows)] == [10, 11]  # a row's sum must be finite too


def test_a_super_chunk_of_one_stage_without_layers_to_blame_is_left_alone() -> None:
    rows = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
    before = rows.clone()
    guard = FiniteGuard(segments(5), rows)
    passed(guard, 0, rows, lambda *_: None)
    assert guard.finish(rows) == ()
    assert torch.equal(rows, before)


# --- through the stages -------------------------------------------------------------------------------


@pytest.fixture(params=BOUNDARIES)
def case(request: pytest.FixtureRequest) -> TinyCase:
    found: TinyCase = request.getfixturevalue(request.param)
    return found


def chain_of(path: Path, case: TinyCase) -> StageChain:
    # Groups of one row: what one sequence is routed to then changes no bit of another.
    return StageChain(path, boundaries=BOUNDARIES[case.path.stem], sub_chunk_tokens=8, group_rows=1)


def spoilt_file(case: TinyCase, folder: Path, spoil: Callable[[Any], None]) -> Path:
    """The case's model with some of its weights changed."""
    model = tiny_model(case.path.stem.split("_")[1])
    spoil(model)
    path = folder / "spoilt.gguf"
    export_gguf(model, path)
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Filled by bad_token_file."""
    del tmp_path_factory
    return {}


@pytest.fixture
def bad_token_file(case: TinyCase, files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in which one token's embedding has an infinity."""

    def spoil(model: Any) -> None:
        model.model.embed_tokens.weight[BAD_TOKEN, 100] = INF

    if case.path.stem not in files:
        files[case.path.stem] = spoilt_file(case, tmp_path_factory.mktemp("spoilt"), spoil)
    return files[case.path.stem]


def prompts(case: TinyCase) -> tuple[list[int], list[int]]:
    ids = case.ids.tolist()
    return ids[:24], ids[30:47]


def continued(chain: StageChain, tokens: Sequence[SampledToken], count: int) -> list[tuple[int, float]]:
    """What sequence 2 goes on to say, decoded beside sequence 1 as long as that one is there."""
    said = []
    for _ in range(count):
        by_sequence = {token.sequence: token for token in tokens}
        said.append((by_sequence[2].token, by_sequence[2].logprob))
        for sequence in (1, 2):
            known = by_sequence.get(sequence)
            chain.token_ids[sequence].append(known.token if known else BAD_TOKEN + 1)
        tokens = chain.run([(1, 1), (2, 1)])
    return said


def test_a_poisoned_prompt_changes_no_bit_of_its_neighbour_and_is_not_walked_again(
    case: TinyCase, bad_token_file: Path
) -> None:
    first, second = prompts(case)
    with chain_of(bad_token_file, case) as chain:
        tokens = chain.run([(1, 24), (2, 17)], operations=[chain.open(1, first), chain.open(2, second)])
        assert [result.not_finite for result in chain.results] == [(), ()]
        healthy = continued(chain, tokens, 4)
    poisoned = [*first[:11], BAD_TOKEN, *first[12:]]
    with chain_of(bad_token_file, case) as chain:
        tokens = chain.run([(1, 24), (2, 17)], operations=[chain.open(1, poisoned), chain.open(2, second)])
        # The later stage is told by the rows, and says that they arrived like that.
        assert [result.not_finite for result in chain.results] == [
            (NotFinite(sequence=1, layer=ARRIVED),)
        ] * 2
        assert [token.sequence for token in tokens] == [2]
        said = continued(chain, tokens, 4)
        assert said[0] == healthy[0]
        # From here on it is read alone, and a product of fewer rows adds in another order.
        assert [token for token, _ in said] == [token for token, _ in healthy]
        assert [chance for _, chance in said] == pytest.approx([chance for _, chance in healthy], abs=1e-4)
        assert [result.not_finite for result in chain.results] == [(), ()]  # said once
        chain.run([], operations=[chain.drop(1), chain.drop(2)])
        assert chain.is_at_rest


def test_pages_and_slots_of_a_poisoned_sequence_are_clean_for_the_next(
    case: TinyCase, bad_token_file: Path, tmp_path: Path
) -> None:
    first, second = prompts(case)
    with chain_of(bad_token_file, case) as chain:
        fresh = chain.prompt_logits(second, tmp_path, [10, 7])
        chain.run([(1, 24)], operations=[chain.open(1, [*first[:-1], BAD_TOKEN])])
        assert chain.results[0].not_finite
        chain.run([], operations=[chain.drop(1)])
        assert torch.equal(chain.prompt_logits(second, tmp_path, [10, 7]), fresh)


def test_a_sequence_may_turn_bad_while_it_decodes(case: TinyCase, bad_token_file: Path) -> None:
    first, second = prompts(case)
    drawn = []
    for next_token in (BAD_TOKEN + 1, BAD_TOKEN):
        with chain_of(bad_token_file, case) as chain:
            chain.run([(1, 24), (2, 17)], operations=[chain.open(1, first), chain.open(2, second)])
            chain.token_ids[1].append(next_token)
            chain.token_ids[2].append(5)
            drawn.append(chain.run([(1, 1), (2, 1)], upload="routed-only"))
            found = chain.results[0].not_finite
    assert found == (NotFinite(sequence=1, layer=ARRIVED),)
    assert drawn[1] == [token for token in drawn[0] if token.sequence == 2]


def test_a_spoilt_expert_of_a_later_stage_fails_those_who_need_it_and_names_its_layer(
    case: TinyCase, tmp_path: Path
) -> None:
    first, second = prompts(case)
    second = second[:2]
    layer = BOUNDARIES[case.path.stem][0]
    with chain_of(case.path, case) as chain:
        routed = []
        for number, ids in ((1, first), (2, second)):
            chain.logs[1].done.clear()
            chain.run([(number, len(ids))], operations=[chain.open(number, ids)])
            routed.append(dict(chain.logs[1].done)[layer])
    expert = next(e for e, (one, other) in enumerate(zip(*routed, strict=True)) if one and not other)

    def spoil(model: Any) -> None:
        model.model.layers[layer].mlp.experts.down_proj[expert, 3, 5] = NAN

    with chain_of(spoilt_file(case, tmp_path, spoil), case) as chain:
        tokens = chain.run([(1, 24), (2, 2)], operations=[chain.open(1, first), chain.open(2, second)])
        assert [result.not_finite for result in chain.results] == [(), (NotFinite(sequence=1, layer=layer),)]
        assert [token.sequence for token in tokens] == [2]


@pytest.mark.parametrize("value", [NAN, INF])
def test_a_router_that_is_not_finite_fails_every_request_at_its_layer(
    case: TinyCase, tmp_path: Path, value: float
) -> None:
    def spoil(model: Any) -> None:
        model.model.layers[1].mlp.gate.weight[2] = value

    ids, _ = prompts(case)
    with chain_of(spoilt_file(case, tmp_path, spoil), case) as chain:
        for sequence in (1, 2):  # the stage itself goes on
            assert chain.run([(sequence, 24)], operations=[chain.open(sequence, ids)]) == []
            assert chain.results[0].not_finite == (NotFinite(sequence=sequence, layer=1),)
        chain.run([], operations=[chain.drop(1), chain.drop(2)])
        assert chain.is_at_rest
