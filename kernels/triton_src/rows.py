"""Rows of a super-chunk gathered into expert order, and expert outputs added back in a fixed order."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["skip", "capacity"])
def gather_rows_kernel(x, tokens, offsets, out, skip, capacity, num_groups, D, x_stride, BLOCK: tl.constexpr):
    """out[i] = x[tokens[base + i]] for the group's rows; the rows after them are left as they are."""
    row = tl.program_id(0)
    base = tl.load(offsets) + skip
    count = tl.minimum(tl.load(offsets + num_groups) - base, capacity)
    if row < count:
        token = tl.load(tokens + base + row).to(tl.int64)
        d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(x + token * x_stride + d, mask=d < D)
        tl.store(out + row.to(tl.int64) * D + d, value.to(out.dtype.element_ty), mask=d < D)


@triton.jit(do_not_specialize=["skip", "capacity"])
def swiglu_rows_kernel(
    gate_up, hidden, offsets, skip, capacity, num_groups, F, BOUNDED: tl.constexpr, BLOCK: tl.constexpr
):
    """hidden[i] = silu(gate_up[i, :F]) * gate_up[i, F:]; BOUNDED: of the group's rows only."""
    row = tl.program_id(0)
    count = capacity
    if BOUNDED:
        count = tl.minimum(tl.load(offsets + num_groups) - tl.load(offsets) - skip, capacity)
    if row < count:
        f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        start = gate_up + row.to(tl.int64) * 2 * F + f
        gate = tl.load(start, mask=f < F, other=0.0).to(tl.float32)
        up = tl.load(start + F, mask=f < F, other=0.0).to(tl.float32)
        value = gate / (1.0 + tl.exp(-gate)) * up
        tl.store(hidden + row.to(tl.int64) * F + f, value.to(hidden.dtype.element_ty), mask=f < F)


@triton.jit(do_not_specialize=["skip", "capacity"])
def add_in_order_kernel(
    total,
    y,
    position,
    weights,
    offsets,
    skip,
    capacity,
    num_groups,
    D,
    K,
    BOUNDED: tl.constexpr,
    KP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """total[t] += sum of weight * y[position - base], positions ascending, of those that lie in y."""
    t = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, KP)
    place = tl.load(position + t * K + k, mask=k < K, other=-1).to(tl.int32)
    weight = tl.load(weights + t * K + k, mask=k < K, other=0.0)
    base = tl.zeros((), dtype=tl.int32)
    stop = base + capacity
    if BOUNDED:
        base = tl.load(offsets) + skip
        stop = tl.minimum(tl.load(offsets + num_groups), base + capacity)
    is_here = (place >= base) & (place < stop)
    num_here = tl.sum(is_here.to(tl.int32), axis=0)
    if num_here > 0:
        d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(total + t * D + d, mask=d < D, other=0.0)
        previous = base - 1
        left = num_here
        while left > 0:
            following = tl.min(tl.where(is_here & (place > previous), place, 0x7FFFFFFF), axis=0)
            scale = tl.sum(tl.where(place == following, weight, 0.0), axis=0)
            row = tl.load(y + (following - base).to(tl.int64) * D + d, mask=d < D, other=0.0)
            value += scale * row.to(tl.float32)
            previous = following
            left -= 1
        tl.store(total + t * D + d, value, mask=d < D)
