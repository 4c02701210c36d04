import os
import signal
import threading

import pytest

from strata_coord.coordinator.signals import DRAIN, Terminated, terminable, unhurried


def tell(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_an_idle_launch_ends_at_once(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(Terminated), terminable():
        tell(number)
    assert signal.getsignal(number) == before


def test_a_busy_launch_is_told_and_gives_up_only_after_its_time() -> None:
    gave_up = threading.Event()
    with terminable():
        with DRAIN.busy(gave_up.set, drain_s=0.05):
            assert not DRAIN.is_requested
            tell(signal.SIGTERM)
            assert DRAIN.is_requested
            assert gave_up.wait(10)
        assert DRAIN.is_requested
    with terminable():
        assert not DRAIN.is_requested  # the next launch of this process starts afresh


def test_a_request_that_ends_in_time_is_not_given_up() -> None:
    gave_up = threading.Event()
    with terminable():
        with DRAIN.busy(gave_up.set, drain_s=30):
            tell(signal.SIGTERM)
        assert not gave_up.is_set()
    assert not [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]


def test_the_second_signal_does_not_wait() -> None:
    with terminable(), DRAIN.busy(lambda: None, drain_s=30):
        tell(signal.SIGTERM)
        with pytest.raises(Terminated):
            tell(signal.SIGTERM)


def test_nothing_cuts_the_end_short() -> None:
    with terminable(), unhurried():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            tell(number)
    with pytest.raises(KeyboardInterrupt):
        tell(signal.SIGINT)


def test_other_threads_leave_the_handlers_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen: list[object] = []

    def enter() -> None:
        with terminable(), unhurried():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join(5)
    assert seen == [before]
