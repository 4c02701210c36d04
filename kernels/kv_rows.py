"""Keys and values as int8 with one scale per row.

A row is the head_dim values of one token in one key-value head. scale = max |x| / 127, symmetric, so zero
stays zero and no offset is kept. The scale is float32: float16 would turn rows below 6e-8 x 127 into zeros.
Letters: D values of a row; any leading axes.
"""

import torch
from torch import Tensor

LARGEST = 127


def quantize_rows(x_D: Tensor) -> tuple[Tensor, Tensor]:
    """Return (int8 [..., D], float32 scales [...]) of rows [..., D].

    A row with a NaN or infinity gets a scale that is not finite, so it does not read back as harmless values.
    """
    x_D = x_D.float()
    scale = x_D.abs().amax(-1) / LARGEST
    # A row of zeros has scale 0; dividing by 1 instead leaves it zeros.
    divisor = torch.where(scale > 0, scale, torch.ones_like(scale))
    units_D = (x_D / divisor.unsqueeze(-1)).round_().nan_to_num_(nan=1.0)
    return units_D.clamp_(-LARGEST, LARGEST).to(torch.int8), scale


def dequantize_rows(units_D: Tensor, scale: Tensor) -> Tensor:
    """Return float32 [..., D]."""
    return units_D.float().mul_(scale.unsqueeze(-1))
