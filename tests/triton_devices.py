"""Where tests run Triton kernels: on a device where there is one, else through Triton's interpreter."""

import importlib.util
import os

import pytest
import torch


def triton_devices() -> list[object]:
    """Return the pytest parameters of a fixture over devices; one of the two is always skipped.

    Whether a kernel is interpreted is decided when it is loaded, so a process does one or the other.
    """
    has_device = torch.cuda.is_available()
    installed = importlib.util.find_spec("triton") is not None
    no_triton = pytest.mark.skipif(not installed, reason="Triton is not installed (extra dev-kernels)")
    if not has_device:
        # Triton's own functions are interpreted only if this is set when Triton is loaded.
        os.environ["TRITON_INTERPRET"] = "1"
    interpreted = pytest.mark.skipif(has_device, reason="kernels run on the device, not interpreted")
    on_device = pytest.mark.skipif(not has_device, reason="needs a CUDA device")
    return [
        pytest.param("cpu", marks=[no_triton, interpreted], id="interpreter"),
        pytest.param("cuda", marks=[no_triton, on_device, pytest.mark.gpu], id="cuda"),
    ]
