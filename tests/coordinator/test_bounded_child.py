import os
import sys
import time

import pytest

from strata_coord.coordinator.bounded_child import ChildAnswer, run_bounded


def ask(code: str, question: bytes = b"", *, seconds: float = 20.0, limit: int = 1 << 20) -> ChildAnswer:
    command = (sys.executable, "-S", "-c", code)
    return run_bounded(command, question, environment={}, seconds=seconds, max_answer_bytes=limit)


def test_the_answer_comes_back_whole() -> None:
    code = "import sys; sys.stdout.buffer.write(sys.stdin.buffer.read()[::-1])"
    question = bytes(range(256)) * 2_000
    assert ask(code, question) == ChildAnswer(question[::-1])


def test_a_child_that_never_answers_is_killed_in_time() -> None:
    start = time.monotonic()
    answer = ask("import time; time.sleep(60)", seconds=0.5)
    assert answer.problem == "it took longer than 0.5 s"
    assert time.monotonic() - start < 5


def test_a_child_that_closes_its_output_and_stays_is_killed_in_time() -> None:
    answer = ask("import os, time; os.close(1); time.sleep(60)", seconds=0.7)
    assert answer.problem == "it took longer than 0.7 s"


def test_a_child_that_ignores_its_question_and_floods_is_killed() -> None:
    code = "import sys\nwhile True: sys.stdout.write('x' * 65536)"
    answer = ask(code, b"q" * (1 << 20), limit=1 << 16)
    assert answer == ChildAnswer(b"", "it wrote more than 65536 bytes")


def test_a_child_that_exits_without_reading_is_reported() -> None:
    assert ask("raise SystemExit(3)", b"q" * (1 << 20)).problem == "its process ended with status 3"


@pytest.mark.parametrize(("number", "name"), [(9, "SIGKILL"), (11, "SIGSEGV")])
def test_a_signal_is_named(number: int, name: str) -> None:
    assert ask(f"import os; os.kill(os.getpid(), {number})").problem == f"its process was ended by {name}"


def test_processor_time_is_named() -> None:
    assert ask("import os; os.kill(os.getpid(), 24)").problem == "it used more processor time than it may"


def test_no_process_and_no_descriptor_is_left() -> None:
    before = os.listdir("/proc/self/fd")
    answer = ask("import os; print(os.getpid(), flush=True); import time; time.sleep(60)", seconds=0.7)
    assert not os.path.exists(f"/proc/{int(answer.answer)}")
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_program_that_is_not_there_is_an_os_error() -> None:
    with pytest.raises(FileNotFoundError):
        run_bounded(("/nonexistent",), b"", environment={}, seconds=1, max_answer_bytes=1)
