"""Real launches for tests: configurations, the command as a subprocess, and an Engine in this process."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil
from planning_fakes import fake_rig

from strata_coord.coordinator.config import load_config
from strata_coord.coordinator.engine import Engine, Generation, Supervision
from strata_coord.coordinator.model_index import ModelIndex, load_model_index
from strata_coord.coordinator.plan import LaunchPlan
from strata_coord.coordinator.planner import plan_launch
from strata_coord.coordinator.prompt_planner import plan_prompt
from strata_coord.coordinator.requests import (
    GenerationEvent,
    GenerationFinished,
    GenerationRequest,
    TokenGenerated,
)
from strata_coord.ipc.messages import SamplingSettings

WAIT_S = 50.0  # longest wait for anything; a machine that is busy with other tests is slow, not broken


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = WAIT_S) -> None:
    """Poll until condition holds."""
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    while not condition():
        if time.monotonic() > deadline:
            message = f"{what} did not happen within {timeout_s:.0f} s"
            raise AssertionError(message)
        pause.wait(0.01)


def write_config(
    folder: Path,
    model: Path | str,
    *,
    boundaries: Sequence[int] = (1,),
    budgets_mib: Sequence[int] = (64, 64),
    prefill: str = "sub_chunk_tokens = 64\nreserved_tokens = 256",
    context_tokens: int = 512,
    rest: str = "",
) -> Path:
    """Write a CPU configuration of len(boundaries) + 1 stages."""
    stages = "".join(
        f'[[stage]]\ndevice = "cpu"\nnuma_node = "off"\ncpu_threads = 1\nvram_budget_mib = {budget}\n'
        for budget in budgets_mib
    )
    path = folder / "launch.toml"
    path.write_text(
        f"[model]\npath = {json.dumps(str(model))}\ncontext_tokens = {context_tokens}\n"
        f"[split]\nboundaries = {list(boundaries)}\n{stages}[prefill]\n{prefill}\n"
        f'[kv]\ndtype = "fp32"\n{rest}\n'
    )
    return path


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-P", "-m", "strata_coord.coordinator", *map(str, arguments)]


@dataclass(frozen=True)
class Ran:
    """What a command left."""

    code: int
    stdout: str
    stderr: str

    @property
    def report(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.stdout)
        return value

    @property
    def errors(self) -> list[str]:
        """The lines on stderr that report an error."""
        assert "Traceback" not in self.stderr, self.stderr
        return [line for line in self.stderr.splitlines() if line.startswith("strata-coord: ")]


def run(*arguments: str | Path, stdin: bytes = b"", timeout_s: float = WAIT_S) -> Ran:
    """Run strata-coord to its end."""
    done = subprocess.run(
        command(*arguments), input=stdin, capture_output=True, timeout=timeout_s, check=False
    )
    return Ran(code=done.returncode, stdout=done.stdout.decode(), stderr=done.stderr.decode())


@dataclass
class Running:
    """A launch in progress, its output collected as it comes."""

    process: subprocess.Popen[bytes]
    stdout: bytearray = field(default_factory=bytearray)
    stderr: bytearray = field(default_factory=bytearray)
    readers: list[threading.Thread] = field(default_factory=list)
    workers: list[psutil.Process] = field(default_factory=list)

    def wait_workers(self, count: int) -> list[psutil.Process]:
        """The stage workers, in the order of their stages, once they are there."""

        def found() -> bool:
            assert self.process.poll() is None, self.stderr.decode()
            self.workers = stage_workers(self.process.pid)
            return len(self.workers) == count

        wait_until(found, f"{count} workers")
        return self.workers

    def wait_for(self, text: str, *, stream: str = "stderr") -> None:
        """Wait for text in the output."""
        collected: bytearray = getattr(self, stream)

        def found() -> bool:
            if text.encode() in collected:
                return True
            assert self.process.poll() is None, f"ended without {text!r}: {self.stderr.decode()}"
            return False

        wait_until(found, f"{text!r} on {stream}")

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def finish(self, timeout_s: float = WAIT_S) -> Ran:
        code = self.process.wait(timeout_s)
        for reader in self.readers:
            reader.join(timeout_s)
        return Ran(code=code, stdout=self.stdout.decode(), stderr=self.stderr.decode())


@contextlib.contextmanager
def running(*arguments: str | Path, stdin: int | None = subprocess.DEVNULL) -> Iterator[Running]:
    """A launch in a session of its own, ended for certain with all its workers."""
    process = subprocess.Popen(
        command(*arguments),
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    launch = Running(process)
    for pipe, target in ((process.stdout, launch.stdout), (process.stderr, launch.stderr)):
        reader = threading.Thread(target=_collect, args=(pipe, target))
        reader.start()
        launch.readers.append(reader)
    try:
        yield launch
    finally:
        for worker in {*launch.workers, *stage_workers(process.pid)}:
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.kill()
        process.kill()
        process.wait()
        for reader in launch.readers:
            reader.join()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def _collect(pipe: IO[bytes], target: bytearray) -> None:
    while data := os.read(pipe.fileno(), 65536):
        target += data


def stage_workers(pid: int) -> list[psutil.Process]:
    """The workers that are children of a coordinator, in the order of their stages."""
    found: list[tuple[int, psutil.Process]] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children():
            with contextlib.suppress(psutil.NoSuchProcess, ValueError):
                words = child.cmdline()
                found.append((int(words[words.index("--stage") + 1]), child))
    return [child for _, child in sorted(found, key=lambda entry: entry[0])]


def assert_all_gone(workers: Sequence[psutil.Process], timeout_s: float) -> None:
    wait_until(lambda: not any(_is_alive(worker) for worker in workers), "the end of all workers", timeout_s)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# --- in this process --------------------------------------------------------------------------------------


@dataclass
class Rig:
    """A running engine with what its tests need to know."""

    engine: Engine
    plan: LaunchPlan
    model: ModelIndex

    def submit(
        self,
        ids: Sequence[int],
        *,
        max_tokens: int = 8,
        mode: str = "auto",
        logits: Path | None = None,
        sampling: SamplingSettings | None = None,
    ) -> Generation:
        request = GenerationRequest(
            prompt_ids=tuple(ids),
            max_tokens=max_tokens,
            sampling=sampling or SamplingSettings(),
            logits_path=logits,
        )
        return self.engine.submit(request, plan_prompt(self.plan, len(ids), mode=mode))  # type: ignore[arg-type]


@dataclass
class Answer:
    """All that a generation said."""

    events: list[GenerationEvent]

    @property
    def tokens(self) -> list[int]:
        return [event.token for event in self.events if isinstance(event, TokenGenerated)]

    @property
    def end(self) -> GenerationFinished:
        last = self.events[-1]
        assert isinstance(last, GenerationFinished)
        return last


def answer(generation: Generation) -> Answer:
    return Answer(list(generation.events()))


def rig(config: Path, *, hang_s: float = 60.0, debug_delay_s: float = 0.0) -> Rig:
    """An engine that is not started."""
    checked = load_config(config)
    model = load_model_index(checked.model.path)
    plan = plan_launch(model, fake_rig(), checked)
    engine = Engine(
        plan=plan, model=model, supervision=Supervision(hang_s=hang_s), debug_delay_s=debug_delay_s
    )
    return Rig(engine=engine, plan=plan, model=model)


@contextlib.contextmanager
def started(config: Path, **settings: float) -> Iterator[Rig]:
    """A started engine, closed for certain."""
    made = rig(config, **settings)
    try:
        made.engine.start()
        yield made
    finally:
        made.engine.close(grace_s=0.5)
