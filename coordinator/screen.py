"""What a launch shows on stderr, in its log file and in its trace, while the engine works.

Carries the engine's state to the displays a few times a second from a thread of its own: a display that is
slow to take its input delays nothing but the display. A live display has the terminal from show() to hide();
in between, nothing else may print there.
"""

import json
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from strata_coord.coordinator.chrome_trace import StageTrace, chrome_trace
from strata_coord.coordinator.dashboard import Display, DisplayMode, choose_mode, make_display
from strata_coord.coordinator.plain_log import PlainLog
from strata_coord.coordinator.printable import printable
from strata_coord.ipc.errors import ConfigError

if TYPE_CHECKING:
    from strata_coord.coordinator.config import LogConfig
    from strata_coord.coordinator.engine import Engine
    from strata_coord.coordinator.launch_options import LaunchOptions
    from strata_coord.ipc.status_page import StatusEvent

PERIOD_S = 0.2
STOP_S = 5.0  # longest wait for a display that is busy with a slow terminal


class Screen:
    """The displays of one launch."""

    def __init__(self, options: "LaunchOptions") -> None:
        self._options = options
        self._mode: DisplayMode = choose_mode(
            sys.stderr, os.environ, dashboard=options.dashboard, log_format=options.log_format
        )
        self._is_quiet = False
        self._plain = make_display("plain", sys.stderr)
        self._file: PlainLog | None = None
        self._file_stream: TextIO | None = None
        self._engine: Engine | None = None
        self._shown: Display | None = None
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._spans: dict[int, list[StatusEvent]] = {}
        self._seen: dict[int, int] = {}

    def configure(self, log: "LogConfig") -> None:
        """Take over the configuration's [log] table; options of the command line go before it.

        Raises:
            ConfigError: the log file cannot be written.
        """
        log_format = self._options.log_format or log.format
        self._mode = choose_mode(
            sys.stderr, os.environ, dashboard=self._options.dashboard, log_format=log_format
        )
        self._is_quiet = log.level in {"warning", "error"}
        if self._mode == "json":
            self._plain = make_display("json", sys.stderr)
        if log.file is not None:
            try:
                self._file_stream = Path(log.file).open("a", encoding="utf-8")  # noqa: SIM115  closed by close
            except OSError as error:
                message = f"log.file: {log.file}: {error.strerror}"
                raise ConfigError(message) from None
            self._file = PlainLog(self._file_stream, as_json=log_format == "json")

    @property
    def holds_terminal(self) -> bool:
        """Whether text on stdout would fall into the live display."""
        return self._mode == "live" and sys.stdout.isatty()

    def note(self, text: str) -> None:
        """Show a line of news once."""
        if self._file is not None:
            self._file.note(text)
        if self._shown is not None:
            self._shown.note(text)
        elif not self._is_quiet:
            self._plain.note(text)

    def warn(self, text: str) -> None:
        """Show a line that matters at any log level."""
        if self._shown is not None or not self._is_quiet:
            self.note(text)
        else:
            print(f"strata-coord: {printable(text, limit=2000)}", file=sys.stderr)

    def show(self, engine: "Engine") -> None:
        """Begin to show what the engine does."""
        self._engine = engine
        if not self._is_quiet:
            self._shown = make_display("live", sys.stderr) if self._mode == "live" else self._plain
            self._shown.start()
        self._stopping.clear()
        self._thread = threading.Thread(target=self._run, name="screen", daemon=True)
        self._thread.start()

    def refresh(self) -> None:
        """Show the state of this moment now, so that a line does not come after what it announces."""
        if self._thread is not None and self._mode != "live":
            self._pump()

    def hide(self) -> None:
        """Show the last state with the per-stage timings and give the terminal back. May be called twice."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._stopping.set()
        thread.join(STOP_S)
        self._pump()
        shown, self._shown = self._shown, None
        for display in (shown, self._file):
            if display is not None:
                display.stop()

    def close(self) -> None:
        """Write the trace and close the log file. Call it before the engine is closed."""
        self.hide()
        if self._options.trace is not None:
            self._write_trace(self._options.trace)
        if self._file_stream is not None:
            self._file_stream.close()
            self._file = self._file_stream = None

    def _run(self) -> None:
        while not self._stopping.wait(PERIOD_S):
            self._pump()

    def _pump(self) -> None:
        if self._engine is None:
            return
        state = self._engine.dashboard_state()
        for display in (self._shown, self._file):
            if display is not None:
                display.update(state)
        if self._options.trace is not None:
            for stage, (seen, spans) in enumerate(self._engine.new_spans(self._seen)):
                self._seen[stage] = seen
                self._spans.setdefault(stage, []).extend(spans)

    def _write_trace(self, path: Path) -> None:
        if self._engine is None:
            return
        facts = [view.facts for view in self._engine.dashboard_state().stages]
        trace = chrome_trace(
            [
                StageTrace(
                    stage=stage,
                    title=(
                        f"stage {stage}: layers {facts[stage].first_layer}-{facts[stage].last_layer - 1} "
                        f"on {facts[stage].device}"
                    ),
                    spans=spans,
                )
                for stage, spans in sorted(self._spans.items())
            ]
        )
        try:
            path.write_text(json.dumps(trace), encoding="utf-8")
        except OSError as error:
            self.warn(f"the trace could not be written: {path}: {error.strerror}")
