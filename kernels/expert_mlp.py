"""The gated feed-forward of one expert, routed or shared."""

import torch
from torch import Tensor
from torch.nn import functional

from strata_coord.kernels.linear import linear


def swiglu(x_TD: Tensor, gate_FD: Tensor, up_FD: Tensor, down_DF: Tensor) -> Tensor:
    """Return down(silu(gate x) * up x) [T, D]. F is the expert's width."""
    hidden_TF = functional.silu(linear(x_TD, gate_FD), inplace=True)
    return linear(hidden_TF.mul_(linear(x_TD, up_FD)), down_DF)


def clamped_swiglu(
    x_TD: Tensor,
    gate_FD: Tensor,
    up_FD: Tensor,
    down_DF: Tensor,
    *,
    biases: tuple[Tensor, Tensor, Tensor],
    alpha: float = 1.702,
    limit: float = 7.0,
) -> Tensor:
    """Return down(g sigmoid(alpha g) (u + 1)) [T, D], as gpt-oss has it; biases are [F], [F] and [D].

    g is the gate's result, at most limit; u is the other's, between minus limit and limit. The constants are
    gpt-oss's own; files do not name them.
    """
    gate_bias_F, up_bias_F, down_bias_D = biases
    gate_TF = linear(x_TD, gate_FD, gate_bias_F).clamp_(max=limit)
    up_TF = linear(x_TD, up_FD, up_bias_F).clamp_(min=-limit, max=limit)
    hidden_TF = gate_TF * torch.sigmoid(gate_TF * alpha)
    return linear(hidden_TF.mul_(up_TF.add_(1.0)), down_DF, down_bias_D)
