import itertools

import pytest
from status_pages import Page

from strata_coord.ipc.messages import Segment, SuperChunk
from strata_coord.ipc.status_page import EventKind, StagePhase

SUPER_CHUNK = SuperChunk(
    epoch=3,
    index=17,
    operations=(),
    segments=(Segment(sequence=1, seat=0, first_position=0, count=40),),
    sub_chunk_tokens=8,
    slot_rows=8,
    upload="stream-all",
)


def test_a_super_chunk_on_the_status_page() -> None:
    routing = {layer: memoryview(bytearray(16)).cast("I") for layer in (4, 5)}
    page = Page(routing=routing)
    page.reporter.begin(SUPER_CHUNK)
    for layer in (4, 5):
        page.reporter.attention_half(layer)
        seen = page.reader.snapshot()
        assert seen is not None
        assert (seen.epoch, seen.super_chunk, seen.layer, seen.phase) == (3, 17, layer, StagePhase.ATTENTION)
        page.reporter.expert_half(layer)
        seen = page.reader.snapshot()
        assert seen is not None
        assert seen.phase == StagePhase.EXPERTS
        page.counters.add(ram_to_device=100)
        page.reporter.layer_done(layer, (0, 3, 0, layer))
    seen = page.reader.snapshot()
    assert seen is not None
    assert seen.counters.ram_to_device == 200
    assert seen.clock.now_ns > 0
    assert {layer: row.tolist() for layer, row in routing.items()} == {4: [0, 3, 0, 4], 5: [0, 3, 0, 5]}
    _, events = page.reader.events()
    assert [(event.kind, event.layer, event.super_chunk, event.value) for event in events] == [
        (kind, layer, 17, 40)
        for layer in (4, 5)
        for kind in (EventKind.ATTENTION_HALF, EventKind.EXPERT_HALF)
    ]
    for event, following in itertools.pairwise(events):
        assert event.start_ns <= event.end_ns <= following.start_ns


def test_waiting_shows_no_position() -> None:
    page = Page(routing={})
    page.reporter.begin(SUPER_CHUNK)
    page.reporter.layer = 5
    page.reporter.waiting()
    seen = page.reader.snapshot()
    assert seen is not None
    assert (seen.epoch, seen.super_chunk, seen.layer) == (-1, -1, -1)
    assert seen.phase == StagePhase.WAITING_SUPER_CHUNK
    assert (page.reporter.super_chunk, page.reporter.layer) == (-1, -1)


def test_a_span_has_the_phase_for_its_length_and_leaves_an_event() -> None:
    page = Page()
    page.reporter.begin(SUPER_CHUNK)
    with page.reporter.span(EventKind.WAIT_SLOT, StagePhase.WAITING_SLOT, value=5):
        seen = page.reader.snapshot()
        assert seen is not None
        assert seen.phase == StagePhase.WAITING_SLOT
        assert page.reader.events()[1] == []
    _, (event,) = page.reader.events()
    assert (event.kind, event.super_chunk, event.value) == (EventKind.WAIT_SLOT, 17, 5)


def test_a_span_that_fails_leaves_the_phase_that_it_failed_in() -> None:
    page = Page()

    def fail() -> None:
        with page.reporter.span(EventKind.WAIT_ROWS, StagePhase.WAITING_ROWS):
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    seen = page.reader.snapshot()
    assert seen is not None
    assert seen.phase == StagePhase.WAITING_ROWS


def test_parts_of_a_half_layer_and_the_head_are_progress() -> None:
    page = Page()
    page.reporter.attention_half(0)
    seen = [page.reader.snapshot()]
    for step in (page.reporter.advance, page.reporter.head, page.reporter.advance):
        step()
        seen.append(page.reader.snapshot())
    assert [later.progress - seen[0].progress for later in seen if later and seen[0]] == [0, 1, 2, 3]
    assert [one.phase.name for one in seen if one] == ["ATTENTION", "ATTENTION", "HEAD", "HEAD"]
