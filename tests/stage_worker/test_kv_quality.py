"""What narrower keys and values cost: divergence from fp32 ones, on tiny random models and builtin:split24.

The weights are random and no token is much likelier than the next, so an error shows more than it would in a
trained model. The bars are some three times what was measured: docs/models.md has the figures, pytest -s
prints them.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from stage_chain import StageChain

from strata_coord.coordinator.builtin_model import builtin_model_path
from strata_coord.ipc.assignment import KvDtype

# Most mean KL divergence, in nats, and least agreement of the best token.
BARS: dict[KvDtype, tuple[float, float]] = {"fp16": (1e-5, 0.99), "bf16": (2e-3, 0.95), "int8": (3e-2, 0.85)}


@dataclass(frozen=True, kw_only=True)
class Quality:
    mean_kl: float
    agreement: float


def quality(narrow: torch.Tensor, reference: torch.Tensor) -> Quality:
    p, q = reference.double().log_softmax(-1), narrow.double().log_softmax(-1)
    return Quality(
        mean_kl=float((p.exp() * (p - q)).sum(-1).mean()),
        agreement=float((narrow.argmax(-1) == reference.argmax(-1)).double().mean()),
    )


def measured(path: Path, ids: list[int], folder: Path) -> dict[KvDtype, Quality]:
    def logits(kv_dtype: KvDtype) -> torch.Tensor:
        with StageChain(path, kv_dtype=kv_dtype, max_rows=256, max_sequences=1) as chain:
            # Two super-chunks: the second reads what the first has stored, as decoding does.
            return chain.prompt_logits(ids, folder, [len(ids) // 2, len(ids) - len(ids) // 2])

    reference = logits("fp32")
    return {kv_dtype: quality(logits(kv_dtype), reference) for kv_dtype in BARS}


def assert_good(found: dict[KvDtype, Quality], name: str) -> None:
    for kv_dtype, (most_kl, least_agreement) in BARS.items():
        print(
            f"{name} {kv_dtype}: KL {found[kv_dtype].mean_kl:.1e}, agreement {found[kv_dtype].agreement:.1%}"
        )
        assert 0 < found[kv_dtype].mean_kl <= most_kl, kv_dtype
        assert found[kv_dtype].agreement >= least_agreement, kv_dtype
    assert found["fp16"].mean_kl < found["int8"].mean_kl


@pytest.mark.parametrize("name", ["tiny_qwen3moe_f32", "tiny_qwen4exp_f32"])
def test_on_tiny_models(request: pytest.FixtureRequest, name: str, tmp_path: Path) -> None:
    case = request.getfixturevalue(name)
    assert_good(measured(case.path, case.ids.tolist(), tmp_path), name)


def test_on_the_builtin_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = builtin_model_path()
    ids = torch.randint(256, 500, (192,), generator=torch.Generator().manual_seed(3)).tolist()
    assert_good(measured(path, ids, tmp_path), "split24")
