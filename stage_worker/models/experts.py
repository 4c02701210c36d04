"""Router, shared expert and the experts' formula, as the families share them, or one MLP in their place.

The routed experts' matrices are the walk's business. A layer without routed experts has one MLP for all rows,
which takes the shared expert's part in the walk.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from strata_coord.ipc.assignment import ModelGeometry
from strata_coord.kernels.expert_mlp import clamped_swiglu, swiglu
from strata_coord.kernels.linear import linear
from strata_coord.kernels.router import route
from strata_coord.stage_worker.models.family import (
    ExpertHalfInput,
    ExpertMlp,
    LayerWeights,
    TensorShapes,
    require_tensor,
)


class Experts:
    """The dense part of one layer's experts."""

    def __init__(self, geometry: ModelGeometry, layer: int) -> None:
        self.experts = geometry.experts
        self.num_experts = geometry.experts.count(layer)
        self.hidden_size = geometry.hidden_size
        self.layer = layer

    def tensors(self) -> TensorShapes:
        """Return suffix -> torch shape of router, shared expert and biases, or of the only MLP."""
        hidden, experts = self.hidden_size, self.experts
        if not self.num_experts:
            return self._mlp_shapes("", experts.dense_width)
        shapes: dict[str, tuple[int, ...]] = {"ffn_gate_inp.weight": (self.num_experts, hidden)}
        if experts.router_bias:
            shapes["ffn_gate_inp.bias"] = (self.num_experts,)
        if experts.selection_bias:
            shapes["exp_probs_b.bias"] = (self.num_experts,)
        if experts.biases:
            width = experts.widths[self.layer]
            for name, out in (("gate", width), ("up", width), ("down", hidden)):
                shapes[f"ffn_{name}_exps.bias"] = (self.num_experts, out)
        if experts.shared_width:
            shapes |= self._mlp_shapes("_shexp", experts.shared_width)
            if experts.shared_gate:
                shapes["ffn_gate_inp_shexp.weight"] = (hidden,)
        return shapes

    def _mlp_shapes(self, suffix: str, width: int) -> dict[str, tuple[int, ...]]:
        hidden = self.hidden_size
        return {
            f"ffn_gate{suffix}.weight": (width, hidden),
            f"ffn_up{suffix}.weight": (width, hidden),
            f"ffn_down{suffix}.weight": (hidden, width),
        }

    def route(self, x_TD: Tensor, write_TN: Tensor | None, weights: LayerWeights) -> ExpertHalfInput:
        """Return what the expert half needs of these rows; without routed experts all weights are 0."""
        experts = self.experts
        if self.num_experts:
            ids_TK, weights_TK = route(
                x_TD,
                self._weight(weights, "ffn_gate_inp.weight"),
                experts.experts_per_token,
                bias_E=self._weight(weights, "ffn_gate_inp.bias") if experts.router_bias else None,
                scores=experts.scores,
                selection_bias_E=self._weight(weights, "exp_probs_b.bias")
                if experts.selection_bias
                else None,
                groups=experts.groups,
                groups_used=experts.groups_used,
                renormalised=experts.renormalised,
                scale=experts.weight_scale,
            )
        else:
            ids_TK = torch.zeros(
                x_TD.shape[0], experts.experts_per_token, dtype=torch.int64, device=x_TD.device
            )
            weights_TK = torch.zeros_like(ids_TK, dtype=torch.float32)
        return ExpertHalfInput(
            x_TD=x_TD, ids_TK=ids_TK, weights_TK=weights_TK, shared_TD=None, write_TN=write_TN
        )

    def shared(self, x_TD: Tensor, weights: LayerWeights) -> Tensor | None:
        """Return the result [T, D] of the only MLP, or of the shared expert, by its gate if it has one.

        None where there is neither.
        """
        if not self.num_experts:
            return self._mlp(x_TD, weights, "")
        if not self.experts.shared_width:
            return None
        out_TD = self._mlp(x_TD, weights, "_shexp")
        if self.experts.shared_gate:
            # The gate's row is stored as [D] or [1, D].
            gate_1D = self._weight(weights, "ffn_gate_inp_shexp.weight").view(1, -1)
            out_TD.mul_(torch.sigmoid(linear(x_TD, gate_1D)))
        return out_TD

    def mlp(self, weights: LayerWeights) -> ExpertMlp:
        """Return the formula of the routed experts."""
        if self.experts.activation == "swiglu":
            return _swiglu
        gate_EF, up_EF, down_ED = (
            self._weight(weights, f"ffn_{name}_exps.bias") for name in ("gate", "up", "down")
        )
        return _BiasedClampedSwiglu(gate_EF=gate_EF, up_EF=up_EF, down_ED=down_ED)

    def _mlp(self, x_TD: Tensor, weights: LayerWeights, suffix: str) -> Tensor:
        gate, up, down = (
            self._weight(weights, f"ffn_{name}{suffix}.weight") for name in ("gate", "up", "down")
        )
        return swiglu(x_TD, gate, up, down)

    def _weight(self, weights: LayerWeights, name: str) -> Tensor:
        return require_tensor(weights, name, self.layer)


def _swiglu(expert: int, x_TD: Tensor, gate_FD: Tensor, up_FD: Tensor, down_DF: Tensor) -> Tensor:
    del expert
    return swiglu(x_TD, gate_FD, up_FD, down_DF)


@dataclass(frozen=True, slots=True, kw_only=True)
class _BiasedClampedSwiglu:
    """gpt-oss: the biases of a layer's experts are dense weights, not part of their blobs."""

    gate_EF: Tensor
    up_EF: Tensor
    down_ED: Tensor

    def __call__(self, expert: int, x_TD: Tensor, gate_FD: Tensor, up_FD: Tensor, down_DF: Tensor) -> Tensor:
        biases = (self.gate_EF[expert], self.up_EF[expert], self.down_ED[expert])
        return clamped_swiglu(x_TD, gate_FD, up_FD, down_DF, biases=biases)
