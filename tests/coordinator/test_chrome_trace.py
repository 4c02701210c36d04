import json
from itertools import groupby, pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from strata_coord.coordinator.chrome_trace import StageTrace, chrome_trace
from strata_coord.ipc.status_page import EventKind, StatusEvent


def span(
    kind: EventKind, start_ns: int, end_ns: int, *, super_chunk: int = -1, layer: int = -1
) -> StatusEvent:
    return StatusEvent(
        start_ns=start_ns, end_ns=end_ns, kind=kind, super_chunk=super_chunk, layer=layer, value=64
    )


def trace(*stages: list[StatusEvent]) -> list[dict[str, Any]]:
    made = chrome_trace(
        [
            StageTrace(stage=number, title=f"stage {number}", spans=spans)
            for number, spans in enumerate(stages)
        ]
    )
    events: list[dict[str, Any]] = json.loads(json.dumps(made, allow_nan=False))["traceEvents"]
    return events


def test_an_empty_trace_is_valid() -> None:
    assert chrome_trace([]) == {"displayTimeUnit": "ms", "traceEvents": []}
    assert {event["ph"] for event in trace([])} == {"M"}


def test_times_are_microseconds_since_the_first_span_of_any_stage() -> None:
    events = trace(
        [span(EventKind.HEAD, 5_000_000, 7_000_000)],
        [span(EventKind.EXPERT_HALF, 2_000_000, 4_500_000, layer=3)],
    )
    spans = {event["name"]: event for event in events if event["ph"] == "X"}
    assert (spans["expert-half 3"]["ts"], spans["expert-half 3"]["dur"]) == (0, 2500)
    assert spans["head"]["ts"] == 3000
    assert spans["expert-half 3"]["pid"] == 1
    assert spans["expert-half 3"]["args"] == {"layer": 3, "rows": 64}


def test_every_thread_has_a_name() -> None:
    events = trace([span(kind, 0, 10) for kind in EventKind])
    named = {event["tid"] for event in events if event["name"] == "thread_name"}
    assert named >= {event["tid"] for event in events if event["ph"] == "X"}


def test_an_arrow_leads_from_each_hand_off_to_its_arrival() -> None:
    sender = [
        span(EventKind.HAND_OFF, 100, 200, super_chunk=0),
        span(EventKind.HAND_OFF, 300, 400, super_chunk=0),
        span(EventKind.HAND_OFF, 500, 600, super_chunk=1),
        span(EventKind.HAND_OFF, 700, 800, super_chunk=2),
    ]
    receiver = [
        span(EventKind.WAIT_ROWS, 0, 250, super_chunk=0),
        span(EventKind.WAIT_ROWS, 260, 450, super_chunk=0),
        span(EventKind.WAIT_ROWS, 460, 650, super_chunk=1),
    ]
    arrows = [event for event in trace(sender, receiver) if event["ph"] in "sf"]
    times = {
        number: [event["ts"] for event in pair] for number, pair in groupby(arrows, lambda event: event["id"])
    }
    assert list(times.values()) == [[0.1, 0.25], [0.3, 0.45], [0.5, 0.65]]
    assert [(event["ph"], event["pid"]) for event in arrows] == [("s", 0), ("f", 1)] * 3


SPANS = st.lists(
    st.builds(
        lambda kind, start, length, chunk: span(kind, start, start + length, super_chunk=chunk),
        st.sampled_from(EventKind), st.integers(0, 500), st.integers(0, 100), st.integers(-1, 3),
    ),
    max_size=40,
)  # fmt: skip


@given(SPANS, SPANS)
def test_spans_of_one_thread_never_overlap_and_none_is_lost(
    first: list[StatusEvent], second: list[StatusEvent]
) -> None:
    events = trace(first, second)
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == len(first) + len(second)
    spans.sort(key=lambda event: (event["pid"], event["tid"], event["ts"]))
    for left, right in pairwise(spans):
        if (left["pid"], left["tid"]) == (right["pid"], right["tid"]):
            assert round((left["ts"] + left["dur"]) * 1000) <= round(right["ts"] * 1000)
    starts = {event["id"]: event["ts"] for event in events if event["ph"] == "s"}
    ends = {event["id"]: event["ts"] for event in events if event["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert all(starts[key] <= ends[key] for key in starts)
