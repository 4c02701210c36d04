"""The display where nobody looks at a terminal: one line per super-chunk, or one JSON object per line."""

import json
from typing import TextIO

from strata_coord.coordinator.dashboard_view import answer_line, has_timings, timing_lines
from strata_coord.coordinator.launch_report import JsonObject
from strata_coord.coordinator.printable import printable
from strata_coord.coordinator.telemetry import DashboardState, RequestView


class PlainLog:
    """Prints progress as it happens. A stream that is gone or full is given up silently."""

    def __init__(self, stream: TextIO, *, as_json: bool) -> None:
        """Write to stream, which stays the caller's."""
        self._stream = stream
        self._as_json = as_json
        self._state: DashboardState | None = None
        self._shown = (0, 0)  # super-chunks of how many in the request that was shown last
        self._phases: dict[int, str] = {}
        self._is_open = True

    def start(self) -> None:
        """Nothing to prepare."""

    def update(self, state: DashboardState) -> None:
        """Print a line if a stage became ready or a super-chunk came through since the last call."""
        self._state = state
        for view in state.stages:
            before = self._phases.get(view.facts.stage, "starting")
            if before in {"starting", "loading"} and view.phase not in {"starting", "loading"}:
                facts = view.facts
                self._line(
                    "stage_ready",
                    f"stage {facts.stage} ready: layers {facts.first_layer}-{facts.last_layer - 1} "
                    f"on {facts.device}, binding {facts.binding}",
                    {"stage": facts.stage, "device": facts.device, "binding": facts.binding},
                )
            self._phases[view.facts.stage] = view.phase
        if state.request is not None:
            self._progress(state.request, state.bound_by)

    def note(self, text: str) -> None:
        """Print a line of news."""
        self._line("note", text, {"text": text})

    def stop(self) -> None:
        """Print the pace of the last request and its per-stage timings, once."""
        state, self._state = self._state, None
        if state is None or not has_timings(state):
            return
        request = state.request
        if request is not None and request.ttft_s is not None:
            self._line(
                "answer",
                answer_line(request),
                {
                    "prompt_tokens": request.prompt_tokens,
                    "generated_tokens": request.generated_tokens,
                    "ttft_s": round(request.ttft_s, 3),
                    "total_s": round(request.elapsed_s, 3),
                    "decode_tokens_per_s": round(request.decode_tokens_per_s, 3),
                },
            )
        for view, line in zip(state.stages, timing_lines(state), strict=True):
            clock = view.clock
            times: JsonObject = {
                "stage": view.facts.stage,
                "busy_s": (clock.busy_ns + clock.hand_off_ns) / 1e9,
                "wait_rows_s": clock.wait_rows_ns / 1e9,
                "wait_experts_s": clock.wait_experts_ns / 1e9,
                "wait_slot_s": clock.wait_slot_ns / 1e9,
            }
            self._line("stage_timing", line, times)

    def _progress(self, request: RequestView, bound: str) -> None:
        now = (request.super_chunks_read, request.num_super_chunks)
        if now == self._shown:
            return
        self._shown = now
        if request.super_chunks_read == 0:
            return
        text = (
            f"read {request.tokens_read:,} of {request.prompt_tokens:,} tokens "
            f"(super-chunk {request.super_chunks_read} of {request.num_super_chunks}) "
            f"in {request.elapsed_s:.1f} s, {request.read_tokens_per_s:.0f} tokens/s"
        )
        if not request.ended:  # afterwards the reading says nothing about the prompt
            text += f"; bound by {bound}"
        self._line(
            "super_chunk",
            text,
            {
                "tokens_read": request.tokens_read,
                "prompt_tokens": request.prompt_tokens,
                "super_chunk": request.super_chunks_read,
                "num_super_chunks": request.num_super_chunks,
                "elapsed_s": round(request.elapsed_s, 3),
                "bound_by": bound,
            },
        )

    def _line(self, event: str, text: str, fields: JsonObject) -> None:
        if not self._is_open:
            return
        line = json.dumps({"event": event, **fields}) if self._as_json else printable(text, limit=2000)
        try:
            print(line, file=self._stream, flush=True)
        except (OSError, ValueError):  # a closed pipe, a full disk, a closed stream: the work goes on
            self._is_open = False
