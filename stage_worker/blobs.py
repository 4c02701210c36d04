"""Where one expert's tensors lie: in the file, and repacked as one gate|up|down blob.

In the file an expert is two or three separate byte ranges; in the arena, the window and the expert cache
it is one contiguous blob, so that it crosses the link as one copy.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from strata_coord.ipc.assignment import TensorExtent
from strata_coord.ipc.errors import ModelError

BLOB_ALIGNMENT_BYTES = 64  # vector loads of the dequantisers; a CUDA copy wants no more

_SPLIT_PARTS = ("ffn_gate_exps.weight", "ffn_up_exps.weight", "ffn_down_exps.weight")
_FUSED_PARTS = ("ffn_gate_up_exps.weight", "ffn_down_exps.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobPart:
    """One matrix of an expert: [out, in] in torch order."""

    name: str
    extent: TensorExtent  # of all experts of the layer
    offset_bytes: int  # inside the blob
    num_bytes: int  # of one expert
    out_features: int
    in_features: int

    def file_offset(self, expert: int) -> int:
        """Where expert's bytes begin in the file."""
        return self.extent.offset_bytes + expert * self.num_bytes


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


def expert_blob_layout(layer: int, tensors: Mapping[str, TensorExtent]) -> BlobLayout:
    """The layout of layer's experts from the extents of its stacked expert tensors.

    Raises:
        ModelError: the layer has neither gate/up/down nor gate_up/down tensors.
    """
    for names in (_SPLIT_PARTS, _FUSED_PARTS):
        full_names = [f"blk.{layer}.{name}" for name in names]
        if all(name in tensors for name in full_names):
            return _layout(layer, [tensors[name] for name in full_names])
    message = f"layer {layer}: the experts' gate, up and down tensors are not all there"
    raise ModelError(message)


def _layout(layer: int, extents: Iterable[TensorExtent]) -> BlobLayout:
    parts: list[BlobPart] = []
    offset = 0
    num_experts = 0
    for extent in extents:
        num_experts, out_features, in_features = extent.shape
        part_bytes = extent.num_bytes // num_experts
        parts.append(
            BlobPart(
                name=extent.name.split(".", 2)[2],
                extent=extent,
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
            (key, tuple(group)) for key, group in groupby(parts, key=lambda part: part.extent.ggml_type)
        )
    )


def aligned(num_bytes: int) -> int:
    """num_bytes rounded up to the blob alignment."""
    return -(-num_bytes // BLOB_ALIGNMENT_BYTES) * BLOB_ALIGNMENT_BYTES
