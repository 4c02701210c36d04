"""From metadata keys to ModelGeometry: which keys an architecture has, and what cannot be read from the file.

Some facts have no key and hang on the architecture's name alone: the output gate of DeltaNet, the order of
its heads, whether attention is gated. They stand in FAMILIES, one row per architecture.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from strata_coord.coordinator.gguf_metadata import Metadata
from strata_coord.coordinator.rope_scaling import read_yarn
from strata_coord.ipc.assignment import (
    AttentionGeometry,
    DeltaNetGeometry,
    ExpertGeometry,
    HyperConnectionGeometry,
    ModelGeometry,
    NgramGeometry,
    SparseAttentionGeometry,
    TensorExtent,
)

MAX_LAYERS = 1_024
MAX_EXPERTS = 4_096
MAX_WIDTH = 1 << 20  # of hidden rows, experts, projections
MAX_HEADS = 4_096
MAX_CONTEXT = 1 << 30
_U64 = (1 << 64) - 1
_I32 = (1 << 31) - 1
_UNUSED_TOKEN = 5  # token_type of rows that only pad the vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What an architecture's name says and its keys do not."""

    gated_attention: bool = False
    head_norms: bool = True
    projection_biases: bool = False
    recurrent: bool = False  # most layers are Gated DeltaNet
    head_order: Literal["grouped", "tiled"] = "grouped"
    output_gate: Literal["silu", "sigmoid"] = "silu"
    shared_expert: bool = False
    renormalised: bool = True
    hyper_connections: bool = False  # also: no attn_norm, no ffn_norm, no output_norm
    sparse_attention: bool = False
    ngram: bool = False
    ffn_norm: str = "ffn_norm"


FAMILIES: Mapping[str, Family] = {
    "qwen2moe": Family(head_norms=False, projection_biases=True, shared_expert=True, renormalised=False),
    "qwen3moe": Family(),
    "qwen3next": Family(
        gated_attention=True, recurrent=True, shared_expert=True, ffn_norm="post_attention_norm"
    ),
    "qwen3vlmoe": Family(),
    "qwen35moe": Family(
        gated_attention=True,
        recurrent=True,
        head_order="tiled",
        shared_expert=True,
        ffn_norm="post_attention_norm",
    ),
    "qwen4exp": Family(
        gated_attention=True,
        recurrent=True,
        head_order="tiled",
        output_gate="sigmoid",
        shared_expert=True,
        hyper_connections=True,
        sparse_attention=True,
        ngram=True,
    ),
}


def read_geometry(metadata: Metadata, tensors: Mapping[str, TensorExtent]) -> ModelGeometry:
    """Read the architecture's keys; ranges are checked here, agreement with tensor shapes elsewhere.

    Raises:
        ModelError: the architecture is not supported, or a key is missing, out of range or contradicts
            another.
    """
    architecture = metadata.text("general.architecture")
    family = FAMILIES.get(architecture)
    if family is None:
        metadata.refuse(
            "general.architecture", f'"{architecture}" is not supported; supported are {", ".join(FAMILIES)}'
        )
    keys = _Keys(metadata, architecture)
    blocks = keys.integer("block_count", high=MAX_LAYERS)
    layers = blocks - keys.integer("nextn_predict_layers", low=0, high=blocks - 1, default=0)
    hidden = keys.integer("embedding_length", high=MAX_WIDTH)
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        metadata.refuse("token_embd.weight", "missing or not a matrix; its rows are the vocabulary")
    vocabulary = embedding.shape[0]
    if vocabulary > _I32:
        metadata.refuse("token_embd.weight", f"{vocabulary} rows, the limit is {_I32}")
    recurrent = _recurrent_layers(keys, blocks, layers) if family.recurrent else (False,) * layers
    return ModelGeometry(
        architecture=architecture,
        num_layers=layers,
        hidden_size=hidden,
        vocabulary_size=vocabulary,
        num_real_tokens=_num_real_tokens(metadata, vocabulary),
        context_tokens=keys.integer("context_length", high=MAX_CONTEXT),
        rms_epsilon=keys.number("attention.layer_norm_rms_epsilon", low=0.0, high=1.0),
        attention=_attention(keys, family, hidden),
        experts=_experts(keys, family, blocks, layers, tensors),
        recurrent_layers=recurrent,
        delta_net=_delta_net(keys, family) if family.recurrent else None,
        hyper_connections=_hyper_connections(keys) if family.hyper_connections else None,
        sparse_attention=_sparse_attention(keys, blocks, recurrent) if family.sparse_attention else None,
        ngram=_ngram(keys, layers, vocabulary) if family.ngram else None,
    )


