import threading

import pytest

from strata_coord.ipc.messages import ByteCounters
from strata_coord.stage_worker.counters import TransferCounters


def test_totals_by_name() -> None:
    counters = TransferCounters()
    counters.add(file_read=3, ram_to_device=4)
    counters.add(file_read=10)
    assert counters.snapshot() == ByteCounters(
        resident_hit=0, ram_to_device=4, file_read=13, rows_spilled=0, handed_off=0
    )


def test_a_name_that_is_none_is_refused() -> None:
    with pytest.raises(KeyError):
        TransferCounters().add(file_reads=1)


def test_additions_of_several_threads_are_not_lost() -> None:
    counters = TransferCounters()

    def add_many() -> None:
        for _ in range(2_000):
            counters.add(handed_off=1, file_read=2)

    threads = [threading.Thread(target=add_many) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (counters.snapshot().handed_off, counters.snapshot().file_read) == (8_000, 16_000)
