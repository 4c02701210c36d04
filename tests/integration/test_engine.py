"""The engine's one interface over real worker processes, several requests at a time."""

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from launch_rig import Answer, Rig, answer, started, wait_until, write_config
from oracle.fixtures import TinyCase

from strata_coord.coordinator.requests import GenerationFinished, PromptProgress, TokenGenerated
from strata_coord.ipc.errors import ConfigError, RequestError
from strata_coord.ipc.messages import SamplingSettings

ANSWER = 10


@pytest.fixture(scope="module")
def two_stages(tiny_qwen3moe_f32: TinyCase, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    config = write_config(
        tmp_path_factory.mktemp("engine"),
        tiny_qwen3moe_f32.path,
        budgets_mib=(8, 13),
        rest="max_sequences = 4\npool_tokens = 2048",
    )
    with started(config) as rig:
        yield rig


@pytest.fixture(scope="module")
def ids(tiny_qwen3moe_f32: TinyCase) -> list[int]:
    values: list[int] = tiny_qwen3moe_f32.ids.tolist()
    return values


@pytest.fixture(scope="module")
def fresh(two_stages: Rig, ids: list[int]) -> list[int]:
    """The whole prompt's answer, read before anything else happened."""
    return answer(two_stages.submit(ids, max_tokens=ANSWER)).tokens


def test_an_answer_is_progress_then_tokens_then_one_end(
    two_stages: Rig, ids: list[int], fresh: list[int]
) -> None:
    heard = answer(two_stages.submit(ids, max_tokens=ANSWER, mode="chunk-major"))
    kinds = [type(event) for event in heard.events]
    assert kinds == [PromptProgress] * 4 + [TokenGenerated] * ANSWER + [GenerationFinished]
    progress = [event.done_tokens for event in heard.events if isinstance(event, PromptProgress)]
    assert progress == [64, 128, 192, 200]
    tokens = [event for event in heard.events if isinstance(event, TokenGenerated)]
    assert [event.position for event in tokens] == list(range(200, 200 + ANSWER))
    assert all(event.logprob <= 0 for event in tokens)
    elapsed = [event.elapsed_s for event in tokens]
    assert elapsed == sorted(elapsed)
    assert heard.end.reason == "length"
    assert heard.tokens == fresh


def test_a_stop_token_ends_the_answer(two_stages: Rig, ids: list[int], fresh: list[int]) -> None:
    from strata_coord.coordinator.prompt_planner import plan_prompt
    from strata_coord.coordinator.requests import GenerationRequest

    stop = fresh[3]
    request = GenerationRequest(prompt_ids=tuple(ids), max_tokens=ANSWER, stop_tokens=frozenset({stop}))
    heard = answer(two_stages.engine.submit(request, plan_prompt(two_stages.plan, len(ids))))
    assert heard.tokens == fresh[: fresh.index(stop) + 1]
    assert heard.end.reason == "stop"


def test_requests_at_the_same_time_get_the_answers_they_get_alone(two_stages: Rig, ids: list[int]) -> None:
    prompts = [ids[:count] for count in (200, 7, 64, 65, 1, 130)]  # more than there are seats
    alone = [answer(two_stages.submit(prompt, max_tokens=ANSWER)).tokens for prompt in prompts]
    together: list[Answer | None] = [None] * len(prompts)

    def ask(number: int) -> None:
        together[number] = answer(two_stages.submit(prompts[number], max_tokens=ANSWER))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    assert [heard.tokens if heard else None for heard in together] == alone


@pytest.mark.parametrize("moment", range(8))
def test_a_prompt_after_a_cancel_is_read_as_if_nothing_had_been(
    two_stages: Rig, ids: list[int], fresh: list[int], moment: int
) -> None:
    """The cancel comes at once, after each super-chunk of the prompt, and after each of some tokens."""
    doomed = two_stages.submit(list(reversed(ids)), max_tokens=300, mode="chunk-major")
    heard = doomed.events()
    events = [next(heard) for _ in range(moment)]
    doomed.cancel()
    events += list(heard)
    assert events[-1] == GenerationFinished(reason="cancelled")
    assert sum(isinstance(event, GenerationFinished) for event in events) == 1
    assert answer(two_stages.submit(ids, max_tokens=ANSWER)).tokens == fresh


def test_a_cancel_beside_a_running_answer_leaves_it_alone(
    two_stages: Rig, ids: list[int], fresh: list[int]
) -> None:
    doomed = two_stages.submit(ids[:100], max_tokens=200)
    kept = two_stages.submit(ids, max_tokens=ANSWER)
    doomed.cancel()
    assert answer(kept).tokens == fresh
    assert answer(doomed).end.reason == "cancelled"
    doomed.cancel()  # after its end: without effect


def test_a_draw_depends_on_seed_and_position_only(two_stages: Rig, ids: list[int], fresh: list[int]) -> None:
    def drawn(seed: int, mode: str = "auto") -> list[int]:
        sampling = SamplingSettings(temperature=1.5, top_p=0.95, seed=seed)
        return answer(two_stages.submit(ids, max_tokens=ANSWER, mode=mode, sampling=sampling)).tokens

    first = drawn(11)
    assert drawn(11, "chunk-major") == first
    assert drawn(12) != first
    assert first != fresh


@pytest.mark.parametrize(
    ("count", "max_tokens", "words"),
    [(200, 313, "513, but model.context_tokens is 512"), (200, 100_000, "100200")],
)
def test_a_request_that_is_too_long_is_refused_in_one_line(
    two_stages: Rig, ids: list[int], count: int, max_tokens: int, words: str
) -> None:
    with pytest.raises(RequestError, match=words) as refused:
        two_stages.submit(ids[:count], max_tokens=max_tokens)
    assert "\n" not in str(refused.value)


def test_the_longest_request_fills_the_context(two_stages: Rig, ids: list[int]) -> None:
    heard = answer(two_stages.submit((ids * 3)[:508], max_tokens=4))
    assert len(heard.tokens) == 4


def test_logits_of_requests_side_by_side_are_the_oracles(
    two_stages: Rig, ids: list[int], tiny_qwen3moe_f32: TinyCase, tmp_path: Path
) -> None:
    paths = [tmp_path / f"{number}.npy" for number in range(3)]
    running = [two_stages.submit(ids, max_tokens=2, logits=path) for path in paths]
    for generation in running:
        assert answer(generation).end.reason == "length"
    reference = tiny_qwen3moe_f32.reference.logits.double().numpy()
    for path in paths:
        error = np.linalg.norm(np.load(path) - reference) / np.linalg.norm(reference)
        assert error <= 1e-5


def test_an_unwritable_logits_file_fails_the_one_request(
    two_stages: Rig, ids: list[int], fresh: list[int]
) -> None:
    with pytest.raises(ConfigError, match=r"/nonexistent/l\.npy: No such file"):
        two_stages.submit(ids, logits=Path("/nonexistent/l.npy"))
    assert answer(two_stages.submit(ids, max_tokens=ANSWER)).tokens == fresh


def test_each_worker_reads_only_its_own_part_of_the_file(two_stages: Rig) -> None:
    num_layers = two_stages.model.geometry.num_layers
    whole = sum(Path(file).stat().st_size for file in two_stages.model.files)
    read = []
    for identity, stage in zip(two_stages.engine.stages(), two_stages.plan.stages, strict=True):
        extents = two_stages.model.stage_tensors(
            stage.first_layer,
            stage.last_layer,
            is_first=stage.first_layer == 0,
            is_last=stage.last_layer == num_layers,
        )
        assert identity.load_file_read <= sum(extent.num_bytes for extent in extents)
        assert psutil.Process(identity.pid).pid == identity.pid
        read.append(identity.load_file_read)
    assert all(count > 0 for count in read)
    assert sum(read) <= whole


def test_workers_run_in_sessions_of_their_own_without_the_coordinators_descriptors(two_stages: Rig) -> None:
    import os

    for identity in two_stages.engine.stages():
        assert os.getsid(identity.pid) == identity.pid
        targets = [
            os.readlink(f"/proc/{identity.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{identity.pid}/fd")
        ]
        assert os.readlink(f"/proc/{identity.pid}/fd/0") == "/dev/null"
        lifelines = [target for target in targets if target.startswith("pipe:")]
        assert len(lifelines) <= 1


def test_slots_of_unequal_ends_keep_no_descriptor_per_request(
    two_stages: Rig, ids: list[int], tmp_path: Path
) -> None:
    pids = [psutil.Process().pid, *(identity.pid for identity in two_stages.engine.stages())]

    def counts() -> list[int]:
        return [psutil.Process(pid).num_fds() for pid in pids]

    answer(two_stages.submit(ids[:10], max_tokens=2, logits=tmp_path / "warm.npy"))
    answer(two_stages.submit(ids[:10], max_tokens=2))
    before = counts()
    for number in range(5):
        answer(two_stages.submit(ids[:10], max_tokens=2, logits=tmp_path / f"{number}.npy"))
    answer(two_stages.submit(ids[:10], max_tokens=2))  # carries the last one's drop
    wait_until(lambda: counts() <= before, "the closing of the logits files", 5)
