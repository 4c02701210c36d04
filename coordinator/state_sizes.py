"""Bytes of sequence state and of attention scratch, from the geometry alone. Pure.

State is what passes from one super-chunk to the next: keys and values, indexer keys, conv history, recurrent
state and n-gram history. All but keys and values are fp32, whatever the type of those.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from strata_coord.ipc.assignment import KvDtype, ModelGeometry

__all__ = [
    "KV_DTYPE_BYTES",
    "attention_scratch_bytes",
    "pool_bytes_per_token",
    "sequence_bytes_by_kind",
    "state_bytes_per_sequence",
    "token_bytes_by_kind",
]

FP32_BYTES = 4
KV_DTYPE_BYTES: dict[KvDtype, int] = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1}
KV_SCALE_BYTES = 4  # int8: fp32, one for each key or value row of a key-value head
_TOKEN_ID_BYTES = 8
# Attention runs over tiles of rows whose mask has at most this many entries, so that scratch does not grow
# with rows times context.
MASK_ELEMENTS = 1 << 22
DELTA_CHUNK_ROWS = 64


def pool_bytes_per_token(geometry: ModelGeometry, first: int, last: int, *, kv_dtype: KvDtype) -> int:
    """Return the bytes that one token takes in the paged pool of layers [first, last)."""
    return sum(token_bytes_by_kind(geometry, first, last, kv_dtype=kv_dtype).values())


def token_bytes_by_kind(
    geometry: ModelGeometry, first: int, last: int, *, kv_dtype: KvDtype
) -> dict[str, int]:
    """Return what one token adds to the state of layers [first, last), by kind, in bytes.

    Keys and values of every attention layer, and one indexer key for each compressed block, rounded up.
    """
    attention = geometry.attention
    row = attention.head_dim * KV_DTYPE_BYTES[kv_dtype] + (KV_SCALE_BYTES if kv_dtype == "int8" else 0)
    kinds = {"key_values": 0, "indexer_keys": 0}
    for layer in range(first, last):
        if geometry.recurrent_layers[layer]:
            continue
        kinds["key_values"] += 2 * attention.num_kv_heads * row
        ratio = _compress_ratio(geometry, layer)
        if ratio and geometry.sparse_attention is not None:
            kinds["indexer_keys"] += -(-geometry.sparse_attention.head_dim * FP32_BYTES // ratio)
    return kinds


def state_bytes_per_sequence(geometry: ModelGeometry, first: int, last: int) -> int:
    """Return the bytes of one sequence's state of fixed size in layers [first, last)."""
    return sum(sequence_bytes_by_kind(geometry, first, last).values())


def sequence_bytes_by_kind(geometry: ModelGeometry, first: int, last: int) -> dict[str, int]:
    """Return the state of fixed size that a sequence has in layers [first, last), by kind, in bytes.

    A stage allocates all of it but the token ids, which it reads from the launch's token table.
    """
    kinds = {"recurrent": 0, "convolution": 0, "incomplete_block": 0, "ngram_convolution": 0, "ngram_ids": 0}
    for layer in range(first, last):
        delta = geometry.delta_net
        if geometry.recurrent_layers[layer] and delta is not None:
            channels = (2 * delta.num_key_heads + delta.num_value_heads) * delta.head_dim
            kinds["convolution"] += (delta.conv_kernel - 1) * channels * FP32_BYTES
            kinds["recurrent"] += delta.num_value_heads * delta.head_dim**2 * FP32_BYTES
        ratio = _compress_ratio(geometry, layer)
        if ratio and geometry.sparse_attention is not None:
            kinds["incomplete_block"] += (ratio - 1) * geometry.sparse_attention.head_dim * FP32_BYTES
        ngram = geometry.ngram
        if ngram is not None and layer in ngram.layers:
            rows = (ngram.conv_kernel - 1) * ngram.ngram_size
            kinds["ngram_convolution"] += rows * geometry.row_width * FP32_BYTES
            kinds["ngram_ids"] += (ngram.ngram_size - 1) * _TOKEN_ID_BYTES
    return kinds


def attention_scratch_bytes(
    geometry: ModelGeometry, first: int, last: int, *, rows: int, context: int
) -> int:
    """Return the scratch of the attention half of any layer of [first, last) for a sub-chunk of rows.

    The largest over the layers of what one attention half holds at the same time: projections and their
    rotated or convolved copies, the gathered keys and values of the context, the mask and the selection of a
    tile of rows, and the normed rows.
    """
    hidden, width = geometry.hidden_size, geometry.row_width
    common = rows * (3 * hidden + 3 * width) * FP32_BYTES
    largest = 0
    for layer in range(first, last):
        delta = geometry.delta_net
        if geometry.recurrent_layers[layer] and delta is not None:
            values = delta.num_value_heads * delta.head_dim
            channels = 2 * delta.num_key_heads * delta.head_dim + values
            # Measured: the conv's input and output, one output more, and while the rule runs over whole
            # chunks of 64 rows, queries, keys, values, their scaled copies and the solution, with four
            # 64 x 64 matrices a head and chunk, and two copies of the state.
            chunked = (rows // DELTA_CHUNK_ROWS + 2) * DELTA_CHUNK_ROWS
            matrices = 4 * DELTA_CHUNK_ROWS * delta.num_value_heads
            states = 2 * delta.num_value_heads * delta.head_dim**2
            here = (rows * 3 * channels + chunked * (15 * values + matrices) + states) * FP32_BYTES
        else:
            attention = geometry.attention
            queries = attention.num_heads * attention.head_dim
            key_values = 2 * attention.num_kv_heads * attention.head_dim
            copies = 6 if attention.gated else 4  # the gate is half of the projection, and stays
            here = rows * (copies * queries + 2 * key_values) * FP32_BYTES
            here += context * key_values * FP32_BYTES
            # The mask of a tile of rows is a byte and then a float for each key.
            mask = max(context, min(rows * context, MASK_ELEMENTS))
            here += mask * (1 + FP32_BYTES)
            if attention.sinks:
                # Queries, keys and values once more, each a dim wider, and the keys and values one longer.
                wider = (
                    2 * attention.num_kv_heads * (context + 1) + 2 * rows * attention.num_heads
                ) * FP32_BYTES
                here += wider * (attention.head_dim + 1)
            ratio = _compress_ratio(geometry, layer)
            if ratio and geometry.sparse_attention is not None:
                sparse = geometry.sparse_attention
                # Scores of each indexer head, their sum, and the sort for the cut, for each block.
                here += mask // ratio * (sparse.num_heads + 3) * FP32_BYTES
                here += rows * sparse.num_heads * sparse.head_dim * FP32_BYTES
        ngram = geometry.ngram
        if ngram is not None and layer in ngram.layers:
            here = max(here, rows * 4 * width * FP32_BYTES)
        largest = max(largest, here)
    return common + largest


def _compress_ratio(geometry: ModelGeometry, layer: int) -> int:
    if geometry.sparse_attention is None or geometry.recurrent_layers[layer]:
        return 0
    return geometry.sparse_attention.compress_ratios[layer]
