"""Predicted times: of one stage for one super-chunk, and of a prompt through all stages. Pure.

A stage overlaps uploads, file reads and arithmetic, so a super-chunk takes the longest of the three, plus the
first layer's upload, which nothing hides. The pipeline is a max-plus recursion over stages and super-chunks
with a bounded ring of hand-off slots between neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from strata_coord.coordinator.plan import StageCosts

__all__ = ["StageTime", "expected_distinct_share", "makespan_s", "stage_time"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTime:
    """Seconds of one stage for one super-chunk, by what takes them."""

    upload_s: float
    drive_s: float
    compute_s: float
    exposed_s: float  # the first layer's upload

    @property
    def total_s(self) -> float:
        """The longest of the three, and what nothing hides."""
        return max(self.upload_s, self.drive_s, self.compute_s) + self.exposed_s


def expected_distinct_share(rows: int, *, num_experts: int, experts_per_token: int) -> float:
    """Return the share of a layer's experts that rows are expected to hit, were routing uniform."""
    return 1.0 - (1.0 - experts_per_token / num_experts) ** rows


def stage_time(
    costs: StageCosts,
    *,
    rows: int,
    first_position: int,
    sub_chunk_tokens: int,
    streamed_share: float,
    touched_share: float,
    with_head: bool,
) -> StageTime:
    """Return the time of one stage for one super-chunk of a prompt.

    Args:
        costs: Of the stage.
        rows: Of the super-chunk.
        first_position: Tokens of the prompt before it, which its rows attend to.
        sub_chunk_tokens: c.
        streamed_share: Of the non-resident experts that are uploaded.
        touched_share: Of all experts that rows are routed to, and that are expanded.
        with_head: Whether the super-chunk ends in a sampled token.
    """
    bytes_up = (costs.arena_bytes + costs.file_bytes) * streamed_share
    upload_s = bytes_up / costs.copy_bytes_per_s
    drive_s = costs.file_bytes * streamed_share / costs.drive_bytes_per_s
    pairs = rows * first_position + rows * (rows + 1) / 2
    flops = rows * (costs.dense_flops_per_row + costs.expert_flops_per_row)
    expanded = costs.dense_expanded_bytes + costs.expert_expanded_bytes * touched_share
    if with_head:
        flops += costs.head_flops
        expanded += costs.head_expanded_bytes
    num_sub_chunks = -(-rows // sub_chunk_tokens)
    compute_s = (
        flops / costs.flops_per_s
        + pairs * costs.attention_flops_per_pair / costs.attention_flops_per_s
        + expanded / costs.expand_bytes_per_s
        + costs.num_layers * num_sub_chunks * costs.call_s
    )
    exposed_s = max(upload_s, drive_s) / costs.num_layers
    return StageTime(upload_s=upload_s, drive_s=drive_s, compute_s=compute_s, exposed_s=exposed_s)


def makespan_s(
    times: Sequence[Sequence[float]], hand_offs: Sequence[float], *, ring_super_chunks: int
) -> float:
    """Return when the last stage finishes the last super-chunk.

    A stage has one buffer for rows and the receiver copies them out of the ring. So a stage may begin
    super-chunk n + 1 when all rows of n lie in the ring: when the receiver has copied out what filled those
    slots before or, where the ring holds less than one super-chunk, when the receiver takes the rows.

    Args:
        times: times[s][n], seconds of stage s for super-chunk n.
        hand_offs: hand_offs[n], seconds of copying the rows of n into the ring, or out of it.
        ring_super_chunks: Whole super-chunks that the slots of a link hold; 0 where they hold less than one.
    """
    num_stages, num_chunks = len(times), len(hand_offs)
    ring = ring_super_chunks
    rows_free = [0.0] * num_stages  # when a stage's row buffer takes the next super-chunk
    released = [[0.0] * num_chunks for _ in range(num_stages)]  # when a stage has copied n out of its ring
    finish = 0.0
    for n in range(num_chunks):
        arrival = 0.0
        for stage in range(num_stages):
            start = max(rows_free[stage], arrival)
            copied = start + (hand_offs[n] if stage and ring else 0.0)
            released[stage][n] = copied
            finish = copied + times[stage][n]
            if stage + 1 == num_stages:
                rows_free[stage] = finish
                break
            gate = rows_free[stage + 1] if ring == 0 else 0.0
            if 0 < ring <= n:
                gate = released[stage + 1][n - ring]
            arrival = max(finish, gate) + hand_offs[n]
            rows_free[stage] = arrival
    return finish
