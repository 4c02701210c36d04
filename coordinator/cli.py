"""The command line: parses, calls, and leaves the work to the modules it imports inside each command.

At module level only typer and the standard library: --help must answer at once (style.md part 9). The
commands and their options are a contract, design.md section 8.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from strata_coord.coordinator.launch_options import DEFAULT_MAX_TOKENS, LaunchOptions, contradiction

app = typer.Typer(
    name="strata-coord",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Read long prompts of MoE GGUF models larger than VRAM, one process per pipeline stage.",
    epilog=(
        "Start here: `strata-coord doctor` checks this machine, then "
        "`strata-coord launch configs/split24.toml --prompt 'Hello'` runs a small model that comes along."
    ),
)

Mode = Literal["auto", "layer-major", "chunk-major"]

Config = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="A TOML file, for example configs/split24.toml.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
Debug = Annotated[bool, typer.Option("--debug", help="Print the traceback of an error.")]
Model = Annotated[
    str | None, typer.Option("--model", metavar="PATH", help="Use this GGUF file instead of the config's.")
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override a config key, e.g. prefill.mode=layer-major. Repeatable."
    ),
]
ModeOption = Annotated[
    Mode | None, typer.Option("--mode", help="Force a prefill order; the plan says what it costs.")
]


def _print_version(value: bool) -> None:  # noqa: FBT001 - the signature of a typer callback
    if value:
        from importlib import metadata

        try:
            version = metadata.version("strata-coord")
        except metadata.PackageNotFoundError:
            version = "0+uninstalled"
        print(f"strata-coord {version}")
        raise typer.Exit


@app.callback()
def _root(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    del version


@app.command(short_help="Start the stages and answer prompts.")
def launch(
    *,
    config: Config,
    source: Annotated[
        str | None, typer.Argument(metavar="[-]", help="A single - reads the prompt from standard input.")
    ] = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", metavar="TEXT", help="Answer TEXT and exit.")
    ] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(
            "--prompt-file",
            exists=True,
            dir_okay=False,
            readable=True,
            metavar="FILE",
            help="Answer a text file.",
        ),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=1, metavar="N", help="Longest answer, in tokens.")
    ] = DEFAULT_MAX_TOKENS,
    mode: ModeOption = None,
    model: Model = None,
    set_: Set = None,
    json: Json = False,
    no_dashboard: Annotated[
        bool, typer.Option("--no-dashboard", help="Plain lines instead of the dashboard.")
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", dir_okay=False, metavar="FILE", help="Write a Chrome/Perfetto trace."),
    ] = None,
    prompt_ids: Annotated[
        Path | None,
        typer.Option(
            "--prompt-ids",
            exists=True,
            dir_okay=False,
            readable=True,
            metavar="FILE",
            help="A JSON list of token ids instead of text.",
        ),
    ] = None,
    logits: Annotated[
        Path | None,
        typer.Option(
            "--logits",
            dir_okay=False,
            metavar="FILE",
            help="Write the logits of every prompt position (.npy).",
        ),
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Send the prompt without the chat template.")] = False,
    plan: Annotated[
        Path | None,
        typer.Option(
            "--plan", exists=True, dir_okay=False, readable=True, metavar="FILE", help="Replay a saved plan."
        ),
    ] = None,
    log_format: Annotated[
        Literal["text", "json"] | None, typer.Option("--log-format", help="Form of the log lines on stderr.")
    ] = None,
    debug: Debug = False,
) -> int:
    """Start the stages, then answer a prompt; without one, read prompts from the terminal."""
    if source not in {None, "-"}:
        message = f"unexpected argument {source!r}: give text with --prompt, a file with --prompt-file"
        raise typer.BadParameter(message, param_hint="[-]")
    options = LaunchOptions(
        config=config,
        prompt=prompt,
        prompt_file=prompt_file,
        read_stdin=source == "-",
        prompt_ids=prompt_ids,
        max_tokens=max_tokens,
        mode=mode,
        model=model,
        overrides=tuple(set_ or ()),
        json=json,
        dashboard=not no_dashboard,
        trace=trace,
        logits=logits,
        raw=raw,
        plan_file=plan,
        log_format=log_format,
        debug=debug,
    )
    if (problem := contradiction(options)) is not None:
        raise typer.BadParameter(problem)
    _check_writable(trace, "--trace")
    _check_writable(logits, "--logits")

    from strata_coord.coordinator.launch import run_launch

    return run_launch(options)


@app.command(short_help="Show the plan, and why.")
def plan(
    *,
    config: Config,
    prompt_tokens: Annotated[
        int | None, typer.Option("--prompt-tokens", min=1, metavar="N", help="Plan a prompt of N tokens.")
    ] = None,
    rig: Annotated[
        Path | None,
        typer.Option(
            "--rig",
            exists=True,
            dir_okay=False,
            readable=True,
            metavar="FILE",
            help="Plan for another machine.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", dir_okay=False, metavar="FILE", help="Save the plan for launch --plan."),
    ] = None,
    mode: ModeOption = None,
    model: Model = None,
    set_: Set = None,
    json: Json = False,
    debug: Debug = False,
) -> int:
    """Show what would go where, how long a prompt would take, and why."""
    del debug
    _check_writable(out, "--out")

    from strata_coord.coordinator.plan_command import PlanOptions, run_plan

    return run_plan(
        PlanOptions(
            config=config,
            prompt_tokens=prompt_tokens,
            rig=rig,
            out=out,
            mode=mode,
            model=model,
            overrides=tuple(set_ or ()),
            json=json,
        )
    )


@app.command(short_help="Show what is in a model file.")
def inspect(
    *,
    model: Annotated[
        Path, typer.Argument(metavar="MODEL.gguf", help="A GGUF file, or the first of its shards.")
    ],
    json: Json = False,
    debug: Debug = False,
) -> int:
    """Show what is in a model file: geometry, sizes per layer and kind."""
    del debug
    from strata_coord.coordinator.inspect_model import inspect as inspect_file
    from strata_coord.coordinator.inspect_model import render
    from strata_coord.coordinator.output import print_json, print_renderable

    report = inspect_file(model)
    if json:
        print_json(report)
    else:
        print_renderable(render(report))
    return 0


@app.command("make-model", short_help="Write a synthetic model.")
def make_model(
    *,
    architecture: Annotated[str, typer.Argument(metavar="ARCH", help="Its name in GGUF files, as qwen3moe.")],
    out: Annotated[Path, typer.Argument(metavar="OUT.gguf", dir_okay=False, help="The file to write.")],
    like: Annotated[
        str | None, typer.Option("--like", metavar="NAME", help="Take the shapes of a published model.")
    ] = None,
    layers: Annotated[
        int | None, typer.Option("--layers", min=1, metavar="N", help="Number of layers.")
    ] = None,
    types: Annotated[
        str | None,
        typer.Option("--types", metavar="KIND=TYPE,...", help="As in experts=Q4_K,down=Q5_1,dense=Q8_0."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, metavar="N", help="Seed of the random weights.")] = 0,
    header_only: Annotated[
        bool, typer.Option("--header-only", help="Leave the weights out, for inspect and plan.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite OUT.gguf.")] = False,
    json: Json = False,
    debug: Debug = False,
) -> int:
    """Write a synthetic model of realistic shapes and block types, for benchmarks without downloads."""
    del debug
    _check_writable(out, "OUT.gguf")
    from strata_coord.coordinator.make_model_command import run_make_model

    return run_make_model(
        architecture,
        out,
        like=like,
        layers=layers,
        types=types,
        seed=seed,
        header_only=header_only,
        force=force,
        json=json,
    )


@app.command(short_help="Check this machine and installation.")
def doctor(*, json: Json = False, debug: Debug = False) -> int:
    """Say what is wrong with this installation or machine, and how to mend it."""
    del debug
    from strata_coord.coordinator.doctor import run_doctor

    return run_doctor(json=json)


def _check_writable(path: Path | None, option: str) -> None:
    """Refuse an output file that cannot be made, before minutes of work are lost to it."""
    if path is None:
        return
    is_new = not path.exists()
    if is_new or path.is_file():  # of a pipe, opening would wait for its reader
        try:
            with path.open("ab"):
                pass
            if is_new:
                path.unlink()
        except OSError as error:
            message = f"{option}: {path}: {error.strerror}"
            raise typer.BadParameter(message) from None


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and leave the process with its exit code."""
    try:
        from strata_coord.coordinator.command_errors import PROGRAM, run_command
    except KeyboardInterrupt:  # nothing has begun that could be reported or ended
        sys.exit(130)

    given = list(sys.argv[1:] if arguments is None else arguments)
    options = given[: given.index("--")] if "--" in given else given
    sys.exit(
        run_command(
            lambda: app(given, prog_name=PROGRAM, standalone_mode=False),
            debug="--debug" in options,
            json="--json" in options,
        )
    )
