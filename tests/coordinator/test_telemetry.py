from dataclasses import dataclass

import pytest

from strata_coord.coordinator import telemetry
from strata_coord.coordinator.telemetry import StageFacts, Telemetry
from strata_coord.ipc.messages import ByteCounters, StageClock, SuperChunkDone
from strata_coord.ipc.status_page import StagePhase


@dataclass(frozen=True)
class Snapshot:
    phase: StagePhase
    super_chunk: int
    layer: int
    clock: StageClock
    counters: ByteCounters


def clock(*, busy: int = 0, rows: int = 0, experts: int = 0, slot: int = 0, hand_off: int = 0) -> StageClock:
    """Return a clock whose parts are given in milliseconds."""
    parts = {
        "busy_ns": busy, "wait_rows_ns": rows, "wait_experts_ns": experts, "wait_slot_ns": slot,
        "hand_off_ns": hand_off,
    }  # fmt: skip
    return StageClock(now_ns=sum(parts.values()) * 10**6, **{name: ms * 10**6 for name, ms in parts.items()})


def moved(num_bytes: int) -> ByteCounters:
    return ByteCounters(resident_hit=1, ram_to_device=num_bytes, file_read=0, rows_spilled=0, handed_off=0)


def two_stages() -> Telemetry:
    return Telemetry(
        tuple(
            StageFacts(
                stage=stage, device="cpu", numa_node=-1, binding="none", first_layer=24 * stage,
                last_layer=24 * stage + 24, device_bytes_planned=64 << 20,
            )
            for stage in range(2)
        )
    )  # fmt: skip


def reading(stage_clock: StageClock, *, index: int = 5, layer: int = 3, num_bytes: int = 0) -> Snapshot:
    return Snapshot(
        phase=StagePhase.WAITING_EXPERTS,
        super_chunk=index,
        layer=layer,
        clock=stage_clock,
        counters=moved(num_bytes),
    )


def done(stage: int, index: int, stage_clock: StageClock) -> SuperChunkDone:
    return SuperChunkDone(
        stage=stage, incarnation=0, epoch=1, index=index, cancelled=False, tokens=(), clock=stage_clock,
        counters=moved(0),
    )  # fmt: skip


def begin(observed: Telemetry, *, now_s: float = 100.0) -> None:
    observed.begin_request(
        super_chunks=(64, 64, 32), first_index=5, mode="layer-major", predicted_ttft_s=3.0, now_s=now_s
    )


def test_progress_counts_super_chunks_of_the_last_stage_only() -> None:
    observed = two_stages()
    begin(observed)
    observed.super_chunk_done(done(0, 5, clock(busy=1)), 101.0)
    request = observed.state(101.0).request
    assert request is not None
    assert request.tokens_read == 0
    observed.super_chunk_done(done(1, 5, clock(busy=1)), 102.0)
    observed.super_chunk_done(done(1, 6, clock(busy=2)), 104.0)
    request = observed.state(104.0).request
    assert request is not None
    assert (request.tokens_read, request.super_chunks_read) == (128, 2)
    assert request.read_tokens_per_s == pytest.approx(128 / 4)


def test_super_chunks_of_other_requests_do_not_count() -> None:
    observed = two_stages()
    begin(observed)
    for index in (4, 8):  # the one before and the first decode step after the prompt
        observed.super_chunk_done(done(1, index, clock(busy=index)), 101.0)
    request = observed.state(101.0).request
    assert request is not None
    assert request.super_chunks_read == 0


def test_shares_are_of_the_recent_past() -> None:
    observed = two_stages()
    observed.observe(0, reading(clock(busy=60_000)), 100.0)
    observed.observe(0, reading(clock(busy=60_250, experts=750)), 101.0)
    now = observed.state(101.0).stages[0].now
    assert (now.busy, now.wait_experts) == pytest.approx((0.25, 0.75))
    for step in range(1, 8):  # long after the change only the new behaviour shows
        observed.observe(0, reading(clock(busy=60_250, experts=750 + 500 * step)), 101.0 + 0.5 * step)
    assert observed.state(104.5).stages[0].now.wait_experts == pytest.approx(1.0)


def test_clocks_and_bytes_are_those_of_the_request() -> None:
    observed = two_stages()
    observed.observe(0, reading(clock(busy=500, rows=200), num_bytes=1000), 99.0)
    begin(observed)
    observed.observe(0, reading(clock(busy=800, rows=250), num_bytes=1700), 101.0)
    view = observed.state(101.0).stages[0]
    assert (view.clock.busy_ns, view.clock.wait_rows_ns) == (300 * 10**6, 50 * 10**6)
    assert view.clock.now_ns == 350 * 10**6
    assert view.counters.ram_to_device == 700
    assert view.counters.resident_hit == 0


