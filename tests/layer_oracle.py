"""Tiny transformers models, their weights under GGUF names, and the plainest possible walk over our layers.

The walk here has no tiers, no files and no processes: what differs from transformers is our maths alone.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from strata_coord.ipc.assignment import (
    AttentionGeometry,
    DeltaNetGeometry,
    ExpertGeometry,
    HyperConnectionGeometry,
    ModelGeometry,
    NgramGeometry,
    SparseAttentionGeometry,
)
from strata_coord.kernels.expert_mlp import swiglu
from strata_coord.stage_worker.models.catalog import build_family
from strata_coord.stage_worker.models.family import Family, SegmentRows
from strata_coord.stage_worker.sequence_state import StatePool

EOS = 7


@dataclass
class MemoryTable:
    """An n-gram table in memory."""

    table: Tensor
    requests: list[int] = field(default_factory=list)

    def rows(self, ids: Tensor) -> Tensor:
        self.requests.append(ids.numel())
        return self.table[ids]


@dataclass
class TinyModel:
    hf: Any
    family: Family
    layers: list[dict[str, Tensor]]
    embedding: Tensor
    head: dict[str, Tensor]
    output: Tensor

    def reference(self, ids: Tensor) -> Tensor:
        with torch.no_grad():
            return self.hf(input_ids=ids[None], use_cache=False).logits[0]

    def pool(self, *, max_sequences: int = 4, kv_pool_tokens: int = 2048) -> StatePool:
        geometry = self.family.geometry
        return StatePool(
            geometry,
            0,
            geometry.num_layers,
            kv_dtype="fp32",
            kv_pool_tokens=kv_pool_tokens,
            max_sequences=max_sequences,
            device="cpu",
        )

    def logits(self, ids: Tensor, cuts: Sequence[int] = ()) -> Tensor:
        """Read ids in pieces that end at cuts and at the end."""
        pool = self.pool()
        pool.create(0)
        edges = [0, *cuts, len(ids)]
        return torch.cat([self.run(pool, [(0, ids[:stop], start)]) for start, stop in pairwise(edges)])

    def run(self, pool: StatePool, parts: Sequence[tuple[int, Tensor, int]]) -> Tensor:
        """One sub-chunk of (sequence, ids so far, first position) parts; returns logits of its rows."""
        segments, start = [], 0
        for sequence, ids, first in parts:
            stop = start + len(ids) - first
            segments.append(SegmentRows(start, stop, first, pool.get(sequence), ids))
            start = stop
        family = self.family
        new_ids = torch.cat([ids[first:] for _, ids, first in parts])
        rows = family.embed(self.embedding[new_ids]).clone()
        for layer, weights in zip(family.layers, self.layers, strict=True):
            half = layer.attention_half(rows, segments, weights)
            total = torch.zeros_like(half.x_TD)
            shared = layer.shared_expert(half.x_TD, weights)
            if shared is not None:
                total += shared
            for expert in range(family.geometry.experts.num_experts):
                row, place = torch.where(half.ids_TK == expert)
                if len(row):
                    y = swiglu(
                        half.x_TD[row],
                        *(weights[f"ffn_{k}_exps.weight"][expert] for k in ("gate", "up", "down")),
                    )
                    total.index_add_(0, row, y * half.weights_TK[row, place, None])
            layer.combine(rows, total, half)
        return family.head(rows, self.head) @ self.output.T


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def _randomise(model: torch.nn.Module, seed: int) -> None:
    """Every parameter random: defaults leave norms at 0 or 1 and hide bugs."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        with torch.no_grad():
            if "A_log" in name:
                parameter.copy_(noise.abs().mul_(0.5).sub_(1.0))
            elif parameter.ndim == 1 or "norm" in name:
                base = (
                    1.0
                    if name.endswith("linear_attn.norm.weight") or "qwen3_moe" in type(model).__module__
                    else 0.0
                )
                parameter.copy_(base + 0.2 * noise)
            elif "embed" in name:
                parameter.copy_(noise)
            elif "conv1d" in name:
                parameter.copy_(noise * 0.4)
            else:
                parameter.copy_(noise * 1.2 / parameter.shape[-1] ** 0.5)


