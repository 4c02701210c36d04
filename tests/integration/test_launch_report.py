"""The contract of launch --json, through real processes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launch_rig import Ran, run, write_config
from oracle.fixtures import TinyCase

from strata_coord.coordinator.launch_report import plan_summary
from strata_coord.coordinator.plan import launch_plan_from_json
from strata_coord.coordinator.prompt_planner import plan_prompt

MAX_TOKENS = 12

STAGE_KEYS = {
    "stage", "pid", "device", "numa_node", "binding", "route", "first_layer", "last_layer", "busy_s",
    "wait_rows_s", "wait_experts_s", "wait_slot_s", "hand_off_s", "bytes",
}  # fmt: skip
PLAN_KEYS = {
    "mode", "slot_rows", "super_chunk_tokens", "num_super_chunks", "sub_chunk_tokens", "hand_off_slots",
    "boundaries", "reason", "predicted_ttft_s", "candidates",
}  # fmt: skip
TOP_KEYS = {
    "text", "prompt_tokens", "generated_tokens", "finish_reason", "ttft_s", "prefill_tokens_per_s",
    "decode_tokens_per_s", "plan", "expert_bytes", "stages",
}  # fmt: skip
BYTE_KEYS = {"resident_hit", "ram_to_device", "file_read", "rows_spilled", "handed_off"}


class Launches:
    """Launches of one model, each done once."""

    def __init__(self, folder: Path, case: TinyCase) -> None:
        self.folder = folder
        self.case = case
        self.ids = folder / "ids.json"
        self.ids.write_text(json.dumps(case.ids.tolist()))
        # Room for some experts only, so that there are bytes to move.
        self.config = write_config(folder, case.path, budgets_mib=(6, 9))
        self._done: dict[tuple[str, ...], Ran] = {}

    def launch(self, *arguments: str | Path) -> Ran:
        key = tuple(map(str, arguments))
        if key not in self._done:
            self._done[key] = run(
                "launch", self.config, "--prompt-ids", self.ids, "--max-tokens", str(MAX_TOKENS), "--json",
                *arguments,
            )  # fmt: skip
        done = self._done[key]
        assert done.code == 0, done.stderr
        assert done.errors == []
        return done

    def whole(self) -> Ran:
        """One super-chunk, with everything that can be written beside it."""
        return self.launch(
            "--mode", "layer-major", "--logits", self.folder / "l.npy", "--trace", self.folder / "t.json",
            "--log-format", "json",
        )  # fmt: skip

    def cut(self) -> Ran:
        """Super-chunks of 128 rows at most."""
        return self.launch("--set", "prefill.super_chunk_tokens=128", "--mode", "layer-major")

    def chunked(self) -> Ran:
        return self.launch("--mode", "chunk-major")


@pytest.fixture(scope="module")
def launches(tiny_qwen3moe_f32: TinyCase, tmp_path_factory: pytest.TempPathFactory) -> Launches:
    return Launches(tmp_path_factory.mktemp("launches"), tiny_qwen3moe_f32)


def test_every_key_is_there(launches: Launches) -> None:
    report = launches.whole().report
    assert report.keys() >= TOP_KEYS
    assert report["plan"].keys() >= PLAN_KEYS
    for candidate in report["plan"]["candidates"]:
        assert candidate.keys() >= {"mode", "super_chunk_tokens", "predicted_ttft_s", "declined"}
    assert report["expert_bytes"].keys() == {"moved", "once"}
    assert [stage["stage"] for stage in report["stages"]] == [0, 1]
    for stage in report["stages"]:
        assert stage.keys() >= STAGE_KEYS
        assert stage["bytes"].keys() >= BYTE_KEYS


def test_the_numbers_say_what_was_asked(launches: Launches) -> None:
    report = launches.whole().report
    first, second = report["stages"]
    assert report["prompt_tokens"] == 200
    assert report["generated_tokens"] == MAX_TOKENS
    assert report["finish_reason"] == "length"
    assert (first["first_layer"], first["last_layer"]) == (0, 1)
    assert (second["first_layer"], second["last_layer"]) == (1, 3)
    assert (first["route"], second["route"]) == ("host", None)
    assert first["pid"] != second["pid"]
    assert first["bytes"]["handed_off"] == 200 * 256 * 4
    assert second["bytes"]["handed_off"] == 0
    assert report["plan"]["boundaries"] == [1]
    assert report["prefill_tokens_per_s"] == pytest.approx(200 / report["ttft_s"], rel=1e-3)


@pytest.mark.parametrize("kind", ["whole", "cut", "chunked"])
def test_busy_and_waits_are_the_wall_time(launches: Launches, kind: str) -> None:
    report = getattr(launches, kind)().report
    for stage in report["stages"]:
        parts = stage["busy_s"] + stage["wait_rows_s"] + stage["wait_experts_s"] + stage["wait_slot_s"]
        assert parts == pytest.approx(stage["wall_s"], rel=0.02)
        assert 0 < stage["hand_off_s"] <= stage["busy_s"]
    # The first token comes when the last stage is done with the prompt: not before, and on its heels.
    assert 0 <= report["ttft_s"] - report["stages"][-1]["wall_s"] < 2


def test_experts_cross_once_in_one_super_chunk_and_once_per_super_chunk_in_more(launches: Launches) -> None:
    whole, cut, chunked = (launches.whole(), launches.cut(), launches.chunked())
    once = whole.report["expert_bytes"]["once"]
    assert once > 0
    assert whole.report["plan"]["num_super_chunks"] == 1
    assert whole.report["expert_bytes"] == {"moved": once, "once": once}
    assert cut.report["plan"]["num_super_chunks"] == 2
    assert cut.report["expert_bytes"]["moved"] == 2 * cut.report["expert_bytes"]["once"]
    assert chunked.report["plan"]["num_super_chunks"] == 4
    assert chunked.report["expert_bytes"]["once"] == once


@pytest.mark.parametrize(
    ("kind", "mode"), [("whole", "layer-major"), ("cut", "layer-major"), ("chunked", "chunk-major")]
)
def test_the_mode_is_named_by_what_was_done(launches: Launches, kind: str, mode: str) -> None:
    plan = getattr(launches, kind)().report["plan"]
    assert plan["mode"] == mode
    assert (plan["super_chunk_tokens"] == plan["sub_chunk_tokens"]) == (mode == "chunk-major")


def test_the_text_is_the_same_in_every_cut(launches: Launches) -> None:
    texts = {getattr(launches, kind)().report["text"] for kind in ("whole", "cut", "chunked")}
    assert len(texts) == 1
    assert texts != {""}


def test_the_logits_are_the_oracles(launches: Launches) -> None:
    launches.whole()
    logits = np.load(launches.folder / "l.npy")
    reference = launches.case.reference.logits.double().numpy()
    assert logits.dtype == np.float32
    assert logits.shape == reference.shape
    error = np.linalg.norm(logits - reference) / np.linalg.norm(reference)
    assert error <= 1e-5
    assert (logits.argmax(1) == reference.argmax(1)).all()


def test_the_trace_has_spans_of_both_stages(launches: Launches) -> None:
    launches.whole()
    trace: dict[str, Any] = json.loads((launches.folder / "t.json").read_text())
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len({event["pid"] for event in spans}) == 2
    assert all(event["dur"] >= 0 for event in spans)
    ends = [event["ph"] for event in trace["traceEvents"] if event.get("name") == "rows"]
    assert ends.count("s") == ends.count("f") > 0  # arrows from hand-offs to arrivals


def test_stderr_is_one_json_object_a_line_if_asked(launches: Launches) -> None:
    events = [json.loads(line)["event"] for line in launches.whole().stderr.splitlines()]
    assert {"stage_ready", "super_chunk", "stage_timing"} <= set(events)
    assert events.count("stage_timing") == 2


def test_a_saved_plan_is_replayed(launches: Launches) -> None:
    folder = launches.folder / "other"
    folder.mkdir()
    other = write_config(
        folder,
        launches.case.path,
        budgets_mib=(6, 9),
        prefill="sub_chunk_tokens = 64\nreserved_tokens = 256\nsuper_chunk_tokens = 128",
    )
    saved = folder / "plan.json"
    made = run("plan", other, "--out", saved)
    assert made.code == 0, made.stderr
    replayed = launches.launch("--plan", saved, "--mode", "layer-major").report
    plan = launch_plan_from_json(saved.read_text())
    assert replayed["plan"] == plan_summary(plan_prompt(plan, 200, mode="layer-major"))
    assert replayed["plan"]["num_super_chunks"] == 2  # the configuration of this launch would make it 1
    assert replayed["expert_bytes"] == launches.cut().report["expert_bytes"]
