"""Models that ship as a recipe, not as a file: built once into the user's cache, then found there.

`builtin:split24` is the model of configs/split24.toml: 48 layers, every part of qwen4exp, random weights. Its
answers are noise; the work of reading a prompt is that of a real model.
"""

import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from strata_coord.coordinator.model_index import load_model_index
from strata_coord.coordinator.synthetic_blocks import IQ4_NL, Q4_K, Q8_0
from strata_coord.coordinator.synthetic_model import write_synthetic_model
from strata_coord.coordinator.synthetic_presets import SyntheticShape, small_qwen4exp
from strata_coord.coordinator.synthetic_tensors import planned_tensors
from strata_coord.coordinator.synthetic_types import TypeRecipe
from strata_coord.coordinator.synthetic_vocabulary import CHAT_TEMPLATE, packaged_text
from strata_coord.ipc.errors import ConfigError, ModelError

BUILTIN_NAMES = ("split24",)
_SEED = 24
# Raise it when the bytes of a model change although its shapes, types and text do not.
_REVISION = 1


def builtin_model_path(name: str = "split24", *, progress: Callable[[int, int], None] | None = None) -> Path:
    """Return the path of a built-in model, building it first if the cache has no whole copy.

    Blocks while another process builds the same model. The file's name carries a digest of the recipe, so a
    changed recipe is built anew and an older version of the program keeps its own file.

    Args:
        name: what follows "builtin:" in a configuration.
        progress: called with bytes written and bytes in all, while building.

    Raises:
        ConfigError: unknown name, or the cache folder cannot be written.
    """
    if name not in BUILTIN_NAMES:
        message = f'no built-in model is named "{name}"; known are {", ".join(BUILTIN_NAMES)}'
        raise ConfigError(message)
    shape, recipe = split24_recipe()
    folder = cache_folder()
    path = folder / f"{name}-{_digest(shape, recipe)}.gguf"
    if _is_whole(path):
        return path
    with _locked(folder, name):
        if not _is_whole(path):
            # Whoever was killed while building left a part; nobody else builds while the lock is held.
            for part in folder.glob(f".{name}-*.partial"):
                part.unlink(missing_ok=True)
            title = f"{name} (random weights)"
            write_synthetic_model(path, shape, recipe, name=title, seed=_SEED, progress=progress)
    return path


def cache_folder() -> Path:
    """Return the folder of this program in the user's cache: XDG_CACHE_HOME, else ~/.cache."""
    configured = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification: a relative path is invalid and is to be ignored.
    if os.path.isabs(configured):
        return Path(configured) / "strata-coord"
    try:
        return Path.home() / ".cache" / "strata-coord"
    except RuntimeError as error:
        message = "no home directory to cache the built-in model in; XDG_CACHE_HOME names a place"
        raise ConfigError(message) from error


def split24_recipe() -> tuple[SyntheticShape, TypeRecipe]:
    """Return shapes and types of split24. Four bits a weight keep the file under 40 MB.

    As in real files gate and up differ in type from down, and some layers have larger experts than others.
    """
    recipe = TypeRecipe(
        dense=Q4_K,
        down=IQ4_NL,
        narrow_expert=IQ4_NL,
        narrow_dense=IQ4_NL,
        table=Q8_0,
        layer_experts=dict.fromkeys((2, 30), (Q4_K, Q8_0)),
    )
    return small_qwen4exp(48), recipe


def _digest(shape: SyntheticShape, recipe: TypeRecipe) -> str:
    parts = [str(_REVISION), str(_SEED), repr(shape), CHAT_TEMPLATE, packaged_text()]
    parts += [repr(tensor) for tensor in planned_tensors(shape.geometry, recipe)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def _is_whole(path: Path) -> bool:
    """Return whether the file is there and every tensor lies inside it."""
    if not path.exists():
        return False
    try:
        load_model_index(path)
    except ModelError:
        return False
    return True


@contextmanager
def _locked(folder: Path, name: str) -> Iterator[None]:
    """Hold the lock of a model's build. The kernel releases it when the process ends, however it ends."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(folder / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        message = f"{folder}: cannot be written: {error.strerror}; XDG_CACHE_HOME names another place"
        raise ConfigError(message) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
