"""Pure: which experts a pass uploads, in which order.

Both policies go through the experts in ascending order, which is also the order in which their outputs are
added: the sum of a row is then the same whatever is resident.
"""

from collections.abc import Iterator, Sequence

from strata_coord.stage_worker.residency import Residency


def stream_all_order(
    residency: Residency, *, layers: Sequence[int], num_experts: int
) -> Iterator[tuple[int, int]]:
    """Every non-resident (layer, expert) of the pass, known before any router has run."""
    for layer in layers:
        for expert in residency.streamed(layer, range(num_experts)):
            yield layer, expert


def routed_only_order(
    residency: Residency, *, layer: int, routed_experts: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """The non-resident experts of one layer that at least one row was routed to (ascending)."""
    for expert in residency.streamed(layer, routed_experts):
        yield layer, expert
