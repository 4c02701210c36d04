"""Every control message as a frozen dataclass, and the records they carry.

The wire form is codec.py's business; order, versions and deadlines are in PROTOCOL.md. Messages carry
numbers, short strings and small tuples only: bulk data (token ids, assignments, logits) lies in memfds and
files whose descriptors travelled once over the worker's inherited socket pair.

Times are nanoseconds of CLOCK_MONOTONIC, which all processes of one host share.
"""

from dataclasses import dataclass
from typing import Literal

PROTOCOL_VERSION = 1

NOT_FINITE = -1  # the token of a row whose logits are not finite: the request fails, the stage goes on

UploadPolicy = Literal["stream-all", "routed-only"]
OperationKind = Literal["create", "drop", "truncate", "snapshot", "restore", "drop-snapshot"]
Direction = Literal["in", "out"]
Route = Literal["device", "host"]  # where a link's slots lie: the receiver's device memory, or a memfd


# --- records inside messages -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSettings:
    """How the last stage turns logits into a token. temperature 0 is greedy; ties go to the lowest id."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit
    min_p: float = 0.0
    seed: int = 0  # a draw is a function of seed and position, never of history


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotMark:
    """Where the state of a segment's sequence is copied, by each layer as its attention half comes by.

    The snapshot counts once the super-chunk has finished on all stages.
    """

    snapshot: int  # unique in a launch, from 1
    position: int  # rows that it covers, first_position < position <= first_position + count


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A run of consecutive tokens of one sequence inside a super-chunk.

    The token ids of positions [first_position, first_position + count) lie in the launch's token table
    at row seat. A segment with sample set asks the last stage for the token that follows its last row.
    """

    sequence: int  # unique in a launch
    seat: int  # row of the token table and of the cancel words, 0 <= seat < max_sequences
    first_position: int
    count: int
    sample: SamplingSettings | None = None
    logits: bool = False  # write the logits of every row to the sequence's logits file
    snapshots: tuple[SnapshotMark, ...] = ()  # by rising position


@dataclass(frozen=True, slots=True, kw_only=True)
class StateOperation:
    """A change of sequence state that every stage applies before the rows of its super-chunk.

    create         an empty state
    drop           the state is freed; snapshots of it stay
    truncate       the first position rows stay. A model with histories (recurrent state and the like) goes
                   back only to a snapshot of this sequence at position, to all rows or to none
    snapshot       the state is copied where it ends
    restore        a new sequence begins with the state of a snapshot
    drop-snapshot  the snapshot is freed; sequence is not looked at
    """

    kind: OperationKind
    sequence: int
    seat: int
    position: int = 0  # truncate
    snapshot: int = 0  # truncate (0: none), snapshot, restore, drop-snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class SuperChunk:
    """The rows that walk together through all layers: one record, sent to all stages alike."""

    epoch: int
    index: int  # position in the epoch's endless stream, from 0
    operations: tuple[StateOperation, ...]
    segments: tuple[Segment, ...]  # may be empty: then only the operations count
    sub_chunk_tokens: int  # c
    slot_rows: int  # rows per hand-off, a multiple of c
    upload: UploadPolicy

    @property
    def rows(self) -> int:
        """Rows of all segments."""
        return sum(segment.count for segment in self.segments)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledToken:
    """One token drawn by the last stage; position is the token's own place in its sequence."""

    sequence: int
    position: int
    token: int
    logprob: float  # natural log, of the unscaled distribution


@dataclass(frozen=True, slots=True, kw_only=True)
class NotFinite:
    """A sequence whose rows are NaN or infinite: its request fails, the others of the super-chunk go on."""

    sequence: int
    layer: int  # where it was seen first; -1: the rows came in like that, from the embedding or a stage


@dataclass(frozen=True, slots=True, kw_only=True)
class StageClock:
    """Where a stage's time went since it was ready; the parts sum to the wall time by construction."""

    now_ns: int
    busy_ns: int
    wait_rows_ns: int  # no super-chunk, or its rows are not here yet
    wait_experts_ns: int
    wait_slot_ns: int
    hand_off_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteCounters:
    """Bytes since the stage was ready, each counted at the place where the transfer is issued."""

    resident_hit: int  # expert bytes used where they already were
    ram_to_device: int  # expert bytes copied into the device's window
    file_read: int  # bytes read from the model's files
    rows_spilled: int
    handed_off: int


