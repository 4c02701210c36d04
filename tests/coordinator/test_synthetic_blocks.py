"""Random blocks: valid bytes of every type, of the wanted spread, the same for a seed."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from strata_coord.coordinator.ggml_types import GGML_TYPES
from strata_coord.coordinator.synthetic_blocks import (
    F16,
    F32,
    MAKEABLE_TYPES,
    Q2_0,
    Q4_K,
    RandomSource,
    random_rows,
    row_bytes,
)
from strata_coord.kernels.dequant import EXPANDERS


def _dequantise(rows: np.ndarray, ggml_type: int) -> np.ndarray:
    if ggml_type != Q2_0:
        return gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(ggml_type))
    blocks = rows.reshape(-1, 18)
    scale = blocks[:, :2].copy().view("<f2").astype(np.float32)
    values = (blocks[:, 2:, None] >> np.array([0, 2, 4, 6], np.uint8)) & 3
    return scale * (values.reshape(len(blocks), 64).astype(np.float32) - 1)


@pytest.mark.parametrize("ggml_type", sorted(MAKEABLE_TYPES), ids=lambda kind: GGML_TYPES[kind].name)
@pytest.mark.parametrize("std", [0.02, 1.0])
def test_values_have_the_wanted_spread(ggml_type: int, std: float) -> None:
    rows = random_rows(RandomSource(3), ggml_type, 512, 512, std=std)
    assert rows.shape == (512, row_bytes(ggml_type, 512))
    values = _dequantise(rows, ggml_type)
    assert np.isfinite(values).all()
    assert float(values.std()) == pytest.approx(std, rel=0.03)
    assert abs(float(values.mean())) < 0.02 * std


def test_the_bytes_are_those_of_the_first_release() -> None:
    rows = random_rows(RandomSource(3, 4), Q4_K, 1, 256, std=1.0)
    assert rows[0, :8].tobytes().hex() == "801b082797f21dba"
    plain = random_rows(RandomSource(3, 4), F32, 1, 4, std=1.0).view(np.float32)
    assert plain[0].tolist() == pytest.approx([1.3553054, -0.0207732, -0.6579499, -0.187038], abs=1e-7)


def test_seeds_make_different_streams() -> None:
    streams = [RandomSource(*seeds).raw_bytes(64).tobytes() for seeds in ((1, 2), (2, 1), (1, 3))]
    assert len(set(streams)) == 3


def test_normal_values_have_variance_one_and_no_tail_beyond_the_bound() -> None:
    values = RandomSource(5).normal(200_000)
    assert float(values.std()) == pytest.approx(1.0, rel=0.01)
    assert abs(float(values.mean())) < 0.01
    assert float(np.abs(values).max()) < 3.47


def test_neighbouring_blocks_have_different_scales() -> None:
    rows = random_rows(RandomSource(1), Q4_K, 1, 2_560, std=1.0).reshape(10, 144)
    assert len({block[:2].tobytes() for block in rows}) == 10


@pytest.mark.parametrize(
    ("ggml_type", "length", "text"),
    [
        (Q4_K, 640, "640 values is not a whole number of Q4_K blocks of 256"),
        (9, 256, "Q8_1 cannot be made"),
    ],
)
def test_rows_that_cannot_be_made_are_refused(ggml_type: int, length: int, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        row_bytes(ggml_type, length)


def test_every_type_that_stages_expand_can_be_made() -> None:
    assert set(EXPANDERS) == MAKEABLE_TYPES


def test_a_plain_row_has_its_own_size() -> None:
    assert row_bytes(F16, 3) == 6
