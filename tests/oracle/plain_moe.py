"""Tiny models of the plain MoE families, the GGUF tensors that hold them, and their keys.

llama (Mixtral), glm4moe (GLM-4.5) and gpt-oss; names and keys as llama.cpp's converters write them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from oracle.links import Link
from oracle.vocabulary import VOCABULARY_SIZE, tiny_vocabulary

if TYPE_CHECKING:
    from collections.abc import Iterator

    import gguf
    from oracle.export import ExportOptions
    from oracle.tiny import TinyOptions
    from torch import nn

# Hugging Face's model_type -> the name in GGUF.
PLAIN_MOE = {"mixtral": "llama", "glm4_moe": "glm4moe", "gpt_oss": "gpt-oss"}

WINDOW = 24  # of gpt-oss


def _config(options: TinyOptions) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": 256,
        "num_hidden_layers": options.num_layers or 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_experts_per_tok": 4,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": options.tied_output,
        "eos_token_id": tiny_vocabulary().end_of_text,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }


def _eager(config: Any) -> Any:
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    return config


def tiny_llama(options: TinyOptions) -> nn.Module:
    """Return an undrawn Mixtral."""
    from transformers import MixtralConfig, MixtralForCausalLM

    values = _config(options) | {"num_local_experts": 16, "intermediate_size": 64}
    return MixtralForCausalLM(_eager(MixtralConfig(**(values | options.config))))


def tiny_glm4moe(options: TinyOptions) -> nn.Module:
    """Return an undrawn GLM-4.5: one layer without experts, then a shared expert of two."""
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    values = _config(options) | {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
        "n_routed_experts": 16,
        "moe_intermediate_size": 64,
        "intermediate_size": 160,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
        "norm_topk_prob": True,
        "attention_bias": True,
        "use_qk_norm": True,
        "num_mtp_layers": 0,
    }
    return Glm4MoeForCausalLM(_eager(Glm4MoeConfig(**(values | options.config))))


def tiny_gpt_oss(options: TinyOptions) -> nn.Module:
    """Return an undrawn gpt-oss; its window and YaRN's original context are short enough to bind."""
    from transformers import GptOssConfig, GptOssForCausalLM

    yarn = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    values = _config(options) | {
        "rope_parameters": yarn | {"rope_theta": 150000.0, "original_max_position_embeddings": 128},
        "num_local_experts": 16,
        "intermediate_size": 64,
        "sliding_window": WINDOW,
    }
    return GptOssForCausalLM(_eager(GptOssConfig(**(values | options.config))))


TINY_PLAIN_MOE = {"llama": tiny_llama, "glm4moe": tiny_glm4moe, "gpt-oss": tiny_gpt_oss}


def finish_drawing(model: nn.Module, generator: torch.Generator) -> None:
    """Draw what is not a parameter, the bias with which experts are chosen, and let gpt-oss's clamps bind."""
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
    if model.config.model_type == "gpt_oss":
        for layer in model.model.layers:
            layer.mlp.experts.gate_up_proj.mul_(3.0)


def plain_moe_links(model: Any, architecture: str, options: ExportOptions) -> Iterator[Link]:
    """Yield a link for every tensor of the file."""
    yield Link("token_embd.weight", "embedding", model.model.embed_tokens.weight.data)
    if not model.config.tie_word_embeddings:
        yield Link("output.weight", "output", model.lm_head.weight.data)
    yield Link("output_norm.weight", "norm", model.model.norm.weight.data)
    after = "ffn_norm" if architecture == "llama" else "post_attention_norm"
    for index, layer in enumerate(model.model.layers):
        prefix = f"blk.{index}."
        yield Link(prefix + "attn_norm.weight", "norm", layer.input_layernorm.weight.data)
        yield Link(f"{prefix}{after}.weight", "norm", layer.post_attention_layernorm.weight.data)
        yield from _attention_links(prefix, layer.self_attn, architecture)
        if architecture == "gpt-oss":
            yield from _gpt_oss_experts(prefix, layer.mlp)
        elif hasattr(layer.mlp, "experts"):
            yield from _experts(prefix, layer.mlp, options)
        else:
            yield from _mlp(prefix, layer.mlp, "")


def _attention_links(prefix: str, attention: Any, architecture: str) -> Iterator[Link]:
    parts = {"q": attention.q_proj, "k": attention.k_proj, "v": attention.v_proj, "output": attention.o_proj}
    kinds = {"q": "attention", "k": "attention_kv", "v": "attention_kv", "output": "attention_output"}
    for part, projection in parts.items():
        rows = None
        if architecture == "llama" and part in {"q", "k"}:
            rows = neighbour_rows(len(projection.weight), attention.head_dim)
        yield Link(f"{prefix}attn_{part}.weight", kinds[part], projection.weight.data, rows=rows)
        if projection.bias is not None:
            yield Link(f"{prefix}attn_{part}.bias", "small", projection.bias.data, rows=rows)
    if hasattr(attention, "q_norm"):
        yield Link(prefix + "attn_q_norm.weight", "norm", attention.q_norm.weight.data)
        yield Link(prefix + "attn_k_norm.weight", "norm", attention.k_norm.weight.data)
    if hasattr(attention, "sinks"):
        yield Link(prefix + "attn_sinks.weight", "small", attention.sinks.data)


