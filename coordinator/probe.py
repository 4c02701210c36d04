"""Fills a Rig from this host, without torch: nodes, CPUs, memory limits, GPUs, and a copy rate.

Blocks for some milliseconds while the copy rate is measured. Rates that it does not measure are marked as
assumed. Never fails for a fact that cannot be read: it falls back to what is always known.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import time
from dataclasses import replace
from pathlib import Path

from strata_coord.coordinator.cuda_install import missing_for_cuda
from strata_coord.coordinator.gpus import NO_LIBRARY, FoundDevices, find_devices
from strata_coord.coordinator.rig import ASSUMED_RATES, Limits, NodeFacts, Rate, Rig
from strata_coord.ipc.memory_policy import parse_cpu_list

__all__ = ["measured_copy_rate", "memory_limit", "probe_rig", "usable_devices"]

_SYSFS_NODES = Path("/sys/devices/system/node")
_CGROUP_ROOT = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")
# The driver's own device node. Without it there is no card, and a laptop needs no word about one.
_CARD_NODE = Path("/dev/nvidiactl")
# Large enough to leave the caches of common hosts, small enough to take a few milliseconds.
_COPY_BYTES = 32 << 20
_COPY_RUNS = 3
# cgroup v1 writes "no limit" as a number near 2**63.
_NO_LIMIT = 1 << 60


def probe_rig(*, measure: bool = True) -> Rig:
    """Return the facts of this host.

    Args:
        measure: Measure the copy rate; else it is assumed.
    """
    import psutil

    memory = psutil.virtual_memory()
    cpus = tuple(sorted(os.sched_getaffinity(0)))
    limit, used = memory_limit(_CGROUP_ROOT, _OWN_CGROUP)
    available = int(memory.available)
    if limit is not None:
        available = min(available, max(1, limit - used))
    rates = ASSUMED_RATES
    if measure:
        rates = replace(rates, copy_bytes_per_s=Rate(value=measured_copy_rate(), source="measured"))
    nodes = _nodes(_SYSFS_NODES, cpus, int(memory.total))
    found = usable_devices(num_nodes=len(nodes))
    return Rig(
        name=platform.machine() or "host",
        nodes=nodes,
        available_bytes=max(1, available),
        limits=Limits(memory_bytes=limit, memlock_bytes=_memlock()),
        rates=rates,
        devices=found.devices,
        no_devices="" if found.reason == NO_LIBRARY and not _CARD_NODE.exists() else found.reason,
    )


def usable_devices(*, num_nodes: int) -> FoundDevices:
    """Return the GPUs that stages can compute on: there, visible, and with the packages for them."""
    found = find_devices(num_nodes=num_nodes)
    missing = missing_for_cuda() if found.devices else ""
    if not missing:
        return found
    return FoundDevices(reason=f"{len(found.devices)} GPU(s) are here, but {missing}")


def memory_limit(root: Path, own: Path) -> tuple[int | None, int]:
    """Return the least memory limit of this process's cgroups and the bytes used under it.

    Args:
        root: Where cgroup file systems are mounted.
        own: The file that names this process's cgroups.
    """
    best: tuple[int, int] | None = None
    for folder, limit_name, used_name in _cgroup_folders(root, own):
        limit = _number(folder / limit_name)
        if limit is None or limit >= _NO_LIMIT:
            continue
        # Page cache counts as used and can be given back, so it is taken off where it is told.
        used = (_number(folder / used_name) or 0) - _reclaimable(folder / "memory.stat")
        if best is None or limit < best[0]:
            best = (limit, max(0, used))
    return best if best is not None else (None, 0)


def measured_copy_rate() -> float:
    """Return the bytes per second that one thread copies, the best of a few runs."""
    source, target = bytearray(_COPY_BYTES), memoryview(bytearray(_COPY_BYTES))
    best = float("inf")
    for _ in range(_COPY_RUNS):
        start = time.perf_counter()
        target[:] = source
        best = min(best, time.perf_counter() - start)
    return _COPY_BYTES / max(best, 1e-9)


def _nodes(folder: Path, cpus: tuple[int, ...], total_bytes: int) -> tuple[NodeFacts, ...]:
    nodes = []
    for path in sorted(folder.glob("node[0-9]*"), key=lambda one: int(one.name[4:])):
        own = tuple(cpu for cpu in sorted(parse_cpu_list(_text(path / "cpulist"))) if cpu in cpus)
        found = re.search(r"MemTotal:\s+(\d+) kB", _text(path / "meminfo"))
        memory = int(found[1]) * 1024 if found else total_bytes
        if own:
            nodes.append(NodeFacts(node=int(path.name[4:]), cpus=own, memory_bytes=memory))
    # Inside some containers there is no node to see: one without a number stands for the machine.
    return tuple(nodes) or (NodeFacts(node=-1, cpus=cpus, memory_bytes=total_bytes),)


def _cgroup_folders(root: Path, own: Path) -> list[tuple[Path, str, str]]:
    """Every cgroup from this process's own up to the root, in both versions' layouts."""
    found = []
    for line in _text(own).splitlines():
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0":
            base, names = root, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            base, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for length in range(len(parts), -1, -1):
            found.append((base.joinpath(*parts[:length]), *names))
    return found


def _reclaimable(path: Path) -> int:
    found = re.search(r"^(?:total_)?inactive_file (\d+)$", _text(path), re.MULTILINE)
    return int(found[1]) if found else 0


def _memlock() -> int | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
