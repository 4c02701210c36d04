"""Write a tiny Hugging Face model as GGUF, with the names and layouts of models.md section 1.

With a quantised recipe the Hugging Face weights are *set* to the dequantised values, so that the model stays
the exact oracle of its file. A tensor of a type that gguf cannot quantise (Q4_K) is made of random blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import gguf
import numpy as np
import torch
from oracle.links import AnyLink, model_links
from oracle.metadata import add_metadata
from oracle.plain_moe import PLAIN_MOE
from torch import nn

from strata_coord.coordinator.synthetic_blocks import RandomSource, random_rows

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

Type = gguf.GGMLQuantizationType

# Hugging Face's model_type -> the name in GGUF.
ARCHITECTURES = {
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "qwen3_next": "qwen3next",
    "qwen3_vl_moe_text": "qwen3vlmoe",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen4_exp_text": "qwen4exp",
    **PLAIN_MOE,
}

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
        "mxfp4": Type.MXFP4,
    },
}


# Of the other types gguf has no quantiser: random blocks are drawn, and the model gets their values.
QUANTISED_BY_GGUF = {
    Type.F16,
    Type.BF16,
    Type.Q4_0,
    Type.Q4_1,
    Type.Q5_0,
    Type.Q5_1,
    Type.Q8_0,
    Type.TQ1_0,
    Type.TQ2_0,
    Type.MXFP4,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """Forms that a real file may take."""

    recipe: str = "f32"
    # Of kinds, over those of the recipe, wherever a tensor's rows are whole blocks of the type.
    types: Mapping[str, Type] = field(default_factory=dict)
    shards: int = 1  # more: names end in -00001-of-0000N.gguf, tensors are cut evenly, so layers straddle
    empty_first_shard: bool = False  # the metadata shard holds no tensor
    fused_gate_up: bool = False
    single_experts: bool = False  # plain MoE: a tensor for each expert, as in the first files of Mixtral
    fused_qkv: bool = False  # attn_qkv on attention layers
    legacy_ssm_in: bool = False  # qwen3next: one matrix in the order of Hugging Face
    shared_gate_row: bool = False  # ffn_gate_inp_shexp as [1, H]
    expert_width_array: bool = False  # expert_feed_forward_length as an array
    recurrent_layers: bool = False  # attention.recurrent_layers present
    nextn_layers: int = 0  # block_count counts blocks past the trunk, with a stand-in tensor each
    seed: int = 0  # of random blocks


def export_gguf(model: nn.Module, path: Path, options: ExportOptions | None = None) -> list[Path]:
    """Write model to path and return the files written, in shard order.

    With a quantised recipe this changes the weights of model to those of the file.
    """
    options = options or ExportOptions()
    architecture = ARCHITECTURES[model.config.model_type]
    links = list(model_links(model, architecture, options))
    num_tensors = len(links) + options.nextn_layers
    per_shard = -(-num_tensors // (options.shards - options.empty_first_shard)) if options.shards > 1 else 0
    writer = gguf.GGUFWriter(
        path, architecture, split_max_tensors=per_shard, small_first_shard=options.empty_first_shard
    )
    add_metadata(writer, model, architecture, options)
    source = RandomSource(options.seed)
    types = RECIPES[options.recipe]
    for link in links:
        kind = types.get(link.kind, Type.F32)
        wanted = options.types.get(link.kind, kind)
        fits = link.read().shape[-1] % gguf.GGML_QUANT_SIZES[wanted][0] == 0
        _add_tensor(writer, link, wanted if fits else kind, source)
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
    architecture = ARCHITECTURES[model.config.model_type]
    for link in model_links(model, architecture, ExportOptions()):
        if link.name not in tensors:
            message = f"{path} has no {link.name}"
            raise ValueError(message)
        tensor = tensors.pop(link.name)
        shape = list(link.read().shape)
        if shape != [int(size) for size in reversed(tensor.shape)]:
            message = f"{link.name}: ne {tensor.shape.tolist()}, the model has {shape}"
            raise ValueError(message)
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(shape)
        link.write(torch.from_numpy(values.copy()))
    if tensors:
        message = f"{path} has tensors that the model lacks: {sorted(tensors)}"
        raise ValueError(message)


def tensor_links(model: nn.Module, options: ExportOptions | None = None) -> dict[str, torch.Tensor]:
    """Return every GGUF tensor's expected value, by name, in torch shape: what a reader must find."""
    architecture = ARCHITECTURES[model.config.model_type]
    return {link.name: link.read() for link in model_links(model, architecture, options or ExportOptions())}


def _add_tensor(writer: gguf.GGUFWriter, link: AnyLink, kind: Type, source: RandomSource) -> None:
    value = link.read()
    if kind == Type.F32:
        writer.add_tensor(link.name, value.numpy())
        return
    if kind not in QUANTISED_BY_GGUF:
        num_rows = value.numel() // value.shape[-1]
        std = float(value.std())
        raw = random_rows(source, int(kind), num_rows, value.shape[-1], std=std).reshape(
            *value.shape[:-1], -1
        )
    else:
        raw = gguf.quants.quantize(value.numpy(), kind)
    writer.add_tensor(link.name, raw, raw_dtype=kind)
    link.write(torch.from_numpy(gguf.quants.dequantize(raw, kind).reshape(value.shape).copy()))
