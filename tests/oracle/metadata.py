"""The GGUF keys of a tiny model: models.md section 0.1 and section 5."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gguf
from oracle.plain_moe import TINY_PLAIN_MOE, add_plain_moe_keys
from oracle.vocabulary import CHAT_TEMPLATE, tiny_vocabulary

if TYPE_CHECKING:
    from oracle.export import ExportOptions
    from torch import nn

_ARRAY = gguf.GGUFValueType.ARRAY
_UINT64 = gguf.GGUFValueType.UINT64


def add_metadata(
    writer: gguf.GGUFWriter, model: nn.Module, architecture: str, options: ExportOptions
) -> None:
    """Add the general, architecture and tokenizer keys."""
    config: Any = model.config
    layers: Any = model.model.layers
    num_blocks = config.num_hidden_layers + options.nextn_layers

    def add(key: str, value: float | str) -> None:
        full = f"{architecture}.{key}"
        if isinstance(value, int):
            writer.add_uint32(full, value)
        elif isinstance(value, float):
            writer.add_float32(full, value)
        else:
            writer.add_string(full, value)

    writer.add_name(f"tiny {architecture}")
    add("block_count", num_blocks)
    if options.nextn_layers:
        add("nextn_predict_layers", options.nextn_layers)
    add("context_length", config.max_position_embeddings)
    add("embedding_length", config.hidden_size)
    add("attention.head_count", config.num_attention_heads)
    add("attention.head_count_kv", config.num_key_value_heads)
    if architecture != "qwen2moe":  # real files leave it out: hidden size / heads
        add("attention.key_length", config.head_dim)
        add("attention.value_length", config.head_dim)
    add("attention.layer_norm_rms_epsilon", float(config.rms_norm_eps))
    if architecture in TINY_PLAIN_MOE:
        add_plain_moe_keys(writer, add, config, architecture)
        _add_tokenizer(writer, architecture)
        return
    widths = [layer.mlp.experts.down_proj.shape[-1] for layer in layers]
    _add_rope(writer, add, config, architecture)
    add("expert_count", config.num_experts)
    add("expert_used_count", config.num_experts_per_tok)
    if options.expert_width_array or len(set(widths)) > 1:
        padded = widths + [widths[-1]] * options.nextn_layers
        writer.add_array(f"{architecture}.expert_feed_forward_length", padded)
    else:
        add("expert_feed_forward_length", widths[0])
    if hasattr(config, "shared_expert_intermediate_size"):
        add("expert_shared_feed_forward_length", config.shared_expert_intermediate_size)
    if hasattr(config, "linear_conv_kernel_dim"):
        _add_delta_net(writer, add, config, layers, architecture, options)
    if architecture == "qwen4exp":
        _add_qwen4exp(writer, add, config, layers, options)
    _add_tokenizer(writer, architecture)


def _add_rope(writer: gguf.GGUFWriter, add: Any, config: Any, architecture: str) -> None:
    rope = config.rope_parameters
    add("rope.freq_base", float(rope["rope_theta"]))
    if "partial_rotary_factor" in rope:
        add("rope.dimension_count", int(config.head_dim * rope["partial_rotary_factor"]))
    if "mrope_section" in rope:
        writer.add_array(f"{architecture}.rope.dimension_sections", [*rope["mrope_section"], 0])
    if rope["rope_type"] == "yarn":
        add("rope.scaling.type", "yarn")
        add("rope.scaling.factor", float(rope["factor"]))
        add("rope.scaling.original_context_length", rope["original_max_position_embeddings"])
        for key, name in (
            ("yarn_beta_fast", "beta_fast"),
            ("yarn_beta_slow", "beta_slow"),
            ("yarn_attn_factor", "attention_factor"),
        ):
            if rope.get(name) is not None:
                add(f"rope.scaling.{key}", float(rope[name]))


def _add_delta_net(
    writer: gguf.GGUFWriter, add: Any, config: Any, layers: Any, architecture: str, options: ExportOptions
) -> None:
    add("full_attention_interval", 4)
    if options.recurrent_layers:
        is_linear = [hasattr(layer, "linear_attn") for layer in layers]
        writer.add_array(
            f"{architecture}.attention.recurrent_layers", is_linear + [False] * options.nextn_layers
        )
    add("ssm.conv_kernel", config.linear_conv_kernel_dim)
    add("ssm.state_size", config.linear_key_head_dim)
    add("ssm.group_count", config.linear_num_key_heads)
    add("ssm.time_step_rank", config.linear_num_value_heads)
    add("ssm.inner_size", config.linear_num_value_heads * config.linear_value_head_dim)


def _add_qwen4exp(
    writer: gguf.GGUFWriter, add: Any, config: Any, layers: Any, options: ExportOptions
) -> None:
    arch = "qwen4exp"
    is_linear = [hasattr(layer, "linear_attn") for layer in layers]
    add("hyper_connection.count", config.hc_count)
    add("hyper_connection.low_rank", config.hc_lowrank)
    add("attention.indexer.head_count", config.indexer_n_heads)
    add("attention.indexer.key_length", config.indexer_head_dim)
    add("attention.indexer.top_k", config.indexer_budget)
    has_indexer = [
        not linear and hasattr(layer.self_attn.indexer, "index_qk_proj")
        for linear, layer in zip(is_linear, layers, strict=True)
    ]
    ratios = [config.indexer_compress_ratio if present else 0 for present in has_indexer]
    writer.add_array(f"{arch}.attention.compress_ratios", ratios + [0] * options.nextn_layers)
    if config.ple_layer_ids:
        _add_ple(writer, add, config, layers)


def _add_ple(writer: gguf.GGUFWriter, add: Any, config: Any, layers: Any) -> None:
    arch = "qwen4exp"
    writer.add_array(f"{arch}.ple.layers", [layer - 1 for layer in config.ple_layer_ids])
    table = layers[config.ple_layer_ids[0] - 1].ple.ple_embedding
    add("ple.ngram_size", config.ngram_size)
    add("ple.heads_per_ngram", config.heads_per_ngram)
    add("ple.conv_kernel", config.ple_conv_kernel_size)
    add("ple.eos_token_id", table.eos_token_id)
    add("embedding_length_per_layer_input", table.ngram_embedding.weight.shape[1])
    for key, values in (
        ("layer_multipliers", table.layer_multipliers.tolist()),
        ("head_offsets", table.head_offsets),
        ("head_vocab_sizes", table.head_vocab_sizes),
    ):
        writer.add_key_value(f"{arch}.ple.{key}", values, _ARRAY, sub_type=_UINT64)


def _add_tokenizer(writer: gguf.GGUFWriter, architecture: str) -> None:
    vocabulary = tiny_vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen35" if architecture in {"qwen35moe", "qwen4exp"} else "qwen2")
    writer.add_token_list(list(vocabulary.tokens))
    writer.add_token_types(list(vocabulary.token_types))
    writer.add_token_merges(list(vocabulary.merges))
    writer.add_bos_token_id(vocabulary.end_of_text)
    writer.add_eos_token_id(vocabulary.im_end)
    writer.add_pad_token_id(vocabulary.end_of_text)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
