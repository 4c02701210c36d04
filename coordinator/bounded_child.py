"""One question to a child process that is not trusted: bytes in, bytes out, within a time and a size."""

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_CHUNK = 1 << 16


@dataclass(frozen=True, slots=True)
class ChildAnswer:
    """What came back; problem says in a few words why it cannot be used, None if it can."""

    answer: bytes
    problem: str | None = None


def run_bounded(
    command: Sequence[str],
    question: bytes,
    *,
    environment: Mapping[str, str],
    seconds: float,
    max_answer_bytes: int,
) -> ChildAnswer:
    """Start command, write question to its stdin, return its stdout. The child is gone on return.

    Args:
        command: program and arguments.
        question: written whole, then stdin is closed.
        environment: the child's whole environment.
        seconds: wall time from the start until it is killed.
        max_answer_bytes: it is killed when it writes more.

    Raises:
        OSError: the program cannot be started.
    """
    deadline = time.monotonic() + seconds
    process = subprocess.Popen(
        list(command),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=dict(environment),
        bufsize=0,
        start_new_session=True,  # a Ctrl-C in the terminal is the parent's to handle
    )
    try:
        answer, problem = _exchange(process, question, deadline, max_answer_bytes)
        if problem is None:
            problem = _wait(process, deadline)
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
    late = f"it took longer than {seconds:g} s"
    return ChildAnswer(answer, late if problem == "late" else problem)


def _exchange(
    process: "subprocess.Popen[bytes]", question: bytes, deadline: float, limit: int
) -> tuple[bytes, str | None]:
    """Write and read at once until the child closes its stdout: either pipe may fill first."""
    stdin, stdout = process.stdin, process.stdout
    if stdin is None or stdout is None:
        return b"", "its pipes are missing"
    rest, answer = memoryview(question), bytearray()
    with selectors.DefaultSelector() as selector:
        os.set_blocking(stdin.fileno(), False)
        selector.register(stdin, selectors.EVENT_WRITE)
        selector.register(stdout, selectors.EVENT_READ)
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                return bytes(answer), "late"
            for key, _ in selector.select(left):
                if key.fileobj is stdout:
                    data = os.read(stdout.fileno(), _CHUNK)
                    if not data:
                        return bytes(answer), None
                    answer += data
                    if len(answer) > limit:
                        return b"", f"it wrote more than {limit} bytes"
                    continue
                try:
                    rest = rest[os.write(stdin.fileno(), rest[:_CHUNK]) :]
                except BrokenPipeError:
                    rest = rest[:0]
                if not rest:
                    selector.unregister(stdin)
                    stdin.close()


def _wait(process: "subprocess.Popen[bytes]", deadline: float) -> str | None:
    try:
        status = process.wait(max(deadline - time.monotonic(), 0.001))
    except subprocess.TimeoutExpired:
        return "late"
    if status == -signal.SIGXCPU:
        return "it used more processor time than it may"
    if status < 0:
        return f"its process was ended by {signal.Signals(-status).name}"
    return f"its process ended with status {status}" if status else None
