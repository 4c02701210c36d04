"""Workers that die or hang: the requests end with one line, and nothing is left behind."""

import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import zmq
from launch_rig import Rig, answer, assert_all_gone, rig, stage_workers, started, wait_until, write_config
from oracle.fixtures import TinyCase

from strata_coord.coordinator.requests import PromptProgress, TokenGenerated
from strata_coord.ipc.errors import StageError, StageLostError, StageTimeoutError


@pytest.fixture(scope="module")
def config(tiny_qwen3moe_f32: TinyCase, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("faults"), tiny_qwen3moe_f32.path)


@pytest.fixture(scope="module")
def ids(tiny_qwen3moe_f32: TinyCase) -> list[int]:
    values: list[int] = tiny_qwen3moe_f32.ids.tolist()
    return values


def own_descriptors() -> Counter[str]:
    """What this process holds that an engine may have left, event descriptors included."""
    found: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if "memfd:" in target or "[pidfd]" in target or "[eventfd]" in target:
            found[target] += 1
    return found


@pytest.fixture(scope="module", autouse=True)
def shared_context() -> None:
    """Let the context that all sockets of this process share make its own event descriptors first."""
    zmq.Context.instance().socket(zmq.PAIR).close()


@pytest.fixture(autouse=True)
def no_worker_or_descriptor_is_left() -> Iterator[None]:
    before = own_descriptors()
    yield
    assert stage_workers(os.getpid()) == []
    # A thread of zmq's own closes what closed sockets held, a moment later.
    wait_until(lambda: own_descriptors() <= before, "the closing of all descriptors", 5)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def one_line(error: BaseException) -> str:
    text = str(error)
    assert "\n" not in text
    assert "/tmp" not in text
    return text


@pytest.mark.parametrize("stage", [0, 1])
def test_a_worker_killed_while_it_loads(config: Path, stage: int) -> None:
    made = rig(config)
    failures: list[BaseException] = []

    def start() -> None:
        try:
            made.engine.start()
        except StageError as error:
            failures.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    wait_until(lambda: len(stage_workers(os.getpid())) == 2, "two workers")
    workers = stage_workers(os.getpid())
    workers[stage].kill()
    thread.join(20)
    assert not thread.is_alive()
    (failure,) = failures
    assert isinstance(failure, StageLostError)
    assert one_line(failure).startswith(f"stage {stage} was killed by SIGKILL")
    assert_all_gone(workers, 2)
    assert made.engine.close() == []


@pytest.mark.parametrize(("stage", "moment"), [(0, "prefill"), (1, "decode")])
def test_a_worker_killed_at_work_fails_every_request_and_names_itself(
    config: Path, ids: list[int], stage: int, moment: str
) -> None:
    with started(config, debug_delay_s=0.1) as made:
        workers = [psutil.Process(identity.pid) for identity in made.engine.stages()]
        running = [made.submit(ids, max_tokens=200, mode="chunk-major") for _ in range(2)]
        wanted = PromptProgress if moment == "prefill" else TokenGenerated
        events = running[0].events()
        while not isinstance(next(events), wanted):
            pass
        kill(workers[stage].pid)
        ends = [list(events)[-1], answer(running[1]).end]
        assert [end.reason for end in ends] == ["error", "error"]  # type: ignore[union-attr]
        text = ends[0].error  # type: ignore[union-attr]
        assert text.startswith(f"stage {stage} was killed by SIGKILL while ")
        assert text == ends[1].error  # type: ignore[union-attr]
        assert_all_gone(workers, 5)
        with pytest.raises(StageLostError, match=f"stage {stage} was killed"):
            made.submit(ids)
        assert isinstance(made.engine.failure, StageLostError)
    # Closing twice, and asking for what is gone, does no harm.
    assert made.engine.close() == []
    assert made.engine.new_spans({}) == []
    assert len(made.engine.dashboard_state().stages) == 2


@pytest.mark.parametrize("is_idle", [False, True])
def test_a_stopped_worker_is_noticed_also_if_it_was_stopped_while_it_waited(
    config: Path, ids: list[int], is_idle: bool
) -> None:
    with started(config, hang_s=1.0, debug_delay_s=0.1) as made:
        workers = [psutil.Process(identity.pid) for identity in made.engine.stages()]
        answer(made.submit(ids[:5], max_tokens=1))
        if is_idle:
            workers[1].suspend()
        generation = made.submit(ids, max_tokens=300, mode="chunk-major")
        events = generation.events()
        if not is_idle:
            next(events)
            workers[1].suspend()
        end = list(events)[-1]
        assert end.reason == "error"  # type: ignore[union-attr]
        assert end.error.startswith("stage 1 made no progress for ")  # type: ignore[union-attr]
        assert isinstance(made.engine.failure, StageTimeoutError)
        assert_all_gone(workers, 10)


def test_closing_in_the_middle_of_an_answer_ends_it_as_cancelled(config: Path, ids: list[int]) -> None:
    with started(config, debug_delay_s=0.1) as made:
        generation = made.submit(ids, max_tokens=300)
        waiting = made.submit(ids, max_tokens=300)
        events = generation.events()
        next(events)
        made.engine.close(grace_s=2.0)
        assert list(events)[-1].reason == "cancelled"  # type: ignore[union-attr]
        assert answer(waiting).end.reason == "cancelled"
        generation.cancel()
        with pytest.raises(StageError, match="closed"):
            made.submit(ids)


def test_an_engine_that_never_started_can_be_closed(config: Path) -> None:
    made: Rig = rig(config)
    assert made.engine.close() == []


def test_a_worker_that_ends_before_it_says_hello(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from strata_coord.coordinator import launcher

    def command(*, stage: int, run_id: str, numa_node: int) -> list[str]:
        del run_id, numa_node
        return ["sh", "-c", f"echo no library for stage {stage}; exit 3", "sh"]

    monkeypatch.setattr(launcher, "worker_command", command)
    made = rig(config)
    with pytest.raises(StageLostError) as lost:
        made.engine.start()
    text = one_line(lost.value)
    assert text.startswith("stage ")
    assert "exited with status 3 before its first report: no library for stage" in text


def test_a_worker_that_cannot_be_started(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from strata_coord.coordinator import launcher

    def command(**_: object) -> list[str]:
        return ["/nonexistent/python"]

    monkeypatch.setattr(launcher, "worker_command", command)
    made = rig(config)
    with pytest.raises(StageLostError, match="stage 0 could not be started: No such file or directory"):
        made.engine.start()
