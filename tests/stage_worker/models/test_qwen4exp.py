import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from layer_oracle import EOS, MemoryTable, TinyModel, relative, tiny_geometry_qwen4exp, tiny_qwen4exp
from torch import Tensor

from strata_coord.coordinator.model_geometry import FAMILIES
from strata_coord.ipc.errors import ModelError
from strata_coord.stage_worker.models.catalog import BUILDERS, build_family
from strata_coord.stage_worker.models.family import SegmentRows
from strata_coord.stage_worker.sequence_state import StatePool

BUDGET, RATIO = 16, 4
LAST_DENSE = BUDGET + RATIO - 2  # highest position at which the selection cannot bind


@pytest.fixture(scope="module")
def model() -> Iterator[TinyModel]:
    with torch.inference_mode():
        yield tiny_qwen4exp()


def token_ids(count: int, seed: int = 1, eos: tuple[int, ...] = ()) -> Tensor:
    ids = torch.randint(8, 120, (count,), generator=torch.Generator().manual_seed(seed))
    ids[list(eos)] = EOS
    return ids


LONG = token_ids(200, eos=(0, 20, 21, 64, 130))


@pytest.fixture(scope="module")
def reference(model: TinyModel) -> Tensor:
    return model.reference(LONG)


@pytest.mark.parametrize(
    "cuts",
    [
        (),
        (1, 2, 3, 4, 5, 6),  # shorter than the histories of both convolutions
        (64, 128, 192),
        (65, 129),
        (18, 19, 20, 21, 22),  # around the budget, inside blocks, at EOS
        (1, 3, 6, 10, 70, 71, 72, 130, 131, 193, 199),
    ],
)
def test_logits_equal_transformers(model: TinyModel, reference: Tensor, cuts: tuple[int, ...]) -> None:
    got = model.logits(LONG, cuts)
    assert relative(got, reference) < 5e-6
    assert torch.equal(got.argmax(-1), reference.argmax(-1))


def test_token_by_token(model: TinyModel, reference: Tensor) -> None:
    got = model.logits(LONG[:70], tuple(range(1, 70)))
    assert relative(got, reference[:70]) < 5e-6


@pytest.mark.parametrize("length", [LAST_DENSE, LAST_DENSE + 1, LAST_DENSE + 2, 22, 23, 24, 25])
def test_prompts_around_the_budget(model: TinyModel, length: int) -> None:
    ids = token_ids(length, seed=length)
    want = model.reference(ids)
    assert relative(model.logits(ids), want) < 5e-6
    assert relative(model.logits(ids, (length - 1,)), want) < 5e-6


def test_the_selection_binds_after_the_budget_and_not_before(model: TinyModel) -> None:
    geometry = model.family.geometry
    sparse = geometry.sparse_attention
    assert sparse is not None
    dense = replace(geometry, sparse_attention=replace(sparse, compress_ratios=(0,) * geometry.num_layers))
    table = MemoryTable(model.hf.model.layers[1].ple.ple_embedding.ngram_embedding.weight.detach())
    plain = TinyModel(
        model.hf, build_family(dense, table=table), model.layers, model.embedding, model.head, model.output
    )
    ids = token_ids(60, seed=5)
    sparse_logits, dense_logits = model.logits(ids), plain.logits(ids)
    assert relative(sparse_logits[: LAST_DENSE + 1], dense_logits[: LAST_DENSE + 1]) < 1e-6
    assert relative(sparse_logits[LAST_DENSE + 1 :], dense_logits[LAST_DENSE + 1 :]) > 1e-3


def test_compress_ratio_zero_is_dense_attention(model: TinyModel) -> None:
    wide = tiny_qwen4exp(budget=400)
    geometry = wide.family.geometry
    sparse = geometry.sparse_attention
    assert sparse is not None
    dense = replace(geometry, sparse_attention=replace(sparse, compress_ratios=(0,) * geometry.num_layers))
    table = MemoryTable(wide.hf.model.layers[1].ple.ple_embedding.ngram_embedding.weight.detach())
    family = build_family(dense, table=table)
    assert "indexer.k_proj.weight" not in family.layers[3].dense_tensors()
    plain = TinyModel(wide.hf, family, wide.layers, wide.embedding, wide.head, wide.output)
    ids = token_ids(80, seed=6)
    assert relative(plain.logits(ids, (33,)), wide.reference(ids)) < 5e-6


