"""Experts in batches: uploads of several blobs, and grouped products in place of one product per expert."""

from pathlib import Path

import pytest
from oracle.fixtures import TinyCase
from stage_chain import StageChain, Tiers, relative_error

from strata_coord.stage_worker.backend import CpuBackend


class BatchingCpu(CpuBackend):
    """The CPU, multiplying batches of experts as a CUDA device does."""

    def __init__(self) -> None:
        super().__init__()
        self.multiplies_batches = True


TIERS = [
    Tiers(resident=99),
    Tiers(window_slots=3),
    Tiers(resident=5, window_slots=7),
    Tiers(resident=3, arena=6, window_slots=4),
    Tiers(arena=0, window_slots=2),
]


@pytest.fixture(params=["tiny_qwen3moe_q", "tiny_qwen4exp_q"])
def case(request: pytest.FixtureRequest) -> TinyCase:
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("tiers", TIERS)
@pytest.mark.parametrize("upload_group", [3, 16])
def test_uploads_of_several_blobs_change_no_bit(
    case: TinyCase, tmp_path: Path, tiers: Tiers, upload_group: int
) -> None:
    ids = case.ids.tolist()[:72]
    moved = []
    found = []
    for group in (1, upload_group):
        with StageChain(case.path, tiers=tiers, upload_group=group) as chain:
            before = chain.stages[0].counters.snapshot().ram_to_device
            found.append(chain.prompt_logits(ids, tmp_path, [64, 8]))
            moved.append(chain.stages[0].counters.snapshot().ram_to_device - before)
            assert chain.is_at_rest
    assert moved[0] == moved[1]
    assert relative_error(found[1], found[0]) <= 1e-6  # the order of use differs where residents lie between


@pytest.mark.parametrize(
    ("tiers", "upload_group", "pass_rows", "upload"),
    [
        (TIERS[0], 16, 1000, "stream-all"),
        (TIERS[1], 3, 20, "stream-all"),
        (TIERS[2], 3, 1000, "routed-only"),
        (TIERS[2], 16, 20, "stream-all"),
        (TIERS[3], 2, 48, "routed-only"),
        (TIERS[4], 1, 48, "stream-all"),
    ],
)
def test_grouped_products_equal_single_ones(
    case: TinyCase, tmp_path: Path, tiers: Tiers, upload_group: int, pass_rows: int, upload: str
) -> None:
    ids = case.ids.tolist()[:80]
    found = []
    for backend in (CpuBackend, BatchingCpu):
        with StageChain(
            case.path,
            tiers=tiers,
            upload_group=upload_group,
            group_rows=pass_rows,
            compute_dtype="bf16",
            backend=backend,
        ) as chain:
            assert all(not stage.notes for stage in chain.stages)
            found.append(chain.prompt_logits(ids, tmp_path, [64, 15, 1], upload=upload))
    # bf16 roundings fall differently and may flip a router; a wrong row or weight is off by far more.
    agreement = float((found[0].argmax(1) == found[1].argmax(1)).float().mean())
    assert agreement >= 0.9
    median = float(((found[1] - found[0]).norm(dim=1) / found[0].norm(dim=1)).median())
    assert median <= 3e-2


def test_experts_that_cannot_be_batched_say_why(tiny_qwen3moe_q: TinyCase) -> None:
    with StageChain(tiny_qwen3moe_q.path, backend=BatchingCpu) as chain:
        (note,) = chain.stages[0].notes
    assert note == "experts are multiplied one by one: weights are torch.float32, grouped products take bf16"
