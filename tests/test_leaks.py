import os
import subprocess
import sys
import threading
from pathlib import Path

import leaks


def test_nothing_is_reported_where_nothing_is_left(tmp_path: Path) -> None:
    before = leaks.take_snapshot()
    thread = threading.Thread(target=lambda: None)
    thread.start()
    (tmp_path / "x").write_text("x")
    subprocess.run([sys.executable, "-c", "pass"], check=True, timeout=30)
    assert leaks.leaked_since(before) == []


def test_an_open_file_and_a_pipe_are_named(tmp_path: Path) -> None:
    before = leaks.take_snapshot()
    path = tmp_path / "left open"
    with path.open("w"):
        ends = os.pipe()
        try:
            found = leaks.leaked_since(before)
        finally:
            for end in ends:
                os.close(end)
    assert found == [f"1 x {path}", "2 x pipe"]


def test_a_child_and_a_thread_are_named() -> None:
    before = leaks.take_snapshot()
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="left running")
    thread.start()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        found = leaks.leaked_since(before, settle_s=0.05)
    finally:
        stop.set()
        thread.join()
        child.communicate(timeout=30)
    assert any(line.startswith(f"process {child.pid}:") for line in found)
    assert "thread left running" in found
    assert any("pipe" in line for line in found)


def test_a_child_that_nobody_waited_for_is_named() -> None:
    before = leaks.take_snapshot()
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, but still a zombie
    found = leaks.leaked_since(before, settle_s=0.05)
    child.wait()
    assert [line.split(":")[0] for line in found] == [f"process {child.pid}"]


def test_a_leaking_test_fails_and_a_marked_one_passes(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import os, pytest\n"
        "kept = []\n"
        "def test_leaks(tmp_path): kept.append(open(tmp_path / 'x', 'w'))\n"
        "@pytest.mark.leaves('closed by nobody, on purpose')\n"
        "def test_may(tmp_path): kept.append(open(tmp_path / 'y', 'w'))\n"
        "@pytest.mark.leaves\n"
        "def test_says_no_reason(): pass\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "-q", "-p", "leaks", "-p", "no:cacheprovider", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(Path(leaks.__file__).parent)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert "2 passed, 2 errors" in done.stdout, done.stdout
    assert "left behind: 1 x " in done.stdout
    assert "needs a reason" in done.stdout
