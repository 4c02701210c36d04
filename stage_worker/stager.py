"""Moves streamed experts through the window: file -> staging -> window, or arena -> window, ahead of use.

The window is a ring of blob slots in device memory. Experts that lie side by side in the arena and are used
one after the other cross as one upload of up to upload_group blobs, since small copies never reach the link's
rate. Uploads go through the ring in exactly the order in which the walk uses them, so a slot's turn is known
when an upload is queued: the copy stream waits for the event that ended the slot's previous use, and the host
never waits for a slot. The walk acquires uploads in order and releases each once the kernels that read it are
queued; every release queues the next.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

import torch

from strata_coord.ipc.errors import InvariantError
from strata_coord.stage_worker.backend import Backend, Event, Stream, copy_work
from strata_coord.stage_worker.blobs import aligned
from strata_coord.stage_worker.counters import TransferCounters
from strata_coord.stage_worker.expert_tiers import ExpertTiers

# Reads from the file land here before the copy to the window: one slot is filled while the other is copied.
STAGING_SLOTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """Neighbouring blobs of one layer on their way into the window, or there once ready is passed."""

    layer: int
    experts: tuple[int, ...]
    slot: int  # the first of as many slots as there are experts
    blobs: torch.Tensor  # uint8 [experts, stride], the window's bytes; a blob is the start of its row
    num_bytes: int  # of one blob
    ready: Event

    @property
    def expert(self) -> int:
        """The first expert."""
        return self.experts[0]

    @property
    def blob(self) -> torch.Tensor:
        """The first expert's bytes."""
        return self.blobs[0, : self.num_bytes]


class Stager:
    """The window of one stage and the uploads that are planned, on their way, or in use."""

    def __init__(
        self,
        *,
        tiers: ExpertTiers,
        backend: Backend,
        window_slots: int,
        counters: TransferCounters,
        upload_group: int = 1,
    ) -> None:
        """Take room for the window: window_slots blobs of the stage's largest size."""
        if window_slots < 1:
            message = f"the window has {window_slots} slots, but needs at least 1"
            raise InvariantError(message)
        self._tiers = tiers
        self._counters = counters
        self._upload_group = upload_group
        self._slot_bytes = aligned(tiers.max_blob_bytes)
        self._window = backend.empty(window_slots * self._slot_bytes)
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
        """The next upload of the planned order, which begins with expert. Its ready event may still be ahead.

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
        """Give the blobs' slots back once what compute has queued so far is done."""
        read = compute.record()
        for slot in range(upload.slot, upload.slot + len(upload.experts)):
            self._slot_free[slot] = read
        self._num_released += len(upload.experts)
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
        while self._planned:
            slot = self._num_issued % len(self._slot_free)
            experts = self._next_group(len(self._slot_free) - slot)
            if self._num_issued - self._num_released + len(experts) > len(self._slot_free):
                return
            for _ in experts[1:]:
                self._planned.popleft()
            layer, _ = self._planned.popleft()
            self._issued.append(self._upload(layer, experts, slot))
            self._num_issued += len(experts)

    def _next_group(self, max_experts: int) -> tuple[int, ...]:
        """The experts that the next upload brings: planned next, and neighbours in the arena."""
        layer, expert = self._planned[0]
        experts = [expert]
        limit = min(self._upload_group, max_experts)
        for next_layer, neighbour in islice(self._planned, 1, limit):
            if next_layer != layer or not self._tiers.are_neighbours(layer, experts[-1], neighbour):
                break
            experts.append(neighbour)
        return tuple(experts)

    def _upload(self, layer: int, experts: tuple[int, ...], slot: int) -> Upload:
        num_bytes = self._tiers.layouts[layer].num_bytes
        stride = aligned(num_bytes)
        start = slot * self._slot_bytes
        span = stride * (len(experts) - 1) + num_bytes
        source = self._tiers.arena_blobs(layer, experts)
        staged = None
        if source is None:
            staged = self._read_to_staging(layer, experts[0])
            source = self._staging[staged, :num_bytes]
        for free in set(self._slot_free[slot : slot + len(experts)]):
            if free is not None:
                self._copy.wait(free)
        self._copy.run(copy_work(self._window[start : start + span], source))
        ready = self._copy.record()
        if staged is not None:
            self._staging_free[staged] = ready
        self._counters.add(ram_to_device=num_bytes * len(experts))
        return Upload(
            layer=layer,
            experts=experts,
            slot=slot,
            blobs=self._window[start : start + stride * len(experts)].view(len(experts), stride),
            num_bytes=num_bytes,
            ready=ready,
        )

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
