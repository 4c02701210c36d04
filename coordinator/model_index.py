"""A model's header as the planner and the stages need it: geometry, and every tensor as a byte extent.

Keys and tensor shapes are compared here, once. What follows (planner, stages, kernels) takes sizes from this
record only and never looks at the file's own claims again.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from strata_coord.coordinator.gguf_header import read_header
from strata_coord.coordinator.gguf_metadata import Metadata
from strata_coord.coordinator.model_geometry import read_geometry
from strata_coord.coordinator.model_tensors import (
    TensorCheck,
    embedding_slots,
    expert_slots,
    head_slots,
    layer_slots,
)
from strata_coord.ipc.assignment import ModelGeometry, TensorExtent

NGRAM_TABLE = "per_layer_token_embd.weight"
_BLOCK = re.compile(r"blk\.(\d{1,9})\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelIndex:
    """Where everything of a model lies. Layers count from 0; MTP blocks after the trunk are left out."""

    path: str  # absolute; the first shard
    files: tuple[str, ...]  # absolute paths, indexed by TensorExtent.file
    metadata: Metadata  # of the first file; tokenizer and chat template are made from it
    geometry: ModelGeometry
    tensors: Mapping[str, TensorExtent]  # by name; everything in the files but MTP blocks
    layers: tuple[tuple[TensorExtent, ...], ...]  # per layer, without routed experts
    experts: tuple[tuple[TensorExtent, ...], ...]  # per layer, in blob order
    head: tuple[TensorExtent, ...]  # output norm or mixer, then the output matrix

    def layer_tensors(self, layer: int) -> tuple[TensorExtent, ...]:
        """Return what a layer has besides its routed experts; the n-gram table is not part of it."""
        return self.layers[layer]

    def expert_tensors(self, layer: int) -> tuple[TensorExtent, ...]:
        """Return a layer's routed experts in blob order: gate, up (or both fused), down.

        A stacked tensor each or, in old files, as many tensors as there are experts.
        """
        return self.experts[layer]

    def expert_blob_bytes(self, layer: int) -> int:
        """Return the bytes of one routed expert, its parts of the layer's expert tensors; 0 without any."""
        count = self.geometry.experts.num_experts
        return sum(tensor.num_bytes for tensor in self.experts[layer]) // count

    def dense_bytes(self, layer: int) -> int:
        """Return the bytes of a layer besides its routed experts."""
        return sum(tensor.num_bytes for tensor in self.layers[layer])

    def embedding(self) -> TensorExtent:
        """Return the token embedding."""
        return self.tensors["token_embd.weight"]

    def output(self) -> TensorExtent:
        """Return the output matrix; the token embedding where the two are tied."""
        return self.head[-1]

    @property
    def tied(self) -> bool:
        """Whether the token embedding is also the output matrix."""
        return self.output() == self.embedding()

    def head_tensors(self) -> tuple[TensorExtent, ...]:
        """Return what follows the layers: output norm or mixer, then the output matrix."""
        return self.head

    def ngram_table(self) -> TensorExtent | None:
        """Return the n-gram table, of which single rows are read; None where the model has none."""
        return None if self.geometry.ngram is None else self.tensors[NGRAM_TABLE]

    def stage_tensors(
        self, first: int, last: int, *, is_first: bool, is_last: bool
    ) -> tuple[TensorExtent, ...]:
        """Return exactly what the stage of layers [first, last) reads, each tensor once.

        Args:
            first: first layer.
            last: one past the last layer.
            is_first: the stage embeds, so it gets the token embedding.
            is_last: the stage has the head.
        """
        found: dict[str, TensorExtent] = {}
        wanted: list[TensorExtent] = [self.embedding()] if is_first else []
        for layer in range(first, last):
            wanted += self.layers[layer]
            wanted += self.experts[layer]
        ngram, table = self.geometry.ngram, self.ngram_table()
        if ngram is not None and table is not None and any(first <= layer < last for layer in ngram.layers):
            wanted.append(table)
        if is_last:
            wanted += self.head
        for tensor in wanted:
            found[tensor.name] = tensor
        return tuple(found.values())


def load_model_index(path: str | os.PathLike[str]) -> ModelIndex:
    """Read a model's header (one file, or the first of its shards) and check it against its architecture.

    Raises:
        ModelError: the file is damaged, hostile, of an unsupported kind, or its keys and tensors disagree.
    """
    header = read_header(path)
    metadata = header.metadata
    everything = {tensor.name: tensor for tensor in header.tensors}
    geometry = read_geometry(metadata, everything)
    tensors = {name: tensor for name, tensor in everything.items() if _in_trunk(name, geometry.num_layers)}
    check = TensorCheck(metadata, tensors)
    check.take(embedding_slots(geometry))
    head = check.take(head_slots(geometry, tied="output.weight" not in tensors))
    layers = tuple(check.take(layer_slots(geometry, layer)) for layer in range(geometry.num_layers))
    experts = tuple(check.take(expert_slots(geometry, layer)) for layer in range(geometry.num_layers))
    if geometry.ngram is not None:
        _check_ngram_table(metadata, geometry, tensors, check)
    check.finish()
    return ModelIndex(
        path=header.files[0],
        files=header.files,
        metadata=metadata,
        geometry=geometry,
        tensors=MappingProxyType(tensors),
        layers=layers,
        experts=experts,
        head=head,
    )


def _in_trunk(name: str, num_layers: int) -> bool:
    block = _BLOCK.match(name)
    return block is None or int(block[1]) < num_layers


def _check_ngram_table(
    metadata: Metadata, geometry: ModelGeometry, tensors: Mapping[str, TensorExtent], check: TensorCheck
) -> None:
    """The table needs a row for every hash that a head can produce; its own row count is padded."""
    ngram = geometry.ngram
    if ngram is None:
        return
    needed = max(
        offset + size for offset, size in zip(ngram.head_offsets, ngram.head_vocab_sizes, strict=True)
    )
    table = tensors.get(NGRAM_TABLE)
    rows = table.shape[0] if table is not None else needed
    check.take([[{NGRAM_TABLE: (rows, ngram.row_width)}]])
    if rows < needed:
        metadata.refuse(f"tensor {NGRAM_TABLE}", f"{rows} rows, the heads reach row {needed - 1}")
