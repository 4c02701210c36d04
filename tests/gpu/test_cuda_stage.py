"""Whole stages on a CUDA device against transformers and against the CPU's stages."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from oracle.fixtures import TinyCase
from stage_chain import StageChain, Tiers, relative_error

from strata_coord.stage_worker.backend import Backend

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
    pytest.mark.leaves("the CUDA context, whose descriptors live as long as the process"),
]
CASES = ["tiny_qwen3moe_f32", "tiny_qwen3moe_q", "tiny_qwen4exp_f32", "tiny_qwen4exp_q"]


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> TinyCase:
    return request.getfixturevalue(request.param)


def cuda() -> Backend:
    from strata_coord.stage_worker.cuda_backend import CudaBackend

    return CudaBackend(0)


def logits(
    case: TinyCase, folder: Path, *, cuts: list[int] | None = None, **settings: object
) -> torch.Tensor:
    with StageChain(case.path, backend=cuda, **settings) as chain:  # type: ignore[arg-type]
        ids = case.ids.tolist()
        return chain.prompt_logits(ids, folder, cuts or [len(ids)])


@pytest.mark.parametrize("boundaries", [(), (2,)])
def test_fp32_equals_transformers(case: TinyCase, tmp_path: Path, boundaries: tuple[int, ...]) -> None:
    found = logits(case, tmp_path, boundaries=boundaries)
    reference = case.reference.logits
    assert relative_error(found, reference) <= 5e-5
    assert torch.equal(found.argmax(1), reference.argmax(1))


@pytest.mark.parametrize(
    "tiers",
    [Tiers(resident=99), Tiers(resident=5), Tiers(arena=0), Tiers(resident=3, arena=4, window_slots=1)],
)
def test_experts_of_any_tier_give_the_same(case: TinyCase, tmp_path: Path, tiers: Tiers) -> None:
    found = logits(case, tmp_path, tiers=tiers, cuts=[64, 64, 72])
    assert relative_error(found, case.reference.logits) <= 5e-5


def test_bf16_is_close_in_distribution(
    case: TinyCase, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    found = logits(case, tmp_path, compute_dtype="bf16").double()
    reference = case.reference.logits.double()
    divergence = torch.nn.functional.kl_div(
        found.log_softmax(1), reference.log_softmax(1), log_target=True, reduction="batchmean"
    )
    agreement = float((found.argmax(1) == reference.argmax(1)).double().mean())
    record_property("kl", float(divergence))
    record_property("agreement", agreement)
    print(f"bf16: KL {float(divergence):.2e}, argmax agreement {agreement:.3f}")
    assert float(divergence) < 5e-2  # random models flip routers; a wrong kernel is off by whole nats
    assert agreement > 0.9
