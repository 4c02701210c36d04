"""What the planner asks of a model: sizes and geometry, never bytes. Pure.

model_index.ModelIndex satisfies it; the planner knows only this face, so that plans can be made and tested
without a file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from strata_coord.ipc.assignment import ModelGeometry, TensorExtent

__all__ = ["PlannedModel"]


class PlannedModel(Protocol):
    """Geometry and tensor extents of one model."""

    @property
    def files(self) -> tuple[str, ...]:
        """Absolute paths; a tensor's file is an index into them."""
        ...

    @property
    def geometry(self) -> ModelGeometry:
        """Everything about the architecture that is not a tensor."""
        ...

    def layer_tensors(self, layer: int) -> tuple[TensorExtent, ...]:
        """Return the tensors of a layer that are not routed experts."""
        ...

    def expert_tensors(self, layer: int) -> tuple[TensorExtent, ...]:
        """Return the routed-expert tensors of a layer in the order of their blob."""
        ...

    def expert_blob_bytes(self, layer: int) -> int:
        """Return the bytes of one routed expert of a layer."""
        ...

    def dense_bytes(self, layer: int) -> int:
        """Return the quantised bytes of a layer's tensors that are not routed experts."""
        ...

    def head_tensors(self) -> tuple[TensorExtent, ...]:
        """Return what follows the layers: output norm or mixer, and the output matrix."""
        ...

    def output(self) -> TensorExtent:
        """Return the output matrix; the embedding where the two are tied."""
        ...

    def stage_tensors(
        self, first: int, last: int, *, is_first: bool, is_last: bool
    ) -> tuple[TensorExtent, ...]:
        """Return exactly the tensors that a stage of layers [first, last) reads."""
        ...