def neighbour_rows(num_rows: int, head_dim: int) -> torch.Tensor:
    """Return the rows of Hugging Face in GGUF order: the two that are rotated together become neighbours."""
    heads = torch.arange(num_rows).view(-1, 2, head_dim // 2)
    return heads.transpose(1, 2).reshape(-1)


def _experts(prefix: str, mlp: Any, options: ExportOptions) -> Iterator[Link]:
    gate_up, down = mlp.experts.gate_up_proj.data, mlp.experts.down_proj.data
    width = gate_up.shape[1] // 2
    parts = {"gate": gate_up[:, :width], "up": gate_up[:, width:], "down": down}
    kinds = {"gate": "experts_gate_up", "up": "experts_gate_up", "down": "experts_down"}
    yield Link(prefix + "ffn_gate_inp.weight", "router", mlp.gate.weight.data)
    for part, value in parts.items():
        if options.single_experts:
            for expert, matrix in enumerate(value):
                yield Link(f"{prefix}ffn_{part}.{expert}.weight", kinds[part], matrix)
        else:
            yield Link(f"{prefix}ffn_{part}_exps.weight", kinds[part], value)
    if hasattr(mlp.gate, "e_score_correction_bias"):
        yield Link(prefix + "exp_probs_b.bias", "small", mlp.gate.e_score_correction_bias)
    if hasattr(mlp, "shared_experts"):
        yield from _mlp(prefix, mlp.shared_experts, "_shexp")


def _mlp(prefix: str, mlp: Any, suffix: str) -> Iterator[Link]:
    for part in ("gate", "up", "down"):
        weight = getattr(mlp, f"{part}_proj").weight.data
        yield Link(f"{prefix}ffn_{part}{suffix}.weight", "shared", weight)


def _gpt_oss_experts(prefix: str, mlp: Any) -> Iterator[Link]:
    """Hugging Face has matrices [E, in, out] with gate and up columns in turn."""
    experts = mlp.experts
    gate_up, bias = experts.gate_up_proj.data.transpose(1, 2), experts.gate_up_proj_bias.data
    yield Link(prefix + "ffn_gate_inp.weight", "router", mlp.router.weight.data)
    yield Link(prefix + "ffn_gate_inp.bias", "small", mlp.router.bias.data)
    for offset, part in enumerate(("gate", "up")):
        yield Link(f"{prefix}ffn_{part}_exps.weight", "mxfp4", gate_up[:, offset::2])
        yield Link(f"{prefix}ffn_{part}_exps.bias", "small", bias[:, offset::2])
    yield Link(prefix + "ffn_down_exps.weight", "mxfp4", experts.down_proj.data.transpose(1, 2))
    yield Link(prefix + "ffn_down_exps.bias", "small", experts.down_proj_bias.data)


def add_plain_moe_keys(writer: gguf.GGUFWriter, add: Any, config: Any, architecture: str) -> None:
    """Add the keys of experts, rotations and windows."""
    rope = config.rope_parameters
    add("rope.freq_base", float(rope["rope_theta"]))
    add("expert_used_count", config.num_experts_per_tok)
    if architecture == "llama":
        add("expert_count", config.num_local_experts)
        add("feed_forward_length", config.intermediate_size)  # of the experts, which have no key of their own
        add("rope.dimension_count", config.head_dim)
    elif architecture == "glm4moe":
        add("rope.dimension_count", int(config.head_dim * rope["partial_rotary_factor"]))
        add("feed_forward_length", config.intermediate_size)
        add("leading_dense_block_count", config.first_k_dense_replace)
        add("expert_count", config.n_routed_experts)
        add("expert_feed_forward_length", config.moe_intermediate_size)
        add("expert_shared_count", config.n_shared_experts)
        add("expert_gating_func", 2)
        add("expert_weights_scale", float(config.routed_scaling_factor))
        writer.add_bool(f"{architecture}.expert_weights_norm", config.norm_topk_prob)
        if config.n_group > 1:
            add("expert_group_count", config.n_group)
            add("expert_group_used_count", config.topk_group)
    else:
        add("expert_count", config.num_local_experts)
        add("expert_feed_forward_length", config.intermediate_size)
        add("feed_forward_length", config.intermediate_size)
        add("attention.sliding_window", config.sliding_window)
        if rope["rope_type"] == "yarn":
            add("rope.scaling.type", "yarn")
            add("rope.scaling.factor", float(rope["factor"]))
            add("rope.scaling.original_context_length", rope["original_max_position_embeddings"])
