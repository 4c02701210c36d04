"""Block selection and attention over the selected blocks on CUDA, in memory linear in the rows.

The references are block_select and attention.attend with visible_tokens. Scores, selection and attention run
for a bounded number of rows at a time; the [T, L] mask and the gathered keys are never written.

Floor: past the budget a query reads 2,048 tokens x 2 heads x 256 dims of keys and of values, 4.2 MB in bf16:
137 GB for 32,768 rows of one layer, 33 ms at 4.1 TB/s. A tile of four neighbouring queries reads the union of
their blocks once, so between a quarter and all of that, most of it from L2; its products are 1.65 TFLOP where
the four agree and four times as much where no two share a block.

No stage calls this yet: models/sparse_attention.py runs the references on every device.

Letters: T rows, L positions, Q query heads, G key-value heads, D head dim, H indexer heads, I indexer dim, M
blocks of R tokens.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from strata_coord.kernels.triton_launch import power_of_two, shared_memory_bytes

TILE_QUERIES = 4
"""Queries of a tile; at 12 query heads of a key-value head, padded to 16, they fill a product of 64 rows."""

_LEAST_PRODUCT_ROWS = 16  # of a matrix product on tensor cores
_SCORE_ROWS, _SCORE_BLOCKS = 64, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseScratch:
    """Scratch of one pass: 4 bytes a row and block, 8 bytes a row and selected block."""

    scores_TM: Tensor  # fp32
    ids: Tensor  # int32 [tiles, most blocks of a tile]: the listed blocks, ascending
    words: Tensor  # int32, same shape: bit j is set where query j of the tile selected the block
    counts: Tensor  # int32 [tiles]


def tile_queries(num_heads: int, num_kv_heads: int) -> int:
    """Return how many queries a tile has: TILE_QUERIES, or more where few heads share keys."""
    return max(TILE_QUERIES, _LEAST_PRODUCT_ROWS // power_of_two(num_heads // num_kv_heads))


def make_sparse_scratch(
    num_rows: int, num_blocks: int, num_selected: int, *, tile: int, device: torch.device
) -> SparseScratch:
    """Take scratch for passes of num_rows rows over up to num_blocks blocks; tile: from tile_queries."""
    tiles = -(-num_rows // tile)
    listed = max(1, min(num_blocks, tile * num_selected))

    def empty(rows: int, columns: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty((rows, columns), dtype=dtype, device=device)

    return SparseScratch(
        scores_TM=empty(num_rows, max(1, num_blocks), torch.float32),
        ids=empty(tiles, listed),
        words=empty(tiles, listed),
        counts=torch.empty(tiles, dtype=torch.int32, device=device),
    )


def sparse_attention_cuda(
    q_TQD: Tensor,
    k_GLD: Tensor,
    v_GLD: Tensor,
    index_q_THI: Tensor,
    keys_MI: Tensor,
    first_position: int,
    *,
    block: int,
    num_selected: int,
    scratch: SparseScratch,
    out: Tensor,
) -> Tensor:
    """Write attention [T, Q, D] of rows from first_position on to out and return it.

    Keys and values lie from position 0 on, with any strides but a contiguous last axis; block keys of all
    complete blocks are in keys. q, k and v have one dtype, index_q and keys another. Row counts above the
    scratch's run in passes. Runs on the current stream; never waits for the device.

    Raises:
        ValueError: shapes do not fit, or keys or block keys are missing.
    """
    rows, heads, _ = q_TQD.shape
    length, complete = first_position + rows, (first_position + rows) // block
    if k_GLD.shape[1] < length or v_GLD.shape[1] < length or keys_MI.shape[0] < complete:
        message = (
            f"rows end at position {length}: {k_GLD.shape[1]} keys, {v_GLD.shape[1]} values and "
            f"{keys_MI.shape[0]} of {complete} block keys are there"
        )
        raise ValueError(message)
    tile = tile_queries(heads, k_GLD.shape[0])
    capacity = scratch.scores_TM.shape[0] // tile * tile
    if scratch.scores_TM.shape[1] < complete or scratch.ids.shape[1] < min(complete, tile * num_selected):
        message = f"scratch for {scratch.scores_TM.shape[1]} blocks, rows have {complete}"
        raise ValueError(message)
    if not capacity or scratch.counts.shape[0] * tile < capacity:
        message = f"scratch of {scratch.scores_TM.shape[0]} rows holds no tile of {tile} queries"
        raise ValueError(message)
    contiguous = (q_TQD, index_q_THI, keys_MI, out)
    if not all(x.is_contiguous() for x in contiguous) or k_GLD.stride(2) != 1 or v_GLD.stride(2) != 1:
        message = "q, index_q, keys, out and the last axes of k and v must be contiguous"
        raise ValueError(message)
    if out.shape != q_TQD.shape or block != power_of_two(block) or block > _SCORE_BLOCKS // 2:
        message = f"out {list(out.shape)} for queries {list(q_TQD.shape)} and blocks of {block} tokens"
        raise ValueError(message)
    for start in range(0, rows, capacity):
        stop = min(start + capacity, rows)
        first = first_position + start
        select_blocks_triton(
            index_q_THI[start:stop],
            keys_MI,
            first,
            block=block,
            num_selected=num_selected,
            tile=tile,
            scratch=scratch,
        )
        _attend(q_TQD[start:stop], k_GLD, v_GLD, first, block, tile, scratch, out[start:stop])
    return out


def select_blocks_triton(
    index_q_THI: Tensor,
    keys_MI: Tensor,
    first_position: int,
    *,
    block: int,
    num_selected: int,
    tile: int,
    scratch: SparseScratch,
) -> None:
    """Write the blocks that each tile of queries sees to the scratch; see SparseScratch."""
    from strata_coord.kernels.triton_src import sparse

    rows, heads, dim = index_q_THI.shape
    complete = (first_position + rows) // block
    stride = scratch.scores_TM.stride(0)
    if complete:
        # Tiles of one row tile run side by side: their queries stay in L2.
        sparse.block_scores_kernel[(-(-complete // _SCORE_BLOCKS), -(-rows // _SCORE_ROWS))](
            index_q_THI,
            keys_MI,
            scratch.scores_TM,
            rows,
            first_position,
            complete,
            stride,
            H=heads,
            DIM=dim,
            R=block,
            IP=max(_LEAST_PRODUCT_ROWS, power_of_two(dim)),
            BT=_SCORE_ROWS,
            BM=_SCORE_BLOCKS,
        )
    padded = power_of_two(complete)
    sparse.select_blocks_kernel[(-(-rows // tile),)](
        scratch.scores_TM,
        scratch.ids,
        scratch.words,
        scratch.counts,
        rows,
        first_position,
        stride,
        scratch.ids.stride(0),
        NUM_SELECTED=num_selected,
        R=block,
        TQ=tile,
        BLOCK=padded,
        num_warps=min(max(padded // 1024, 4), 32),  # a row's scores stay in registers
    )


def _attend(
    q_TQD: Tensor,
    k_GLD: Tensor,
    v_GLD: Tensor,
    first_position: int,
    block: int,
    tile: int,
    scratch: SparseScratch,
    out: Tensor,
) -> None:
    from strata_coord.kernels.triton_src import sparse

    rows, heads, dim = q_TQD.shape
    groups = k_GLD.shape[0]
    keys, warps, stages = _attend_tile(q_TQD)
    sparse.attend_blocks_kernel[(-(-rows // tile), groups)](
        q_TQD,
        k_GLD,
        v_GLD,
        out,
        scratch.ids,
        scratch.words,
        scratch.counts,
        rows,
        first_position,
        scratch.ids.stride(0),
        dim**-0.5 * math.log2(math.e),
        k_GLD.stride(0),
        k_GLD.stride(1),
        v_GLD.stride(0),
        v_GLD.stride(1),
        HEADS=heads,
        HG=heads // groups,
        HP=power_of_two(heads // groups),
        D=dim,
        DP=max(_LEAST_PRODUCT_ROWS, power_of_two(dim)),
        R=block,
        TQ=tile,
        BK=keys,
        num_warps=warps,
        num_stages=stages,
    )


def _attend_tile(q_TQD: Tensor) -> tuple[int, int, int]:
    """Return keys of a step, warps and stages: keys and values of all stages lie in shared memory."""
    if q_TQD.device.type != "cuda":
        return 32, 4, 1
    shared = shared_memory_bytes(q_TQD.device)
    wide = q_TQD.element_size() == 2 and shared >= 160 << 10
    if wide:
        return 64, 8, 2
    return 32, 4, 2 if shared >= 72 << 10 and q_TQD.element_size() == 2 else 1
