"""A status page in memory, with the reporter that writes it and a reader of the same words."""

import mmap

from strata_coord.ipc.status_page import StatusReader, StatusWriter, status_page_bytes
from strata_coord.stage_worker.clock import ActivityClock
from strata_coord.stage_worker.counters import TransferCounters
from strata_coord.stage_worker.reporting import StatusReporter


class Page:
    def __init__(self, *, routing: dict[int, memoryview] | None = None) -> None:
        memory = mmap.mmap(-1, status_page_bytes(4))
        self.clock, self.counters = ActivityClock(), TransferCounters()
        self.reader = StatusReader(memory, 4)
        self.reporter = StatusReporter(
            status=StatusWriter(memory, 4, pid=1, incarnation=1, now_ns=0),
            clock=self.clock,
            counters=self.counters,
            routing=routing or {},
        )
