"""Grouped matrix products over the rows of many experts, with the group bounds read on the device only.

Rows of the scratch are sorted by expert. Scratch row i is sorted position base + i, where base = offsets[0] +
skip; positions outside [base, base + capacity) belong to another call. A program walks tiles with the grid's
stride, so the grid is a bound that the host knows and the number of tiles is one that it does not.

Letters: D hidden size, F expert width, G experts of the group (padded to the power of two GP).
"""

import triton
import triton.language as tl


@triton.jit
def _row_tiles(offsets, base, capacity, num_groups, GP: tl.constexpr, BM: tl.constexpr):
    """Scratch rows [first, last) of each expert, its number of row tiles, and the running sum of those."""
    group = tl.arange(0, GP)
    begin = tl.load(offsets + group, mask=group < num_groups, other=0)
    end = tl.load(offsets + group + 1, mask=group < num_groups, other=0)
    first = tl.minimum(tl.maximum(begin - base, 0), capacity)
    last = tl.minimum(tl.maximum(end - base, 0), capacity)
    tiles = (last - first + BM - 1) // BM
    return first, last, tiles, tl.cumsum(tiles, 0)


@triton.jit
def _tile_rows(row_tile, first, last, tiles, ends, GP: tl.constexpr, BM: tl.constexpr):
    """The expert of a row tile, and the scratch rows [start, stop) that it covers."""
    expert = tl.sum((ends <= row_tile).to(tl.int32), axis=0)
    is_expert = tl.arange(0, GP) == expert
    start = tl.sum(tl.where(is_expert, first + (row_tile - (ends - tiles)) * BM, 0), axis=0)
    stop = tl.sum(tl.where(is_expert, last, 0), axis=0)
    return expert, start, stop


@triton.jit(do_not_specialize=["skip", "capacity"])
def gate_up_kernel(
    x,
    tokens,
    offsets,
    weights,
    hidden,
    skip,
    capacity,
    num_groups,
    x_stride,
    D: tl.constexpr,
    F: tl.constexpr,
    GP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """hidden[i] = silu(x[tokens[base + i]] . gate) * (x[...] . up); weights [G, 2F, D], gate rows first."""
    base = tl.load(offsets) + skip
    first, last, tiles, ends = _row_tiles(offsets, base, capacity, num_groups, GP, BM)
    column_tiles = tl.cdiv(F, BN)
    num_tiles = tl.sum(tiles, axis=0) * column_tiles
    tile = tl.program_id(0)
    while tile < num_tiles:
        expert, start, stop = _tile_rows(tile // column_tiles, first, last, tiles, ends, GP, BM)
        rows = start + tl.arange(0, BM)
        is_row = rows < stop
        token = tl.load(tokens + base + rows, mask=is_row, other=0).to(tl.int64)
        columns = (tile % column_tiles) * BN + tl.arange(0, BN)
        is_column = columns < F
        gate_rows = weights + (expert.to(tl.int64) * 2 * F + columns) * D
        up_rows = gate_rows + F * D
        gate = tl.zeros((BM, BN), dtype=tl.float32)
        up = tl.zeros((BM, BN), dtype=tl.float32)
        for k0 in range(0, D, BK):
            k = k0 + tl.arange(0, BK)
            is_k = k < D
            a = tl.load(
                x + token[:, None] * x_stride + k[None, :], mask=is_row[:, None] & is_k[None, :], other=0.0
            )
            is_b = is_k[:, None] & is_column[None, :]
            b = tl.load(gate_rows[None, :] + k[:, None], mask=is_b, other=0.0)
            gate = tl.dot(a, b, gate, input_precision="ieee")
            b = tl.load(up_rows[None, :] + k[:, None], mask=is_b, other=0.0)
            up = tl.dot(a, b, up, input_precision="ieee")
        value = gate / (1.0 + tl.exp(-gate)) * up
        tl.store(
            hidden + rows.to(tl.int64)[:, None] * F + columns[None, :],
            value.to(hidden.dtype.element_ty),
            mask=is_row[:, None] & is_column[None, :],
        )
        tile += tl.num_programs(0)


@triton.jit(do_not_specialize=["skip", "capacity"])
def down_kernel(
    hidden,
    offsets,
    weights,
    y,
    skip,
    capacity,
    num_groups,
    D: tl.constexpr,
    F: tl.constexpr,
    GP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """y[i] = hidden[i] . down of the row's expert; weights [G, D, F]."""
    base = tl.load(offsets) + skip
    first, last, tiles, ends = _row_tiles(offsets, base, capacity, num_groups, GP, BM)
    column_tiles = tl.cdiv(D, BN)
    num_tiles = tl.sum(tiles, axis=0) * column_tiles
    tile = tl.program_id(0)
    while tile < num_tiles:
        expert, start, stop = _tile_rows(tile // column_tiles, first, last, tiles, ends, GP, BM)
        rows = start + tl.arange(0, BM)
        is_row = rows < stop
        a_rows = hidden + rows.to(tl.int64) * F
        columns = (tile % column_tiles) * BN + tl.arange(0, BN)
        is_column = columns < D
        b_rows = weights + (expert.to(tl.int64) * D + columns) * F
        total = tl.zeros((BM, BN), dtype=tl.float32)
        for k0 in range(0, F, BK):
            k = k0 + tl.arange(0, BK)
            is_k = k < F
            a = tl.load(a_rows[:, None] + k[None, :], mask=is_row[:, None] & is_k[None, :], other=0.0)
            b = tl.load(b_rows[None, :] + k[:, None], mask=is_k[:, None] & is_column[None, :], other=0.0)
            total = tl.dot(a, b, total, input_precision="ieee")
        tl.store(
            y + rows.to(tl.int64)[:, None] * D + columns[None, :],
            total.to(y.dtype.element_ty),
            mask=is_row[:, None] & is_column[None, :],
        )
        tile += tl.num_programs(0)
