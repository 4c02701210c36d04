"""One worker's status page: shared memory that the worker writes, the coordinator reads, and a crash leaves.

The page is a memfd of signed 8-byte words that the coordinator holds, so what a worker did last can be read
after its death. No lock and no system call: a word is written whole, but a reader can see words of two
moments side by side (say, the layer of one step with the progress of the next). Readers show and time things
by it; nothing that must be exact is decided from it, except a cancel word, which is one word.

Layout, in words:

    0 .. 63           header, at the indexes of _Word
    64 .. 64 + C      cancel words, one per seat, written by the coordinator: 0, or the sequence plus one
    then              the ring: _RING_PLACES events of _EVENT_WORDS each, the n-th at n % _RING_PLACES
"""

import enum
import mmap
import struct
from dataclasses import dataclass

from strata_coord.ipc.errors import InvariantError, ProtocolError
from strata_coord.ipc.messages import ByteCounters, StageClock

EVENT_RING = 4096  # events that can be read back
_RING_PLACES = EVENT_RING + 1  # the place being written is never one of those
_MAGIC = 0x53545241_54410001  # "STRATA", layout 1
_HEADER_WORDS = 64
_EVENT_WORDS = 6
_WORD_BYTES = 8
_EVENT = struct.Struct("=6q")
_CLOCK_FIELDS = tuple(StageClock.__dataclass_fields__)
_COUNTER_FIELDS = tuple(ByteCounters.__dataclass_fields__)


class StagePhase(enum.IntEnum):
    """What a stage is busy with. Each phase has its own deadline."""

    STARTING = 0  # before the assignment
    LOADING = 1
    READY = 2  # set up, no epoch yet
    WAITING_SUPER_CHUNK = 3  # nothing to do; may last for ever
    WAITING_ROWS = 4  # a super-chunk is known, its rows are not here
    EMBEDDING = 5
    ATTENTION = 6
    WAITING_EXPERTS = 7
    EXPERTS = 8
    WAITING_SLOT = 9
    HAND_OFF = 10
    HEAD = 11  # output norm, head and sampling
    ABORTING = 12
    STOPPING = 13
    FAILED = 14


class EventKind(enum.IntEnum):
    """What a span of the flight recorder was. value carries the number named."""

    PHASE = 0  # value: the StagePhase
    SUPER_CHUNK = 1  # value: rows
    ATTENTION_HALF = 2  # value: rows
    EXPERT_HALF = 3  # value: rows
    UPLOAD = 4  # value: bytes
    FILE_READ = 5  # value: bytes
    HAND_OFF = 6  # value: rows
    WAIT_SLOT = 7
    WAIT_ROWS = 8
    HEAD = 9  # value: rows
    LOAD = 10  # value: bytes
    EPOCH = 11  # value: the epoch
    LINK = 12  # value: the generation
    FAULT = 13


class _Word(enum.IntEnum):
    MAGIC = 0
    SEATS = 1
    PID = 2
    INCARNATION = 3
    PHASE = 4
    PHASE_STARTED_NS = 5
    PROGRESS = 6
    EPOCH = 7
    SUPER_CHUNK = 8
    LAYER = 9
    EVENTS = 10  # events written since the start
    CLOCK = 16
    COUNTERS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusSnapshot:
    """A reading of the header. -1 where a stage has no epoch, super-chunk or layer."""

    pid: int  # 0: the worker has not opened its page
    incarnation: int
    phase: StagePhase
    phase_started_ns: int
    progress: int  # grows whenever the walk or the loader gets anywhere
    epoch: int
    super_chunk: int
    layer: int
    clock: StageClock
    counters: ByteCounters
    events_written: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusEvent:
    """One span of the flight recorder, CLOCK_MONOTONIC."""

    start_ns: int
    end_ns: int
    kind: EventKind
    super_chunk: int  # -1: none
    layer: int  # -1: none
    value: int


def status_page_bytes(max_sequences: int) -> int:
    """Return the size of a page with one cancel word per seat."""
    return (_HEADER_WORDS + max_sequences + _RING_PLACES * _EVENT_WORDS) * _WORD_BYTES


class _Page:
    """The mapped words, and the places that depend on the number of seats."""

    def __init__(self, page: mmap.mmap, max_sequences: int) -> None:
        if len(page) < status_page_bytes(max_sequences):
            message = f"status page of {len(page)} bytes, {status_page_bytes(max_sequences)} are needed"
            raise ProtocolError(message)
        self.max_sequences = max_sequences
        self._map = page
        self._bytes = memoryview(page)
        self._words = self._bytes.cast("q")
        self._ring = _HEADER_WORDS + max_sequences

    def _cancel_word(self, seat: int) -> int:
        if not 0 <= seat < self.max_sequences:
            message = f"seat {seat} of {self.max_sequences}"
            raise InvariantError(message)
        return _HEADER_WORDS + seat

    def close(self) -> None:
        """Unmap the page."""
        self._words.release()
        self._bytes.release()
        self._map.close()


