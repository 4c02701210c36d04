"""Rotary position embedding: halves of the leading dims of a head are rotated, the rest passes through.

For text, where all three positions of a token are equal, interleaved M-RoPE is this same rotation.
"""

import torch
from torch import Tensor


def rotary_table(positions_T: Tensor, dims: int, base: float) -> tuple[Tensor, Tensor]:
    """Return (cos, sin), each float32 [T, dims / 2], of integer positions.

    Angles are products of float32 numbers, as in the models' own code: at long positions a more exact angle
    is a different one from the angle that the model was trained with.
    """
    exponents = torch.arange(0, dims, 2, dtype=torch.float32, device=positions_T.device) / dims
    frequencies = 1.0 / (base**exponents)
    angles = positions_T.float().unsqueeze(1) * frequencies
    return angles.cos(), angles.sin()


def rotate(x_THD: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """Rotate the first 2R dims of every head of row t by the angles of row t; returns a new tensor."""
    half = cos_TR.shape[1]
    cos, sin = cos_TR.unsqueeze(1), sin_TR.unsqueeze(1)
    first, second = x_THD[..., :half], x_THD[..., half : 2 * half]
    out = torch.empty_like(x_THD)
    out[..., :half] = first * cos - second * sin
    out[..., half : 2 * half] = second * cos + first * sin
    out[..., 2 * half :] = x_THD[..., 2 * half :]
    return out
