"""Expanders of the types whose four-bit numbers name one of sixteen values: IQ4_NL, IQ4_XS, MXFP4, NVFP4.

Block structs of ggml-common.h. Each takes blocks, uint8 [B, block bytes], and fills out, float32 [B, values].
A byte is looked up whole: the table holds the pair of values of every byte, as one 64-bit number.
"""

import functools

import torch
from torch import Tensor

from strata_coord.kernels.expand_bits import halves, nibble_pairs, numbers, shifted

_UNEVEN = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


@functools.cache
def _pair_table(values: tuple[int, ...], device: torch.device) -> Tensor:
    """Return int64 [256]: the float32 values of a byte's low and high nibble, side by side."""
    of_nibble = torch.tensor(values, dtype=torch.float32)
    byte = torch.arange(256)
    return torch.stack((of_nibble[byte & 15], of_nibble[byte >> 4]), dim=1).view(torch.int64)[:, 0].to(device)


def _look_up(values: tuple[int, ...], packed: Tensor, out: Tensor) -> None:
    """Fill out [G, 2, n] from bytes [G, n], held as int32: low nibbles of a group first, then high ones."""
    pairs = _pair_table(values, packed.device).index_select(0, packed.flatten()).view(torch.float32)
    out.copy_(pairs.view(*packed.shape, 2).transpose(-1, -2))


def expand_iq4_nl(blocks: Tensor, out: Tensor) -> None:
    """Write d v: fp16 d, then 16 bytes."""
    _look_up(_UNEVEN, numbers(blocks, 2, 18), out.view(-1, 2, 16))
    out.mul_(halves(blocks, 0))


def expand_iq4_xs(blocks: Tensor, out: Tensor) -> None:
    """Write d (s - 32) v: fp16 d, eight six-bit scales (high bits, then low nibbles), 8 times 16 bytes."""
    _look_up(_UNEVEN, numbers(blocks, 8, 136).view(-1, 8, 16), out.view(-1, 8, 2, 16))
    high = shifted(numbers(blocks, 2, 4), (0, 2, 4, 6), 3)
    scales = nibble_pairs(numbers(blocks, 4, 8)) | (high << 4)
    out.view(-1, 8, 32).mul_((scales.sub_(32) * halves(blocks, 0)).unsqueeze(2))


@functools.cache
def _e8m0_halved(device: torch.device) -> Tensor:
    """Return float32 [256]: half of 2^(e - 127), a subnormal number for e below 2."""
    exponents = torch.arange(256, dtype=torch.int32)
    bits = torch.where(exponents < 2, 0x00200000 << exponents.clamp(max=1), (exponents - 1) << 23)
    return bits.int().view(torch.float32).to(device)


def expand_mxfp4(blocks: Tensor, out: Tensor) -> None:
    """Write half of 2^(e - 127), times the doubled e2m1 value: one exponent byte, then 16 bytes."""
    _look_up(_E2M1_DOUBLED, numbers(blocks, 1, 17), out.view(-1, 2, 16))
    out.mul_(_e8m0_halved(blocks.device).index_select(0, numbers(blocks, 0, 1).flatten()).unsqueeze(1))


@functools.cache
def _ue4m3_halved(device: torch.device) -> Tensor:
    """Return float32 [256]: half of an unsigned e4m3 number; 0x7F, which would be NaN, is 0."""
    byte = torch.arange(256)
    exponent, mantissa = (byte >> 3) & 15, (byte & 7).float()
    normal = (1.0 + mantissa / 8.0) * torch.exp2((exponent - 7).float())
    values = torch.where(exponent == 0, mantissa * 2.0**-9, normal) * 0.5
    values[0x7F] = 0.0
    return values.to(device)


def expand_nvfp4(blocks: Tensor, out: Tensor) -> None:
    """Write half of the e4m3 scale, times the doubled e2m1 value: four scales, then four times 8 bytes."""
    _look_up(_E2M1_DOUBLED, numbers(blocks, 4, 36).view(-1, 4, 8), out.view(-1, 4, 2, 8))
    scales = _ue4m3_halved(blocks.device).index_select(0, numbers(blocks, 0, 4).flatten())
    out.view(-1, 4, 16).mul_(scales.view(-1, 4, 1))
