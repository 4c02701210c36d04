import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from strata_coord.ipc import endpoints
from strata_coord.ipc.endpoints import (
    NamedLock,
    RuntimeDirectory,
    control_endpoint,
    link_endpoint,
    new_launch_id,
)
from strata_coord.ipc.errors import AlreadyRunningError, InvariantError, PlanError

# Holds what it is told until its stdin closes, or dies with everything in place.
HOLDER = """
import os, sys
from strata_coord.ipc.endpoints import NamedLock, RuntimeDirectory
kind, name = sys.argv[1:3]
with (RuntimeDirectory if kind == "launch" else NamedLock)(name):
    print("held", flush=True)
    if sys.stdin.read() == "die":
        os.kill(os.getpid(), 9)
"""


@pytest.fixture(autouse=True)
def runtime(monkeypatch):
    """A short private runtime directory: socket paths are limited to 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="sc") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder)


def start_holder(kind: str, name: str) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", HOLDER, kind, name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_the_folder_is_private_and_gone_afterwards(runtime):
    launch = new_launch_id()
    with RuntimeDirectory(launch) as folder:
        found = folder.path.stat()
        assert stat.S_IMODE(found.st_mode) == 0o700
        assert folder.path.parent == runtime / "strata-coord"
        (folder.path / "control").touch()
        path = folder.path
    assert not path.exists()
    assert list((runtime / "strata-coord").iterdir()) == []


def test_socket_names_differ_by_link_and_generation():
    folder = Path("/run/x")
    names = {link_endpoint(folder, link, generation) for link in range(3) for generation in range(3)}
    assert len(names | {control_endpoint(folder)}) == 10


def test_a_path_that_libzmq_would_refuse_names_both_numbers():
    folder = Path("/" + "d" * 99)
    assert control_endpoint(Path("/" + "d" * 98)).startswith("ipc:///d")
    with pytest.raises(PlanError, match="108 bytes, at most 107"):
        control_endpoint(folder)


def test_the_folder_of_a_dead_launch_is_swept_and_a_living_one_is_not(runtime):
    dead, living = new_launch_id(), new_launch_id()
    with start_holder("launch", living) as other:
        with start_holder("launch", dead) as process:
            process.communicate("die", timeout=20)
        assert process.returncode == -9
        assert (runtime / "strata-coord" / dead[:12]).is_dir()
        assert endpoints.sweep() == 1
        assert [entry.name for entry in (runtime / "strata-coord").iterdir()] == [living[:12]]
        other.communicate("", timeout=20)
    assert endpoints.sweep() == 0


def test_a_start_sweeps_by_itself(runtime):
    dead = runtime / "strata-coord" / "0123456789ab"
    dead.mkdir(parents=True, mode=0o700)
    dead.parent.chmod(0o700)
    (dead / "link-0-1").touch()
    with RuntimeDirectory(new_launch_id()):
        assert not dead.exists()


def test_a_sweep_does_not_follow_links_out_of_the_folder(runtime, tmp_path):
    (tmp_path / "keep").touch()
    base = endpoints.base_directory()
    (base / "0123456789ab").symlink_to(tmp_path)
    endpoints.sweep()
    assert (tmp_path / "keep").exists()


def test_a_named_lock_has_one_holder_and_names_it(runtime):
    with start_holder("name", "device-0") as process:
        with pytest.raises(
            AlreadyRunningError, match=f"device-0 is in use by another launch .pid {process.pid}"
        ):
            NamedLock("device-0").__enter__()
        with NamedLock("device-1"):
            pass
        process.communicate("", timeout=20)
    with NamedLock("device-0"):
        assert (runtime / "strata-coord" / "device-0.lock").exists()
    assert list((runtime / "strata-coord").iterdir()) == []


def test_a_lock_ends_with_its_process():
    with start_holder("name", "device-0") as process:
        process.communicate("die", timeout=20)
    with NamedLock("device-0"):
        pass


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "A", "x" * 65])
def test_a_name_cannot_leave_the_folder(name):
    with pytest.raises(InvariantError, match=f"{len(name)} characters"):
        NamedLock(name)


def test_a_folder_that_others_may_enter_is_refused(runtime):
    (runtime / "strata-coord").mkdir(mode=0o700)
    (runtime / "strata-coord").chmod(0o750)
    with pytest.raises(PlanError, match=r"mode 0750, owner .* and mode 0700 are needed"):
        RuntimeDirectory(new_launch_id()).__enter__()


def test_a_link_in_place_of_the_folder_is_refused(runtime, tmp_path):
    (runtime / "strata-coord").symlink_to(tmp_path)
    with pytest.raises(PlanError, match="a link or a file"):
        endpoints.base_directory()


def test_without_a_runtime_directory_one_of_the_user_is_made(monkeypatch, runtime):
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr(tempfile, "tempdir", str(runtime))
    assert endpoints.base_directory() == runtime / f"strata-coord-{os.getuid()}"