class StatusWriter(_Page):
    """The worker's side. Opening it wipes what an earlier incarnation left, except cancel words.

    page: a writable mapping of status_page_bytes(max_sequences) bytes, see host_memory.map_memfd. The walk's
    thread writes; another thread may write only what a method's docstring allows.
    """

    def __init__(
        self, page: mmap.mmap, max_sequences: int, *, pid: int, incarnation: int, now_ns: int
    ) -> None:
        super().__init__(page, max_sequences)
        words = self._words
        words[_Word.MAGIC] = 0  # a reader in between sees an unopened page
        for index in range(_Word.SEATS, _HEADER_WORDS):
            words[index] = 0
        self._events = 0
        words[_Word.SEATS] = max_sequences
        words[_Word.PID] = pid
        words[_Word.INCARNATION] = incarnation
        self.set_position(epoch=-1, super_chunk=-1, layer=-1)
        self.set_phase(StagePhase.STARTING, now_ns=now_ns)
        words[_Word.MAGIC] = _MAGIC

    def set_phase(self, phase: StagePhase, *, now_ns: int) -> None:
        """Enter a phase. The time goes in first: the new phase is never seen with an older start."""
        self._words[_Word.PHASE_STARTED_NS] = now_ns
        self._words[_Word.PHASE] = phase
        self._words[_Word.PROGRESS] += 1

    def set_position(self, *, epoch: int, super_chunk: int, layer: int) -> None:
        """Say where the walk is; -1 for none."""
        self._words[_Word.EPOCH] = epoch
        self._words[_Word.SUPER_CHUNK] = super_chunk
        self._words[_Word.LAYER] = layer

    def set_layer(self, layer: int) -> None:
        """Say which layer the walk is in."""
        self._words[_Word.LAYER] = layer

    def advance(self) -> None:
        """Show that work got somewhere inside a phase, so that its deadline starts anew."""
        self._words[_Word.PROGRESS] += 1

    def set_clock(self, clock: StageClock) -> None:
        """Publish the times since the stage was ready."""
        for index, name in enumerate(_CLOCK_FIELDS, _Word.CLOCK):
            self._words[index] = getattr(clock, name)

    def set_counters(self, counters: ByteCounters) -> None:
        """Publish the bytes since the stage was ready."""
        for index, name in enumerate(_COUNTER_FIELDS, _Word.COUNTERS):
            self._words[index] = getattr(counters, name)

    def record(
        self,
        kind: EventKind,
        *,
        start_ns: int,
        end_ns: int,
        super_chunk: int = -1,
        layer: int = -1,
        value: int = 0,
    ) -> None:
        """Append a span to the flight recorder. Only one thread of the worker may do so."""
        place = (self._ring + self._events % _RING_PLACES * _EVENT_WORDS) * _WORD_BYTES
        _EVENT.pack_into(self._bytes, place, start_ns, end_ns, kind, super_chunk, layer, value)
        self._events += 1
        self._words[_Word.EVENTS] = self._events  # after the event, so that a reader finds it written

    def is_cancelled(self, seat: int, sequence: int) -> bool:
        """Return whether the coordinator asked to cancel this sequence. Any thread may ask."""
        return self._words[self._cancel_word(seat)] == sequence + 1


class StatusReader(_Page):
    """The coordinator's side; also the writer of the cancel words. page must be writable."""

    def snapshot(self) -> StatusSnapshot | None:
        """Return what the header says, or None while the worker has not opened its page.

        Raises:
            ProtocolError: the page holds values that no worker writes.
        """
        words = self._words[:_HEADER_WORDS].tolist()
        if words[_Word.MAGIC] != _MAGIC:
            return None
        if words[_Word.SEATS] != self.max_sequences or words[_Word.PHASE] not in _PHASES:
            message = f"status page with {words[_Word.SEATS]} seats and phase {words[_Word.PHASE]}"
            raise ProtocolError(message)
        clock = words[_Word.CLOCK : _Word.CLOCK + len(_CLOCK_FIELDS)]
        counters = words[_Word.COUNTERS : _Word.COUNTERS + len(_COUNTER_FIELDS)]
        return StatusSnapshot(
            pid=words[_Word.PID],
            incarnation=words[_Word.INCARNATION],
            phase=StagePhase(words[_Word.PHASE]),
            phase_started_ns=words[_Word.PHASE_STARTED_NS],
            progress=words[_Word.PROGRESS],
            epoch=words[_Word.EPOCH],
            super_chunk=words[_Word.SUPER_CHUNK],
            layer=words[_Word.LAYER],
            clock=StageClock(**dict(zip(_CLOCK_FIELDS, clock, strict=True))),
            counters=ByteCounters(**dict(zip(_COUNTER_FIELDS, counters, strict=True))),
            events_written=words[_Word.EVENTS],
        )

    def events(self, since: int = 0) -> tuple[int, list[StatusEvent]]:
        """Return the number of events written so far, and those from number since on that are still held.

        Pass the number back as the next since. Events that the worker overwrote meanwhile are left out.
        """
        written = self._words[_Word.EVENTS]
        first = max(since, written - EVENT_RING, 0)
        copied = [bytes(self._event_bytes(number)) for number in range(first, written)]
        oldest_whole = self._words[_Word.EVENTS] - EVENT_RING
        whole = copied[max(0, oldest_whole - first) :]
        return written, [event for data in whole if (event := _event(data)) is not None]

    def cancel(self, seat: int, sequence: int) -> None:
        """Ask the worker to let the sequence's super-chunks pass without rows."""
        self._words[self._cancel_word(seat)] = sequence + 1

    def is_cancelled(self, seat: int, sequence: int) -> bool:
        """Return whether this sequence was cancelled."""
        return self._words[self._cancel_word(seat)] == sequence + 1

    def _event_bytes(self, number: int) -> memoryview:
        place = (self._ring + number % _RING_PLACES * _EVENT_WORDS) * _WORD_BYTES
        return self._bytes[place : place + _EVENT.size]


_PHASES = frozenset(StagePhase)
_KINDS = frozenset(EventKind)


def _event(data: bytes) -> StatusEvent | None:
    start_ns, end_ns, kind, super_chunk, layer, value = _EVENT.unpack(data)
    if kind not in _KINDS:
        return None
    return StatusEvent(
        start_ns=start_ns,
        end_ns=end_ns,
        kind=EventKind(kind),
        super_chunk=super_chunk,
        layer=layer,
        value=value,
    )
