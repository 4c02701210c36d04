"""Write a tiny Hugging Face model as GGUF, with the names and layouts of models.md section 1.

With a quantised recipe the Hugging Face weights are *set* to the dequantised values, so that the model stays
the exact oracle of its file. A tensor of a type that gguf cannot quantise (Q4_K) is made of random blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import torch
from oracle.metadata import add_metadata
from torch import nn

from strata_coord.coordinator.synthetic_blocks import RandomSource, random_rows

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Type = gguf.GGMLQuantizationType

# Kinds without an entry are F32. Router, norms, convolutions and biases are F32 in all real files.
RECIPES: dict[str, dict[str, Type]] = {
    "f32": {},
    "quantised": {
        "embedding": Type.Q8_0,
        "output": Type.Q8_0,
        "attention": Type.Q8_0,
        "attention_kv": Type.F16,
        "attention_output": Type.BF16,
        "mixer": Type.Q8_0,
        "mixer_output": Type.F16,
        "hyper": Type.Q8_0,
        "indexer": Type.BF16,
        "shared": Type.Q8_0,
        "table": Type.Q8_0,
        "experts_gate_up": Type.Q4_K,
        "experts_down": Type.Q8_0,
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """Forms that a real file may take."""

    recipe: str = "f32"
    shards: int = 1  # more: names end in -00001-of-0000N.gguf, tensors are cut evenly, so layers straddle
    empty_first_shard: bool = False  # the metadata shard holds no tensor
    fused_gate_up: bool = False
    expert_width_array: bool = False  # expert_feed_forward_length as an array
    recurrent_layers: bool = False  # attention.recurrent_layers present
    nextn_layers: int = 0  # block_count counts blocks past the trunk, with a stand-in tensor each
    seed: int = 0  # of random blocks


@dataclass(frozen=True, slots=True)
class _Link:
    """One GGUF tensor and the part of a Hugging Face parameter that it holds.

    value is a view of the parameter; rows and columns permute it into GGUF order. Derived values (1 + w,
    -exp(w)) are F32 in every recipe.
    """

    name: str
    kind: str
    value: torch.Tensor
    rows: torch.Tensor | None = None
    columns: torch.Tensor | None = None
    derive: str = ""

    def read(self) -> torch.Tensor:
        value = self.value if self.rows is None else self.value[self.rows]
        value = value if self.columns is None else value[:, self.columns]
        if self.derive == "one_plus":
            value = 1.0 + value
        elif self.derive == "negative_exp":
            value = -torch.exp(value)
        return value.contiguous()

    def write(self, value: torch.Tensor) -> None:
        if self.derive == "one_plus":
            value = value - 1.0
        elif self.derive == "negative_exp":
            value = torch.log(-value)
        target = torch.empty_like(value)
        rows = torch.arange(value.shape[0]) if self.rows is None else self.rows
        if self.columns is None:
            target[rows] = value
        else:
            target[rows[:, None], self.columns[None, :]] = value
        self.value.copy_(target)


def export_gguf(model: nn.Module, path: Path, options: ExportOptions | None = None) -> list[Path]:
    """Write model to path and return the files written, in shard order.

    With a quantised recipe this changes the weights of model to those of the file.
    """
    options = options or ExportOptions()
    architecture = {"qwen3_moe": "qwen3moe", "qwen4_exp_text": "qwen4exp"}[model.config.model_type]
    links = list(_links(model, architecture, options))
    num_tensors = len(links) + options.nextn_layers
    per_shard = -(-num_tensors // (options.shards - options.empty_first_shard)) if options.shards > 1 else 0
    writer = gguf.GGUFWriter(
        path, architecture, split_max_tensors=per_shard, small_first_shard=options.empty_first_shard
    )
    add_metadata(writer, model, architecture, options)
    source = RandomSource(options.seed)
    types = RECIPES[options.recipe]
    for link in links:
        _add_tensor(writer, link, types.get(link.kind, Type.F32), source)
    trunk = model.config.num_hidden_layers
    for block in range(trunk, trunk + options.nextn_layers):
        writer.add_tensor(f"blk.{block}.nextn.enorm.weight", np.ones(model.config.hidden_size, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    files = writer.format_shard_names(path)
    writer.close()
    return files


def load_gguf(model: nn.Module, path: Path) -> None:
    """Set the weights of model to those of a file of one shard that somebody else wrote.

    Raises:
        ValueError: the file lacks a tensor of the model, or has another shape or a tensor too many.
    """
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    architecture = {"qwen3_moe": "qwen3moe", "qwen4_exp_text": "qwen4exp"}[model.config.model_type]
    for link in _links(model, architecture, ExportOptions()):
        if link.name not in tensors:
            message = f"{path} has no {link.name}"
            raise ValueError(message)
        tensor = tensors.pop(link.name)
        if list(link.value.shape) != [int(size) for size in reversed(tensor.shape)]:
            message = f"{link.name}: ne {tensor.shape.tolist()}, the model has {list(link.value.shape)}"
            raise ValueError(message)
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(link.value.shape)
        link.write(torch.from_numpy(values.copy()))
    if tensors:
        message = f"{path} has tensors that the model lacks: {sorted(tensors)}"
        raise ValueError(message)


def tensor_links(model: nn.Module, options: ExportOptions | None = None) -> dict[str, torch.Tensor]:
    """Return every GGUF tensor's expected value, by name, in torch shape: what a reader must find."""
    architecture = {"qwen3_moe": "qwen3moe", "qwen4_exp_text": "qwen4exp"}[model.config.model_type]
    return {link.name: link.read() for link in _links(model, architecture, options or ExportOptions())}


