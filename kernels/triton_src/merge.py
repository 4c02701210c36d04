"""Two attentions of the same queries over different keys, merged by their log-sum-exps."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"])
def merge_parts_kernel(
    one,
    two,
    lse_one,
    lse_two,
    out,
    num_rows,
    H,
    one_stride_t,
    one_stride_h,
    two_stride_t,
    two_stride_h,
    lse_one_stride_h,
    lse_two_stride_h,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[t, h] = (e^a one + e^b two) / (e^a + e^b) with a, b the log-sum-exps [H, T]; out may be two."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK)
    is_row = row < num_rows
    mask = is_row[:, None] & (d < D)[None, :]
    t = (row // H).to(tl.int64)
    h = row % H
    a = tl.load(lse_one + h * lse_one_stride_h + t, mask=is_row, other=0.0)
    b = tl.load(lse_two + h * lse_two_stride_h + t, mask=is_row, other=0.0)
    most = tl.maximum(a, b)
    a, b = tl.exp(a - most), tl.exp(b - most)
    share = a / (a + b)
    x = tl.load(one + (t * one_stride_t + h * one_stride_h)[:, None] + d[None, :], mask=mask, other=0.0)
    y = tl.load(two + (t * two_stride_t + h * two_stride_h)[:, None] + d[None, :], mask=mask, other=0.0)
    value = x.to(tl.float32) * share[:, None] + y.to(tl.float32) * (1.0 - share)[:, None]
    place = row.to(tl.int64)[:, None] * D + d[None, :]
    tl.store(out + place, value.to(out.dtype.element_ty), mask=mask)
