"""Families with one residual stream and a norm before each half, whatever the mixers.

x += Mixer(rms(x, attn_norm));  x += MoE(rms(x, expert norm));  head: output(rms(x, output_norm))
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from strata_coord.ipc.assignment import ModelGeometry
from strata_coord.ipc.errors import ModelError
from strata_coord.kernels.norm import rms_norm
from strata_coord.stage_worker.models.attention import Attention, Rotary
from strata_coord.stage_worker.models.experts import Experts
from strata_coord.stage_worker.models.family import (
    ExpertHalfInput,
    ExpertMlp,
    LayerWeights,
    Mixer,
    SegmentRows,
    TensorShapes,
    require_tensor,
)
from strata_coord.stage_worker.models.gated_delta_net import GatedDeltaNet

OUTPUT_NORM = "output_norm.weight"


class PlainResidualLayer:
    """A layer that adds its mixer's and its experts' results to the rows."""

    def __init__(self, geometry: ModelGeometry, index: int, mixer: Mixer, *, expert_norm: str) -> None:
        self.index = index
        self.mixer = mixer
        self.experts = Experts(geometry, index)
        self.expert_norm = expert_norm
        self.hidden_size = geometry.hidden_size
        self.eps = geometry.rms_epsilon

    def dense_tensors(self) -> TensorShapes:
        """Return suffix -> torch shape."""
        return {
            "attn_norm.weight": (self.hidden_size,),
            self.expert_norm: (self.hidden_size,),
            **self.mixer.tensors(),
            **self.experts.tensors(),
        }

    def attention_half(
        self, rows_TW: Tensor, segments: Sequence[SegmentRows], weights: LayerWeights
    ) -> ExpertHalfInput:
        """Run mixer and router; rows take the mixer's result in place."""
        x_TD = rms_norm(rows_TW, require_tensor(weights, "attn_norm.weight", self.index), self.eps)
        rows_TW.add_(self.mixer.mix(x_TD, segments, weights))
        x_TD = rms_norm(rows_TW, require_tensor(weights, self.expert_norm, self.index), self.eps)
        return self.experts.route(x_TD, None, weights)

    def shared_expert(self, x_TD: Tensor, weights: LayerWeights) -> Tensor | None:
        """Return the shared expert's result, None without one."""
        return self.experts.shared(x_TD, weights)

    def expert_mlp(self, weights: LayerWeights) -> ExpertMlp:
        """Return the formula of the routed experts."""
        return self.experts.mlp(weights)

    def combine(self, rows_TW: Tensor, routed_TD: Tensor, half: ExpertHalfInput) -> None:
        """Add the experts' sum to the rows."""
        if half.shared_TD is not None:
            routed_TD = routed_TD + half.shared_TD
        rows_TW.add_(routed_TD)


class PlainResidualFamily:
    """A family whose layers are all PlainResidualLayers; the geometry says which mixer each has."""

    def __init__(self, geometry: ModelGeometry, *, expert_norm: str) -> None:
        self.geometry = geometry
        attention = geometry.attention
        self._rotary = Rotary(attention.rope_dims, attention.rope_base, yarn=attention.yarn)
        self.layers = tuple(
            PlainResidualLayer(geometry, index, self._mixer(index), expert_norm=expert_norm)
            for index in range(geometry.num_layers)
        )

    def _mixer(self, index: int) -> Mixer:
        if not self.geometry.recurrent_layers[index]:
            return Attention(self.geometry, index, self._rotary)
        delta = self.geometry.delta_net
        if delta is None:
            architecture = self.geometry.architecture
            message = f"{architecture}: layer {index} is recurrent, but the model has no ssm.* sizes"
            raise ModelError(message)
        return GatedDeltaNet(self.geometry, delta, index)

    def embed(self, embeddings_TD: Tensor) -> Tensor:
        """Return the embeddings: they are the residual rows."""
        return embeddings_TD

    def head_tensors(self) -> TensorShapes:
        """Return full name -> torch shape."""
        return {OUTPUT_NORM: (self.geometry.hidden_size,)}

    def head(self, rows_TW: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        """Return the normed rows."""
        norm = require_tensor(weights, OUTPUT_NORM, self.geometry.num_layers)
        return rms_norm(rows_TW, norm, self.geometry.rms_epsilon)
