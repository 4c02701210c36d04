"""Synthetic vocabularies encode real text, at any size."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.decoders import ByteLevel

from strata_coord.coordinator.synthetic_vocabulary import (
    CONTROL_TOKENS,
    SyntheticVocabulary,
    VocabularyShape,
    make_vocabulary,
    packaged_text,
    small_vocabulary_shape,
)

_SHAPES = {
    "small": small_vocabulary_shape(1_536, "qwen35"),
    "filled up": small_vocabulary_shape(6_000, "qwen2"),
    "published": VocabularyShape(
        num_rows=248_320, end_of_text=248_044, num_real=248_077, pre_tokenizer="qwen35"
    ),
}


@pytest.fixture(scope="module", params=_SHAPES)
def vocabulary(request: pytest.FixtureRequest) -> SyntheticVocabulary:
    return make_vocabulary(_SHAPES[request.param])


def test_every_row_has_one_token_of_its_own(vocabulary: SyntheticVocabulary) -> None:
    shape = vocabulary.shape
    assert len(vocabulary.tokens) == len(set(vocabulary.tokens)) == shape.num_rows
    assert len(vocabulary.token_types) == shape.num_rows
    assert tuple(vocabulary.tokens[shape.end_of_text : shape.im_end + 1]) == CONTROL_TOKENS
    assert vocabulary.token_types.index(3) == shape.end_of_text
    assert vocabulary.token_types.index(5) == shape.num_real


def test_every_merge_joins_two_tokens_into_a_third(vocabulary: SyntheticVocabulary) -> None:
    known = set(vocabulary.tokens[: vocabulary.shape.end_of_text])
    pairs = [merge.split(" ") for merge in vocabulary.merges]
    assert all(
        len(pair) == 2 and pair[0] in known and pair[1] in known and "".join(pair) in known for pair in pairs
    )
    assert len(pairs) == len({tuple(pair) for pair in pairs}) == vocabulary.shape.end_of_text - 256


def test_text_survives_a_round_trip_in_few_tokens(vocabulary: SyntheticVocabulary) -> None:
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    merges = [tuple(merge.split(" ")) for merge in vocabulary.merges]
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevel()
    text = packaged_text()[:5_000] + "Grüße, 東京 🙂\r\n\tx = [1, 2]\n"
    encoded = tokenizer.encode(text).ids
    assert tokenizer.decode(encoded) == text
    assert len(encoded) < len(text.encode()) / 2.5


def test_the_same_vocabulary_each_time() -> None:
    assert make_vocabulary(_SHAPES["small"]) == make_vocabulary(_SHAPES["small"])
