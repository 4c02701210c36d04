"""Where one expert's tensors lie: in the file, and repacked as one gate|up|down blob.

In the file an expert is two or three separate byte ranges, of stacked tensors or, in old files, of a tensor
for each expert. In the arena, the window and the expert cache it is one contiguous blob, so that it crosses
the link as one copy.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from strata_coord.ipc.assignment import TensorExtent
from strata_coord.ipc.errors import ModelError

BLOB_ALIGNMENT_BYTES = 64  # vector loads of the dequantisers; a CUDA copy wants no more

_SPLIT_PARTS = ("ffn_gate_exps.weight", "ffn_up_exps.weight", "ffn_down_exps.weight")
_FUSED_PARTS = ("ffn_gate_up_exps.weight", "ffn_down_exps.weight")
_SINGLE_PARTS = ("ffn_gate", "ffn_up", "ffn_down")  # then ".7.weight": of expert 7 alone


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobPart:
    """One matrix of an expert: [out, in] in torch order."""

    name: str
    extents: tuple[TensorExtent, ...]  # one with all experts of the layer, or one for each expert
    offset_bytes: int  # inside the blob
    num_bytes: int  # of one expert
    out_features: int
    in_features: int

    @property
    def ggml_type(self) -> int:
        """Block type of all experts."""
        return self.extents[0].ggml_type

    def file_place(self, expert: int) -> tuple[int, int]:
        """The file in which expert's bytes are, and where in it they begin."""
        if len(self.extents) > 1:
            extent = self.extents[expert]
            return extent.file, extent.offset_bytes
        (extent,) = self.extents
        return extent.file, extent.offset_bytes + expert * self.num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobRun:
    """Neighbouring parts of one block type: they expand together, with one kernel."""

    ggml_type: int
    offset_bytes: int  # inside the blob
    num_bytes: int
    num_elements: int
    parts: tuple[BlobPart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobLayout:
    """The parts of one layer's experts; all experts of a layer have the same layout."""

    layer: int
    num_experts: int
    parts: tuple[BlobPart, ...]
    runs: tuple[BlobRun, ...]
    num_bytes: int


def expert_blob_layout(layer: int, tensors: Mapping[str, TensorExtent], *, num_experts: int) -> BlobLayout:
    """The layout of layer's experts from the extents of its expert tensors.

    num_experts: of the layer; 0: it has no routed experts, and neither has the layout.

    Raises:
        ModelError: the tensors of gate, up and down (gate and up may be one) are not all there, or those of
            single experts differ in type or shape.
    """
    if num_experts == 0:
        return BlobLayout(layer=layer, num_experts=0, parts=(), runs=(), num_bytes=0)
    for names in (_SPLIT_PARTS, _FUSED_PARTS):
        full_names = [f"blk.{layer}.{name}" for name in names]
        if all(name in tensors for name in full_names):
            return _layout(layer, {name: [tensors[f"blk.{layer}.{name}"]] for name in names}, num_experts)
    singles = {
        part: [tensors.get(f"blk.{layer}.{part}.{expert}.weight") for expert in range(num_experts)]
        for part in _SINGLE_PARTS
    }
    found = {part: [extent for extent in extents if extent is not None] for part, extents in singles.items()}
    if all(len(extents) == num_experts for extents in found.values()):
        return _layout(layer, found, num_experts)
    message = f"layer {layer}: the experts' gate, up and down tensors are not all there"
    raise ModelError(message)


def _layout(layer: int, found: Mapping[str, Sequence[TensorExtent]], num_experts: int) -> BlobLayout:
    parts: list[BlobPart] = []
    offset = 0
    for name, extents in found.items():
        out_features, in_features = extents[0].shape[-2:]
        part_bytes = extents[0].num_bytes * len(extents) // num_experts
        for extent in extents:
            if (extent.ggml_type, extent.shape) != (extents[0].ggml_type, extents[0].shape):
                message = f"layer {layer}: {extent.name} and {extents[0].name} differ in type or shape"
                raise ModelError(message)
        parts.append(
            BlobPart(
                name=name,
                extents=tuple(extents),
                offset_bytes=offset,
                num_bytes=part_bytes,
                out_features=out_features,
                in_features=in_features,
            )
        )
        offset += part_bytes
    return BlobLayout(
        layer=layer, num_experts=num_experts, parts=tuple(parts), runs=_runs(parts), num_bytes=offset
    )


def _runs(parts: Sequence[BlobPart]) -> tuple[BlobRun, ...]:
    return tuple(
        BlobRun(
            ggml_type=ggml_type,
            offset_bytes=members[0].offset_bytes,
            num_bytes=sum(part.num_bytes for part in members),
            num_elements=sum(part.out_features * part.in_features for part in members),
            parts=members,
        )
        for ggml_type, members in (
            (key, tuple(group)) for key, group in groupby(parts, key=lambda part: part.ggml_type)
        )
    )


def aligned(num_bytes: int) -> int:
    """num_bytes rounded up to the blob alignment."""
    return -(-num_bytes // BLOB_ALIGNMENT_BYTES) * BLOB_ALIGNMENT_BYTES
