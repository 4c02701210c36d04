"""The planner's sizes of state and scratch against what the stages allocate."""

import pytest
import torch
from planning_fakes import fake_model

from strata_coord.coordinator.state_sizes import (
    DELTA_CHUNK_ROWS,
    MASK_ELEMENTS,
    attention_scratch_bytes,
    pool_bytes_per_token,
    state_bytes_per_sequence,
)
from strata_coord.ipc.assignment import (
    AttentionGeometry,
    DeltaNetGeometry,
    ExpertGeometry,
    ModelGeometry,
)
from strata_coord.kernels import attention, gated_delta
from strata_coord.stage_worker.models.attention import Attention, Rotary
from strata_coord.stage_worker.models.family import Mixer, SegmentRows
from strata_coord.stage_worker.models.gated_delta_net import GatedDeltaNet
from strata_coord.stage_worker.sequence_state import StatePool

GEOMETRY = fake_model(num_layers=8).geometry
# The n-gram history also has two token ids, which a stage takes from the token table.
TOKEN_IDS = 16


@pytest.mark.parametrize(("first", "last"), [(0, 8), (0, 3), (2, 7), (3, 4)])
@pytest.mark.parametrize("kv_dtype", ["fp32", "fp16", "bf16", "int8"])
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


def hybrid(
    *, layers: int, attends: int, heads: int = 16, dim: int = 256, delta: DeltaNetGeometry
) -> ModelGeometry:
    """A qwen3next or qwen35moe geometry in which every attends-th layer is attention."""
    return ModelGeometry(
        architecture="qwen3next" if delta.head_order == "grouped" else "qwen35moe",
        num_layers=layers,
        hidden_size=256,
        vocabulary_size=64,
        num_real_tokens=64,
        context_tokens=4096,
        rms_epsilon=1e-6,
        attention=AttentionGeometry(
            num_heads=heads, num_kv_heads=2, head_dim=dim, rope_dims=dim // 4, rope_base=1e7, gated=True
        ),
        experts=ExpertGeometry(num_experts=8, experts_per_token=2, widths=(64,) * layers, shared_width=64),
        recurrent_layers=tuple((layer + 1) % attends != 0 for layer in range(layers)),
        delta_net=delta,
    )


def delta_net(key_heads: int, value_heads: int, dim: int, order: str) -> DeltaNetGeometry:
    return DeltaNetGeometry(
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        head_dim=dim,
        conv_kernel=4,
        head_order=order,
        output_gate="silu",
    )


@pytest.mark.parametrize(
    ("order", "layers", "token_bytes", "sequence_mib"),
    [("grouped", 48, 24_576, 75.4), ("tiled", 40, 20_480, 62.8)],
    ids=["qwen3next 80B", "qwen35moe 35B"],
)
def test_state_of_the_published_models(order, layers, token_bytes, sequence_mib):
    geometry = hybrid(layers=layers, attends=4, delta=delta_net(16, 32, 128, order))
    assert pool_bytes_per_token(geometry, 0, layers, kv_dtype="fp16") == token_bytes
    assert state_bytes_per_sequence(geometry, 0, 1) == 98_304 + 2_097_152
    assert state_bytes_per_sequence(geometry, 3, 4) == 0
    assert round(state_bytes_per_sequence(geometry, 0, layers) / 2**20, 1) == sequence_mib
    pool = StatePool(geometry, 0, layers, kv_dtype="fp16", kv_pool_tokens=128, max_sequences=2, device="meta")
    assert pool.num_bytes == 128 * token_bytes + 2 * state_bytes_per_sequence(geometry, 0, layers)


def peak_bytes(mixer: Mixer, geometry: ModelGeometry, rows: int, start: int, *, legacy: bool) -> int:
    """The most bytes that the mixer's own tensors take at a time, for rows that follow start others."""
    weights = {name: torch.randn(shape) * 0.1 for name, shape in mixer.tensors().items()}
    if legacy:
        weights["ssm_in.weight"] = torch.cat([weights.pop(f"attn_{part}.weight") for part in ("qkv", "gate")])
        weights["ssm_ba.weight"] = torch.cat(
            [weights.pop(f"ssm_{part}.weight") for part in ("beta", "alpha")]
        )
    pool = StatePool(geometry, 0, 2, kv_dtype="fp32", kv_pool_tokens=1024, max_sequences=1, device="cpu")
    state, ids = pool.create(0), torch.zeros(start + rows, dtype=torch.int64)
    with torch.inference_mode():
        mixer.mix(torch.randn(start, 256), [SegmentRows(0, start, 0, state, ids)], weights)
        x = torch.randn(rows, 256)
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
        ) as profiler:
            mixer.mix(x, [SegmentRows(0, rows, start, state, ids)], weights)
    memory = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(memory, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


@pytest.mark.parametrize(("rows", "start"), [(256, 64), (100, 100), (64, 1)])
@pytest.mark.parametrize(("key_heads", "value_heads", "dim"), [(4, 8, 32), (4, 8, 128), (8, 8, 64)])
@pytest.mark.parametrize("order", ["grouped", "tiled"])
def test_scratch_of_delta_net_is_what_a_sub_chunk_takes(rows, start, key_heads, value_heads, dim, order):
    geometry = hybrid(layers=2, attends=2, delta=delta_net(key_heads, value_heads, dim, order))
    mixer = GatedDeltaNet(geometry, geometry.delta_net, 0)
    planned = attention_scratch_bytes(geometry, 0, 1, rows=rows, context=start + rows)
    taken = peak_bytes(mixer, geometry, rows, start, legacy=order == "grouped")
    assert 0.3 * planned < taken <= planned


@pytest.mark.parametrize(("rows", "start"), [(256, 64), (64, 640)])
def test_scratch_of_gated_attention_is_what_a_sub_chunk_takes(rows, start):
    geometry = hybrid(layers=2, attends=2, dim=64, delta=delta_net(4, 8, 32, "tiled"))
    mixer = Attention(geometry, 1, Rotary(16, 1e7))
    planned = attention_scratch_bytes(geometry, 1, 2, rows=rows, context=start + rows)
    assert 0.3 * planned < peak_bytes(mixer, geometry, rows, start, legacy=False) <= planned


def test_the_chunk_of_the_delta_rule_is_the_one_that_is_planned():
    assert DELTA_CHUNK_ROWS == gated_delta.CHUNK
