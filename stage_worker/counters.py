"""The bytes a stage has moved, each counted by the code that issues the transfer.

Several threads issue transfers (the walk, the copy and read streams), so additions take a lock.
"""

import threading

from strata_coord.ipc.messages import ByteCounters


class TransferCounters:
    """Running totals since the stage was built."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals = {
            "resident_hit": 0,
            "ram_to_device": 0,
            "file_read": 0,
            "rows_spilled": 0,
            "handed_off": 0,
        }

    def add(self, **num_bytes: int) -> None:
        """Add to the named totals; the names are the fields of ByteCounters."""
        with self._lock:
            for name, count in num_bytes.items():
                self._totals[name] += count

    def snapshot(self) -> ByteCounters:
        """The totals so far."""
        with self._lock:
            return ByteCounters(**self._totals)
