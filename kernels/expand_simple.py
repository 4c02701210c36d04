"""Expanders of the block types whose values lie evenly: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_0, TQ1_0, TQ2_0.

Block structs of ggml-common.h. Each takes blocks, uint8 [B, block bytes], and fills out, float32 [B, values].
"""

import functools

import torch
from torch import Tensor

from strata_coord.kernels.expand_bits import (
    byte_bits,
    crumbs,
    halves,
    lane_bytes,
    nibbles,
    numbers,
    words,
)


def _fives(blocks: Tensor, start: int) -> Tensor:
    """Return 32 five-bit numbers: 4 bytes of fifth bits, then 16 bytes of low and high nibbles."""
    fifth = byte_bits(blocks, start, start + 4).view(torch.int32)
    return torch.cat(nibbles(words(blocks, start + 4, start + 20)), dim=1).bitwise_or_(fifth << 4)


def expand_q4_0(blocks: Tensor, out: Tensor) -> None:
    """Write d (q - 8), q four bits."""
    out.copy_(lane_bytes(torch.cat(nibbles(words(blocks, 2, 18)), dim=1)))
    out.sub_(8.0).mul_(halves(blocks, 0))


def expand_q4_1(blocks: Tensor, out: Tensor) -> None:
    """Write d q + m, q four bits."""
    out.copy_(lane_bytes(torch.cat(nibbles(words(blocks, 4, 20)), dim=1)))
    out.mul_(halves(blocks, 0)).add_(halves(blocks, 2))


def expand_q5_0(blocks: Tensor, out: Tensor) -> None:
    """Write d (q - 16), q five bits."""
    out.copy_(lane_bytes(_fives(blocks, 2)))
    out.sub_(16.0).mul_(halves(blocks, 0))


def expand_q5_1(blocks: Tensor, out: Tensor) -> None:
    """Write d q + m, q five bits."""
    out.copy_(lane_bytes(_fives(blocks, 4)))
    out.mul_(halves(blocks, 0)).add_(halves(blocks, 2))


def expand_q8_0(blocks: Tensor, out: Tensor) -> None:
    """Write d q, q a signed byte."""
    out.copy_(blocks[:, 2:].view(torch.int8))
    out.mul_(halves(blocks, 0))


def expand_q2_0(blocks: Tensor, out: Tensor) -> None:
    """Write d (q - 1); value k is two bits of byte k // 4, lowest bits first."""
    values = out.view(-1, 16, 4)
    for place, q in enumerate(crumbs(words(blocks, 2, 18))):
        values[:, :, place].copy_(lane_bytes(q))
    out.sub_(1.0).mul_(halves(blocks, 0))


def expand_tq2_0(blocks: Tensor, out: Tensor) -> None:
    """Write d (q - 1); of each 32 bytes the lowest pairs of bits come first."""
    packed = words(blocks, 0, 64).view(-1, 2, 8)
    out.copy_(lane_bytes(torch.stack(crumbs(packed), dim=2)).view(len(blocks), -1))
    out.sub_(1.0).mul_(halves(blocks, 64))


@functools.cache
def _trit_table(device: torch.device) -> Tensor:
    """Return float32 [256, 5]: the five base-3 digits of a byte, less one; the byte is a fraction of 256."""
    powers = torch.tensor([1, 3, 9, 27, 81])
    digits = ((torch.arange(256).unsqueeze(1) * powers) & 255) * 3 >> 8
    return (digits - 1).float().to(device)


def expand_tq1_0(blocks: Tensor, out: Tensor) -> None:
    """Write d q, q in -1 .. 1: 32 bytes of five digits, 16 bytes of five, 4 bytes of four; digit by digit."""
    packed = numbers(blocks, 0, 52).flatten()
    digits = _trit_table(blocks.device).index_select(0, packed).view(-1, 52, 5).transpose(1, 2)
    out[:, :160].view(-1, 5, 32).copy_(digits[:, :, :32])
    out[:, 160:240].view(-1, 5, 16).copy_(digits[:, :, 32:48])
    out[:, 240:].view(-1, 4, 4).copy_(digits[:, :4, 48:])
    out.mul_(halves(blocks, 52))
