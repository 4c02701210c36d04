"""Faults of the field that need real processes, as tests: see docs/field-cases.md for what happened."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from launch_rig import Rig, answer, run, started, write_config
from oracle.export import export_gguf
from oracle.fixtures import TinyCase
from oracle.tiny import tiny_model

from strata_coord.ipc.errors import RequestError

BAD_TOKEN = 3  # occurs in no prompt here
LAYER = 1


@pytest.fixture(scope="module")
def bad_model(tiny_qwen3moe_f32: TinyCase, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with infinity in one token's embedding."""
    model: Any = tiny_model("qwen3moe")
    model.model.embed_tokens.weight[BAD_TOKEN, 3] = float("inf")
    path = tmp_path_factory.mktemp("bad") / "bad.gguf"
    export_gguf(model, path)
    assert BAD_TOKEN not in prompt(tiny_qwen3moe_f32)
    return path


def prompt(case: TinyCase) -> list[int]:
    ids: list[int] = case.ids.tolist()
    return ids


@pytest.fixture(scope="module")
def two_stages(bad_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """One hand-off slot of one sub-chunk: every row waits for its turn."""
    config = write_config(
        tmp_path_factory.mktemp("field"),
        bad_model,
        prefill="sub_chunk_tokens = 64\nreserved_tokens = 256\nslot_rows = 64\nhand_off_slots = 1",
        rest="max_sequences = 4\npool_tokens = 2048",
    )
    with started(config) as rig:
        yield rig


def test_fc_001_one_hand_off_slot_loses_and_mixes_no_row(
    two_stages: Rig, tiny_qwen3moe_f32: TinyCase, tmp_path: Path
) -> None:
    assert two_stages.plan.hand_off_slots == 1
    reference = tiny_qwen3moe_f32.reference.logits.double().numpy()
    for number, mode in enumerate(("chunk-major", "layer-major", "chunk-major")):
        path = tmp_path / f"{number}.npy"
        running = [two_stages.submit(prompt(tiny_qwen3moe_f32), max_tokens=1, mode=mode, logits=path)]
        running += [two_stages.submit(prompt(tiny_qwen3moe_f32)[:90], max_tokens=3) for _ in range(2)]
        for generation in running:
            assert answer(generation).end.reason == "length"
        error = np.linalg.norm(np.load(path) - reference) / np.linalg.norm(reference)
        assert error <= 1e-5


def test_fc_002_a_short_prompt_leaves_nothing_that_alters_a_long_one(
    two_stages: Rig, tiny_qwen3moe_f32: TinyCase
) -> None:
    ids = prompt(tiny_qwen3moe_f32)
    answers = [answer(two_stages.submit(ids[:count], max_tokens=4)) for count in (200, 3, 200, 3, 200)]
    assert answers[0].tokens == answers[2].tokens == answers[4].tokens
    assert answers[1].tokens == answers[3].tokens
    progress = [[type(event).__name__ for event in heard.events] for heard in answers]
    assert progress[0] == progress[2] == progress[4]  # read in the same parts each time


def test_fc_012_infinity_ends_its_own_request_and_poisons_no_other(
    two_stages: Rig, tiny_qwen3moe_f32: TinyCase
) -> None:
    ids = prompt(tiny_qwen3moe_f32)
    alone = answer(two_stages.submit(ids[:30], max_tokens=6)).tokens
    poisoned = [*ids[:20], BAD_TOKEN, *ids[20:40]]
    running = [
        two_stages.submit(tokens, max_tokens=6)
        for tokens in (ids[:30], poisoned, ids[:30], poisoned, ids[:30])
    ]
    heard = [answer(generation) for generation in running]
    for number in (1, 3):
        assert heard[number].end.reason == "error"
        assert heard[number].end.error.startswith("stage 0, embedding, super-chunk ")
        assert heard[number].end.error.endswith(": values are not finite")
        assert heard[number].tokens == []
    assert [heard[number].tokens for number in (0, 2, 4)] == [alone] * 3
    assert answer(two_stages.submit(ids[:30], max_tokens=6)).tokens == alone


@pytest.mark.parametrize(
    ("count", "max_tokens", "is_taken"), [(512, 0, True), (512, 1, False), (511, 1, True), (511, 2, False)]
)
def test_fc_025_prompt_and_answer_fill_the_context_and_no_more(
    two_stages: Rig, tiny_qwen3moe_f32: TinyCase, count: int, max_tokens: int, is_taken: object
) -> None:
    ids = (prompt(tiny_qwen3moe_f32) * 3)[:count]
    if is_taken:
        heard = answer(two_stages.submit(ids, max_tokens=max_tokens))
        assert (heard.end.reason, len(heard.tokens)) == ("length", max_tokens)
        return
    with pytest.raises(RequestError, match=r"need room for 513, but model\.context_tokens is 512"):
        two_stages.submit(ids, max_tokens=max_tokens)


@pytest.mark.parametrize("token", [-1, 512, 1 << 31, 1 << 63])
def test_fc_029_an_id_that_is_no_token_reaches_no_stage(two_stages: Rig, token: int) -> None:
    with pytest.raises(RequestError, match=rf"token id {token} is outside 0 to 511"):
        two_stages.submit([1, token, 2])
    assert answer(two_stages.submit([1, 511, 2], max_tokens=1)).end.reason == "length"


def test_fc_027_no_token_at_all_reaches_no_stage(two_stages: Rig) -> None:
    from strata_coord.coordinator.prompt_planner import plan_prompt
    from strata_coord.coordinator.requests import GenerationRequest

    with pytest.raises(RequestError, match="the prompt is empty"):
        two_stages.engine.submit(
            GenerationRequest(prompt_ids=(), max_tokens=1), plan_prompt(two_stages.plan, 1)
        )


def test_fc_036_hundreds_of_requests_later_the_probe_and_the_counts_are_the_same(
    two_stages: Rig, tiny_qwen3moe_f32: TinyCase
) -> None:
    """A short form of the soak: what grows by a piece per request shows after 200."""
    ids = prompt(tiny_qwen3moe_f32)
    processes = [psutil.Process(), *(psutil.Process(stage.pid) for stage in two_stages.engine.stages())]

    def counts() -> list[tuple[int, int]]:
        return [(process.num_fds(), process.num_threads()) for process in processes]

    def batch(number: int) -> None:
        running = [two_stages.submit(ids[at : at + 5], max_tokens=2) for at in range(number, number + 50)]
        assert all(answer(generation).end.reason == "length" for generation in running)

    probe = answer(two_stages.submit(ids[:40], max_tokens=5)).tokens
    batch(0)
    before, resident = counts(), [process.memory_info().rss for process in processes]
    for number in range(4):
        batch(number)
        assert answer(two_stages.submit(ids[:40], max_tokens=5)).tokens == probe
    assert counts() == before
    for process, had in zip(processes, resident, strict=True):
        assert process.memory_info().rss - had < 16 << 20


def test_fc_012_the_command_names_stage_layer_and_super_chunk_and_exits_with_1(tmp_path: Path) -> None:
    model: Any = tiny_model("qwen3moe")
    model.model.layers[LAYER].mlp.experts.down_proj[:, 0, 0] = float("nan")
    export_gguf(model, tmp_path / "bad.gguf")
    config = write_config(tmp_path, tmp_path / "bad.gguf")
    (tmp_path / "ids.json").write_text(json.dumps([1, 2, 3]))
    done = run("launch", config, "--prompt-ids", tmp_path / "ids.json", "--max-tokens", "3")
    assert done.code == 1
    assert done.errors == [f"strata-coord: stage 1, layer {LAYER}, super-chunk 0: values are not finite"]
    assert done.stdout == ""
