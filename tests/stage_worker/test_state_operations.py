"""State operations through the super-chunk's record: every way to a position equals a fresh run to it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from oracle.fixtures import TinyCase
from stage_chain import StageChain

from strata_coord.ipc.errors import InvariantError, RequestError
from strata_coord.ipc.messages import StateOperation, SuperChunk

NAMES = ["tiny_qwen3moe_f32", "tiny_qwen4exp_f32"]
TOKENS = 150
TAIL = 5  # rows that are compared after an operation
TOGETHER = 50  # sequences, or snapshots, of one super-chunk


@pytest.fixture(params=NAMES)
def case(request: pytest.FixtureRequest) -> TinyCase:
    return request.getfixturevalue(request.param)


@contextmanager
def chain_of(case: TinyCase, **settings: object) -> Iterator[StageChain]:
    """Two stages; of qwen4exp the first has recurrent and attention layers, the last likewise."""
    with StageChain(case.path, boundaries=(2,), **settings) as chain:  # type: ignore[arg-type]
        yield chain


def batch(
    chain: StageChain, folder: Path, counts: dict[int, int], **settings: object
) -> dict[int, torch.Tensor]:
    """Logits [count, vocabulary] of the next count rows of some sequences, read in one super-chunk."""
    first = {sequence: chain.positions[sequence] for sequence in counts}
    files = {sequence: folder / f"rows{sequence}.bin" for sequence in counts}
    for path in files.values():
        path.write_bytes(b"")
    chain.run(list(counts.items()), logits=files, **settings)  # type: ignore[arg-type]
    vocabulary = chain.index.geometry.vocabulary_size
    return {
        sequence: torch.from_numpy(np.fromfile(path, dtype=np.float32)).view(-1, vocabulary)[
            first[sequence] :
        ]
        for sequence, path in files.items()
    }


def rows(chain: StageChain, folder: Path, sequence: int, count: int, **settings: object) -> torch.Tensor:
    """Logits [count, vocabulary] of the next rows of one sequence."""
    return batch(chain, folder, {sequence: count}, **settings)[sequence]


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    error = (found.double() - expected.double()).norm(dim=1) / expected.double().norm(dim=1)
    assert float(error.max()) <= 1e-5
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


def other_ids(case: TinyCase) -> list[int]:
    """Tokens that a sequence may take after a position instead of the prompt's."""
    return case.ids.flip(0).tolist()


def read_with_snapshots(chain: StageChain, ids: list[int], folder: Path) -> torch.Tensor:
    """Logits of sequence 1's TOKENS rows, with a snapshot at every position, of the position's number."""
    found = []
    for start in range(0, TOKENS, TOGETHER):
        marks = {position: position for position in range(start + 1, start + TOGETHER + 1)}
        operations = [] if start else [chain.open(1, ids)]
        found.append(rows(chain, folder, 1, TOGETHER, operations=operations, snapshots={1: marks}))
    return torch.cat(found)


def test_restore_and_truncate_at_every_position_equal_a_fresh_run(case: TinyCase, tmp_path: Path) -> None:
    """A sequence per position is restored there, and another is restored at the end and cut back to there.

    Before it is cut back a second time the latter reads rows of another text.
    """
    ids, other = case.ids[: TOKENS + TAIL].tolist(), other_ids(case)
    expected = case.reference.logits
    with chain_of(case, max_snapshots=TOKENS, max_sequences=TOGETHER + 1, context_tokens=256) as chain:
        assert_same(read_with_snapshots(chain, ids, tmp_path), expected[:TOKENS])
        numbers_count = chain.index.geometry.has_histories
        for start in range(1, TOKENS + 1, TOGETHER):
            positions = range(start, start + TOGETHER)
            here = {1000 + position: position for position in positions}
            begin = [chain.restore(sequence, at, at, ids) for sequence, at in here.items()]
            restored = batch(chain, tmp_path, dict.fromkeys(here, TAIL), operations=begin)
            begin = [chain.drop(sequence) for sequence in here]
            begin += [chain.restore(sequence, TOKENS, TOKENS, [*ids[:TOKENS], *other]) for sequence in here]
            chain.run([(sequence, 2) for sequence in here], operations=begin)
            for tokens in (other, ids):
                cuts = [
                    chain.truncate(sequence, at, at if numbers_count else 0) for sequence, at in here.items()
                ]
                for sequence, at in here.items():
                    chain.token_ids[sequence] = [*ids[:at], *tokens] if tokens is other else ids
                cut = batch(chain, tmp_path, dict.fromkeys(here, TAIL), operations=cuts)
            for sequence, at in here.items():
                assert_same(restored[sequence], expected[at : at + TAIL])
                assert_same(cut[sequence], expected[at : at + TAIL])
            chain.run([], operations=[chain.drop(sequence) for sequence in here])
        assert_same(rows(chain, tmp_path, 1, TAIL), expected[TOKENS : TOKENS + TAIL])
        assert_same(rows(chain, tmp_path, 1, TAIL, operations=[chain.truncate(1, 0)]), expected[:TAIL])
        ends = [chain.drop_snapshot(number) for number in range(1, TOKENS + 1)]
        chain.run([], operations=[chain.drop(1), *ends])
        assert chain.is_at_rest


