"""A plugin that fails a test which leaves a child process, a thread or a descriptor behind.

The snapshot is taken after fixtures of wider scope and before the test's own, and compared after those are
torn down. A test that must leave something says so: @pytest.mark.leaves("what, and who ends it").
"""

import gc
import os
import select
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

SETTLE_S = 3.0  # a process or thread that has been told to end gets this long

# Libraries keep these for the life of the interpreter, made at first use: torch's and tokenizers' pools, the
# random device, modules that are read late, and the event descriptors of zmq's shared context.
KEPT_TARGETS = ("/dev/", "/proc/", "/sys/", "anon_inode:[eventfd]", "anon_inode:[eventpoll]")
KEPT_PARTS = ("/site-packages/", "/lib/python3", "__pycache__")
KEPT_THREADS = ("TMonitor", "pytest_timeout", "pytest-timeout")


@dataclass(frozen=True)
class Snapshot:
    """What this process holds at one moment."""

    children: frozenset[int]
    threads: frozenset[threading.Thread]
    descriptors: Counter[str]  # how many of each target: numbers are reused, targets tell what leaked


def take_snapshot() -> Snapshot:
    return Snapshot(
        children=frozenset(child.pid for child in _live_children()),
        threads=frozenset(threading.enumerate()),
        descriptors=_descriptors(),
    )


def leaked_since(before: Snapshot, *, settle_s: float = SETTLE_S) -> list[str]:
    """Return a line for everything that is here and was not, after waiting at most settle_s for it to end."""
    deadline = time.monotonic() + settle_s
    for thread in threading.enumerate():
        if thread not in before.threads and _counts(thread):
            thread.join(max(deadline - time.monotonic(), 0))
    fresh = [child for child in _live_children() if child.pid not in before.children]
    for child in fresh:
        _wait_without_reaping(child.pid, max(deadline - time.monotonic(), 0))
    found = [f"process {child.pid}: {_command(child)}" for child in fresh if child.is_running()]
    found += [
        f"thread {thread.name}"
        for thread in threading.enumerate()
        if thread not in before.threads and _counts(thread)
    ]
    if _fresh_descriptors(before):
        gc.collect()  # a descriptor of an object in a cycle is not a leak, only late
    found += [f"{count} x {target}" for target, count in sorted(_fresh_descriptors(before).items())]
    return found


def _fresh_descriptors(before: Snapshot) -> Counter[str]:
    return _descriptors() - before.descriptors


def _descriptors() -> Counter[str]:
    targets: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the descriptor of the listing itself
            continue
        if target.startswith(KEPT_TARGETS) or any(part in target for part in KEPT_PARTS):
            continue
        # The inode number tells one pipe from another of the same test run: dropped, so that counts compare.
        kind, colon, _ = target.partition(":[")
        targets[kind if colon and kind in {"pipe", "socket"} else target] += 1
    return targets


def _live_children() -> list[psutil.Process]:
    # A zombie is one of them: somebody forgot to wait for it.
    return [child for child in psutil.Process().children(recursive=True) if child.is_running()]


def _wait_without_reaping(pid: int, timeout_s: float) -> None:
    """Wait for a process to end, and leave its exit status to whoever owns it."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        select.select([descriptor], [], [], timeout_s)
    finally:
        os.close(descriptor)


def _command(process: psutil.Process) -> str:
    try:
        return f"{process.status()}: {' '.join(process.cmdline())[:200]}"
    except psutil.Error:
        return "ended"


def _counts(thread: threading.Thread) -> bool:
    return thread is not threading.main_thread() and not (
        type(thread).__name__ in KEPT_THREADS or thread.name.startswith(KEPT_THREADS)
    )


def _open_device() -> None:
    """Let the driver open what it keeps for the life of the process, so that no test is blamed for it."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "leaves(reason): the test leaves a process, thread or descriptor behind"
    )


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail the test if it leaves something behind."""
    marker = request.node.get_closest_marker("leaves")
    if marker is not None:
        if not marker.args:
            pytest.fail("the marker leaves needs a reason: what is left, and who ends it")
        yield
        return
    if not Path("/proc/self/fd").is_dir():
        yield
        return
    if request.node.get_closest_marker("gpu") is not None:
        _open_device()
    before = take_snapshot()
    yield
    found = leaked_since(before)
    if found:
        pytest.fail("left behind: " + "; ".join(found))
