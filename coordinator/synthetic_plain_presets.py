"""Geometries of the plain MoE families, published and tiny: Mixtral, GLM-4.5, gpt-oss."""

import math
from collections.abc import Mapping
from dataclasses import replace

from strata_coord.coordinator.synthetic_presets import (
    TINY_EXPERTS,
    Preset,
    SyntheticShape,
    attention_geometry,
    expert_geometry,
    plain_shape,
    tiny_vocabulary,
)
from strata_coord.coordinator.synthetic_vocabulary import VocabularyShape
from strata_coord.ipc.assignment import AttentionGeometry, ExpertGeometry, YarnGeometry

_GLM4 = VocabularyShape(num_rows=151_552, end_of_text=151_329, num_real=151_365, pre_tokenizer="glm4")
_O200K = VocabularyShape(num_rows=201_088, end_of_text=199_998, num_real=201_088, pre_tokenizer="gpt-4o")
# Mixtral's number of rows; its pieces have scores, these have merges.
_MIXTRAL = VocabularyShape(num_rows=32_000, end_of_text=31_997, num_real=32_000, pre_tokenizer="llama-bpe")


def _mixtral(layers: int | None) -> SyntheticShape:
    layers = layers or 32
    return plain_shape(
        "llama",
        layers,
        hidden=4_096,
        attention=_neighbours(attention_geometry(32, 8, 128, base=1e6, head_norms=False)),
        experts=expert_geometry(layers, (8, 2), 14_336),
        vocabulary=_MIXTRAL,
        context=32_768,
        epsilon=1e-5,
    )


def _tiny_llama(layers: int | None) -> SyntheticShape:
    layers = layers or 4
    return plain_shape(
        "llama",
        layers,
        hidden=256,
        attention=_neighbours(attention_geometry(4, 2, 64, base=1e6, head_norms=False)),
        experts=expert_geometry(layers, TINY_EXPERTS, 64),
        vocabulary=tiny_vocabulary("llama-bpe"),
        context=32_768,
    )


def _neighbours(attention: AttentionGeometry) -> AttentionGeometry:
    return replace(attention, rope_pairs="neighbours")


def _glm45_air(layers: int | None) -> SyntheticShape:
    layers = layers or 46
    return plain_shape(
        "glm4moe",
        layers,
        hidden=4_096,
        attention=attention_geometry(96, 8, 128, rope_dims=64, base=1e6, head_norms=False, biases=True),
        experts=_glm4_experts(layers, (128, 8), 1_408, dense_width=10_944),
        vocabulary=_GLM4,
        context=131_072,
        epsilon=1e-5,
    )


def _tiny_glm4(layers: int | None) -> SyntheticShape:
    layers = layers or 4
    return plain_shape(
        "glm4moe",
        layers,
        hidden=256,
        attention=attention_geometry(4, 2, 64, rope_dims=32, base=1e6, biases=True),
        experts=_glm4_experts(layers, TINY_EXPERTS, 64, dense_width=160),
        vocabulary=tiny_vocabulary("glm4"),
        context=32_768,
    )


def _glm4_experts(layers: int, counts: tuple[int, int], width: int, *, dense_width: int) -> ExpertGeometry:
    """Return the experts of all layers but the first, which has one MLP; a single layer has experts."""
    dense = min(1, layers - 1)
    return replace(
        expert_geometry(layers, counts, width, shared=width),
        widths=(0,) * dense + (width,) * (layers - dense),
        dense_width=dense_width if dense else 0,
        shared_gate=False,
        scores="sigmoid",
        selection_bias=True,
    )


def _gpt_oss(layers: int, experts: int) -> SyntheticShape:
    return plain_shape(
        "gpt-oss",
        layers,
        hidden=2_880,
        attention=_windowed(attention_geometry(64, 8, 64, base=150_000.0), layers, window=128),
        experts=_biased(expert_geometry(layers, (experts, 4), 2_880)),
        vocabulary=_O200K,
        context=131_072,
        epsilon=1e-5,
    )


def _gpt_oss_20b(layers: int | None) -> SyntheticShape:
    return _gpt_oss(layers or 24, 32)


def _gpt_oss_120b(layers: int | None) -> SyntheticShape:
    return _gpt_oss(layers or 36, 128)


def _tiny_gpt_oss(layers: int | None) -> SyntheticShape:
    layers = layers or 4
    return plain_shape(
        "gpt-oss",
        layers,
        hidden=256,
        attention=_windowed(attention_geometry(4, 2, 64, base=150_000.0), layers, window=24),
        experts=_biased(expert_geometry(layers, TINY_EXPERTS, 64)),
        vocabulary=tiny_vocabulary("gpt-4o"),
        context=131_072,
    )


def _windowed(attention: AttentionGeometry, layers: int, *, window: int) -> AttentionGeometry:
    factor = 32.0
    return replace(
        attention,
        head_norms=False,
        projection_biases=True,
        output_bias=True,
        sinks=True,
        windows=tuple(window if layer % 2 == 0 else 0 for layer in range(layers)),
        yarn=YarnGeometry(
            factor=factor,
            original_tokens=4_096,
            beta_fast=32.0,
            beta_slow=1.0,
            magnitude=0.1 * math.log(factor) + 1.0,
            whole_pairs=False,
        ),
    )


def _biased(experts: ExpertGeometry) -> ExpertGeometry:
    return replace(experts, router_bias=True, biases=True, activation="clamped-swiglu")


PLAIN_PRESETS: Mapping[str, Mapping[str, Preset]] = {
    "llama": {"tiny": _tiny_llama, "mixtral-8x7b": _mixtral},
    "glm4moe": {"tiny": _tiny_glm4, "glm-4.5-air": _glm45_air},
    "gpt-oss": {"tiny": _tiny_gpt_oss, "gpt-oss-20b": _gpt_oss_20b, "gpt-oss-120b": _gpt_oss_120b},
}
