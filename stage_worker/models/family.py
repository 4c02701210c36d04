"""What an architecture gives the walk: geometry, tensors, and the two halves of each layer.

The walk owns loops, memory, expert tiers and the order of work; a family owns formulas. Letters of shapes,
here and in all of models/: T rows of a sub-chunk, W floats of a residual row, D hidden size, K experts per
token, N residual streams, F width of an expert.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from strata_coord.ipc.assignment import ModelGeometry
from strata_coord.ipc.errors import ModelError
from strata_coord.stage_worker.sequence_state import SequenceState

LayerWeights = Mapping[str, Tensor]
"""Name without "blk.N." -> tensor in torch shape, as "attn_q.weight".

fp32, or the stage's compute type where the file's is quantised."""

TensorShapes = Mapping[str, tuple[int, ...]]


@dataclass(slots=True)
class SegmentRows:
    """A segment's rows inside one sub-chunk."""

    start: int  # row range in the sub-chunk
    stop: int
    first_position: int  # absolute position of row start
    state: SequenceState  # of this stage
    token_ids: Tensor  # int64: ids of positions [0, first_position + stop - start) of the sequence

    @property
    def count(self) -> int:
        """Rows of the segment in this sub-chunk."""
        return self.stop - self.start


@dataclass(slots=True)
class ExpertHalfInput:
    """What the attention half of one sub-chunk leaves for the expert half."""

    x_TD: Tensor
    ids_TK: Tensor  # int64
    weights_TK: Tensor  # fp32
    shared_TD: Tensor | None  # a shared expert's result that combine must still add; None: routed has it
    write_TN: Tensor | None  # hyper-connection write weights


class NgramTable(Protocol):
    """Row access to a table that is never loaded whole."""

    def rows(self, ids: Tensor) -> Tensor:
        """Return fp32 [len(ids), row_width] of int64 row numbers."""


class ExpertMlp(Protocol):
    """The formula of a layer's routed experts."""

    def __call__(self, expert: int, x_TD: Tensor, gate_FD: Tensor, up_FD: Tensor, down_DF: Tensor) -> Tensor:
        """Return the expert's result [T, D] for rows that are routed to it."""


class Mixer(Protocol):
    """Mixes the tokens of each segment."""

    def tensors(self) -> TensorShapes:
        """Return suffix -> torch shape of the mixer's tensors."""

    def mix(self, x_TD: Tensor, segments: Sequence[SegmentRows], weights: LayerWeights) -> Tensor:
        """Return y [T, D]; the segments' states move on by their rows."""


class Layer(Protocol):
    """One trunk layer."""

    @property
    def index(self) -> int:
        """Absolute layer number."""

    def dense_tensors(self) -> TensorShapes:
        """Return suffix -> torch shape of all but the routed experts and the row-read n-gram table."""

    def attention_half(
        self, rows_TW: Tensor, segments: Sequence[SegmentRows], weights: LayerWeights
    ) -> ExpertHalfInput:
        """Run mixer and router; rows take the mixer's result in place. The shared expert is not run here."""

    def shared_expert(self, x_TD: Tensor, weights: LayerWeights) -> Tensor | None:
        """Return the shared expert's result [T, D], or that of the only MLP; None where there is neither."""

    def expert_mlp(self, weights: LayerWeights) -> ExpertMlp:
        """Return the formula of the routed experts, with what else than their matrices it takes."""

    def combine(self, rows_TW: Tensor, routed_TD: Tensor, half: ExpertHalfInput) -> None:
        """Add routed, already weighted and summed, to the rows in place; half.shared_TD too unless None."""


class Family(Protocol):
    """One architecture."""

    @property
    def geometry(self) -> ModelGeometry:
        """The model's sizes."""

    @property
    def layers(self) -> Sequence[Layer]:
        """All trunk layers, by absolute number."""

    def embed(self, embeddings_TD: Tensor) -> Tensor:
        """Return the residual rows [T, W] that a prompt starts with."""

    def head_tensors(self) -> TensorShapes:
        """Return full name -> torch shape of what the last stage needs before output.weight."""

    def head(self, rows_TW: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        """Return [T, D] that output.weight multiplies."""


def require_tensor(weights: Mapping[str, Tensor], name: str, layer: int) -> Tensor:
    """Return a tensor by name.

    Raises:
        ModelError: it is missing.
    """
    tensor = weights.get(name)
    if tensor is None:
        message = f"layer {layer}: tensor {name} is missing"
        raise ModelError(message)
    return tensor
