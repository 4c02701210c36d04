"""GPUs as NVML tells them, with a driver played by the test."""

import sys
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from strata_coord.coordinator import probe
from strata_coord.coordinator.cuda_install import cupy_problem
from strata_coord.coordinator.gpus import FoundDevices, find_devices, visible_indices

UUIDS = ["GPU-aaaa1111", "GPU-aaaa2222", "GPU-bbbb3333"]


class NVMLError(Exception):
    """What the library raises for everything."""


@dataclass
class FakeNvml:
    """The module pynvml; unsupported: names of functions that cards do not answer."""

    num_cards: int = 3
    driver: bool = True
    unsupported: frozenset[str] = frozenset()
    nodes: tuple[int, ...] = (0, 1, 1)
    links: tuple[tuple[int, int], ...] = ((0, 1), (1, 0))  # pairs that reach each other
    bytes_for_text: bool = False
    calls: list[str] = field(default_factory=list)

    NVMLError = NVMLError
    NVML_P2P_CAPS_INDEX_READ = 0
    NVML_P2P_CAPS_INDEX_WRITE = 1
    NVML_P2P_STATUS_OK = 0

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvml"):
            raise AttributeError(name)

        def call(*arguments: Any) -> Any:
            self.calls.append(name)
            if not self.driver or name in self.unsupported:
                raise NVMLError(f"{name}: Driver Not Loaded" if not self.driver else "Not Supported")
            return self._answer(name, *arguments)

        return call

    def _answer(self, name: str, *arguments: Any) -> Any:
        card = arguments[0] if arguments else 0
        text = (lambda value: value.encode()) if self.bytes_for_text else (lambda value: value)
        return {
            "nvmlInit": lambda: None,
            "nvmlShutdown": lambda: None,
            "nvmlDeviceGetCount": lambda: self.num_cards,
            "nvmlDeviceGetHandleByIndex": lambda: card,
            "nvmlDeviceGetName": lambda: text(f"NVIDIA Card {card}"),
            "nvmlDeviceGetUUID": lambda: text(UUIDS[card]),
            "nvmlDeviceGetPciInfo": lambda: SimpleNamespace(busId=text(f"00000000:{card + 1:02X}:00.0")),
            "nvmlDeviceGetMemoryInfo": lambda: SimpleNamespace(total=24 << 30, free=(20 + card) << 30),
            "nvmlDeviceGetCudaComputeCapability": lambda: (8, card),
            "nvmlDeviceGetCurrPcieLinkGeneration": lambda: 1,
            "nvmlDeviceGetCurrPcieLinkWidth": lambda: 8,
            "nvmlDeviceGetMaxPcieLinkGeneration": lambda: 4,
            "nvmlDeviceGetMaxPcieLinkWidth": lambda: 16,
            "nvmlDeviceGetNumaNodeId": lambda: self.nodes[card],
            "nvmlDeviceGetP2PStatus": lambda: int(arguments[:2] not in self.links),
        }[name]()


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)  # type: ignore[arg-type]
    return fake


@pytest.fixture
def found(nvml, tmp_path):
    """find_devices on a host of so many nodes, with sysfs in a folder of the test."""

    def find(num_nodes: int = 2, visible: str | None = None) -> FoundDevices:
        environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        return find_devices(num_nodes=num_nodes, environment=environment, sysfs=tmp_path)

    return find


def test_every_fact_is_asked_of_the_driver(found, nvml):
    first, second, third = found().devices
    assert (second.device, second.key, second.name, second.uuid) == (1, "cuda:1", "NVIDIA Card 1", UUIDS[1])
    assert second.bus_id == "0000:02:00.0"
    assert (second.total_bytes, second.free_bytes) == (24 << 30, 21 << 30)
    assert second.compute_capability == (8, 1)
    assert (second.link_generation, second.link_width) == (1, 8)
    assert (second.max_link_generation, second.max_link_width) == (4, 16)
    assert [one.numa_node for one in (first, second, third)] == [0, 1, 1]
    assert [one.peers for one in (first, second, third)] == [(1,), (0,), ()]
    assert nvml.calls[-1] == "nvmlShutdown"


def test_older_libraries_answer_in_bytes(found, nvml):
    plain = found()
    nvml.bytes_for_text = True
    assert found() == plain


