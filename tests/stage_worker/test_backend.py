import threading

import pytest

from strata_coord.stage_worker.backend import CpuBackend, HostEvent, InlineStream, ThreadStream


@pytest.fixture
def stream():
    made = ThreadStream("test")
    yield made
    made.close()


def test_work_of_a_stream_runs_in_order_and_off_the_calling_thread(stream: ThreadStream) -> None:
    seen: list[tuple[int, int]] = []
    for number in range(50):
        stream.run(lambda number=number: seen.append((number, threading.get_ident())))
    stream.record().wait()
    assert [number for number, _ in seen] == list(range(50))
    assert {ident for _, ident in seen}.isdisjoint({threading.get_ident()})


def test_an_event_is_passed_after_what_was_appended_before_it_and_not_sooner(stream: ThreadStream) -> None:
    gate, seen = threading.Event(), []
    stream.run(lambda: (gate.wait(10), seen.append("before")))
    event = stream.record()
    assert not event.is_done()
    gate.set()
    event.wait()
    assert event.is_done()
    assert seen == ["before"]


def test_a_stream_waits_for_an_event_of_another_without_holding_up_the_host(stream: ThreadStream) -> None:
    first, gate, seen = ThreadStream("first"), threading.Event(), []
    first.run(lambda: (gate.wait(10), seen.append("first")))
    stream.wait(first.record())
    stream.run(lambda: seen.append("second"))
    done = stream.record()
    assert not done.is_done()
    gate.set()
    done.wait()
    first.close()
    assert seen == ["first", "second"]


def fail() -> None:
    message = "the drive is gone"
    raise OSError(message)


def test_a_failure_skips_later_work_and_travels_with_every_later_event(stream: ThreadStream) -> None:
    seen: list[str] = []
    before = stream.record()
    stream.run(fail)
    stream.run(lambda: seen.append("after the failure"))
    for event in (stream.record(), stream.record()):
        with pytest.raises(OSError, match="the drive is gone"):
            event.wait()
        assert event.is_done()
    before.wait()
    assert seen == []
    assert isinstance(stream.failure, OSError)


@pytest.mark.parametrize("is_passed_first", [True, False])
def test_a_failure_reaches_a_stream_that_waits_for_it(stream: ThreadStream, is_passed_first: bool) -> None:
    """Also when the failed event was passed before the other stream was told to wait."""
    failing, gate, seen = ThreadStream("failing"), threading.Event(), []
    failing.run(lambda: gate.wait(10))
    failing.run(fail)
    event = failing.record()
    if is_passed_first:
        gate.set()
        failing.close()
        assert event.is_done()
    stream.wait(event)
    stream.run(lambda: seen.append("used what never came"))
    done = stream.record()
    gate.set()
    with pytest.raises(OSError, match="the drive is gone"):
        done.wait()
    if not is_passed_first:
        failing.close()
    assert seen == []


def test_close_finishes_what_was_appended() -> None:
    made, seen = ThreadStream("closing"), []
    for number in range(20):
        made.run(lambda number=number: seen.append(number))
    made.close()
    assert seen == list(range(20))


def test_the_compute_stream_of_the_cpu_is_the_calling_thread() -> None:
    stream, seen = CpuBackend().compute_stream(), []
    assert isinstance(stream, InlineStream)
    stream.run(lambda: seen.append(threading.get_ident()))
    assert seen == [threading.get_ident()]
    assert stream.record().is_done()
    failed = HostEvent()
    failed.set(OSError("lost"))
    with pytest.raises(OSError, match="lost"):
        stream.wait(failed)
    stream.close()


def test_memory_is_bytes_of_the_device() -> None:
    backend = CpuBackend()
    memory = backend.empty(100)
    assert (memory.numel(), memory.element_size(), memory.device) == (100, 1, backend.device)
