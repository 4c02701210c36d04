"""The plan command: configuration, model header and machine in, a plan with its reasons out."""

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from strata_coord.coordinator.launch_options import PrefillMode

if TYPE_CHECKING:
    from strata_coord.coordinator.rig import Rig

DEFAULT_PROMPT_TOKENS = 4096  # where the command line names no length


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """The options of one `strata-coord plan`."""

    config: Path
    prompt_tokens: int | None = None
    rig: Path | None = None  # None: this machine
    out: Path | None = None  # the launch plan is saved here, for launch --plan
    mode: PrefillMode | None = None
    model: str | None = None
    overrides: tuple[str, ...] = ()
    json: bool = False


def run_plan(options: PlanOptions) -> int:
    """Plan, print, and save if asked. Returns the exit code.

    Raises:
        StrataError: the configuration, the model, the rig file or the plan is refused.
    """
    from strata_coord.coordinator.config import load_config
    from strata_coord.coordinator.launch import model_path
    from strata_coord.coordinator.model_index import load_model_index
    from strata_coord.coordinator.plan import to_json
    from strata_coord.coordinator.planner import plan_launch
    from strata_coord.coordinator.prompt_planner import plan_prompt

    config = load_config(options.config, options.overrides, model=options.model)
    model = load_model_index(model_path(config.model.path, note=_note))
    launch = plan_launch(model, _rig(options.rig), config)
    tokens = options.prompt_tokens or min(DEFAULT_PROMPT_TOKENS, launch.context_tokens)
    prompt = plan_prompt(launch, tokens, mode=options.mode or config.prefill.mode)
    if options.out is not None:
        try:
            options.out.write_text(to_json(launch), encoding="utf-8")
        except OSError as error:  # of a full disk names no file
            raise OSError(error.errno, error.strerror, str(options.out)) from None
        _note(f"saved the plan to {options.out}")
    if options.json:
        from strata_coord.coordinator.output import print_json

        print_json({"launch": asdict(launch), "prompt": asdict(prompt)})
        return 0
    from strata_coord.coordinator.output import print_renderable
    from strata_coord.coordinator.plan_view import render_launch, render_prompt

    print_renderable(render_launch(launch))
    print_renderable(render_prompt(prompt))
    return 0


def _rig(path: Path | None) -> "Rig":
    if path is None:
        from strata_coord.coordinator.probe import probe_rig

        return probe_rig()
    from strata_coord.coordinator.rig import rig_from_toml
    from strata_coord.ipc.errors import ConfigError

    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        message = f"{path}: not UTF-8 text: byte {error.start}"
        raise ConfigError(message) from error
    return rig_from_toml(text, name=str(path))


def _note(text: str) -> None:
    from strata_coord.coordinator.printable import printable

    print(printable(text, limit=2000), file=sys.stderr)
