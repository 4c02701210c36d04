import os
from pathlib import Path

import numpy as np
import pytest

from strata_coord.coordinator.logits_file import create_logits_file, logits_offset
from strata_coord.ipc.errors import ConfigError


@pytest.mark.parametrize(("num_tokens", "vocabulary"), [(1, 1), (3, 7), (131_072, 248_320)])
def test_numpy_reads_what_is_written_behind_the_header(
    tmp_path: Path, num_tokens: int, vocabulary: int
) -> None:
    path = tmp_path / "l.npy"
    fd = create_logits_file(path, num_tokens=num_tokens, vocabulary_size=vocabulary)
    last = np.arange(vocabulary, dtype="<f4")
    os.pwrite(fd, last.tobytes(), logits_offset() + (num_tokens - 1) * vocabulary * 4)
    os.close(fd)
    found = np.load(path, mmap_mode="r")  # sparse: the largest shape takes no room on the drive
    assert found.shape == (num_tokens, vocabulary)
    assert found.dtype == np.float32
    assert (found[-1] == last).all()
    assert path.stat().st_size == logits_offset() + num_tokens * vocabulary * 4
    del found


def test_an_older_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "l.npy"
    path.write_bytes(b"x" * 10_000)
    os.close(create_logits_file(path, num_tokens=2, vocabulary_size=3))
    assert (np.load(path) == 0).all()


@pytest.mark.parametrize("name", ["missing/l.npy", ".", "/dev/full"])
def test_a_place_that_takes_no_file_is_named_and_nothing_stays_open(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError, match=f"--logits {path}: "):
        create_logits_file(path, num_tokens=2, vocabulary_size=3)
    assert len(os.listdir("/proc/self/fd")) == before
