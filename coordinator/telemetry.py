"""What the stages report, gathered into the state that the dashboard and the plain log draw. Pure.

Telemetry is told what happened and when (seconds of one monotonic clock, passed in) and answers with a frozen
DashboardState. It opens nothing, prints nothing and never asks for the time.
"""

from collections import deque
from dataclasses import dataclass, replace
from typing import Protocol

from strata_coord.ipc.messages import ByteCounters, StageClock, SuperChunkDone

WINDOW_S = 2.0  # shares are of the last two seconds: long enough to be steady, short enough to be "now"
NUM_NOTES = 4  # lines of news that the dashboard keeps
TAIL_CHARACTERS = 400  # of the answer, enough for the widest terminal's last line

NO_CLOCK = StageClock(now_ns=0, busy_ns=0, wait_rows_ns=0, wait_experts_ns=0, wait_slot_ns=0, hand_off_ns=0)
NO_BYTES = ByteCounters(resident_hit=0, ram_to_device=0, file_read=0, rows_spilled=0, handed_off=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFacts:
    """What is known of a stage before it runs, and does not change."""

    stage: int
    device: str
    numa_node: int  # -1: not bound
    binding: str
    first_layer: int
    last_layer: int  # exclusive
    device_bytes_planned: int


class Named(Protocol):
    """A member of an enum, seen from outside."""

    @property
    def name(self) -> str:
        """The member's name, in capitals."""


class Snapshot(Protocol):
    """What a stage's status page shows at one moment; ipc/status_page.py has the record itself."""

    @property
    def phase(self) -> Named:
        """What the stage is busy with."""

    @property
    def super_chunk(self) -> int:
        """Index in the epoch; -1: none."""

    @property
    def layer(self) -> int:
        """Where the walk is; -1: outside."""

    @property
    def clock(self) -> StageClock:
        """Times since the stage was ready."""

    @property
    def counters(self) -> ByteCounters:
        """Bytes since the stage was ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Parts of a span of a stage's time, each 0 to 1; they sum to 1, or are all 0 where no time passed."""

    busy: float = 0.0
    wait_rows: float = 0.0
    wait_experts: float = 0.0
    wait_slot: float = 0.0
    hand_off: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageView:
    """One stage as the dashboard shows it."""

    facts: StageFacts
    phase: str = "starting"
    super_chunk: int = 0  # of this request, from 1; 0: none yet
    layer: int = -1
    device_bytes_used: int = 0
    now: Shares = Shares()  # of the last WINDOW_S
    clock: StageClock = NO_CLOCK  # since the request began
    counters: ByteCounters = NO_BYTES  # since the request began


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestView:
    """The request in progress, or the last one."""

    prompt_tokens: int
    num_super_chunks: int
    mode: str
    predicted_ttft_s: float
    tokens_read: int = 0  # through all stages
    super_chunks_read: int = 0
    generated_tokens: int = 0
    elapsed_s: float = 0.0
    ttft_s: float | None = None
    ended: bool = False
    answer_tail: str = ""

    @property
    def read_tokens_per_s(self) -> float:
        """Prompt tokens read a second so far; 0 before the first super-chunk is through."""
        span_s = self.elapsed_s if self.ttft_s is None else self.ttft_s
        return self.tokens_read / span_s if span_s > 0 else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens a second after the first; 0 before the second token."""
        if self.ttft_s is None or self.elapsed_s <= self.ttft_s:
            return 0.0
        return max(self.generated_tokens - 1, 0) / (self.elapsed_s - self.ttft_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class DashboardState:
    """Everything a display needs, at one moment."""

    stages: tuple[StageView, ...]
    request: RequestView | None
    bound_by: str  # what keeps it from going faster now
    notes: tuple[str, ...]


def words(member: Named) -> str:
    """Return an enum member's name as it is shown: WAITING_ROWS is waiting-rows."""
    return member.name.lower().replace("_", "-")


def shares_between(earlier: StageClock, later: StageClock) -> Shares:
    """Return the parts of the time between two readings of one stage's clock."""
    spent = clock_between(earlier, later)
    total = (
        spent.busy_ns + spent.wait_rows_ns + spent.wait_experts_ns + spent.wait_slot_ns + spent.hand_off_ns
    )
    if total <= 0:
        return Shares()
    return Shares(
        busy=spent.busy_ns / total,
        wait_rows=spent.wait_rows_ns / total,
        wait_experts=spent.wait_experts_ns / total,
        wait_slot=spent.wait_slot_ns / total,
        hand_off=spent.hand_off_ns / total,
    )


def clock_between(earlier: StageClock, later: StageClock) -> StageClock:
    """Return the time spent between two readings. now_ns becomes the length of the span.

    A part never comes out negative: the words of a status page are not read at one instant.
    """
    return StageClock(
        now_ns=max(later.now_ns - earlier.now_ns, 0),
        busy_ns=max(later.busy_ns - earlier.busy_ns, 0),
        wait_rows_ns=max(later.wait_rows_ns - earlier.wait_rows_ns, 0),
        wait_experts_ns=max(later.wait_experts_ns - earlier.wait_experts_ns, 0),
        wait_slot_ns=max(later.wait_slot_ns - earlier.wait_slot_ns, 0),
        hand_off_ns=max(later.hand_off_ns - earlier.hand_off_ns, 0),
    )


def bytes_between(earlier: ByteCounters, later: ByteCounters) -> ByteCounters:
    """Return the bytes moved between two readings."""
    return ByteCounters(
        resident_hit=max(later.resident_hit - earlier.resident_hit, 0),
        ram_to_device=max(later.ram_to_device - earlier.ram_to_device, 0),
        file_read=max(later.file_read - earlier.file_read, 0),
        rows_spilled=max(later.rows_spilled - earlier.rows_spilled, 0),
        handed_off=max(later.handed_off - earlier.handed_off, 0),
    )


def bound_by(stages: tuple[StageView, ...], request: RequestView | None) -> str:
    """Say what limits the pace now: the stage that waits least for its neighbours, and its largest part."""
    loading = [view.facts.stage for view in stages if view.phase in {"starting", "loading"}]
    if loading:
        return f"loading stage {', '.join(map(str, loading))}"
    if request is None or request.ended:
        return "nothing to do"
    measured = [view for view in stages if view.now != Shares()]
    if not measured:
        return "not measured yet"
    slowest = min(measured, key=lambda view: (view.now.wait_rows + view.now.wait_slot, view.facts.stage))
    parts = {
        "compute": slowest.now.busy,
        "expert uploads": slowest.now.wait_experts,
        "hand-off": slowest.now.hand_off,
    }
    part = max(parts, key=lambda name: parts[name])
    return f"{part} of stage {slowest.facts.stage}"


class _Track:
    """The readings of one stage: what a view and its shares are computed from."""

    def __init__(self, facts: StageFacts) -> None:
        self.view = StageView(facts=facts)
        self.readings: deque[tuple[float, StageClock]] = deque()
        self.base_clock = NO_CLOCK
        self.base_bytes = NO_BYTES
        self.last_clock = NO_CLOCK
        self.last_bytes = NO_BYTES

    def observe(self, clock: StageClock, counters: ByteCounters, now_s: float) -> None:
        if clock.now_ns < self.last_clock.now_ns:  # a report that was on its way while the page was read
            return
        self.last_clock, self.last_bytes = clock, counters
        self.readings.append((now_s, clock))
        while len(self.readings) > 2 and now_s - self.readings[1][0] >= WINDOW_S:
            self.readings.popleft()

    def restart(self) -> None:
        """Count from zero, as a stage does that has become ready."""
        self.readings.clear()
        self.base_clock = self.last_clock = NO_CLOCK
        self.base_bytes = self.last_bytes = NO_BYTES

    def rebase(self) -> None:
        self.base_clock, self.base_bytes = self.last_clock, self.last_bytes
        self.view = replace(self.view, super_chunk=0, layer=-1)

    def current(self) -> StageView:
        now = shares_between(self.readings[0][1], self.readings[-1][1]) if self.readings else Shares()
        return replace(
            self.view,
            now=now,
            clock=clock_between(self.base_clock, self.last_clock),
            counters=bytes_between(self.base_bytes, self.last_bytes),
        )


class Telemetry:
    """Gathers readings and events. One owner; not thread-safe, since state() hands out frozen records."""

    def __init__(self, stages: tuple[StageFacts, ...]) -> None:
        """Begin with stages that have not reported yet."""
        self._tracks = {facts.stage: _Track(facts) for facts in stages}
        self._request: RequestView | None = None
        self._began_s = 0.0
        self._first_index = 0
        self._sizes: tuple[int, ...] = ()
        self._notes: deque[str] = deque(maxlen=NUM_NOTES)

    def stage_ready(
        self, stage: int, *, device: str, binding: str, numa_node: int, device_bytes: int
    ) -> None:
        """Take over what a stage says of itself: the device it got and the binding that holds."""
        track = self._tracks[stage]
        track.restart()
        facts = replace(track.view.facts, device=device, binding=binding, numa_node=numa_node)
        track.view = replace(track.view, facts=facts, phase="ready", device_bytes_used=device_bytes)

    def begin_request(
        self,
        *,
        super_chunks: tuple[int, ...],
        first_index: int,
        mode: str,
        predicted_ttft_s: float,
        now_s: float,
    ) -> None:
        """Start counting for a prompt.

        Args:
            super_chunks: their sizes in tokens, in order.
            first_index: the index of the first of them in the epoch.
            mode: of the plan.
            predicted_ttft_s: of the plan.
            now_s: when the prompt was accepted.
        """
        self._began_s, self._first_index, self._sizes = now_s, first_index, super_chunks
        self._request = RequestView(
            prompt_tokens=sum(super_chunks),
            num_super_chunks=len(super_chunks),
            mode=mode,
            predicted_ttft_s=predicted_ttft_s,
        )
        for track in self._tracks.values():
            track.rebase()

    def observe(self, stage: int, snapshot: Snapshot, now_s: float) -> None:
        """Take a reading of a stage's status page."""
        track = self._tracks[stage]
        track.observe(snapshot.clock, snapshot.counters, now_s)
        ordinal = snapshot.super_chunk - self._first_index + 1
        known = self._request is not None and 0 < ordinal <= len(self._sizes)
        track.view = replace(
            track.view,
            phase=words(snapshot.phase),
            super_chunk=ordinal if known else track.view.super_chunk,
            layer=snapshot.layer,
        )

    def super_chunk_done(self, done: SuperChunkDone, now_s: float) -> None:
        """Take a stage's report; the last stage's moves the prompt's progress."""
        track = self._tracks[done.stage]
        track.observe(done.clock, done.counters, now_s)
        if self._request is None or done.stage != max(self._tracks):
            return
        read = done.index - self._first_index + 1
        if 0 < read <= len(self._sizes):
            self._request = replace(
                self._request,
                super_chunks_read=read,
                tokens_read=sum(self._sizes[:read]),
                elapsed_s=now_s - self._began_s,
            )

    def token(self, text: str, now_s: float) -> None:
        """Count one generated token; text is what it added to the answer, possibly nothing."""
        if self._request is None:
            return
        elapsed_s = now_s - self._began_s
        self._request = replace(
            self._request,
            generated_tokens=self._request.generated_tokens + 1,
            ttft_s=elapsed_s if self._request.ttft_s is None else self._request.ttft_s,
            elapsed_s=elapsed_s,
            answer_tail=(self._request.answer_tail + text)[-TAIL_CHARACTERS:],
        )

    def show_text(self, text: str) -> None:
        """Append a piece of the answer to the tail that displays show."""
        if self._request is not None:
            tail = (self._request.answer_tail + text)[-TAIL_CHARACTERS:]
            self._request = replace(self._request, answer_tail=tail)

    def end_request(self, now_s: float) -> None:
        """Freeze the request's figures; they stay on show until the next one."""
        if self._request is not None and not self._request.ended:
            self._request = replace(self._request, ended=True, elapsed_s=now_s - self._began_s)

    def note(self, text: str) -> None:
        """Keep a line of news: a decline, a restart, a choice."""
        self._notes.append(text)

    def state(self, now_s: float) -> DashboardState:
        """Return everything a display needs, at this moment."""
        request = self._request
        if request is not None and not request.ended:
            request = replace(request, elapsed_s=now_s - self._began_s)
        stages = tuple(self._tracks[stage].current() for stage in sorted(self._tracks))
        return DashboardState(
            stages=stages, request=request, bound_by=bound_by(stages, request), notes=tuple(self._notes)
        )
