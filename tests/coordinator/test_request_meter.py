import pytest

from strata_coord.coordinator.request_meter import (
    RequestMeter,
    RoutingCounts,
    StageReading,
    idle_until,
    needed_bytes_once,
)
from strata_coord.ipc.messages import ByteCounters, StageClock


def clock(now: int, busy: int, rows: int) -> StageClock:
    return StageClock(
        now_ns=now, busy_ns=busy, wait_rows_ns=rows, wait_experts_ns=0, wait_slot_ns=0, hand_off_ns=0
    )


def counters(moved: int) -> ByteCounters:
    return ByteCounters(
        resident_hit=1, ram_to_device=moved, file_read=2 * moved, rows_spilled=0, handed_off=0
    )


def reading(now: int, busy: int, rows: int, moved: int) -> StageReading:
    return StageReading(clock=clock(now, busy, rows), counters=counters(moved))


def test_an_idle_stage_is_charged_nothing_from_before_the_request() -> None:
    assert idle_until(clock(100, 40, 60), 250) == clock(250, 40, 210)
    assert idle_until(clock(100, 40, 60), 90) == clock(100, 40, 60)  # it reported after acceptance


def test_figures_are_the_differences_of_both_stages() -> None:
    routing: list[RoutingCounts] = [((1, 2), (3, 4)), ((5, 6),)]
    meter = RequestMeter(
        accepted_ns=1000, base=[reading(900, 500, 400, 70), reading(1100, 600, 500, 5)], routing=routing
    )
    assert not meter.is_complete
    meter.prompt_read(1, reading(2100, 1500, 600, 25), ((6, 6),))
    assert not meter.is_complete
    meter.prompt_read(0, reading(1900, 1300, 600, 100), ((1, 5), (4, 4)))
    meter.first_token(2_000_001_000)
    assert meter.is_complete
    figures = meter.figures()
    assert figures.ttft_s == 2.0
    assert figures.clocks == (clock(900, 800, 100), clock(1000, 900, 100))
    assert [part.ram_to_device for part in figures.counters] == [30, 20]
    assert [part.file_read for part in figures.counters] == [60, 40]
    assert figures.expert_bytes_moved == 50
    assert figures.routed == (((0, 3), (1, 0)), ((1, 0),))
    for part in figures.clocks:
        assert part.busy_ns + part.wait_rows_ns == part.now_ns


def test_routing_counts_run_over_without_harm() -> None:
    meter = RequestMeter(accepted_ns=0, base=[reading(0, 0, 0, 0)], routing=[((2**32 - 3, 0),)])
    meter.prompt_read(0, reading(1, 1, 0, 0), ((4, 0),))
    assert meter.figures().routed == (((7, 0),),)


@pytest.mark.parametrize(
    ("upload", "expected"),
    [
        ("stream-all", 2 * 10 + 1 * 100 + 3 * 1000),
        ("routed-only", 1 * 10 + 0 * 100 + 1 * 1000),
    ],
)
def test_bytes_once_come_from_residency_and_routing(upload: str, expected: int) -> None:
    once = needed_bytes_once(
        upload=upload,  # type: ignore[arg-type]
        first_layers=[0, 2],
        resident=[[(0,), (1, 2)], [()]],
        routed=[((9, 1, 0), (0, 5, 5)), ((0, 0, 8),)],
        blob_bytes={0: 10, 1: 100, 2: 1000},
    )
    assert once == expected
