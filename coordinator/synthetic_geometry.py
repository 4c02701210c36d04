"""Shapes of synthetic models: a named one, with another number of layers or vocabulary rows if wanted."""

from dataclasses import replace

from strata_coord.coordinator.synthetic_ngram import PUBLISHED_NGRAM_BASE, ngram_geometry
from strata_coord.coordinator.synthetic_plain_presets import PLAIN_PRESETS
from strata_coord.coordinator.synthetic_presets import QWEN_PRESETS, SyntheticShape
from strata_coord.coordinator.synthetic_vocabulary import VocabularyShape, small_vocabulary_shape
from strata_coord.ipc.assignment import ModelGeometry
from strata_coord.ipc.errors import ConfigError

PRESETS = {**QWEN_PRESETS, **PLAIN_PRESETS}  # architecture -> name -> shape for a number of layers


def synthetic_shape(
    architecture: str,
    *,
    like: str,
    layers: int | None,
    vocabulary_rows: int | None = None,
    whole_table: bool = False,
) -> SyntheticShape:
    """Return the shape of a named model.

    Args:
        architecture: its name in GGUF files.
        like: a published model, or "tiny".
        layers: in place of the published number.
        vocabulary_rows: a small vocabulary in place of the published one.
        whole_table: an n-gram table of the published size; without it a small one, whose rows cost the same.

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
    vocabulary = shape.vocabulary
    if vocabulary_rows is not None:
        vocabulary = small_vocabulary_shape(vocabulary_rows, vocabulary.pre_tokenizer)
    base = PUBLISHED_NGRAM_BASE if whole_table and like != "tiny" else None
    return SyntheticShape(geometry=_refit(shape.geometry, vocabulary, base), vocabulary=vocabulary)


def _refit(geometry: ModelGeometry, vocabulary: VocabularyShape, ngram_base: int | None) -> ModelGeometry:
    """Return the geometry with another vocabulary, and another size of the n-gram table."""
    ngram = geometry.ngram
    if ngram is not None:
        ngram = ngram_geometry(
            vocabulary,
            heads_per_ngram=ngram.heads_per_ngram,
            row_width=ngram.row_width,
            base=ngram_base or ngram.head_vocab_sizes[0],
            ngram_size=ngram.ngram_size,
        )
    return replace(
        geometry, vocabulary_size=vocabulary.num_rows, num_real_tokens=vocabulary.num_real, ngram=ngram
    )
