"""The planner's sizes of state against what the stages allocate."""

import pytest
from planning_fakes import fake_model

from strata_coord.coordinator.state_sizes import (
    MASK_ELEMENTS,
    attention_scratch_bytes,
    pool_bytes_per_token,
    state_bytes_per_sequence,
)
from strata_coord.kernels import attention
from strata_coord.stage_worker.sequence_state import StatePool

GEOMETRY = fake_model(num_layers=8).geometry
# The n-gram history also has two token ids, which a stage takes from the token table.
TOKEN_IDS = 16


@pytest.mark.parametrize(("first", "last"), [(0, 8), (0, 3), (2, 7), (3, 4)])
@pytest.mark.parametrize("kv_dtype", ["fp32", "fp16", "bf16"])
def test_state_takes_what_the_plan_says(first, last, kv_dtype):
    pool = StatePool(
        GEOMETRY, first, last, kv_dtype=kv_dtype, kv_pool_tokens=1024, max_sequences=3, device="cpu"
    )
    planned = 1024 * pool_bytes_per_token(GEOMETRY, first, last, kv_dtype=kv_dtype)
    planned += 3 * state_bytes_per_sequence(GEOMETRY, first, last)
    assert planned - pool.num_bytes == (3 * TOKEN_IDS if first <= 1 < last else 0)


def test_the_tile_of_attention_is_the_one_that_is_planned():
    assert MASK_ELEMENTS == attention.MASK_ELEMENTS


def test_scratch_grows_with_rows_and_is_bounded_in_the_context():
    small = attention_scratch_bytes(GEOMETRY, 0, 8, rows=64, context=32768)
    large = attention_scratch_bytes(GEOMETRY, 0, 8, rows=512, context=32768)
    assert small < large
    doubled = attention_scratch_bytes(GEOMETRY, 0, 8, rows=512, context=65536)
    # Only the gathered keys and values of 2 heads x 64 are left to grow.
    assert doubled - large == 32768 * 2 * 2 * 64 * 4
