"""Geometries of the Qwen families, published and tiny, and what those of all families are made with.

Nothing here writes a file or draws a number.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from strata_coord.coordinator.synthetic_ngram import NGRAM_LAYER, ngram_geometry
from strata_coord.coordinator.synthetic_vocabulary import VocabularyShape, small_vocabulary_shape
from strata_coord.ipc.assignment import (
    AttentionGeometry,
    DeltaNetGeometry,
    ExpertGeometry,
    HyperConnectionGeometry,
    ModelGeometry,
    SparseAttentionGeometry,
)

FULL_ATTENTION_INTERVAL = 4
# Reading a row costs the same from a small table, so synthetic files leave the published 28.8 GB away.
_SYNTHETIC_NGRAM_BASE = 200_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticShape:
    """A model to make: its geometry and which of its token ids are what."""

    geometry: ModelGeometry
    vocabulary: VocabularyShape


Preset = Callable[[int | None], SyntheticShape]  # for a number of layers; None: as published


def plain_shape(
    architecture: str,
    layers: int,
    *,
    hidden: int,
    attention: AttentionGeometry,
    experts: ExpertGeometry,
    vocabulary: VocabularyShape,
    context: int,
    epsilon: float = 1e-6,
    delta_net: DeltaNetGeometry | None = None,
) -> SyntheticShape:
    """Return a model without hyper-connections; with a DeltaNet every fourth layer is attention."""
    interval = FULL_ATTENTION_INTERVAL if delta_net is not None else 1
    geometry = ModelGeometry(
        architecture=architecture,
        num_layers=layers,
        hidden_size=hidden,
        vocabulary_size=vocabulary.num_rows,
        num_real_tokens=vocabulary.num_real,
        context_tokens=context,
        rms_epsilon=epsilon,
        attention=attention,
        experts=experts,
        recurrent_layers=tuple((layer + 1) % interval != 0 for layer in range(layers)),
        delta_net=delta_net,
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
        experts=expert_geometry(layers, experts, width, shared=width),
        recurrent_layers=recurrent,
        delta_net=delta_net,
        hyper_connections=HyperConnectionGeometry(num_streams=4, low_rank=low_rank),
        sparse_attention=SparseAttentionGeometry(
            num_heads=indexer[0],
            head_dim=indexer[1],
            budget_tokens=indexer[2],
            compress_ratios=tuple(0 if linear else 4 for linear in recurrent),
        ),
        ngram=ngram if layers > NGRAM_LAYER else None,
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
        delta_net=_delta_net("tiled", 2, 6, 32, gate="sigmoid"),
        low_rank=32,
        indexer=(2, 32, budget),
        heads_per_ngram=4,
        ngram_base=1_000,
        vocabulary=small_vocabulary_shape(vocabulary_rows, "qwen35"),
        context=32_768,
    )


def expert_geometry(
    layers: int, counts: tuple[int, int], width: int, *, shared: int = 0, renormalised: bool = True
) -> ExpertGeometry:
    """Return experts that are the same in all layers. counts: number, used."""
    return ExpertGeometry(
        num_experts=counts[0],
        experts_per_token=counts[1],
        widths=(width,) * layers,
        shared_width=shared,
        renormalised=renormalised,
    )


def _delta_net(
    order: str, key_heads: int, value_heads: int, head_dim: int, *, gate: str = "silu"
) -> DeltaNetGeometry:
    return DeltaNetGeometry(
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        head_dim=head_dim,
        conv_kernel=4,
        head_order="tiled" if order == "tiled" else "grouped",
        output_gate="sigmoid" if gate == "sigmoid" else "silu",
    )


def attention_geometry(
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    base: float,
    rope_dims: int | None = None,
    gated: bool = False,
    head_norms: bool = True,
    biases: bool = False,
) -> AttentionGeometry:
    """Return attention that rotates the first rope_dims dims of a head, or all of them."""
    return AttentionGeometry(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rope_dims=rope_dims or head_dim,
        rope_base=base,
        gated=gated,
        head_norms=head_norms,
        projection_biases=biases,
    )


_QWEN2 = VocabularyShape(num_rows=151_936, end_of_text=151_643, num_real=151_669, pre_tokenizer="qwen2")
_QWEN35 = VocabularyShape(num_rows=248_320, end_of_text=248_044, num_real=248_077, pre_tokenizer="qwen35")
TINY_EXPERTS = (16, 4)


def tiny_vocabulary(pre: str) -> VocabularyShape:
    """Return the vocabulary of a tiny model; pre: value of tokenizer.ggml.pre."""
    return small_vocabulary_shape(1_024, pre)


def _flash_next(layers: int | None) -> SyntheticShape:
    return qwen4exp_shape(
        layers=layers or 48,
        hidden=2_560,
        attention=attention_geometry(24, 2, 256, rope_dims=64, base=1e7, gated=True),
        experts=(512, 10),
        width=640,
        delta_net=_delta_net("tiled", 16, 48, 128, gate="sigmoid"),
        low_rank=320,
        indexer=(4, 128, 2_048),
        heads_per_ngram=8,
        ngram_base=_SYNTHETIC_NGRAM_BASE,
        vocabulary=_QWEN35,
        context=262_144,
    )


def _tiny_qwen4exp(layers: int | None) -> SyntheticShape:
    return small_qwen4exp(layers or 8, vocabulary_rows=1_024)


def _qwen3(
    architecture: str,
    layers: int,
    *,
    hidden: int,
    heads: int,
    width: int,
    base: float = 1e6,
) -> SyntheticShape:
    return plain_shape(
        architecture,
        layers,
        hidden=hidden,
        attention=attention_geometry(heads, 4, 128, base=base),
        experts=expert_geometry(layers, (128, 8), width),
        vocabulary=_QWEN2,
        context=262_144,
    )


def _qwen3_30b(layers: int | None) -> SyntheticShape:
    return _qwen3("qwen3moe", layers or 48, hidden=2_048, heads=32, width=768)


def _qwen3_235b(layers: int | None) -> SyntheticShape:
    return _qwen3("qwen3moe", layers or 94, hidden=4_096, heads=64, width=1_536)


def _qwen3_vl_30b(layers: int | None) -> SyntheticShape:
    return _qwen3("qwen3vlmoe", layers or 48, hidden=2_048, heads=32, width=768, base=5e6)


def _tiny_qwen3(architecture: str) -> Preset:
    def make(layers: int | None) -> SyntheticShape:
        layers = layers or 4
        return plain_shape(
            architecture,
            layers,
            hidden=256,
            attention=attention_geometry(4, 2, 64, base=1e6),
            experts=expert_geometry(layers, TINY_EXPERTS, 64),
            vocabulary=tiny_vocabulary("qwen2"),
            context=32_768,
        )

    return make


def _qwen2_57b(layers: int | None) -> SyntheticShape:
    layers = layers or 28
    return plain_shape(
        "qwen2moe",
        layers,
        hidden=3_584,
        attention=attention_geometry(28, 4, 128, base=1e6, head_norms=False, biases=True),
        experts=expert_geometry(layers, (64, 8), 2_560, shared=20_480, renormalised=False),
        vocabulary=_QWEN2,
        context=32_768,
    )


def _tiny_qwen2(layers: int | None) -> SyntheticShape:
    layers = layers or 4
    return plain_shape(
        "qwen2moe",
        layers,
        hidden=256,
        attention=attention_geometry(4, 2, 64, base=1e6, head_norms=False, biases=True),
        experts=expert_geometry(layers, TINY_EXPERTS, 64, shared=128, renormalised=False),
        vocabulary=tiny_vocabulary("qwen2"),
        context=32_768,
    )


def _qwen3_next(layers: int | None) -> SyntheticShape:
    layers = layers or 48
    return plain_shape(
        "qwen3next",
        layers,
        hidden=2_048,
        attention=attention_geometry(16, 2, 256, rope_dims=64, base=1e7, gated=True),
        experts=expert_geometry(layers, (512, 10), 512, shared=512),
        vocabulary=_QWEN2,
        context=262_144,
        delta_net=_delta_net("grouped", 16, 32, 128),
    )


def _qwen35_35b(layers: int | None) -> SyntheticShape:
    layers = layers or 40
    return plain_shape(
        "qwen35moe",
        layers,
        hidden=2_048,
        attention=attention_geometry(16, 2, 256, rope_dims=64, base=1e7, gated=True),
        experts=expert_geometry(layers, (256, 8), 512, shared=512),
        vocabulary=_QWEN35,
        context=262_144,
        delta_net=_delta_net("tiled", 16, 32, 128),
    )


def _tiny_recurrent(architecture: str, order: str, pre: str) -> Preset:
    def make(layers: int | None) -> SyntheticShape:
        layers = layers or 8
        return plain_shape(
            architecture,
            layers,
            hidden=256,
            attention=attention_geometry(4, 2, 64, rope_dims=16, base=1e7, gated=True),
            experts=expert_geometry(layers, TINY_EXPERTS, 64, shared=64),
            vocabulary=tiny_vocabulary(pre),
            context=32_768,
            delta_net=_delta_net(order, 2, 6, 32),
        )

    return make


QWEN_PRESETS: Mapping[str, Mapping[str, Preset]] = {
    "qwen2moe": {"tiny": _tiny_qwen2, "qwen2-57b-a14b": _qwen2_57b},
    "qwen3moe": {
        "tiny": _tiny_qwen3("qwen3moe"),
        "qwen3-30b-a3b": _qwen3_30b,
        "qwen3-235b-a22b": _qwen3_235b,
    },
    "qwen3vlmoe": {"tiny": _tiny_qwen3("qwen3vlmoe"), "qwen3-vl-30b-a3b": _qwen3_vl_30b},
    "qwen3next": {
        "tiny": _tiny_recurrent("qwen3next", "grouped", "qwen2"),
        "qwen3-next-80b-a3b": _qwen3_next,
    },
    "qwen35moe": {"tiny": _tiny_recurrent("qwen35moe", "tiled", "qwen35"), "qwen3.5-35b-a3b": _qwen35_35b},
    "qwen4exp": {"tiny": _tiny_qwen4exp, "flash-next": _flash_next},
}
