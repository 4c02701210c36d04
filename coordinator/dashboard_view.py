"""Draws a DashboardState as lines of rich text for a terminal of any size, 20 x 5 and up.

A line is never wider than asked and there are never more lines than asked: what does not fit is left out by
rank, so that progress and the bottleneck are the last to go. Text from outside is escaped and never markup.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from strata_coord.coordinator.printable import printable
from strata_coord.coordinator.telemetry import DashboardState, RequestView, StageView

if TYPE_CHECKING:
    from rich.text import Text

NS_PER_S: Final = 1e9
MIB: Final = 2**20
GAP: Final = "  "
ALWAYS_KEPT: Final = 2  # stage and phase, cut at the edge if they must be
LONGEST_TEXT: Final = 1000  # characters of a name or note; no terminal shows more of it on a line


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of the stage table. rank: the lower, the longer it stays when the terminal narrows."""

    title: str
    rank: int
    cell: Callable[[StageView, RequestView | None], str]
    is_number: bool = True
    min_width: int = 0  # so that the table does not jump when the value changes


def _layers(view: StageView) -> str:
    return f"{view.facts.first_layer}-{view.facts.last_layer - 1}"


def _chunk(view: StageView, request: RequestView | None) -> str:
    return f"{view.super_chunk}/{request.num_super_chunks}" if request and view.super_chunk else "-"


def _layer(view: StageView) -> str:
    return str(view.layer) if view.layer >= 0 else "-"


def _memory(view: StageView) -> str:
    return f"{view.device_bytes_used / MIB:.0f}/{view.facts.device_bytes_planned / MIB:.0f}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _phase(view: StageView) -> str:
    return "idle" if view.phase == "waiting-super-chunk" else view.phase


def _node(view: StageView) -> str:
    return str(view.facts.numa_node) if view.facts.numa_node >= 0 else "-"


COLUMNS: Final = (
    Column(title="stage", rank=0, cell=lambda view, _: str(view.facts.stage)),
    Column(title="device", rank=6, cell=lambda view, _: view.facts.device, is_number=False),
    Column(title="node", rank=9, cell=lambda view, _: _node(view)),
    Column(title="binding", rank=11, cell=lambda view, _: view.facts.binding, is_number=False),
    Column(title="layers", rank=5, cell=lambda view, _: _layers(view)),
    Column(title="phase", rank=1, cell=lambda view, _: _phase(view), is_number=False, min_width=15),
    Column(title="chunk", rank=3, cell=_chunk),
    Column(title="layer", rank=4, cell=lambda view, _: _layer(view)),
    Column(title="busy", rank=2, cell=lambda view, _: _percent(view.now.busy)),
    Column(title="rows", rank=8, cell=lambda view, _: _percent(view.now.wait_rows)),
    Column(title="experts", rank=7, cell=lambda view, _: _percent(view.now.wait_experts)),
    Column(title="slot", rank=10, cell=lambda view, _: _percent(view.now.wait_slot)),
    Column(title="hand-off", rank=13, cell=lambda view, _: _percent(view.now.hand_off)),
    Column(title="memory MiB", rank=12, cell=lambda view, _: _memory(view)),
    Column(title="moved MiB", rank=14, cell=lambda view, _: f"{view.counters.ram_to_device / MIB:.0f}"),
    Column(title="read MiB", rank=15, cell=lambda view, _: f"{view.counters.file_read / MIB:.0f}"),
)


def dashboard_lines(state: DashboardState, *, width: int, height: int) -> "list[Text]":
    """Return at most height lines of at most width columns."""
    from rich.text import Text

    is_loading = any(view.phase in {"starting", "loading"} for view in state.stages)
    request_line = progress_line(state.request, width=width)
    progress = Text("starting the stages" if is_loading else request_line, style="bold")
    bound = Text(f"bound by: {state.bound_by}")
    table = [
        Text(line, style="dim" if number == 0 else "")
        for number, line in enumerate(table_lines(state, width))
    ]
    notes = [Text(f"> {printable(note, limit=LONGEST_TEXT)}", style="yellow") for note in state.notes]
    tail = []
    # Only while it grows: the whole answer follows on stdout.
    if state.request is not None and state.request.answer_tail and not state.request.ended:
        tail = [
            Text(
                _last_that_fits(printable(state.request.answer_tail, limit=LONGEST_TEXT), width),
                style="green",
            )
        ]
    lines = [progress]
    room = max(height, 1) - 1
    for block in ([bound], table, tail, notes):  # in the order of what a reader can do without last
        kept = block[:room] if block is not notes else notes[len(notes) - min(room, len(notes)) :]
        lines.extend(kept)
        room -= len(kept)
    for line in lines:
        line.no_wrap = True
        line.truncate(max(width, 1), overflow="ellipsis")
    return lines


