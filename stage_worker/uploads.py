"""Pure: which experts a pass uploads, in which order.

Both policies upload experts in ascending order. Where they are multiplied one by one, resident ones take
their place in between, and the sum of a row is the same whatever is resident; where a device multiplies
batches, residents go first.
"""

from collections.abc import Iterator, Sequence

from strata_coord.stage_worker.residency import Residency


def order_of_use(residency: Residency, *, layer: int, num_experts: int) -> tuple[int, ...]:
    """All experts of a layer with residents first: batches of neighbours then have no gap between them."""
    streamed = residency.streamed(layer, range(num_experts))
    absent = set(streamed)
    return (*(expert for expert in range(num_experts) if expert not in absent), *streamed)


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
