from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stage_files import ExpertFile

from strata_coord.kernels.expert_mlp import swiglu
from strata_coord.stage_worker.backend import CpuBackend
from strata_coord.stage_worker.clock import ActivityClock
from strata_coord.stage_worker.counters import TransferCounters
from strata_coord.stage_worker.expert_half import ExpertHalf, add_routing_counts, group_by_expert
from strata_coord.stage_worker.expert_math import SingleExpertMath
from strata_coord.stage_worker.expert_tiers import ExpertTiers
from strata_coord.stage_worker.residency import place_experts
from strata_coord.stage_worker.stager import Stager
from strata_coord.stage_worker.uploads import stream_all_order

HIDDEN = 64


@pytest.fixture(scope="module", params=[False, True], ids=["split", "fused"])
def experts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ExpertFile:
    return ExpertFile(tmp_path_factory.mktemp("experts") / "experts.bin", fused=request.param)


class Half:
    """An expert half over the experts of a file, with the tiers that a test chose."""

    def __init__(
        self,
        experts: ExpertFile,
        *,
        resident: Sequence[int],
        arena: Sequence[int],
        group_rows: int,
        slots: int,
    ) -> None:
        layouts = experts.layouts()
        self.experts, self.counters = experts, TransferCounters()
        self.reader = experts.reader(self.counters)
        backend = CpuBackend()
        self.residency = place_experts(layouts, resident=[tuple(resident)] * 2, in_arena=[tuple(arena)] * 2)
        tiers = ExpertTiers(layouts=layouts, residency=self.residency, backend=backend, reader=self.reader)
        tiers.load(progress=lambda _done, _total: None)
        self.stager = Stager(tiers=tiers, backend=backend, window_slots=slots, counters=self.counters)
        self.half = ExpertHalf(
            tiers=tiers,
            stager=self.stager,
            compute=backend.compute_stream(),
            clock=ActivityClock(),
            counters=self.counters,
            math=SingleExpertMath(
                layouts, group_rows=group_rows, dtype=torch.float32, device=torch.device("cpu")
            ),
        )

    def run(
        self, x_SD: torch.Tensor, ids_SK: torch.Tensor, weights_SK: torch.Tensor, policy: str
    ) -> torch.Tensor:
        """Both layers, one after the other, added to ones."""
        sum_SD = torch.ones_like(x_SD)
        rows = group_by_expert(ids_SK, weights_SK, num_experts=6)
        if policy == "stream-all":
            self.stager.plan(stream_all_order(self.residency, layers=[0, 1], num_experts=6))
        for layer in (0, 1):
            self.half.run(
                layer,
                x_SD=x_SD,
                weights_SK=weights_SK,
                rows=rows,
                policy=policy,  # type: ignore[arg-type]
                sum_SD=sum_SD,
                mlp=lambda _expert, x_TD, gate, up, down: swiglu(x_TD, gate, up, down),
            )
        return sum_SD

    def close(self) -> None:
        self.stager.close()
        self.reader.close()


def reference(
    experts: ExpertFile, x_SD: torch.Tensor, ids_SK: torch.Tensor, weights_SK: torch.Tensor
) -> torch.Tensor:
    """Row by row, choice by choice, in fp64."""
    out = torch.ones_like(x_SD, dtype=torch.float64)
    for layer in (0, 1):
        values = {
            name.split(".")[2]: value.double()
            for name, value in experts.values.items()
            if name.startswith(f"blk.{layer}.")
        }
        for row, x_D in enumerate(x_SD.double()):
            for expert, weight in zip(ids_SK[row].tolist(), weights_SK[row].tolist(), strict=True):
                if "ffn_gate_up_exps" in values:
                    gate, up = values["ffn_gate_up_exps"][expert].chunk(2)
                else:
                    gate, up = values["ffn_gate_exps"][expert], values["ffn_up_exps"][expert]
                hidden = torch.nn.functional.silu(gate @ x_D) * (up @ x_D)
                out[row] += weight * (values["ffn_down_exps"][expert] @ hidden)
    return out


def routing(num_rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [S, D], ids [S, 2] of experts 0 .. 4 (expert 5 is never chosen), weights [S, 2]."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(5, generator=generator)[:2] for _ in range(num_rows)])
    return (
        torch.randn(num_rows, HIDDEN, generator=generator),
        ids,
        torch.rand(num_rows, 2, generator=generator),
    )


@settings(deadline=None, derandomize=True, max_examples=30)
@given(
    places=st.lists(st.sampled_from(["vram", "ram", "file"]), min_size=6, max_size=6),
    num_rows=st.integers(1, 20),
    group_rows=st.sampled_from([1, 3, 100]),
    slots=st.integers(1, 4),
    policy=st.sampled_from(["stream-all", "routed-only"]),
)
def test_every_place_of_the_experts_gives_the_plain_sum(
    experts: ExpertFile, places: list[str], num_rows: int, group_rows: int, slots: int, policy: str
) -> None:
    x_SD, ids_SK, weights_SK = routing(num_rows, seed=num_rows)
    resident = [expert for expert, place in enumerate(places) if place == "vram"]
    arena = [expert for expert, place in enumerate(places) if place == "ram"]
    half = Half(experts, resident=resident, arena=arena, group_rows=group_rows, slots=slots)
    loaded = half.counters.snapshot().file_read
    found = half.run(x_SD, ids_SK, weights_SK, policy)
    assert half.stager.is_idle
    half.close()
    assert torch.allclose(found.double(), reference(experts, x_SD, ids_SK, weights_SK), rtol=1e-5, atol=1e-5)

    size = sum(len(experts.blob(layer, 0)) for layer in (0, 1))
    hit = set(ids_SK.flatten().tolist())
    uploaded = [
        expert
        for expert in range(6)
        if places[expert] != "vram" and (policy == "stream-all" or expert in hit)
    ]
    moved = half.counters.snapshot()
    assert moved.ram_to_device == size * len(uploaded)
    assert moved.file_read - loaded == size * sum(places[expert] == "file" for expert in uploaded)
    assert moved.resident_hit == size * sum(expert in hit for expert in resident)


def test_where_an_expert_lies_and_how_it_is_uploaded_changes_no_bit(experts: ExpertFile) -> None:
    inputs = routing(17, seed=1)
    sums = []
    for resident, arena in (((), ()), (range(6), ()), ((), range(6)), ((1, 4), (0, 2))):
        for policy in ("stream-all", "routed-only"):
            half = Half(experts, resident=resident, arena=arena, group_rows=3, slots=2)
            sums.append(half.run(*inputs, policy))
            half.close()
    assert all(torch.equal(found, sums[0]) for found in sums)


def test_rows_are_grouped_by_expert_and_ascend_within_one() -> None:
    ids_SK = torch.tensor([[3, 1], [1, 0], [3, 0]])
    weights_SK = torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]])
    rows = group_by_expert(ids_SK, weights_SK, num_experts=5)
    assert rows.counts == (2, 2, 0, 2, 0)
    assert rows.tokens.tolist() == [1, 2, 0, 1, 0, 2]
    assert torch.equal(rows.weights.squeeze(1), torch.tensor([0.4, 0.6, 0.2, 0.3, 0.1, 0.5]))


def test_routing_counts_add_up_and_wrap_at_32_bits(tmp_path: Path) -> None:
    table = {7: memoryview(bytearray(4 * 4)).cast("I")}
    add_routing_counts(table, 7, (1, 0, 5, 2**32 - 1))
    add_routing_counts(table, 7, (1, 0, 0, 3))
    assert table[7].tolist() == [2, 0, 5, 2]