class _Keys:
    """Metadata under the architecture's prefix."""

    def __init__(self, metadata: Metadata, architecture: str) -> None:
        self.metadata = metadata
        self.prefix = f"{architecture}."

    def integer(self, key: str, *, high: int, low: int = 1, default: int | None = None) -> int:
        return self.metadata.integer(self.prefix + key, low=low, high=high, default=default)

    def number(self, key: str, *, low: float, high: float, default: float | None = None) -> float:
        return self.metadata.number(self.prefix + key, low=low, high=high, default=default)

    def per_layer(self, key: str, *, blocks: int, layers: int, low: int, high: int) -> tuple[int, ...]:
        """Return one integer per trunk layer; the array may also cover the MTP blocks after the trunk."""
        values = self.metadata.integers(self.prefix + key, low=low, high=high)
        if len(values) not in (blocks, layers):
            self.refuse(key, f"{len(values)} elements, expected {blocks}, one per block")
        return values[:layers]

    def has(self, key: str) -> bool:
        return self.prefix + key in self.metadata

    def refuse(self, key: str, problem: str) -> None:
        self.metadata.refuse(self.prefix + key, problem)


def _num_real_tokens(metadata: Metadata, vocabulary: int) -> int:
    """Return the vocabulary without the trailing run of padding rows."""
    if "tokenizer.ggml.tokens" in metadata:
        tokens = metadata["tokenizer.ggml.tokens"]
        count = len(tokens) if hasattr(tokens, "__len__") else 0
        if count != vocabulary:
            metadata.refuse(
                "tokenizer.ggml.tokens", f"{count} tokens, token_embd.weight has {vocabulary} rows"
            )
    if "tokenizer.ggml.token_type" not in metadata:
        return vocabulary
    types = metadata.integers("tokenizer.ggml.token_type", low=0, high=_I32)
    if len(types) != vocabulary:
        metadata.refuse(
            "tokenizer.ggml.token_type", f"{len(types)} types, the vocabulary has {vocabulary} rows"
        )
    real = vocabulary
    while real and types[real - 1] == _UNUSED_TOKEN:
        real -= 1
    if not real:
        metadata.refuse("tokenizer.ggml.token_type", f"all {vocabulary} tokens are marked unused")
    return real


