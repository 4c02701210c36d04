import io
import json
import threading
from dataclasses import replace

import pytest
from rich.cells import cell_len
from rich.console import Console

from strata_coord.coordinator.dashboard import LiveDashboard, choose_mode, make_display
from strata_coord.coordinator.dashboard_view import dashboard_lines, timing_lines
from strata_coord.coordinator.telemetry import DashboardState, RequestView, Shares, StageFacts, StageView

READING = RequestView(
    prompt_tokens=4096, num_super_chunks=2, mode="layer-major", predicted_ttft_s=24.6, tokens_read=2048,
    super_chunks_read=1, elapsed_s=12.3,
)  # fmt: skip
ANSWERING = replace(
    READING, tokens_read=4096, super_chunks_read=2, generated_tokens=9, ttft_s=20.0, elapsed_s=22.0,
    answer_tail="\u6f22\u5b57 and \x1b[31mred\x07 text " * 20,
)  # fmt: skip


def view(stage: int) -> StageView:
    return StageView(
        facts=StageFacts(
            stage=stage, device="cuda:1 \x1b[2J[bold]", numa_node=stage, binding="numactl",
            first_layer=24 * stage,
            last_layer=24 * stage + 24, device_bytes_planned=64 << 20,
        ),
        phase="waiting-experts", super_chunk=1, layer=17, now=Shares(busy=0.9, wait_rows=0.1),
    )  # fmt: skip


def state(request: RequestView | None, *, num_stages: int = 2) -> DashboardState:
    return DashboardState(
        stages=tuple(map(view, range(num_stages))),
        request=request,
        bound_by="compute of stage 0",
        notes=("stage 1 was restarted: \x1b]0;title\x07", "n" * 5000, "\u202e reversed"),
    )


SIZES = [(20, 5), (1, 1), (40, 8), (80, 24), (81, 3), (132, 43), (400, 100)]


@pytest.mark.parametrize("request_view", [None, READING, ANSWERING, replace(ANSWERING, ended=True)])
@pytest.mark.parametrize(("width", "height"), SIZES)
def test_no_frame_is_larger_than_the_terminal(
    request_view: RequestView | None, width: int, height: int
) -> None:
    for num_stages in (0, 1, 8):
        lines = dashboard_lines(state(request_view, num_stages=num_stages), width=width, height=height)
        assert 1 <= len(lines) <= height
        assert all(cell_len(line.plain) <= width for line in lines)
        assert all(line.plain.isprintable() for line in lines)


def test_the_smallest_terminal_still_shows_progress_and_phase() -> None:
    lines = [line.plain for line in dashboard_lines(state(READING), width=20, height=5)]
    assert lines[0].startswith("reading 2,048/4,096")
    assert lines[1].startswith("bound by")
    assert "waiting-ex" in lines[3]


def test_nothing_waits_for_a_prompt_while_stages_load() -> None:
    loading = replace(state(None), stages=(view(0), replace(view(1), phase="loading")))
    assert dashboard_lines(loading, width=80, height=24)[0].plain == "starting the stages"
    assert dashboard_lines(state(None), width=80, height=24)[0].plain == "waiting for a prompt"


def test_the_estimate_is_never_shorter_than_what_has_passed() -> None:
    for request, expected in (
        (READING, "12.3 of about 24.6 s"),
        (replace(READING, elapsed_s=20.0), "20.0 of about 40.0 s"),
        (replace(READING, tokens_read=0, elapsed_s=30.0), "30.0 of about 30.0 s"),
    ):
        assert expected in dashboard_lines(state(request), width=200, height=24)[0].plain


def test_an_answer_that_has_ended_is_left_to_stdout() -> None:
    for ended in (False, True):
        lines = [
            line.plain
            for line in dashboard_lines(state(replace(ANSWERING, ended=ended)), width=80, height=24)
        ]
        assert any("red" in line for line in lines) is not ended


def test_a_wide_terminal_shows_every_column() -> None:
    title = dashboard_lines(state(READING), width=400, height=100)[2].plain
    assert title.split()[0] == "stage"
    assert all(word in title for word in ("binding", "hand-off", "memory MiB", "read MiB"))


def test_columns_keep_their_place_when_a_phase_changes() -> None:
    titles = set()
    for phase in ("experts", "waiting-experts", "waiting-super-chunk"):
        stages = tuple(replace(view(stage), phase=phase) for stage in range(2))
        titles.add(dashboard_lines(replace(state(READING), stages=stages), width=200, height=40)[2].plain)
    assert len(titles) == 1


