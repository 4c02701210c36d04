"""Loads the CUDA sources of csrc/ once per process and device. Needs CuPy and a device; imported lazily."""

import functools
from collections.abc import Sequence
from importlib import resources
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    import cupy

# fmad off: a product and a sum that are rounded separately give the bits of the torch reference.
COMPILE_OPTIONS = ("--std=c++17", "--fmad=false")


@functools.cache
def cuda_module(source: str, kernels: tuple[str, ...]) -> "cupy.RawModule":
    """The compiled module of a file in csrc/, with the template instances named in kernels."""
    import cupy

    text = resources.files("strata_coord.kernels.csrc").joinpath(source).read_text(encoding="utf-8")
    return cupy.RawModule(
        code=text, options=COMPILE_OPTIONS, backend="nvrtc", name_expressions=list(kernels) or None
    )


def launch(kernel: "cupy.RawKernel", blocks: int, threads: int, arguments: Sequence[object]) -> None:
    """Queue a kernel on the current torch stream."""
    import cupy

    with cupy.cuda.Stream.from_external(torch.cuda.current_stream()):
        kernel((blocks,), (threads,), tuple(arguments))
