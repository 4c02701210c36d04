"""ggml blocks to floats on a CUDA device; csrc/dequant.cu. The reference is dequant.dequantize.

Equal to the reference bit for bit where the output is fp32; bf16 and fp16 are its values rounded to nearest.
"""

import torch

from strata_coord.kernels.compile import cuda_module, launch
from strata_coord.kernels.formats import block_format

CUDA_FORMATS = (
    "F32",
    "F16",
    "BF16",
    "Q8_0",
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "IQ4_NL",
    "IQ4_XS",
    "Q2_0",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
)
_OUT_TYPES = {torch.float32: "float", torch.bfloat16: "__nv_bfloat16", torch.float16: "__half"}
_THREADS = 256
_VALUES_PER_THREAD = 8
_MAX_BLOCKS = 65_536  # a grid-stride loop does the rest; enough to fill any card many times over


def has_kernel(ggml_type: int) -> bool:
    """Whether a CUDA kernel expands this type; the others are expanded by torch, on the device too."""
    return block_format(ggml_type).name in CUDA_FORMATS


def dequantize_cuda(raw: torch.Tensor, ggml_type: int, out: torch.Tensor) -> torch.Tensor:
    """Write the values of raw into out and return it, on the current stream, allocating nothing.

    raw: uint8 on the device, [bytes], or [batches, bytes] with any stride between batches (a column range of
    many expert blobs). out: contiguous fp32, bf16 or fp16, with a multiple of 8 values per batch.

    Raises:
        ValueError: the type has no kernel here, or sizes do not match.
    """
    form = block_format(ggml_type)
    if form.name not in CUDA_FORMATS or out.dtype not in _OUT_TYPES:
        message = f"no CUDA kernel expands {form.name} to {out.dtype}"
        raise ValueError(message)
    batches = 1 if raw.dim() == 1 else raw.shape[0]
    values = raw.shape[-1] // form.block_bytes * form.block_elements
    if values * batches != out.numel() or raw.stride(-1) != 1 or values % _VALUES_PER_THREAD:
        message = (
            f"{list(raw.shape)} bytes of {form.name} hold {values * batches} values, out has {out.numel()}"
        )
        raise ValueError(message)
    if out.numel() == 0:
        return out
    name = f"dequantize<{form.name}, {_OUT_TYPES[out.dtype]}>"
    kernel = cuda_module("dequant.cu", (name,)).get_function(name)
    parts = out.numel() // _VALUES_PER_THREAD
    blocks = min(-(-parts // _THREADS), _MAX_BLOCKS)
    stride = raw.stride(0) if raw.dim() == 2 else raw.numel()
    launch(
        kernel,
        blocks,
        _THREADS,
        (raw.data_ptr(), out.data_ptr(), values, stride, parts),  # a Python int is passed as 64 bits
    )
    return out
