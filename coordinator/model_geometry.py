"""From metadata keys to ModelGeometry: which keys an architecture has, and what cannot be read from the file.

Some facts have no key and hang on the architecture's name alone: the output gate of DeltaNet, the order of
its heads, whether attention is gated. They stand in FAMILIES, one row per architecture.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from strata_coord.coordinator.architecture_keys import (
    MAX_CONTEXT,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_WIDTH,
    ArchitectureKeys,
)
from strata_coord.coordinator.expert_geometry import read_experts
from strata_coord.coordinator.gguf_metadata import Metadata
from strata_coord.coordinator.rope_scaling import read_yarn
from strata_coord.ipc.assignment import (
    AttentionGeometry,
    DeltaNetGeometry,
    HyperConnectionGeometry,
    ModelGeometry,
    NgramGeometry,
    SparseAttentionGeometry,
    TensorExtent,
    YarnGeometry,
)

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
    experts_by_keys: bool = False  # layers without experts, the shared expert and router rules are keys
    scores: Literal["softmax", "sigmoid"] = "softmax"  # where no key says it
    biased_experts: bool = False  # and the activation is clamped
    optional_head_norms: bool = False  # by the tensors of the first layer
    optional_biases: bool = False
    rope_pairs: Literal["halves", "neighbours"] = "halves"
    sinks: bool = False  # also: an output bias, and every other layer sees a window
    hyper_connections: bool = False  # also: no attn_norm, no ffn_norm, no output_norm
    sparse_attention: bool = False
    ngram: bool = False
    ffn_norm: str = "ffn_norm"


FAMILIES: Mapping[str, Family] = {
    "glm4moe": Family(
        optional_head_norms=True,
        optional_biases=True,
        experts_by_keys=True,
        scores="sigmoid",
        ffn_norm="post_attention_norm",
    ),
    "gpt-oss": Family(
        head_norms=False,
        projection_biases=True,
        sinks=True,
        biased_experts=True,
        ffn_norm="post_attention_norm",
    ),
    "llama": Family(head_norms=False, optional_biases=True, rope_pairs="neighbours"),
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
    keys = ArchitectureKeys(metadata, architecture)
    blocks = keys.integer("block_count", high=MAX_LAYERS)
    layers = blocks - keys.integer("nextn_predict_layers", low=0, high=blocks - 1, default=0)
    hidden = keys.integer("embedding_length", high=MAX_WIDTH)
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        metadata.refuse("token_embd.weight", "missing or not a matrix; its rows are the vocabulary")
    vocabulary = embedding.shape[0]
    if vocabulary > _I32:
        metadata.refuse("token_embd.weight", f"{vocabulary} rows, the limit is {_I32}")
    attention = _attention(keys, family, blocks, layers, tensors)
    recurrent = _recurrent_layers(keys, blocks, layers) if family.recurrent else (False,) * layers
    return ModelGeometry(
        architecture=architecture,
        num_layers=layers,
        hidden_size=hidden,
        vocabulary_size=vocabulary,
        num_real_tokens=_num_real_tokens(metadata, vocabulary),
        context_tokens=_context_tokens(keys, attention.yarn),
        rms_epsilon=keys.number("attention.layer_norm_rms_epsilon", low=0.0, high=1.0),
        attention=attention,
        experts=read_experts(keys, family, blocks, layers, tensors),
        recurrent_layers=recurrent,
        delta_net=_delta_net(keys, family) if family.recurrent else None,
        hyper_connections=_hyper_connections(keys) if family.hyper_connections else None,
        sparse_attention=_sparse_attention(keys, blocks, recurrent) if family.sparse_attention else None,
        ngram=_ngram(keys, layers, vocabulary) if family.ngram else None,
    )


def _context_tokens(keys: ArchitectureKeys, yarn: YarnGeometry | None) -> int:
    """Return the longest context; converters do not agree whether the key counts what YaRN adds."""
    stated = keys.integer("context_length", high=MAX_CONTEXT)
    if yarn is None:
        return stated
    return max(stated, min(int(yarn.original_tokens * yarn.factor), MAX_CONTEXT))


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


def _attention(
    keys: ArchitectureKeys, family: Family, blocks: int, layers: int, tensors: Mapping[str, TensorExtent]
) -> AttentionGeometry:
    heads = keys.integer("attention.head_count", high=MAX_HEADS)
    kv_heads = keys.integer("attention.head_count_kv", high=MAX_HEADS, default=heads)
    if heads % kv_heads:
        keys.refuse("attention.head_count_kv", f"{kv_heads} does not divide head_count {heads}")
    hidden = keys.integer("embedding_length", high=MAX_WIDTH)
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
    if "rope_freqs.weight" in tensors:
        keys.metadata.refuse("tensor rope_freqs.weight", "rotations scaled by a tensor are not supported")
    biases = {f"blk.0.attn_{part}.bias" for part in ("q", "qkv")}
    return AttentionGeometry(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rope_dims=rope_dims,
        rope_base=base,
        gated=family.gated_attention,
        head_norms="blk.0.attn_q_norm.weight" in tensors if family.optional_head_norms else family.head_norms,
        projection_biases=(
            any(name in tensors for name in biases) if family.optional_biases else family.projection_biases
        ),
        # Files do not say that gpt-oss's ramp, alone among them, does not end on whole pairs.
        yarn=replace(yarn, whole_pairs=False) if yarn is not None and family.sinks else yarn,
        rope_pairs=family.rope_pairs,
        output_bias=family.sinks,
        sinks=family.sinks,
        windows=_windows(keys, blocks, layers) if family.sinks else (),
    )


def _windows(keys: ArchitectureKeys, blocks: int, layers: int) -> tuple[int, ...]:
    """Return each layer's window: the pattern says which layers have one, or after how many one has none."""
    window = keys.integer("attention.sliding_window", high=MAX_CONTEXT)
    pattern = "attention.sliding_window_pattern"
    if keys.is_array(pattern):
        flags = keys.per_layer(pattern, blocks=blocks, layers=layers, low=0, high=1)
        return tuple(window if flag else 0 for flag in flags)
    period = keys.integer(pattern, high=MAX_LAYERS, default=2)
    return tuple(0 if (layer + 1) % period == 0 else window for layer in range(layers))


def _recurrent_layers(keys: ArchitectureKeys, blocks: int, layers: int) -> tuple[bool, ...]:
    """Return which layers are DeltaNet; the explicit array of newer files wins over the interval."""
    if keys.has("attention.recurrent_layers"):
        flags = keys.per_layer("attention.recurrent_layers", blocks=blocks, layers=layers, low=0, high=1)
        return tuple(bool(flag) for flag in flags)
    interval = keys.integer("full_attention_interval", high=MAX_LAYERS, default=4)
    return tuple((layer + 1) % interval != 0 for layer in range(layers))


def _delta_net(keys: ArchitectureKeys, family: Family) -> DeltaNetGeometry:
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


def _hyper_connections(keys: ArchitectureKeys) -> HyperConnectionGeometry:
    return HyperConnectionGeometry(
        num_streams=keys.integer("hyper_connection.count", high=64),
        low_rank=keys.integer("hyper_connection.low_rank", high=MAX_WIDTH),
    )


def _sparse_attention(
    keys: ArchitectureKeys, blocks: int, recurrent: tuple[bool, ...]
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


def _ngram(keys: ArchitectureKeys, layers: int, vocabulary: int) -> NgramGeometry | None:
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
