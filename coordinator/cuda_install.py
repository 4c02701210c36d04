"""What of the CUDA packages is installed, told from their files: loading them takes seconds."""

from __future__ import annotations

import importlib.util
import re
from importlib import metadata
from pathlib import Path

__all__ = ["cuda_version", "cupy_packages", "cupy_problem", "missing_for_cuda", "torch_cuda_version"]

_CUPY = "cupy-cuda"


def torch_cuda_version() -> str | None:
    """Return the CUDA version that the installed torch was built for; None: a CPU build, or no torch."""
    spec = importlib.util.find_spec("torch")
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        try:
            text = (Path(folder) / "version.py").read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        return cuda_version(text)
    return None


def cuda_version(version_file: str) -> str | None:
    """Return the CUDA version that torch's version.py names, or None for a CPU build."""
    found = re.search(r"^cuda\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", version_file, flags=re.MULTILINE)
    return found.group(1) if found else None


def cupy_packages() -> list[str]:
    """Return the names of all installed packages that bring the module cupy."""
    names = {
        (distribution.metadata["Name"] or "").lower().replace("_", "-")
        for distribution in metadata.distributions()
    }
    return sorted(name for name in names if name == "cupy" or name.startswith((_CUPY, "cupy-rocm")))


def missing_for_cuda() -> str:
    """Return why stages cannot use a GPU with what is installed; "" where they can."""
    cuda = torch_cuda_version()
    if cuda is None:
        return "the installed torch is a CPU build"
    return cupy_problem(cupy_packages(), cuda)


def cupy_problem(packages: list[str], cuda: str) -> str:
    """Return why the cupy packages do not serve torch's CUDA version, or ""."""
    if not packages:
        return "cupy is not installed"
    if len(packages) > 1:
        return f"cupy is installed {len(packages)} times: {', '.join(packages)}"
    (package,) = packages
    built_for = re.fullmatch(rf"{_CUPY}(\d+)x", package)
    if built_for and built_for[1] != cuda.split(".", maxsplit=1)[0]:
        return f"{package} is not for the CUDA {cuda} that torch was built for"
    return ""
