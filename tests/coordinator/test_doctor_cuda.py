import resource
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from planning_fakes import fake_device

from strata_coord.coordinator import doctor_cuda
from strata_coord.coordinator.cuda_install import cuda_version
from strata_coord.coordinator.gpus import FoundDevices


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Set how many cards the driver has, which of them are found, and what is installed."""

    def have(number: int, found: FoundDevices | None = None, *, cuda: str | None = None, cupy: str = ""):
        for card in range(number):
            (tmp_path / f"0000:0{card}:00.0").mkdir(exist_ok=True)
        monkeypatch.setattr(doctor_cuda, "DRIVER_FOLDER", tmp_path)
        monkeypatch.setattr(doctor_cuda, "_found", lambda: found or FoundDevices(reason="no NVIDIA driver"))
        monkeypatch.setattr(doctor_cuda, "torch_cuda_version", lambda: cuda)
        listed = [
            SimpleNamespace(metadata={"Name": name}) for name in [*cupy.split(), "torch", "cupyx-other"]
        ]
        monkeypatch.setattr(metadata, "distributions", lambda: iter(listed))
        monkeypatch.setattr(metadata, "version", lambda _name: "1.2")

    return have


@pytest.mark.parametrize(
    ("text", "cuda"),
    [
        ("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n", None),
        ("__version__ = '2.11.0+cu130'\ncuda: Optional[str] = '13.0'\nhip = None\n", "13.0"),
        ('cuda = "12.6"\n', "12.6"),
        ("", None),
    ],
)
def test_the_build_of_torch_is_read_from_its_version_file(text, cuda):
    assert cuda_version(text) == cuda


def test_a_machine_without_gpus_is_fine(cards):
    cards(0)
    for check in (doctor_cuda.check_gpus, doctor_cuda.check_torch, doctor_cuda.check_cupy):
        assert check().status == "ok"
    assert "none: no NVIDIA driver; stages run on the CPU" in doctor_cuda.check_gpus().text


def test_gpus_are_listed_with_link_and_node(cards):
    cards(2, FoundDevices(devices=(fake_device(), fake_device(1, numa_node=-1, compute_capability=(7, 5)))))
    found = doctor_cuda.check_gpus()
    assert found.status == "ok"
    assert "cuda:0 NVIDIA GeForce RTX 4090, 24.0 GiB, 19.5 free, 26.8 GB/s assumed, PCIe 4 x16, node 0;" in (
        found.text
    )
    assert found.text.endswith("node not known, no bf16")


def test_a_card_with_half_of_its_lanes_is_named(cards):
    cards(1, FoundDevices(devices=(fake_device(link_width=8),)))
    found = doctor_cuda.check_gpus()
    assert found.status == "warn"
    assert "cuda:0 has x8 of x16" in found.remedy


@pytest.mark.parametrize(
    ("reason", "remedy"),
    [
        ("the package nvidia-ml-py is not installed", "[cuda13]"),
        ("CUDA_VISIBLE_DEVICES= shows none of 1 GPU(s)", "unset CUDA_VISIBLE_DEVICES"),
        ("no NVIDIA driver: Driver Not Loaded", "--gpus all"),
    ],
)
def test_a_card_that_cannot_be_reached_is_a_warning_with_its_remedy(cards, reason, remedy):
    cards(1, FoundDevices(reason=reason))
    found = doctor_cuda.check_gpus()
    assert (found.status, reason in found.text) == ("warn", True)
    assert remedy in found.remedy


@pytest.mark.parametrize(
    ("cuda", "cupy", "torch_status", "cupy_status", "said"),
    [
        (None, "", "warn", "ok", "not needed on the CPU"),
        ("13.0", "", "ok", "warn", "cupy is not installed: no stage runs on a GPU"),
        ("13.0", "cupy_cuda12x", "ok", "warn", "cupy-cuda12x is not for the CUDA 13.0"),
        ("13.0", "cupy-cuda13x", "ok", "ok", "cupy-cuda13x 1.2"),
        ("13.0", "cupy_cuda13x cupy-cuda12x cupy-cuda12x", "ok", "fail", "cupy-cuda12x, cupy-cuda13x"),
    ],
)
def test_beside_a_card_the_packages_have_to_fit(cards, cuda, cupy, torch_status, cupy_status, said):
    cards(1, cuda=cuda, cupy=cupy)
    torch, found = doctor_cuda.check_torch(), doctor_cuda.check_cupy()
    assert (torch.status, found.status) == (torch_status, cupy_status)
    assert said in found.text
    assert bool(found.remedy) == (cupy_status != "ok")


@pytest.mark.parametrize(
    ("limit", "num_cards", "status"),
    [(8 << 20, 0, "ok"), (8 << 20, 1, "warn"), (64 << 30, 1, "ok"), (resource.RLIM_INFINITY, 1, "ok")],
)
def test_locked_memory_matters_where_arenas_are_pinned(cards, monkeypatch, limit, num_cards, status):
    cards(num_cards)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    found = doctor_cuda.check_memlock()
    assert found.status == status
    assert ("--ulimit memlock=-1" in found.remedy) == (status == "warn")