def _moe(state: Mapping[str, Tensor], prefix: str, *, shared: bool) -> Iterator[tuple[str, Tensor]]:
    gate, up = state[f"{prefix}.experts.gate_up_proj"].chunk(2, dim=1)
    yield "ffn_gate_exps.weight", gate
    yield "ffn_up_exps.weight", up
    yield "ffn_down_exps.weight", state[f"{prefix}.experts.down_proj"]
    yield "ffn_gate_inp.weight", state[f"{prefix}.gate.weight"]
    if shared:
        for name in ("gate", "up", "down"):
            yield f"ffn_{name}_shexp.weight", state[f"{prefix}.shared_expert.{name}_proj.weight"]
        yield "ffn_gate_inp_shexp.weight", state[f"{prefix}.shared_expert_gate.weight"].flatten()


def _attention(state: Mapping[str, Tensor], prefix: str, plus: float) -> Iterator[tuple[str, Tensor]]:
    for ours, theirs in (("q", "q_proj"), ("k", "k_proj"), ("v", "v_proj"), ("output", "o_proj")):
        yield f"attn_{ours}.weight", state[f"{prefix}.{theirs}.weight"]
    for name in ("q", "k"):
        yield f"attn_{name}_norm.weight", state[f"{prefix}.{name}_norm.weight"] + plus


def tiny_qwen3moe(seed: int = 0, *, layers: int = 3) -> TinyModel:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=128,
        hidden_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        intermediate_size=32,
        decoder_sparse_step=1,
        norm_topk_prob=True,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
    )
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    hf = Qwen3MoeForCausalLM(config).eval()
    _randomise(hf, seed)
    state = {name: value.detach() for name, value in hf.state_dict().items()}
    geometry = ModelGeometry(
        architecture="qwen3moe",
        num_layers=layers,
        hidden_size=64,
        vocabulary_size=128,
        num_real_tokens=128,
        context_tokens=4096,
        rms_epsilon=config.rms_norm_eps,
        attention=AttentionGeometry(
            num_heads=4, num_kv_heads=2, head_dim=32, rope_dims=32, rope_base=10000.0, gated=False
        ),
        experts=ExpertGeometry(num_experts=8, experts_per_token=3, widths=(32,) * layers, shared_width=0),
        recurrent_layers=(False,) * layers,
    )
    weights = []
    for index in range(layers):
        prefix = f"model.layers.{index}"
        weights.append(
            {
                "attn_norm.weight": state[f"{prefix}.input_layernorm.weight"],
                "ffn_norm.weight": state[f"{prefix}.post_attention_layernorm.weight"],
                **dict(_attention(state, f"{prefix}.self_attn", 0.0)),
                **dict(_moe(state, f"{prefix}.mlp", shared=False)),
            }
        )
    return TinyModel(
        hf=hf,
        family=build_family(geometry, table=None),
        layers=weights,
        embedding=state["model.embed_tokens.weight"],
        head={"output_norm.weight": state["model.norm.weight"]},
        output=state["lm_head.weight"],
    )


HK, HV, DK = 2, 6, 16


