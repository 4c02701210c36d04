"""Tiny Hugging Face models with every parameter random, by models.md section 6.1.

Default initialisation leaves norms at 0 or 1 and the PLE convolution at 0, which hides errors, so each kind
of parameter is drawn here. The sizes keep the real shape of things: gate and up rows of 256 values can be
Q4_K, down rows of 64 cannot; value heads are three per key head; the router's margins are wide.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from oracle.plain_moe import TINY_PLAIN_MOE, finish_drawing
from oracle.vocabulary import VOCABULARY_SIZE, tiny_vocabulary
from torch import nn

HIDDEN = 256
EXPERT_WIDTH = 64
NUM_EXPERTS = 16
EXPERTS_PER_TOKEN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyOptions:
    """What a test may vary. Defaults are the plain form of each architecture."""

    seed: int = 0
    is_drawn: bool = True  # False: values are left undefined, for a model that load_gguf fills
    num_layers: int | None = None  # 8 with DeltaNet, 3 without
    tied_output: bool = False
    dense_attention_layers: tuple[int, ...] = ()  # qwen4exp: compress ratio 0, no indexer
    expert_widths: tuple[int, ...] | None = None  # per layer; None: EXPERT_WIDTH in all
    indexer_budget: int = 16
    compress_ratio: int = 4
    ple_layers: tuple[int, ...] = (1,)  # zero-based
    config: dict[str, Any] = field(default_factory=dict)  # overrides of the Hugging Face configuration


def tiny_model(architecture: str, options: TinyOptions | None = None) -> nn.Module:
    """Return a random fp32 model in eval mode, with eager attention and eager experts."""
    options = options or TinyOptions()
    from transformers.initialization import no_init_weights

    with no_init_weights():
        model = _BUILDERS[architecture](options)
    with torch.no_grad():
        if options.is_drawn:
            _randomise(model, torch.Generator().manual_seed(options.seed))
        if options.tied_output:  # transformers ties while it initialises, which is left out here
            model.lm_head.weight = model.model.embed_tokens.weight
        _narrow_experts(model, options.expert_widths)
        for layer in options.dense_attention_layers:
            model.model.layers[layer].self_attn.indexer = _AllVisible()
    return model.eval().requires_grad_(False)


class _AllVisible(nn.Module):
    """Stands for the indexer of an attention layer whose compress ratio is 0."""

    def forward(
        self, _hidden: Any, _positions: Any, attention_mask: torch.Tensor, _cache: Any
    ) -> torch.Tensor:
        return torch.ones_like(attention_mask, dtype=torch.bool)


def _common_config(options: TinyOptions, default_layers: int) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": HIDDEN,
        "num_hidden_layers": options.num_layers or default_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "moe_intermediate_size": EXPERT_WIDTH,
        "num_experts": NUM_EXPERTS,
        "num_experts_per_tok": EXPERTS_PER_TOKEN,
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": options.tied_output,
        "eos_token_id": tiny_vocabulary().end_of_text,
    }


def _eager(config: Any) -> Any:
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    return config


def _qwen3moe(options: TinyOptions) -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    values = _common_config(options, 3) | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    return Qwen3MoeForCausalLM(_eager(Qwen3MoeConfig(**(values | options.config))))


def _qwen4exp(options: TinyOptions) -> nn.Module:
    from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig
    from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpForCausalLM

    values = _common_config(options, 8) | {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [3, 3, 2],
            "mrope_interleaved": True,
        },
        **_DELTA_NET,
        "hc_count": 4,
        "hc_lowrank": 32,
        "ple_layer_ids": [layer + 1 for layer in options.ple_layers],
        "ple_embed_dim": HIDDEN,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 500,
        "make_ngram_vocab_size_divisible_by": 32,
        "split_ngram_parts": 1,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 32,
        "indexer_budget": options.indexer_budget,
        "indexer_compress_ratio": options.compress_ratio,
        "output_gate_type": "sigmoid",
    }
    return Qwen4ExpForCausalLM(_eager(Qwen4ExpTextConfig(**(values | options.config))))


def _qwen2moe(options: TinyOptions) -> nn.Module:
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    values = _common_config(options, 3) | {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "norm_topk_prob": False,
        "shared_expert_intermediate_size": 2 * EXPERT_WIDTH,
    }
    return Qwen2MoeForCausalLM(_eager(Qwen2MoeConfig(**(values | options.config))))


def _qwen3vlmoe(options: TinyOptions) -> nn.Module:
    from transformers.models.qwen3_vl_moe.configuration_qwen3_vl_moe import Qwen3VLMoeTextConfig
    from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeTextModel

    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [12, 10, 10]}
    values = _common_config(options, 3) | {"rope_parameters": rope | {"mrope_interleaved": True}}
    config = _eager(Qwen3VLMoeTextConfig(**(values | options.config)))
    return _TextOnly(Qwen3VLMoeTextModel(config), config)


class _TextOnly(nn.Module):
    """A text model with the head that Hugging Face gives only to the whole vision model."""

    def __init__(self, model: nn.Module, config: Any) -> None:
        super().__init__()
        self.config = config
        self.model = model
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids: torch.Tensor, *, use_cache: bool) -> Any:
        hidden = self.model(input_ids=input_ids, use_cache=use_cache).last_hidden_state
        return SimpleNamespace(logits=self.lm_head(hidden))


_DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "shared_expert_intermediate_size": EXPERT_WIDTH,
}


def _qwen3next(options: TinyOptions) -> nn.Module:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    values = _common_config(options, 8) | _DELTA_NET | {"rope_parameters": rope}
    return Qwen3NextForCausalLM(_eager(Qwen3NextConfig(**(values | options.config))))


def _qwen35moe(options: TinyOptions) -> nn.Module:
    from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig
    from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeForCausalLM

    rope = {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
    }
    values = _common_config(options, 8) | _DELTA_NET | {"rope_parameters": rope}
    return Qwen3_5MoeForCausalLM(_eager(Qwen3_5MoeTextConfig(**(values | options.config))))


_BUILDERS = {
    "qwen2moe": _qwen2moe,
    "qwen3moe": _qwen3moe,
    "qwen3next": _qwen3next,
    "qwen3vlmoe": _qwen3vlmoe,
    "qwen35moe": _qwen35moe,
    "qwen4exp": _qwen4exp,
    **TINY_PLAIN_MOE,
}

# Their norms are drawn around 0: 1 + w is what multiplies.
_ZERO_CENTRED = frozenset({"qwen3_next", "qwen3_5_moe_text", "qwen4_exp_text"})


def _randomise(model: nn.Module, generator: torch.Generator) -> None:
    is_zero_centred = model.config.model_type in _ZERO_CENTRED
    for name, parameter in model.named_parameters():
        draw = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(_scaled(name, draw, is_zero_centred=is_zero_centred))
    finish_drawing(model, generator)


def _scaled(name: str, draw: torch.Tensor, *, is_zero_centred: bool) -> torch.Tensor:
    """Return values that keep activations near one and the router's choices apart."""
    if name.endswith("A_log"):
        return 0.7 * draw
    if name.endswith("dt_bias"):
        return draw - 1.0
    if "conv1d" in name or name.endswith((".bias", "proj_bias")):
        return 0.5 * draw
    if name.endswith(".sinks"):
        return draw
    if draw.dim() == 1:  # norms; linear_attn.norm is stored as it is, the others of qwen4exp around zero
        return 0.2 * draw + (0.0 if is_zero_centred and not name.endswith("linear_attn.norm.weight") else 1.0)
    if "embed" in name:
        return draw
    gain = 1.0
    if name.endswith(("mlp.gate.weight", "mlp.router.weight")):
        gain = 1.5
    elif name == "lm_head.weight" or "block_inject" in name or "mix_weight" in name:
        gain = 2.0
    return gain / math.sqrt(draw.shape[-1]) * draw


def _narrow_experts(model: nn.Module, widths: tuple[int, ...] | None) -> None:
    for layer, width in zip(model.model.layers, widths or (), strict=False):
        experts = layer.mlp.experts
        full = experts.gate_up_proj.shape[1] // 2
        rows = torch.cat([torch.arange(width), full + torch.arange(width)])
        experts.gate_up_proj = nn.Parameter(experts.gate_up_proj[:, rows].clone())
        experts.down_proj = nn.Parameter(experts.down_proj[:, :, :width].clone())
        experts.intermediate_dim = width
