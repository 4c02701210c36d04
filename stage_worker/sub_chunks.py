"""Pure: cuts the rows of a super-chunk into sub-chunks and says which rows belong to which segment."""

from collections.abc import Sequence
from dataclasses import dataclass

from strata_coord.ipc.errors import InvariantError
from strata_coord.ipc.messages import Segment

# The chunked DeltaNet form works in chunks of 64 positions. Cutting there only, every division of a prompt
# into super-chunks and sub-chunks does the same arithmetic on the same rows.
CUT_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The rows of one segment inside a sub-chunk; start and stop count within the sub-chunk."""

    segment: int  # index into the super-chunk's segments
    start: int
    stop: int
    first_position: int
    snapshot: int = 0  # taken of the sequence after these rows, the last of their sub-chunk; 0: none


@dataclass(frozen=True, slots=True, kw_only=True)
class SubChunk:
    """Rows [start, stop) of the super-chunk."""

    start: int
    stop: int
    pieces: tuple[Piece, ...]


def cut_sub_chunks(segments: Sequence[Segment], *, max_rows: int) -> list[SubChunk]:
    """Cut the segments' rows, in order, into sub-chunks of at most max_rows rows.

    A sub-chunk may span segments. A segment is cut only where its position is a multiple of CUT_TOKENS, as
    long as max_rows is one, and where a snapshot is due: there the sub-chunk ends, so that every layer is at
    that position for a moment.

    Raises:
        InvariantError: max_rows is below one.
    """
    if max_rows < 1:
        message = f"a sub-chunk of {max_rows} rows holds nothing"
        raise InvariantError(message)
    cut = CUT_TOKENS if max_rows % CUT_TOKENS == 0 else 1
    chunks: list[SubChunk] = []
    pieces: list[Piece] = []
    start = end = 0
    for index, segment in enumerate(segments):
        position, last = segment.first_position, segment.first_position + segment.count
        due = [(mark.position, mark.snapshot) for mark in segment.snapshots]
        while position < last:
            room = max_rows - (end - start)
            goal = due[0][0] if due else last
            stop = goal if goal - position <= room else (position + room) // cut * cut
            if stop <= position:  # no cut point in the room that is left
                chunks.append(SubChunk(start=start, stop=end, pieces=tuple(pieces)))
                start, pieces = end, []
                continue
            offset = end - start
            snapshot = due.pop(0)[1] if due and stop == goal else 0
            pieces.append(
                Piece(
                    segment=index,
                    start=offset,
                    stop=offset + stop - position,
                    first_position=position,
                    snapshot=snapshot,
                )
            )
            end += stop - position
            position = stop
            if snapshot:
                chunks.append(SubChunk(start=start, stop=end, pieces=tuple(pieces)))
                start, pieces = end, []
    if pieces:
        chunks.append(SubChunk(start=start, stop=end, pieces=tuple(pieces)))
    return chunks
