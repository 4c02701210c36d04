"""What the doctor looks at where GPUs are, or should be: driver, torch, cupy, links, locked memory."""

import importlib.util
import resource
from pathlib import Path
from typing import Final

from strata_coord.coordinator.cuda_install import cupy_packages, cupy_problem, torch_cuda_version
from strata_coord.coordinator.device_facts import link_text, takes_bf16
from strata_coord.coordinator.doctor import INSTALL, Check, installed_version
from strata_coord.coordinator.gpus import FoundDevices, find_devices
from strata_coord.coordinator.rig import DeviceFacts

GIB: Final = 2**30
INSTALL_CUDA: Final = (
    "pip install -c constraints/cuda13.txt -e '.[cuda13]' in a clone of strata-coord (cuda12 for a driver "
    "below 580)"
)
DRIVER_FOLDER: Final = Path("/proc/driver/nvidia/gpus")
# Below this, pinning an arena of any use is refused where the limit counts.
SMALL_MEMLOCK_BYTES: Final = GIB


def check_gpus() -> Check:
    """The GPUs that stages may use, with their links."""
    found = _found()
    if not found.devices:
        there = _cards_of_driver()
        if not there:
            return Check(name="gpus", status="ok", text=f"none: {found.reason}; stages run on the CPU")
        text = f"the driver has {there} GPU(s), but none can be used: {found.reason}"
        return Check(name="gpus", status="warn", text=text, remedy=_reach_remedy(found.reason))
    narrow = [device for device in found.devices if 0 < device.link_width < device.max_link_width]
    text = "; ".join(map(_device_text, found.devices))
    if narrow:
        few = ", ".join(f"{one.key} has x{one.link_width} of x{one.max_link_width}" for one in narrow)
        remedy = (
            f"{few}: experts cross that link, so move the card to a slot with all lanes, or give its stages "
            "fewer layers"
        )
        return Check(name="gpus", status="warn", text=text, remedy=remedy)
    return Check(name="gpus", status="ok", text=text)


def check_torch() -> Check:
    """Which torch is installed, told from its files without loading it."""
    version = installed_version("torch")
    if version is None:
        return Check(name="torch", status="fail", text="not installed", remedy=INSTALL)
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        text = f"{version} is listed, but its files are gone"
        return Check(name="torch", status="fail", text=text, remedy=f"pip uninstall torch, then {INSTALL}")
    cuda = torch_cuda_version()
    if cuda is None and (cards := _cards_of_driver()):
        text = f"{version}, a CPU build, beside {cards} NVIDIA GPU(s), which stages cannot use"
        return Check(name="torch", status="warn", text=text, remedy=INSTALL_CUDA)
    kind = "a CPU build" if cuda is None else f"a build for CUDA {cuda}"
    return Check(name="torch", status="ok", text=f"{version}, {kind}")


def check_cupy() -> Check:
    """One cupy package, for the CUDA of torch: two of them overwrite each other's files."""
    installed = cupy_packages()
    if len(installed) > 1:
        remedy = f"pip uninstall {' '.join(installed)}, then install the one for your CUDA version"
        text = f"installed {len(installed)} times: {', '.join(installed)}"
        return Check(name="cupy", status="fail", text=text, remedy=remedy)
    cuda = torch_cuda_version()
    problem = cupy_problem(installed, cuda) if cuda is not None else ""
    if problem and _cards_of_driver():
        return Check(
            name="cupy", status="warn", text=f"{problem}: no stage runs on a GPU", remedy=INSTALL_CUDA
        )
    if not installed:
        return Check(name="cupy", status="ok", text="not installed, and not needed on the CPU")
    return Check(name="cupy", status="ok", text=f"{installed[0]} {installed_version(installed[0])}")


def check_memlock() -> Check:
    """The limit of locked memory, which counts where arenas are pinned for a GPU."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    amount = "no limit" if soft == resource.RLIM_INFINITY else f"{soft / 2**20:.0f} MiB"
    if not _cards_of_driver():
        return Check(name="memlock", status="ok", text=f"{amount}; CPU stages lock no memory")
    if soft != resource.RLIM_INFINITY and soft < SMALL_MEMLOCK_BYTES:
        text = f"{amount}; where the driver counts pinned memory against it, arenas stay pageable"
        remedy = "ulimit -l unlimited (limits.conf: memlock), in a container: --ulimit memlock=-1"
        return Check(name="memlock", status="warn", text=text, remedy=remedy)
    return Check(name="memlock", status="ok", text=amount)


def _found() -> FoundDevices:
    from strata_coord.ipc.memory_policy import online_nodes

    return find_devices(num_nodes=len(online_nodes()))


def _device_text(device: DeviceFacts) -> str:
    node = f"node {device.numa_node}" if device.numa_node >= 0 else "node not known"
    dtype = "" if takes_bf16(device) else ", no bf16"
    return (
        f"{device.key} {device.name}, {device.total_bytes / GIB:.1f} GiB, "
        f"{device.free_bytes / GIB:.1f} free, "
        f"{link_text(device)}, {node}{dtype}"
    )


def _reach_remedy(reason: str) -> str:
    if "nvidia-ml-py" in reason:
        return INSTALL_CUDA
    if "CUDA_VISIBLE_DEVICES" in reason:
        return "unset CUDA_VISIBLE_DEVICES, or name cards by the numbers or UUIDs that nvidia-smi -L shows"
    return "nvidia-smi should list the cards; in a container, start it with --gpus all"


def _cards_of_driver() -> int:
    """Cards that the kernel's driver has, whatever is installed beside it."""
    try:
        return sum(1 for _ in DRIVER_FOLDER.iterdir())
    except OSError:
        return 0
