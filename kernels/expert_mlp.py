"""The gated feed-forward of one expert, routed or shared."""

from torch import Tensor
from torch.nn import functional


def swiglu(x_TD: Tensor, gate_FD: Tensor, up_FD: Tensor, down_DF: Tensor) -> Tensor:
    """Return down(silu(gate x) * up x) [T, D]. F is the expert's width."""
    hidden_TF = functional.silu(functional.linear(x_TD, gate_FD), inplace=True)
    return functional.linear(hidden_TF.mul_(functional.linear(x_TD, up_FD)), down_DF)
