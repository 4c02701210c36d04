"""A backend whose streams run only when a test says so, so that any order of their work can be tried.

A step runs the next work of one stream, or nothing while that work waits for another stream. What real
streams may do in any interleaving is what a test may step.
"""

from collections import deque
from collections.abc import Callable

import torch


class ManualEvent:
    def __init__(self, backend: "ManualBackend") -> None:
        self._backend = backend
        self.passed = False

    def wait(self) -> None:
        """A host that waits lets the streams run until the event is passed."""
        while not self.passed:
            assert self._backend.step_any(), "the host waits for ever"

    def is_done(self) -> bool:
        return self.passed


class ManualStream:
    def __init__(self, backend: "ManualBackend", name: str) -> None:
        self.backend = backend
        self.name = name
        self.queue: deque[Callable[[], None] | ManualEvent | tuple[ManualEvent]] = deque()

    def run(self, work: Callable[[], None]) -> None:
        self.queue.append(work)

    def record(self) -> ManualEvent:
        event = ManualEvent(self.backend)
        self.queue.append(event)
        return event

    def wait(self, event: ManualEvent) -> None:
        self.queue.append((event,))

    def step(self) -> bool:
        """Do the next thing; False if there is none or it has to wait."""
        if not self.queue:
            return False
        head = self.queue[0]
        if isinstance(head, tuple):
            if not head[0].passed:
                return False
        elif isinstance(head, ManualEvent):
            head.passed = True
        else:
            head()
        self.queue.popleft()
        return True

    def close(self) -> None:
        while self.queue:
            assert self.backend.step_any(), f"stream {self.name} never ends"


class ManualBackend:
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.streams: list[ManualStream] = []

    def empty(self, num_bytes: int) -> torch.Tensor:
        return torch.full((num_bytes,), 0xEE, dtype=torch.uint8)

    def side_stream(self, name: str) -> ManualStream:
        self.streams.append(ManualStream(self, name))
        return self.streams[-1]

    def host_stream(self, name: str) -> ManualStream:
        return self.side_stream(name)

    compute_stream = None  # tests make theirs with side_stream("compute")

    def step_any(self) -> bool:
        return any(stream.step() for stream in self.streams)

    def run_all_but(self, *held: ManualStream) -> None:
        """Let every stream but the held ones go as far as it can."""
        while any(stream.step() for stream in self.streams if stream not in held):
            pass
