from collections.abc import Iterator

import pytest
import torch
from layer_oracle import TinyModel, relative, tiny_qwen3moe


@pytest.fixture(scope="module")
def model() -> Iterator[TinyModel]:
    with torch.inference_mode():
        yield tiny_qwen3moe()


def token_ids(count: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 128, (count,), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def reference(model: TinyModel) -> torch.Tensor:
    return model.reference(token_ids(200))


@pytest.mark.parametrize(
    "cuts", [(), (1,), (64, 128), (1, 3, 6, 70, 71, 135), (199,)], ids=["whole", "1", "64s", "odd", "tail1"]
)
def test_logits_equal_transformers(model: TinyModel, reference: torch.Tensor, cuts: tuple[int, ...]) -> None:
    got = model.logits(token_ids(200), cuts)
    assert relative(got, reference) < 3e-6
    assert torch.equal(got.argmax(-1), reference.argmax(-1))


def test_one_token_prompt(model: TinyModel) -> None:
    ids = token_ids(1)
    assert relative(model.logits(ids), model.reference(ids)) < 3e-6


def test_fused_qkv(model: TinyModel, reference: torch.Tensor) -> None:
    fused = []
    for weights in model.layers:
        rest = {k: v for k, v in weights.items() if k not in {f"attn_{x}.weight" for x in "qkv"}}
        rest["attn_qkv.weight"] = torch.cat([weights[f"attn_{x}.weight"] for x in "qkv"])
        fused.append(rest)
    other = TinyModel(model.hf, model.family, fused, model.embedding, model.head, model.output)
    assert torch.equal(other.logits(token_ids(200)), model.logits(token_ids(200)))
    assert relative(other.logits(token_ids(200)), reference) < 3e-6


def test_dense_tensors_are_those_of_the_file(model: TinyModel) -> None:
    for layer, weights in zip(model.family.layers, model.layers, strict=True):
        shapes = {name: tuple(x.shape) for name, x in weights.items() if "_exps" not in name}
        assert dict(layer.dense_tensors()) == shapes
    assert dict(model.family.head_tensors()) == {k: tuple(v.shape) for k, v in model.head.items()}


def test_segments_side_by_side_equal_each_alone(model: TinyModel) -> None:
    long, short = token_ids(90, seed=2), token_ids(11, seed=3)
    pool = model.pool()
    for sequence in (1, 2, 3):
        pool.create(sequence)
    first = model.run(pool, [(1, long[:50], 0), (2, short[:3], 0), (3, token_ids(5), 0)])
    second = model.run(pool, [(2, short, 3), (1, long, 50)])
    got_long = torch.cat((first[:50], second[8:]))
    got_short = torch.cat((first[50:53], second[:8]))
    assert relative(got_long, model.reference(long)) < 3e-6
    assert relative(got_short, model.reference(short)) < 3e-6
