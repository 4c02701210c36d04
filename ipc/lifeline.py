"""A worker never outlives its coordinator: end of file on a pipe, and the kernel's own signal as a backstop.

The lifeline is a pipe whose write end only the coordinator holds. It carries no bytes; its end of file, which
the kernel delivers however the coordinator dies, is the message. It is not the socket pair that
passes descriptors: reading those must not race with watching for the end.
"""

import ctypes
import os
import select
import signal
import threading

from strata_coord.ipc.errors import InvariantError

LIFELINE_EXIT = 71  # seen by nobody but a log: the coordinator that would read it is gone
_PR_SET_PDEATHSIG = 1


def lifeline_pipe() -> tuple[int, int]:
    """Return the read end, for a worker to inherit, and the write end, for the coordinator to hold.

    Neither is inherited by itself; pass the read end to the worker by name. A write end that leaked into
    another child would keep the worker alive with it.
    """
    return os.pipe2(os.O_CLOEXEC)


def exit_when_closed(fd: int) -> threading.Thread:
    """Start a daemon thread that ends this process at once when the other end of fd is closed.

    The thread takes no lock and runs no clean-up: the process may hang in a native call, and its memory and
    sockets are the kernel's and the next launch's to clear.
    """
    thread = threading.Thread(target=_watch, args=(fd,), name="lifeline", daemon=True)
    thread.start()
    return thread


def _watch(fd: int) -> None:
    watcher = select.poll()
    watcher.register(fd, select.POLLIN)  # POLLHUP and POLLERR are always reported
    while True:
        for _, events in watcher.poll():
            if events & select.POLLIN and os.read(fd, 64):
                continue  # nobody writes, but bytes are not an end
            os._exit(LIFELINE_EXIT)


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when the thread that started it ends.

    Call it from the main thread, first thing. It covers a worker whose threads cannot run any more, stuck in
    a native call. The signal follows the starting thread, not the process, so the coordinator starts workers
    from a thread that ends after them.

    Raises:
        InvariantError: the kernel refused.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0) != 0:
        message = f"PR_SET_PDEATHSIG was refused: {os.strerror(ctypes.get_errno())}"
        raise InvariantError(message)
    if os.getppid() != parent_pid:
        # The parent ended before the call, and there will be no signal.
        os._exit(LIFELINE_EXIT)
