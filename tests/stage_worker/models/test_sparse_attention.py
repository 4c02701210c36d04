"""Memory of sparse attention past its budget: bounded for a sub-chunk, whatever the prompt."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from real_geometries import flash_next
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from strata_coord.ipc.assignment import KvDtype
from strata_coord.kernels.attention import MASK_ELEMENTS
from strata_coord.stage_worker.models.attention import Rotary
from strata_coord.stage_worker.models.family import SegmentRows
from strata_coord.stage_worker.models.sparse_attention import SparseAttention, gather_from
from strata_coord.stage_worker.sequence_state import StatePool

LAYER, ROWS = 3, 64


class Allocations(TorchDispatchMode):
    """Counts the bytes of every storage that an operation makes anew."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {leaf.data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().data_ptr() not in known:
                self.largest = max(self.largest, leaf.untyped_storage().nbytes())
        return result


@contextmanager
def counted() -> Iterator[Allocations]:
    with Allocations() as allocations:
        yield allocations


def attend(length: int, *, kv_dtype: KvDtype = "fp32", first: int | None = None) -> tuple[int, torch.Tensor]:
    """One sub-chunk at the end of a prompt, real sizes of a layer: largest allocation, result."""
    geometry = flash_next()
    sparse = geometry.sparse_attention
    assert sparse is not None
    mixer = SparseAttention(geometry, sparse, LAYER, Rotary(64, 1e7))
    pool = StatePool(
        geometry, LAYER, LAYER + 1, kv_dtype=kv_dtype, kv_pool_tokens=length, max_sequences=1, max_snapshots=0
    )
    generator = torch.Generator().manual_seed(length)
    for memory in (pool.keys[LAYER], pool.values[LAYER], pool.block_keys[LAYER]):
        if memory.dtype == torch.int8:
            memory.random_(-127, 128, generator=generator)
        else:
            memory.normal_(generator=generator)
    for scales in (*pool.key_scales.values(), *pool.value_scales.values()):
        scales.fill_(0.01)
    state = pool.create(1)
    state.reserve(length)
    first = length - ROWS if first is None else first
    weights = {
        "indexer.q_proj.weight": torch.randn(512, 2560, generator=generator) / 50,
        "indexer.q_norm.weight": torch.ones(128),
    }
    x = torch.randn(length - first, 2560, generator=generator)
    q = torch.randn(length - first, 24, 256, generator=generator)
    segment = SegmentRows(0, length - first, first, state, torch.zeros(0, dtype=torch.int64))
    with counted() as allocations:
        out = mixer.attend(x, q, segment, weights)
    return allocations.largest, out


def test_memory_of_a_sub_chunk_does_not_grow_with_the_prompt() -> None:
    """Keys in fp16: nothing of the prefix's size is expanded either."""
    # Scores of a tile of rows by 4 indexer heads, one for each block of 4 keys, are the most.
    bound = 4 * MASK_ELEMENTS // 4 * 4
    found = [attend(length, kv_dtype="fp16")[0] for length in (16_384, 65_536, 131_072)]
    assert max(found) <= bound
    assert bound < 131_072 * 2 * 256 * 4 / 8  # an eighth of the keys in fp32


def test_no_allocation_exceeds_a_tile_of_the_mask_or_the_prefix_itself() -> None:
    """Below the switch the prefix is multiplied whole: keys in fp32 and one mask of bounded size."""
    largest, _ = attend(8_128)
    assert largest <= max(8_128 * 2 * 256 * 4, MASK_ELEMENTS * 4)


@pytest.mark.parametrize("kv_dtype", ["fp32", "fp16", "int8"])
def test_both_ways_give_the_same_rows_across_the_switch(
    monkeypatch: pytest.MonkeyPatch, kv_dtype: KvDtype
) -> None:
    first, length = 8_192 - 5, 8_192 + 6
    _, mixed = attend(length, kv_dtype=kv_dtype, first=first)
    module = "strata_coord.stage_worker.models.sparse_attention.gather_from"
    for switch in (0, 1 << 30):
        monkeypatch.setattr(module, lambda _budget, *, heads_per_group, at=switch: at + 0 * heads_per_group)
        if switch == 0:
            # Rows with fewer complete blocks than the budget do not exist here, so all may be gathered.
            assert first > 2051
        _, one_way = attend(length, kv_dtype=kv_dtype, first=first)
        torch.testing.assert_close(mixed, one_way, rtol=1e-5, atol=1e-6)


def test_more_query_heads_a_group_gather_sooner_and_never_within_the_budget() -> None:
    found = [gather_from(512, heads_per_group=heads) for heads in (1, 2, 4, 12)]
    assert found == [512 * 16, 512 * 8, 512 * 4, 512 * 4]
