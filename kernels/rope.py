"""Rotary position embedding: pairs of the leading dims of a head are rotated, the rest passes through.

A pair is a dim of the first half and its counterpart in the second, or two neighbours: see the two functions.

For text, where all three positions of a token are equal, interleaved M-RoPE is this same rotation.
"""

import math

import torch
from torch import Tensor


def rotary_frequencies(dims: int, base: float, device: torch.device | None = None) -> Tensor:
    """Return float32 [dims / 2]: radians per position of each pair of dims."""
    exponents = torch.arange(0, dims, 2, dtype=torch.float32, device=device) / dims
    return 1.0 / (base**exponents)


def yarn_frequencies(
    dims: int,
    base: float,
    *,
    factor: float,
    original_tokens: int,
    beta_fast: float,
    beta_slow: float,
    whole_pairs: bool = True,
    device: torch.device | None = None,
) -> Tensor:
    """Return float32 [dims / 2] of a context stretched by factor.

    A pair that turns at least beta_fast times over original_tokens keeps its frequency, one that turns at
    most beta_slow times has it divided by factor, and between them runs a ramp over the pairs' numbers.
    whole_pairs: the ramp begins and ends on a pair.
    """
    powers = base ** (torch.arange(0, dims, 2, dtype=torch.float32, device=device) / dims)
    low, high = (_pair_of_turns(beta, dims, base, original_tokens) for beta in (beta_fast, beta_slow))
    if whole_pairs:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    if low == high:
        high += 0.001  # the ramp is a step, and must not divide by zero
    pairs = torch.arange(dims // 2, dtype=torch.float32, device=device)
    kept = 1 - ((pairs - low) / (high - low)).clamp(0, 1)
    return 1.0 / (factor * powers) * (1 - kept) + 1.0 / powers * kept


def _pair_of_turns(turns: float, dims: int, base: float, num_tokens: int) -> float:
    """Return the number of the pair, not rounded, that turns so many times over num_tokens positions."""
    return dims * math.log(num_tokens / (turns * 2 * math.pi)) / (2 * math.log(base))


def rotary_table(
    positions_T: Tensor, dims: int, base: float, *, frequencies: Tensor | None = None, magnitude: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return (cos, sin), each float32 [T, dims / 2], of integer positions, times magnitude.

    frequencies: those of YaRN, on the device of the positions; None: rotary_frequencies(dims, base). Angles
    are products of float32 numbers, as in the models' own code: at long positions a more exact angle is a
    different one from the angle that the model was trained with.
    """
    if frequencies is None:
        frequencies = rotary_frequencies(dims, base, positions_T.device)
    angles = positions_T.float().unsqueeze(1) * frequencies
    cos, sin = angles.cos(), angles.sin()
    return (cos, sin) if magnitude == 1.0 else (cos * magnitude, sin * magnitude)


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


def rotate_neighbours(x_THD: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """Rotate as rotate does, but dims 2j and 2j + 1 by angle j; returns a new tensor."""
    dims = 2 * cos_TR.shape[1]
    cos, sin = cos_TR.unsqueeze(1), sin_TR.unsqueeze(1)
    even, odd = x_THD[..., :dims:2], x_THD[..., 1:dims:2]
    out = torch.empty_like(x_THD)
    out[..., :dims:2] = even * cos - odd * sin
    out[..., 1:dims:2] = odd * cos + even * sin
    out[..., dims:] = x_THD[..., dims:]
    return out
