"""Expands quantised blocks to float32: one function per ggml type behind one table.

Layouts are the block structs of ggml-common.h. Results are bit-equal to gguf's numpy code, which is the
oracle of the tests: scale and offset are applied as two roundings, never as one fused step.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from strata_coord.kernels import (
    cuda_dequant,
    expand_codebook,
    expand_k,
    expand_simple,
    expand_sixteen,
    native_dequant,
)
from strata_coord.kernels.formats import block_format, num_bytes, type_id

OUT_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def dequantize(
    raw: Tensor, ggml_type: int, shape: int | Sequence[int], *, out: Tensor | None = None
) -> Tensor:
    """Return the values of a tensor's bytes, float32 or of out's type.

    raw is uint8, contiguous, exactly the bytes of the tensor, at any alignment; shape is in torch order (an
    int is a 1-D shape). With out (contiguous, as many values; float32, or a 16-bit type to round to) the
    compiled library and the CUDA kernels allocate nothing; torch allocates the unpacked bits, and for
    codebook types signs of out's size.

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
    elif out.numel() != elements or out.dtype not in OUT_TYPES or not out.is_contiguous():
        message = f"out must be {elements} contiguous floats, got {out.numel()} of {out.dtype}"
        raise ValueError(message)
    if raw.is_cuda and cuda_dequant.has_kernel(ggml_type):
        return cuda_dequant.dequantize_cuda(raw, ggml_type, out.view(-1)).view(sizes)
    if out.dtype != torch.float32:
        out.copy_(dequantize(raw, ggml_type, elements).view(out.shape))
        return out.view(sizes)
    native = native_dequant.choose(ggml_type, elements, expand) if raw.is_cpu else None
    if native is not None:
        native(raw, out)
    else:
        block = block_format(ggml_type)
        expand(raw.view(-1, block.block_bytes), out.view(-1, block.block_elements))
    return out.view(sizes)


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


EXPANDERS: Mapping[int, Callable[[Tensor, Tensor], None]] = MappingProxyType(
    {
        type_id("F32"): _f32,
        type_id("F16"): _f16,
        type_id("BF16"): _bf16,
        type_id("Q4_0"): expand_simple.expand_q4_0,
        type_id("Q4_1"): expand_simple.expand_q4_1,
        type_id("Q5_0"): expand_simple.expand_q5_0,
        type_id("Q5_1"): expand_simple.expand_q5_1,
        type_id("Q8_0"): expand_simple.expand_q8_0,
        type_id("Q2_0"): expand_simple.expand_q2_0,
        type_id("TQ1_0"): expand_simple.expand_tq1_0,
        type_id("TQ2_0"): expand_simple.expand_tq2_0,
        type_id("Q2_K"): expand_k.expand_q2_k,
        type_id("Q3_K"): expand_k.expand_q3_k,
        type_id("Q4_K"): expand_k.expand_q4_k,
        type_id("Q5_K"): expand_k.expand_q5_k,
        type_id("Q6_K"): expand_k.expand_q6_k,
        type_id("IQ4_NL"): expand_sixteen.expand_iq4_nl,
        type_id("IQ4_XS"): expand_sixteen.expand_iq4_xs,
        type_id("MXFP4"): expand_sixteen.expand_mxfp4,
        type_id("NVFP4"): expand_sixteen.expand_nvfp4,
        type_id("IQ1_S"): expand_codebook.expand_iq1_s,
        type_id("IQ1_M"): expand_codebook.expand_iq1_m,
        type_id("IQ2_XXS"): expand_codebook.expand_iq2_xxs,
        type_id("IQ2_XS"): expand_codebook.expand_iq2_xs,
        type_id("IQ2_S"): expand_codebook.expand_iq2_s,
        type_id("IQ3_XXS"): expand_codebook.expand_iq3_xxs,
        type_id("IQ3_S"): expand_codebook.expand_iq3_s,
    }
)
"""Type id -> (blocks uint8 [B, block_bytes], out float32 [B, block_elements])."""
