"""One stage as a process: the walk's thread, fed and heard by the control thread.

Order of a worker's life: bootstrap packet, Hello, torch, assignment, load, StageReady, links, epoch,
super-chunks, end. A failure is reported once, as strings, and ends the process: state that an exception has
passed through is not used again.
"""

import os
import sys
import time
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from strata_coord.ipc.assignment import StageAssignment
from strata_coord.ipc.codec import clip_text, decode_record
from strata_coord.ipc.errors import InvariantError, StrataError
from strata_coord.ipc.host_memory import MappedSlots, map_memfd
from strata_coord.ipc.links import ControlClient
from strata_coord.ipc.messages import (
    Assign,
    Segment,
    StageFailed,
    StageReady,
    SuperChunk,
    SuperChunkDone,
)
from strata_coord.ipc.status_page import EventKind, StagePhase, StatusWriter
from strata_coord.kernels import native_dequant
from strata_coord.stage_worker.backend import Backend, CpuBackend, ThreadStream
from strata_coord.stage_worker.clock import ActivityClock
from strata_coord.stage_worker.control_thread import ControlThread, Linked
from strata_coord.stage_worker.counters import TransferCounters
from strata_coord.stage_worker.hand_off_rows import InboundRows, OutboundRows, StopWalkError
from strata_coord.stage_worker.reporting import StatusReporter
from strata_coord.stage_worker.slot_rows import DeviceSlotRows, HostSlotRows, SlotRows
from strata_coord.stage_worker.stage import Stage

if TYPE_CHECKING:
    from strata_coord.ipc.bootstrap import Bootstrap
    from strata_coord.stage_worker.__main__ import Inherited


