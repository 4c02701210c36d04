"""The GPUs of this host through NVML, without loading torch or creating a context on any of them.

NVML counts cards by bus id and ignores CUDA_VISIBLE_DEVICES, so the variable is applied here; workers are
started with CUDA_DEVICE_ORDER=PCI_BUS_ID, which makes CUDA count in the same order. A fact that a card does
not tell (virtual ones tell little) is left at "not known"; nothing here raises.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from strata_coord.coordinator.rig import DeviceFacts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["FoundDevices", "find_devices", "visible_indices"]

T = TypeVar("T")

MAX_NODES = 1 << 10  # of Linux; some drivers answer with the largest unsigned number
_SYSFS_DEVICES = Path("/sys/bus/pci/devices")


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundDevices:
    """The visible GPUs in CUDA's order, or the reason why there are none."""

    devices: tuple[DeviceFacts, ...] = ()
    reason: str = ""


NO_LIBRARY = "the package nvidia-ml-py is not installed: pip install -e '.[cuda13]'"


def find_devices(
    *, num_nodes: int, environment: Mapping[str, str] = os.environ, sysfs: Path = _SYSFS_DEVICES
) -> FoundDevices:
    """Ask the driver for every GPU that this program may use.

    Args:
        num_nodes: NUMA nodes of the host: with one node, a card that names none is on that one.
        environment: Where CUDA_VISIBLE_DEVICES may stand.
        sysfs: The folder of PCI devices, for nodes that NVML does not tell.
    """
    try:
        import pynvml
    except ImportError:
        return FoundDevices(reason=NO_LIBRARY)
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return FoundDevices(reason=f"no NVIDIA driver: {error}")
    try:
        return _ask(pynvml, environment.get("CUDA_VISIBLE_DEVICES"), num_nodes, sysfs)
    except pynvml.NVMLError as error:
        return FoundDevices(reason=f"the NVIDIA driver does not answer: {error}")
    finally:
        _told(pynvml, pynvml.nvmlShutdown, None)


def visible_indices(variable: str | None, uuids: list[str]) -> list[int]:
    """Return the indices of the visible GPUs in CUDA's order, as CUDA reads CUDA_VISIBLE_DEVICES.

    Entries are indices or beginnings of UUIDs. The first that names no GPU, or one named before, ends the
    list. Parts of a card (MIG-...) are not found.
    """
    if variable is None:
        return list(range(len(uuids)))
    found: list[int] = []
    for entry in variable.split(","):
        word = entry.strip()
        if re.fullmatch(r"\d+", word):
            matches = [int(word)] if int(word) < len(uuids) else []
        else:
            matches = [n for n, uuid in enumerate(uuids) if word and uuid.lower().startswith(word.lower())]
        if len(matches) != 1 or matches[0] in found:
            break
        found += matches
    return found


def _ask(nvml: Any, variable: str | None, num_nodes: int, sysfs: Path) -> FoundDevices:
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    if not handles:
        return FoundDevices(reason="the driver finds no GPU")
    uuids = [_text(nvml.nvmlDeviceGetUUID(handle)) for handle in handles]
    visible = visible_indices(variable, uuids)
    if not visible:
        return FoundDevices(reason=f"CUDA_VISIBLE_DEVICES={variable} shows none of {len(handles)} GPU(s)")
    chosen = [handles[index] for index in visible]
    return FoundDevices(
        devices=tuple(
            _facts(nvml, number, chosen, uuids[index], num_nodes, sysfs)
            for number, index in enumerate(visible)
        )
    )


def _facts(nvml: Any, number: int, handles: list[Any], uuid: str, num_nodes: int, sysfs: Path) -> DeviceFacts:
    handle = handles[number]
    bus_id = _bus_id(_told(nvml, lambda: _text(nvml.nvmlDeviceGetPciInfo(handle).busId), ""))
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    return DeviceFacts(
        device=number,
        name=_text(nvml.nvmlDeviceGetName(handle)),
        uuid=uuid,
        bus_id=bus_id,
        total_bytes=int(memory.total),
        free_bytes=int(memory.free),
        compute_capability=(int(major), int(minor)),
        link_generation=_told(nvml, lambda: int(nvml.nvmlDeviceGetCurrPcieLinkGeneration(handle)), 0),
        link_width=_told(nvml, lambda: int(nvml.nvmlDeviceGetCurrPcieLinkWidth(handle)), 0),
        max_link_generation=_told(nvml, lambda: int(nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)), 0),
        max_link_width=_told(nvml, lambda: int(nvml.nvmlDeviceGetMaxPcieLinkWidth(handle)), 0),
        numa_node=_node(nvml, handle, bus_id, num_nodes, sysfs),
        peers=tuple(
            other for other, peer in enumerate(handles) if other != number and _reaches(nvml, handle, peer)
        ),
    )


def _node(nvml: Any, handle: Any, bus_id: str, num_nodes: int, sysfs: Path) -> int:
    node = _file_number(sysfs / bus_id / "numa_node") if bus_id else -1
    if node < 0:
        # Second choice: where the card's memory is a node of its own, this names that one, without CPUs.
        told = _told(nvml, lambda: int(nvml.nvmlDeviceGetNumaNodeId(handle)), -1)
        node = told if 0 <= told < MAX_NODES else -1
    # Firmware that describes no nodes says -1 for every card; on a host of one node that is the one.
    return 0 if node < 0 and num_nodes <= 1 else node


def _reaches(nvml: Any, handle: Any, peer: Any) -> bool:
    def granted() -> bool:
        caps = (nvml.NVML_P2P_CAPS_INDEX_READ, nvml.NVML_P2P_CAPS_INDEX_WRITE)
        return all(nvml.nvmlDeviceGetP2PStatus(handle, peer, cap) == nvml.NVML_P2P_STATUS_OK for cap in caps)

    return _told(nvml, granted, default=False)


def _told(nvml: Any, ask: Callable[[], T], default: T) -> T:
    """What the driver says, or default where it, or an older library, does not know the question."""
    try:
        return ask()
    except (nvml.NVMLError, AttributeError):
        return default


def _bus_id(text: str) -> str:
    """NVML writes the domain with eight digits, sysfs with four."""
    domain, colon, rest = text.lower().partition(":")
    return f"{domain[-4:]}{colon}{rest}"


def _file_number(path: Path) -> int:
    try:
        return int(path.read_text(encoding="ascii").strip())
    except (OSError, ValueError):
        return -1


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
