"""Turns the stages' flight recorders into a Chrome trace, the file of launch --trace. Pure.

Opens in Perfetto or chrome://tracing. A process is a stage; a thread is a lane, on which spans never overlap
(viewers draw overlapping spans of one thread as nested, which would lie). Times are CLOCK_MONOTONIC of one
host, in microseconds since the earliest span. Flow arrows lead from a hand-off to the rows' arrival.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from strata_coord.coordinator.printable import printable
from strata_coord.coordinator.telemetry import Named, words

JsonObject = dict[str, object]

NS_PER_US: Final = 1000
HAND_OFF: Final = "HAND_OFF"
ARRIVAL: Final = "WAIT_ROWS"  # its end is the moment the rows were there

# Lane of each kind of span, in the order of drawing. Other kinds get lanes of their own after these.
LANES: Final = {
    "SUPER_CHUNK": "super-chunk",
    "PHASE": "phase",
    "ATTENTION_HALF": "attention",
    "EXPERT_HALF": "experts",
    "HEAD": "head",
    "UPLOAD": "upload",
    "FILE_READ": "file read",
    "LOAD": "load",
    "HAND_OFF": "hand-off",
    "WAIT_ROWS": "wait",
    "WAIT_SLOT": "wait",
    "EPOCH": "control",
    "LINK": "control",
    "FAULT": "control",
}
VALUES: Final = {
    "SUPER_CHUNK": "rows",
    "ATTENTION_HALF": "rows",
    "EXPERT_HALF": "rows",
    "HEAD": "rows",
    "HAND_OFF": "rows",
    "UPLOAD": "bytes",
    "FILE_READ": "bytes",
    "LOAD": "bytes",
    "EPOCH": "epoch",
    "LINK": "generation",
}


class Span(Protocol):
    """One event of a flight recorder; ipc/status_page.py has the record itself."""

    @property
    def start_ns(self) -> int:
        """CLOCK_MONOTONIC."""

    @property
    def end_ns(self) -> int:
        """CLOCK_MONOTONIC, not before start_ns."""

    @property
    def kind(self) -> Named:
        """What it was."""

    @property
    def super_chunk(self) -> int:
        """Index in the epoch; -1: none."""

    @property
    def layer(self) -> int:
        """The layer; -1: none."""

    @property
    def value(self) -> int:
        """The number that VALUES names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTrace:
    """The spans of one stage, in any order."""

    stage: int
    title: str  # for the viewer's list, e.g. "stage 0: layers 0-23 on cpu"
    spans: Sequence[Span]


def chrome_trace(stages: Sequence[StageTrace]) -> JsonObject:
    """Return the trace as a JSON object. Without spans it is a valid, empty trace."""
    spans = [span for stage in stages for span in stage.spans]
    origin_ns = min((span.start_ns for span in spans), default=0)
    events: list[JsonObject] = []
    placed = {stage.stage: _Placed(stage, origin_ns) for stage in stages}
    for stage in placed.values():
        events.extend(stage.metadata())
        events.extend(stage.complete_events())
    events.extend(_arrows(placed))
    return {"displayTimeUnit": "ms", "traceEvents": events}


class _Placed:
    """A stage's spans, each on the first row of its lane that is free at its start."""

    def __init__(self, trace: StageTrace, origin_ns: int) -> None:
        self.trace = trace
        self.origin_ns = origin_ns
        self.thread_names: list[str] = []
        self.spans = sorted(trace.spans, key=lambda span: (span.start_ns, span.end_ns))
        names = list(dict.fromkeys(LANES.values()))
        names += sorted({_lane(span.kind) for span in self.spans} - set(names))
        rows: dict[str, list[list[Span]]] = defaultdict(list)
        row_of: dict[int, tuple[str, int]] = {}
        for number, span in enumerate(self.spans):
            lane = rows[_lane(span.kind)]
            index = next((i for i, row in enumerate(lane) if row[-1].end_ns <= span.start_ns), len(lane))
            if index == len(lane):
                lane.append([])
            lane[index].append(span)
            row_of[number] = (_lane(span.kind), index)
        threads = {}
        for name in names:
            for index in range(len(rows[name])):
                threads[name, index] = len(self.thread_names)
                self.thread_names.append(name if index == 0 else f"{name} {index + 1}")
        self.thread_of = [threads[row_of[number]] for number in range(len(self.spans))]

    def microseconds(self, time_ns: int) -> float:
        return (time_ns - self.origin_ns) / NS_PER_US

    def metadata(self) -> Iterable[JsonObject]:
        pid = self.trace.stage
        yield _metadata("process_name", pid, 0, {"name": printable(self.trace.title)})
        yield _metadata("process_sort_index", pid, 0, {"sort_index": pid})
        for thread, name in enumerate(self.thread_names):
            yield _metadata("thread_name", pid, thread, {"name": name})
            yield _metadata("thread_sort_index", pid, thread, {"sort_index": thread})

    def complete_events(self) -> Iterable[JsonObject]:
        for span, thread in zip(self.spans, self.thread_of, strict=True):
            arguments: JsonObject = {}
            if span.super_chunk >= 0:
                arguments["super_chunk"] = span.super_chunk
            if span.layer >= 0:
                arguments["layer"] = span.layer
            if (label := VALUES.get(span.kind.name)) is not None:
                arguments[label] = span.value
            yield {
                "name": words(span.kind) if span.layer < 0 else f"{words(span.kind)} {span.layer}",
                "cat": _lane(span.kind),
                "ph": "X",
                "pid": self.trace.stage,
                "tid": thread,
                "ts": self.microseconds(span.start_ns),
                "dur": max(span.end_ns - span.start_ns, 0) / NS_PER_US,
                "args": arguments,
            }


def _arrows(placed: dict[int, _Placed]) -> Iterable[JsonObject]:
    """Join the n-th hand-off of a super-chunk to the next stage's n-th arrival of the same super-chunk.

    Where one side's ring has forgotten its oldest events, a span is without a partner: no arrow then.
    """
    for stage, sender in sorted(placed.items()):
        receiver = placed.get(stage + 1)
        if receiver is None:
            continue
        arrivals: dict[int, deque[tuple[Span, int]]] = defaultdict(deque)
        for span, thread in zip(receiver.spans, receiver.thread_of, strict=True):
            if span.kind.name == ARRIVAL:
                arrivals[span.super_chunk].append((span, thread))
        for number, (span, thread) in enumerate(zip(sender.spans, sender.thread_of, strict=True)):
            waiting = arrivals[span.super_chunk] if span.kind.name == HAND_OFF else None
            if not waiting:
                continue
            arrival, arrival_thread = waiting.popleft()
            flow = {"name": "rows", "cat": "hand-off", "id": f"{stage}.{number}"}
            # A viewer binds an arrow to the span that encloses its time: an end that is exactly the span's
            # own end still counts as inside, a nanosecond later would not.
            yield {**flow, "ph": "s", "pid": stage, "tid": thread, "ts": sender.microseconds(span.start_ns)}
            end_us = receiver.microseconds(max(arrival.end_ns, span.start_ns))
            yield {**flow, "ph": "f", "bp": "e", "pid": stage + 1, "tid": arrival_thread, "ts": end_us}


def _lane(kind: Named) -> str:
    return LANES.get(kind.name, words(kind))


def _metadata(name: str, pid: int, tid: int, arguments: JsonObject) -> JsonObject:
    return {"name": name, "ph": "M", "pid": pid, "tid": tid, "args": arguments}
