import json
import os
import re
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from strata_coord.coordinator import cli, command_errors
from strata_coord.coordinator.launch_options import DEFAULT_MAX_TOKENS, LaunchOptions
from strata_coord.ipc import errors


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[LaunchOptions]:
    """Replace the launch by a recorder; the list holds the options of each call."""
    calls: list[LaunchOptions] = []

    def run_launch(options: LaunchOptions) -> int:
        calls.append(options)
        return 0

    fake = types.ModuleType("strata_coord.coordinator.launch")
    fake.run_launch = run_launch  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "strata_coord.coordinator.launch", fake)
    return calls


def exit_code_of(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert isinstance(ended.value.code, int)
    return ended.value.code


def launch_that(outcome: Callable[[LaunchOptions], int], monkeypatch: pytest.MonkeyPatch) -> None:
    fake = types.ModuleType("strata_coord.coordinator.launch")
    fake.run_launch = outcome  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "strata_coord.coordinator.launch", fake)


def raising(error: BaseException) -> Callable[[LaunchOptions], int]:
    def run_launch(_: LaunchOptions) -> int:
        raise error

    return run_launch


def test_every_launch_option_reaches_the_record(launched: list[LaunchOptions], tmp_path: Path) -> None:
    prompt, saved = tmp_path / "p.txt", tmp_path / "plan.json"
    prompt.write_text("x")
    saved.write_text("{}")
    trace, logits = tmp_path / "t.json", tmp_path / "l.npy"
    code = exit_code_of(
        "launch", "c.toml", "--prompt-file", str(prompt), "--max-tokens", "7", "--mode", "layer-major",
        "--model", "m.gguf", "--set", "a.b=1", "--set", "c=2", "--json", "--no-dashboard", "--trace",
        str(trace), "--logits", str(logits), "--raw", "--plan", str(saved), "--log-format", "json", "--debug",
    )  # fmt: skip
    assert code == 0
    assert launched == [
        LaunchOptions(
            config=Path("c.toml"), prompt_file=prompt, max_tokens=7, mode="layer-major", model="m.gguf",
            overrides=("a.b=1", "c=2"), json=True, dashboard=False, trace=trace, logits=logits, raw=True,
            plan_file=saved, log_format="json", debug=True,
        )
    ]  # fmt: skip


def test_defaults_leave_the_choice_to_the_config(launched: list[LaunchOptions]) -> None:
    assert exit_code_of("launch", "c.toml") == 0
    assert launched == [LaunchOptions(config=Path("c.toml"))]
    assert launched[0].max_tokens == DEFAULT_MAX_TOKENS
    assert not launched[0].has_prompt