def _add_tensor(writer: gguf.GGUFWriter, link: _Link, kind: Type, source: RandomSource) -> None:
    value = link.read()
    if kind == Type.F32:
        writer.add_tensor(link.name, value.numpy())
        return
    if kind == Type.Q4_K:
        num_rows = value.numel() // value.shape[-1]
        std = float(value.std())
        raw = random_rows(source, int(kind), num_rows, value.shape[-1], std=std).reshape(
            *value.shape[:-1], -1
        )
    else:
        raw = gguf.quants.quantize(value.numpy(), kind)
    writer.add_tensor(link.name, raw, raw_dtype=kind)
    link.write(torch.from_numpy(gguf.quants.dequantize(raw, kind).reshape(value.shape).copy()))


def _links(model: Any, architecture: str, options: ExportOptions) -> Iterator[_Link]:
    yield _Link("token_embd.weight", "embedding", model.model.embed_tokens.weight.data)
    if not model.config.tie_word_embeddings:
        yield _Link("output.weight", "output", model.lm_head.weight.data)
    if architecture == "qwen3moe":
        yield _Link("output_norm.weight", "norm", model.model.norm.weight.data)
    else:
        yield from _hyper_links("output_hc", model.model.hyper_connection_mixer)
    for index, layer in enumerate(model.model.layers):
        prefix = f"blk.{index}."
        if architecture == "qwen3moe":
            yield _Link(prefix + "attn_norm.weight", "norm", layer.input_layernorm.weight.data)
            yield _Link(prefix + "ffn_norm.weight", "norm", layer.post_attention_layernorm.weight.data)
            yield from _attention_links(prefix, layer.self_attn, derive="")
        else:
            yield from _qwen4exp_links(prefix, layer, model.config)
        yield from _expert_links(prefix, layer.mlp, options)


def _expert_links(prefix: str, mlp: Any, options: ExportOptions) -> Iterator[_Link]:
    gate_up = mlp.experts.gate_up_proj.data
    width = gate_up.shape[1] // 2
    yield _Link(prefix + "ffn_gate_inp.weight", "router", mlp.gate.weight.data)
    if options.fused_gate_up:
        yield _Link(prefix + "ffn_gate_up_exps.weight", "experts_gate_up", gate_up)
    else:
        yield _Link(prefix + "ffn_gate_exps.weight", "experts_gate_up", gate_up[:, :width])
        yield _Link(prefix + "ffn_up_exps.weight", "experts_gate_up", gate_up[:, width:])
    yield _Link(prefix + "ffn_down_exps.weight", "experts_down", mlp.experts.down_proj.data)


def _attention_links(prefix: str, attention: Any, *, derive: str) -> Iterator[_Link]:
    yield _Link(prefix + "attn_q.weight", "attention", attention.q_proj.weight.data)
    yield _Link(prefix + "attn_k.weight", "attention_kv", attention.k_proj.weight.data)
    yield _Link(prefix + "attn_v.weight", "attention_kv", attention.v_proj.weight.data)
    yield _Link(prefix + "attn_output.weight", "attention_output", attention.o_proj.weight.data)
    yield _Link(prefix + "attn_q_norm.weight", "norm", attention.q_norm.weight.data, derive=derive)
    yield _Link(prefix + "attn_k_norm.weight", "norm", attention.k_norm.weight.data, derive=derive)


def _hyper_links(prefix: str, mixer: Any) -> Iterator[_Link]:
    yield _Link(f"{prefix}_norm.weight", "norm", mixer.hc_norm.weight.data, derive="one_plus")
    yield _Link(f"{prefix}_down.weight", "hyper", mixer.input_mix_weight_down.weight.data)
    yield _Link(f"{prefix}_up.weight", "hyper", mixer.input_mix_weight_up.weight.data)
    if mixer.block_inject_weight is not None:
        yield _Link(f"{prefix}_inject.weight", "inject", mixer.block_inject_weight.weight.data)


