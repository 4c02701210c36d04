"""Reads byte ranges of the model's files with pread, and nothing else.

pread with an exact length check instead of mmap: a file that is truncated under a running stage then gives an
error with its name, where a mapping gives SIGBUS. A stage opens the files once and reads only the extents of
its own layers.
"""

import os
from collections.abc import Sequence

from strata_coord.ipc.errors import ModelError
from strata_coord.stage_worker.counters import TransferCounters


class ByteReader:
    """Open descriptors of the model's files; every byte read is counted as file_read."""

    def __init__(self, files: Sequence[str], counters: TransferCounters) -> None:
        self._files = tuple(files)
        self._counters = counters
        self._descriptors: list[int] = []
        try:
            for path in self._files:
                self._descriptors.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            self.close()
            message = f"{path}: cannot be opened: {error.strerror}"
            raise ModelError(message) from error

    def read_into(self, target: memoryview, *, file: int, offset_bytes: int) -> None:
        """Fill target from the file at offset_bytes. Releases the GIL while reading.

        Raises:
            ModelError: the file ends before the range does, or the drive reports an error.
        """
        done = 0
        while done < len(target):
            try:
                count = os.preadv(self._descriptors[file], [target[done:]], offset_bytes + done)
            except OSError as error:
                message = (
                    f"{self._files[file]}: reading {len(target)} bytes at {offset_bytes}: {error.strerror}"
                )
                raise ModelError(message) from error
            if count == 0:
                message = (
                    f"{self._files[file]}: ends at byte {offset_bytes + done}, "
                    f"but bytes up to {offset_bytes + len(target)} belong to a tensor; did the file change?"
                )
                raise ModelError(message)
            done += count
        self._counters.add(file_read=len(target))

    def close(self) -> None:
        """Close all descriptors."""
        while self._descriptors:
            os.close(self._descriptors.pop())
