"""What signals mean to a launch: SIGTERM and SIGHUP end it in an orderly way, Ctrl-C interrupts it.

A handler only raises in the main thread, which then unwinds through the engine's close.
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


class Terminated(BaseException):  # like KeyboardInterrupt: no except Exception stops it
    """SIGTERM or SIGHUP arrived and nothing is left to finish."""


class Drain:
    """Whether the launch was told to end, and whether it may do so at once."""

    def __init__(self) -> None:
        self.is_requested = False
        self._timer: threading.Timer | None = None  # set while a request is being answered; runs once told

    def reset(self) -> None:
        """A launch begins."""
        self.is_requested = False

    @contextlib.contextmanager
    def busy(self, give_up: Callable[[], None], *, drain_s: float) -> Iterator[None]:
        """While in here, being told to end is put off; drain_s later give_up is called, from a thread."""
        timer = threading.Timer(drain_s, give_up)
        timer.daemon = True
        self._timer = timer
        try:
            yield
        finally:
            self._timer = None
            timer.cancel()
            if timer.ident is not None:
                timer.join()

    def request(self, _number: int, _frame: FrameType | None) -> None:
        """The signal handler."""
        again, self.is_requested = self.is_requested, True
        if self._timer is None or again:
            raise Terminated
        self._timer.start()


DRAIN = Drain()


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise Terminated, now or once the request in progress is answered."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    DRAIN.reset()
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