def tiny_geometry_qwen4exp(*, layers: int = 4, budget: int = 16, indexer_heads: int = 6) -> ModelGeometry:
    """The sizes of tiny_qwen4exp; hash constants are stand-ins."""
    recurrent = tuple((index + 1) % 4 != 0 for index in range(layers))
    return ModelGeometry(
        architecture="qwen4exp",
        num_layers=layers,
        hidden_size=64,
        vocabulary_size=128,
        num_real_tokens=120,
        context_tokens=4096,
        rms_epsilon=1e-6,
        attention=AttentionGeometry(
            num_heads=4, num_kv_heads=2, head_dim=32, rope_dims=16, rope_base=10000.0, gated=True
        ),
        experts=ExpertGeometry(num_experts=8, experts_per_token=3, widths=(32,) * layers, shared_width=32),
        recurrent_layers=recurrent,
        delta_net=DeltaNetGeometry(
            num_key_heads=HK,
            num_value_heads=HV,
            head_dim=DK,
            conv_kernel=4,
            head_order="tiled",
            output_gate="sigmoid",
        ),
        hyper_connections=HyperConnectionGeometry(num_streams=4, low_rank=16),
        sparse_attention=SparseAttentionGeometry(
            num_heads=indexer_heads,
            head_dim=16,
            budget_tokens=budget,
            compress_ratios=tuple(0 if linear else 4 for linear in recurrent),
        ),
        ngram=NgramGeometry(
            layers=(1,),
            ngram_size=3,
            heads_per_ngram=2,
            conv_kernel=4,
            eos_token=EOS,
            row_width=16,
            multipliers=(3, 5, 7),
            head_offsets=(0, 11, 24, 41),
            head_vocab_sizes=(11, 13, 17, 19),
        ),
    )


def _tiled(x: Tensor, dim: int, width: int) -> Tensor:
    """Value heads from grouped to tiled order, width entries per head along dim."""
    repeats = HV // HK
    shape = x.shape
    parts = x.reshape(*shape[:dim], HK, repeats, width, *shape[dim + 1 :])
    return parts.transpose(dim, dim + 1).reshape(shape)


def _delta(state: Mapping[str, Tensor], prefix: str) -> Iterator[tuple[str, Tensor]]:
    keys = 2 * HK * DK

    def values_tiled(x: Tensor) -> Tensor:
        return torch.cat((x[:keys], _tiled(x[keys:], 0, DK)))

    yield "attn_qkv.weight", values_tiled(state[f"{prefix}.in_proj_qkv.weight"])
    yield "attn_gate.weight", _tiled(state[f"{prefix}.in_proj_z.weight"], 0, DK)
    yield "ssm_alpha.weight", _tiled(state[f"{prefix}.in_proj_a.weight"], 0, 1)
    yield "ssm_beta.weight", _tiled(state[f"{prefix}.in_proj_b.weight"], 0, 1)
    yield "ssm_conv1d.weight", values_tiled(state[f"{prefix}.conv1d.weight"].squeeze(1))
    yield "ssm_a", -_tiled(state[f"{prefix}.A_log"], 0, 1).exp()
    yield "ssm_dt.bias", _tiled(state[f"{prefix}.dt_bias"], 0, 1)
    yield "ssm_norm.weight", state[f"{prefix}.norm.weight"]
    yield "ssm_out.weight", _tiled(state[f"{prefix}.out_proj.weight"], 1, DK)


def _hyper(state: Mapping[str, Tensor], theirs: str, ours: str) -> Iterator[tuple[str, Tensor]]:
    yield f"{ours}_norm.weight", state[f"{theirs}.hc_norm.weight"] + 1
    yield f"{ours}_down.weight", state[f"{theirs}.input_mix_weight_down.weight"]
    yield f"{ours}_up.weight", state[f"{theirs}.input_mix_weight_up.weight"]
    if f"{theirs}.block_inject_weight.weight" in state:
        yield f"{ours}_inject.weight", state[f"{theirs}.block_inject_weight.weight"]


def _ple(state: Mapping[str, Tensor], prefix: str) -> Iterator[tuple[str, Tensor]]:
    yield "ple_key.weight", state[f"{prefix}.key_proj.weight"]
    yield "ple_value.weight", state[f"{prefix}.value_proj.weight"]
    for name in ("key", "query", "conv"):
        yield f"ple_norm_{name}.weight", state[f"{prefix}.norm_{name}.weight"] + 1
    yield "ple_conv1d.weight", state[f"{prefix}.conv1d.weight"].squeeze(1)


