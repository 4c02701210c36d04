import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from oracle import metadata
from oracle.export import ExportOptions, export_gguf
from oracle.fixtures import TinyCase


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


@pytest.fixture(scope="session")
def bare_model(tiny_qwen3moe_f32: TinyCase, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model without a vocabulary: it has no end token, so it answers for as long as it may."""
    path = tmp_path_factory.mktemp("bare") / "bare.gguf"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metadata, "_add_tokenizer", lambda *_: None)
        export_gguf(tiny_qwen3moe_f32.model, path, ExportOptions(recipe="f32"))
    return path
