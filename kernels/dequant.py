"""Expands quantised blocks to float32: one function per ggml type behind one table.

Layouts are the block structs of ggml-common.h. Results are bit-equal to gguf's numpy code, which is the
oracle of the tests: scale and offset are applied as two roundings, never as one fused step.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from strata_coord.kernels.formats import block_format, num_bytes, type_id

_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def dequantize(
    raw: Tensor, ggml_type: int, shape: int | Sequence[int], *, out: Tensor | None = None
) -> Tensor:
    """Return the float32 values of a tensor's bytes.

    raw is uint8, contiguous, exactly the bytes of the tensor, at any alignment; shape is in torch order (an
    int is a 1-D shape). With out (float32, contiguous, as many values) nothing else of that size is allocated
    for quantised types but the unpacked bits.

    Raises:
        ValueError: the type cannot be expanded here, or bytes, shape and out do not agree.
    """
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    expand = EXPANDERS.get(ggml_type)
    if expand is None:
        supported = ", ".join(block_format(known).name for known in EXPANDERS)
        message = f"cannot expand {block_format(ggml_type).name} blocks; supported types: {supported}"
        raise ValueError(message)
    elements = math.prod(sizes)
    expected = num_bytes(ggml_type, elements)
    if raw.dtype != torch.uint8 or raw.numel() != expected:
        name = block_format(ggml_type).name
        message = f"{name} {sizes} needs {expected} bytes of uint8, got {raw.numel()} of {raw.dtype}"
        raise ValueError(message)
    if out is None:
        out = torch.empty(sizes, dtype=torch.float32, device=raw.device)
    elif out.numel() != elements or out.dtype != torch.float32 or not out.is_contiguous():
        message = f"out must be {elements} contiguous float32 values, got {out.numel()} of {out.dtype}"
        raise ValueError(message)
    block = block_format(ggml_type)
    expand(raw.reshape(-1, block.block_bytes), out.view(-1, block.block_elements))
    return out.view(sizes)


def _halves(blocks: Tensor, start: int) -> Tensor:
    """Return the fp16 field at byte start of each block as float32 [B, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _plain(blocks: Tensor, dtype: torch.dtype) -> Tensor:
    # The bytes may start at any offset of a file; a view as wider values needs an aligned start.
    if blocks.storage_offset() % dtype.itemsize or blocks.data_ptr() % dtype.itemsize:
        blocks = blocks.clone()
    return blocks.view(dtype)


def _f32(blocks: Tensor, out: Tensor) -> None:
    out.copy_(_plain(blocks, torch.float32))


def _f16(blocks: Tensor, out: Tensor) -> None:
    out.copy_(_plain(blocks, torch.float16))


def _bf16(blocks: Tensor, out: Tensor) -> None:
    out.copy_(_plain(blocks, torch.bfloat16))


def _nibbles_32(packed: Tensor, out: Tensor) -> None:
    """Write 16 bytes as 32 values: low halves first, then high halves."""
    out[:, :16].copy_(packed & 0x0F)
    out[:, 16:].copy_(packed >> 4)


@functools.cache
def _fifth_bit_table(device: torch.device) -> Tensor:
    """Return float32 [256, 8]: 16 where a byte's bit is set, lowest bit first."""
    values = torch.arange(256, device=device).unsqueeze(1)
    return ((values >> torch.arange(8, device=device)) & 1).float() * 16.0


def _fifth_bits(blocks: Tensor, start: int) -> Tensor:
    """Return bit 4 of 32 values as float32 [B, 32], 0 or 16, from 4 little-endian bytes."""
    # A table look-up per byte: uint8 shifts with a broadcast run three times as long on the CPU.
    packed = blocks[:, start : start + 4].reshape(-1).int()
    return _fifth_bit_table(blocks.device).index_select(0, packed).view(-1, 32)


def _q4_0(blocks: Tensor, out: Tensor) -> None:
    _nibbles_32(blocks[:, 2:], out)
    out.sub_(8.0).mul_(_halves(blocks, 0))


def _q4_1(blocks: Tensor, out: Tensor) -> None:
    _nibbles_32(blocks[:, 4:], out)
    out.mul_(_halves(blocks, 0)).add_(_halves(blocks, 2))


def _q5_0(blocks: Tensor, out: Tensor) -> None:
    _nibbles_32(blocks[:, 6:], out)
    out.add_(_fifth_bits(blocks, 2)).sub_(16.0).mul_(_halves(blocks, 0))


def _q5_1(blocks: Tensor, out: Tensor) -> None:
    _nibbles_32(blocks[:, 8:], out)
    out.add_(_fifth_bits(blocks, 4)).mul_(_halves(blocks, 0)).add_(_halves(blocks, 2))


def _q8_0(blocks: Tensor, out: Tensor) -> None:
    out.copy_(blocks[:, 2:].view(torch.int8))
    out.mul_(_halves(blocks, 0))


@functools.cache
def _iq4_table(device: torch.device) -> Tensor:
    return torch.tensor(_IQ4_VALUES, dtype=torch.float32, device=device)


def _iq4_nl(blocks: Tensor, out: Tensor) -> None:
    table = _iq4_table(blocks.device)
    packed = blocks[:, 2:]
    out[:, :16] = table.index_select(0, (packed & 0x0F).view(-1).int()).view(-1, 16)
    out[:, 16:] = table.index_select(0, (packed >> 4).view(-1).int()).view(-1, 16)
    out.mul_(_halves(blocks, 0))


def _q2_0(blocks: Tensor, out: Tensor) -> None:
    # Value k is two bits of byte k // 4, lowest bits first, minus one.
    values = out.view(-1, 16, 4)
    packed = blocks[:, 2:]
    for place in range(4):
        values[:, :, place].copy_((packed >> (2 * place)) & 3)
    out.sub_(1.0).mul_(_halves(blocks, 0))


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return scale and offset [B, 8] of the 32-value groups of Q4_K and Q5_K: fp16 d, dmin, then 12 bytes."""
    low, offset, mixed = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((low & 0x3F, (mixed & 0x0F) | ((low >> 2) & 0x30)), dim=1).float()
    offsets = torch.cat((offset & 0x3F, (mixed >> 4) | ((offset >> 2) & 0x30)), dim=1).float()
    return scales.mul_(_halves(blocks, 0)), offsets.mul_(_halves(blocks, 2))


def _q4_k(blocks: Tensor, out: Tensor) -> None:
    scales, offsets = _k_scales(blocks)
    packed = blocks[:, 16:].view(-1, 4, 32)
    groups = out.view(-1, 4, 2, 32)
    groups[:, :, 0].copy_(packed & 0x0F)
    groups[:, :, 1].copy_(packed >> 4)
    out.view(-1, 8, 32).mul_(scales.unsqueeze(2)).sub_(offsets.unsqueeze(2))


def _q5_k(blocks: Tensor, out: Tensor) -> None:
    scales, offsets = _k_scales(blocks)
    packed = blocks[:, 48:].view(-1, 4, 32)
    high = blocks[:, 16:48]
    groups = out.view(-1, 4, 2, 32)
    groups[:, :, 0].copy_(packed & 0x0F)
    groups[:, :, 1].copy_(packed >> 4)
    for group in range(8):
        out.view(-1, 8, 32)[:, group].add_(((high >> group) & 1) << 4)
    out.view(-1, 8, 32).mul_(scales.unsqueeze(2)).sub_(offsets.unsqueeze(2))


def _q6_k(blocks: Tensor, out: Tensor) -> None:
    # Each half of 128 values: 64 bytes of low nibbles, 32 bytes of two high bits.
    low = blocks[:, :128].view(-1, 2, 64)
    high = blocks[:, 128:192].view(-1, 2, 32)
    quarters = out.view(-1, 2, 4, 32)
    for quarter in range(4):
        nibbles = low[:, :, 32 * (quarter % 2) : 32 * (quarter % 2) + 32]
        nibbles = nibbles & 0x0F if quarter < 2 else nibbles >> 4
        quarters[:, :, quarter].copy_(nibbles | (((high >> (2 * quarter)) & 3) << 4))
    scales = blocks[:, 192:208].view(torch.int8).float().mul_(_halves(blocks, 208))
    out.sub_(32.0).view(-1, 16, 16).mul_(scales.unsqueeze(2))


EXPANDERS: Mapping[int, Callable[[Tensor, Tensor], None]] = MappingProxyType(
    {
        type_id("F32"): _f32,
        type_id("F16"): _f16,
        type_id("BF16"): _bf16,
        type_id("Q4_0"): _q4_0,
        type_id("Q4_1"): _q4_1,
        type_id("Q5_0"): _q5_0,
        type_id("Q5_1"): _q5_1,
        type_id("Q8_0"): _q8_0,
        type_id("Q4_K"): _q4_k,
        type_id("Q5_K"): _q5_k,
        type_id("Q6_K"): _q6_k,
        type_id("IQ4_NL"): _iq4_nl,
        type_id("Q2_0"): _q2_0,
    }
)
"""Type id -> (blocks uint8 [B, block_bytes], out float32 [B, block_elements])."""
