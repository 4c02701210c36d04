"""The constants of a synthetic n-gram table: models.md section 1.5.2."""

import math
from collections.abc import Iterator
from itertools import count, islice

from strata_coord.coordinator.synthetic_vocabulary import VocabularyShape
from strata_coord.ipc.assignment import NgramGeometry

NGRAM_LAYER = 1
PUBLISHED_NGRAM_BASE = 20_000_000
_NGRAM_SEED = 1234
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


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
        layers=(NGRAM_LAYER,),
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


def _split_mix(value: int) -> int:
    value = ((value & _MASK) + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _primes_from(start: int) -> Iterator[int]:
    for value in count(max(start, 2)):
        if all(value % divisor for divisor in range(2, math.isqrt(value) + 1)):
            yield value
