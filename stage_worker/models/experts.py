"""Router and shared expert, as the families share them. Routed experts are the walk's business."""

import torch
from torch import Tensor
from torch.nn import functional

from strata_coord.ipc.assignment import ModelGeometry
from strata_coord.kernels.expert_mlp import swiglu
from strata_coord.kernels.router import route
from strata_coord.stage_worker.models.family import (
    ExpertHalfInput,
    LayerWeights,
    TensorShapes,
    require_tensor,
)


class Experts:
    """The dense part of one layer's experts."""

    def __init__(self, geometry: ModelGeometry, layer: int) -> None:
        self.experts = geometry.experts
        self.hidden_size = geometry.hidden_size
        self.layer = layer

    def tensors(self) -> TensorShapes:
        """Return suffix -> torch shape of the router and the shared expert."""
        hidden, width = self.hidden_size, self.experts.shared_width
        shapes: dict[str, tuple[int, ...]] = {"ffn_gate_inp.weight": (self.experts.num_experts, hidden)}
        if width:
            shapes |= {
                "ffn_gate_inp_shexp.weight": (hidden,),
                "ffn_gate_shexp.weight": (width, hidden),
                "ffn_up_shexp.weight": (width, hidden),
                "ffn_down_shexp.weight": (hidden, width),
            }
        return shapes

    def route(self, x_TD: Tensor, write_TN: Tensor | None, weights: LayerWeights) -> ExpertHalfInput:
        """Return what the expert half needs of these rows."""
        router = require_tensor(weights, "ffn_gate_inp.weight", self.layer)
        ids_TK, weights_TK = route(
            x_TD, router, self.experts.experts_per_token, renormalised=self.experts.renormalised
        )
        return ExpertHalfInput(
            x_TD=x_TD, ids_TK=ids_TK, weights_TK=weights_TK, shared_TD=None, write_TN=write_TN
        )

    def shared(self, x_TD: Tensor, weights: LayerWeights) -> Tensor | None:
        """Return the shared expert's result [T, D], scaled by its sigmoid gate; None where there is none."""
        if not self.experts.shared_width:
            return None

        def weight(name: str) -> Tensor:
            return require_tensor(weights, f"ffn_{name}_shexp.weight", self.layer)

        # The gate's row is stored as [D] or [1, D].
        gate_T1 = torch.sigmoid(functional.linear(x_TD, weight("gate_inp").view(1, -1)))
        return swiglu(x_TD, weight("gate"), weight("up"), weight("down")).mul_(gate_T1)
