"""The make-model command: writes the file, shows how far it is, says what was made."""

import sys
import time
from dataclasses import asdict
from pathlib import Path

REPORT_S = 1.0  # between two lines of progress


def run_make_model(
    architecture: str,
    out: Path,
    *,
    like: str | None,
    layers: int | None,
    types: str | None,
    seed: int,
    header_only: bool,
    force: bool,
    json: bool,
) -> int:
    """Write a synthetic model. Returns the exit code.

    Raises:
        ConfigError: an unknown name or type, or the file is there already and force is not set.
    """
    from strata_coord.coordinator.make_model import make_model

    last_s = time.monotonic()

    def progress(done: int, total: int) -> None:
        nonlocal last_s
        now_s = time.monotonic()
        if now_s - last_s >= REPORT_S and total > 0:
            last_s = now_s
            print(f"{done / 2**20:.0f} of {total / 2**20:.0f} MiB", file=sys.stderr)

    made = make_model(
        architecture,
        out,
        like=like,
        layers=layers,
        types=types,
        seed=seed,
        header_only=header_only,
        force=force,
        progress=progress,
    )
    if json:
        from strata_coord.coordinator.output import print_json

        print_json({**asdict(made), "path": str(made.path)})
    else:
        print(
            f"{made.path}: {made.architecture} like {made.like}, {made.num_layers} layers, "
            f"{made.num_bytes / 2**20:.1f} MiB, seed {made.seed}"
        )
    return 0
