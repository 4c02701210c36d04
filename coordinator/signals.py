"""What signals mean to a launch: SIGTERM and SIGHUP end it in an orderly way, Ctrl-C interrupts it.

A handler only raises in the main thread, which then unwinds through the engine's close.
"""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class Terminated(BaseException):  # like KeyboardInterrupt: no except Exception stops it
    """SIGTERM or SIGHUP arrived and nothing is left to finish."""


class Drain:
    """Whether the launch was told to end, and whether it may do so at once."""

    def __init__(self) -> None:
        self.is_requested = False
        self.is_busy = False  # a request is being answered: it gets drain_s to finish

    def request(self, _number: int, _frame: FrameType | None) -> None:
        """The signal handler."""
        again, self.is_requested = self.is_requested, True
        if not self.is_busy or again:
            raise Terminated


DRAIN = Drain()


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise Terminated, now or once the request in progress is answered."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    DRAIN.is_requested = DRAIN.is_busy = False
    before = {number: signal.signal(number, DRAIN.request) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def unhurried() -> Iterator[None]:
    """Ignore further signals while processes are being ended: that is bounded, and must not be cut short."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
