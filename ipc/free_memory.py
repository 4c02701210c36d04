"""How much memory this process may still take: the host's free memory and every cgroup limit above it.

A memfd has no file system limit, so the kernel does not answer "no space" for a reservation that is too
large: it starts to kill processes. The question has to be asked beforehand.
"""

from collections.abc import Iterator
from pathlib import Path

_UNLIMITED = 1 << 60  # cgroup version 1 writes "no limit" as a huge number


def available_bytes() -> int | None:
    """Return the bytes that can be taken without reclaiming anything but page cache; None if unknown."""
    rooms = [room for room in (_host_room(), *_cgroup_rooms()) if room is not None]
    return max(0, min(rooms)) if rooms else None


def _host_room(path: Path = Path("/proc/meminfo")) -> int | None:
    for line in _lines(path):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup_rooms(
    root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> Iterator[int]:
    for line in _lines(membership):
        _, controllers, group = line.split(":", 2)
        if not controllers:
            yield from _rooms_upwards(
                root, group, "memory.max", "memory.current", ("inactive_file", "active_file")
            )
        elif "memory" in controllers.split(","):
            totals = ("total_inactive_file", "total_active_file")
            base = root / "memory"
            yield from _rooms_upwards(base, group, "memory.limit_in_bytes", "memory.usage_in_bytes", totals)


def _rooms_upwards(
    root: Path, group: str, limit_name: str, use_name: str, cache_names: tuple[str, ...]
) -> Iterator[int]:
    # Inside a container the path may name a group of the host that is not mounted; the root is then ours.
    folder = root / group.strip("/")
    for candidate in (folder, *folder.parents):
        limit, used = _number(candidate / limit_name), _number(candidate / use_name)
        if limit is not None and used is not None and limit < _UNLIMITED:
            cache = 0
            for line in _lines(candidate / "memory.stat"):
                name, _, value = line.partition(" ")
                if name in cache_names and value.isdecimal():
                    cache += int(value)
            yield limit - used + cache
        if candidate == root:
            return


def _number(path: Path) -> int | None:
    text = "".join(_lines(path)[:1]).strip()
    return int(text) if text.isdecimal() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return []
