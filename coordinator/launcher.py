"""Starts one stage worker as a command, bound to its NUMA node, and ends it for certain.

A worker gets four things by inheritance and nothing by name: the descriptor channel, the read end of the
lifeline pipe whose end tells it that the coordinator is gone, an empty stdin, and a log file for everything
it prints. Binding follows a ladder: numactl for CPUs and memory; else the worker sets both itself; else CPUs
only; else none, and the rung that holds is what the worker reports in Hello.
"""

import contextlib
import functools
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from strata_coord.ipc.errors import StageLostError
from strata_coord.ipc.host_memory import descriptor_pair
from strata_coord.ipc.lifeline import lifeline_pipe

TERM_GRACE_S = 2.0  # between SIGTERM and SIGKILL
REAP_GRACE_S = 5.0  # a process that is not reaped after SIGKILL hangs in the kernel
LOG_TAIL_BYTES = 4096


@functools.cache
def numactl_works(node: int) -> bool:
    """Whether numactl may bind CPUs and memory here: some containers forbid the memory policy calls."""
    numactl = shutil.which("numactl")
    if numactl is None:
        return False
    probe = [numactl, f"--cpunodebind={node}", f"--membind={node}", "true"]
    try:
        done = subprocess.run(probe, capture_output=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def worker_command(*, stage: int, run_id: str, numa_node: int) -> list[str]:
    """The command line of a worker, without the numbers of its inherited descriptors.

    -P keeps the current folder off the import path: a folder named kernels there would shadow a library.
    """
    command = [
        sys.executable,
        "-P",
        "-m",
        "strata_coord.stage_worker",
        "--run-id",
        run_id,
        "--stage",
        str(stage),
    ]
    command += ["--parent-pid", str(os.getpid())]
    if numa_node >= 0 and numactl_works(numa_node):
        command = ["numactl", f"--cpunodebind={numa_node}", f"--membind={numa_node}", *command]
    return command


@dataclass(slots=True, kw_only=True)
class WorkerProcess:
    """A running worker and the ends of its channels that the coordinator holds."""

    stage: int
    process: subprocess.Popen[bytes]
    pidfd: int
    channel: socket.socket  # descriptors go down here
    lifeline: int  # write end; closing it ends the worker
    log_path: Path

    @property
    def pid(self) -> int:
        """The process id, also under numactl, which executes the command in its own place."""
        return self.process.pid

    def signal(self, number: signal.Signals) -> None:
        """Send a signal through the pidfd, so that a reused pid is never hit."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def exit_text(self, where: str) -> str:
        """How the process ended and where it was, in words, with the last line that it printed."""
        code = self.process.poll()
        if code is None:
            ended = "is still running"
        elif code < 0:
            ended = f"was killed by {_signal_name(-code)}"
        else:
            ended = f"exited with status {code}"
        silent = code in (-signal.SIGKILL, -signal.SIGTERM)  # its last line is of something else
        line = "" if silent else self.last_line()
        return f"{ended} {where}: {line}" if line else f"{ended} {where}"

    def last_line(self) -> str:
        """The last line of what the worker printed: of a traceback, the error itself."""
        try:
            lines = self.log_path.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace").split("\n")
        except OSError:
            return ""
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def close_channels(self) -> None:
        """Close the coordinator's ends. The worker sees its lifeline end."""
        self.channel.close()
        if self.lifeline >= 0:
            os.close(self.lifeline)
            self.lifeline = -1


def start_worker(
    *, stage: int, run_id: str, numa_node: int, cpu_threads: int, run_directory: Path
) -> WorkerProcess:
    """Start a worker; it waits for its bootstrap packet on the channel.

    Raises:
        StageLostError: the command could not be started.
    """
    ours, theirs = descriptor_pair()
    lifeline_read, lifeline_write = lifeline_pipe()
    command = worker_command(stage=stage, run_id=run_id, numa_node=numa_node)
    command += ["--channel-fd", str(theirs.fileno()), "--lifeline-fd", str(lifeline_read)]
    log_path = run_directory / f"stage-{stage}.log"
    environment = dict(os.environ)
    environment["OMP_NUM_THREADS"] = environment["MKL_NUM_THREADS"] = str(cpu_threads)
    # CUDA's own order is fastest first; the plan counts cards as NVML does, within CUDA_VISIBLE_DEVICES.
    environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    try:
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(), lifeline_read),
                start_new_session=True,  # Ctrl-C in the terminal reaches the coordinator alone
                env=environment,
            )
        pidfd = os.pidfd_open(process.pid)
    except OSError as error:
        ours.close()
        os.close(lifeline_write)
        message = f"stage {stage} could not be started: {error.strerror}"
        raise StageLostError(message) from error
    finally:
        theirs.close()
        os.close(lifeline_read)
    return WorkerProcess(
        stage=stage, process=process, pidfd=pidfd, channel=ours, lifeline=lifeline_write, log_path=log_path
    )


def end_workers(workers: list[WorkerProcess], *, grace_s: float) -> list[str]:
    """Wait grace_s for an orderly end, then SIGTERM, then SIGKILL; reap all and close their channels.

    Returns one line for each worker that had to be killed, or could not be.
    """
    lines: list[str] = []
    _wait_all(workers, grace_s)
    for number, wait_s in ((signal.SIGTERM, TERM_GRACE_S), (signal.SIGKILL, REAP_GRACE_S)):
        running = [worker for worker in workers if worker.process.poll() is None]
        for worker in running:
            worker.signal(number)
        _wait_all(running, wait_s)
        if number is signal.SIGKILL:
            lines += [f"stage {worker.stage} had to be killed" for worker in running]
    for worker in workers:
        if worker.process.poll() is None:
            lines.append(f"stage {worker.stage}, process {worker.pid}, does not end even when killed")
        worker.close_channels()
        os.close(worker.pidfd)
    return lines


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _wait_all(workers: list[WorkerProcess], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    poller = select.poll()
    running = {worker.pidfd: worker for worker in workers if worker.process.poll() is None}
    for pidfd in running:
        poller.register(pidfd, select.POLLIN)
    while running:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return
        for pidfd, _ in poller.poll(left_s * 1000):
            poller.unregister(pidfd)
            running.pop(pidfd).process.wait()
