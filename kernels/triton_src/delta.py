"""Causal convolution over time and the gated delta rule row by row."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"])
def causal_conv_kernel(
    x,
    history,
    weight,
    out,
    num_rows,
    C,
    x_stride,
    DILATION: tl.constexpr,
    TAPS: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
):
    """Write silu(sum over taps of x[t - (TAPS - 1 - tap) * DILATION] * weight[:, tap]) to out.

    Rows before row 0 are those of history.
    """
    LENGTH: tl.constexpr = (TAPS - 1) * DILATION
    t = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    is_c = (c < C)[None, :]
    is_row = (t < num_rows)[:, None]
    total = tl.zeros((BT, BC), dtype=tl.float32)
    for tap in tl.static_range(TAPS):
        source = t - (TAPS - 1 - tap) * DILATION
        is_here = (source >= 0)[:, None]
        value = tl.load(
            x + source[:, None] * x_stride + c[None, :], mask=is_row & is_c & is_here, other=0.0
        ).to(tl.float32)
        before = tl.load(
            history + (source + LENGTH)[:, None] * C + c[None, :],
            mask=is_row & is_c & (source < 0)[:, None],
            other=0.0,
        )
        w = tl.load(weight + c * TAPS + tap, mask=c < C, other=0.0).to(tl.float32)
        total += tl.where(is_here, value, before) * w[None, :]
    total = total / (1.0 + tl.exp(-total))
    tl.store(out + t[:, None] * C + c[None, :], total.to(out.dtype.element_ty), mask=is_row & is_c)


@triton.jit(do_not_specialize=["num_rows"])
def advance_history_kernel(x, history, num_rows, C, x_stride, LENGTH: tl.constexpr, BC: tl.constexpr):
    """Move history on by num_rows. A thread owns a column and reads ahead of what it has written."""
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    for row in tl.static_range(LENGTH):
        source = tl.zeros((), dtype=tl.int64) + num_rows + row  # among history's rows, then x's
        old = tl.load(history + source * C + c, mask=(c < C) & (source < LENGTH), other=0.0)
        new = tl.load(x + (source - LENGTH) * x_stride + c, mask=(c < C) & (source >= LENGTH), other=0.0)
        value = tl.where(source < LENGTH, old, new.to(tl.float32))
        tl.store(history + row * C + c, value, mask=c < C)


@triton.jit(do_not_specialize=["num_rows"])
def recurrent_delta_kernel(
    q,
    k,
    v,
    g,
    beta,
    state,
    out,
    num_rows,
    q_stride,
    k_stride,
    v_stride,
    g_stride,
    beta_stride,
    H: tl.constexpr,
    GROUPS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    TILED: tl.constexpr,
    KP: tl.constexpr,
    BV: tl.constexpr,
):
    """One program: one value head and BV columns of its state, row after row."""
    h = tl.program_id(0)
    if TILED:
        key_head = h % GROUPS
    else:
        key_head = h // (H // GROUPS)
    key = tl.arange(0, KP)
    column = tl.program_id(1) * BV + tl.arange(0, BV)
    is_key = key < K
    is_column = column < V
    place = state + h.to(tl.int64) * K * V + key[:, None] * V + column[None, :]
    s = tl.load(place, mask=is_key[:, None] & is_column[None, :], other=0.0)
    t = tl.zeros((), dtype=tl.int64)
    while t < num_rows:
        key_row = tl.load(k + t * k_stride + key_head * K + key, mask=is_key, other=0.0).to(tl.float32)
        query = tl.load(q + t * q_stride + key_head * K + key, mask=is_key, other=0.0).to(tl.float32)
        value = tl.load(v + t * v_stride + h * V + column, mask=is_column, other=0.0).to(tl.float32)
        decay = tl.exp(tl.load(g + t * g_stride + h).to(tl.float32))
        step = tl.load(beta + t * beta_stride + h).to(tl.float32)
        key_row = key_row * tl.rsqrt(tl.sum(key_row * key_row, axis=0) + 1e-6)
        query = query * tl.rsqrt(tl.sum(query * query, axis=0) + 1e-6) * (K**-0.5)
        s = s * decay
        delta = (value - tl.sum(s * key_row[:, None], axis=0)) * step
        s = s + key_row[:, None] * delta[None, :]
        read = tl.sum(s * query[:, None], axis=0)
        tl.store(out + (t * H + h) * V + column, read.to(out.dtype.element_ty), mask=is_column)
        t += 1
    tl.store(place, s, mask=is_key[:, None] & is_column[None, :])
