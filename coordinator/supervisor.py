"""Pure: is a stage stuck? Judged by the progress words of its status page and a deadline per phase.

A stage may wait for the coordinator or for a neighbour for as long as it likes; in every other phase its
progress counter must move. The phase, layer and super-chunk of the last reading name the place.
"""

from dataclasses import dataclass

from strata_coord.ipc.status_page import StagePhase, StatusSnapshot

PATIENT_PHASES = frozenset(
    {
        StagePhase.READY,
        StagePhase.WAITING_SUPER_CHUNK,
        StagePhase.WAITING_ROWS,
        StagePhase.WAITING_SLOT,
    }
)


@dataclass(slots=True, kw_only=True)
class _Reading:
    progress: int
    since_s: float


class StageWatch:
    """Remembers when each stage last got anywhere."""

    def __init__(self, *, hang_s: float, start_s: float) -> None:
        """hang_s: longest time without progress; start_s: the same for a stage that has not reported yet."""
        self._hang_s = hang_s
        self._start_s = start_s
        self._readings: dict[int, _Reading] = {}

    def started(self, stage: int, now_s: float) -> None:
        """A worker's process was started."""
        self._readings[stage] = _Reading(progress=-1, since_s=now_s)

    def check(self, stage: int, snapshot: StatusSnapshot | None, now_s: float) -> str | None:
        """One line that says where the stage hangs and for how long, or None."""
        reading = self._readings[stage]
        if snapshot is not None and (
            snapshot.progress != reading.progress or snapshot.phase in PATIENT_PHASES
        ):
            reading.progress, reading.since_s = snapshot.progress, now_s
            return None
        limit_s = self._start_s if snapshot is None else self._hang_s
        silent_s = now_s - reading.since_s
        if silent_s <= limit_s:
            return None
        return f"made no progress for {silent_s:.0f} s {place(snapshot)}"


def place(snapshot: StatusSnapshot | None) -> str:
    """Where a stage was, in words: phase, and layer and super-chunk if it had them."""
    if snapshot is None:
        return "before its first report"
    words = f"while {snapshot.phase.name.lower().replace('_', ' ')}"
    if snapshot.layer >= 0:
        words += f", layer {snapshot.layer}"
    if snapshot.super_chunk >= 0:
        words += f", super-chunk {snapshot.super_chunk}"
    return words