@pytest.mark.parametrize(
    "eos", [(0,), (0, 1), (30, 31), (29,), (30,), (31,), (28, 30), (0, 29, 30, 31, 32)], ids=str
)
def test_eos_around_a_cut(model: TinyModel, eos: tuple[int, ...]) -> None:
    ids = token_ids(40, seed=8, eos=eos)
    want = model.reference(ids)
    assert relative(model.logits(ids, (30, 31)), want) < 5e-6


def test_segments_side_by_side_equal_each_alone(model: TinyModel) -> None:
    one, two, three = token_ids(90, seed=2, eos=(3,)), token_ids(40, seed=3), token_ids(2, seed=4)
    pool = model.pool()
    for sequence in (1, 2, 3):
        pool.create(sequence)
    first = model.run(pool, [(1, one[:50], 0), (2, two[:3], 0), (3, three[:1], 0)])
    second = model.run(pool, [(2, two, 3), (3, three, 1), (1, one, 50)])
    assert relative(torch.cat((first[:50], second[38:])), model.reference(one)) < 5e-6
    assert relative(torch.cat((first[50:53], second[:37])), model.reference(two)) < 5e-6
    assert relative(torch.cat((first[53:], second[37:38])), model.reference(three)) < 5e-6


@pytest.mark.parametrize("seed", range(8))
def test_any_schedule_of_three_sequences(model: TinyModel, seed: int) -> None:
    """Rows of several sequences share sub-chunks in any order and amount; pages end up scattered."""
    chance = random.Random(seed)
    prompts = [token_ids(length, seed=length, eos=(length // 2,)) for length in (75, 33, 20)]
    pool = model.pool(kv_pool_tokens=64 * 4)
    for sequence in range(3):
        pool.create(sequence)
    done = [0, 0, 0]
    rows: list[list[Tensor]] = [[], [], []]
    while any(at < len(ids) for at, ids in zip(done, prompts, strict=True)):
        parts = []
        for sequence in chance.sample(range(3), 3):
            left = len(prompts[sequence]) - done[sequence]
            count = chance.randint(0, min(left, 40))
            if left and count:
                parts.append((sequence, prompts[sequence][: done[sequence] + count], done[sequence]))
        if not parts:
            continue
        logits = model.run(pool, parts)
        for sequence, ids, first in parts:
            rows[sequence].append(logits[: len(ids) - first])
            logits = logits[len(ids) - first :]
            done[sequence] = len(ids)
    for ids, got in zip(prompts, rows, strict=True):
        assert relative(torch.cat(got), model.logits(ids)) < 5e-6


def test_a_dropped_sequence_leaves_nothing_behind(model: TinyModel) -> None:
    pool = model.pool(max_sequences=1)
    pool.create(1)
    model.run(pool, [(1, token_ids(77, seed=9), 0)])
    pool.drop(1)
    pool.create(2)
    ids = token_ids(30, seed=10)
    assert torch.equal(model.run(pool, [(2, ids, 0)]), model.logits(ids))


def test_dense_tensors_are_those_of_the_file(model: TinyModel) -> None:
    for layer, weights in zip(model.family.layers, model.layers, strict=True):
        shapes = {name: tuple(x.shape) for name, x in weights.items() if "_exps" not in name}
        assert dict(layer.dense_tensors()) == shapes
    assert dict(model.family.head_tensors()) == {k: tuple(v.shape) for k, v in model.head.items()}


@pytest.mark.parametrize("boundary", [1, 2, 3])
def test_two_stages_equal_one(model: TinyModel, boundary: int) -> None:
    """Each stage has a pool of its own layers; the n-gram layer is on either side of the cut."""
    ids = token_ids(70, seed=11)
    family = model.family
    pools = [
        StatePool(family.geometry, a, b, kv_dtype="fp32", kv_pool_tokens=128, max_sequences=1, device="cpu")
        for a, b in ((0, boundary), (boundary, family.geometry.num_layers))
    ]
    whole = model.pool()
    for pool in (*pools, whole):
        pool.create(0)
    rows = family.embed(model.embedding[ids]).clone()
    other = rows.clone()
    for layer, weights in zip(family.layers, model.layers, strict=True):
        own = pools[layer.index >= boundary]
        for buffer, pool in ((rows, own), (other, whole)):
            half = layer.attention_half(buffer, [SegmentRows(0, 70, 0, pool.get(0), ids)], weights)
            layer.combine(buffer, half.x_TD, half)
    assert torch.equal(rows, other)


def test_shared_gate_of_either_shape(model: TinyModel) -> None:
    layer, weights = model.family.layers[0], model.layers[0]
    x = torch.randn(3, 64)
    matrix = {**weights, "ffn_gate_inp_shexp.weight": weights["ffn_gate_inp_shexp.weight"].view(1, -1)}
    want, got = layer.shared_expert(x, weights), layer.shared_expert(x, matrix)
    assert want is not None
    assert got is not None
    assert torch.equal(want, got)


def test_a_result_left_in_the_half_is_added(model: TinyModel) -> None:
    layer, weights = model.family.layers[0], model.layers[0]
    rows = torch.randn(2, 256)
    pool = model.pool()
    half = layer.attention_half(rows, [SegmentRows(0, 2, 0, pool.create(0), token_ids(2))], weights)
    routed = torch.randn(2, 64)
    shared = torch.randn(2, 64)
    separate, joined = rows.clone(), rows.clone()
    half.shared_TD = shared
    layer.combine(separate, routed, half)
    half.shared_TD = None
    layer.combine(joined, routed + shared, half)
    assert torch.equal(separate, joined)


def test_only_the_rows_at_hand_are_read_from_the_table(model: TinyModel) -> None:
    table = model.family.layers[1].ngram.table  # type: ignore[attr-defined]
    table.requests.clear()
    model.logits(token_ids(30, seed=12), (20,))
    assert table.requests == [20 * 4, 10 * 4]


def test_a_missing_table_or_tensor_is_named(model: TinyModel) -> None:
    family = build_family(model.family.geometry, table=None)
    pool = model.pool()
    pool.create(0)
    segments = [SegmentRows(0, 2, 0, pool.get(0), token_ids(2))]
    with pytest.raises(ModelError, match="layer 1: the n-gram table per_layer_token_embd"):
        family.layers[1].attention_half(torch.zeros(2, 256), segments, model.layers[1])
    with pytest.raises(ModelError, match="layer 0: tensor hc_attn_norm"):
        family.layers[0].attention_half(torch.zeros(2, 256), segments, {})


def test_sizes_that_cannot_work_are_refused() -> None:
    geometry = tiny_geometry_qwen4exp()
    sparse = geometry.sparse_attention
    assert sparse is not None
    with pytest.raises(ModelError, match=r"no hyper_connection.\* sizes"):
        build_family(replace(geometry, hyper_connections=None), table=None)
    with pytest.raises(ModelError, match="layer 0 is recurrent"):
        build_family(replace(geometry, delta_net=None), table=None)
    with pytest.raises(ModelError, match="compress ratio 4 must divide the budget of 18"):
        build_family(replace(geometry, sparse_attention=replace(sparse, budget_tokens=18)), table=None)
    ngram = geometry.ngram
    assert ngram is not None
    with pytest.raises(ModelError, match="2 layers have an n-gram embedding; 1 is supported"):
        build_family(replace(geometry, ngram=replace(ngram, layers=(0, 1))), table=None)


def test_unknown_architectures_are_refused() -> None:
    supported = ", ".join(sorted(BUILDERS))
    with pytest.raises(ModelError, match=f"'nosuch' is not supported; supported: {supported}"):
        build_family(replace(tiny_geometry_qwen4exp(), architecture="nosuch"), table=None)


def test_the_header_reader_and_the_stages_know_the_same_architectures() -> None:
    assert set(BUILDERS) == set(FAMILIES)
