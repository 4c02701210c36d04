"""The displays of a launch on stderr: a live dashboard on a terminal, plain or JSON lines elsewhere.

All have the same four methods. A display never raises because of the terminal (closed, full, tiny) and never
blocks the work: the live one draws in a thread of its own. Answers go to stdout and not through a display; on
one shared terminal, stop the live display before printing there.
"""

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, Literal, Protocol, TextIO

from strata_coord.coordinator.dashboard_view import dashboard_lines, has_timings, timing_lines
from strata_coord.coordinator.plain_log import PlainLog
from strata_coord.coordinator.printable import printable
from strata_coord.coordinator.telemetry import DashboardState

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

FRAMES_PER_S: Final = 5  # fast enough to look alive, slow enough to cost nothing on a busy machine
STOP_S: Final = 2.0  # a terminal that takes no output for longer is given up

DisplayMode = Literal["live", "plain", "json"]


class Display(Protocol):
    """Where a launch shows what it does."""

    def start(self) -> None:
        """Begin to show."""

    def update(self, state: DashboardState) -> None:
        """Show this from now on. Cheap, may be called often and from any one thread."""

    def note(self, text: str) -> None:
        """Show a line of news once."""

    def stop(self) -> None:
        """Show the last state with the per-stage timings, and give the terminal back. May be called twice."""


def choose_mode(
    stream: TextIO, environment: Mapping[str, str], *, dashboard: bool, log_format: str | None
) -> DisplayMode:
    """Return the display that suits the stream: live only on a real terminal that can move its cursor."""
    if log_format == "json":
        return "json"
    can_draw = stream.isatty() and environment.get("TERM", "") not in {"", "dumb"}
    return "live" if dashboard and can_draw else "plain"


def make_display(mode: DisplayMode, stream: TextIO) -> Display:
    """Return a display that writes to stream, not started."""
    if mode == "live":
        return LiveDashboard(stream)
    return PlainLog(stream, as_json=mode == "json")


class LiveDashboard:
    """A rich Live view, drawn by its own thread from the last state it was given."""

    def __init__(self, stream: TextIO, *, console: "Console | None" = None) -> None:
        """Draw on stream, or on a console made elsewhere."""
        from rich.live import Live

        self._console = console or _make_console(stream)
        self._frame = _Frame()
        self._live = Live(
            self._frame,
            console=self._console,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
            vertical_overflow="crop",
        )
        self._has_begun = threading.Event()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Take the terminal and start drawing."""
        if self._thread is not None:
            return
        self._thread = threading.Thread(target=self._draw, name="dashboard", daemon=True)
        self._thread.start()

    def update(self, state: DashboardState) -> None:
        """Draw this state from the next frame on."""
        self._frame.state = state

    def note(self, text: str) -> None:
        """Print a line above the dashboard."""
        from rich.text import Text

        if self._thread is not None:  # a line that meets the first frame would continue its last line
            self._has_begun.wait(STOP_S)
        try:
            self._console.print(Text(printable(text, limit=2000)))
        except (OSError, ValueError):
            self._ended.set()

    def stop(self) -> None:
        """Draw the last frame and the timings, and give the terminal back."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._ended.set()
        thread.join(STOP_S)
        state = self._frame.state
        if state is not None and has_timings(state) and not thread.is_alive():
            for line in timing_lines(state):
                self.note(line)

    def _draw(self) -> None:
        try:
            with self._live:
                self._has_begun.set()
                while not self._ended.wait(1 / FRAMES_PER_S):
                    self._live.refresh()
                self._live.refresh()
        except (OSError, ValueError):  # the terminal is gone, or its stream closed: the work goes on
            self._ended.set()
        finally:
            self._has_begun.set()


def _make_console(stream: TextIO) -> "Console":
    from rich.console import Console

    class PoliteConsole(Console):
        """A console that reports a reader that has left, where rich would end the thread and mute stdout."""

        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    return PoliteConsole(file=stream, highlight=False, markup=False, emoji=False)


class _Frame:
    """What Live draws: the last state, in the size that the terminal has at this moment."""

    def __init__(self) -> None:
        self.state: DashboardState | None = None

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        from rich.text import Text

        width, height = options.max_width, max(console.size.height - 1, 1)  # the cursor has a line of its own
        if self.state is None:
            yield Text("starting", no_wrap=True, overflow="ellipsis")
            return
        yield from dashboard_lines(self.state, width=width, height=height)