@pytest.mark.parametrize("position", [1, 63, 64, 65, 100])
def test_what_sequences_write_after_a_snapshot_does_not_reach_each_other(
    case: TinyCase, tmp_path: Path, position: int
) -> None:
    """The first goes on beside two restored ones with other rows; then all are gone on from once more."""
    ids, other = case.ids.tolist(), other_ids(case)
    with chain_of(case) as chain:
        chain.run([(1, position)], operations=[chain.open(1, ids)])
        begin = [chain.snapshot(1, 7)] + [
            chain.restore(sequence, 7, position, tokens)
            for sequence, tokens in ((2, ids[:position] + other), (3, ids))
        ]
        chain.run([(1, 5), (2, 5), (3, 2)], operations=begin)
        chain.run([(2, 4), (1, 4)], operations=[])
        for sequence, done in ((1, 9), (3, 2)):
            here = slice(position + done, position + done + TAIL)
            assert_same(rows(chain, tmp_path, sequence, TAIL), case.reference.logits[here])
        fresh = chain.restore(4, 7, position, ids)
        found = rows(chain, tmp_path, 4, TAIL, operations=[fresh, chain.drop_snapshot(7)])
        assert_same(found, case.reference.logits[position : position + TAIL])
        branch = rows(chain, tmp_path, 2, TAIL)
        chain.run([], operations=[chain.drop(sequence) for sequence in (1, 2, 3, 4)])
        assert chain.is_at_rest
        whole = chain.prompt_logits((ids[:position] + other)[: position + 9 + TAIL], tmp_path, [
            position + 9 + TAIL
        ])  # fmt: skip
        assert_same(branch, whole[position + 9 :])