def _qwen4exp_links(prefix: str, layer: Any, config: Any) -> Iterator[_Link]:
    if layer.ple is not None:
        yield from _ple_links(prefix, layer.ple)
    yield from _hyper_links(prefix + "hc_attn", layer.attn_hyper_connection)
    yield from _hyper_links(prefix + "hc_ffn", layer.mlp_hyper_connection)
    if layer.layer_type == "linear_attention":
        yield from _delta_net_links(prefix, layer.linear_attn, config)
    else:
        yield from _attention_links(prefix, layer.self_attn, derive="one_plus")
        yield from _indexer_links(prefix, layer.self_attn.indexer)
    shared = layer.mlp.shared_expert
    yield _Link(prefix + "ffn_gate_inp_shexp.weight", "router", layer.mlp.shared_expert_gate.weight.data[0])
    yield _Link(prefix + "ffn_gate_shexp.weight", "shared", shared.gate_proj.weight.data)
    yield _Link(prefix + "ffn_up_shexp.weight", "shared", shared.up_proj.weight.data)
    yield _Link(prefix + "ffn_down_shexp.weight", "shared", shared.down_proj.weight.data)


def _indexer_links(prefix: str, indexer: Any) -> Iterator[_Link]:
    if not hasattr(indexer, "index_qk_proj"):
        return
    num_query_rows = indexer.index_n_heads * indexer.index_head_dim
    weight = indexer.index_qk_proj.weight.data
    yield _Link(prefix + "indexer.q_proj.weight", "indexer", weight[:num_query_rows])
    yield _Link(prefix + "indexer.k_proj.weight", "indexer", weight[num_query_rows:])
    for letter, norm in (("q", indexer.q_layernorm), ("k", indexer.k_layernorm)):
        yield _Link(f"{prefix}indexer.{letter}_norm.weight", "norm", norm.weight.data, derive="one_plus")


def _ple_links(prefix: str, ple: Any) -> Iterator[_Link]:
    yield _Link("per_layer_token_embd.weight", "table", ple.ple_embedding.ngram_embedding.weight.data)
    yield _Link(prefix + "ple_key.weight", "mixer", ple.key_proj.weight.data)
    yield _Link(prefix + "ple_value.weight", "mixer", ple.value_proj.weight.data)
    for name, norm in (("key", ple.norm_key), ("query", ple.norm_query), ("conv", ple.norm_conv)):
        yield _Link(f"{prefix}ple_norm_{name}.weight", "norm", norm.weight.data, derive="one_plus")
    yield _Link(prefix + "ple_conv1d.weight", "conv", ple.conv1d.weight.data[:, 0])


def _delta_net_links(prefix: str, mixer: Any, config: Any) -> Iterator[_Link]:
    heads = tiled_heads(config.linear_num_key_heads, config.linear_num_value_heads)
    dims = (heads[:, None] * mixer.head_v_dim + torch.arange(mixer.head_v_dim)).reshape(-1)
    key_rows = 2 * mixer.key_dim
    channels = torch.cat([torch.arange(key_rows), key_rows + dims])
    yield _Link(prefix + "attn_qkv.weight", "mixer", mixer.in_proj_qkv.weight.data, rows=channels)
    yield _Link(prefix + "attn_gate.weight", "mixer", mixer.in_proj_z.weight.data, rows=dims)
    yield _Link(prefix + "ssm_beta.weight", "small", mixer.in_proj_b.weight.data, rows=heads)
    yield _Link(prefix + "ssm_alpha.weight", "small", mixer.in_proj_a.weight.data, rows=heads)
    yield _Link(prefix + "ssm_conv1d.weight", "conv", mixer.conv1d.weight.data[:, 0], rows=channels)
    yield _Link(prefix + "ssm_a", "small", mixer.A_log.data, rows=heads, derive="negative_exp")
    yield _Link(prefix + "ssm_dt.bias", "small", mixer.dt_bias.data, rows=heads)
    yield _Link(prefix + "ssm_norm.weight", "norm", mixer.norm.weight.data)
    yield _Link(prefix + "ssm_out.weight", "mixer_output", mixer.out_proj.weight.data, columns=dims)


def tiled_heads(num_key_heads: int, num_value_heads: int) -> torch.Tensor:
    """Return, for each value head in GGUF order, its index in the grouped order of Hugging Face.

    Grouped: value head h reads key head h // r. Tiled: h % num_key_heads.
    """
    per_key = num_value_heads // num_key_heads
    return torch.arange(num_value_heads).reshape(num_key_heads, per_key).T.reshape(-1)
