"""The routed experts of one layer, over all rows of a super-chunk.

Experts run in ascending order, whichever tier they come from; an expert's rows run in groups of a bounded
number, and the scaled outputs are added into one fp32 accumulator. A row meets an expert at most once, so an
addition never collides with itself: no atomics, no [S, K, D], and the same sum for any S.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from strata_coord.ipc.errors import InvariantError
from strata_coord.ipc.messages import UploadPolicy
from strata_coord.kernels import dequant
from strata_coord.stage_worker.backend import Stream
from strata_coord.stage_worker.blobs import BlobLayout, BlobRun
from strata_coord.stage_worker.clock import ActivityClock
from strata_coord.stage_worker.counters import TransferCounters
from strata_coord.stage_worker.expert_tiers import ExpertTiers
from strata_coord.stage_worker.models.family import ExpertMlp
from strata_coord.stage_worker.stager import Stager
from strata_coord.stage_worker.uploads import routed_only_order


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedRows:
    """The rows of a super-chunk sorted by the expert they are routed to."""

    tokens: torch.Tensor  # int64 [S * K]: row of the super-chunk
    weights: torch.Tensor  # fp32 [S * K, 1]
    counts: tuple[int, ...]  # rows of each expert


def group_by_expert(ids_SK: torch.Tensor, weights_SK: torch.Tensor, *, num_experts: int) -> RoutedRows:
    """Sort (row, choice) pairs by expert, rows ascending within an expert.

    Reads the counts back to the host: the one read-back a layer that the routed-only policy needs.

    Raises:
        InvariantError: an id is outside [0, num_experts). Expert bytes are addressed by what comes from here.
    """
    flat = ids_SK.flatten()
    order = torch.argsort(flat, stable=True)
    # One place below the first expert and one above the last count the ids that are neither.
    below, *counts, above = torch.bincount(
        flat.clamp(-1, num_experts) + 1, minlength=num_experts + 2
    ).tolist()
    if below or above:
        message = f"{below + above} of {flat.numel()} routed ids are not of experts 0 to {num_experts - 1}"
        raise InvariantError(message)
    return RoutedRows(
        tokens=order // ids_SK.shape[1],
        weights=weights_SK.flatten()[order].unsqueeze(1),
        counts=tuple(counts),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Expansion:
    """Where the experts of one layer are expanded to. Views are made once: a token makes thousands else."""

    runs: tuple[tuple[BlobRun, torch.Tensor], ...]  # scratch of each run
    matrices: tuple[torch.Tensor, ...]  # gate, up and down as they lie in the scratch


class ExpertHalf:
    """Runs the expert half of any layer of the stage; owns the scratch that one expert is expanded into."""

    def __init__(
        self,
        *,
        tiers: ExpertTiers,
        stager: Stager,
        compute: Stream,
        clock: ActivityClock,
        counters: TransferCounters,
        group_rows: int,
        dtype: torch.dtype = torch.float32,
        advance: Callable[[], None] = lambda: None,
    ) -> None:
        """Build it.

        dtype: of expanded experts and of their products' operands; sums are fp32. advance: called after each
        expert.
        """
        self._advance = advance
        self._dtype = dtype
        self._tiers = tiers
        self._stager = stager
        self._compute = compute
        self._clock = clock
        self._counters = counters
        self._group_rows = group_rows
        self._expansions: dict[int, _Expansion] = {}  # by layer

    def run(
        self,
        layer: int,
        *,
        x_SD: torch.Tensor,
        rows: RoutedRows,
        policy: UploadPolicy,
        sum_SD: torch.Tensor,
        mlp: ExpertMlp,
    ) -> None:
        """Add every routed expert's weighted output into sum_SD, fp32 [S, D]. mlp: the experts' formula."""
        experts: Sequence[int] = range(len(rows.counts))
        if policy == "routed-only":
            experts = hit = [expert for expert in experts if rows.counts[expert]]
            self._stager.plan(routed_only_order(self._tiers.residency, layer=layer, routed_experts=hit))
        layout = self._tiers.layouts[layer]
        first = 0
        for expert in experts:
            count = rows.counts[expert]
            resident = self._tiers.resident_blob(layer, expert)
            last = first + count
            if resident is not None:
                if count:
                    self._counters.add(resident_hit=layout.num_bytes)
                    self._multiply(layout, resident, x_SD, rows, first, last, sum_SD, mlp, expert)
            elif count or policy == "stream-all":
                upload = self._stager.acquire(layer, expert)
                with self._clock.during("wait_experts"):
                    self._compute.wait(upload.ready)
                if count:
                    self._multiply(layout, upload.blob, x_SD, rows, first, last, sum_SD, mlp, expert)
                self._stager.release(upload, self._compute)
            first = last
            self._advance()

    def _multiply(
        self,
        layout: BlobLayout,
        blob: torch.Tensor,
        x_SD: torch.Tensor,
        rows: RoutedRows,
        first: int,
        last: int,
        sum_SD: torch.Tensor,
        mlp: ExpertMlp,
        expert: int,
    ) -> None:
        gate, up, down = self._expand(layout, blob)
        for start in range(first, last, self._group_rows):
            stop = min(start + self._group_rows, last)
            if stop - start == len(x_SD):
                # An expert meets a row at most once, in ascending order: these are all rows as they lie.
                sum_SD.add_(mlp(expert, x_SD, gate, up, down).mul_(rows.weights[start:stop]))
                continue
            tokens = rows.tokens[start:stop]
            out = mlp(expert, x_SD[tokens], gate, up, down)
            sum_SD.index_add_(0, tokens, out.mul_(rows.weights[start:stop]))

    def _expand(self, layout: BlobLayout, blob: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return gate, up and down of an expert, valid until the next call."""
        expansion = self._expansions.get(layout.layer)
        if expansion is None:
            self._expansions = _expansions(self._tiers.layouts.values(), self._dtype, blob.device)
            expansion = self._expansions[layout.layer]
        for run, scratch in expansion.runs:
            dequant.dequantize(
                blob[run.offset_bytes : run.offset_bytes + run.num_bytes],
                run.ggml_type,
                run.num_elements,
                out=scratch,
            )
        return expansion.matrices


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


def add_routing_counts(table: Mapping[int, memoryview], layer: int, counts: Sequence[int]) -> None:
    """Add the rows of each expert to layer's row of the shared routing table (uint32 words)."""
    row = table[layer]
    for expert, count in enumerate(counts):
        if count:
            row[expert] = (row[expert] + count) & 0xFFFFFFFF
