"""The whole stage by either way of expanding blocks on the CPU: the same bits come out."""

from pathlib import Path

import pytest
import torch
from oracle.fixtures import TinyCase
from stage_chain import StageChain, Tiers

from strata_coord.kernels import native_dequant


def logits_and_tokens(case: TinyCase, folder: Path) -> tuple[torch.Tensor, list[int]]:
    ids = case.ids.tolist()[:40]
    with StageChain(case.path, boundaries=(2,), tiers=Tiers(resident=3, arena=4)) as chain:
        logits = chain.prompt_logits(ids, folder, [30, 10])
        return logits, chain.greedy(1, ids, 4)


@pytest.mark.skipif(not native_dequant.describe().startswith("libgguf"), reason=native_dequant.describe())
@pytest.mark.parametrize("name", ["tiny_qwen3moe_q", "tiny_qwen4exp_q"])
def test_torch_and_libgguf_give_the_same_bits(
    name: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = request.getfixturevalue(name)
    native_logits, native_tokens = logits_and_tokens(case, tmp_path)
    monkeypatch.setattr(native_dequant, "choose", lambda *_ignored: None)
    logits, tokens = logits_and_tokens(case, tmp_path)
    assert torch.equal(native_logits, logits)
    assert native_tokens == tokens
