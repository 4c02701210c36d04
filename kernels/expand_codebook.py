"""Expanders of the types whose numbers name groups of 8 or 4 values in a codebook: IQ1, IQ2 and IQ3 types.

Block structs of ggml-common.h; the codebooks themselves are read from the gguf package, on first use. Each
function takes blocks, uint8 [B, block bytes], and fills out, float32 [B, 256]. The signs of eight values are
one byte, stored whole or, where the eighth follows from an even number of minus signs, as seven bits.
"""

import functools

import torch
from torch import Tensor

from strata_coord.kernels.expand_bits import byte_bits, halves, nibble_pairs, numbers, shifted, shorts, words

_ODD_STEPS = (0, 7, 14, 21)  # of the seven-bit signs in a 32-bit word
_THREE_BITS = (0, 3, 6, 9)
_DELTA = 0.125


@functools.cache
def _codebook(name: str, device: torch.device) -> Tensor:
    """Return float32 [entries, 8 or 4] of a type."""
    from gguf import quants

    table = getattr(quants, name)
    table.init_grid()
    return torch.from_numpy(table.grid.reshape(table.grid_shape)).to(device)


@functools.cache
def _signs(device: torch.device) -> Tensor:
    """Return float32 [256, 8]: 1, or -1 where a byte's bit is set, lowest bit first."""
    bits = (torch.arange(256).unsqueeze(1) >> torch.arange(8)) & 1
    return (1 - 2 * bits).float().to(device)


@functools.cache
def _even_signs(device: torch.device) -> Tensor:
    """Return float32 [128, 8]: the signs of seven bits, the eighth making the number of minus signs even."""
    seven = torch.arange(128)
    ones = sum((seven >> bit) & 1 for bit in range(7))
    return _signs(device)[(seven | ((ones & 1) << 7)).to(device)]


def _fill(out: Tensor, codebook: Tensor, entries: Tensor) -> None:
    torch.index_select(codebook, 0, entries.flatten(), out=out.view(-1, codebook.shape[1]))


def _sign(out: Tensor, table: Tensor, signs: Tensor) -> None:
    out.view(-1, 8).mul_(table.index_select(0, signs.flatten()))


def _scale(out: Tensor, scales: Tensor) -> None:
    """Multiply equal runs of a block by scales [B, runs]."""
    out.view(*scales.shape, -1).mul_(scales.unsqueeze(2))


def expand_iq2_xxs(blocks: Tensor, out: Tensor) -> None:
    """Per 32 values 4 entries of 8 bits; then a word of four seven-bit signs and a scale of four bits."""
    entries = blocks[:, 2:66].reshape(-1, 8, 8)[:, :, :4].int()
    mixed = words(blocks, 2, 66)[:, 1::2]
    _fill(out, _codebook("IQ2_XXS", blocks.device), entries)
    _sign(out, _even_signs(blocks.device), shifted(mixed, _ODD_STEPS, 127))
    _scale(out, halves(blocks, 0) * (((mixed >> 28) & 15) + 0.5) * 0.25)


def expand_iq2_xs(blocks: Tensor, out: Tensor) -> None:
    """Per 8 values an entry of 9 bits and seven signs; per 16 values a scale of four bits."""
    mixed = shorts(blocks, 2, 66)
    _fill(out, _codebook("IQ2_XS", blocks.device), mixed & 511)
    _sign(out, _even_signs(blocks.device), mixed >> 9)
    _scale(out, halves(blocks, 0) * (nibble_pairs(numbers(blocks, 66, 74)) + 0.5) * 0.25)


def expand_iq2_s(blocks: Tensor, out: Tensor) -> None:
    """Per 8 values an entry of 8 + 2 bits and a byte of signs; per 16 values a scale of four bits."""
    entries = numbers(blocks, 2, 34) | (shifted(numbers(blocks, 66, 74), (0, 2, 4, 6), 3) << 8)
    _fill(out, _codebook("IQ2_S", blocks.device), entries)
    _sign(out, _signs(blocks.device), numbers(blocks, 34, 66))
    _scale(out, halves(blocks, 0) * (nibble_pairs(numbers(blocks, 74, 82)) + 0.5) * 0.25)


def expand_iq3_xxs(blocks: Tensor, out: Tensor) -> None:
    """Per 4 values an entry of 8 bits; per 32 values a word of four seven-bit signs and a scale."""
    mixed = words(blocks, 66, 98)
    _fill(out, _codebook("IQ3_XXS", blocks.device), numbers(blocks, 2, 66))
    _sign(out, _even_signs(blocks.device), shifted(mixed, _ODD_STEPS, 127))
    _scale(out, halves(blocks, 0) * (((mixed >> 28) & 15) + 0.5) * 0.5)


def expand_iq3_s(blocks: Tensor, out: Tensor) -> None:
    """Per 4 values an entry of 8 + 1 bits; per 8 values a byte of signs; per 32 values a scale."""
    entries = numbers(blocks, 2, 66) | (byte_bits(blocks, 66, 74).int() << 8)
    _fill(out, _codebook("IQ3_S", blocks.device), entries)
    _sign(out, _signs(blocks.device), numbers(blocks, 74, 106))
    _scale(out, halves(blocks, 0) * (nibble_pairs(numbers(blocks, 106, 110)) * 2 + 1))


def expand_iq1_s(blocks: Tensor, out: Tensor) -> None:
    """Per 8 values an entry of 8 + 3 bits; per 32 values a scale of three bits and the sign of a shift."""
    mixed = shorts(blocks, 34, 50)
    entries = numbers(blocks, 2, 34) | (shifted(mixed, _THREE_BITS, 7) << 8)
    _fill(out, _codebook("IQ1_S", blocks.device), entries)
    out.view(-1, 8, 32).add_((_DELTA - (mixed >> 15) * (2 * _DELTA)).unsqueeze(2))
    _scale(out, halves(blocks, 0) * (((mixed >> 12) & 7) * 2 + 1))


def expand_iq1_m(blocks: Tensor, out: Tensor) -> None:
    """Per 8 values an entry of 8 + 3 bits and the sign of a shift; per 16 values a scale of three bits.

    The fp16 factor has no field of its own: its nibbles are the highest of the four scale words.
    """
    mixed = shorts(blocks, 48, 56)
    high = nibble_pairs(numbers(blocks, 32, 48))
    _fill(out, _codebook("IQ1_M", blocks.device), numbers(blocks, 0, 32) | ((high & 7) << 8))
    out.view(-1, 32, 8).add_((_DELTA - (high >> 3) * (2 * _DELTA)).unsqueeze(2))
    top = mixed >> 12
    factor = top[:, :1] | (top[:, 1:2] << 4) | (top[:, 2:3] << 8) | (top[:, 3:] << 12)
    d = factor.to(torch.int16).view(torch.float16).float()
    _scale(out, d * (shifted(mixed, _THREE_BITS, 7) * 2 + 1))
