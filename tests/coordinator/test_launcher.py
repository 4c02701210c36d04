"""Workers started and ended, with small commands in the place of a stage."""

import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from launch_rig import wait_until

from strata_coord.coordinator import launcher
from strata_coord.coordinator.launcher import WorkerProcess, end_workers, start_worker, worker_command
from strata_coord.ipc.errors import StageLostError

Start = Callable[..., WorkerProcess]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start a Python text as a worker; its arguments are those of a stage. Ended for certain."""
    made: list[WorkerProcess] = []

    def begin(text: str, *, stage: int = 0) -> WorkerProcess:
        monkeypatch.setattr(launcher, "worker_command", lambda **_: [sys.executable, "-c", text])
        worker = start_worker(stage=stage, run_id="test", numa_node=-1, cpu_threads=3, run_directory=tmp_path)
        made.append(worker)
        return worker

    yield begin
    for worker in made:
        worker.process.kill()
        worker.process.wait()
        if worker.lifeline >= 0:
            worker.close_channels()
            os.close(worker.pidfd)


def wait_end(worker: WorkerProcess) -> None:
    assert select.select([worker.pidfd], [], [], 20)[0]
    worker.process.wait()


def wait_word(worker: WorkerProcess, word: str) -> None:
    """Wait until the worker has printed word; it tells so over its channel."""
    worker.channel.settimeout(20)
    assert worker.channel.recv(100) == word.encode()


READY = """
import argparse, os, signal, socket, sys
parser = argparse.ArgumentParser()
parser.add_argument("--channel-fd", type=int)
parser.add_argument("--lifeline-fd", type=int)
arguments = parser.parse_args()
channel = socket.socket(fileno=arguments.channel_fd)
"""


def test_a_worker_inherits_its_channel_and_lifeline_and_nothing_else(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Cards are counted as the plan counts them, and those that the user hid stay hidden.
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    worker = start(
        READY
        + """
listed = [int(fd) for fd in os.listdir("/proc/self/fd")]
held = [fd for fd in listed if fd > 2 and os.path.exists(f"/proc/self/fd/{fd}")]  # not the listing's own
print(sorted(held) == sorted([arguments.channel_fd, arguments.lifeline_fd]),
      os.environ["OMP_NUM_THREADS"], os.environ["CUDA_DEVICE_ORDER"], os.environ["CUDA_VISIBLE_DEVICES"],
      os.getsid(0) == os.getpid(), sys.stdin.read() == "")
channel.send(b"done")
os.read(arguments.lifeline_fd, 1)
"""
    )
    wait_word(worker, "done")
    worker.close_channels()  # the end of the lifeline is what the worker waits for
    wait_end(worker)
    assert worker.last_line() == "True 3 PCI_BUS_ID 1,0 True True"
    assert worker.exit_text("here") == "exited with status 0 here: True 3 PCI_BUS_ID 1,0 True True"
    assert end_workers([worker], grace_s=0) == []
    worker.lifeline = -1


def test_the_last_line_of_a_failure_is_its_reason(start: Start) -> None:
    worker = start("raise OSError('no such thing')")
    wait_end(worker)
    assert worker.exit_text("while loading") == "exited with status 1 while loading: OSError: no such thing"


@pytest.mark.parametrize(("number", "name"), [(9, "SIGKILL"), (11, "SIGSEGV"), (41, "signal 41")])
def test_a_signal_is_named(start: Start, number: int, name: str) -> None:
    worker = start(f"import os; os.kill(os.getpid(), {number})")
    wait_end(worker)
    assert worker.exit_text("while experts").startswith(f"was killed by {name} while experts")


def test_a_log_that_is_gone_or_binary_does_no_harm(start: Start, tmp_path: Path) -> None:
    worker = start("import sys; sys.stdout.buffer.write(b'\\xff\\x00 end\\n\\n')")
    wait_end(worker)
    assert worker.last_line().endswith("end")
    (tmp_path / "stage-0.log").unlink()
    assert worker.exit_text("x") == "exited with status 0 x"


def test_a_worker_that_ends_in_time_is_left_alone(start: Start) -> None:
    worker = start(READY + "channel.send(b'up'); channel.recv(10)")
    wait_word(worker, "up")
    worker.channel.send(b"end")
    assert end_workers([worker], grace_s=20) == []
    assert worker.process.returncode == 0


def test_sigterm_comes_before_sigkill(start: Start) -> None:
    worker = start(READY + "channel.send(b'up'); signal.pause()")
    wait_word(worker, "up")
    assert end_workers([worker], grace_s=0) == []
    assert worker.process.returncode == -signal.SIGTERM


@pytest.mark.parametrize("how", ["ignores", "stopped"])
def test_a_worker_that_does_not_listen_is_killed_and_named(
    start: Start, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(launcher, "TERM_GRACE_S", 0.1)
    ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN);" if how == "ignores" else ""
    worker = start(READY + ignore + "channel.send(b'up'); [signal.pause() for _ in iter(int, 1)]", stage=3)
    wait_word(worker, "up")
    if how == "stopped":
        stopped = psutil.Process(worker.pid)
        stopped.suspend()
        wait_until(lambda: stopped.status() == psutil.STATUS_STOPPED, "the stop")
    assert end_workers([worker], grace_s=0) == ["stage 3 had to be killed"]
    assert worker.process.returncode == -signal.SIGKILL


def test_a_signal_to_a_worker_that_is_gone_is_no_error(start: Start) -> None:
    worker = start("pass")
    wait_end(worker)
    worker.signal(signal.SIGTERM)


def test_a_command_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(launcher, "worker_command", lambda **_: ["/nonexistent"])
    with pytest.raises(StageLostError, match="stage 2 could not be started: No such file"):
        start_worker(stage=2, run_id="x", numa_node=-1, cpu_threads=1, run_directory=tmp_path)


def test_the_command_keeps_the_current_folder_off_the_import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    command = worker_command(stage=1, run_id="abc", numa_node=-1)
    assert command[:4] == [sys.executable, "-P", "-m", "strata_coord.stage_worker"]
    assert command[command.index("--parent-pid") + 1] == str(os.getpid())
    monkeypatch.setattr(launcher, "numactl_works", lambda _: True)
    bound = worker_command(stage=1, run_id="abc", numa_node=1)
    assert bound[:3] == ["numactl", "--cpunodebind=1", "--membind=1"]
    monkeypatch.setattr(launcher, "numactl_works", lambda _: False)
    assert worker_command(stage=1, run_id="abc", numa_node=1) == command


def test_numactl_that_is_missing_or_forbidden_does_not_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    launcher.numactl_works.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not launcher.numactl_works(0)
    script = tmp_path / "numactl"
    script.write_text("#!/bin/sh\nexit 1\n")
    script.chmod(0o755)
    launcher.numactl_works.cache_clear()
    assert not launcher.numactl_works(0)
    script.write_text("#!/bin/sh\nexit 0\n")
    launcher.numactl_works.cache_clear()
    assert launcher.numactl_works(0)
    launcher.numactl_works.cache_clear()
