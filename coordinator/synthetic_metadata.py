"""The GGUF keys of a synthetic model: models.md section 0.1 and section 5. The inverse of model_geometry."""

from typing import Any

from strata_coord.coordinator.model_geometry import FAMILIES
from strata_coord.coordinator.synthetic_presets import FULL_ATTENTION_INTERVAL, SyntheticShape
from strata_coord.coordinator.synthetic_vocabulary import CHAT_TEMPLATE, make_vocabulary
from strata_coord.ipc.assignment import (
    DeltaNetGeometry,
    HyperConnectionGeometry,
    ModelGeometry,
    NgramGeometry,
    SparseAttentionGeometry,
    YarnGeometry,
)

_SECTIONED = ("qwen3vlmoe", "qwen35moe", "qwen4exp")  # time, height and width rotate in their own dims
_GATING_FUNCTIONS = {"softmax": 1, "sigmoid": 2}


class _Keys:
    """Adds keys under the architecture's prefix; the value's type decides the key's."""

    def __init__(self, writer: Any, architecture: str) -> None:
        self.writer = writer
        self.prefix = f"{architecture}."

    def add(self, key: str, value: float | str) -> None:
        if isinstance(value, str):
            self.writer.add_string(self.prefix + key, value)
        elif isinstance(value, bool):
            self.writer.add_bool(self.prefix + key, value)
        elif isinstance(value, int):
            self.writer.add_uint32(self.prefix + key, value)
        else:
            self.writer.add_float32(self.prefix + key, value)

    def add_array(self, key: str, values: tuple[int, ...] | list[int]) -> None:
        self.writer.add_array(self.prefix + key, list(values))

    def add_u64_array(self, key: str, values: tuple[int, ...]) -> None:
        import gguf

        kinds = gguf.GGUFValueType
        self.writer.add_key_value(self.prefix + key, list(values), kinds.ARRAY, sub_type=kinds.UINT64)


def add_keys(writer: Any, shape: SyntheticShape) -> None:
    """Add the architecture's and the tokenizer's keys to a gguf.GGUFWriter."""
    geometry = shape.geometry
    keys = _Keys(writer, geometry.architecture)
    _add_common(keys, geometry)
    if geometry.delta_net is not None:
        _add_delta_net(keys, geometry.delta_net)
    if geometry.hyper_connections is not None:
        _add_hyper_connections(keys, geometry.hyper_connections)
    if geometry.sparse_attention is not None:
        _add_sparse_attention(keys, geometry.sparse_attention)
    if geometry.ngram is not None:
        _add_ngram(keys, geometry.ngram)
    _add_tokenizer(writer, shape)


def _add_common(keys: _Keys, geometry: ModelGeometry) -> None:
    attention = geometry.attention
    keys.add("block_count", geometry.num_layers)
    keys.add("context_length", geometry.context_tokens)
    keys.add("embedding_length", geometry.hidden_size)
    keys.add("attention.head_count", attention.num_heads)
    keys.add("attention.head_count_kv", attention.num_kv_heads)
    keys.add("attention.key_length", attention.head_dim)
    keys.add("attention.value_length", attention.head_dim)
    keys.add("attention.layer_norm_rms_epsilon", geometry.rms_epsilon)
    keys.add("rope.freq_base", attention.rope_base)
    if attention.rope_dims != attention.head_dim:
        keys.add("rope.dimension_count", attention.rope_dims)
    if geometry.architecture in _SECTIONED:
        keys.add_array("rope.dimension_sections", _rope_sections(attention.rope_dims))
    if attention.yarn is not None:
        _add_yarn(keys, attention.yarn)
    if any(attention.windows):
        keys.add("attention.sliding_window", max(attention.windows))
    _add_experts(keys, geometry)
    if any(geometry.recurrent_layers):
        keys.add("full_attention_interval", FULL_ATTENTION_INTERVAL)


