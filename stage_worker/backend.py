"""What the walk needs of a device: memory, and streams that order work without blocking the host.

A stream runs its work in order; an event marks a point of a stream, and another stream can be told to wait
for it. On CUDA these are the driver's own. On the CPU a stream is a thread with a queue, and the compute
stream is the calling thread itself, so the same stage code has the same overlap and the same hazards on both.
"""

import queue
import threading
from collections.abc import Callable
from typing import Protocol

import torch


class Event(Protocol):
    """A point of a stream that has been passed or not."""

    def wait(self) -> None:
        """Block the calling host thread until the point is passed; raises what the stream's work raised."""

    def is_done(self) -> bool:
        """Whether the point has been passed."""


class Stream(Protocol):
    """An ordered queue of work on the device."""

    def run(self, work: Callable[[], None]) -> None:
        """Append work."""

    def record(self) -> Event:
        """Mark the point after everything appended so far."""

    def wait(self, event: Event) -> None:
        """Let later work of this stream begin only once event has been passed."""

    def close(self) -> None:
        """Finish what was appended and end the stream."""


def copy_work(target: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
    """Work for a stream: copy source to target, both as they are when it runs."""

    def copy() -> None:
        target.copy_(source, non_blocking=True)

    return copy


class Backend(Protocol):
    """A device: where its memory is and which streams it has."""

    device: torch.device
    multiplies_batches: bool  # grouped products of several experts at once pay

    def empty(self, num_bytes: int) -> torch.Tensor:
        """Uninitialised device memory, uint8 [num_bytes]."""

    def pin(self, memory: torch.Tensor) -> str | None:
        """Make host memory fast to copy from, if that helps here; returns why it could not be done."""

    def compute_stream(self) -> Stream:
        """The stream that the walk's kernels run on."""

    def side_stream(self, name: str) -> Stream:
        """A further stream of the device, for copies."""

    def host_stream(self, name: str) -> Stream:
        """A stream of the host, for file reads and for waiting: a thread on every device."""


class HostEvent:
    """An event of the CPU backend. A failure of the stream's work travels with it."""

    def __init__(self) -> None:
        self._passed = threading.Event()
        self._failure: BaseException | None = None

    def set(self, failure: BaseException | None) -> None:
        """Mark the point as passed, or as never to be reached because of failure."""
        self._failure = failure
        self._passed.set()

    def wait(self) -> None:
        """Block until passed; raises the failure of the stream's work."""
        self._passed.wait()
        if self._failure is not None:
            raise self._failure

    def is_done(self) -> bool:
        """Whether the point has been passed."""
        return self._passed.is_set()


class InlineStream:
    """The compute stream of the CPU: work runs at once in the calling thread."""

    def run(self, work: Callable[[], None]) -> None:
        """Run work now."""
        work()

    def record(self) -> HostEvent:
        """An event that is already passed, since work is done when run returns."""
        event = HostEvent()
        event.set(None)
        return event

    def wait(self, event: Event) -> None:
        """Block the calling thread until event is passed."""
        event.wait()

    def close(self) -> None:
        """Nothing is left to finish."""


class ThreadStream:
    """A side stream of the CPU: one thread that runs its queue in order.

    After a failure the remaining work is skipped and every later event carries the failure, as a CUDA
    stream's error does. on_failure is told at once, for streams whose events nobody may be waiting for.
    """

    def __init__(self, name: str, *, on_failure: Callable[[BaseException], None] | None = None) -> None:
        self._on_failure = on_failure
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._drain, name=name, daemon=True)
        self._thread.start()

    # The mode is a thread's own, and the walk's tensors may be written in no other.
    @torch.inference_mode()
    def _drain(self) -> None:
        while (work := self._queue.get()) is not None:
            if self._failure is None:
                try:
                    work()
                except BaseException as failure:  # carried to whoever waits
                    self._failure = failure
                    if self._on_failure is not None:
                        self._on_failure(failure)
                    continue
            elif isinstance(work, _SetEvent):
                work()

    def run(self, work: Callable[[], None]) -> None:
        """Append work."""
        self._queue.put(work)

    def record(self) -> HostEvent:
        """Mark the point after everything appended so far."""
        event = HostEvent()
        self._queue.put(_SetEvent(self, event))
        return event

    def wait(self, event: Event) -> None:
        """Let later work begin only once event has been passed."""
        self._queue.put(event.wait)  # a passed one too: it may carry a failure

    @property
    def failure(self) -> BaseException | None:
        """What ended the stream's work, if anything did."""
        return self._failure

    def close(self) -> None:
        """Finish what was appended and join the thread."""
        self._queue.put(None)
        self._thread.join()


class _SetEvent:
    def __init__(self, stream: ThreadStream, event: HostEvent) -> None:
        self._stream = stream
        self._event = event

    def __call__(self) -> None:
        self._event.set(self._stream.failure)


class CpuBackend:
    """Host memory under a byte budget in place of VRAM."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.multiplies_batches = False  # a loop of plain products is as fast, and keeps ascending order

    def empty(self, num_bytes: int) -> torch.Tensor:
        """Uninitialised host memory, uint8 [num_bytes]."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def pin(self, memory: torch.Tensor) -> str | None:
        """Nothing to do: the processor reads any memory alike."""
        del memory
        return None

    def compute_stream(self) -> Stream:
        """The calling thread."""
        return InlineStream()

    def side_stream(self, name: str) -> Stream:
        """A thread of its own."""
        return ThreadStream(name)

    def host_stream(self, name: str) -> Stream:
        """A thread of its own."""
        return ThreadStream(name)
