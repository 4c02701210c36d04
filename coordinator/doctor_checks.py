"""What the doctor looks at. Each check returns one finding and changes nothing that lasts."""

import importlib.util
import os
import re
import resource
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from strata_coord.coordinator.doctor import INSTALL, Check, installed_version
from strata_coord.coordinator.doctor_cuda import check_cupy, check_gpus, check_memlock, check_torch

NEEDED: Final = (
    "torch", "numpy", "pyzmq", "msgpack", "gguf", "typer", "rich", "pydantic", "tokenizers", "jinja2",
    "psutil",
)  # fmt: skip
FAST_CPU: Final = "libgguf>=0.2.2,<0.3"
MIN_OPEN_FILES: Final = 256  # sockets, pipes and memfds of eight stages, twice over
MIN_CACHE_BYTES: Final = 100 * 2**20  # the built-in model and the copy that is being written
SMALL_MEMORY_BYTES: Final = 2 * 2**30  # two stage processes with torch take about 1 GiB before any weight
GIB: Final = 2**30


def check_python() -> Check:
    """Which Python runs this; an older one than 3.11 could not have read this file."""
    version = ".".join(map(str, sys.version_info[:3]))
    return Check(name="python", status="ok", text=f"{version} at {sys.executable}")


def check_system() -> Check:
    """The kernel has what the processes are held together with: memfd, pidfd, parent-death signals."""
    if sys.platform != "linux":
        return Check(name="system", status="fail", text=f"{sys.platform}, Linux is needed")
    missing = [name for name in ("memfd_create", "pidfd_open") if not hasattr(os, name)]
    if missing:
        text = f"this Python was built without {' and '.join(missing)}"
        return Check(
            name="system", status="fail", text=text, remedy="use a Python built for Linux 5.3 or newer"
        )
    return Check(name="system", status="ok", text=f"Linux {os.uname().release}, {os.uname().machine}")


def check_packages() -> Check:
    """Every package that a launch loads is installed."""
    missing = [name for name in NEEDED if installed_version(name) is None]
    if missing:
        return Check(name="packages", status="fail", text=f"missing: {', '.join(missing)}", remedy=INSTALL)
    return Check(name="packages", status="ok", text=f"all {len(NEEDED)} are installed")


def check_dequantiser() -> Check:
    """What expands quantised weights on the CPU: the optional compiled library, or torch, which is slower."""
    version = installed_version("libgguf")
    if version is None:
        text = "torch; libgguf, which is several times as fast on the CPU, is not installed"
        return Check(name="dequantiser", status="ok", text=text, remedy=f"pip install '{FAST_CPU}'")
    if not has_dequantiser(version):
        text = f"torch; libgguf {version} is installed, which is not {FAST_CPU}"
        return Check(name="dequantiser", status="warn", text=text, remedy=f"pip install '{FAST_CPU}'")
    return Check(name="dequantiser", status="ok", text=f"libgguf {version}")


def has_dequantiser(version: str) -> bool:
    """Return whether the stages use this version of libgguf; kernels.native_dequant decides it for them."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    return (0, 2, 2) <= numbers < (0, 3)


def check_shadow() -> Check:
    """No folder of a clone stands on the import path, where it would hide a library of the same name."""
    spec = importlib.util.find_spec("kernels")
    origin = Path(spec.origin) if spec is not None and spec.origin else None
    if origin is not None and (origin.parent.parent / "stage_worker" / "__main__.py").is_file():
        text = f"the import path holds {origin.parent.parent}, whose folder kernels hides a library"
        remedy = "take it off PYTHONPATH, or set PYTHONSAFEPATH=1"
        return Check(name="import path", status="warn", text=text, remedy=remedy)
    return Check(name="import path", status="ok", text="no folder of a clone hides a library")


def check_nodes() -> Check:
    """The NUMA nodes and the CPUs that may be used."""
    from strata_coord.ipc.memory_policy import online_nodes

    nodes = sorted(online_nodes())
    cpus = len(os.sched_getaffinity(0))
    text = f"{len(nodes)} NUMA node(s) {', '.join(map(str, nodes))}; {cpus} CPU(s) may be used"
    if cpus < 2:
        return Check(
            name="cpus", status="warn", text=text, remedy="stages share one CPU: allow more with taskset"
        )
    return Check(name="cpus", status="ok", text=text)


def check_numactl() -> Check:
    """Whether stages can be bound before Python starts, CPUs and memory both."""
    from strata_coord.coordinator.launcher import numactl_works
    from strata_coord.ipc.memory_policy import online_nodes

    if shutil.which("numactl") is None:
        remedy = (
            "apt-get install numactl; without it each stage binds itself, after its first pages are placed"
        )
        return Check(name="numactl", status="warn", text="not installed", remedy=remedy)
    refused = [node for node in sorted(online_nodes()) if not numactl_works(node)]
    if refused:
        text = f"--cpunodebind with --membind is refused on node(s) {', '.join(map(str, refused))}"
        remedy = (
            "in a container: allow set_mempolicy (seccomp profile, or --cap-add SYS_NICE); CPUs are bound"
        )
        return Check(name="numactl", status="warn", text=text, remedy=remedy)
    return Check(name="numactl", status="ok", text="binds CPUs and memory")


def check_memory() -> Check:
    """Host memory that may be taken, the container's limit counted in."""
    import psutil

    from strata_coord.coordinator.probe import memory_limit

    available = int(psutil.virtual_memory().available)
    limit, used = memory_limit(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))
    text = f"{available / GIB:.1f} GiB available"
    if limit is not None:
        available = min(available, max(limit - used, 0))
        text += f"; the container's limit is {limit / GIB:.1f} GiB, {available / GIB:.1f} GiB are left"
    if available < SMALL_MEMORY_BYTES:
        remedy = "two stages need about 2 GiB: raise the limit, or use one stage (configs/single.toml)"
        return Check(name="memory", status="warn", text=text, remedy=remedy)
    return Check(name="memory", status="ok", text=text)