def _add_yarn(keys: _Keys, yarn: YarnGeometry) -> None:
    keys.add("rope.scaling.type", "yarn")
    keys.add("rope.scaling.factor", yarn.factor)
    keys.add("rope.scaling.original_context_length", yarn.original_tokens)


def _add_experts(keys: _Keys, geometry: ModelGeometry) -> None:
    experts = geometry.experts
    keys.add("expert_count", experts.num_experts)
    keys.add("expert_used_count", experts.experts_per_token)
    widths = experts.widths[experts.widths.count(0) :]  # layers without experts come first
    if len(set(widths)) == 1:
        keys.add("expert_feed_forward_length", widths[0])
    else:
        keys.add_array("expert_feed_forward_length", experts.widths)
    if FAMILIES[geometry.architecture].experts_by_keys:
        keys.add("leading_dense_block_count", experts.widths.count(0))
        keys.add("feed_forward_length", experts.dense_width or widths[0])
        keys.add("expert_shared_count", experts.shared_width // widths[0])
        keys.add("expert_gating_func", _GATING_FUNCTIONS[experts.scores])
        keys.add("expert_weights_norm", experts.renormalised)
        keys.add("expert_weights_scale", experts.weight_scale)
    elif experts.shared_width:
        keys.add("expert_shared_feed_forward_length", experts.shared_width)


def _rope_sections(rope_dims: int) -> list[int]:
    """Return how many frequencies follow time, height and width: 11, 11, 10 of 32."""
    frequencies = rope_dims // 2
    width = frequencies // 3
    height = (frequencies - width) // 2
    return [frequencies - width - height, height, width, 0]


def _add_delta_net(keys: _Keys, net: DeltaNetGeometry) -> None:
    keys.add("ssm.conv_kernel", net.conv_kernel)
    keys.add("ssm.state_size", net.head_dim)
    keys.add("ssm.group_count", net.num_key_heads)
    keys.add("ssm.time_step_rank", net.num_value_heads)
    keys.add("ssm.inner_size", net.num_value_heads * net.head_dim)


def _add_hyper_connections(keys: _Keys, connections: HyperConnectionGeometry) -> None:
    keys.add("hyper_connection.count", connections.num_streams)
    keys.add("hyper_connection.low_rank", connections.low_rank)


def _add_sparse_attention(keys: _Keys, sparse: SparseAttentionGeometry) -> None:
    keys.add("attention.indexer.head_count", sparse.num_heads)
    keys.add("attention.indexer.key_length", sparse.head_dim)
    keys.add("attention.indexer.top_k", sparse.budget_tokens)
    keys.add_array("attention.compress_ratios", sparse.compress_ratios)


def _add_ngram(keys: _Keys, ngram: NgramGeometry) -> None:
    keys.add_array("ple.layers", ngram.layers)
    keys.add("ple.ngram_size", ngram.ngram_size)
    keys.add("ple.heads_per_ngram", ngram.heads_per_ngram)
    keys.add("ple.conv_kernel", ngram.conv_kernel)
    keys.add("ple.eos_token_id", ngram.eos_token)
    keys.add("embedding_length_per_layer_input", ngram.row_width)
    keys.add_u64_array("ple.layer_multipliers", ngram.multipliers)
    keys.add_u64_array("ple.head_offsets", ngram.head_offsets)
    keys.add_u64_array("ple.head_vocab_sizes", ngram.head_vocab_sizes)


def _add_tokenizer(writer: Any, shape: SyntheticShape) -> None:
    vocabulary = make_vocabulary(shape.vocabulary)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(shape.vocabulary.pre_tokenizer)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.token_types)
    writer.add_token_merges(vocabulary.merges)
    writer.add_bos_token_id(shape.vocabulary.end_of_text)
    writer.add_eos_token_id(shape.vocabulary.im_end)
    writer.add_pad_token_id(shape.vocabulary.end_of_text)
    writer.add_add_bos_token(value=False)
    writer.add_chat_template(CHAT_TEMPLATE)