def test_a_dash_reads_the_prompt_from_standard_input(launched: list[LaunchOptions]) -> None:
    assert exit_code_of("launch", "c.toml", "-") == 0
    assert launched[0].read_stdin
    assert launched[0].has_prompt


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["launch"], ["CONFIG"]),
        (["launch", "c", "stray"], ["stray", "--prompt"]),
        (["launch", "c", "-", "--prompt", "x"], ["--prompt and - both"]),
        (["launch", "c", "--json"], ["--json needs a prompt"]),
        (["launch", "c", "--logits", "l.npy"], ["--logits needs a prompt"]),
        (["launch", "c", "--set", "novalue"], ["novalue", "key=value"]),
        (["launch", "c", "--set", "=3"], ["key=value"]),
        (["launch", "c", "--max-tokens", "0"], ["--max-tokens"]),
        (["launch", "c", "--mode", "sideways"], ["sideways", "layer-major"]),
        (["launch", "c", "--prompt-file", "/nonexistent/p"], ["--prompt-file"]),
        (["launch", "c", "--trace", "/nonexistent/t.json"], ["--trace", "/nonexistent"]),
        (["launch", "c", "--trace", "/proc/t.json"], ["--trace", "/proc/t.json: "]),
        (["launch", "c", "--no-such-option"], ["--no-such-option"]),
        (["lanch"], ["launch"]),
        (["plan", "c", "--prompt-tokens", "-5"], ["--prompt-tokens"]),
        (["inspect"], ["MODEL.gguf"]),
        (["make-model", "qwen3moe", "/nonexistent/x.gguf"], ["/nonexistent"]),
    ],
)
def test_wrong_usage_is_one_line_and_exit_2(
    arguments: list[str], words: list[str], launched: list[LaunchOptions], capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code_of(*arguments) == 2
    stderr = capsys.readouterr().err
    assert all(word in stderr for word in words)
    assert stderr.startswith("strata-coord: ")
    assert stderr.count("\n") == 1
    assert launched == []


def test_raw_with_token_ids_is_refused(launched: list[LaunchOptions], tmp_path: Path) -> None:
    ids = tmp_path / "ids.json"
    ids.write_text("[1]")
    assert exit_code_of("launch", "c", "--prompt-ids", str(ids), "--raw") == 2
    assert exit_code_of("launch", "c", "--prompt-ids", str(ids)) == 0
    assert [options.prompt_ids for options in launched] == [ids]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ConfigError("x"), 2),
        (errors.PlanError("x"), 3),
        (errors.BindingError("x"), 3),
        (errors.AlreadyRunningError("x"), 5),
        (errors.ModelError("x"), 6),
        (errors.RequestError("x"), 1),
        (errors.StageLostError("x"), 1),
        (errors.ProtocolError("x"), 7),
        (errors.InvariantError("x"), 7),
        (ValueError("x"), 7),
        (FileNotFoundError(2, "No such file", "x"), 1),
        (MemoryError(), 3),
        (KeyboardInterrupt(), 130),
        (BrokenPipeError(), 1),
    ],
)
def test_an_error_decides_the_exit_code(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launch_that(raising(error), monkeypatch)
    monkeypatch.setattr(command_errors, "_abandon_stdout", lambda: None)
    assert exit_code_of("launch", "c") == code
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("code", [0, 1, 4])
def test_the_code_that_launch_returns_is_kept(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    launch_that(lambda _: code, monkeypatch)
    assert exit_code_of("launch", "c") == code


def test_debug_adds_the_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launch_that(raising(ValueError("lost the plot")), monkeypatch)
    assert exit_code_of("launch", "c", "--debug") == 7
    assert "Traceback" in capsys.readouterr().err
    assert exit_code_of("launch", "c") == 7
    stderr = capsys.readouterr().err
    assert stderr.count("\n") == 1
    assert "--debug" in stderr


def test_each_line_of_a_config_error_is_printed_and_escaped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launch_that(raising(errors.ConfigError("a.toml: one\nb.toml: \x1b[31mtwo")), monkeypatch)
    assert exit_code_of("launch", "c", "--prompt", "p", "--json") == 2
    captured = capsys.readouterr()
    assert captured.err == "strata-coord: a.toml: one\nstrata-coord: b.toml: \\x1b[31mtwo\n"
    assert json.loads(captured.out) == {
        "error": {"kind": "ConfigError", "exit_code": 2, "messages": ["a.toml: one", "b.toml: \\x1b[31mtwo"]}
    }


def test_no_arguments_print_the_help_and_a_first_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of() == 2
    stderr = capsys.readouterr().err
    assert "launch" in stderr
    assert "strata-coord doctor" in stderr


def test_help_and_version_succeed(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of("--help") == 0
    assert exit_code_of("launch", "--help") == 0
    assert "--prompt-ids" in capsys.readouterr().out
    assert exit_code_of("--version") == 0
    assert capsys.readouterr().out.startswith("strata-coord ")


def test_the_commands_are_those_of_the_contract() -> None:
    result = CliRunner().invoke(cli.app, ["--help"])
    listed = result.output.split("Commands:")[1]
    names = set(re.findall(r"^  ([a-z-]+)", listed, flags=re.MULTILINE))
    assert names >= {"launch", "plan", "inspect", "make-model", "doctor"}


def test_a_reader_that_leaves_ends_the_command_quietly() -> None:
    program = [sys.executable, "-P", "-m", "strata_coord.coordinator", "launch", "--help"]
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = subprocess.run(program, stdout=write_end, stderr=subprocess.PIPE, check=False, timeout=30)
    finally:
        os.close(write_end)
    assert done.returncode == 1
    assert done.stderr == b""


@pytest.mark.parametrize("options", [["plan"], ["plan", "--json"], ["plan", "--out", "/dev/full"]])
def test_a_full_disk_is_named(options: list[str]) -> None:
    command, *rest = options
    arguments = [sys.executable, "-m", "strata_coord.coordinator", command, "configs/split24.toml", *rest]
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        ended = subprocess.run(arguments, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    name = rest[-1] if "--out" in rest else "standard output"
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == f"strata-coord: {name}: No space left on device"