def check_open_files() -> Check:
    """Room for the descriptors of all stages."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < MIN_OPEN_FILES:
        text = f"{soft} may be open, {MIN_OPEN_FILES} are needed"
        return Check(name="open files", status="fail", text=text, remedy=f"ulimit -n {MIN_OPEN_FILES}")
    return Check(name="open files", status="ok", text=f"{soft} may be open")


def check_shared_memory() -> Check:
    """Memory can be shared by descriptor, which is what rows are handed off in."""
    from strata_coord.ipc.host_memory import create_memfd, map_memfd

    size = resource.getpagesize()
    descriptor = create_memfd("doctor", size)
    try:
        mapped = map_memfd(descriptor, size, writable=True)
        mapped[0] = 1
        mapped.close()
    finally:
        os.close(descriptor)
    return Check(name="shared memory", status="ok", text="memfd works; /dev/shm and its size do not matter")


def check_runtime_folder() -> Check:
    """A private folder for sockets, with a path short enough for them."""
    from strata_coord.ipc.endpoints import base_directory, control_endpoint, new_launch_id
    from strata_coord.ipc.errors import PlanError

    try:
        base = base_directory()
        control_endpoint(base / new_launch_id())
    except PlanError as error:
        remedy = "set XDG_RUNTIME_DIR to a short path that only you can enter"
        return Check(name="sockets", status="fail", text=str(error), remedy=remedy)
    return Check(name="sockets", status="ok", text=f"in {base}")


def check_cache() -> Check:
    """The built-in model can be kept."""
    from strata_coord.coordinator.builtin_model import cache_folder
    from strata_coord.ipc.errors import ConfigError

    try:
        folder = cache_folder()
    except ConfigError as error:
        return Check(name="cache", status="fail", text=str(error), remedy="set XDG_CACHE_HOME")
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(there, os.W_OK | os.X_OK):
        text = f"{there} cannot be written"
        return Check(name="cache", status="fail", text=text, remedy="set XDG_CACHE_HOME to a folder of yours")
    free = shutil.disk_usage(there).free
    if free < MIN_CACHE_BYTES:
        text = f"{free / 2**20:.0f} MiB are free at {there}, {MIN_CACHE_BYTES / 2**20:.0f} MiB are needed"
        return Check(name="cache", status="fail", text=text, remedy="free some, or set XDG_CACHE_HOME")
    return Check(name="cache", status="ok", text=f"{folder}, {free / GIB:.1f} GiB free")


def check_terminal() -> Check:
    """Whether launch can draw its dashboard here."""
    from strata_coord.coordinator.dashboard import choose_mode

    mode = choose_mode(sys.stderr, os.environ, dashboard=True, log_format=None)
    if mode != "live":
        text = "stderr is no terminal that can be drawn on: launch prints plain lines"
        return Check(name="terminal", status="ok", text=text)
    columns, lines = shutil.get_terminal_size()
    return Check(name="terminal", status="ok", text=f"{columns} x {lines}: launch draws its dashboard")


CHECKS: Final[tuple[tuple[str, Callable[[], Check]], ...]] = (
    ("python", check_python),
    ("system", check_system),
    ("packages", check_packages),
    ("torch", check_torch),
    ("cupy", check_cupy),
    ("gpus", check_gpus),
    ("dequantiser", check_dequantiser),
    ("import path", check_shadow),
    ("cpus", check_nodes),
    ("numactl", check_numactl),
    ("memory", check_memory),
    ("memlock", check_memlock),
    ("open files", check_open_files),
    ("shared memory", check_shared_memory),
    ("sockets", check_runtime_folder),
    ("cache", check_cache),
    ("terminal", check_terminal),
)
