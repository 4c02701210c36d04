"""Carries the engine's state to the display a few times a second, and collects the spans of a trace.

A thread of its own: a display that is slow to take its input delays nothing but the display.
"""

import json
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from strata_coord.coordinator.chrome_trace import StageTrace, chrome_trace
from strata_coord.coordinator.dashboard import Display
from strata_coord.coordinator.engine import Engine

if TYPE_CHECKING:
    from strata_coord.ipc.status_page import StatusEvent

PERIOD_S = 0.2


class DisplayPump:
    """Runs from start to stop. With trace set, writes the file at the end."""

    def __init__(self, engine: Engine, display: Display, *, trace: Path | None) -> None:
        self._engine = engine
        self._display = display
        self._trace = trace
        self._spans: dict[int, list[StatusEvent]] = {}
        self._seen: dict[int, int] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="display-pump", daemon=True)

    def start(self) -> None:
        """Begin to show."""
        self._display.start()
        self._thread.start()

    def stop(self) -> None:
        """Show the last state, write the trace. Call it before the engine is closed."""
        self._stopping.set()
        self._thread.join(timeout=5.0)
        self._pump()
        self._display.stop()
        if self._trace is not None:
            self._write_trace(self._trace)

    def _run(self) -> None:
        while not self._stopping.wait(PERIOD_S):
            self._pump()

    def _pump(self) -> None:
        self._display.update(self._engine.dashboard_state())
        if self._trace is not None:
            for stage, (seen, spans) in enumerate(self._engine.new_spans(self._seen)):
                self._seen[stage] = seen
                self._spans.setdefault(stage, []).extend(spans)

    def _write_trace(self, path: Path) -> None:
        titles = {
            view.facts.stage: (
                f"stage {view.facts.stage}: layers {view.facts.first_layer}-{view.facts.last_layer - 1} "
                f"on {view.facts.device}"
            )
            for view in self._engine.dashboard_state().stages
        }
        trace = chrome_trace(
            [
                StageTrace(stage=stage, title=titles[stage], spans=spans)
                for stage, spans in sorted(self._spans.items())
            ]
        )
        try:
            path.write_text(json.dumps(trace), encoding="utf-8")
        except OSError as error:
            self._display.note(f"the trace could not be written: {path}: {error.strerror}")