# --- stage -> coordinator ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """Sent by a stage as its first message, before torch is imported."""

    stage: int
    incarnation: int
    pid: int
    binding: str  # the rung that holds: "numactl", "self", "cpu-only" or "none"
    numa_node: int  # -1: not bound


@dataclass(frozen=True, slots=True, kw_only=True)
class StageReady:
    """Sent when the weights are loaded and everything that a prompt needs is allocated."""

    stage: int
    incarnation: int
    device: str
    device_bytes: int  # taken of the device's budget
    arena_bytes: int
    load_file_read: int
    load_seconds: float
    notes: tuple[str, ...] = ()  # what the stage had to do without, one line each; shown once


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotsReady:
    """The first answer to Relink "in" by the device route: the slots exist, and open under this handle."""

    stage: int
    incarnation: int
    link: int
    generation: int
    handle: bytes  # CUDA IPC memory handle, 64 bytes; empty: the device gives none


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkReady:
    """The answer to Relink: sockets and slots of the generation are in place, nothing is granted."""

    stage: int
    incarnation: int
    link: int
    generation: int
    direction: Direction


@dataclass(frozen=True, slots=True, kw_only=True)
class SuperChunkDone:
    """Sent by every stage when it has finished a super-chunk; the last one adds the tokens."""

    stage: int
    incarnation: int
    epoch: int
    index: int
    cancelled: bool  # passed as a hand-off without rows
    tokens: tuple[SampledToken, ...]
    clock: StageClock
    counters: ByteCounters
    not_finite: tuple[NotFinite, ...] = ()  # sequences that this stage gives up


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFailed:
    """Sent by a stage that cannot go on, just before it exits. Strings only."""

    stage: int
    incarnation: int
    kind: str  # the exception's class name
    text: str  # at most 1,000 characters
    trace: str  # at most 3,500 characters, the end of the traceback
    layer: int  # -1: outside the walk
    super_chunk: int  # -1: none


# --- coordinator -> stage ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Assign:
    """Tells a stage that its assignment lies in the setup memfd at [offset, offset + length)."""

    incarnation: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Relink:
    """Makes one side of a link ready for a new generation.

    By the host route its slot memfd came over the socket pair. By the device route the receiver allocates the
    slots and says SlotsReady, and the sender is told their handle here.
    """

    incarnation: int
    link: int  # link l joins stage l to stage l + 1
    generation: int
    direction: Direction  # "in": this stage receives; "out": it sends
    num_slots: int
    slot_rows: int
    slot_bytes: int
    route: Route = "host"
    handle: bytes = b""  # of the receiver's slots; direction "out" by the device route only


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginEpoch:
    """Opens an epoch on a stage that is in its initial state."""

    incarnation: int
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSuperChunk:
    """Appends a super-chunk to the stage's stream."""

    incarnation: int
    super_chunk: SuperChunk


@dataclass(frozen=True, slots=True, kw_only=True)
class Shutdown:
    """Ends the worker in an orderly way."""

    incarnation: int


# --- between neighbours, straight --------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """Receiver to sender: permission to fill one slot, once."""

    generation: int
    epoch: int
    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Put:
    """Sender to receiver: the slot is filled. hand_off counts through the epoch, from 0."""

    generation: int
    epoch: int
    hand_off: int
    slot: int
    super_chunk: int
    first_row: int  # within the super-chunk
    rows: int  # 0: the super-chunk was cancelled and passes without rows
    last: bool  # the super-chunk's final hand-off


@dataclass(frozen=True, slots=True, kw_only=True)
class Return:
    """Sender to receiver: the credit comes back unused."""

    generation: int
    epoch: int
    slot: int


ToCoordinator = Hello | StageReady | SlotsReady | LinkReady | SuperChunkDone | StageFailed
ToStage = Assign | Relink | BeginEpoch | RunSuperChunk | Shutdown
BetweenNeighbours = Grant | Put | Return
Message = ToCoordinator | ToStage | BetweenNeighbours
