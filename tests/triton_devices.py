"""Where tests run Triton kernels: on a device where there is one, else through Triton's interpreter."""

import importlib.util
import os
from typing import Any

import pytest
import torch


def _interpret_triton() -> None:
    """Let kernels that are loaded later run on the CPU."""
    # Triton's own functions are interpreted only if this is set when Triton is loaded.
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        # A loop's bound is an array of one element, which newer numpy does not take for a number.
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


def triton_devices() -> list[object]:
    """Return the pytest parameters of a fixture over devices; one of the two is always skipped.

    Whether a kernel is interpreted is decided when it is loaded, so a process does one or the other.
    """
    has_device = torch.cuda.is_available()
    installed = importlib.util.find_spec("triton") is not None
    no_triton = pytest.mark.skipif(not installed, reason="Triton is not installed (extra dev-kernels)")
    interpreted = pytest.mark.skipif(has_device, reason="kernels run on the device, not interpreted")
    on_device = pytest.mark.skipif(not has_device, reason="needs a CUDA device")
    return [
        pytest.param("cpu", marks=[no_triton, interpreted], id="interpreter"),
        pytest.param("cuda", marks=[no_triton, on_device, pytest.mark.gpu], id="cuda"),
    ]


if importlib.util.find_spec("triton") is not None and not torch.cuda.is_available():
    _interpret_triton()
