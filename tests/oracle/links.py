"""Which part of a Hugging Face model each GGUF tensor holds: models.md section 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from oracle.export import ExportOptions

# Their norms are stored around 0 in Hugging Face, and as 1 + w in GGUF.
ZERO_CENTRED = frozenset({"qwen3next", "qwen35moe", "qwen4exp"})


@dataclass(frozen=True, slots=True)
class Link:
    """One GGUF tensor and the part of a Hugging Face parameter that it holds.

    value is a view of the parameter; rows and columns pick from it in GGUF order. Derived values (1 + w,
    -exp(w)) are F32 in every recipe.
    """

    name: str
    kind: str
    value: torch.Tensor
    rows: torch.Tensor | None = None
    columns: torch.Tensor | None = None
    derive: str = ""

    def read(self) -> torch.Tensor:
        """Return the tensor's value."""
        value = self.value if self.rows is None else self.value[self.rows]
        value = value if self.columns is None else value[:, self.columns]
        if self.derive == "one_plus":
            value = 1.0 + value
        elif self.derive == "negative_exp":
            value = -torch.exp(value)
        return value.contiguous()

    def write(self, value: torch.Tensor) -> None:
        """Set the parameter to a value of the tensor."""
        if self.derive == "one_plus":
            value = value - 1.0
        elif self.derive == "negative_exp":
            value = torch.log(-value)
        rows = torch.arange(value.shape[0]) if self.rows is None else self.rows
        if self.columns is None:
            self.value[rows] = value
        else:
            self.value[rows[:, None], self.columns[None, :]] = value


@dataclass(frozen=True, slots=True)
class JointLink:
    """One GGUF tensor that holds the rows of several, one after the other."""

    name: str
    kind: str
    parts: tuple[Link, ...]

    def read(self) -> torch.Tensor:
        """Return the tensor's value."""
        return torch.cat([part.read() for part in self.parts])

    def write(self, value: torch.Tensor) -> None:
        """Set the parameters to a value of the tensor."""
        sizes = [len(part.read()) for part in self.parts]
        for part, rows in zip(self.parts, value.split(sizes), strict=True):
            part.write(rows)


AnyLink = Link | JointLink


def model_links(model: Any, architecture: str, options: ExportOptions) -> Iterator[AnyLink]:
    """Yield a link for every tensor of the file."""
    from oracle.plain_moe import TINY_PLAIN_MOE, plain_moe_links

    if architecture in TINY_PLAIN_MOE:
        yield from plain_moe_links(model, architecture, options)
        return
    yield Link("token_embd.weight", "embedding", model.model.embed_tokens.weight.data)
    if not model.config.tie_word_embeddings:
        yield Link("output.weight", "output", model.lm_head.weight.data)
    derive = "one_plus" if architecture in ZERO_CENTRED else ""
    if architecture == "qwen4exp":
        yield from _hyper_links("output_hc", model.model.hyper_connection_mixer)
    else:
        yield Link("output_norm.weight", "norm", model.model.norm.weight.data, derive=derive)
    for index, layer in enumerate(model.model.layers):
        prefix = f"blk.{index}."
        if architecture == "qwen4exp":
            yield from _qwen4exp_links(prefix, layer, model.config, options)
        else:
            after = "post_attention_norm" if architecture in ZERO_CENTRED else "ffn_norm"
            first, second = layer.input_layernorm.weight.data, layer.post_attention_layernorm.weight.data
            yield Link(prefix + "attn_norm.weight", "norm", first, derive=derive)
            yield Link(f"{prefix}{after}.weight", "norm", second, derive=derive)
            if not hasattr(layer, "linear_attn"):
                yield from _attention_links(prefix, layer.self_attn, options, derive=derive)
            elif architecture == "qwen3next":
                yield from _grouped_delta_net_links(prefix, layer.linear_attn, options)
            else:
                yield from _delta_net_links(prefix, layer.linear_attn, model.config)
        yield from _expert_links(prefix, layer.mlp, options)


