"""RMS norms, gated norms, per-head norm with rotation, and gates on CUDA, each in one pass.

The references are norm.rms_norm, norm.group_rms_norm, rope.rotate and rope.rotate_neighbours. Inputs may be
fp32, bf16 or fp16; sums are fp32 and results are rounded once, to the dtype of out. Rows may lie at any
stride; the last axis is contiguous. All run on the current stream; out may be the input itself.

norm.rms_norm calls rms_norm_cuda for what lies on a device; the others are not called by a stage yet.

Letters: T rows, H heads or groups, D dims of one, R rotated pairs.
"""

from typing import Literal

import torch
from torch import Tensor

from strata_coord.kernels.rope import rotate, rotate_neighbours
from strata_coord.kernels.triton_launch import power_of_two

Activation = Literal["silu", "sigmoid"]
Pairs = Literal["halves", "neighbours"]

_TILE = 4096  # values of a program's rows, about: short rows are taken several at a time


def rms_norm_cuda(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    out: Tensor,
    gate: Tensor | None = None,
    activation: Activation = "silu",
) -> Tensor:
    """Write rms_norm(x) * weight, times activation(gate) if given, to out and return it.

    x, gate and out: [T, D] or [T, H, D]. weight: [D], or [H, D] with its own for each group of a row, which
    makes it group_rms_norm.

    Raises:
        ValueError: shapes do not fit, or a last axis is not contiguous.
    """
    x3, out3 = _three_axes(x, "x"), _three_axes(out, "out")
    gate3 = None if gate is None else _three_axes(gate, "gate")
    rows, heads, dim = x3.shape
    if out3.shape != x3.shape or (gate3 is not None and gate3.shape != x3.shape):
        message = f"x {list(x.shape)} goes to out {list(out.shape)} with another shape"
        raise ValueError(message)
    if (
        weight.shape[-1] != dim
        or (weight.dim() == 2 and weight.shape[0] != heads)
        or not weight.is_contiguous()
    ):
        message = f"weight {list(weight.shape)} for rows of {heads} x {dim}"
        raise ValueError(message)
    if not x3.numel():
        return out
    from strata_coord.kernels.triton_src import norms

    block = power_of_two(dim)
    per_program = max(1, min(_TILE // block, power_of_two(rows * heads)))
    gates = x3 if gate3 is None else gate3
    norms.rms_norm_kernel[(-(-rows * heads // per_program),)](
        x3,
        weight,
        gates,
        out3,
        rows * heads,
        heads,
        *x3.stride()[:2],
        *gates.stride()[:2],
        *out3.stride()[:2],
        dim if weight.dim() == 2 else 0,
        eps,
        D=dim,
        GATE=0 if gate is None else 1 if activation == "silu" else 2,
        ROWS=per_program,
        BLOCK=block,
        num_warps=4 if per_program * block <= _TILE else 8,
    )
    return out


def norm_rotate_cuda(
    x_THD: Tensor,
    weight_D: Tensor | None,
    cos_TR: Tensor,
    sin_TR: Tensor,
    *,
    eps: float,
    pairs: Pairs,
    out: Tensor,
) -> Tensor:
    """Write every head of x, normed by weight if given and rotated, to out and return it.

    Compared with rotate(rms_norm(x, weight), cos, sin). Reads and writes each value once; out may be x.

    Raises:
        ValueError: shapes do not fit, or a last axis is not contiguous.
    """
    x3, out3 = _three_axes(x_THD, "x"), _three_axes(out, "out")
    rows, heads, dim = x3.shape
    pairs_rotated = cos_TR.shape[1]
    if cos_TR.shape != (rows, pairs_rotated) or cos_TR.shape != sin_TR.shape or 2 * pairs_rotated > dim:
        message = f"angles {list(cos_TR.shape)} and {list(sin_TR.shape)} for heads {list(x_THD.shape)}"
        raise ValueError(message)
    if out3.shape != x3.shape or (weight_D is not None and weight_D.shape != (dim,)):
        message = f"heads {list(x_THD.shape)} go to {list(out.shape)} with another shape or weight"
        raise ValueError(message)
    if not x3.numel():
        return out
    from strata_coord.kernels.triton_src import norms

    # A head that is rotated whole has no rest; a tile of one masked value stands for it.
    rest = power_of_two(dim - 2 * pairs_rotated)
    padded = power_of_two(pairs_rotated)
    per_program = max(1, min(_TILE // (2 * padded + rest), power_of_two(rows * heads)))
    per_program = 1 << (per_program.bit_length() - 1)
    norms.norm_rotate_kernel[(-(-rows * heads // per_program),)](
        x3,
        cos_TR if weight_D is None else weight_D,
        cos_TR.contiguous(),
        sin_TR.contiguous(),
        out3,
        rows * heads,
        heads,
        *x3.stride()[:2],
        *out3.stride()[:2],
        eps,
        D=dim,
        R=pairs_rotated,
        NORM=weight_D is not None,
        NEIGHBOURS=pairs == "neighbours",
        ROWS=per_program,
        RP=padded,
        REST=rest,
    )
    return out


def norm_rotate_reference(
    x_THD: Tensor, weight_D: Tensor | None, cos_TR: Tensor, sin_TR: Tensor, *, eps: float, pairs: Pairs
) -> Tensor:
    """What norm_rotate_cuda computes, in fp32."""
    x = x_THD.float()
    if weight_D is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight_D.float()
    return (rotate if pairs == "halves" else rotate_neighbours)(x, cos_TR, sin_TR)


def sigmoid_gate_cuda(x: Tensor, gate: Tensor) -> Tensor:
    """Multiply x by sigmoid(gate) in place and return it; both [T, D] or [T, H, D], any row strides.

    Raises:
        ValueError: shapes differ, or a last axis is not contiguous.
    """
    x3, gate3 = _three_axes(x, "x"), _three_axes(gate, "gate")
    if x3.shape != gate3.shape:
        message = f"x {list(x.shape)} has a gate of {list(gate.shape)}"
        raise ValueError(message)
    if not x3.numel():
        return x
    from strata_coord.kernels.triton_src import norms

    rows, heads, dim = x3.shape
    block = min(power_of_two(dim), 1024)
    per_program = max(1, 1024 // block)
    norms.sigmoid_gate_kernel[(-(-rows * heads // per_program), -(-dim // block))](
        x3,
        gate3,
        rows * heads,
        heads,
        *x3.stride()[:2],
        *gate3.stride()[:2],
        dim,
        ROWS=per_program,
        BLOCK=block,
    )
    return x


def _three_axes(x: Tensor, name: str) -> Tensor:
    """Return x as a view [T, H, D]."""
    if x.dim() not in {2, 3} or (x.numel() and x.stride(-1) != 1):
        message = f"{name} must be [T, D] or [T, H, D] with a contiguous last axis, got {list(x.shape)}"
        raise ValueError(message)
    return x.unsqueeze(1) if x.dim() == 2 else x
