"""The gated delta rule on CUDA; the reference is gated_delta.gated_delta.

Long runs of rows go to fla-core's chunk_gated_delta_rule where that is importable, else to the torch
reference. Short ones, as in decode, go to a kernel of our own that walks row by row.

Floor of one layer, T rows, 48 value and 16 key heads of 128 dims, bf16: q, k, v and o are 32,768 bytes a row,
1.1 GB at 32,768 rows or 0.26 ms at 4.1 TB/s, and about 0.1 TFLOP per 1,000 rows of 64-row chunks: bound by
neither, but by the 64-row steps that follow one another in each head.

No stage calls this yet: models/gated_delta_net.py runs the reference on every device.

Letters: T rows, G key heads, H value heads, K key dim, V value dim.
"""

import functools
import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor

from strata_coord.kernels.gated_delta import CHUNK, HeadOrder, expand_key_heads, gated_delta
from strata_coord.kernels.triton_launch import power_of_two

RECURRENT_ROWS = 16
"""Most rows that are walked one by one: a chunk of fla-core's costs several launches and 64 rows of work."""

_FlaRule = Callable[..., tuple[Tensor, Tensor]]


@functools.cache
def chunk_rule_refusal() -> str | None:
    """Return why long runs take the torch reference, None if fla-core's kernels run them."""
    if importlib.util.find_spec("fla") is None:
        return "fla-core is not installed"
    try:
        _fla_rule()
    except Exception as error:  # whatever its import meets, the reference still runs
        return f"fla-core does not load: {type(error).__name__}: {error}"
    return None


@functools.cache
def _fla_rule() -> _FlaRule:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    rule: _FlaRule = chunk_gated_delta_rule
    return rule


def gated_delta_cuda(
    q_TGK: Tensor,
    k_TGK: Tensor,
    v_THV: Tensor,
    g_TH: Tensor,
    beta_TH: Tensor,
    state_HKV: Tensor,
    *,
    first_position: int,
    order: HeadOrder,
    out: Tensor,
) -> Tensor:
    """Run a segment's rows, write o [T, H, V] to out and return it; state (fp32) is updated in place.

    Arguments as in gated_delta; q, k and v are bf16, fp16 or fp32 views whose last two axes are contiguous.
    Chunks end at multiples of 64 of the absolute position as in the reference: rows that finish a chunk which
    an earlier segment began are a call of their own. Relative error 5e-3 in bf16.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    rows, heads, dim = v_THV.shape
    if state_HKV.dtype != torch.float32 or not state_HKV.is_contiguous() or heads % q_TGK.shape[1]:
        message = f"{heads} value heads of {q_TGK.shape[1]} key heads with state of {state_HKV.dtype}"
        raise ValueError(message)
    if state_HKV.shape != (heads, q_TGK.shape[2], dim) or out.shape != v_THV.shape or not out.is_contiguous():
        message = f"state {list(state_HKV.shape)} and out {list(out.shape)} for values {list(v_THV.shape)}"
        raise ValueError(message)
    start = 0
    while start < rows:
        stop = min(rows, start + CHUNK - (first_position + start) % CHUNK)
        if stop - start > RECURRENT_ROWS and (first_position + start) % CHUNK == 0:
            # The last chunk comes along, finished or not, unless it is short.
            tail = (first_position + rows) % CHUNK
            stop = rows - tail if 0 < tail <= RECURRENT_ROWS else rows
        here = slice(start, stop)
        _run(
            q_TGK[here],
            k_TGK[here],
            v_THV[here],
            g_TH[here],
            beta_TH[here],
            state_HKV,
            first_position=first_position + start,
            order=order,
            out=out[here],
        )
        start = stop
    return out


def _run(
    q_TGK: Tensor,
    k_TGK: Tensor,
    v_THV: Tensor,
    g_TH: Tensor,
    beta_TH: Tensor,
    state_HKV: Tensor,
    *,
    first_position: int,
    order: HeadOrder,
    out: Tensor,
) -> None:
    rows, heads = g_TH.shape
    if rows <= RECURRENT_ROWS:
        recurrent_gated_delta_triton(q_TGK, k_TGK, v_THV, g_TH, beta_TH, state_HKV, order=order, out=out)
        return
    if chunk_rule_refusal() is not None:
        q, k, v, g, beta = (x.float() for x in (q_TGK, k_TGK, v_THV, g_TH, beta_TH))
        out.copy_(gated_delta(q, k, v, g, beta, state_HKV, first_position=first_position, order=order))
        return
    # fla-core's own repetition of key heads is the grouped one.
    grouped = order == "grouped"
    q, k = (x if grouped else expand_key_heads(x, heads, order) for x in (q_TGK, k_TGK))
    o, state = _fla_rule()(
        q.unsqueeze(0),
        k.unsqueeze(0),
        v_THV.unsqueeze(0),
        g_TH.unsqueeze(0),
        beta_TH.unsqueeze(0),
        initial_state=state_HKV.unsqueeze(0),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    out.copy_(o.squeeze(0))
    state_HKV.copy_(state.squeeze(0))


def recurrent_gated_delta_triton(
    q_TGK: Tensor,
    k_TGK: Tensor,
    v_THV: Tensor,
    g_TH: Tensor,
    beta_TH: Tensor,
    state_HKV: Tensor,
    *,
    order: HeadOrder,
    out: Tensor,
) -> None:
    """Run any number of rows one by one in fp32; q and k are raw. One launch.

    Raises:
        ValueError: the last two axes of q, k or v are not contiguous.
    """
    rows, heads, dim = v_THV.shape
    groups, key_dim = q_TGK.shape[1:]
    for name, x in (("q", q_TGK), ("k", k_TGK), ("v", v_THV)):
        if rows and x.stride()[1:] != (x.shape[2], 1):
            message = f"{name}: the last two axes of {list(x.shape)} are not contiguous, strides {x.stride()}"
            raise ValueError(message)
    if rows and not g_TH.stride(1) == beta_TH.stride(1) == 1 and heads > 1:
        message = (
            f"g and beta: the last axis is not contiguous, strides {g_TH.stride()} and {beta_TH.stride()}"
        )
        raise ValueError(message)
    if not rows:
        return
    from strata_coord.kernels.triton_src import delta

    columns = min(power_of_two(dim), 32)
    delta.recurrent_delta_kernel[(heads, -(-dim // columns))](
        q_TGK,
        k_TGK,
        v_THV,
        g_TH,
        beta_TH,
        state_HKV,
        out,
        rows,
        q_TGK.stride(0),
        k_TGK.stride(0),
        v_THV.stride(0),
        g_TH.stride(0),
        beta_TH.stride(0),
        H=heads,
        GROUPS=groups,
        K=key_dim,
        V=dim,
        TILED=order == "tiled",
        KP=power_of_two(key_dim),
        BV=columns,
    )