def progress_line(request: RequestView | None, *, width: int) -> str:
    """Return what the request is doing, with a bar where there is room for one."""
    if request is None:
        return "waiting for a prompt"
    if request.ttft_s is not None:
        state = "done" if request.ended else "answering"
        decode = f"{request.decode_tokens_per_s:.1f} tokens/s"
        read = f"{request.prompt_tokens:,} tokens read in {request.ttft_s:.1f} s"
        return _longest_that_fits([f"{state}: {_tokens(request.generated_tokens)}", decode, read], width)
    done = request.tokens_read / request.prompt_tokens if request.prompt_tokens else 0.0
    at_this_pace_s = request.elapsed_s / done if done else request.elapsed_s
    parts = [
        f"reading {request.tokens_read:,}/{request.prompt_tokens:,}",
        f"{100 * done:.0f} %",
        f"{request.elapsed_s:.1f} of about {max(request.predicted_ttft_s, at_this_pace_s):.1f} s",
        f"{request.read_tokens_per_s:.0f} tokens/s",
        request.mode,
    ]
    line = _longest_that_fits(parts, width)
    bar_width = min(width - len(line) - len(GAP), 40)
    if bar_width < 8:
        return line
    filled = round(done * bar_width)
    return f"{line}{GAP}{'#' * filled}{'.' * (bar_width - filled)}"


def table_lines(state: DashboardState, width: int) -> list[str]:
    """Return the title line and one line per stage, with the columns that fit."""
    rows = [
        [printable(column.cell(view, state.request), limit=40) for column in COLUMNS] for view in state.stages
    ]
    widths = [
        max(len(column.title), column.min_width, *(len(row[number]) for row in rows))
        for number, column in enumerate(COLUMNS)
    ]
    kept: list[int] = []
    used = 0
    for number in sorted(range(len(COLUMNS)), key=lambda number: COLUMNS[number].rank):
        if used + widths[number] > width and len(kept) >= ALWAYS_KEPT:
            break
        kept.append(number)
        used += widths[number] + len(GAP)
    kept.sort()
    lines = [[column.title for column in COLUMNS], *rows]
    return [
        GAP.join(_aligned(line[number], number, widths[number]) for number in kept).rstrip() for line in lines
    ]


def has_timings(state: DashboardState) -> bool:
    """Whether a request got far enough for its timings to say anything."""
    return state.request is not None and state.request.super_chunks_read > 0


def timing_lines(state: DashboardState) -> list[str]:
    """Return the per-stage timings of the request, for the end of a launch."""
    lines = []
    for view in state.stages:
        clock, counters = view.clock, view.counters
        lines.append(
            f"stage {view.facts.stage} ({printable(view.facts.device, limit=40)}, layers {_layers(view)}): "
            f"busy {(clock.busy_ns + clock.hand_off_ns) / NS_PER_S:.2f} s, "
            f"waited {clock.wait_rows_ns / NS_PER_S:.2f} s for rows, "
            f"{clock.wait_experts_ns / NS_PER_S:.2f} s for experts, "
            f"{clock.wait_slot_ns / NS_PER_S:.2f} s for a slot; "
            f"experts moved {counters.ram_to_device / MIB:.1f} MiB, "
            f"resident {counters.resident_hit / MIB:.1f} MiB, "
            f"files {counters.file_read / MIB:.1f} MiB, handed off {counters.handed_off / MIB:.1f} MiB"
        )
    return lines


def answer_line(request: RequestView) -> str:
    """Return when the first token came, and how fast the others followed."""
    line = f"first token after {request.ttft_s or 0.0:.1f} s, "
    line += f"{_tokens(request.generated_tokens)} after {request.elapsed_s:.1f} s"
    if request.decode_tokens_per_s > 0:
        line += f": {request.decode_tokens_per_s:.1f} tokens/s"
    return line


def _tokens(count: int) -> str:
    return f"{count:,} token{'' if count == 1 else 's'}"


def _aligned(text: str, number: int, width: int) -> str:
    return text.rjust(width) if COLUMNS[number].is_number else text.ljust(width)


def _longest_that_fits(parts: list[str], width: int) -> str:
    line = parts[0]
    for part in parts[1:]:
        if len(line) + len(GAP) + len(part) > width:
            break
        line += GAP + part
    return line


def _last_that_fits(text: str, width: int) -> str:
    """Return the end of text, at most width columns wide: the newest words of an answer."""
    from rich.cells import cell_len

    tail = text[-width:] if width > 0 else ""
    while cell_len(tail) > width:
        tail = tail[1:]
    return tail
