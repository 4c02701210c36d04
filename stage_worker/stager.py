"""Moves streamed experts through the window: file -> staging -> window, or arena -> window, ahead of use.

The window is a ring of blob slots in device memory. Blobs go through it in exactly the order in which the
walk uses them, so a slot's turn is known when an upload is queued: the copy stream waits for the event that
ended the slot's previous use, and the host never waits for a slot. The walk acquires blobs in order and
releases each once the kernels that read it are queued; every release queues the next upload.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from strata_coord.ipc.errors import InvariantError
from strata_coord.stage_worker.backend import Backend, Event, Stream
from strata_coord.stage_worker.counters import TransferCounters
from strata_coord.stage_worker.expert_tiers import ExpertTiers

# Reads from the file land here before the copy to the window: one slot is filled while the other is copied.
STAGING_SLOTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """One blob on its way into the window, or there once ready is passed."""

    layer: int
    expert: int
    slot: int
    blob: torch.Tensor  # uint8, the window's bytes
    ready: Event


class Stager:
    """The window of one stage and the uploads that are planned, on their way, or in use."""

    def __init__(
        self, *, tiers: ExpertTiers, backend: Backend, window_slots: int, counters: TransferCounters
    ) -> None:
        """Take room for the window: window_slots blobs of the stage's largest size."""
        if window_slots < 1:
            message = f"the window has {window_slots} slots, but needs at least 1"
            raise InvariantError(message)
        self._tiers = tiers
        self._counters = counters
        self._window = backend.empty(window_slots * tiers.max_blob_bytes).view(window_slots, -1)
        self._slot_free: list[Event | None] = [None] * window_slots
        self._staging = torch.empty(STAGING_SLOTS, tiers.max_blob_bytes, dtype=torch.uint8)
        self._staging_free: list[Event | None] = [None] * STAGING_SLOTS
        self._copy: Stream = backend.side_stream("expert-copy")
        self._read: Stream = backend.host_stream("expert-read")
        self._planned: deque[tuple[int, int]] = deque()
        self._issued: deque[Upload] = deque()
        self._num_issued = 0
        self._num_released = 0
        self._num_staged = 0

    def plan(self, order: Iterable[tuple[int, int]]) -> None:
        """Append (layer, expert) pairs in the order in which the walk will acquire them."""
        self._planned.extend(order)
        self._issue()

    def acquire(self, layer: int, expert: int) -> Upload:
        """The next blob of the planned order. Its ready event may still be ahead.

        Raises:
            InvariantError: the walk asks for another blob than the planned one.
        """
        if not self._issued:
            self._issue()
        upload = self._issued.popleft() if self._issued else None
        if upload is None or (upload.layer, upload.expert) != (layer, expert):
            planned = None if upload is None else (upload.layer, upload.expert)
            message = f"the walk wants expert {expert} of layer {layer}, but the planned upload is {planned}"
            raise InvariantError(message)
        return upload

    def release(self, upload: Upload, compute: Stream) -> None:
        """Give the blob's slot back once what compute has queued so far is done."""
        self._slot_free[upload.slot] = compute.record()
        self._num_released += 1
        self._issue()

    def abandon(self, compute: Stream) -> None:
        """Drop what is planned and let go of what is on its way; the walk was cancelled."""
        self._planned.clear()
        while self._issued:
            upload = self._issued.popleft()
            compute.wait(upload.ready)
            self.release(upload, compute)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is planned, on its way or held."""
        return not self._planned and not self._issued and self._num_issued == self._num_released

    def close(self) -> None:
        """End the copy and read streams."""
        self._copy.close()
        self._read.close()

    def _issue(self) -> None:
        while self._planned and self._num_issued - self._num_released < len(self._slot_free):
            layer, expert = self._planned.popleft()
            slot = self._num_issued % len(self._slot_free)
            blob = self._window[slot, : self._tiers.layouts[layer].num_bytes]
            source = self._tiers.arena_blob(layer, expert)
            staged = None
            if source is None:
                staged = self._read_to_staging(layer, expert)
                source = self._staging[staged, : blob.numel()]
            free = self._slot_free[slot]
            if free is not None:
                self._copy.wait(free)
            self._copy.run(_copy_work(blob, source))
            ready = self._copy.record()
            if staged is not None:
                self._staging_free[staged] = ready
            self._counters.add(ram_to_device=blob.numel())
            self._issued.append(Upload(layer=layer, expert=expert, slot=slot, blob=blob, ready=ready))
            self._num_issued += 1

    def _read_to_staging(self, layer: int, expert: int) -> int:
        staged = self._num_staged % STAGING_SLOTS
        self._num_staged += 1
        target = self._staging[staged, : self._tiers.layouts[layer].num_bytes]
        free = self._staging_free[staged]
        if free is not None:
            self._read.wait(free)
        self._read.run(lambda: self._tiers.read_file(layer, expert, target))
        self._copy.wait(self._read.record())
        return staged


def _copy_work(target: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
    def copy() -> None:
        target.copy_(source, non_blocking=True)

    return copy
