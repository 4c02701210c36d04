import fcntl
import mmap
import os
import socket
import subprocess
import sys
from array import array

import pytest

from strata_coord.ipc import host_memory
from strata_coord.ipc.errors import InvariantError, PlanError, ProtocolError
from strata_coord.ipc.host_memory import (
    MappedSlots,
    create_memfd,
    descriptor_pair,
    map_memfd,
    recv_descriptors,
    send_descriptors,
)

PAGE = mmap.PAGESIZE

# Receives a memfd over the inherited channel, shifts each byte by one, and tells what it got.
CHILD = """
import os, socket, sys
from strata_coord.ipc.host_memory import map_memfd, recv_descriptors
with socket.socket(fileno=int(sys.argv[1])) as channel:
    label, fds = recv_descriptors(channel, 4)
with map_memfd(fds[0], 100, writable=True) as memory:
    memory[:100] = bytes(byte + 1 for byte in memory[:100])
print(label.decode(), len(fds), *(os.get_inheritable(fd) for fd in fds))
"""


@pytest.fixture
def memory():
    fd = create_memfd("test", 3 * PAGE)
    yield fd
    os.close(fd)


@pytest.fixture
def channel():
    ends = descriptor_pair()
    ends[1].settimeout(10)
    yield ends
    for end in ends:
        end.close()


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_memory_is_zeroed_reserved_and_of_a_fixed_size(memory):
    found = os.fstat(memory)
    assert (found.st_size, found.st_blocks * 512) == (3 * PAGE, 3 * PAGE)
    assert not os.get_inheritable(memory)
    assert not any(os.pread(memory, 3 * PAGE, 0))
    for size in (PAGE, 4 * PAGE):
        with pytest.raises(PermissionError):
            os.ftruncate(memory, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_more_than_the_host_has_is_refused_before_anything_is_taken(monkeypatch):
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 1000)
    before = open_descriptors()
    with pytest.raises(PlanError, match="memory arena: 1001 bytes are needed, 1000 are available"):
        create_memfd("arena", 1001)
    os.close(create_memfd("arena", 1000))
    assert open_descriptors() == before


def test_a_refused_reservation_leaves_no_descriptor(monkeypatch):
    def refuse(fd, offset, size):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    before = open_descriptors()
    with pytest.raises(PlanError, match="4096 bytes are needed and the host refused: No space left"):
        create_memfd("arena", 4096)
    assert open_descriptors() == before


def test_no_memory_is_no_size():
    with pytest.raises(InvariantError, match="0 bytes"):
        create_memfd("empty", 0)


def test_a_mapping_larger_than_the_memory_is_refused(memory):
    with pytest.raises(ProtocolError, match=f"{3 * PAGE} bytes, {3 * PAGE + 1} were announced"):
        map_memfd(memory, 3 * PAGE + 1, writable=False)


def test_memory_that_could_shrink_is_refused(tmp_path):
    unsealed = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(tmp_path / "file", "w+b") as file:
        for fd in (unsealed, file.fileno()):
            os.ftruncate(fd, PAGE)
            with pytest.raises(ProtocolError, match="not sealed"):
                map_memfd(fd, PAGE, writable=True)
    os.close(unsealed)


def test_a_mapping_outlives_its_descriptor_and_is_read_only_when_asked():
    fd = create_memfd("test", PAGE)
    with map_memfd(fd, PAGE, writable=True) as writer, map_memfd(fd, PAGE, writable=False) as reader:
        os.close(fd)
        writer[7] = 9
        assert reader[7] == 9
        with pytest.raises(TypeError):
            reader[7] = 1


def test_slots_tile_the_memory(memory):
    slots = MappedSlots(memory, 3, 1000, writable=True)
    for index in range(3):
        slots.slot(index)[:] = bytes([index + 1]) * 1000
    assert os.pread(memory, 3001, 0) == b"\x01" * 1000 + b"\x02" * 1000 + b"\x03" * 1000 + b"\x00"
    for index in (-1, 3):
        with pytest.raises(InvariantError, match=f"slot {index} of 3"):
            slots.slot(index)
    slots.close()


def test_an_array_on_a_slot_may_outlive_the_slots(memory):
    slots = MappedSlots(memory, 2, 8, writable=True)
    kept = slots.slot(1).cast("Q")
    slots.close()
    kept[0] = 5
    assert os.pread(memory, 8, 8)[0] == 5
    kept.release()


def test_more_slots_than_memory_are_refused(memory):
    with pytest.raises(ProtocolError, match="were announced"):
        MappedSlots(memory, 4, PAGE, writable=True)


def test_a_real_child_gets_memory_by_descriptor(memory, channel):
    os.pwrite(memory, bytes(range(100)), 0)
    send_descriptors(channel[0], b"tokens", [memory, memory])
    end = channel[1].fileno()
    done = subprocess.run(
        [sys.executable, "-P", "-c", CHILD, str(end)],
        pass_fds=[end],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert done.stdout.split() == ["tokens", "2", "False", "False"]
    assert os.pread(memory, 100, 0) == bytes(range(1, 101))


def test_packets_keep_their_order_and_bounds(memory, channel):
    send_descriptors(channel[0], b"one", [memory])
    send_descriptors(channel[0], b"two", [])
    send_descriptors(channel[0], b"three", [memory] * 3)
    for label, count in ((b"one", 1), (b"two", 0), (b"three", 3)):
        found, fds = recv_descriptors(channel[1])
        assert (found, len(fds)) == (label, count)
        for fd in fds:
            assert os.fstat(fd).st_ino == os.fstat(memory).st_ino
            os.close(fd)


@pytest.mark.parametrize(("count", "allowed"), [(2, 1), (5, 1), (1, 0), (200, 16)])
def test_more_descriptors_than_allowed_are_refused_and_closed(memory, channel, count, allowed):
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [memory] * count))]
    channel[0].sendmsg([b"label"], rights)
    before = open_descriptors()
    with pytest.raises(ProtocolError, match="descriptors"):
        recv_descriptors(channel[1], allowed)
    assert open_descriptors() == before


def test_a_label_that_was_cut_is_refused_with_its_descriptors(memory, channel):
    channel[0].sendmsg([b"x" * 257], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [memory]))])
    before = open_descriptors()
    with pytest.raises(ProtocolError, match="cut short"):
        recv_descriptors(channel[1])
    assert open_descriptors() == before


def test_the_end_of_the_channel_is_an_error_on_both_sides(channel):
    channel[0].close()
    with pytest.raises(ProtocolError, match="closed by its other end"):
        recv_descriptors(channel[1])
    with pytest.raises(ProtocolError, match="could not be passed"):
        send_descriptors(channel[1], b"label", [])


def test_a_receiver_that_does_not_read_never_blocks_the_sender(memory, channel):
    def fill():
        for _ in range(100_000):
            send_descriptors(channel[0], b"label", [memory])

    with pytest.raises(ProtocolError, match="1 descriptors could not be passed"):
        fill()


@pytest.mark.parametrize(("label", "count"), [(b"", 1), (b"x" * 257, 1), (b"x", 17)])
def test_a_packet_out_of_bounds_is_not_sent(channel, label, count):
    with pytest.raises(InvariantError, match=f"{len(label)} bytes and {count} descriptors"):
        send_descriptors(channel[0], label, [0] * count)
