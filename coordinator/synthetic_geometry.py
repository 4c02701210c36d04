"""Shapes of synthetic models: published geometries and small ones, as data.

A new model is a row in PRESETS. Nothing here writes a file or draws a number.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count, islice

from strata_coord.coordinator.synthetic_vocabulary import VocabularyShape, small_vocabulary_shape
from strata_coord.ipc.assignment import (
    AttentionGeometry,
    DeltaNetGeometry,
    ExpertGeometry,
    HyperConnectionGeometry,
    ModelGeometry,
    NgramGeometry,
    SparseAttentionGeometry,
)
from strata_coord.ipc.errors import ConfigError

FULL_ATTENTION_INTERVAL = 4
_NGRAM_SEED = 1234
_NGRAM_LAYER = 1
# Reading a row costs the same from a small table, so synthetic files leave the published 28.8 GB away.
_SYNTHETIC_NGRAM_BASE = 200_000
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticShape:
    """A model to make: its geometry and which of its token ids are what."""

    geometry: ModelGeometry
    vocabulary: VocabularyShape


def synthetic_shape(
    architecture: str, *, like: str, layers: int | None, vocabulary_rows: int | None = None
) -> SyntheticShape:
    """Return the shape of a named model, with another number of layers or vocabulary rows if given.

    Raises:
        ConfigError: unknown architecture or name, or a size that makes no model.
    """
    presets = PRESETS.get(architecture)
    if presets is None:
        message = f'architecture "{architecture}" cannot be made; known are {", ".join(PRESETS)}'
        raise ConfigError(message)
    if like not in presets:
        message = f'no {architecture} model is named "{like}"; known are {", ".join(presets)}'
        raise ConfigError(message)
    if layers is not None and not 1 <= layers <= 1_000:
        message = f"a model of {layers} layers cannot be made; the range is 1 to 1000"
        raise ConfigError(message)
    shape = presets[like](layers)
    if vocabulary_rows is None:
        return shape
    vocabulary = small_vocabulary_shape(vocabulary_rows, shape.vocabulary.pre_tokenizer)
    return SyntheticShape(geometry=_with_vocabulary(shape.geometry, vocabulary), vocabulary=vocabulary)


def ngram_geometry(
    vocabulary: VocabularyShape, *, heads_per_ngram: int, row_width: int, base: int, ngram_size: int = 3
) -> NgramGeometry:
    """Return the constants of an n-gram table by the published recipe: models.md section 1.5.2.

    base: each head has its own prime number of rows, the smallest ones from base on.
    """
    heads = (ngram_size - 1) * heads_per_ngram
    sizes = tuple(islice(_primes_from(base), heads))
    # Every product of a token id and a multiplier stays below 2^63.
    half = max(1, ((1 << 63) - 1) // vocabulary.num_rows // 2)
    return NgramGeometry(
        layers=(_NGRAM_LAYER,),
        ngram_size=ngram_size,
        heads_per_ngram=heads_per_ngram,
        conv_kernel=4,
        eos_token=vocabulary.end_of_text,
        row_width=row_width,
        multipliers=tuple(
            2 * (_split_mix(_NGRAM_SEED + _GOLDEN * index) % half) + 1 for index in range(1, ngram_size + 1)
        ),
        head_offsets=tuple(sum(sizes[:head]) for head in range(heads)),
        head_vocab_sizes=sizes,
    )


def ngram_table_rows(ngram: NgramGeometry) -> int:
    """Return the rows of the table: all heads, padded to a multiple of 128."""
    return -(-sum(ngram.head_vocab_sizes) // 128) * 128


def _with_vocabulary(geometry: ModelGeometry, vocabulary: VocabularyShape) -> ModelGeometry:
    ngram = geometry.ngram
    if ngram is not None:
        ngram = ngram_geometry(
            vocabulary,
            heads_per_ngram=ngram.heads_per_ngram,
            row_width=ngram.row_width,
            base=ngram.head_vocab_sizes[0],
            ngram_size=ngram.ngram_size,
        )
    return replace(
        geometry, vocabulary_size=vocabulary.num_rows, num_real_tokens=vocabulary.num_real, ngram=ngram
    )


def _split_mix(value: int) -> int:
    value = ((value & _MASK) + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _primes_from(start: int) -> Iterator[int]:
    for value in count(max(start, 2)):
        if all(value % divisor for divisor in range(2, math.isqrt(value) + 1)):
            yield value


def _qwen3moe(
    *,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    experts: int,
    used: int,
    width: int,
    vocabulary: VocabularyShape,
    context: int,
) -> SyntheticShape:
    geometry = ModelGeometry(
        architecture="qwen3moe",
        num_layers=layers,
        hidden_size=hidden,
        vocabulary_size=vocabulary.num_rows,
        num_real_tokens=vocabulary.num_real,
        context_tokens=context,
        rms_epsilon=1e-6,
        attention=AttentionGeometry(
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rope_dims=head_dim,
            rope_base=1e6,
            gated=False,
        ),
        experts=ExpertGeometry(
            num_experts=experts, experts_per_token=used, widths=(width,) * layers, shared_width=0
        ),
        recurrent_layers=(False,) * layers,
    )
    return SyntheticShape(geometry=geometry, vocabulary=vocabulary)


def qwen4exp_shape(
    *,
    layers: int,
    hidden: int,
    attention: AttentionGeometry,
    experts: tuple[int, int],
    width: int,
    delta_net: DeltaNetGeometry,
    low_rank: int,
    indexer: tuple[int, int, int],
    heads_per_ngram: int,
    ngram_base: int,
    vocabulary: VocabularyShape,
    context: int,
) -> SyntheticShape:
    """Return a qwen4exp model. experts: number, used; indexer: heads, head width, budget in tokens."""
    recurrent = tuple((layer + 1) % FULL_ATTENTION_INTERVAL != 0 for layer in range(layers))
    ngram = ngram_geometry(
        vocabulary,
        heads_per_ngram=heads_per_ngram,
        row_width=hidden // (2 * heads_per_ngram),
        base=ngram_base,
    )
    geometry = ModelGeometry(
        architecture="qwen4exp",
        num_layers=layers,
        hidden_size=hidden,
        vocabulary_size=vocabulary.num_rows,
        num_real_tokens=vocabulary.num_real,
        context_tokens=context,
        rms_epsilon=1e-6,
        attention=attention,
        experts=ExpertGeometry(
            num_experts=experts[0], experts_per_token=experts[1], widths=(width,) * layers, shared_width=width
        ),
        recurrent_layers=recurrent,
        delta_net=delta_net,
        hyper_connections=HyperConnectionGeometry(num_streams=4, low_rank=low_rank),
        sparse_attention=SparseAttentionGeometry(
            num_heads=indexer[0],
            head_dim=indexer[1],
            budget_tokens=indexer[2],
            compress_ratios=tuple(0 if linear else 4 for linear in recurrent),
        ),
        ngram=ngram if layers > _NGRAM_LAYER else None,
    )
    return SyntheticShape(geometry=geometry, vocabulary=vocabulary)


def small_qwen4exp(layers: int, *, vocabulary_rows: int = 1_536, budget: int = 512) -> SyntheticShape:
    """Return the small qwen4exp model: every part of the real one, 0.8 M parameters a layer."""
    return qwen4exp_shape(
        layers=layers,
        hidden=256,
        attention=AttentionGeometry(
            num_heads=4, num_kv_heads=2, head_dim=64, rope_dims=16, rope_base=1e7, gated=True
        ),
        experts=(16, 4),
        width=64,
        delta_net=_tiled_delta_net(key_heads=2, value_heads=6, head_dim=32),
        low_rank=32,
        indexer=(2, 32, budget),
        heads_per_ngram=4,
        ngram_base=1_000,
        vocabulary=small_vocabulary_shape(vocabulary_rows, "qwen35"),
        context=32_768,
    )


def _tiled_delta_net(*, key_heads: int, value_heads: int, head_dim: int) -> DeltaNetGeometry:
    return DeltaNetGeometry(
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        head_dim=head_dim,
        conv_kernel=4,
        head_order="tiled",
        output_gate="sigmoid",
    )


def _flash_next(layers: int | None) -> SyntheticShape:
    return qwen4exp_shape(
        layers=layers or 48,
        hidden=2_560,
        attention=AttentionGeometry(
            num_heads=24, num_kv_heads=2, head_dim=256, rope_dims=64, rope_base=1e7, gated=True
        ),
        experts=(512, 10),
        width=640,
        delta_net=_tiled_delta_net(key_heads=16, value_heads=48, head_dim=128),
        low_rank=320,
        indexer=(4, 128, 2_048),
        heads_per_ngram=8,
        ngram_base=_SYNTHETIC_NGRAM_BASE,
        vocabulary=VocabularyShape(
            num_rows=248_320, end_of_text=248_044, num_real=248_077, pre_tokenizer="qwen35"
        ),
        context=262_144,
    )


_QWEN3 = VocabularyShape(num_rows=151_936, end_of_text=151_643, num_real=151_669, pre_tokenizer="qwen2")


def _qwen3_30b(layers: int | None) -> SyntheticShape:
    return _qwen3moe(
        layers=layers or 48,
        hidden=2_048,
        heads=32,
        kv_heads=4,
        head_dim=128,
        experts=128,
        used=8,
        width=768,
        vocabulary=_QWEN3,
        context=262_144,
    )


def _qwen3_235b(layers: int | None) -> SyntheticShape:
    return _qwen3moe(
        layers=layers or 94,
        hidden=4_096,
        heads=64,
        kv_heads=4,
        head_dim=128,
        experts=128,
        used=8,
        width=1_536,
        vocabulary=_QWEN3,
        context=262_144,
    )


def _tiny_qwen3moe(layers: int | None) -> SyntheticShape:
    return _qwen3moe(
        layers=layers or 4,
        hidden=256,
        heads=4,
        kv_heads=2,
        head_dim=64,
        experts=16,
        used=4,
        width=64,
        vocabulary=small_vocabulary_shape(1_024, "qwen2"),
        context=32_768,
    )


def _tiny_qwen4exp(layers: int | None) -> SyntheticShape:
    return small_qwen4exp(layers or 8, vocabulary_rows=1_024)


# architecture -> name -> shape for a number of layers (None: as published)
PRESETS: Mapping[str, Mapping[str, Callable[[int | None], SyntheticShape]]] = {
    "qwen3moe": {"tiny": _tiny_qwen3moe, "qwen3-30b-a3b": _qwen3_30b, "qwen3-235b-a22b": _qwen3_235b},
    "qwen4exp": {"tiny": _tiny_qwen4exp, "flash-next": _flash_next},
}
