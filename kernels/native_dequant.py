"""Block expansion by libgguf, the optional compiled library, in place of some twenty torch operations.

A type is handed to the library once its results on sample blocks have been compared bit for bit with the
torch expanders: compilers for other processors fuse multiplication and addition, which rounds otherwise. What
the library does not expand, or expands otherwise, stays with torch, and describe says so.
"""

import functools
import logging
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from typing import Protocol, cast

import torch
from torch import Tensor

from strata_coord.kernels.formats import block_format, type_id

LIBRARY = "libgguf"
MIN_VERSION, BELOW_VERSION = (0, 2, 2), (0, 3)

# 32 Ki values per thread take longer than handing them over, whatever the type.
ELEMENTS_PER_THREAD = 1 << 17
_SAMPLE_BLOCKS = 16

# The library walks these codebooks value by value; torch copies whole entries and wins from this size on
# (docs/performance.md). Below it the torch path spends its time on starting operations.
_LARGE_ELEMENTS = 1 << 17
_TORCH_WHEN_LARGE = frozenset(type_id(name) for name in ("IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"))

_log = logging.getLogger(__name__)

Expander = Callable[[Tensor, Tensor], None]  # blocks [B, bytes of a block] -> out [B, values]
NativeExpander = Callable[[Tensor, Tensor], None]  # all bytes -> all values, both of any shape


class _Library(Protocol):
    def dequantize_rows_into_raw(
        self, qtype: int, src: object, dst: object, n_rows: int, n_per_row: int
    ) -> int: ...

    def row_size(self, qtype: int, n_per_row: int) -> int: ...


@functools.cache
def _load() -> tuple[_Library | None, str]:
    """Return the library and its version, or None and why it is not used."""
    try:
        version = metadata.version(LIBRARY)
    except metadata.PackageNotFoundError:
        return None, f"{LIBRARY} is not installed"
    found = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    if not MIN_VERSION <= found < BELOW_VERSION:
        low, high = (".".join(map(str, bound)) for bound in (MIN_VERSION, BELOW_VERSION))
        return None, f"{LIBRARY} {version} is installed, {low} up to but not including {high} is supported"
    try:
        import libgguf

        return cast("_Library", libgguf), version
    except (ImportError, OSError) as error:
        return None, f"{LIBRARY} {version} cannot be loaded: {error}"


def describe() -> str:
    """Return what expands blocks on the CPU in this process, and why if it is not the compiled library."""
    library, version_or_reason = _load()
    if library is None:
        return f"torch ({version_or_reason})"
    return f"{LIBRARY} {version_or_reason}"


def choose(ggml_type: int, elements: int, expand: Expander) -> NativeExpander | None:
    """Return what expands that many values of a type on the CPU in place of expand, torch's way, or None."""
    if elements >= _LARGE_ELEMENTS and ggml_type in _TORCH_WHEN_LARGE:
        return None
    return _agreed(ggml_type, expand)


@functools.cache
def _agreed(ggml_type: int, expand: Expander) -> NativeExpander | None:
    """Return the library's expander of a type; None if it has none, or one that differs from expand."""
    library, version = _load()
    block = block_format(ggml_type)
    if library is None or block.block_elements == 1:
        return None
    if library.row_size(ggml_type, block.block_elements) != block.block_bytes:
        return None
    native = functools.partial(_expand, library, ggml_type, block.block_elements, block.block_bytes)
    generator = torch.Generator().manual_seed(ggml_type)
    size = (_SAMPLE_BLOCKS, block.block_bytes)
    blocks = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
    want = torch.empty(_SAMPLE_BLOCKS, block.block_elements)
    got = torch.full_like(want, torch.nan)
    expand(blocks, want)
    native(blocks, got)
    # Random bytes hold scales that are no numbers; which NaN comes of them is of no consequence.
    if not torch.equal(got.nan_to_num(), want.nan_to_num()):
        _log.warning("%s %s expands %s blocks otherwise than torch: torch does", LIBRARY, version, block.name)
        return None
    return native


def _expand(
    library: _Library, ggml_type: int, block_elements: int, block_bytes: int, raw: Tensor, out: Tensor
) -> None:
    elements = out.numel()
    if elements < 2 * ELEMENTS_PER_THREAD or torch.get_num_threads() == 1:
        library.dequantize_rows_into_raw(ggml_type, raw.numpy(), out.numpy(), 1, elements)
        return
    # The library itself has one thread, and lets go of the interpreter while it works.
    threads = torch.get_num_threads()
    step = -(-elements // block_elements // min(threads, elements // ELEMENTS_PER_THREAD))
    source, target = raw.view(-1, block_bytes).numpy(), out.view(-1, block_elements).numpy()

    def expand_part(start: int) -> None:
        piece = target[start : start + step]
        library.dequantize_rows_into_raw(ggml_type, source[start : start + step], piece, 1, piece.size)

    for _ in _pool(threads).map(expand_part, range(0, len(source), step)):
        pass


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="expand")