class Worker:
    """Joins a Stage to its process."""

    def __init__(self, inherited: "Inherited", control: ControlClient, status: StatusWriter) -> None:
        self._inherited = inherited
        self._bootstrap: Bootstrap = inherited.bootstrap
        self._status = status
        self._control_client = control
        self._clock = ActivityClock()
        self._counters = TransferCounters()
        self._failure: BaseException | None = None
        self._control = ControlThread(
            bootstrap=self._bootstrap,
            control=control,
            channel_fd=inherited.channel.fileno(),
            recv_channel=inherited.receive,
            on_failure=self._thread_failed,
        )
        self._tokens = self._token_table()
        self._publisher = ThreadStream("publish", on_failure=self._thread_failed)
        self._stage: Stage | None = None
        self._reporter: StatusReporter | None = None
        self._inbound: InboundRows | None = None
        self._outbound: OutboundRows | None = None
        self._delay_s = 0.0

    def run(self) -> int:
        """Work until told to stop; returns the exit code of the process."""
        self._control.start()
        try:
            while (work := self._control.work.get()) is not None:
                match work:
                    case Assign():
                        self._assign(work)
                    case Linked():
                        self._linked(work)
                    case SuperChunk():
                        self._run(work)
        except StopWalkError:
            pass
        except Exception as failure:  # any failure is reported and ends the process
            self._failure = self._failure or failure
        if self._failure is not None:
            self._report(self._failure)
            return 1
        self._status.set_phase(StagePhase.STOPPING, now_ns=time.monotonic_ns())
        self._control.finish()
        self._control.join(timeout=2.0)
        return 0

    def _thread_failed(self, failure: BaseException) -> None:
        """A thread beside the walk failed: the walk ends wherever it waits, and reports it."""
        self._failure = self._failure or failure
        self._control.stop_walk()

    def _assign(self, assign: Assign) -> None:
        setup = map_memfd(self._inherited.fds["setup"], self._bootstrap.setup_bytes, writable=False)
        with memoryview(setup) as view:
            assignment = decode_record(StageAssignment, view[assign.offset : assign.offset + assign.length])
        setup.close()
        torch.set_num_threads(assignment.cpu_threads)
        self._delay_s = assignment.debug_delay_s
        reporter = StatusReporter(
            status=self._status,
            clock=self._clock,
            counters=self._counters,
            routing=self._routing_rows(assignment),
        )
        self._reporter = reporter
        reporter.phase(StagePhase.LOADING)
        started_ns = self._clock.snapshot().now_ns
        backend, arena = self._backend(assignment), self._arena()
        notes = [] if arena is None else [note for note in (backend.pin(arena),) if note is not None]
        stage = Stage(
            assignment,
            observer=reporter,
            clock=self._clock,
            counters=self._counters,
            arena=arena,
            backend=backend,
        )
        print(f"dequantiser: {native_dequant.describe()}", file=sys.stderr)  # into the worker's log
        stage.load(progress=lambda _what, _done, _total: self._status.advance())
        loaded_ns = self._clock.snapshot().now_ns
        self._stage = stage
        reporter.phase(StagePhase.READY)
        reporter.publish()
        self._control.post(
            StageReady(
                stage=assignment.stage,
                incarnation=self._bootstrap.incarnation,
                device=assignment.device,
                device_bytes=stage.device_bytes(),
                arena_bytes=stage.arena_bytes(),
                load_file_read=self._counters.snapshot().file_read,
                load_seconds=(loaded_ns - started_ns) / 1e9,
                notes=(*notes, *stage.notes),
            )
        )

    def _backend(self, assignment: StageAssignment) -> Backend:
        if not assignment.device.startswith("cuda"):
            return CpuBackend()
        from strata_coord.stage_worker.cuda_backend import CudaBackend

        ordinal = int(assignment.device.partition(":")[2] or 0)
        self._control.device_ordinal = ordinal
        return CudaBackend(ordinal)

    def _linked(self, linked: Linked) -> None:
        stage, reporter = self._ready()
        row_width = stage.assignment.geometry.row_width
        slots: SlotRows
        if isinstance(linked.slots, MappedSlots):
            slots = HostSlotRows(linked.slots, row_width)
        else:
            slots = DeviceSlotRows(linked.slots, row_width)
        if linked.direction == "in":
            self._inbound = InboundRows(
                slots=slots,
                full=self._control.full,
                post=self._control.post,
                compute=stage.compute,
                publisher=self._publisher,
                clock=self._clock,
                reporter=reporter,
                delay_s=self._delay_s,
            )
        else:
            self._outbound = OutboundRows(
                slots=slots,
                credits=self._control.credits,
                post=self._control.post,
                compute=stage.compute,
                copy=stage.backend.side_stream("hand-off"),
                publisher=self._publisher,
                clock=self._clock,
                counters=self._counters,
                reporter=reporter,
            )

    def _run(self, super_chunk: SuperChunk) -> None:
        stage, reporter = self._ready()
        reporter.begin(super_chunk)
        with reporter.span(EventKind.SUPER_CHUNK, StagePhase.EMBEDDING, value=super_chunk.rows):
            # A later stage sleeps once the rows are there: before, it would hide behind the stage in front.
            if self._delay_s and super_chunk.segments and self._inbound is None:
                with self._clock.during("busy"):
                    time.sleep(self._delay_s)
            result = stage.run(
                super_chunk,
                self._token_ids(super_chunk.segments),
                inbound=self._inbound,
                outbound=self._outbound,
                is_cancelled=lambda segment: self._status.is_cancelled(segment.seat, segment.sequence),
                logits_files=self._control.logits_files,
            )
        self._forget_logits(super_chunk)
        reporter.publish()
        self._control.post(
            SuperChunkDone(
                stage=stage.assignment.stage,
                incarnation=self._bootstrap.incarnation,
                epoch=super_chunk.epoch,
                index=super_chunk.index,
                cancelled=result.cancelled,
                tokens=result.tokens,
                clock=self._clock.snapshot(),
                counters=self._counters.snapshot(),
                not_finite=result.not_finite,
            )
        )
        reporter.waiting()

    def _ready(self) -> tuple[Stage, StatusReporter]:
        if self._stage is None or self._reporter is None:
            message = "work arrived before the stage was assigned"
            raise InvariantError(message)
        return self._stage, self._reporter

    def _token_ids(self, segments: Sequence[Segment]) -> list[torch.Tensor]:
        return [
            torch.from_numpy(
                self._tokens[segment.seat, : segment.first_position + segment.count].astype(np.int64)
            )
            for segment in segments
        ]

    def _forget_logits(self, super_chunk: SuperChunk) -> None:
        for operation in super_chunk.operations:
            if operation.kind == "drop":
                entry = self._control.logits_files.pop(operation.sequence, None)
                if entry is not None:
                    os.close(entry[0])

    def _token_table(self) -> "np.ndarray[tuple[int, ...], np.dtype[np.int32]]":
        shape = (self._bootstrap.max_sequences, self._bootstrap.context_tokens)
        table = map_memfd(self._inherited.fds["tokens"], shape[0] * shape[1] * 4, writable=False)
        return np.frombuffer(table, dtype=np.int32).reshape(shape)

    def _arena(self) -> torch.Tensor | None:
        if not self._bootstrap.arena_bytes:
            return None
        arena = map_memfd(self._inherited.fds["arena"], self._bootstrap.arena_bytes, writable=True)
        return torch.from_numpy(np.frombuffer(arena, dtype=np.uint8))

    def _routing_rows(self, assignment: StageAssignment) -> dict[int, memoryview]:
        num_experts = assignment.geometry.experts.num_experts
        table = map_memfd(self._inherited.fds["routing"], self._bootstrap.routing_words * 4, writable=True)
        words = memoryview(table).cast("I")
        return {
            layer: words[number * num_experts : (number + 1) * num_experts]
            for number, layer in enumerate(range(assignment.first_layer, assignment.last_layer))
        }

    def _report(self, failure: BaseException) -> None:
        traceback.print_exception(failure)  # into the worker's log, whole
        self._status.set_phase(StagePhase.FAILED, now_ns=time.monotonic_ns())
        text = str(failure) if isinstance(failure, StrataError) else f"{type(failure).__name__}: {failure}"
        trace = "".join(traceback.format_exception(failure))
        message = StageFailed(
            stage=self._bootstrap.stage,
            incarnation=self._bootstrap.incarnation,
            kind=type(failure).__name__,
            text=clip_text(text, 1000),
            trace=clip_text(trace, 3500, keep="end"),
            layer=-1 if self._reporter is None else self._reporter.layer,
            super_chunk=-1 if self._reporter is None else self._reporter.super_chunk,
        )
        if self._control.is_alive():
            self._control.post(message)
            self._control.finish()
            self._control.join(timeout=2.0)
        else:  # it was the control thread that failed: its socket is this thread's now
            self._control_client.send(message)
