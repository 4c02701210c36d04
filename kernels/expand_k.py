"""Expanders of the K types: Q2_K, Q3_K, Q4_K, Q5_K, Q6_K. Block structs of ggml-common.h.

A block is 256 values in groups of 16 or 32 with a scale each, scales themselves being small integers times an
fp16 number. Each function takes blocks, uint8 [B, block bytes], and fills out, float32 [B, 256]. Scale and
offset are applied as two roundings.
"""

import torch
from torch import Tensor

from strata_coord.kernels.expand_bits import (
    crumbs,
    halves,
    lane_bits,
    lane_bytes,
    lane_crumbs,
    nibbles,
    words,
)


def expand_q2_k(blocks: Tensor, out: Tensor) -> None:
    """Write d s q - m o: 16 bytes of scale and offset nibbles, 64 bytes of q, fp16 d and m."""
    scales, offsets = nibbles(words(blocks, 0, 16))
    factors = halves(blocks, 80, 2)
    out.copy_(_pairs_of_bits(blocks, 16))
    groups = out.view(-1, 16, 16)
    groups.mul_((lane_bytes(scales) * factors[:, :1]).unsqueeze(2))
    groups.sub_((lane_bytes(offsets) * factors[:, 1:]).unsqueeze(2))


def _pairs_of_bits(blocks: Tensor, start: int) -> Tensor:
    """Return 256 two-bit numbers, uint8 [B, 256]: of each 32 bytes the lowest pairs first."""
    packed = words(blocks, start, start + 64).view(-1, 2, 8)
    return lane_bytes(torch.stack(crumbs(packed), dim=2)).view(len(blocks), -1)


def expand_q3_k(blocks: Tensor, out: Tensor) -> None:
    """Write d (s - 32) (q - 4): 32 bytes of third bits, 64 of two bits, 12 of six-bit scales, fp16 d."""
    packed = words(blocks, 32, 96).view(-1, 2, 8)
    low = torch.stack(crumbs(packed), dim=2).view(-1, 8, 8)
    third = torch.stack(lane_bits(words(blocks, 0, 32), at=2), dim=1)
    out.copy_(lane_bytes(low.bitwise_or_(third)).view(len(blocks), -1))
    mixed = words(blocks, 96, 108)
    low_scales = torch.cat(nibbles(mixed[:, :2]), dim=1)
    high_scales = torch.cat(lane_crumbs(mixed[:, 2:], at=4), dim=1)
    scales = lane_bytes(low_scales.bitwise_or_(high_scales)).float().sub_(32.0).mul_(halves(blocks, 108))
    out.sub_(4.0).view(-1, 16, 16).mul_(scales.unsqueeze(2))


def _six_bit_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return scale and offset [B, 8, 1] of the groups of Q4_K and Q5_K: fp16 d and m, then 12 bytes."""
    packed = words(blocks, 4, 16)
    first, mixed = packed[:, :2], packed[:, 2:]  # scales and offsets of groups 0-3; nibbles of groups 4-7
    later = torch.cat(nibbles(mixed), dim=1).bitwise_or_((first >> 2).bitwise_and_(0x30303030))
    both = lane_bytes(torch.stack((first & 0x3F3F3F3F, later), dim=1))  # [B, half, scale or offset, 4]
    products = both.view(-1, 2, 2, 4) * halves(blocks, 0, 2).view(-1, 1, 2, 1)
    return products[:, :, 0].reshape(-1, 8, 1), products[:, :, 1].reshape(-1, 8, 1)


def _half_bytes(blocks: Tensor, start: int) -> Tensor:
    """Return 256 four-bit numbers as words [B, 8, 8]: of each 32 bytes the low nibbles first."""
    return torch.stack(nibbles(words(blocks, start, start + 128).view(-1, 4, 8)), dim=2).view(-1, 8, 8)


def expand_q4_k(blocks: Tensor, out: Tensor) -> None:
    """Write d s q - m o, q four bits."""
    scales, offsets = _six_bit_scales(blocks)
    groups = out.view(-1, 8, 32)
    groups.copy_(lane_bytes(_half_bytes(blocks, 16)))
    groups.mul_(scales).sub_(offsets)


def expand_q5_k(blocks: Tensor, out: Tensor) -> None:
    """Write d s q - m o, q five bits: 32 bytes hold the fifth bits, one bit of each byte per group."""
    scales, offsets = _six_bit_scales(blocks)
    fifth = torch.stack(lane_bits(words(blocks, 16, 48), at=4), dim=1)
    groups = out.view(-1, 8, 32)
    groups.copy_(lane_bytes(_half_bytes(blocks, 48).bitwise_or_(fifth)))
    groups.mul_(scales).sub_(offsets)


def expand_q6_k(blocks: Tensor, out: Tensor) -> None:
    """Write d s (q - 32): 128 bytes of low nibbles, 64 of two high bits, 16 signed scales, fp16 d."""
    low = torch.stack(nibbles(words(blocks, 0, 128).view(-1, 2, 16)), dim=2).view(-1, 2, 4, 8)
    high = torch.stack(lane_crumbs(words(blocks, 128, 192).view(-1, 2, 8), at=4), dim=2)
    out.copy_(lane_bytes(low.bitwise_or_(high)).view(len(blocks), -1))
    scales = blocks[:, 192:208].view(torch.int8) * halves(blocks, 208)
    out.sub_(32.0).view(-1, 16, 16).mul_(scales.unsqueeze(2))
