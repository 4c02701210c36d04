"""Sparse attention over selected blocks of R tokens: scores, selection for a tile of queries, attention.

A query at position P has m = (P + 1) // R complete blocks and sees the tokens of the best of them plus the
tail R * m .. P. TQ neighbouring queries make a tile: the blocks that any of them selected are listed once,
each with a word whose bit j says whether query j of the tile selected it.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows", "first_position", "num_blocks"])
def block_scores_kernel(
    q,
    keys,
    scores,
    num_rows,
    first_position,
    num_blocks,
    scores_stride,
    H: tl.constexpr,
    DIM: tl.constexpr,
    R: tl.constexpr,
    IP: tl.constexpr,
    BT: tl.constexpr,
    BM: tl.constexpr,
):
    """scores[t, b] = sum over heads of relu(q[t, h] . keys[b]), fp32.

    Tiles of blocks that no row has complete are left as they are.
    """
    row0 = tl.program_id(1) * BT
    block0 = tl.program_id(0) * BM
    last_position = first_position + tl.minimum(row0 + BT, num_rows) - 1
    if block0 < (last_position + 1) // R:
        t = (row0 + tl.arange(0, BT)).to(tl.int64)
        b = (block0 + tl.arange(0, BM)).to(tl.int64)
        i = tl.arange(0, IP)
        is_row, is_block, is_dim = t < num_rows, b < num_blocks, i < DIM
        key = tl.load(
            keys + b[None, :] * DIM + i[:, None], mask=is_block[None, :] & is_dim[:, None], other=0.0
        )
        total = tl.zeros((BT, BM), dtype=tl.float32)
        for h in tl.static_range(H):
            query = tl.load(
                q + (t[:, None] * H + h) * DIM + i[None, :], mask=is_row[:, None] & is_dim[None, :], other=0.0
            )
            total += tl.maximum(tl.dot(query, key, input_precision="ieee"), 0.0)
        tl.store(
            scores + t[:, None] * scores_stride + b[None, :], total, mask=is_row[:, None] & is_block[None, :]
        )


@triton.jit(do_not_specialize=["num_rows", "first_position"])
def select_blocks_kernel(
    scores,
    ids,
    words,
    counts,
    num_rows,
    first_position,
    scores_stride,
    list_stride,
    NUM_SELECTED: tl.constexpr,
    R: tl.constexpr,
    TQ: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program, one tile of queries: the best NUM_SELECTED complete blocks of each, lowest first.

    Scores are not negative, so their bits order as integers do: the cut value is found bit by bit, and the
    blocks equal to it are counted off from the left.
    """
    tile = tl.program_id(0)
    b = tl.arange(0, BLOCK)
    word = tl.zeros((BLOCK,), dtype=tl.int32)
    for j in range(TQ):
        row = tile * TQ + j
        complete = tl.where(row < num_rows, (first_position + row + 1) // R, 0)
        exists = b < complete
        score = tl.load(scores + row.to(tl.int64) * scores_stride + b, mask=exists, other=0.0)
        bits = tl.where(exists, score.to(tl.int32, bitcast=True), -1)
        wanted = tl.minimum(complete, NUM_SELECTED)
        cut = tl.zeros((), dtype=tl.int32)
        for step in range(31):
            trial = cut | (1 << (30 - step))
            cut = tl.where(tl.sum((bits >= trial).to(tl.int32), axis=0) >= wanted, trial, cut)
        above = bits > cut
        equal = exists & (bits == cut)
        room = wanted - tl.sum(above.to(tl.int32), axis=0)
        chosen = above | (equal & (tl.cumsum(equal.to(tl.int32), axis=0) <= room))
        word |= chosen.to(tl.int32) << j
    is_used = word != 0
    place = tile.to(tl.int64) * list_stride + tl.cumsum(is_used.to(tl.int32), axis=0) - 1
    tl.store(ids + place, b, mask=is_used)
    tl.store(words + place, word, mask=is_used)
    tl.store(counts + tile, tl.sum(is_used.to(tl.int32), axis=0))


@triton.jit
def _absorb(
    q, k_place, v_place, token, is_seen, scale, highest, total, out, d, D: tl.constexpr, k_stride, v_stride
):
    """One step of the online softmax over tokens that some query of the tile sees."""
    is_token = (tl.max(is_seen.to(tl.int32), axis=0) > 0)[:, None] & (d < D)[None, :]
    key = tl.load(k_place + token[:, None] * k_stride + d[None, :], mask=is_token, other=0.0)
    score = tl.dot(q, tl.trans(key), input_precision="ieee") * scale
    score = tl.where(is_seen, score, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(score, axis=1))
    # A query that has seen nothing so far has no maximum; its weights must be 0, not exp(-inf + inf).
    reference = tl.where(new_highest == float("-inf"), 0.0, new_highest)
    power = tl.exp2(score - reference[:, None])
    kept = tl.exp2(highest - reference)
    value = tl.load(v_place + token[:, None] * v_stride + d[None, :], mask=is_token, other=0.0)
    total = total * kept + tl.sum(power, axis=1)
    out = tl.dot(power.to(value.dtype), value, out * kept[:, None], input_precision="ieee")
    return new_highest, total, out


@triton.jit(do_not_specialize=["num_rows", "first_position"])
def attend_blocks_kernel(
    q,
    k,
    v,
    out,
    ids,
    words,
    counts,
    num_rows,
    first_position,
    list_stride,
    scale,
    k_head_stride,
    k_stride,
    v_head_stride,
    v_stride,
    HEADS: tl.constexpr,
    HG: tl.constexpr,
    HP: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    R: tl.constexpr,
    TQ: tl.constexpr,
    BK: tl.constexpr,
):
    """One program: one tile of queries and one key-value head, whose HG query heads (padded to HP) share it.

    Row m of the tile is query m // HP, head m % HP of the group. scale holds log2(e).
    """
    tile = tl.program_id(0)
    group = tl.program_id(1)
    m = tl.arange(0, TQ * HP)
    d = tl.arange(0, DP)
    e = tl.arange(0, BK)
    j = m // HP
    row = tile * TQ + j
    is_query = (row < num_rows) & (m % HP < HG)
    place = (row.to(tl.int64) * HEADS + group * HG + m % HP) * D
    mask = is_query[:, None] & (d < D)[None, :]
    query = tl.load(q + place[:, None] + d[None, :], mask=mask, other=0.0)
    k_place = k + group.to(tl.int64) * k_head_stride
    v_place = v + group.to(tl.int64) * v_head_stride
    highest = tl.full((TQ * HP,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((TQ * HP,), dtype=tl.float32)
    acc = tl.zeros((TQ * HP, DP), dtype=tl.float32)

    count = tl.load(counts + tile)
    listed = tile.to(tl.int64) * list_stride
    for first in range(0, count, BK // R):
        entry = first + e // R
        is_listed = entry < count
        block = tl.load(ids + listed + entry, mask=is_listed, other=0)
        word = tl.load(words + listed + entry, mask=is_listed, other=0)
        token = block.to(tl.int64) * R + e % R
        is_seen = ((word[None, :] >> j[:, None]) & 1) == 1
        highest, total, acc = _absorb(
            query, k_place, v_place, token, is_seen, scale, highest, total, acc, d, D, k_stride, v_stride
        )
    position = first_position + row
    tail = (position + 1) // R * R
    first_tail = (first_position + tile * TQ + 1) // R * R
    last_position = first_position + tl.minimum(tile * TQ + TQ, num_rows) - 1
    for first in range(first_tail, last_position + 1, BK):
        token = first + e
        is_seen = (
            (token[None, :] >= tail[:, None]) & (token[None, :] <= position[:, None]) & is_query[:, None]
        )
        highest, total, acc = _absorb(
            query,
            k_place,
            v_place,
            token.to(tl.int64),
            is_seen,
            scale,
            highest,
            total,
            acc,
            d,
            D,
            k_stride,
            v_stride,
        )
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    tl.store(out + place[:, None] + d[None, :], acc.to(out.dtype.element_ty), mask=mask)
