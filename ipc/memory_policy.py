"""Where a thread runs and where its memory comes from: NUMA policy by system call, without libnuma.

Every function that changes something returns None when the kernel agreed, else one line that says what was
refused. Containers often forbid these calls; a launch then runs unbound and says so.
"""

import contextlib
import ctypes
import errno
import os
import platform
from collections.abc import Iterator
from pathlib import Path

MPOL_DEFAULT = 0
MPOL_PREFERRED = 1
MPOL_BIND = 2

_MAX_NODES = 1024  # bits of a node mask
_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)
# System call numbers: (set_mempolicy, get_mempolicy). libc has no wrappers for them.
_CALLS = {"x86_64": (238, 239), "aarch64": (237, 236)}
_NODES = Path("/sys/devices/system/node")


def parse_cpu_list(text: str) -> frozenset[int]:
    """Return the numbers of a kernel list such as "0-3,8,10-11".

    Raises:
        ValueError: the text is no such list.
    """
    numbers: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            numbers.update(range(int(first), int(last or first) + 1))
    return frozenset(numbers)


def online_nodes() -> frozenset[int]:
    """Return the NUMA nodes of this host; {0} where the kernel does not tell."""
    try:
        return parse_cpu_list((_NODES / "online").read_text()) or frozenset({0})
    except (OSError, ValueError):
        return frozenset({0})


def node_cpus(node: int) -> frozenset[int]:
    """Return the CPUs of a node, empty where the kernel does not tell or the node has none."""
    try:
        return parse_cpu_list((_NODES / f"node{node}" / "cpulist").read_text())
    except (OSError, ValueError):
        return frozenset()


def bind_cpus(cpus: frozenset[int]) -> str | None:
    """Keep the calling thread, and threads it starts later, on those of cpus that it may use."""
    allowed = os.sched_getaffinity(0)
    wanted = cpus & allowed
    if not wanted:
        return f"none of the {len(cpus)} CPUs wanted is among the {len(allowed)} allowed"
    try:
        os.sched_setaffinity(0, wanted)
    except OSError as error:
        return f"sched_setaffinity for {len(wanted)} CPUs was refused: {_reason(error.errno)}"
    return None


def set_memory_policy(mode: int, nodes: frozenset[int] = frozenset()) -> str | None:
    """Set the policy of the calling thread for memory that it touches first from here on."""
    if nodes and max(nodes) >= _MAX_NODES:
        return f"NUMA node {max(nodes)} is above {_MAX_NODES - 1}"
    mask = _node_mask(nodes)
    # The kernel reads one bit less than it is told.
    arguments = (mask, ctypes.c_ulong(_MAX_NODES + 1)) if nodes else (None, ctypes.c_ulong(0))
    refused = _system_call(0, ctypes.c_long(mode), *arguments)
    return f"set_mempolicy was refused: {refused}" if refused else None


def memory_policy() -> tuple[int, frozenset[int]] | str:
    """Return mode and nodes of the calling thread's policy, or one line that says why they are unknown."""
    mode = ctypes.c_int(-1)
    mask = _node_mask(frozenset())
    size = ctypes.c_ulong(_MAX_NODES + 1)
    refused = _system_call(1, ctypes.byref(mode), mask, size, ctypes.c_void_p(None), ctypes.c_ulong(0))
    if refused:
        return f"get_mempolicy was refused: {refused}"
    nodes = (node for node in range(_MAX_NODES) if mask[node // _BITS] >> (node % _BITS) & 1)
    return mode.value, frozenset(nodes)


@contextlib.contextmanager
def memory_from_node(node: int) -> Iterator[str | None]:
    """Take the calling thread's memory from one node inside the block, then restore its policy.

    Preferred, not bound: a full node spills to its neighbours instead of killing the process. Yields None,
    or what was refused; a node below 0 changes nothing.
    """
    before = memory_policy()
    if node < 0 or isinstance(before, str):
        yield before if isinstance(before, str) and node >= 0 else None
        return
    refused = set_memory_policy(MPOL_PREFERRED, frozenset({node}))
    try:
        yield refused
    finally:
        if refused is None:
            set_memory_policy(*before)


def _node_mask(nodes: frozenset[int]) -> "ctypes.Array[ctypes.c_ulong]":
    mask = (ctypes.c_ulong * (_MAX_NODES // _BITS + 1))()
    for node in nodes:
        mask[node // _BITS] |= 1 << (node % _BITS)
    return mask


def _system_call(which: int, *arguments: object) -> str | None:
    numbers = _CALLS.get(platform.machine())
    if numbers is None:
        return f"no call number is known for {platform.machine()}"
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    if libc.syscall(ctypes.c_long(numbers[which]), *arguments) == 0:
        return None
    return _reason(ctypes.get_errno())


def _reason(number: int | None) -> str:
    if number is None:
        return "unknown"
    return f"{errno.errorcode.get(number, number)}, {os.strerror(number)}"
