import os
import select
import subprocess
import sys

import pytest

from strata_coord.ipc.lifeline import LIFELINE_EXIT, lifeline_pipe

WATCHER = """
import os, sys, threading
from strata_coord.ipc.lifeline import exit_when_closed
exit_when_closed(int(sys.argv[1]))
print("watching", flush=True)
{wait}
"""
SLEEPS = "threading.Event().wait()"
# A native call that gives up the interpreter's lock and takes no signal of Python's.
HANGS_IN_C = "import ctypes; ctypes.CDLL(None).sleep(1000)"

# A parent that starts a child which asks to die with it, and is then killed.
PARENT = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-P", "-c", sys.argv[1], str(os.getpid())], stdout=subprocess.PIPE)
print(child.stdout.readline().decode().strip(), child.pid, flush=True)
os.kill(os.getpid(), 9)
"""
CHILD = """
import sys, threading
from strata_coord.ipc.lifeline import die_with_parent
die_with_parent(int(sys.argv[1]))
print("ready", flush=True)
threading.Event().wait()
"""


@pytest.fixture
def pipe():
    ends = dict(zip(("read", "write"), lifeline_pipe(), strict=True))
    yield ends
    for fd in ends.values():
        os.close(fd)


def start(pipe, wait):
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", WATCHER.format(wait=wait), str(pipe["read"])],
        pass_fds=[pipe["read"]],
        stdout=subprocess.PIPE,
    )
    assert process.stdout.readline() == b"watching\n"
    return process


@pytest.mark.parametrize("wait", [SLEEPS, HANGS_IN_C], ids=["sleeps", "hangs in C"])
def test_a_worker_ends_when_the_other_end_closes(pipe, wait):
    with start(pipe, wait) as process:
        os.close(pipe.pop("write"))
        assert process.wait(timeout=20) == LIFELINE_EXIT


def test_bytes_are_not_an_end(pipe):
    with start(pipe, "print(sys.stdin.readline()); os._exit(5)") as process:
        os.write(pipe["write"], b"x" * 1000)
        assert process.wait(timeout=20) == 5


def test_neither_end_is_inherited_by_chance(pipe):
    assert not any(os.get_inheritable(fd) for fd in pipe.values())


def test_the_kernel_kills_a_child_whose_parent_was_killed():
    with subprocess.Popen(
        [sys.executable, "-P", "-c", PARENT, CHILD], stdout=subprocess.PIPE, text=True
    ) as parent:
        word, pid = parent.stdout.readline().split()
        assert word == "ready"
        assert parent.wait(timeout=20) == -9
        # The child holds the other end of nothing of ours; its pidfd becomes readable when it is gone.
        try:
            pidfd = os.pidfd_open(int(pid))
        except ProcessLookupError:
            return
        assert select.select([pidfd], [], [], 20)[0] == [pidfd]
        os.close(pidfd)


def test_a_child_whose_parent_is_gone_already_ends_at_once():
    done = subprocess.run(
        [sys.executable, "-P", "-c", CHILD, "1"], capture_output=True, timeout=20, check=False
    )
    assert (done.returncode, done.stdout) == (LIFELINE_EXIT, b"")
