"""The CUDA form of the backend: driver streams and events in place of threads.

Nothing here blocks the host but Event.wait. A side stream is created without the default stream's implicit
ordering, so every dependency between streams is one that the walk stated.
"""

from collections.abc import Callable

import torch

from strata_coord.ipc.errors import BindingError
from strata_coord.stage_worker.backend import Event, Stream, ThreadStream


class CudaEvent:
    """A recorded driver event."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def wait(self) -> None:
        """Block the host until passed; raises the device's error if it has one."""
        self.event.synchronize()

    def is_done(self) -> bool:
        """Whether passed."""
        return bool(self.event.query())  # type: ignore[no-untyped-call]


class CudaStream:
    """A driver stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream

    def run(self, work: Callable[[], None]) -> None:
        """Queue the device work that calling work issues."""
        with torch.cuda.stream(self.stream):
            work()

    def record(self) -> CudaEvent:
        """Mark the point after everything queued so far."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self.stream)
        return CudaEvent(event)

    def wait(self, event: Event) -> None:
        """Let later work begin only once event is passed.

        A host event (a file read) has no driver form: then it is this thread that waits, before it queues
        anything that depends on the read.
        """
        if isinstance(event, CudaEvent):
            self.stream.wait_event(event.event)
        else:
            event.wait()

    def close(self) -> None:
        """Wait for what is queued."""
        self.stream.synchronize()


class CudaBackend:
    """One CUDA device."""

    def __init__(self, ordinal: int) -> None:
        """Make the device current for this thread.

        Raises:
            BindingError: there is no such device.
        """
        count = torch.cuda.device_count()
        if ordinal >= count:
            message = f"cuda:{ordinal}: this machine has {count} CUDA devices"
            raise BindingError(message)
        torch.cuda.set_device(ordinal)
        self.device = torch.device("cuda", ordinal)
        self.multiplies_batches = True
        self._compute = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        torch.cuda.set_stream(self._compute)

    def empty(self, num_bytes: int) -> torch.Tensor:
        """Uninitialised device memory, uint8 [num_bytes]."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def pin(self, memory: torch.Tensor) -> str | None:
        """Register host memory with CUDA, so that the copy engine reads it directly.

        Memory that is refused still works: torch copies it through buffers of its own, at a fraction of the
        link's rate. The registration ends with the process.
        """
        from cupy.cuda import runtime

        try:
            runtime.hostRegister(memory.data_ptr(), memory.numel(), 0)
        except runtime.CUDARuntimeError as error:
            gib = memory.numel() / (1 << 30)
            return f"arena of {gib:.1f} GiB is pageable, pinning was refused: {error}; raise memlock"
        return None

    def compute_stream(self) -> Stream:
        """The stream that is current on the walk's thread."""
        return CudaStream(self._compute)

    def side_stream(self, name: str) -> Stream:
        """A stream for copies. name is for the CPU's threads; the driver's streams have none."""
        del name
        return CudaStream(torch.cuda.Stream(self.device))  # type: ignore[no-untyped-call]

    def host_stream(self, name: str) -> Stream:
        """A thread for work of the host, such as file reads."""
        return ThreadStream(name)
