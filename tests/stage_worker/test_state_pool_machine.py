"""Any interleaving of creates, rows, cuts, snapshots, restores and drops: what is read is what was written.

The model beside the pool knows of each sequence and snapshot only the list of its rows' values. Every row is
one number, written to all layers and into the histories, so a page that two holders wrote shows at once.
"""

import itertools

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from layer_oracle import tiny_geometry_qwen4exp

from strata_coord.ipc.assignment import KV_PAGE_TOKENS, KvDtype
from strata_coord.ipc.errors import RequestError
from strata_coord.stage_worker.sequence_state import SequenceState, StatePool

NUM_PAGES, MAX_SEQUENCES, MAX_SNAPSHOTS = 7, 4, 3
ATTENTION, RECURRENT, BLOCK = 3, 0, 4


class PoolMachine(RuleBasedStateMachine):
    kv_dtype: KvDtype = "fp32"

    def __init__(self) -> None:
        super().__init__()
        self.pool = StatePool(
            tiny_geometry_qwen4exp(),
            0,
            4,
            kv_dtype=self.kv_dtype,
            kv_pool_tokens=NUM_PAGES * KV_PAGE_TOKENS,
            max_sequences=MAX_SEQUENCES,
            max_snapshots=MAX_SNAPSHOTS,
        )
        self.values = itertools.count(1)
        self.numbers = itertools.count(1)
        self.sequences: dict[int, list[float]] = {}
        self.snapshots: dict[int, list[float]] = {}
        self.past: dict[int, dict[int, int]] = {}  # sequence or snapshot -> snapshots before it

    def write(self, state: SequenceState, layer: int, rows: list[float], first: int) -> None:
        """What a layer does with rows: keys, blocks that they complete, and the history."""
        state.advance(layer, first, len(rows))
        if layer == ATTENTION:
            rows_TGD = torch.tensor(rows).view(-1, 1, 1).expand(-1, 2, 32)
            state.write_kv(layer, first, rows_TGD, -rows_TGD)
            for block in range(first // BLOCK, (first + len(rows)) // BLOCK):
                last = rows[block * BLOCK + BLOCK - 1 - first]
                state.write_blocks(layer, block, torch.full((1, 16), last))
        elif layer == RECURRENT:
            state.recurrent(layer).fill_(rows[-1])

    @precondition(lambda self: len(self.sequences) < MAX_SEQUENCES)
    @rule()
    def create(self) -> None:
        number = next(self.numbers)
        self.pool.create(number)
        self.sequences[number], self.past[number] = [], {}

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), count=st.integers(1, 70), mark=st.integers(0, 70))
    def extend(self, data: st.DataObject, count: int, mark: int) -> None:
        """One super-chunk, layer by layer, with a snapshot in the middle where there is room for one."""
        number = data.draw(st.sampled_from(sorted(self.sequences)))
        state, known = self.pool.get(number), self.sequences[number]
        first = len(known)
        try:
            state.reserve(first + count)
        except RequestError:
            assert self.pages_missing(number, first + count) > self.pool.free_tokens // KV_PAGE_TOKENS
            return
        rows = [float(next(self.values)) for _ in range(count)]
        has_mark = 0 < mark <= count and len(self.snapshots) < MAX_SNAPSHOTS
        snapshot = next(self.numbers) if has_mark else 0
        if has_mark:
            self.pool.begin_snapshot(snapshot, number, first + mark)
        cuts = [0, mark, count] if 0 < mark < count else [0, count]
        for layer in range(4):
            for start, stop in itertools.pairwise(cuts):
                self.write(state, layer, rows[start:stop], first + start)
                if has_mark and stop == mark:
                    self.pool.copy_histories(snapshot, layer)
        if has_mark:
            self.pool.finish_snapshot(snapshot)
            self.snapshots[snapshot] = known + rows[:mark]
            self.past[snapshot] = dict(self.past[number])
            self.past[number][snapshot] = first + mark
        known += rows

    def pages_missing(self, number: int, tokens: int) -> int:
        """Pages of its own that a sequence lacks, a shared last page counted as one to copy."""
        pages = self.pool.get(number).pages
        shared = len(self.sequences[number]) % KV_PAGE_TOKENS and self.holders()[pages[-1]] > 1
        return -(-tokens // KV_PAGE_TOKENS) - len(pages) + bool(shared)

    @precondition(lambda self: self.snapshots and len(self.sequences) < MAX_SEQUENCES)
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        snapshot, number = data.draw(st.sampled_from(sorted(self.snapshots))), next(self.numbers)
        self.pool.restore(number, snapshot)
        self.sequences[number] = list(self.snapshots[snapshot])
        self.past[number] = {**self.past[snapshot], snapshot: len(self.snapshots[snapshot])}

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.sequences)))
        known = self.sequences[number]
        position = data.draw(st.sampled_from([0, len(known), *self.past[number].values()]))
        snapshot = next((at for at, where in self.past[number].items() if where == position), 0)
        if position not in {0, len(known)} and snapshot not in self.snapshots:
            with pytest.raises(RequestError, match="only a snapshot brings back"):
                self.pool.truncate(number, position, snapshot=snapshot)
            return
        self.pool.truncate(number, position, snapshot=snapshot)
        del known[position:]
        self.past[number] = {at: where for at, where in self.past[number].items() if where <= position}

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.sequences)))
        self.pool.drop(number)
        del self.sequences[number], self.past[number]

    @precondition(lambda self: self.snapshots)
    @rule(data=st.data())
    def drop_snapshot(self, data: st.DataObject) -> None:
        snapshot = data.draw(st.sampled_from(sorted(self.snapshots)))
        self.pool.drop_snapshot(snapshot)
        del self.snapshots[snapshot]

    def holders(self) -> dict[int, int]:
        return {page: self.pool._pages.holders(page) for page in range(NUM_PAGES)}

    @invariant()
    def every_sequence_reads_what_it_wrote(self) -> None:
        for number, known in self.sequences.items():
            state = self.pool.get(number)
            assert {state.length(layer) for layer in range(4)} == {len(known)}
            keys, values = state.read_kv(ATTENTION, len(known))
            wanted = torch.tensor(known).view(1, -1, 1).expand(2, -1, 32)
            torch.testing.assert_close(keys, wanted)
            torch.testing.assert_close(values, -wanted)
            blocks = state.read_blocks(ATTENTION, len(known) // BLOCK)
            assert blocks[:, 0].tolist() == known[BLOCK - 1 :: BLOCK]
            assert set(state.recurrent(RECURRENT).unique().tolist()) == {known[-1] if known else 0.0}

    @invariant()
    def pages_are_held_as_often_as_they_are_used(self) -> None:
        held = dict.fromkeys(range(NUM_PAGES), 0)
        for number in self.sequences:
            for page in self.pool.get(number).pages:
                held[page] += 1
        for snapshot in self.snapshots:
            for page in self.pool._taken[snapshot].pages:
                held[page] += 1
        assert held == self.holders()
        assert self.pool.free_tokens == KV_PAGE_TOKENS * list(held.values()).count(0)

    def teardown(self) -> None:
        """Everything can be restored to the last, and nothing is left when all is dropped."""
        for number in list(self.sequences):
            self.pool.drop(number)
        self.sequences.clear()
        for snapshot, known in self.snapshots.items():
            self.sequences = {next(self.numbers): known}
            self.pool.restore(next(iter(self.sequences)), snapshot)
            self.every_sequence_reads_what_it_wrote()
            self.pool.drop(next(iter(self.sequences)))
            self.pool.drop_snapshot(snapshot)
        assert self.pool.free_tokens == NUM_PAGES * KV_PAGE_TOKENS
        assert len(self.pool._free_slots) == MAX_SEQUENCES
        assert len(self.pool._free_snapshot_slots) == MAX_SNAPSHOTS


class Int8Machine(PoolMachine):
    """Rows of one value each are exact in int8 with a scale per row."""

    kv_dtype: KvDtype = "int8"


PoolMachine.TestCase.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, derandomize=True
)
Int8Machine.TestCase.settings = settings(
    max_examples=15, stateful_step_count=30, deadline=None, derandomize=True
)
TestPool = PoolMachine.TestCase
TestInt8Pool = Int8Machine.TestCase
