import os
from pathlib import Path

import pytest

from strata_coord.ipc.errors import ModelError
from strata_coord.stage_worker.byte_reader import ByteReader
from strata_coord.stage_worker.counters import TransferCounters


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    paths = [tmp_path / "one.gguf", tmp_path / "two.gguf"]
    for number, path in enumerate(paths):
        path.write_bytes(bytes((value + number) % 256 for value in range(1000)))
    return [str(path) for path in paths]


def read(reader: ByteReader, *, file: int, offset: int, count: int) -> bytes:
    target = bytearray(count)
    reader.read_into(memoryview(target), file=file, offset_bytes=offset)
    return bytes(target)


def test_ranges_of_several_files_and_what_they_count(files: list[str]) -> None:
    counters = TransferCounters()
    reader = ByteReader(files, counters)
    assert read(reader, file=0, offset=10, count=3) == bytes([10, 11, 12])
    assert read(reader, file=1, offset=10, count=3) == bytes([11, 12, 13])
    assert read(reader, file=1, offset=0, count=1000)[-1] == 1000 % 256
    assert read(reader, file=0, offset=5, count=0) == b""
    assert counters.snapshot().file_read == 1006
    reader.close()
    reader.close()


def test_short_reads_of_the_kernel_are_gone_on_with(
    files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    preadv, sizes = os.preadv, []

    def short(fd: int, buffers: list[memoryview], offset: int) -> int:
        sizes.append(len(buffers[0]))
        return preadv(fd, [buffers[0][:7]], offset)

    monkeypatch.setattr(os, "preadv", short)
    reader = ByteReader(files, TransferCounters())
    assert read(reader, file=0, offset=100, count=20) == bytes(range(100, 120))
    assert sizes == [20, 13, 6]
    reader.close()


def test_a_file_that_ends_early_is_named_with_both_ends(files: list[str]) -> None:
    counters = TransferCounters()
    reader = ByteReader(files, counters)
    with pytest.raises(ModelError, match=r"two\.gguf: ends at byte 1000, but bytes up to 1010"):
        read(reader, file=1, offset=990, count=20)
    assert counters.snapshot().file_read == 0
    reader.close()


def test_an_error_of_the_drive_is_named(files: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_fd: int, _buffers: list[memoryview], _offset: int) -> int:
        raise OSError(5, "Input/output error")

    reader = ByteReader(files, TransferCounters())
    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(ModelError, match=r"one\.gguf: reading 20 bytes at 30: Input/output error"):
        read(reader, file=0, offset=30, count=20)
    reader.close()


def test_a_file_that_cannot_be_opened_is_named_and_the_others_are_closed(files: list[str]) -> None:
    missing = files[0] + ".missing"
    with pytest.raises(ModelError, match=r"missing: cannot be opened: No such file"):
        ByteReader([*files, missing], TransferCounters())


def test_a_replaced_file_does_not_change_what_is_read(files: list[str]) -> None:
    reader = ByteReader(files, TransferCounters())
    other = Path(files[0] + ".new")
    other.write_bytes(b"x" * 1000)
    other.replace(files[0])
    assert read(reader, file=0, offset=0, count=4) == bytes([0, 1, 2, 3])
    reader.close()
