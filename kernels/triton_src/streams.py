"""Hyper-connection streams: N streams of D values side by side in a row of W = N * D."""

import triton
import triton.language as tl


@triton.jit
def stream_kernel(
    rows,
    y,
    write,
    gamma,
    inject,
    normed,
    next_write,
    eps,
    D: tl.constexpr,
    N: tl.constexpr,
    WRITE: tl.constexpr,
    NORM: tl.constexpr,
    INJECT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program, one row. WRITE: rows += write * y per stream. NORM: normed = group RMS norm of the result.

    INJECT: next_write = 2 sigmoid(inject . normed / N), from the fp32 values before they are rounded.
    """
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    is_d = d < D
    stream = tl.arange(0, N)
    if WRITE:
        added = tl.load(y + t * D + d, mask=is_d, other=0.0).to(tl.float32)
    if INJECT:
        dots = tl.zeros((N, BLOCK), dtype=tl.float32)
    for n in tl.static_range(N):
        place = n * D + d
        value = tl.load(rows + t * N * D + place, mask=is_d, other=0.0)
        if WRITE:
            value += tl.load(write + t * N + n) * added
            # A row narrower than the program's threads is held by several warps. Without this one of them
            # could load what another has stored already, and go on with y added twice.
            tl.debug_barrier()
            tl.store(rows + t * N * D + place, value, mask=is_d)
        if NORM:
            scale = tl.rsqrt(tl.sum(value * value, axis=0) / D + eps)
            value = value * scale * tl.load(gamma + place, mask=is_d, other=0.0).to(tl.float32)
            tl.store(normed + t * N * D + place, value.to(normed.dtype.element_ty), mask=is_d)
            if INJECT:
                w = tl.load(
                    inject + stream[:, None] * (N * D) + place[None, :], mask=is_d[None, :], other=0.0
                ).to(tl.float32)
                dots += w * value[None, :]
    if INJECT:
        dot = tl.sum(dots, axis=1) / N
        tl.store(next_write + t * N + stream, 2.0 / (1.0 + tl.exp(-dot)))


@triton.jit(do_not_specialize=["num_values"])
def scaled_silu_kernel(low, num_values, scale, BLOCK: tl.constexpr):
    """Replace low by silu(low * scale)."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(low + place, mask=place < num_values, other=0.0).to(tl.float32) * scale
    value = value / (1.0 + tl.exp(-value))
    tl.store(low + place, value.to(low.dtype.element_ty), mask=place < num_values)


@triton.jit
def mix_streams_kernel(gate, normed, out, D, N: tl.constexpr, BLOCK: tl.constexpr):
    """Write the mean over streams of sigmoid(gate) * normed to out."""
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_d = d < D
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for n in tl.static_range(N):
        place = (t * N + n) * D + d
        g = tl.load(gate + place, mask=is_d, other=0.0).to(tl.float32)
        z = tl.load(normed + place, mask=is_d, other=0.0).to(tl.float32)
        total += z / (1.0 + tl.exp(-g))
    tl.store(out + t * D + d, (total / N).to(out.dtype.element_ty), mask=is_d)