def _expert_links(prefix: str, mlp: Any, options: ExportOptions) -> Iterator[AnyLink]:
    gate_up = mlp.experts.gate_up_proj.data
    width = gate_up.shape[1] // 2
    yield Link(prefix + "ffn_gate_inp.weight", "router", mlp.gate.weight.data)
    if options.fused_gate_up:
        yield Link(prefix + "ffn_gate_up_exps.weight", "experts_gate_up", gate_up)
    else:
        yield Link(prefix + "ffn_gate_exps.weight", "experts_gate_up", gate_up[:, :width])
        yield Link(prefix + "ffn_up_exps.weight", "experts_gate_up", gate_up[:, width:])
    yield Link(prefix + "ffn_down_exps.weight", "experts_down", mlp.experts.down_proj.data)
    shared = getattr(mlp, "shared_expert", None)
    if shared is None:
        return
    gate = mlp.shared_expert_gate.weight.data
    yield Link(prefix + "ffn_gate_inp_shexp.weight", "router", gate if options.shared_gate_row else gate[0])
    yield Link(prefix + "ffn_gate_shexp.weight", "shared", shared.gate_proj.weight.data)
    yield Link(prefix + "ffn_up_shexp.weight", "shared", shared.up_proj.weight.data)
    yield Link(prefix + "ffn_down_shexp.weight", "shared", shared.down_proj.weight.data)


def _attention_links(
    prefix: str, attention: Any, options: ExportOptions, *, derive: str
) -> Iterator[AnyLink]:
    projections = {"q": attention.q_proj, "k": attention.k_proj, "v": attention.v_proj}
    kinds = {"q": "attention", "k": "attention_kv", "v": "attention_kv"}
    weights = [
        Link(f"{prefix}attn_{part}.weight", kinds[part], projection.weight.data)
        for part, projection in projections.items()
    ]
    biases = [
        Link(f"{prefix}attn_{part}.bias", "small", projection.bias.data)
        for part, projection in projections.items()
        if projection.bias is not None
    ]
    if options.fused_qkv:
        yield JointLink(prefix + "attn_qkv.weight", "attention", tuple(weights))
        if biases:
            yield JointLink(prefix + "attn_qkv.bias", "small", tuple(biases))
    else:
        yield from weights
        yield from biases
    yield Link(prefix + "attn_output.weight", "attention_output", attention.o_proj.weight.data)
    if hasattr(attention, "q_norm"):
        yield Link(prefix + "attn_q_norm.weight", "norm", attention.q_norm.weight.data, derive=derive)
        yield Link(prefix + "attn_k_norm.weight", "norm", attention.k_norm.weight.data, derive=derive)


def _hyper_links(prefix: str, mixer: Any) -> Iterator[AnyLink]:
    yield Link(f"{prefix}_norm.weight", "norm", mixer.hc_norm.weight.data, derive="one_plus")
    yield Link(f"{prefix}_down.weight", "hyper", mixer.input_mix_weight_down.weight.data)
    yield Link(f"{prefix}_up.weight", "hyper", mixer.input_mix_weight_up.weight.data)
    if mixer.block_inject_weight is not None:
        yield Link(f"{prefix}_inject.weight", "inject", mixer.block_inject_weight.weight.data)


def _qwen4exp_links(prefix: str, layer: Any, config: Any, options: ExportOptions) -> Iterator[AnyLink]:
    if layer.ple is not None:
        yield from _ple_links(prefix, layer.ple)
    yield from _hyper_links(prefix + "hc_attn", layer.attn_hyper_connection)
    yield from _hyper_links(prefix + "hc_ffn", layer.mlp_hyper_connection)
    if layer.layer_type == "linear_attention":
        yield from _delta_net_links(prefix, layer.linear_attn, config)
    else:
        yield from _attention_links(prefix, layer.self_attn, options, derive="one_plus")
        yield from _indexer_links(prefix, layer.self_attn.indexer)


def _indexer_links(prefix: str, indexer: Any) -> Iterator[AnyLink]:
    if not hasattr(indexer, "index_qk_proj"):
        return
    num_query_rows = indexer.index_n_heads * indexer.index_head_dim
    weight = indexer.index_qk_proj.weight.data
    yield Link(prefix + "indexer.q_proj.weight", "indexer", weight[:num_query_rows])
    yield Link(prefix + "indexer.k_proj.weight", "indexer", weight[num_query_rows:])
    for letter, norm in (("q", indexer.q_layernorm), ("k", indexer.k_layernorm)):
        yield Link(f"{prefix}indexer.{letter}_norm.weight", "norm", norm.weight.data, derive="one_plus")


