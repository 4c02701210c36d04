"""Shared host memory without names: memfds, and their descriptors passed over a socket pair.

The coordinator creates every memfd and keeps it, so that memory outlives the worker that filled it. A worker
gets a descriptor once, over its inherited socket pair; no message ever names memory. Sizes are
sealed: neither side can shrink memory under the other's feet, which would end the reader with SIGBUS.
"""

import contextlib
import fcntl
import mmap
import os
import socket
from array import array
from collections.abc import Sequence

from strata_coord.ipc.errors import InvariantError, PlanError, ProtocolError
from strata_coord.ipc.free_memory import available_bytes
from strata_coord.ipc.memory_policy import memory_from_node

MAX_LABEL_BYTES = 256
MAX_DESCRIPTORS = 16  # per packet
_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def create_memfd(label: str, num_bytes: int, *, numa_node: int = -1) -> int:
    """Return the descriptor of new zeroed memory of a fixed size, with every page reserved.

    The caller owns the descriptor, which children do not inherit. Pages come from numa_node where the kernel
    lets this thread choose; -1 leaves the choice to the kernel.

    Raises:
        PlanError: the host cannot give that much; without the reservation the first touch would be SIGBUS.
    """
    if num_bytes < 1:
        message = f"memory {label}: {num_bytes} bytes asked, at least 1 is needed"
        raise InvariantError(message)
    room = available_bytes()
    if room is not None and num_bytes > room:
        message = f"memory {label}: {num_bytes} bytes are needed, {room} are available"
        raise PlanError(message)
    fd = os.memfd_create(f"strata-coord:{label}"[:200], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with memory_from_node(numa_node):
            os.posix_fallocate(fd, 0, num_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SIZE_SEALS | fcntl.F_SEAL_SEAL)
    except OSError as error:
        os.close(fd)
        message = f"memory {label}: {num_bytes} bytes are needed and the host refused: {error.strerror}"
        raise PlanError(message) from error
    return fd


def map_memfd(fd: int, num_bytes: int, *, writable: bool) -> mmap.mmap:
    """Map the first num_bytes of a memfd. The mapping keeps the memory; fd may be closed.

    Raises:
        ProtocolError: the memory is smaller than told, or its size is not sealed.
    """
    size = os.fstat(fd).st_size
    if num_bytes < 1 or size < num_bytes:
        message = f"shared memory holds {size} bytes, {num_bytes} were announced"
        raise ProtocolError(message)
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        seals = 0
    if not seals & fcntl.F_SEAL_SHRINK:
        message = f"shared memory of {size} bytes is not sealed against shrinking"
        raise ProtocolError(message)
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    return mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED, prot=protection)


class MappedSlots:
    """The hand-off slots of one link generation, mapped into this process.

    A view from slot() stays valid until close(); arrays built on a view keep the mapping alive after it.
    """

    def __init__(self, fd: int, num_slots: int, slot_bytes: int, *, writable: bool) -> None:
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self._map = map_memfd(fd, num_slots * slot_bytes, writable=writable)
        self._all = memoryview(self._map)
        self._views = [self._all[n * slot_bytes : (n + 1) * slot_bytes] for n in range(num_slots)]

    def slot(self, index: int) -> memoryview:
        """Return the bytes of one slot.

        Raises:
            InvariantError: there is no such slot.
        """
        if not 0 <= index < self.num_slots:
            message = f"slot {index} of {self.num_slots}"
            raise InvariantError(message)
        return self._views[index]

    def close(self) -> None:
        """Unmap; where an array still looks at a slot, the memory goes when that array does."""
        with contextlib.suppress(BufferError):
            for view in self._views:
                view.release()
            self._all.release()
            self._map.close()


def descriptor_pair() -> tuple[socket.socket, socket.socket]:
    """Return two ends of a channel for descriptors; packets keep their bounds and their order."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)


def send_descriptors(channel: socket.socket, label: bytes, fds: Sequence[int]) -> None:
    """Send one packet: a label that says what the descriptors are, and the descriptors.

    The receiver gets copies; the caller's stay open. Never blocks.

    Raises:
        InvariantError: the label or the number of descriptors is out of bounds.
        ProtocolError: the receiver is gone, or does not read.
    """
    if not 1 <= len(label) <= MAX_LABEL_BYTES or len(fds) > MAX_DESCRIPTORS:
        message = (
            f"packet with a label of {len(label)} bytes and {len(fds)} descriptors, "
            f"at most {MAX_LABEL_BYTES} and {MAX_DESCRIPTORS} are allowed"
        )
        raise InvariantError(message)
    control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
    try:
        channel.sendmsg([label], control, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
    except OSError as error:
        message = f"{len(fds)} descriptors could not be passed to the stage: {error.strerror}"
        raise ProtocolError(message) from error


def recv_descriptors(channel: socket.socket, max_fds: int = MAX_DESCRIPTORS) -> tuple[bytes, list[int]]:
    """Return label and descriptors of the next packet. Blocks as the channel's own timeout says.

    The caller owns the descriptors, which its children do not inherit.

    Raises:
        ProtocolError: the sender is gone, or the packet was larger than allowed; nothing stays open then.
        TimeoutError: the channel's timeout passed.
        BlockingIOError: the channel does not block, and no packet is here.
    """
    # Room for one more than allowed: the kernel drops what has no room, and a packet that is
    # larger than allowed has to be told from one that just fits.
    room = socket.CMSG_SPACE((max_fds + 1) * array("i").itemsize)
    label, control, flags, _ = channel.recvmsg(MAX_LABEL_BYTES, room, socket.MSG_CMSG_CLOEXEC)
    fds = array("i")
    for level, kind, data in control:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    problem = None
    if not label:
        problem = "the channel for descriptors was closed by its other end"
    elif flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        problem = "a packet of descriptors was cut short"
    elif len(fds) > max_fds:
        problem = f"a packet of {len(fds)} descriptors, at most {max_fds} are allowed"
    if problem is not None:
        for fd in fds:
            os.close(fd)
        raise ProtocolError(problem)
    return label, list(fds)
