"""strata-coord make-model: a synthetic model with realistic block types and shapes, for benchmarks."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from strata_coord.coordinator.synthetic_geometry import synthetic_shape
from strata_coord.coordinator.synthetic_model import write_synthetic_model
from strata_coord.coordinator.synthetic_types import recipe_for, with_types
from strata_coord.ipc.errors import ConfigError

DEFAULT_LIKE = "tiny"


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeModel:
    """What was written."""

    path: Path
    architecture: str
    like: str
    num_layers: int
    seed: int
    num_bytes: int


def make_model(
    architecture: str,
    out_path: str | Path,
    *,
    like: str | None = None,
    layers: int | None = None,
    seed: int = 0,
    vocabulary_rows: int | None = None,
    types: str | None = None,
    header_only: bool = False,
    force: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> MadeModel:
    """Write a synthetic model of architecture to out_path.

    Args:
        architecture: one of synthetic_geometry.PRESETS.
        out_path: appears when the file is complete; an interrupted run leaves nothing.
        like: a published geometry of that architecture, or "tiny".
        layers: in place of the published number.
        seed: the same seed and shape give the same bytes.
        vocabulary_rows: a small vocabulary in place of the published one.
        types: in place of the published ones, as in experts=Q4_K,down=Q5_1,dense=Q8_0.
        header_only: true sizes, a hole in place of the weights; for inspect and plan.
        force: replace a file that is there.
        progress: called with bytes written and bytes in all.

    Raises:
        ConfigError: unknown name or type, a type that a row's length does not allow, a file that is there
            already, or no room.
    """
    path = Path(out_path)
    name = like or DEFAULT_LIKE
    shape = synthetic_shape(
        architecture, like=name, layers=layers, vocabulary_rows=vocabulary_rows, whole_table=header_only
    )
    recipe = recipe_for(name, shape.geometry)
    if types is not None:
        recipe = with_types(recipe, types)
    if path.is_dir():
        message = f"{path}: is a folder; name the file to write"
        raise ConfigError(message)
    if path.exists() and not force:
        message = f"{path}: is there already ({path.stat().st_size >> 20} MiB); --force replaces it"
        raise ConfigError(message)
    title = f"synthetic {architecture} like {name}"
    write_synthetic_model(
        path, shape, recipe, name=title, seed=seed, header_only=header_only, progress=progress
    )
    return MadeModel(
        path=path,
        architecture=architecture,
        like=name,
        num_layers=shape.geometry.num_layers,
        seed=seed,
        num_bytes=path.stat().st_size,
    )
