"""Signals, kills and closed pipes against the launch command: exit code, one line, nothing left."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from launch_rig import Ran, Running, assert_all_gone, command, run, running, wait_until, write_config
from oracle.fixtures import TinyCase

LONG = 3900  # tokens of a prompt that takes seconds to read in chunks of 64


@pytest.fixture(scope="module")
def folder(bare_model: Path, tiny_qwen3moe_f32: TinyCase, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration, a short and a long prompt."""
    made = tmp_path_factory.mktemp("launch")
    write_config(made, bare_model, context_tokens=4096)
    ids = tiny_qwen3moe_f32.ids.tolist()
    (made / "short.json").write_text(json.dumps(ids))
    (made / "long.json").write_text(json.dumps((ids * 20)[:LONG]))
    return made


def reading(folder: Path) -> list[str | Path]:
    """The arguments of a launch that reads for seconds."""
    return [
        "launch", folder / "launch.toml", "--prompt-ids", folder / "long.json", "--mode", "chunk-major",
        "--max-tokens", "5",
    ]  # fmt: skip


def answering(folder: Path) -> list[str | Path]:
    """The arguments of a launch that answers for as long as anybody listens."""
    return [
        "launch", folder / "launch.toml", "--prompt-ids", folder / "short.json", "--max-tokens", "3800",
    ]  # fmt: skip


def reach(launch: Running, moment: str) -> None:
    """Wait until the launch is loading, reading or answering."""
    launch.wait_workers(2)
    if moment == "prefill":
        launch.wait_for("tokens (super-chunk ")
    elif moment == "decode":
        launch.wait_for(" ", stream="stdout")


def interrupted(folder: Path, moment: str, number: signal.Signals, *extra: str) -> Ran:
    arguments = answering(folder) if moment == "decode" else reading(folder)
    with running(*arguments, *extra) as launch:
        reach(launch, moment)
        os.killpg(launch.process.pid, number)  # as a terminal does, to the whole foreground group
        done = launch.finish(15)
        assert_all_gone(launch.workers, 1)
    return done


@pytest.mark.parametrize("moment", ["load", "prefill", "decode"])
def test_ctrl_c_ends_everything_with_130(folder: Path, moment: str) -> None:
    done = interrupted(folder, moment, signal.SIGINT)
    assert done.code == 130
    assert done.errors[-1] == "strata-coord: interrupted"
    assert set(done.errors[:-1]) <= {f"strata-coord: stage {stage} had to be killed" for stage in (0, 1)}


@pytest.mark.parametrize("moment", ["load", "prefill"])
def test_sigterm_is_an_orderly_end(folder: Path, moment: str) -> None:
    done = interrupted(folder, moment, signal.SIGTERM, "--set", "supervision.drain_s=0", "--json")
    assert done.code == 0, done.stderr
    assert all("had to be killed" in line for line in done.errors)


def test_sigterm_lets_a_short_answer_finish(folder: Path) -> None:
    with running(
        *reading(folder), "--max-tokens", "30", "--json", "--set", "supervision.drain_s=60"
    ) as launch:
        reach(launch, "prefill")
        launch.send(signal.SIGTERM)
        done = launch.finish(30)
        assert_all_gone(launch.workers, 1)
    assert done.code == 0, done.stderr
    assert done.report["finish_reason"] == "length"
    assert done.report["generated_tokens"] == 30


def test_a_killed_worker_is_one_clear_line_and_1(folder: Path) -> None:
    with running(*answering(folder)) as launch:
        reach(launch, "decode")
        launch.workers[0].kill()
        done = launch.finish(15)
        assert_all_gone(launch.workers, 1)
    assert done.code == 1
    (line,) = done.errors
    assert line.startswith("strata-coord: stage 0 was killed by SIGKILL while ")


def test_a_killed_coordinator_takes_its_workers_along_and_the_next_launch_sweeps(
    folder: Path, runtime_root: Path
) -> None:
    with running(*answering(folder)) as launch:
        reach(launch, "decode")
        launch.process.kill()
        assert_all_gone(launch.workers, 2)
        launch.finish(5)
    base = runtime_root / "strata-coord"
    (left,) = base.iterdir()
    done = run("launch", folder / "launch.toml", "--prompt-ids", folder / "short.json", "--max-tokens", "1")
    assert done.code == 0, done.stderr
    assert not left.exists()


def test_a_reader_that_has_enough_ends_the_launch_without_a_word(folder: Path) -> None:
    process = subprocess.Popen(
        command(*answering(folder)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        if process.stdout is None or process.stderr is None:
            pytest.fail("no pipes")
        assert process.stdout.read(5)
        process.stdout.close()
        errors = process.stderr.read().decode()
        assert process.wait(15) == 1
        assert "Traceback" not in errors
        assert not [line for line in errors.splitlines() if line.startswith("strata-coord: ")]
    finally:
        process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()


def test_sigterm_ends_a_prompt_loop_that_waits(folder: Path) -> None:
    with running("launch", folder / "launch.toml", stdin=subprocess.PIPE) as launch:
        launch.wait_for("ready: one prompt a line")
        launch.wait_workers(2)
        launch.send(signal.SIGTERM)
        done = launch.finish(10)
        assert_all_gone(launch.workers, 1)
    assert done.code == 0
    assert done.errors == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_while_the_prompt_is_still_awaited(folder: Path, number: signal.Signals, code: int) -> None:
    """No process was started yet: the launch reads the prompt from standard input first."""
    with running("launch", folder / "launch.toml", "-", stdin=subprocess.PIPE) as launch:
        # The handlers are in place once standard input is what it waits for.
        wchan = Path(f"/proc/{launch.process.pid}/syscall")
        wait_until(lambda: wchan.read_text().startswith("0 0x0 "), "a read of standard input")
        launch.send(number)
        done = launch.finish(10)
    assert done.code == code
    assert "Traceback" not in done.stderr
    assert launch.workers == []
