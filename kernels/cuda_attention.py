"""Causal grouped-query attention against a prefix on CUDA; the reference is attention.causal_attention.

Three ways. "flash": one call, aligned to the lower right, without masks or repeated heads. "merged": all rows
over the prefix without a mask, plus the square of the rows over themselves, merged by log-sum-exp: each part
has a shape that cuDNN runs at its full rate, which it does not with the lower-right alignment. "masks": the
reference, for windows, sinks and cards that flash does not run on.

Floor: 4 T (P + T / 2) Q D operations for T rows after P positions.

Letters: T query rows, L positions, Q query heads, G key-value heads, D head dim.
"""

import functools
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, bias, sdpa_kernel

from strata_coord.kernels.attention import causal_attention
from strata_coord.kernels.triton_launch import power_of_two

Way = Literal["flash", "merged", "masks"]

_FLASH_DIMS = 256
_FLASH_CAPABILITY = (8, 0)
_HOPPER = 9


def attention_way(
    device: torch.device, dtype: torch.dtype, head_dim: int, *, window: int = 0, has_sinks: bool = False
) -> tuple[Way, str]:
    """Return how causal_attention_cuda runs a layer's attention, and why."""
    if device.type != "cuda":
        return "masks", f"device {device.type}"
    if window or has_sinks:
        return "masks", "a window" if window else "sinks"
    if dtype not in {torch.bfloat16, torch.float16} or head_dim > _FLASH_DIMS or head_dim % 8:
        return "masks", f"flash runs no {dtype} heads of {head_dim} dims"
    return _way_of_card(*torch.cuda.get_device_capability(device))


@functools.cache
def _way_of_card(major: int, minor: int) -> tuple[Way, str]:
    name = f"compute capability {major}.{minor}"
    if (major, minor) < _FLASH_CAPABILITY:
        return "masks", f"{name}: flash needs 8.0"
    if major == _HOPPER:
        return "merged", f"{name}: cuDNN runs prefix and diagonal faster than flash the whole"
    return "flash", f"{name}: one call"


def causal_attention_cuda(
    q_TQD: Tensor, k_GLD: Tensor, v_GLD: Tensor, first_position: int, *, way: Way
) -> Tensor:
    """Return causal attention [T, Q, D]; row t is at first_position + t, keys lie from position 0 on.

    Relative error 1e-2 in bf16. Takes the output, and with "merged" a second one and 8 bytes a row and head,
    from torch's allocator: its kernels have no out argument.

    Raises:
        ValueError: there are fewer keys than the last row must see.
    """
    rows, length = q_TQD.shape[0], first_position + q_TQD.shape[0]
    if k_GLD.shape[1] < length:
        message = f"rows end at position {length}, keys at {k_GLD.shape[1]}"
        raise ValueError(message)
    if way == "masks" or not rows:
        return causal_attention(q_TQD, k_GLD, v_GLD, first_position)
    k, v = (x[None, :, :length] for x in (k_GLD, v_GLD))
    if rows == 1:
        # The query heads of a group stand in for query rows: keys are read once per group.
        q = q_TQD.view(1, k.shape[1], -1, q_TQD.shape[2])
        return functional.scaled_dot_product_attention(q, k, v).view_as(q_TQD)
    q = q_TQD.transpose(0, 1).unsqueeze(0)
    if way == "merged" and first_position >= rows:
        return _merged(q, k, v, first_position)
    if first_position == 0:
        backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
        with sdpa_kernel(backends if way == "merged" else backends[1:], set_priority=True):
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    else:
        out = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=bias.causal_lower_right(rows, length), enable_gqa=True
        )
    return out.squeeze(0).transpose(0, 1)


def _merged(q: Tensor, k: Tensor, v: Tensor, prefix: int) -> Tensor:
    parts = [
        attend_with_lse(q, k[:, :, :prefix], v[:, :, :prefix], causal=False),
        attend_with_lse(q, k[:, :, prefix:], v[:, :, prefix:], causal=True),
    ]
    (one, lse_one), (two, lse_two) = parts
    return merge_parts(one, lse_one, two, lse_two)


def attend_with_lse(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Return cuDNN's attention [T, Q, D] and its log-sum-exp, fp32 [Q, T].

    q, k and v are [1, heads, rows, D].
    """
    attend = torch.ops.aten._scaled_dot_product_cudnn_attention
    out, lse = attend(q, k, v, attn_bias=None, compute_log_sumexp=True, dropout_p=0.0, is_causal=causal)[:2]
    return out.squeeze(0).transpose(0, 1), lse.reshape(q.shape[1], q.shape[2])


def merge_parts(one_TQD: Tensor, lse_one_QT: Tensor, two_TQD: Tensor, lse_two_QT: Tensor) -> Tensor:
    """Return the attention over the keys of both parts. Rounded once more than one call would be.

    Raises:
        ValueError: shapes differ.
    """
    rows, heads, dim = one_TQD.shape
    if two_TQD.shape != one_TQD.shape or not lse_one_QT.shape == lse_two_QT.shape == (heads, rows):
        message = (
            f"parts {list(one_TQD.shape)} and {list(two_TQD.shape)} with log-sum-exps "
            f"{list(lse_one_QT.shape)} and {list(lse_two_QT.shape)}"
        )
        raise ValueError(message)
    out = torch.empty((rows, heads, dim), dtype=one_TQD.dtype, device=one_TQD.device)
    from strata_coord.kernels.triton_src import merge

    block = power_of_two(dim)
    per_program = max(1, 2048 // block)
    merge.merge_parts_kernel[(-(-rows * heads // per_program),)](
        one_TQD,
        two_TQD,
        lse_one_QT,
        lse_two_QT,
        out,
        rows * heads,
        heads,
        *one_TQD.stride()[:2],
        *two_TQD.stride()[:2],
        lse_one_QT.stride(0),
        lse_two_QT.stride(0),
        D=dim,
        ROWS=per_program,
        BLOCK=block,
    )
    return out