def test_markup_in_names_is_text() -> None:
    lines = [line.plain for line in dashboard_lines(state(READING), width=400, height=100)]
    assert any("cuda:1 \\x1b[2J[bold]" in line for line in lines)


def test_zero_token_prompt_and_rates_do_not_divide_by_zero() -> None:
    empty = RequestView(prompt_tokens=0, num_super_chunks=0, mode="layer-major", predicted_ttft_s=0.0)
    assert dashboard_lines(state(empty), width=80, height=24)


@pytest.mark.parametrize(("width", "height"), SIZES[:1] + SIZES[2:])
def test_the_live_view_draws_at_every_size(width: int, height: int) -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=width, height=height, color_system=None)
    live = LiveDashboard(stream, console=console)
    live.start()
    live.update(state(READING))
    live.note("news \x1b[0m")
    live.update(state(ANSWERING))
    live.stop()
    live.stop()
    output = stream.getvalue()
    assert "\\x1b[0m" in output.replace("\n", "")
    assert "busy" in output.replace("\n", "")
    assert "dashboard" not in [thread.name for thread in threading.enumerate()]


class GoneTerminal(io.StringIO):
    """A stream whose reader has left."""

    def write(self, text: str, /) -> int:
        raise BrokenPipeError

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("mode", ["live", "plain", "json"])
def test_a_terminal_that_went_away_does_not_stop_the_work(mode: str) -> None:
    display = make_display(mode, GoneTerminal())  # type: ignore[arg-type]  # parametrised strings
    display.start()
    display.update(state(READING))
    display.note("nobody reads this")
    display.update(state(ANSWERING))
    display.stop()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "environment", "dashboard", "log_format", "mode"),
    [
        (Terminal(), {"TERM": "xterm"}, True, None, "live"),
        (Terminal(), {"TERM": "xterm"}, False, None, "plain"),
        (Terminal(), {"TERM": "dumb"}, True, None, "plain"),
        (Terminal(), {}, True, None, "plain"),
        (io.StringIO(), {"TERM": "xterm", "FORCE_COLOR": "1"}, True, None, "plain"),
        (Terminal(), {"TERM": "xterm"}, True, "json", "json"),
    ],
)
def test_the_dashboard_needs_a_real_terminal(
    stream: io.StringIO, environment: dict[str, str], dashboard: bool, log_format: str | None, mode: str
) -> None:
    assert choose_mode(stream, environment, dashboard=dashboard, log_format=log_format) == mode


def test_the_plain_log_has_one_line_per_super_chunk() -> None:
    stream = io.StringIO()
    display = make_display("plain", stream)
    display.start()
    loading = replace(state(None), stages=tuple(replace(view(stage), phase="loading") for stage in range(2)))
    display.update(loading)
    for _ in range(3):
        display.update(state(READING))
    display.update(state(ANSWERING))
    display.note("a \x1b[31mnote")
    display.stop()
    display.stop()
    lines = stream.getvalue().splitlines()
    assert [line.split(":")[0].split(" (")[0] for line in lines] == [
        "stage 0 ready", "stage 1 ready", "read 2,048 of 4,096 tokens", "read 4,096 of 4,096 tokens",
        "a \\x1b[31mnote", "first token after 20.0 s, 9 tokens after 22.0 s", "stage 0", "stage 1",
    ]  # fmt: skip
    assert all(line.isprintable() for line in lines)


def test_two_prompts_of_the_same_length_both_show() -> None:
    stream = io.StringIO()
    display = make_display("plain", stream)
    one = replace(READING, num_super_chunks=1, super_chunks_read=1)
    fresh = replace(one, super_chunks_read=0, tokens_read=0)
    for request in (fresh, one, fresh, one):
        display.update(state(request, num_stages=0))
    assert stream.getvalue().count("\n") == 2


def test_json_lines_are_json() -> None:
    stream = io.StringIO()
    display = make_display("json", stream)
    display.update(state(READING))
    display.note('say "hi"\n')
    display.stop()
    events = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [event["event"] for event in events] == [
        "stage_ready", "stage_ready", "super_chunk", "note", "stage_timing", "stage_timing",
    ]  # fmt: skip
    assert events[2]["tokens_read"] == 2048


def test_timings_name_every_stage() -> None:
    lines = timing_lines(state(READING))
    assert [line.split(" (")[0] for line in lines] == ["stage 0", "stage 1"]
    assert all("waited" in line and "experts moved" in line for line in lines)
