"""What a stage's layers must remember between segments, per sequence: who has which pages and slots.

A sequence has one page table for all layers of the stage, so the layers cannot disagree. States change
through the layers' attention halves and through the operations of StatePool only; each layer keeps its own
position and refuses rows that do not follow on from it.

Pages are shared between sequences and snapshots. A page's rows from some position on are written by one
holder only: a snapshot never writes, and a sequence that was restored or cut back inside a page copies it
before its next row, unless it is the only holder by then.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from strata_coord.ipc.assignment import KV_PAGE_TOKENS, KvDtype, ModelGeometry
from strata_coord.ipc.errors import InvariantError, RequestError
from strata_coord.kernels.kv_rows import dequantize_rows, quantize_rows
from strata_coord.stage_worker.page_pool import PagePool
from strata_coord.stage_worker.page_table import PageTable
from strata_coord.stage_worker.snapshot import Snapshot
from strata_coord.stage_worker.state_memory import StateMemory

PAGE_TOKENS = KV_PAGE_TOKENS


class StatePool(StateMemory):
    """The state of one stage, layers [first_layer, last_layer): memory, sequences and snapshots.

    kv_pool_tokens is rounded up to whole pages; a sequence takes whole pages, so several short ones hold up
    to 63 tokens of room each that they do not use. A snapshot holds its sequence's pages, too.
    """

    def __init__(
        self,
        geometry: ModelGeometry,
        first_layer: int,
        last_layer: int,
        *,
        kv_dtype: KvDtype,
        kv_pool_tokens: int,
        max_sequences: int,
        max_snapshots: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self._pages = PagePool(-(-kv_pool_tokens // PAGE_TOKENS))
        super().__init__(
            geometry,
            first_layer,
            last_layer,
            kv_dtype=kv_dtype,
            num_pages=self._pages.num_pages,
            max_sequences=max_sequences,
            max_snapshots=max_snapshots,
            device=device,
        )
        self.first_layer = first_layer
        self.last_layer = last_layer
        self.max_sequences = max_sequences
        self.max_snapshots = max_snapshots
        self._free_slots = list(range(max_sequences - 1, -1, -1))
        self._sequences: dict[int, SequenceState] = {}
        self._free_snapshot_slots = list(range(max_snapshots - 1, -1, -1))
        self._taken: dict[int, Snapshot] = {}

    @property
    def num_pages(self) -> int:
        """Pages in all."""
        return self._pages.num_pages

    @property
    def free_tokens(self) -> int:
        """Tokens of room in pages that no sequence or snapshot holds."""
        return self._pages.num_free * PAGE_TOKENS

    def create(self, sequence: int) -> "SequenceState":
        """Give a sequence an empty state.

        Raises:
            RequestError: max_sequences states exist.
            InvariantError: this sequence has one.
        """
        state = self._new_state(sequence)
        self.clear_slot(state.slot)
        return state

    def _new_state(self, sequence: int) -> "SequenceState":
        if sequence in self._sequences:
            message = f"sequence {sequence} already has a state"
            raise InvariantError(message)
        if not self._free_slots:
            message = f"no room for another sequence: {self.max_sequences} of {self.max_sequences} in use"
            raise RequestError(message)
        state = SequenceState(self, sequence, self._free_slots.pop())
        self._sequences[sequence] = state
        return state

    def get(self, sequence: int) -> "SequenceState":
        """Return the state of a sequence.

        Raises:
            InvariantError: it has none.
        """
        state = self._sequences.get(sequence)
        if state is None:
            message = f"sequence {sequence} has no state"
            raise InvariantError(message)
        return state

    def drop(self, sequence: int) -> None:
        """Free a sequence's pages and slot; nothing happens when it has none. Its snapshots stay."""
        state = self._sequences.pop(sequence, None)
        if state is not None:
            self._pages.release(state.pages)
            self._free_slots.append(state.slot)

    def truncate(self, sequence: int, position: int, *, snapshot: int = 0) -> None:
        """Cut a sequence back to its first position rows.

        Args:
            sequence: Which one.
            position: Rows that stay.
            snapshot: Taken of this sequence at that position; 0 where none is needed: the model has no
                histories, or all rows stay, or none.

        Raises:
            InvariantError: a layer has not come to that position.
            RequestError: the model has histories and this is no snapshot of the sequence at position.
        """
        state = self.get(sequence)
        if position > state.shortest:
            message = f"sequence {sequence} ends at {state.shortest} and cannot be cut back to {position}"
            raise InvariantError(message)
        if position == state.shortest and state.is_even:
            return
        if self.geometry.has_histories and position:
            self.load_slot(state.slot, self._snapshot_of_past(state, position, snapshot).slot)
        elif self.geometry.has_histories:
            self.clear_slot(state.slot)
        kept = -(-position // PAGE_TOKENS)
        self._pages.release(state.pages[kept:])
        state.begin_at(position, state.pages[:kept], state.past)

    def _snapshot_of_past(self, state: "SequenceState", position: int, snapshot: int) -> Snapshot:
        found = self._taken.get(snapshot)
        if found is not None and state.past.get(snapshot) == position and not found.layers_due:
            return found
        live = sorted({at for number, at in state.past.items() if number in self._taken})
        where = f"its snapshots lie at {', '.join(map(str, live))}" if live else "it has no snapshot"
        message = (
            f"sequence {state.sequence} cannot be cut back to position {position}: layers of "
            f"{self.geometry.architecture} keep histories that only a snapshot brings back, and {where}"
        )
        raise RequestError(message)

    def begin_snapshot(self, snapshot: int, sequence: int, position: int) -> None:
        """Hold the pages of a sequence's first position rows, which its layers may still be about to write.

        Every layer then copies its histories with copy_histories when it is at that position.

        Raises:
            RequestError: max_snapshots exist.
            InvariantError: the number is taken or 0, or there are no pages up to position.
        """
        if snapshot in self._taken or snapshot < 1:
            message = f"snapshot {snapshot} of sequence {sequence}: the number is taken or not above 0"
            raise InvariantError(message)
        if not self._free_snapshot_slots:
            message = f"no room for another snapshot: {self.max_snapshots} of {self.max_snapshots} in use"
            raise RequestError(message)
        state = self.get(sequence)
        held = -(-position // PAGE_TOKENS) if self.keys else 0
        if held > len(state.pages):
            message = (
                f"snapshot {snapshot} at position {position} needs {held} pages, "
                f"sequence {sequence} has {len(state.pages)}"
            )
            raise InvariantError(message)
        pages = state.pages[:held]
        self._pages.share(pages)
        self._taken[snapshot] = Snapshot(
            position=position,
            sequence=sequence,
            slot=self._free_snapshot_slots.pop(),
            pages=pages,
            layers_due=set(range(self.first_layer, self.last_layer)),
            past={},
        )

    def copy_histories(self, snapshot: int, layer: int) -> None:
        """Copy a layer's histories to a snapshot that was begun.

        Raises:
            InvariantError: there is no such snapshot, or the layer is not at its position.
        """
        taken = self._snapshot(snapshot)
        state = self.get(taken.sequence)
        if state.length(layer) != taken.position:
            message = (
                f"snapshot {snapshot} is due at position {taken.position}, but layer {layer} of sequence "
                f"{taken.sequence} is at {state.length(layer)}"
            )
            raise InvariantError(message)
        self.save_slot(layer, state.slot, taken.slot)
        taken.layers_due.discard(layer)

    def finish_snapshot(self, snapshot: int) -> None:
        """Note that every layer has copied: the snapshot counts. Those of one walk finish by rising position.

        Raises:
            InvariantError: a layer has not.
        """
        taken = self._snapshot(snapshot)
        if taken.layers_due:
            message = f"snapshot {snapshot}: layer {min(taken.layers_due)} has not copied its histories"
            raise InvariantError(message)
        state = self.get(taken.sequence)
        taken.past = {number: at for number, at in state.past.items() if number in self._taken}
        state.past[snapshot] = taken.position

    def drop_snapshot(self, snapshot: int) -> None:
        """Free a snapshot's pages and slot; nothing happens when there is none of that number."""
        taken = self._taken.pop(snapshot, None)
        if taken is not None:
            self._pages.release(taken.pages)
            self._free_snapshot_slots.append(taken.slot)

    def restore(self, sequence: int, snapshot: int) -> "SequenceState":
        """Give a new sequence the state of a snapshot: its pages are shared, its histories copied.

        Raises:
            RequestError: max_sequences states exist.
            InvariantError: the sequence has a state, or the snapshot does not count or exist.
        """
        taken = self._snapshot(snapshot)
        if taken.layers_due:
            message = f"snapshot {snapshot} is not finished and cannot be restored"
            raise InvariantError(message)
        state = self._new_state(sequence)
        self.load_slot(state.slot, taken.slot)
        self._pages.share(taken.pages)
        state.begin_at(taken.position, taken.pages, {**taken.past, snapshot: taken.position})
        return state

    def _snapshot(self, snapshot: int) -> Snapshot:
        taken = self._taken.get(snapshot)
        if taken is None:
            message = f"there is no snapshot {snapshot}"
            raise InvariantError(message)
        return taken

    def grow(self, state: "SequenceState", num_tokens: int) -> None:
        """Give a sequence the pages of num_tokens positions, its own where it writes; all or nothing.

        Raises:
            RequestError: the pool has too few free pages.
        """
        missing = max(0, -(-num_tokens // PAGE_TOKENS) - len(state.pages))
        borrowed = state.borrowed_page if num_tokens > state.shortest else None
        copied = borrowed is not None and self._pages.holders(state.pages[borrowed]) > 1
        if missing or copied:
            taken = self._pages.take(missing + copied)
            pages = list(state.pages)
            if borrowed is not None and copied:
                own = taken.pop(0)
                self.copy_page(pages[borrowed], own)
                self._pages.release([pages[borrowed]])
                pages[borrowed] = own
            state.set_pages(pages + taken)
        if borrowed is not None:
            state.borrowed_page = None


class SequenceState:
    """One sequence's state in one stage. Made by StatePool, never directly."""

    def __init__(self, pool: StatePool, sequence: int, slot: int) -> None:
        self.pool = pool
        self.sequence = sequence
        self.slot = slot
        self._table = PageTable(pool.device)
        self.past: dict[int, int] = {}  # snapshots of this sequence's own past: number -> position
        self.borrowed_page: int | None = None  # place in pages of one that others may go on writing
        self.begin_at(0, [], {})

    def begin_at(self, position: int, pages: list[int], past: dict[int, int]) -> None:
        """Stand at a position with these pages; the pool calls this.

        past: snapshots that may be of this sequence; those after position are not.
        """
        self.past = {number: at for number, at in past.items() if at <= position}
        self._positions = dict.fromkeys(range(self.pool.first_layer, self.pool.last_layer), position)
        self.borrowed_page = len(pages) - 1 if pages and position % PAGE_TOKENS else None
        self.set_pages(pages)

    @property
    def pages(self) -> list[int]:
        """The page table; empty on a stage without attention."""
        return self._table.pages

    def set_pages(self, pages: list[int]) -> None:
        """Take a page table; the pool calls this."""
        self._table.set_pages(pages)

    def length(self, layer: int) -> int:
        """Positions that a layer has seen."""
        return self._positions[layer]

    @property
    def shortest(self) -> int:
        """Positions that every layer has seen."""
        return min(self._positions.values())

    @property
    def is_even(self) -> bool:
        """Whether all layers are at the same position, as they are between super-chunks."""
        return len(set(self._positions.values())) == 1

    def reserve(self, num_tokens: int) -> None:
        """Make sure that positions [0, num_tokens) have pages.

        Raises:
            RequestError: the pool has too few free pages.
        """
        if self.pool.keys:
            self.pool.grow(self, num_tokens)

    def advance(self, layer: int, first_position: int, count: int) -> None:
        """Note that a layer is about to take in count rows from first_position on.

        Raises:
            InvariantError: the layer's state does not end at first_position.
        """
        have = self._positions[layer]
        if first_position != have:
            where = f"sequence {self.sequence}, layer {layer}"
            message = f"{where}: rows start at {first_position}, the state ends at {have}"
            raise InvariantError(message)
        self._positions[layer] = first_position + count

    def write_kv(self, layer: int, first_position: int, k_TGD: Tensor, v_TGD: Tensor) -> None:
        """Store keys and values of rows from first_position on, taking pages as needed."""
        pool = self.pool
        self.reserve(first_position + k_TGD.shape[0])
        for memory, scales, rows_TGD in (
            (pool.keys[layer], pool.key_scales.get(layer), k_TGD),
            (pool.values[layer], pool.value_scales.get(layer), v_TGD),
        ):
            rows_GTD = rows_TGD.transpose(0, 1)
            if scales is not None:
                rows_GTD, scale_GT = quantize_rows(rows_GTD)
                self._table.write(scales, first_position, scale_GT.unsqueeze(-1))
            self._table.write(memory, first_position, rows_GTD)

    def read_kv(
        self, layer: int, length: int, *, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values [G, length, D]; views of the pool where dtype and pages allow."""
        return self._read(layer, lambda memory: self._table.read(memory, length), dtype)

    def read_kv_at(self, layer: int, positions_N: Tensor) -> tuple[Tensor, Tensor]:
        """Return fp32 keys and values [G, N, D] of int64 positions in any order."""
        return self._read(layer, lambda memory: self._table.read_at(memory, positions_N), torch.float32)

    def _read(
        self, layer: int, rows: Callable[[Tensor], Tensor], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        pool = self.pool
        if layer not in pool.key_scales:
            return rows(pool.keys[layer]).to(dtype), rows(pool.values[layer]).to(dtype)
        return (
            dequantize_rows(rows(pool.keys[layer]), rows(pool.key_scales[layer]).squeeze(-1)).to(dtype),
            dequantize_rows(rows(pool.values[layer]), rows(pool.value_scales[layer]).squeeze(-1)).to(dtype),
        )

    def write_blocks(self, layer: int, first_block: int, keys_MI: Tensor) -> None:
        """Store finished block keys; their pages exist once the positions' keys are written."""
        self._table.write(self.pool.block_keys[layer].unsqueeze(0), first_block, keys_MI.unsqueeze(0))

    def read_blocks(self, layer: int, num_blocks: int) -> Tensor:
        """Return the first num_blocks block keys [M, I]."""
        return self._table.read(self.pool.block_keys[layer].unsqueeze(0), num_blocks)[0]

    def raw_keys(self, layer: int) -> Tensor:
        """Return the stored raw indexer keys [r - 1, I], a view; length(layer) mod r of them count."""
        return self.pool.raw_keys[layer][self.slot]

    def conv(self, layer: int) -> Tensor:
        """Return the convolution history [K - 1, C], a view."""
        return self.pool.conv[layer][self.slot]

    def recurrent(self, layer: int) -> Tensor:
        """Return the recurrent state [H, dk, dv], a view."""
        return self.pool.recurrent[layer][self.slot]

    def ngram_conv(self, layer: int) -> Tensor:
        """Return the history of the n-gram convolution, a view."""
        return self.pool.ngram_conv[layer][self.slot]
