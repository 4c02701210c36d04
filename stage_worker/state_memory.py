"""The tensors of a stage's sequence state: paged keys and values, histories, and room for snapshots.

All is allocated up front. Keys, values and block keys are paged: one page is KV_PAGE_TOKENS positions of
every attention layer of the stage. Histories (incomplete block, convolution, recurrent state, n-gram) have
one slot per sequence, and one per snapshot in host memory, where a copy that may never be used again costs
no device memory. Who has which page and slot is sequence_state.py's business.

Letters: G key-value heads, D head dim, I indexer dim, r positions of a block, H heads.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from strata_coord.ipc.assignment import KV_PAGE_TOKENS, KvDtype, ModelGeometry
from strata_coord.ipc.errors import InvariantError

KV_DTYPES: dict[KvDtype, torch.dtype] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "int8": torch.int8,
}


class StateMemory:
    """State tensors of layers [first_layer, last_layer), by layer."""

    def __init__(
        self,
        geometry: ModelGeometry,
        first_layer: int,
        last_layer: int,
        *,
        kv_dtype: KvDtype,
        num_pages: int,
        max_sequences: int,
        max_snapshots: int,
        device: torch.device | str,
    ) -> None:
        """Allocate; a pool on the meta device has the sizes only."""
        self.geometry = geometry
        self.device = torch.device(device)
        self._max_sequences = max_sequences
        self.keys: dict[int, Tensor] = {}  # [G, pages, 64, D]
        self.values: dict[int, Tensor] = {}
        self.key_scales: dict[int, Tensor] = {}  # int8 only: [G, pages, 64, 1] fp32
        self.value_scales: dict[int, Tensor] = {}
        self.block_keys: dict[int, Tensor] = {}  # [pages, 64 / r, I] fp32
        self.raw_keys: dict[int, Tensor] = {}  # [sequences, r - 1, I] fp32: the incomplete block
        self.conv: dict[int, Tensor] = {}  # [sequences, K - 1, C] fp32
        self.recurrent: dict[int, Tensor] = {}  # [sequences, H, dk, dv] fp32
        self.ngram_conv: dict[int, Tensor] = {}  # [sequences, (K - 1) * n, N * D] fp32
        for layer in range(first_layer, last_layer):
            if geometry.recurrent_layers[layer]:
                self._add_delta_net(layer)
            else:
                self._add_attention(layer, num_pages, KV_DTYPES[kv_dtype])
            if geometry.ngram is not None and layer in geometry.ngram.layers:
                rows = (geometry.ngram.conv_kernel - 1) * geometry.ngram.ngram_size
                self.ngram_conv[layer] = self._slots(rows, geometry.row_width)
        # Layer -> a copy of each of its histories per snapshot, in the order of histories().
        self._snapshots: dict[int, list[Tensor]] = {
            layer: [
                torch.zeros((max_snapshots, *history.shape[1:]), device="cpu" if self._is_real else "meta")
                for history in self.histories(layer)
            ]
            for layer in range(first_layer, last_layer)
        }

    @property
    def _is_real(self) -> bool:
        return self.device.type != "meta"

    def _slots(self, *shape: int) -> Tensor:
        return torch.zeros((self._max_sequences, *shape), dtype=torch.float32, device=self.device)

    def _add_attention(self, layer: int, num_pages: int, dtype: torch.dtype) -> None:
        attention = self.geometry.attention
        shape = (attention.num_kv_heads, num_pages, KV_PAGE_TOKENS)
        self.keys[layer] = torch.zeros((*shape, attention.head_dim), dtype=dtype, device=self.device)
        self.values[layer] = torch.zeros_like(self.keys[layer])
        if dtype == torch.int8:
            self.key_scales[layer] = torch.zeros((*shape, 1), dtype=torch.float32, device=self.device)
            self.value_scales[layer] = torch.zeros_like(self.key_scales[layer])
        sparse = self.geometry.sparse_attention
        ratio = sparse.compress_ratios[layer] if sparse is not None else 0
        if sparse is None or ratio == 0:
            return
        if KV_PAGE_TOKENS % ratio:
            message = (
                f"layer {layer}: compress ratio {ratio} does not divide a page of {KV_PAGE_TOKENS} tokens"
            )
            raise InvariantError(message)
        blocks = (num_pages, KV_PAGE_TOKENS // ratio, sparse.head_dim)
        self.block_keys[layer] = torch.zeros(blocks, dtype=torch.float32, device=self.device)
        self.raw_keys[layer] = self._slots(ratio - 1, sparse.head_dim)

    def _add_delta_net(self, layer: int) -> None:
        delta = self.geometry.delta_net
        if delta is None:
            message = f"layer {layer} is recurrent but the geometry has no DeltaNet sizes"
            raise InvariantError(message)
        channels = (2 * delta.num_key_heads + delta.num_value_heads) * delta.head_dim
        self.conv[layer] = self._slots(delta.conv_kernel - 1, channels)
        self.recurrent[layer] = self._slots(delta.num_value_heads, delta.head_dim, delta.head_dim)

    @property
    def num_bytes(self) -> int:
        """Bytes of all state tensors, snapshots included."""
        groups = (self.keys, self.values, self.key_scales, self.value_scales, self.block_keys)
        paged = sum(tensor.nbytes for group in groups for tensor in group.values())
        histories = sum(tensor.nbytes for layer in self._snapshots for tensor in self.histories(layer))
        return paged + histories + self.snapshot_bytes

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of the snapshots' histories."""
        return sum(tensor.nbytes for kept in self._snapshots.values() for tensor in kept)

    def histories(self, layer: int) -> Iterator[Tensor]:
        """Yield the slotted tensors of a layer, [sequences, ...] each."""
        for group in (self.raw_keys, self.conv, self.recurrent, self.ngram_conv):
            if layer in group:
                yield group[layer]

    def clear_slot(self, slot: int) -> None:
        """Give a slot the histories of a sequence without rows."""
        for layer in self._snapshots:
            for history in self.histories(layer):
                history[slot].zero_()

    def save_slot(self, layer: int, slot: int, snapshot_slot: int) -> None:
        """Copy a layer's histories of a sequence to a snapshot's."""
        for kept, history in zip(self._snapshots[layer], self.histories(layer), strict=True):
            kept[snapshot_slot].copy_(history[slot])

    def load_slot(self, slot: int, snapshot_slot: int) -> None:
        """Copy all layers' histories of a snapshot to a sequence's."""
        for layer, saved in self._snapshots.items():
            for kept, history in zip(saved, self.histories(layer), strict=True):
                history[slot].copy_(kept[snapshot_slot])

    def copy_page(self, source: int, target: int) -> None:
        """Copy one page of every layer."""
        for group in (self.keys, self.values, self.key_scales, self.value_scales):
            for tensor in group.values():
                tensor[:, target].copy_(tensor[:, source])
        for tensor in self.block_keys.values():
            tensor[target].copy_(tensor[source])
