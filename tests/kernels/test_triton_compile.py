"""Every Triton kernel compiles for the cards it is meant for, on a machine without one."""

import importlib.util
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SHARED_MEMORY = {"80": 163 << 10, "90": 227 << 10, "120": 99 << 10}  # most bytes of one program

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed (extra dev-kernels)"
)


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_kernels_compile_and_fit_the_card(capability: str, tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, HERE / "compile_triton.py", capability],
        env=environment,
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    sizes = [line.split() for line in done.stdout.splitlines()]
    assert all(int(shared) <= SHARED_MEMORY[capability] for _, shared in sizes), sizes
    compiled = {name for name, _ in sizes}
    from strata_coord.kernels import triton_src

    for module in pkgutil.iter_modules(triton_src.__path__):
        source = Path(triton_src.__path__[0], f"{module.name}.py").read_text("utf-8")
        for line in source.splitlines():
            if line.startswith("def ") and not line.startswith("def _"):
                assert line[4:].split("(")[0] in compiled, f"{module.name}: {line}"
