import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def runtime_root() -> Iterator[Path]:
    """A folder for all launches, with a short name: a socket's path has 107 bytes at most."""
    folder = Path(tempfile.mkdtemp(prefix="sc-"))
    before = os.environ.get("XDG_RUNTIME_DIR")
    os.environ["XDG_RUNTIME_DIR"] = str(folder)
    yield folder
    if before is None:
        del os.environ["XDG_RUNTIME_DIR"]
    else:
        os.environ["XDG_RUNTIME_DIR"] = before
    shutil.rmtree(folder)


def launch_folders(root: Path) -> set[str]:
    base = root / "strata-coord"
    return {entry.name for entry in base.iterdir()} if base.exists() else set()


@pytest.fixture(autouse=True)
def no_folder_is_left(runtime_root: Path) -> Iterator[None]:
    """Fail a test after which a launch's folder is still there."""
    before = launch_folders(runtime_root)
    yield
    left = launch_folders(runtime_root) - before
    if left:
        pytest.fail(f"{len(left)} launch folders are left")
