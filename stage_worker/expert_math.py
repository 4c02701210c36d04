"""How a batch of experts is multiplied: one by one, or all at once on a device that has grouped products.

Both take the pairs (row, choice) sorted by the order in which experts are used, expand the batch's blobs into
scratch of their own, and add the weighted outputs into one fp32 accumulator in that order.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from strata_coord.kernels import dequant
from strata_coord.kernels.combine import GroupBounds, add_in_order, inverse_order
from strata_coord.kernels.cuda_dequant import dequantize_cuda, has_kernel
from strata_coord.kernels.grouped_experts import (
    GroupedScratch,
    grouped_method,
    grouped_swiglu,
    make_grouped_scratch,
)
from strata_coord.stage_worker.blobs import BlobLayout, BlobRun
from strata_coord.stage_worker.models.family import ExpertMlp


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedRows:
    """The (row, choice) pairs of a super-chunk, sorted by the order in which its experts are used."""

    order: torch.Tensor  # int64 [S * K]: pair of each sorted place
    tokens: torch.Tensor  # int64 [S * K]: row of the super-chunk
    weights: torch.Tensor  # fp32 [S * K, 1]
    experts: tuple[int, ...]  # all experts, in order of use
    counts: tuple[int, ...]  # rows of each of them

    def counts_by_expert(self) -> list[int]:
        """Rows of each expert, by its number."""
        found = [0] * len(self.experts)
        for expert, count in zip(self.experts, self.counts, strict=True):
            found[expert] = count
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertBatch:
    """Experts that are used together."""

    experts: Sequence[int]
    blobs: torch.Tensor  # uint8 [experts, stride]
    places: Sequence[int]  # of experts, in the order of use; ascending, with no rows in between
    first: int  # sorted pairs [first, last)
    last: int


class ExpertMath(Protocol):
    """The products of one layer's experts."""

    max_batch: int  # experts that one call takes; 1: an expert at a time, in ascending order

    def begin(self, x_SD: torch.Tensor, rows: RoutedRows, weights_SK: torch.Tensor) -> None:
        """Prepare a layer's rows."""

    def add(self, layout: BlobLayout, batch: ExpertBatch, *, sum_SD: torch.Tensor, mlp: ExpertMlp) -> None:
        """Add the batch's weighted outputs into sum_SD, fp32 [S, D]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Expansion:
    """Where the experts of one layer are expanded to. Views are made once: a token makes thousands else."""

    runs: tuple[tuple[BlobRun, torch.Tensor], ...]  # scratch of each run
    matrices: tuple[torch.Tensor, ...]  # gate, up and down as they lie in the scratch


class SingleExpertMath:
    """One expert after the other, its rows in groups of at most group_rows. Any device, any formula."""

    max_batch = 1

    def __init__(
        self, layouts: Collection[BlobLayout], *, group_rows: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """dtype: of expanded experts and of their products' operands."""
        self._group_rows = group_rows
        self._expansions = _expansions(layouts, dtype, device)

    def begin(self, x_SD: torch.Tensor, rows: RoutedRows, weights_SK: torch.Tensor) -> None:
        """Keep the layer's rows."""
        del weights_SK
        self._x_SD, self._rows = x_SD, rows

    def add(self, layout: BlobLayout, batch: ExpertBatch, *, sum_SD: torch.Tensor, mlp: ExpertMlp) -> None:
        """Add the one expert's weighted outputs."""
        (expert,) = batch.experts
        gate, up, down = self._expand(layout, batch.blobs[0])
        x_SD, rows = self._x_SD, self._rows
        for start in range(batch.first, batch.last, self._group_rows):
            stop = min(start + self._group_rows, batch.last)
            if stop - start == len(x_SD):
                # An expert meets a row at most once, in ascending order: these are all rows as they lie.
                sum_SD.add_(mlp(expert, x_SD, gate, up, down).mul_(rows.weights[start:stop]))
                continue
            tokens = rows.tokens[start:stop]
            out = mlp(expert, x_SD[tokens], gate, up, down)
            sum_SD.index_add_(0, tokens, out.mul_(rows.weights[start:stop]))

    def _expand(self, layout: BlobLayout, blob: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return gate, up and down of an expert, valid until the next call."""
        expansion = self._expansions[layout.layer]
        for run, scratch in expansion.runs:
            dequant.dequantize(
                blob[run.offset_bytes : run.offset_bytes + run.num_bytes],
                run.ggml_type,
                run.num_elements,
                out=scratch,
            )
        return expansion.matrices


class GroupedExpertMath:
    """All experts of a batch in two grouped products, bf16 with fp32 sums. Plain SwiGLU experts only."""

    def __init__(
        self, layouts: Collection[BlobLayout], *, max_batch: int, pass_rows: int, device: torch.device
    ) -> None:
        """Take scratch for max_batch expanded experts and pass_rows rows of one pass over a batch."""
        self.max_batch = max_batch
        first = next(iter(layouts))
        gate, down = first.parts[0], first.parts[-1]
        hidden = gate.in_features
        width = max(layout.parts[-1].in_features for layout in layouts)
        self.method, self.reason = grouped_method(device, torch.bfloat16, hidden, width)
        self._gate_up = torch.empty(max_batch * 2 * width * hidden, dtype=torch.bfloat16, device=device)
        self._down = torch.empty(max_batch * down.out_features * width, dtype=torch.bfloat16, device=device)
        self._pass_rows = pass_rows
        self._scratch: dict[int, GroupedScratch] = {}  # by width

    def begin(self, x_SD: torch.Tensor, rows: RoutedRows, weights_SK: torch.Tensor) -> None:
        """Round the layer's rows once, and find each pair's place in the sorted order."""
        self._x_SD = x_SD.to(torch.bfloat16)
        self._tokens = rows.tokens
        self._weights_SK = weights_SK
        self._inverse_SK = inverse_order(rows.order, weights_SK.shape[1])
        ends = [0]
        for count in rows.counts:
            ends.append(ends[-1] + count)
        self._offsets = torch.tensor(ends, dtype=torch.int32, device=x_SD.device)

    def add(self, layout: BlobLayout, batch: ExpertBatch, *, sum_SD: torch.Tensor, mlp: ExpertMlp) -> None:
        """Expand the batch, multiply pass by pass, add in order."""
        del mlp
        gate_up, down = self._expand(layout, batch)
        places = list(batch.places)
        if places[-1] - places[0] == len(places) - 1:
            offsets = self._offsets[places[0] : places[-1] + 2]
        else:  # experts without rows lie in between: each one's end is the next one's begin all the same
            offsets = self._offsets[torch.tensor([*places, places[-1] + 1], device=self._offsets.device)]
        scratch = self._scratch.get(down.shape[2])
        if scratch is None or scratch.num_groups < len(batch.experts):
            scratch = make_grouped_scratch(self._pass_rows, gate_up, method=self.method)
            self._scratch[down.shape[2]] = scratch
        for skip in range(0, batch.last - batch.first, self._pass_rows):
            y_nD = grouped_swiglu(
                self._x_SD,
                self._tokens,
                offsets,
                gate_up,
                down,
                scratch=scratch,
                method=self.method,
                skip_rows=skip,
            )
            add_in_order(
                sum_SD,
                y_nD,
                self._inverse_SK,
                self._weights_SK,
                bounds=GroupBounds(offsets_G1=offsets, skip_rows=skip),
            )

    def _expand(self, layout: BlobLayout, batch: ExpertBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return gate and up [G, 2F, D] and down [G, D, F], valid until the next call."""
        num_experts = len(batch.experts)
        down_part = layout.parts[-1]
        width, hidden, edge = down_part.in_features, down_part.out_features, down_part.offset_bytes
        gate_up = self._gate_up[: num_experts * 2 * width * hidden]
        down = self._down[: num_experts * width * hidden]
        _expand_columns(batch.blobs[:, :edge], layout.parts[0].ggml_type, gate_up)
        _expand_columns(batch.blobs[:, edge : layout.num_bytes], down_part.ggml_type, down)
        return gate_up.view(num_experts, 2 * width, hidden), down.view(num_experts, hidden, width)


def grouped_refusal(layouts: Collection[BlobLayout], *, is_plain: bool, dtype: torch.dtype) -> str | None:
    """Why a device multiplies experts one by one, or None where grouped products serve."""
    if dtype != torch.bfloat16:
        return f"weights are {dtype}, grouped products take bf16"
    if not is_plain:
        return "the experts have biases or another activation than SwiGLU"
    for layout in layouts:
        if len({part.ggml_type for part in layout.parts[:-1]}) > 1:
            return f"gate and up of layer {layout.layer} differ in type"
        if not all(has_kernel(part.ggml_type) for part in layout.parts):
            return f"the experts of layer {layout.layer} have a type that no CUDA kernel expands"
    return None


def _expand_columns(blobs: torch.Tensor, ggml_type: int, out: torch.Tensor) -> None:
    """Expand a column range of blobs, uint8 [experts, bytes] of any row stride, densely into out."""
    if blobs.is_cuda:
        dequantize_cuda(blobs, ggml_type, out)
        return
    for row, values in zip(blobs, out.view(len(blobs), -1), strict=True):
        dequant.dequantize(row, ggml_type, values.numel(), out=values)


def _expansions(
    layouts: Collection[BlobLayout], dtype: torch.dtype, device: torch.device
) -> dict[int, _Expansion]:
    """Take scratch that the largest expert fits in, and return each layer's views of it."""
    sizes: dict[str, int] = {}
    for layout in layouts:
        for run in layout.runs:
            name = run.parts[0].name
            sizes[name] = max(sizes.get(name, 0), run.num_elements)
    scratch = {name: torch.empty(size, dtype=dtype, device=device) for name, size in sizes.items()}
    return {layout.layer: _expansion(layout, scratch) for layout in layouts}


def _expansion(layout: BlobLayout, scratch: Mapping[str, torch.Tensor]) -> _Expansion:
    runs: list[tuple[BlobRun, torch.Tensor]] = []
    matrices: list[torch.Tensor] = []
    for run in layout.runs:
        values = scratch[run.parts[0].name][: run.num_elements]
        runs.append((run, values))
        sizes = [part.out_features * part.in_features for part in run.parts]
        for part, matrix in zip(run.parts, torch.split(values, sizes), strict=True):
            matrices.append(matrix.view(part.out_features, part.in_features))
    if len(matrices) == 2:  # gate and up fused, gate rows first
        matrices[:1] = matrices[0].chunk(2, dim=0)
    return _Expansion(runs=tuple(runs), matrices=tuple(matrices))
