"""Models that make-model writes, run by the stages: sane values, and tokens that may and may not come out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from stage_chain import StageChain

from strata_coord.coordinator.make_model import make_model
from strata_coord.coordinator.model_index import load_model_index
from strata_coord.coordinator.synthetic_geometry import PRESETS
from strata_coord.ipc.messages import SamplingSettings

if TYPE_CHECKING:
    from pathlib import Path

ROWS = 384
PADDING = ROWS // 32
IDS = [(7 * index + 11) % 300 for index in range(48)]


@pytest.mark.parametrize("architecture", PRESETS)
def test_values_of_every_architecture_are_sane(tmp_path: Path, architecture: str) -> None:
    path = make_model(architecture, tmp_path / "m.gguf", layers=4, vocabulary_rows=ROWS).path
    with StageChain(path, boundaries=[2]) as chain:
        logits = chain.prompt_logits(IDS, tmp_path, [len(IDS)])
    assert 0.5 < float(logits.std()) < 4.0
    assert len(set(logits.argmax(-1).tolist())) > 10


@pytest.mark.parametrize(
    "types",
    [
        "experts=IQ3_S,down=IQ4_NL,dense=Q8_0",
        "experts=IQ1_M,down=MXFP4,dense=Q5_K",
        "experts=TQ2_0,down=NVFP4",
    ],
)
def test_values_are_sane_in_rare_types(tmp_path: Path, types: str) -> None:
    path = make_model("qwen3moe", tmp_path / "m.gguf", layers=2, vocabulary_rows=ROWS, types=types).path
    with StageChain(path) as chain:
        logits = chain.prompt_logits(IDS, tmp_path, [len(IDS)])
    assert 0.5 < float(logits.std()) < 4.0


@pytest.mark.parametrize("temperature", [0.0, 1.0, 50.0])
def test_padding_rows_never_come_out_of_a_stage_however_large_their_logits(
    tmp_path: Path, temperature: float
) -> None:
    path = make_model(
        "qwen3moe", tmp_path / "m.gguf", layers=1, vocabulary_rows=ROWS, types="output=F32"
    ).path
    index = load_model_index(path)
    output = index.output()
    # Each padding row is a hundred times the row of an ordinary token, or its opposite.
    with path.open("r+b") as file:
        data = np.memmap(file, "<f4", "r+", output.offset_bytes, output.shape)
        data[-PADDING:] = 100 * np.where(np.arange(PADDING)[:, None] % 2, 1, -1) * data[:PADDING]
        data.flush()
        del data
    settings = SamplingSettings(temperature=temperature, top_p=1.0, top_k=0, min_p=0.0, seed=3)
    with StageChain(path) as chain:
        logits = chain.prompt_logits(IDS, tmp_path, [len(IDS)])
        drawn = chain.greedy(1, IDS, 60, sample=settings)
    largest = logits.argmax(-1)
    assert int((largest >= ROWS - PADDING).sum()) > len(IDS) // 2  # they would win
    assert max(drawn) < ROWS - PADDING
