"""Pure: is a stage stuck? Judged by the progress words of its status page and a deadline per phase.

A stage may wait for the coordinator or for a neighbour for as long as it likes; in every other phase its
progress counter must move. A stage that was stopped while it waited looks patient for ever, so the stream as
a whole must move too while anything is in flight. The phase, layer and super-chunk of the last reading name
the place.
"""

from collections.abc import Sequence
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
        """Build it.

        hang_s: longest time without progress; start_s: the same for a stage that has not reported yet, and
        the longest time that links may take.
        """
        self._hang_s = hang_s
        self._start_s = start_s
        self._readings: dict[int, _Reading] = {}
        self._stream: _Reading | None = None  # all stages together; None: nothing is in flight
        self._linking_since_s: float | None = None

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
        limit_s = self._hang_s
        if snapshot is None or snapshot.phase is StagePhase.STARTING:
            limit_s = max(self._start_s, limit_s)  # libraries load for a minute from a cold drive
        silent_s = now_s - reading.since_s
        return None if silent_s <= limit_s else _silence(silent_s, snapshot)

    def linking(self, now_s: float) -> None:
        """All stages were told to link."""
        self._linking_since_s = now_s

    def check_links(self, unlinked: Sequence[int], now_s: float) -> str | None:
        """One line about the stages whose links should be up and are not, or None.

        A stage that was stopped when it was loaded is patient by its phase.
        """
        if not unlinked or self._linking_since_s is None:
            return None
        silent_s = now_s - self._linking_since_s
        if silent_s <= self._start_s:
            return None
        stages = ", ".join(map(str, unlinked))
        return f"stage {stages} did not link within {silent_s:.0f} s, the limit is {self._start_s:.0f} s"

    def check_stream(
        self, waited_for: int | None, snapshots: Sequence[StatusSnapshot | None], now_s: float
    ) -> tuple[int, str] | None:
        """The stage that holds everybody up, and one line about it, or None while anything moves.

        waited_for: the first stage that has not finished the oldest super-chunk in flight; None: nothing is.
        """
        progress = sum(snapshot.progress for snapshot in snapshots if snapshot is not None)
        stream = self._stream
        if waited_for is None or stream is None or stream.progress != progress:
            self._stream = None if waited_for is None else _Reading(progress=progress, since_s=now_s)
            return None
        silent_s = now_s - stream.since_s
        if silent_s <= self._hang_s:
            return None
        stage = waited_for
        while stage + 1 < len(snapshots) and _waits_for_slot(snapshots[stage]):
            stage += 1  # its slots come from the stage after it
        return stage, _silence(silent_s, snapshots[stage])


def _waits_for_slot(snapshot: StatusSnapshot | None) -> bool:
    return snapshot is not None and snapshot.phase is StagePhase.WAITING_SLOT


def _silence(silent_s: float, snapshot: StatusSnapshot | None) -> str:
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
