"""Small arithmetic that launches of Triton kernels share. Imports no Triton.

Triton launches on torch's current stream of the current device, which is where a stage's walk runs.
"""

import functools
import importlib.util


def power_of_two(size: int) -> int:
    """Return the smallest power of two that is at least size, and at least 1."""
    return 1 << max(size - 1, 0).bit_length()


@functools.cache
def triton_refusal() -> str | None:
    """Return why Triton kernels cannot run here, None if they can."""
    return None if importlib.util.find_spec("triton") is not None else "Triton is not installed"
