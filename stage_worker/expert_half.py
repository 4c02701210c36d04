"""The routed experts of one layer, over all rows of a super-chunk.

Experts are used in one order, whichever way they come: ascending, or residents first where a device
multiplies batches of them. A row meets an expert at most once and each batch adds into one fp32 accumulator,
so an addition never collides with itself: no atomics, no [S, K, D], and the same sum for any S.
"""

from collections.abc import Callable, Mapping, Sequence

import torch

from strata_coord.ipc.errors import InvariantError
from strata_coord.ipc.messages import UploadPolicy
from strata_coord.stage_worker.backend import Stream
from strata_coord.stage_worker.blobs import BlobLayout
from strata_coord.stage_worker.clock import ActivityClock
from strata_coord.stage_worker.counters import TransferCounters
from strata_coord.stage_worker.expert_math import ExpertBatch, ExpertMath, RoutedRows
from strata_coord.stage_worker.expert_tiers import ExpertTiers
from strata_coord.stage_worker.models.family import ExpertMlp
from strata_coord.stage_worker.stager import Stager
from strata_coord.stage_worker.uploads import order_of_use, routed_only_order


def group_by_expert(
    ids_SK: torch.Tensor,
    weights_SK: torch.Tensor,
    *,
    num_experts: int,
    order: Sequence[int] | None = None,
) -> RoutedRows:
    """Sort (row, choice) pairs by the order in which experts are used, rows ascending within an expert.

    order: all experts in order of use; None: ascending. Reads the counts back to the host: the one read-back
    a layer that the routed-only policy needs.

    Raises:
        InvariantError: an id is outside [0, num_experts). Expert bytes are addressed by what comes from here.
    """
    flat = ids_SK.flatten()
    # One place below the first expert and one above the last count the ids that are neither.
    below, *counts, above = torch.bincount(
        flat.clamp(-1, num_experts) + 1, minlength=num_experts + 2
    ).tolist()
    if below or above:
        message = f"{below + above} of {flat.numel()} routed ids are not of experts 0 to {num_experts - 1}"
        raise InvariantError(message)
    experts = tuple(range(num_experts)) if order is None else tuple(order)
    if order is not None:
        places = torch.empty(num_experts, dtype=torch.int64)
        places[list(experts)] = torch.arange(num_experts)
        flat = places.to(flat.device)[flat]
    sorted_pairs = torch.argsort(flat, stable=True)
    return RoutedRows(
        order=sorted_pairs,
        tokens=sorted_pairs // ids_SK.shape[1],
        weights=weights_SK.flatten()[sorted_pairs].unsqueeze(1),
        experts=experts,
        counts=tuple(counts[expert] for expert in experts),
    )


class ExpertHalf:
    """Runs the expert half of any layer of the stage: brings the experts, lets math multiply them."""

    def __init__(
        self,
        *,
        tiers: ExpertTiers,
        stager: Stager,
        compute: Stream,
        clock: ActivityClock,
        counters: TransferCounters,
        math: ExpertMath,
        advance: Callable[[], None] = lambda: None,
    ) -> None:
        """Build it. advance: called after each expert or batch of them."""
        self._advance = advance
        self._tiers = tiers
        self._stager = stager
        self._compute = compute
        self._clock = clock
        self._counters = counters
        self._math = math

    def sort(
        self, layer: int, ids_SK: torch.Tensor, weights_SK: torch.Tensor, *, num_experts: int
    ) -> RoutedRows:
        """The layer's pairs in the order in which its experts are used."""
        order = None
        if self._math.max_batch > 1 and num_experts:
            order = order_of_use(self._tiers.residency, layer=layer, num_experts=num_experts)
        return group_by_expert(ids_SK, weights_SK, num_experts=num_experts, order=order)

    def run(
        self,
        layer: int,
        *,
        x_SD: torch.Tensor,
        weights_SK: torch.Tensor,
        rows: RoutedRows,
        policy: UploadPolicy,
        sum_SD: torch.Tensor,
        mlp: ExpertMlp,
    ) -> None:
        """Add every routed expert's weighted output into sum_SD, fp32 [S, D]. mlp: the experts' formula."""
        places = range(len(rows.experts))
        if policy == "routed-only":
            hit = [rows.experts[place] for place in places if rows.counts[place]]
            self._stager.plan(routed_only_order(self._tiers.residency, layer=layer, routed_experts=hit))
        self._math.begin(x_SD, rows, weights_SK)
        walk = _LayerExperts(self._tiers.layouts[layer], rows, self._math, sum_SD, mlp)
        residents = self._tiers.resident_experts(layer)
        resident_blobs = self._tiers.resident_blobs(layer)
        place = 0
        while place < len(rows.experts):
            expert, is_hit = rows.experts[place], bool(rows.counts[place])
            if expert in residents:
                stop = place + 1
                while stop - place < self._math.max_batch and stop < len(rows.experts):
                    if rows.experts[stop] not in residents:
                        break
                    stop += 1
                batch = rows.experts[place:stop]
                num_hit = sum(1 for count in rows.counts[place:stop] if count)
                if num_hit:
                    self._counters.add(resident_hit=num_hit * walk.layout.num_bytes)
                    first = residents[batch[0]]
                    walk.use(batch, resident_blobs[first : first + len(batch)])
                place = stop
                self._advance()
                continue
            if (is_hit or policy == "stream-all") and place not in walk.used:
                upload = self._stager.acquire(layer, expert)
                with self._clock.during("wait_experts"):
                    self._compute.wait(upload.ready)
                walk.use(upload.experts, upload.blobs)
                self._stager.release(upload, self._compute)
            place += 1
            self._advance()


class _LayerExperts:
    """The experts of one layer on their way through the math."""

    def __init__(
        self,
        layout: BlobLayout,
        rows: RoutedRows,
        math: ExpertMath,
        sum_SD: torch.Tensor,
        mlp: ExpertMlp,
    ) -> None:
        self.layout = layout
        self.used: set[int] = set()  # places
        self._rows = rows
        self._math = math
        self._sum_SD = sum_SD
        self._mlp = mlp
        self._place_of = {expert: place for place, expert in enumerate(rows.experts)}
        self._begins = [0]
        for count in rows.counts:
            self._begins.append(self._begins[-1] + count)

    def use(self, experts: Sequence[int], blobs: torch.Tensor) -> None:
        """Multiply the rows of experts, whose bytes are blobs, uint8 [experts, stride]."""
        for start in range(0, len(experts), self._math.max_batch):
            batch = experts[start : start + self._math.max_batch]
            places = [self._place_of[expert] for expert in batch]
            self.used.update(places)
            first, last = self._begins[places[0]], self._begins[places[-1] + 1]
            if first == last:
                continue
            self._math.add(
                self.layout,
                ExpertBatch(
                    experts=batch,
                    blobs=blobs[start : start + len(batch)],
                    places=places,
                    first=first,
                    last=last,
                ),
                sum_SD=self._sum_SD,
                mlp=self._mlp,
            )


def add_routing_counts(table: Mapping[int, memoryview], layer: int, counts: Sequence[int]) -> None:
    """Add the rows of each expert to layer's row of the shared routing table (uint32 words)."""
    row = table[layer]
    for expert, count in enumerate(counts):
        if count:
            row[expert] = (row[expert] + count) & 0xFFFFFFFF
