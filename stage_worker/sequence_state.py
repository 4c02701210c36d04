"""Per sequence, what a stage's layers must remember between segments: KV pages and fixed-size histories.

Everything is allocated up front. KV and block keys are paged: one page is 64 positions of every attention
layer of the stage, and a sequence has one page table for all of them, so the layers cannot disagree.
Histories (convolution, recurrent state, n-gram) lie in one slot per sequence. States change through the
layers' attention halves only; each layer keeps its own position and refuses rows that do not follow on from
it.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from strata_coord.ipc.assignment import KvDtype, ModelGeometry
from strata_coord.ipc.errors import InvariantError, RequestError

PAGE_TOKENS = 64

KV_DTYPES: dict[KvDtype, torch.dtype] = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class StatePool:
    """The state memory of one stage, layers [first_layer, last_layer).

    kv_pool_tokens is rounded up to whole pages; a sequence takes whole pages, so several short ones hold up
    to 63 tokens of room each that they do not use.
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
        device: torch.device | str = "cpu",
    ) -> None:
        self.geometry = geometry
        self.first_layer = first_layer
        self.last_layer = last_layer
        self.device = torch.device(device)
        self.max_sequences = max_sequences
        attention = geometry.attention
        layers = range(first_layer, last_layer)
        self.num_pages = -(-kv_pool_tokens // PAGE_TOKENS)
        self.keys: dict[int, Tensor] = {}  # layer -> [G, pages, 64, D]
        self.values: dict[int, Tensor] = {}
        self.block_keys: dict[int, Tensor] = {}  # layer -> [pages, 64 / r, I] fp32
        self.raw_keys: dict[int, Tensor] = {}  # layer -> [sequences, r - 1, I] fp32: the incomplete block
        self.conv: dict[int, Tensor] = {}  # layer -> [sequences, K - 1, C] fp32
        self.recurrent: dict[int, Tensor] = {}  # layer -> [sequences, H, dk, dv] fp32
        self.ngram_conv: dict[int, Tensor] = {}  # layer -> [sequences, (K - 1) * n, N * D] fp32
        for layer in layers:
            if geometry.recurrent_layers[layer]:
                self._add_delta_net(layer)
            else:
                shape = (attention.num_kv_heads, self.num_pages, PAGE_TOKENS, attention.head_dim)
                self.keys[layer] = torch.zeros(shape, dtype=KV_DTYPES[kv_dtype], device=self.device)
                self.values[layer] = torch.zeros_like(self.keys[layer])
                self._add_indexer(layer)
            if geometry.ngram is not None and layer in geometry.ngram.layers:
                rows = (geometry.ngram.conv_kernel - 1) * geometry.ngram.ngram_size
                self.ngram_conv[layer] = self._slots(rows, geometry.row_width)
        self._free_pages = list(range(self.num_pages - 1, -1, -1))  # popped from the end: lowest first
        self._free_slots = list(range(max_sequences - 1, -1, -1))
        self._sequences: dict[int, SequenceState] = {}

    def _slots(self, *shape: int) -> Tensor:
        return torch.zeros((self.max_sequences, *shape), dtype=torch.float32, device=self.device)

    def _add_delta_net(self, layer: int) -> None:
        delta = self.geometry.delta_net
        if delta is None:
            message = f"layer {layer} is recurrent but the geometry has no DeltaNet sizes"
            raise InvariantError(message)
        channels = (2 * delta.num_key_heads + delta.num_value_heads) * delta.head_dim
        self.conv[layer] = self._slots(delta.conv_kernel - 1, channels)
        self.recurrent[layer] = self._slots(delta.num_value_heads, delta.head_dim, delta.head_dim)

    def _add_indexer(self, layer: int) -> None:
        sparse = self.geometry.sparse_attention
        ratio = sparse.compress_ratios[layer] if sparse is not None else 0
        if sparse is None or ratio == 0:
            return
        if PAGE_TOKENS % ratio:
            message = f"layer {layer}: compress ratio {ratio} does not divide a page of {PAGE_TOKENS} tokens"
            raise InvariantError(message)
        shape = (self.num_pages, PAGE_TOKENS // ratio, sparse.head_dim)
        self.block_keys[layer] = torch.zeros(shape, dtype=torch.float32, device=self.device)
        self.raw_keys[layer] = self._slots(ratio - 1, sparse.head_dim)

    @property
    def free_tokens(self) -> int:
        """Tokens of room in pages that no sequence holds."""
        return len(self._free_pages) * PAGE_TOKENS

    @property
    def num_bytes(self) -> int:
        """Bytes of all state tensors."""
        return sum(tensor.nbytes for tensor in self._tensors())

    def _tensors(self) -> Iterator[Tensor]:
        yield from self.keys.values()
        yield from self.values.values()
        yield from self.block_keys.values()
        yield from self._slotted()

    def _slotted(self) -> Iterator[Tensor]:
        for group in (self.raw_keys, self.conv, self.recurrent, self.ngram_conv):
            yield from group.values()

    def create(self, sequence: int) -> "SequenceState":
        """Give a sequence an empty state.

        Raises:
            RequestError: max_sequences states exist.
            InvariantError: this sequence has one.
        """
        if sequence in self._sequences:
            message = f"sequence {sequence} already has a state"
            raise InvariantError(message)
        if not self._free_slots:
            message = f"no room for another sequence: {self.max_sequences} of {self.max_sequences} in use"
            raise RequestError(message)
        slot = self._free_slots.pop()
        for tensor in self._slotted():
            tensor[slot].zero_()
        state = SequenceState(self, sequence, slot)
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
        """Free a sequence's pages and slot; nothing happens when it has none."""
        state = self._sequences.pop(sequence, None)
        if state is not None:
            self._free_pages.extend(reversed(state.pages))
            # Lowest first keeps the next sequence's pages in one run, which reads without a copy.
            self._free_pages.sort(reverse=True)
            self._free_slots.append(state.slot)

    def take_pages(self, state: "SequenceState", num_pages: int) -> None:
        """Extend a page table to num_pages, all or nothing.

        Raises:
            RequestError: the pool has too few free pages.
        """
        missing = num_pages - len(state.pages)
        if missing <= 0:
            return
        if missing > len(self._free_pages):
            message = (
                f"KV pool is full: {missing * PAGE_TOKENS} more tokens needed, {self.free_tokens} of "
                f"{self.num_pages * PAGE_TOKENS} free; raise kv.pool_tokens or send fewer prompts at once"
            )
            raise RequestError(message)
        state.append_pages([self._free_pages.pop() for _ in range(missing)])


class SequenceState:
    """One sequence's state in one stage. Made by StatePool.create, never directly."""

    def __init__(self, pool: StatePool, sequence: int, slot: int) -> None:
        self.pool = pool
        self.sequence = sequence
        self.slot = slot
        self.pages: list[int] = []
        self._contiguous = True
        self._table = torch.empty(0, dtype=torch.int64, device=pool.device)
        self._positions = dict.fromkeys(range(pool.first_layer, pool.last_layer), 0)

    def append_pages(self, pages: list[int]) -> None:
        """Extend the page table; the pool calls this."""
        self.pages += pages
        self._contiguous = self.pages == list(range(self.pages[0], self.pages[0] + len(self.pages)))
        self._table = torch.tensor(self.pages, dtype=torch.int64, device=self.pool.device)

    def length(self, layer: int) -> int:
        """Positions that a layer has seen."""
        return self._positions[layer]

    def reserve(self, num_tokens: int) -> None:
        """Make sure that positions [0, num_tokens) have pages.

        Raises:
            RequestError: the pool has too few free pages.
        """
        if self.pool.keys:
            self.pool.take_pages(self, -(-num_tokens // PAGE_TOKENS))

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
        stop = first_position + k_TGD.shape[0]
        self.reserve(stop)
        for pool, rows in ((self.pool.keys[layer], k_TGD), (self.pool.values[layer], v_TGD)):
            self._write_paged(pool, first_position, rows.transpose(0, 1), PAGE_TOKENS)

    def read_kv(self, layer: int, length: int) -> tuple[Tensor, Tensor]:
        """Return fp32 keys and values [G, length, D]; views of the pool where dtype and pages allow."""
        return (
            self._read_paged(self.pool.keys[layer], length, PAGE_TOKENS).float(),
            self._read_paged(self.pool.values[layer], length, PAGE_TOKENS).float(),
        )

    def write_blocks(self, layer: int, first_block: int, keys_MI: Tensor) -> None:
        """Store finished block keys; their pages exist once the positions' keys are written."""
        pool = self.pool.block_keys[layer]
        self._write_paged(pool.unsqueeze(0), first_block, keys_MI.unsqueeze(0), pool.shape[1])

    def read_blocks(self, layer: int, num_blocks: int) -> Tensor:
        """Return the first num_blocks block keys [M, I]."""
        pool = self.pool.block_keys[layer]
        return self._read_paged(pool.unsqueeze(0), num_blocks, pool.shape[1])[0]

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

    def _write_paged(self, pool_GPSD: Tensor, first: int, rows_GTD: Tensor, per_page: int) -> None:
        # Whole pages of the pool are one row axis; row i of the sequence is at page table[i / S], place i mod
        # S.
        flat = pool_GPSD.flatten(1, 2)
        count = rows_GTD.shape[1]
        if self._contiguous and self.pages:
            start = self.pages[0] * per_page + first
            flat[:, start : start + count].copy_(rows_GTD)
            return
        index = torch.arange(first, first + count, device=flat.device)
        places = self._table[index // per_page] * per_page + index % per_page
        flat.index_copy_(1, places, rows_GTD.to(flat.dtype))

    def _read_paged(self, pool_GPSD: Tensor, length: int, per_page: int) -> Tensor:
        flat = pool_GPSD.flatten(1, 2)
        if self._contiguous:
            start = self.pages[0] * per_page if self.pages else 0
            return flat[:, start : start + length]
        used = -(-length // per_page)
        return pool_GPSD.index_select(1, self._table[:used]).flatten(1, 2)[:, :length]