def _attention(keys: _Keys, family: Family, hidden: int) -> AttentionGeometry:
    heads = keys.integer("attention.head_count", high=MAX_HEADS)
    kv_heads = keys.integer("attention.head_count_kv", high=MAX_HEADS, default=heads)
    if heads % kv_heads:
        keys.refuse("attention.head_count_kv", f"{kv_heads} does not divide head_count {heads}")
    head_dim = keys.integer("attention.key_length", high=MAX_WIDTH, default=max(hidden // heads, 1))
    value_dim = keys.integer("attention.value_length", high=MAX_WIDTH, default=head_dim)
    if value_dim != head_dim:
        keys.refuse("attention.value_length", f"{value_dim}, expected key_length {head_dim}")
    rope_dims = keys.integer("rope.dimension_count", low=2, high=head_dim, default=head_dim)
    if rope_dims % 2:
        keys.refuse("rope.dimension_count", f"{rope_dims} is odd; dimensions are rotated in pairs")
    base = keys.number("rope.freq_base", low=1.0, high=1e15, default=10_000.0)
    yarn = read_yarn(keys.metadata, keys.prefix)
    if yarn is not None and base == 1.0:
        keys.refuse("rope.freq_base", "1.0, with which YaRN has no slow and fast rotations")
    return AttentionGeometry(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rope_dims=rope_dims,
        rope_base=base,
        gated=family.gated_attention,
        head_norms=family.head_norms,
        projection_biases=family.projection_biases,
        yarn=yarn,
    )


def _experts(
    keys: _Keys, family: Family, blocks: int, layers: int, tensors: Mapping[str, TensorExtent]
) -> ExpertGeometry:
    count = keys.integer("expert_count", high=MAX_EXPERTS)
    used = keys.integer("expert_used_count", high=count)
    width = keys.metadata.get(keys.prefix + "expert_feed_forward_length")
    if width is None:
        # Some converters leave the key out; the down projection's input is the width.
        down = [tensors.get(f"blk.{layer}.ffn_down_exps.weight") for layer in range(layers)]
        widths = tuple(extent.shape[-1] if extent else 0 for extent in down)
    elif isinstance(width, int):
        widths = (keys.integer("expert_feed_forward_length", high=MAX_WIDTH),) * layers
    else:
        widths = keys.per_layer(
            "expert_feed_forward_length", blocks=blocks, layers=layers, low=1, high=MAX_WIDTH
        )
    shared = 0
    if family.shared_expert:
        gate = tensors.get("blk.0.ffn_gate_shexp.weight")
        found = gate.shape[0] if gate else None
        shared = keys.integer("expert_shared_feed_forward_length", high=MAX_WIDTH, default=found)
    return ExpertGeometry(
        num_experts=count,
        experts_per_token=used,
        widths=widths,
        shared_width=shared,
        renormalised=family.renormalised,
    )


def _recurrent_layers(keys: _Keys, blocks: int, layers: int) -> tuple[bool, ...]:
    """Return which layers are DeltaNet; the explicit array of newer files wins over the interval."""
    if keys.has("attention.recurrent_layers"):
        flags = keys.per_layer("attention.recurrent_layers", blocks=blocks, layers=layers, low=0, high=1)
        return tuple(bool(flag) for flag in flags)
    interval = keys.integer("full_attention_interval", high=MAX_LAYERS, default=4)
    return tuple((layer + 1) % interval != 0 for layer in range(layers))


def _delta_net(keys: _Keys, family: Family) -> DeltaNetGeometry:
    key_heads = keys.integer("ssm.group_count", high=MAX_HEADS)
    value_heads = keys.integer("ssm.time_step_rank", high=MAX_HEADS)
    head_dim = keys.integer("ssm.state_size", high=MAX_WIDTH)
    inner = keys.integer("ssm.inner_size", high=MAX_WIDTH, default=value_heads * head_dim)
    if value_heads % key_heads:
        keys.refuse("ssm.time_step_rank", f"{value_heads} is not a multiple of group_count {key_heads}")
    if inner != value_heads * head_dim:
        keys.refuse(
            "ssm.inner_size", f"{inner}, expected time_step_rank x state_size = {value_heads * head_dim}"
        )
    return DeltaNetGeometry(
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        head_dim=head_dim,
        conv_kernel=keys.integer("ssm.conv_kernel", low=2, high=64),
        head_order=family.head_order,
        output_gate=family.output_gate,
    )


def _hyper_connections(keys: _Keys) -> HyperConnectionGeometry:
    return HyperConnectionGeometry(
        num_streams=keys.integer("hyper_connection.count", high=64),
        low_rank=keys.integer("hyper_connection.low_rank", high=MAX_WIDTH),
    )


def _sparse_attention(
    keys: _Keys, blocks: int, recurrent: tuple[bool, ...]
) -> SparseAttentionGeometry | None:
    """Return the indexer's sizes, or None for a file without any: all its attention layers are dense."""
    if not keys.has("attention.compress_ratios") and not keys.has("attention.indexer.top_k"):
        return None
    layers = len(recurrent)
    ratios = keys.per_layer("attention.compress_ratios", blocks=blocks, layers=layers, low=0, high=1 << 16)
    budget = keys.integer("attention.indexer.top_k", high=MAX_CONTEXT)
    for layer, ratio in enumerate(ratios):
        if ratio and not recurrent[layer] and budget % ratio:
            keys.refuse(f"attention.compress_ratios[{layer}]", f"{ratio} does not divide the budget {budget}")
    return SparseAttentionGeometry(
        num_heads=keys.integer("attention.indexer.head_count", high=MAX_HEADS),
        head_dim=keys.integer("attention.indexer.key_length", high=MAX_WIDTH),
        budget_tokens=budget,
        # A ratio on a recurrent layer has no meaning; zero keeps "ratio > 0" the one test for an indexer.
        compress_ratios=tuple(
            0 if linear else ratio for ratio, linear in zip(ratios, recurrent, strict=True)
        ),
    )


def _ngram(keys: _Keys, layers: int, vocabulary: int) -> NgramGeometry | None:
    """Return the constants of the n-gram embedding, or None for a file without one."""
    if not keys.has("ple.layers"):
        return None
    where = keys.metadata.integers(keys.prefix + "ple.layers", low=0, high=layers - 1)
    if not where:
        return None
    if len(where) > 1:
        keys.refuse("ple.layers", f"{len(where)} layers, supported is 1: the file has one table of constants")
    size = keys.integer("ple.ngram_size", low=2, high=16)
    per_ngram = keys.integer("ple.heads_per_ngram", high=256)
    heads = (size - 1) * per_ngram
    counts = {"ple.layer_multipliers": size, "ple.head_offsets": heads, "ple.head_vocab_sizes": heads}
    constants: dict[str, tuple[int, ...]] = {}
    for key, count in counts.items():
        low = 1 if key == "ple.head_vocab_sizes" else 0
        constants[key] = keys.metadata.integers(keys.prefix + key, low=low, high=_U64)
        if len(constants[key]) != count:
            keys.refuse(key, f"{len(constants[key])} elements, expected {count}")
    return NgramGeometry(
        layers=where,
        ngram_size=size,
        heads_per_ngram=per_ngram,
        conv_kernel=keys.integer("ple.conv_kernel", low=2, high=64),
        eos_token=keys.integer("ple.eos_token_id", low=0, high=vocabulary - 1),
        row_width=keys.integer("embedding_length_per_layer_input", high=MAX_WIDTH),
        multipliers=constants["ple.layer_multipliers"],
        head_offsets=constants["ple.head_offsets"],
        head_vocab_sizes=constants["ple.head_vocab_sizes"],
    )