def test_full_pages_are_shared_and_a_part_page_is_copied_once(case: TinyCase) -> None:
    ids = case.ids.tolist()
    with chain_of(case) as chain:
        states = [stage._states for stage in chain.stages if stage._states.keys]
        total = [pool.free_tokens for pool in states]

        def pages_held() -> set[int]:
            return {(all_ - pool.free_tokens) // 64 for all_, pool in zip(total, states, strict=True)}

        chain.run([(1, 100)], operations=[chain.open(1, ids)], snapshots={1: {70: 1, 100: 2}})
        assert pages_held() == {2}
        chain.run([], operations=[chain.restore(2, 1, 70, ids), chain.restore(3, 2, 100, ids)])
        assert pages_held() == {2}
        chain.run([(2, 1), (3, 1)])
        assert pages_held() == {4}  # a second page of their own each; the first is shared by all five
        chain.run([(1, 20)])
        assert pages_held() == {4}
        chain.run([], operations=[chain.drop(1), chain.drop_snapshot(2)])
        assert pages_held() == {4}  # snapshot 1 holds the page that sequence 1 wrote
        chain.run([], operations=[chain.drop_snapshot(1)])
        assert pages_held() == {3}
        chain.run([], operations=[chain.drop(2), chain.drop(3)])
        assert chain.is_at_rest


def test_histories_go_back_only_to_a_snapshot_on_every_stage(tiny_qwen4exp_f32: TinyCase) -> None:
    """A stage without recurrent layers refuses like the others: layer 3 alone is attention."""
    ids = tiny_qwen4exp_f32.ids.tolist()
    with StageChain(tiny_qwen4exp_f32.path, boundaries=(3, 4)) as chain:
        chain.run([(1, 40)], operations=[chain.open(1, ids)], snapshots={1: {16: 1, 33: 2}})
        assert not chain.stages[1]._states.recurrent
        cut = StateOperation(kind="truncate", sequence=1, seat=0, position=20, snapshot=1)
        chunk = SuperChunk(
            epoch=1, index=1, operations=(cut,), segments=(), sub_chunk_tokens=64, slot_rows=64,
            upload="stream-all",
        )  # fmt: skip
        for stage, inbound, outbound in zip(
            chain.stages, (None, *chain.links), (*chain.links, None), strict=True
        ):
            for number in (0, 1, 2, 9):
                with pytest.raises(RequestError, match=r"back to position 20.*its snapshots lie at 16, 33"):
                    stage.run(
                        replace(chunk, operations=(replace(cut, snapshot=number),)),
                        [],
                        inbound=inbound,
                        outbound=outbound,
                    )
        chain.run([], operations=[chain.truncate(1, 16, 1)])
        assert {stage._states.get(1).shortest for stage in chain.stages} == {16}


def test_a_snapshot_of_another_past_is_refused(tiny_qwen4exp_f32: TinyCase) -> None:
    """Going back to 20 of another sequence's history would mix two pasts."""
    ids = tiny_qwen4exp_f32.ids.tolist()
    with chain_of(tiny_qwen4exp_f32) as chain:
        begin = [chain.open(1, ids), chain.open(2, ids)]
        chain.run([(1, 30), (2, 30)], operations=begin, snapshots={1: {20: 1, 25: 2}})
        with pytest.raises(RequestError, match=r"sequence 2 cannot be cut back.*it has no snapshot"):
            chain.run([], operations=[chain.truncate(2, 20, 1)])
    with chain_of(tiny_qwen4exp_f32) as chain:
        chain.run([(1, 30)], operations=[chain.open(1, ids)], snapshots={1: {20: 1, 25: 2}})
        chain.run([(3, 5)], operations=[chain.restore(3, 2, 25, ids)])
        chain.run([(3, 5)], operations=[chain.truncate(3, 20, 1)])  # its own past before it was restored
        with pytest.raises(RequestError, match=r"its snapshots lie at 20$"):
            chain.run([], operations=[chain.truncate(3, 23, 2)])


@pytest.mark.parametrize(
    ("marks", "complaint"),
    [
        ({10: 1}, "snapshot 1 at position 10 is not after 10 and up to 30"),
        ({31: 1}, "snapshot 1 at position 31 is not after 10 and up to 30"),
        ({20: 1, 15: 2}, "snapshot 2 at position 15 is not after 20 and up to 30"),
        ({20: 5}, "snapshot 5 of sequence 1: the number is taken"),
        ({20: 0}, "snapshot 0 of sequence 1: the number is taken or not above 0"),
    ],
)
def test_marks_that_fit_no_segment_are_refused_before_any_row(
    tiny_qwen3moe_f32: TinyCase, marks: dict[int, int], complaint: str
) -> None:
    with chain_of(tiny_qwen3moe_f32) as chain:
        chain.run(
            [(1, 10)], operations=[chain.open(1, tiny_qwen3moe_f32.ids.tolist())], snapshots={1: {5: 5}}
        )
        with pytest.raises(InvariantError, match=complaint):
            chain.run([(1, 20)], snapshots={1: marks})
        assert chain.stages[0]._states.get(1).shortest == 10


def test_a_snapshot_of_a_cancelled_walk_does_not_come_to_be(case: TinyCase, tmp_path: Path) -> None:
    """The last stage gives up; only the first has the snapshot, and dropping it everywhere is no error."""
    ids = case.ids.tolist()
    with chain_of(case) as chain:
        chain.run([(1, 40)], operations=[chain.open(1, ids)], snapshots={1: {40: 3}})
        chain.run([(1, 30)], snapshots={1: {60: 1}}, cancel=lambda stage, _segment: stage == 1)
        assert [result.cancelled for result in chain.results] == [False, True]
        assert chain.stages[0]._states._taken.keys() == {1, 3}
        assert chain.stages[1]._states._taken.keys() == {3}
        # A record that was on its way passes over the lost sequence.
        chain.run([], operations=[chain.snapshot(1, 4), chain.drop_snapshot(1)])
        assert chain.stages[1]._states._taken.keys() == {3}
        # Cut back to before the loss, the sequence is as good as new.
        back = chain.truncate(1, 40, 3)
        found = rows(chain, tmp_path, 1, TAIL, operations=[back, chain.drop_snapshot(4)])
        assert_same(found, case.reference.logits[40 : 40 + TAIL])
        chain.run([], operations=[chain.drop(1), chain.drop_snapshot(3)])
        assert chain.is_at_rest


def test_a_cut_to_rows_that_were_lost_leaves_the_sequence_lost(tiny_qwen3moe_f32: TinyCase) -> None:
    ids = tiny_qwen3moe_f32.ids.tolist()
    with chain_of(tiny_qwen3moe_f32) as chain:
        chain.run([(1, 40)], operations=[chain.open(1, ids)])
        chain.run([(1, 30)], cancel=lambda _stage, _segment: True)
        tokens = chain.run([(1, 3)], operations=[chain.truncate(1, 50)])
        assert tokens == []
        tokens = chain.run([(1, 10)], operations=[chain.truncate(1, 40)])
        assert len(tokens) == 1


def test_no_room_for_a_snapshot_is_said_with_both_numbers(tiny_qwen3moe_f32: TinyCase) -> None:
    ids = tiny_qwen3moe_f32.ids.tolist()
    with chain_of(tiny_qwen3moe_f32, max_snapshots=1) as chain:
        chain.run([(1, 20)], operations=[chain.open(1, ids)], snapshots={1: {10: 1}})
        with pytest.raises(RequestError, match="no room for another snapshot: 1 of 1 in use"):
            chain.run([(1, 20)], snapshots={1: {30: 2}})


def test_a_full_pool_refuses_the_copy_of_a_page_before_any_row(tiny_qwen3moe_f32: TinyCase) -> None:
    ids = tiny_qwen3moe_f32.ids.tolist()
    with chain_of(tiny_qwen3moe_f32, kv_pool_tokens=128) as chain:
        chain.run([(1, 100)], operations=[chain.open(1, ids)], snapshots={1: {90: 1}})
        with pytest.raises(RequestError, match="KV pool is full: 64 more tokens needed, 0 of 128 free"):
            chain.run([(2, 5)], operations=[chain.restore(2, 1, 90, ids)])
        assert chain.stages[0]._states.get(2).shortest == 90
