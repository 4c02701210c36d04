import pytest

from strata_coord.coordinator.supervisor import PATIENT_PHASES, StageWatch, place
from strata_coord.ipc.messages import ByteCounters, StageClock
from strata_coord.ipc.status_page import StagePhase, StatusSnapshot

_CLOCK = StageClock(now_ns=0, busy_ns=0, wait_rows_ns=0, wait_experts_ns=0, wait_slot_ns=0, hand_off_ns=0)
_COUNTERS = ByteCounters(resident_hit=0, ram_to_device=0, file_read=0, rows_spilled=0, handed_off=0)


def snapshot(phase: StagePhase, progress: int, *, super_chunk: int = -1, layer: int = -1) -> StatusSnapshot:
    return StatusSnapshot(
        pid=1,
        incarnation=1,
        phase=phase,
        phase_started_ns=0,
        progress=progress,
        epoch=1,
        super_chunk=super_chunk,
        layer=layer,
        clock=_CLOCK,
        counters=_COUNTERS,
        events_written=0,
    )


def watch() -> StageWatch:
    made = StageWatch(hang_s=10, start_s=30)
    made.started(0, 100.0)
    return made


def test_links_have_a_time_of_their_own() -> None:
    checked = watch()
    assert checked.check_links([0, 1], 500.0) is None  # nobody was told to link
    checked.linking(100.0)
    assert checked.check_links([0, 1], 130.0) is None
    assert checked.check_links([], 140.0) is None
    assert checked.check_links([0, 1], 140.0) == "stage 0, 1 did not link within 40 s, the limit is 30 s"


def test_progress_starts_the_time_anew() -> None:
    checked = watch()
    experts = StagePhase.EXPERTS
    assert checked.check(0, snapshot(experts, 1, super_chunk=4, layer=7), 100) is None
    assert checked.check(0, snapshot(experts, 1), 110) is None
    assert checked.check(0, snapshot(experts, 2), 111) is None
    assert checked.check(0, snapshot(experts, 2), 121) is None
    stuck = checked.check(0, snapshot(experts, 2, super_chunk=4, layer=7), 121.5)
    assert stuck == "made no progress for 10 s while experts, layer 7, super-chunk 4"


@pytest.mark.parametrize("phase", sorted(PATIENT_PHASES))
def test_waiting_may_last_for_ever_and_counts_for_nothing_after(phase: StagePhase) -> None:
    checked = watch()
    for now in (100, 1000, 100_000):
        assert checked.check(0, snapshot(phase, 5), now) is None
    assert checked.check(0, snapshot(StagePhase.ATTENTION, 5), 100_009) is None
    assert checked.check(0, snapshot(StagePhase.ATTENTION, 5), 100_011) is not None


@pytest.mark.parametrize("is_open", [False, True])
def test_a_start_has_the_longer_limit(*, is_open: bool) -> None:
    checked = watch()
    page = snapshot(StagePhase.STARTING, 1) if is_open else None
    assert checked.check(0, page, 100) is None
    assert checked.check(0, page, 130) is None
    where = "while starting" if is_open else "before its first report"
    assert checked.check(0, page, 131) == f"made no progress for 31 s {where}"


def test_loading_has_the_limit_of_work() -> None:
    checked = watch()
    assert checked.check(0, snapshot(StagePhase.LOADING, 1), 100) is None
    assert checked.check(0, snapshot(StagePhase.LOADING, 1), 111) is not None


ROWS, SLOT, IDLE = StagePhase.WAITING_ROWS, StagePhase.WAITING_SLOT, StagePhase.WAITING_SUPER_CHUNK


@pytest.mark.parametrize(
    ("waited_for", "phases", "blamed"),
    [
        (0, [IDLE, ROWS, ROWS], 0),
        (1, [IDLE, ROWS, ROWS], 1),
        (0, [SLOT, ROWS, ROWS], 1),  # the stage after it gives no slot back
        (0, [SLOT, SLOT, IDLE], 2),
        (2, [IDLE, IDLE, SLOT], 2),
    ],
)
def test_a_stream_that_stands_still_while_all_wait_has_one_to_blame(
    waited_for: int, phases: list[StagePhase], blamed: int
) -> None:
    checked = watch()
    pages = [snapshot(phase, 3) for phase in phases]
    assert checked.check_stream(waited_for, pages, 100) is None
    assert checked.check_stream(waited_for, pages, 110) is None
    found = checked.check_stream(waited_for, pages, 111)
    assert found is not None
    assert found[0] == blamed
    assert found[1].startswith("made no progress for 11 s while waiting ")


def test_a_stream_that_moves_anywhere_or_is_empty_is_not_stuck() -> None:
    checked = watch()
    for step in range(5):
        pages = [snapshot(IDLE, 3), snapshot(ROWS, step)]
        assert checked.check_stream(1, pages, 100 + 20 * step) is None
    assert checked.check_stream(None, pages, 1000) is None
    assert checked.check_stream(1, pages, 2000) is None  # a prompt after a long pause starts at nought
    assert checked.check_stream(1, pages, 2011) is not None


def test_a_place_is_named_as_far_as_it_is_known() -> None:
    assert place(None) == "before its first report"
    assert place(snapshot(StagePhase.WAITING_SUPER_CHUNK, 1)) == "while waiting super chunk"
    assert place(snapshot(StagePhase.HEAD, 1, super_chunk=0, layer=0)) == "while head, layer 0, super-chunk 0"