def _ple_links(prefix: str, ple: Any) -> Iterator[AnyLink]:
    yield Link("per_layer_token_embd.weight", "table", ple.ple_embedding.ngram_embedding.weight.data)
    yield Link(prefix + "ple_key.weight", "mixer", ple.key_proj.weight.data)
    yield Link(prefix + "ple_value.weight", "mixer", ple.value_proj.weight.data)
    for name, norm in (("key", ple.norm_key), ("query", ple.norm_query), ("conv", ple.norm_conv)):
        yield Link(f"{prefix}ple_norm_{name}.weight", "norm", norm.weight.data, derive="one_plus")
    yield Link(prefix + "ple_conv1d.weight", "conv", ple.conv1d.weight.data[:, 0])


def _delta_net_links(prefix: str, mixer: Any, config: Any) -> Iterator[AnyLink]:
    heads = tiled_heads(config.linear_num_key_heads, config.linear_num_value_heads)
    dims = (heads[:, None] * mixer.head_v_dim + torch.arange(mixer.head_v_dim)).reshape(-1)
    key_rows = 2 * mixer.key_dim
    channels = torch.cat([torch.arange(key_rows), key_rows + dims])
    yield Link(prefix + "attn_qkv.weight", "mixer", mixer.in_proj_qkv.weight.data, rows=channels)
    yield Link(prefix + "attn_gate.weight", "mixer", mixer.in_proj_z.weight.data, rows=dims)
    yield Link(prefix + "ssm_beta.weight", "small", mixer.in_proj_b.weight.data, rows=heads)
    yield Link(prefix + "ssm_alpha.weight", "small", mixer.in_proj_a.weight.data, rows=heads)
    yield Link(prefix + "ssm_conv1d.weight", "conv", mixer.conv1d.weight.data[:, 0], rows=channels)
    yield Link(prefix + "ssm_a", "small", mixer.A_log.data, rows=heads, derive="negative_exp")
    yield Link(prefix + "ssm_dt.bias", "small", mixer.dt_bias.data, rows=heads)
    yield Link(prefix + "ssm_norm.weight", "norm", mixer.norm.weight.data)
    yield Link(prefix + "ssm_out.weight", "mixer_output", mixer.out_proj.weight.data, columns=dims)


def _grouped_delta_net_links(prefix: str, mixer: Any, options: ExportOptions) -> Iterator[AnyLink]:
    """Hugging Face keeps one matrix per key head's queries, keys, values and gates; older files do so too."""
    joint = mixer.in_proj_qkvz.weight.data
    if options.legacy_ssm_in:
        yield Link(prefix + "ssm_in.weight", "mixer", joint)
    else:
        key, values = mixer.head_k_dim, mixer.value_dim // mixer.num_k_heads
        rows = torch.arange(len(joint)).view(mixer.num_k_heads, 2 * key + 2 * values)
        queries, keys, rest, gates = (
            part.reshape(-1) for part in rows.split([key, key, values, values], dim=1)
        )
        channels = torch.cat([queries, keys, rest])
        yield Link(prefix + "attn_qkv.weight", "mixer", joint, rows=channels)
        yield Link(prefix + "attn_gate.weight", "mixer", joint, rows=gates)
    yield Link(prefix + "ssm_ba.weight", "small", mixer.in_proj_ba.weight.data)
    yield Link(prefix + "ssm_conv1d.weight", "conv", mixer.conv1d.weight.data[:, 0])
    yield Link(prefix + "ssm_a", "small", mixer.A_log.data, derive="negative_exp")
    yield Link(prefix + "ssm_dt.bias", "small", mixer.dt_bias.data)
    yield Link(prefix + "ssm_norm.weight", "norm", mixer.norm.weight.data)
    yield Link(prefix + "ssm_out.weight", "mixer_output", mixer.out_proj.weight.data)


def tiled_heads(num_key_heads: int, num_value_heads: int) -> torch.Tensor:
    """Return, for each value head in GGUF order, its index in the grouped order of Hugging Face.

    Grouped: value head h reads key head h // r. Tiled: h % num_key_heads.
    """
    per_key = num_value_heads // num_key_heads
    return torch.arange(num_value_heads).reshape(num_key_heads, per_key).T.reshape(-1)
