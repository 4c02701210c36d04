"""Bits of quantised blocks as torch tensors: the pieces that the expanders of all block types are made of.

Four bytes are unpacked per operation, as the lanes of one int32 word: a CPU has vector shifts for words but
none for bytes. Every piece copies its field first, since a block's fields lie at odd strides and alignments.
Letters: B blocks, n bytes of a field.
"""

import functools

import torch
from torch import Tensor


def halves(blocks: Tensor, start: int, count: int = 1) -> Tensor:
    """Return count fp16 numbers that begin at byte start of each block as float32 [B, count]."""
    return _field(blocks, start, start + 2 * count).view(torch.float16).float()


def words(blocks: Tensor, start: int, stop: int) -> Tensor:
    """Return bytes start..stop of each block as int32 [B, n / 4], little-endian."""
    return _field(blocks, start, stop).view(torch.int32)


def shorts(blocks: Tensor, start: int, stop: int) -> Tensor:
    """Return bytes start..stop of each block as unsigned 16-bit numbers, int32 [B, n / 2]."""
    return _field(blocks, start, stop).view(torch.int16).int() & 0xFFFF


def numbers(blocks: Tensor, start: int, stop: int) -> Tensor:
    """Return bytes start..stop of each block as int32 [B, n]: numbers to look up or to shift."""
    return blocks[:, start:stop].int()


def _field(blocks: Tensor, start: int, stop: int) -> Tensor:
    # contiguous() would hand back the field of a lone block as it is, at any alignment.
    return blocks[:, start:stop].clone(memory_format=torch.contiguous_format)


def nibbles(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Return the low and the high four bits of every byte, as words of the same shape."""
    return packed & 0x0F0F0F0F, (packed >> 4).bitwise_and_(0x0F0F0F0F)


def crumbs(packed: Tensor) -> list[Tensor]:
    """Return the four pairs of bits of every byte, lowest first, as words of the same shape."""
    return [(packed >> (2 * place) if place else packed) & 0x03030303 for place in range(4)]


def lane_bits(packed: Tensor, *, at: int) -> list[Tensor]:
    """Return for each bit of a byte, lowest first, words whose bytes hold that bit at place at."""
    mask = 0x01010101 << at
    return [_shifted(packed, at - bit).bitwise_and_(mask) for bit in range(8)]


def lane_crumbs(packed: Tensor, *, at: int) -> list[Tensor]:
    """Return for each pair of bits of a byte, lowest first, words whose bytes hold it from place at on."""
    mask = 0x03030303 << at
    return [_shifted(packed, at - 2 * place).bitwise_and_(mask) for place in range(4)]


def _shifted(packed: Tensor, places: int) -> Tensor:
    # Bits that cross into a neighbouring byte are masked by the caller.
    return packed << places if places >= 0 else packed >> -places


def lane_bytes(unpacked: Tensor) -> Tensor:
    """Return words as the uint8 that they hold; the last axis grows by four."""
    return unpacked.view(torch.uint8)


def nibble_pairs(packed: Tensor) -> Tensor:
    """Return the low, then the high four bits of each number of the last axis: int32 [..., 2n]."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def shifted(packed: Tensor, places: tuple[int, ...], mask: int) -> Tensor:
    """Return mask & (number >> place) for each place, of each number of the last axis: [..., n * places]."""
    return ((packed.unsqueeze(-1) >> _places(places, packed.device)) & mask).flatten(-2)


@functools.cache
def _places(places: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(places, dtype=torch.int32, device=device)


@functools.cache
def bit_table(device: torch.device) -> Tensor:
    """Return int64 [256]: the eight bits of a byte, lowest first, as the eight bytes of a number."""
    table = (torch.arange(256).unsqueeze(1) >> torch.arange(8)).bitwise_and_(1).to(torch.uint8)
    return table.view(torch.int64).flatten().to(device)


def byte_bits(blocks: Tensor, start: int, stop: int) -> Tensor:
    """Return the bits of bytes start..stop, byte by byte, lowest first, as uint8 [B, 8n]."""
    packed = numbers(blocks, start, stop)
    return bit_table(blocks.device).index_select(0, packed.flatten()).view(torch.uint8).view(len(blocks), -1)
