"""From metadata keys to ExpertGeometry: widths, the shared expert, layers without experts, router rules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from strata_coord.coordinator.architecture_keys import MAX_EXPERTS, MAX_WIDTH, ArchitectureKeys
from strata_coord.ipc.assignment import ExpertGeometry

if TYPE_CHECKING:
    from collections.abc import Mapping

    from strata_coord.coordinator.model_geometry import Family
    from strata_coord.ipc.assignment import TensorExtent

__all__ = ["read_experts"]

_SOFTMAX, _SIGMOID = 1, 2  # expert_gating_func
_MAX_RULE = 1_000
_MAX_SCALE = 1e6


def read_experts(
    keys: ArchitectureKeys, family: Family, blocks: int, layers: int, tensors: Mapping[str, TensorExtent]
) -> ExpertGeometry:
    """Return what the keys, and the tensors where a key is missing, say of a model's experts.

    Raises:
        ModelError: A key is missing, out of range or contradicts another.
    """
    count = keys.integer("expert_count", high=MAX_EXPERTS)
    used = keys.integer("expert_used_count", high=count)
    widths = _widths(keys, blocks, layers, tensors)
    if family.experts_by_keys:
        return _by_keys(keys, family, count, used, widths, tensors)
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
        router_bias=family.biased_experts,
        biases=family.biased_experts,
        activation="clamped-swiglu" if family.biased_experts else "swiglu",
    )


def _by_keys(
    keys: ArchitectureKeys,
    family: Family,
    count: int,
    used: int,
    widths: tuple[int, ...],
    tensors: Mapping[str, TensorExtent],
) -> ExpertGeometry:
    """DeepSeek's way, of which GLM-4.5 is a case: first layers without experts, router rules as keys.

    A shared expert has no gate, and several of them are stored as one that is as wide as all.
    """
    layers = len(widths)
    dense_layers = keys.integer("leading_dense_block_count", low=0, high=layers - 1, default=0)
    num_shared = keys.integer("expert_shared_count", low=0, high=MAX_EXPERTS, default=0)
    groups = keys.integer("expert_group_count", low=0, high=count, default=1) or 1
    groups_used = keys.integer("expert_group_used_count", low=0, high=groups, default=groups) or groups
    if count % groups:
        keys.refuse("expert_group_count", f"{groups} does not divide expert_count {count}")
    if count // groups * groups_used < used:
        keys.refuse(
            "expert_group_used_count",
            f"{groups_used} groups hold fewer than expert_used_count {used} experts",
        )
    return ExpertGeometry(
        num_experts=count,
        experts_per_token=used,
        widths=(0,) * dense_layers + widths[dense_layers:],
        shared_width=num_shared * widths[-1],
        renormalised=keys.flag("expert_weights_norm"),
        dense_width=keys.integer("feed_forward_length", high=MAX_WIDTH) if dense_layers else 0,
        shared_gate=False,
        scores=_scores(keys, family),
        selection_bias=f"blk.{layers - 1}.exp_probs_b.bias" in tensors,
        # 0 is a converter's way to write "not set".
        weight_scale=keys.number("expert_weights_scale", low=0.0, high=_MAX_SCALE, default=1.0) or 1.0,
        groups=groups,
        groups_used=groups_used,
    )


def _scores(keys: ArchitectureKeys, family: Family) -> Literal["softmax", "sigmoid"]:
    found = keys.integer("expert_gating_func", low=0, high=_MAX_RULE, default=0)
    if found == _SOFTMAX:
        return "softmax"
    if found == _SIGMOID:
        return "sigmoid"
    if found:
        keys.refuse("expert_gating_func", f"{found} is not supported; supported are 1 softmax, 2 sigmoid")
    return family.scores


def _widths(
    keys: ArchitectureKeys, blocks: int, layers: int, tensors: Mapping[str, TensorExtent]
) -> tuple[int, ...]:
    key = "expert_feed_forward_length"
    if keys.is_array(key):
        return keys.per_layer(key, blocks=blocks, layers=layers, low=1, high=MAX_WIDTH)
    if keys.has(key):
        return (keys.integer(key, high=MAX_WIDTH),) * layers
    # Some converters leave the key out; the down projection's input is the width. A layer that lacks the
    # tensor gets any width but 0, which would mean a layer without experts: it is missed by name then.
    down = [
        tensors.get(f"blk.{layer}.ffn_down_exps.weight") or tensors.get(f"blk.{layer}.ffn_down.0.weight")
        for layer in range(layers)
    ]
    return tuple(extent.shape[-1] if extent else 1 for extent in down)
