"""RMS norms and what follows them on the same values: an activation's gate, or a rotation.

Rows are (t, h) pairs at t * stride_t + h * stride_h, so heads and groups of a wider row need no copy. The
last axis is contiguous. Sums are fp32; every value is read and written once.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(
    x,
    weight,
    gate,
    out,
    num_rows,
    H,
    x_stride_t,
    x_stride_h,
    gate_stride_t,
    gate_stride_h,
    out_stride_t,
    out_stride_h,
    weight_stride_h,
    eps,
    D: tl.constexpr,
    GATE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write x * rsqrt(mean x^2 + eps) * weight, times silu (GATE 1) or sigmoid (GATE 2) of gate, to out."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK)
    mask = (row < num_rows)[:, None] & (d < D)[None, :]
    t = (row // H).to(tl.int64)
    h = row % H
    start = t * x_stride_t + h * x_stride_h
    value = tl.load(x + start[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=1) / D + eps)
    w = tl.load(weight + (h * weight_stride_h)[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
    value = value * scale[:, None] * w
    if GATE > 0:
        start = t * gate_stride_t + h * gate_stride_h
        g = tl.load(gate + start[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
        opened = 1.0 / (1.0 + tl.exp(-g))
        if GATE == 1:
            opened = opened * g
        value = value * opened
    start = t * out_stride_t + h * out_stride_h
    tl.store(out + start[:, None] + d[None, :], value.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def norm_rotate_kernel(
    x,
    weight,
    cos,
    sin,
    out,
    num_rows,
    H,
    x_stride_t,
    x_stride_h,
    out_stride_t,
    out_stride_h,
    eps,
    D: tl.constexpr,
    R: tl.constexpr,
    NORM: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    ROWS: tl.constexpr,
    RP: tl.constexpr,
    REST: tl.constexpr,
):
    """Norm each head if NORM, rotate its first 2R dims by cos and sin [T, R]; REST covers the other dims."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    r = tl.arange(0, RP)
    is_row = (row < num_rows)[:, None]
    mask = is_row & (r < R)[None, :]
    t = (row // H).to(tl.int64)
    h = row % H
    if NEIGHBOURS:
        one, two = 2 * r, 2 * r + 1
    else:
        one, two = r, r + R
    x_rows = x + (t * x_stride_t + h * x_stride_h)[:, None]
    first = tl.load(x_rows + one[None, :], mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x_rows + two[None, :], mask=mask, other=0.0).to(tl.float32)
    rest_d = 2 * R + tl.arange(0, REST)
    rest_mask = is_row & (rest_d < D)[None, :]
    rest = tl.load(x_rows + rest_d[None, :], mask=rest_mask, other=0.0).to(tl.float32)
    if NORM:
        squares = (
            tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1) + tl.sum(rest * rest, axis=1)
        )
        scale = tl.rsqrt(squares / D + eps)[:, None]
        first *= scale * tl.load(weight + one, mask=r < R, other=0.0).to(tl.float32)[None, :]
        second *= scale * tl.load(weight + two, mask=r < R, other=0.0).to(tl.float32)[None, :]
        rest *= scale * tl.load(weight + rest_d, mask=rest_d < D, other=0.0).to(tl.float32)[None, :]
    c = tl.load(cos + (t * R)[:, None] + r[None, :], mask=mask, other=0.0)
    s = tl.load(sin + (t * R)[:, None] + r[None, :], mask=mask, other=0.0)
    out_rows = out + (t * out_stride_t + h * out_stride_h)[:, None]
    dtype = out.dtype.element_ty
    tl.store(out_rows + one[None, :], (first * c - second * s).to(dtype), mask=mask)
    tl.store(out_rows + two[None, :], (second * c + first * s).to(dtype), mask=mask)
    tl.store(out_rows + rest_d[None, :], rest.to(dtype), mask=rest_mask)


@triton.jit(do_not_specialize=["num_rows"])
def sigmoid_gate_kernel(
    x,
    gate,
    num_rows,
    H,
    x_stride_t,
    x_stride_h,
    gate_stride_t,
    gate_stride_h,
    D,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """X *= sigmoid(gate), in place."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (row < num_rows)[:, None] & (d < D)[None, :]
    t = (row // H).to(tl.int64)
    h = row % H
    g = tl.load(gate + (t * gate_stride_t + h * gate_stride_h)[:, None] + d[None, :], mask=mask, other=0.0)
    place = x + (t * x_stride_t + h * x_stride_h)[:, None] + d[None, :]
    value = tl.load(place, mask=mask, other=0.0).to(tl.float32) / (1.0 + tl.exp(-g.to(tl.float32)))
    tl.store(place, value.to(x.dtype.element_ty), mask=mask)