def test_no_library_no_driver_and_no_card_are_reasons(found, nvml, monkeypatch):
    nvml.num_cards = 0
    assert found() == FoundDevices(reason="the driver finds no GPU")
    nvml.driver = False
    assert found() == FoundDevices(reason="no NVIDIA driver: nvmlInit: Driver Not Loaded")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    missing = "the package nvidia-ml-py is not installed: pip install -e '.[cuda13]'"
    assert found() == FoundDevices(reason=missing)


def test_a_driver_that_fails_in_the_middle_is_a_reason_and_is_let_go(found, nvml):
    nvml.unsupported = frozenset({"nvmlDeviceGetMemoryInfo"})
    assert found() == FoundDevices(reason="the NVIDIA driver does not answer: Not Supported")
    assert nvml.calls[-1] == "nvmlShutdown"


def test_what_a_virtual_card_does_not_tell_is_not_known(found, nvml):
    nvml.unsupported = frozenset(
        {
            "nvmlDeviceGetPciInfo",
            "nvmlDeviceGetCurrPcieLinkGeneration",
            "nvmlDeviceGetCurrPcieLinkWidth",
            "nvmlDeviceGetMaxPcieLinkGeneration",
            "nvmlDeviceGetMaxPcieLinkWidth",
            "nvmlDeviceGetNumaNodeId",
            "nvmlDeviceGetP2PStatus",
        }
    )
    device = found().devices[0]
    assert (device.bus_id, device.numa_node, device.peers) == ("", -1, ())
    assert (device.link_generation, device.link_width, device.max_link_generation) == (0, 0, 0)


@pytest.mark.parametrize(
    ("sysfs", "told", "num_nodes", "node"),
    [
        ("1\n", 0, 2, 1),  # the host's node wins: NVML's may be the card's own memory
        ("-1\n", 1, 2, 1),
        ("-1\n", 2**32 - 1, 2, -1),
        ("-1\n", -1, 1, 0),
        (None, -1, 2, -1),
        ("word\n", -1, 1, 0),
    ],
)
def test_the_node_of_a_card(found, nvml, tmp_path, sysfs, told, num_nodes, node):
    nvml.nodes = (told,) * 3
    if sysfs is not None:
        folder = tmp_path / "0000:01:00.0"
        folder.mkdir()
        (folder / "numa_node").write_text(sysfs)
    assert found(num_nodes).devices[0].numa_node == node


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("-1", []),
        ("2,0", [2, 0]),
        (" 1 , 2 ", [1, 2]),
        ("0,7,1", [0]),
        ("1,1", [1]),
        ("GPU-bbbb,0", [2, 0]),
        ("gpu-AAAA2", [1]),
        ("GPU-aaaa", []),
        ("0,,1", [0]),
        ("MIG-1234,0", []),
        ("none", []),
    ],
)
def test_visible_devices_are_read_as_cuda_reads_them(variable, expected):
    assert visible_indices(variable, UUIDS) == expected


def test_visible_cards_are_numbered_anew_and_so_are_their_peers(found):
    first, second = found(visible="1,0").devices
    assert [(one.device, one.uuid, one.peers) for one in (first, second)] == [
        (0, UUIDS[1], (1,)),
        (1, UUIDS[0], (0,)),
    ]
    assert found(visible="").reason == "CUDA_VISIBLE_DEVICES= shows none of 3 GPU(s)"


# --- packages ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("packages", "cuda", "problem"),
    [
        (["cupy-cuda13x"], "13.0", ""),
        (["cupy"], "13.0", ""),
        ([], "13.0", "cupy is not installed"),
        (["cupy-cuda12x"], "13.0", "cupy-cuda12x is not for the CUDA 13.0 that torch was built for"),
        (["cupy-cuda12x", "cupy-cuda13x"], "13.0", "cupy is installed 2 times: cupy-cuda12x, cupy-cuda13x"),
    ],
)
def test_cupy_has_to_fit_torch(packages, cuda, problem):
    assert cupy_problem(packages, cuda) == problem


def test_gpus_that_the_installation_cannot_use_are_not_planned_with(nvml, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(probe, "missing_for_cuda", lambda: "the installed torch is a CPU build")
    rig = probe.probe_rig(measure=False)
    assert rig.devices == ()
    assert rig.no_devices == "3 GPU(s) are here, but the installed torch is a CPU build"
    monkeypatch.setattr(probe, "missing_for_cuda", lambda: "")
    assert [one.key for one in probe.probe_rig(measure=False).devices] == ["cuda:0", "cuda:1", "cuda:2"]
