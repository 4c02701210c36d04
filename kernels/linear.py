"""A matrix product in the weight's type, with the result in the input's.

Activations between kernels are fp32. Where the weights of a launch are 16-bit the product runs in that type
with fp32 accumulation inside the library; where they are fp32 nothing is converted, and the result is that of
torch.nn.functional.linear bit for bit.
"""

from torch import Tensor
from torch.nn import functional


def linear(x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return x W^T + b, [T, O], in the type of x."""
    if weight_OD.dtype == x_TD.dtype:
        return functional.linear(x_TD, weight_OD, bias_O)
    product_TO = functional.linear(x_TD.to(weight_OD.dtype), weight_OD).to(x_TD.dtype)
    return product_TO if bias_O is None else product_TO.add_(bias_O)