def test_a_restarted_stage_counts_from_zero() -> None:
    observed = two_stages()
    observed.observe(0, reading(clock(busy=5000), num_bytes=9000), 99.0)
    begin(observed)
    observed.stage_ready(0, device="cpu", binding="off", numa_node=-1, device_bytes=1)
    observed.observe(0, reading(clock(busy=40), num_bytes=100), 101.0)
    view = observed.state(101.0).stages[0]
    assert (view.clock.busy_ns, view.counters.ram_to_device) == (40 * 10**6, 100)


def test_a_reading_that_was_overtaken_changes_nothing() -> None:
    observed = two_stages()
    observed.observe(0, reading(clock(busy=500), num_bytes=1000), 99.0)
    begin(observed)
    observed.observe(0, reading(clock(busy=800), num_bytes=1700), 101.0)
    before = observed.state(101.5)
    observed.observe(0, reading(clock(busy=799), num_bytes=1690), 101.5)
    assert observed.state(101.5) == before
    assert before.stages[0].clock.busy_ns == 300 * 10**6


def test_position_is_shown_within_the_request() -> None:
    observed = two_stages()
    begin(observed)
    observed.observe(0, reading(clock(busy=1), index=6, layer=17), 101.0)
    observed.observe(1, reading(clock(rows=1), index=-1, layer=-1), 101.0)
    first, second = observed.state(101.0).stages
    assert (first.super_chunk, first.layer, first.phase) == (2, 17, "waiting-experts")
    assert (second.super_chunk, second.layer) == (0, -1)


def test_tokens_give_the_time_to_the_first_and_the_decode_rate() -> None:
    observed = two_stages()
    begin(observed)
    for at_s, text in ((103.0, "He"), (104.0, "l"), (105.0, "lo")):
        observed.token(text, at_s)
    observed.end_request(105.0)
    request = observed.state(200.0).request
    assert request is not None
    assert request.ttft_s == pytest.approx(3.0)
    assert request.elapsed_s == pytest.approx(5.0)  # frozen at the end
    assert request.decode_tokens_per_s == pytest.approx(1.0)
    assert (request.generated_tokens, request.answer_tail) == (3, "Hello")


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (clock(busy=900, slot=100), clock(busy=300, rows=700), "compute of stage 0"),
        (clock(busy=100, experts=900), clock(busy=300, rows=700), "expert uploads of stage 0"),
        (clock(busy=300, slot=700), clock(busy=950, rows=50), "compute of stage 1"),
        (clock(hand_off=900, busy=100), clock(rows=1000), "hand-off of stage 0"),
    ],
)
def test_the_bottleneck_is_the_stage_that_waits_least_for_others(
    first: StageClock, second: StageClock, expected: str
) -> None:
    observed = two_stages()
    for stage in range(2):
        observed.stage_ready(stage, device="cpu", binding="numactl", numa_node=0, device_bytes=1)
        observed.observe(stage, reading(clock()), 100.0)
    begin(observed)
    observed.observe(0, reading(first), 101.0)
    observed.observe(1, reading(second), 101.0)
    assert observed.state(101.0).bound_by == expected


def test_loading_and_idle_are_said() -> None:
    observed = two_stages()
    assert observed.state(1.0).bound_by == "loading stage 0, 1"
    for stage in range(2):
        observed.stage_ready(stage, device="cpu", binding="numactl", numa_node=0, device_bytes=1)
    assert observed.state(1.0).bound_by == "nothing to do"
    assert [view.facts.binding for view in observed.state(1.0).stages] == ["numactl", "numactl"]


def test_only_the_last_notes_are_kept() -> None:
    observed = two_stages()
    for number in range(telemetry.NUM_NOTES + 3):
        observed.note(f"note {number}")
    assert observed.state(0.0).notes == tuple(
        f"note {number}" for number in range(3, 3 + telemetry.NUM_NOTES)
    )


def test_a_torn_reading_never_gives_negative_time() -> None:
    spent = telemetry.clock_between(clock(busy=10, rows=10), clock(busy=20, rows=5))
    assert (spent.busy_ns, spent.wait_rows_ns) == (10 * 10**6, 0)
    assert telemetry.shares_between(clock(busy=10), clock(busy=10)) == telemetry.Shares()
