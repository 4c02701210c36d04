from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from stage_files import ExpertFile

from strata_coord.stage_worker.backend import CpuBackend
from strata_coord.stage_worker.counters import TransferCounters
from strata_coord.stage_worker.expert_tiers import ExpertTiers
from strata_coord.stage_worker.residency import place_experts

RESIDENT, IN_ARENA = [(0, 3), (5,)], [(1,), (0, 2)]


@pytest.fixture(params=[False, True], ids=["split", "fused"])
def experts(request: pytest.FixtureRequest, tmp_path: Path) -> ExpertFile:
    return ExpertFile(tmp_path / "experts.bin", fused=request.param)


class Loaded:
    def __init__(self, experts: ExpertFile, arena: torch.Tensor | None = None) -> None:
        layouts = experts.layouts()
        self.counters = TransferCounters()
        self.reader = experts.reader(self.counters)
        self.tiers = ExpertTiers(
            layouts=layouts,
            residency=place_experts(layouts, resident=RESIDENT, in_arena=IN_ARENA),
            backend=CpuBackend(),
            reader=self.reader,
            arena=arena,
        )
        self.progress: list[tuple[int, int]] = []
        self.tiers.load(progress=lambda done, total: self.progress.append((done, total)))


@pytest.fixture
def loaded(experts: ExpertFile) -> Iterator[Loaded]:
    made = Loaded(experts)
    yield made
    made.reader.close()


def content(blob: torch.Tensor | None) -> bytes | None:
    return None if blob is None else blob.numpy().tobytes()


def test_each_expert_is_in_its_tier_as_one_blob(experts: ExpertFile, loaded: Loaded) -> None:
    for layer in range(2):
        for expert in range(6):
            blob = experts.blob(layer, expert)
            in_cache, in_arena = expert in RESIDENT[layer], expert in IN_ARENA[layer]
            assert content(loaded.tiers.resident_blob(layer, expert)) == (blob if in_cache else None)
            assert content(loaded.tiers.arena_blobs(layer, [expert])) == (blob if in_arena else None)


def test_loading_reads_what_has_a_place_and_tells_how_far_it_is(experts: ExpertFile, loaded: Loaded) -> None:
    places = [(layer, expert) for tier in (RESIDENT, IN_ARENA) for layer in (0, 1) for expert in tier[layer]]
    sizes = [len(experts.blob(layer, expert)) for layer, expert in places]
    assert loaded.counters.snapshot().file_read == sum(sizes)
    done = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    assert loaded.progress == [(so_far, sum(sizes)) for so_far in done]


def test_an_expert_of_the_file_is_read_as_one_blob(experts: ExpertFile, loaded: Loaded) -> None:
    before = loaded.counters.snapshot().file_read
    target = torch.empty(len(experts.blob(1, 4)), dtype=torch.uint8)
    loaded.tiers.read_file(1, 4, target)
    assert content(target) == experts.blob(1, 4)
    assert loaded.counters.snapshot().file_read - before == target.numel()
    assert loaded.tiers.max_blob_bytes == max(len(experts.blob(layer, 0)) for layer in (0, 1))


def test_the_arena_may_be_memory_of_somebody_else(experts: ExpertFile) -> None:
    arena = torch.full((100_000,), 0xAA, dtype=torch.uint8)
    made = Loaded(experts, arena)
    made.reader.close()
    blob = made.tiers.arena_blobs(1, [2])
    assert blob is not None
    assert content(blob) == experts.blob(1, 2)
    assert arena.data_ptr() <= blob.data_ptr() < arena.data_ptr() + arena.numel()
    assert int(arena[-1]) == 0xAA  # nothing beyond the experts is touched