def tiny_qwen4exp(seed: int = 0, *, layers: int = 4, budget: int = 16, indexer_heads: int = 6) -> TinyModel:
    from transformers import Qwen4ExpForCausalLM, Qwen4ExpTextConfig

    hidden, streams, low_rank, index_dim, ratio = 64, 4, 16, 16, 4
    config = Qwen4ExpTextConfig(
        vocab_size=128,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=DK,
        linear_value_head_dim=DK,
        linear_num_key_heads=HK,
        linear_num_value_heads=HV,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        num_experts_per_tok=3,
        num_experts=8,
        max_position_embeddings=4096,
        hc_count=streams,
        hc_lowrank=low_rank,
        ple_layer_ids=[2],
        ple_embed_dim=hidden,
        heads_per_ngram=2,
        ngram_vocab_size_base=500,
        make_ngram_vocab_size_divisible_by=32,
        split_ngram_parts=1,
        indexer_n_heads=indexer_heads,
        indexer_kv_heads=1,
        indexer_head_dim=index_dim,
        indexer_budget=budget,
        indexer_compress_ratio=ratio,
        output_gate_type="sigmoid",
        eos_token_id=EOS,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [3, 3, 2],
            "mrope_interleaved": True,
        },
    )
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    hf = Qwen4ExpForCausalLM(config).eval()
    _randomise(hf, seed)
    state = {name: value.detach() for name, value in hf.state_dict().items()}
    ngram = hf.model.layers[1].ple.ple_embedding
    geometry = replace(
        tiny_geometry_qwen4exp(layers=layers, budget=budget, indexer_heads=indexer_heads),
        rms_epsilon=config.rms_norm_eps,
        recurrent_layers=tuple(kind == "linear_attention" for kind in config.layer_types),
    )
    recurrent = geometry.recurrent_layers
    hashes = geometry.ngram
    assert hashes is not None
    geometry = replace(
        geometry,
        ngram=replace(
            hashes,
            multipliers=tuple(ngram.layer_multipliers.tolist()),
            head_offsets=tuple(ngram.head_offsets),
            head_vocab_sizes=tuple(ngram.head_vocab_sizes),
        ),
    )
    weights = []
    for index in range(layers):
        prefix = f"model.layers.{index}"
        tensors = {
            **dict(_hyper(state, f"{prefix}.attn_hyper_connection", "hc_attn")),
            **dict(_hyper(state, f"{prefix}.mlp_hyper_connection", "hc_ffn")),
            **dict(_moe(state, f"{prefix}.mlp", shared=True)),
        }
        if index == 1:
            tensors |= dict(_ple(state, f"{prefix}.ple"))
        if recurrent[index]:
            tensors |= dict(_delta(state, f"{prefix}.linear_attn"))
        else:
            tensors |= dict(_attention(state, f"{prefix}.self_attn", 1.0))
            joined = state[f"{prefix}.self_attn.indexer.index_qk_proj.weight"]
            queries = indexer_heads * index_dim
            tensors |= {
                "indexer.q_proj.weight": joined[:queries],
                "indexer.k_proj.weight": joined[queries:],
                "indexer.q_norm.weight": state[f"{prefix}.self_attn.indexer.q_layernorm.weight"] + 1,
                "indexer.k_norm.weight": state[f"{prefix}.self_attn.indexer.k_layernorm.weight"] + 1,
            }
        weights.append(tensors)
    table = MemoryTable(ngram.ngram_embedding.weight.detach())
    return TinyModel(
        hf=hf,
        family=build_family(geometry, table=table),
        layers=weights,
        embedding=state["model.embed_tokens.weight"],
        head=dict(_hyper(state, "model.hyper_connection_mixer", "output_hc")),
        output=state["lm_head.weight"],
    )
