import json
import os
import resource
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from strata_coord.coordinator import doctor, doctor_checks, launcher
from strata_coord.coordinator.doctor import Check
from strata_coord.kernels import native_dequant


def test_every_check_answers_on_this_machine() -> None:
    checks = doctor.examine(doctor_checks.CHECKS)
    assert [check.name for check in checks] == [name for name, _ in doctor_checks.CHECKS]
    assert [check for check in checks if "the check itself failed" in check.text] == []
    assert all(check.remedy for check in checks if check.status != "ok")


def test_a_failed_check_is_exit_1_and_a_warning_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = Check(name="a", status="ok", text="fine")
    odd = Check(name="b", status="warn", text="odd", remedy="do this")
    bad = Check(name="c", status="fail", text="bad \x1b[2J", remedy="do that")
    monkeypatch.setattr(doctor_checks, "CHECKS", (("a", lambda: good), ("b", lambda: odd)))
    assert doctor.run_doctor(json=False) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "warn  b  odd -> do this",
        "1 ok, 1 to know, 0 failed",
    ]
    monkeypatch.setattr(doctor_checks, "CHECKS", (("a", lambda: good), ("c", lambda: bad)))
    assert doctor.run_doctor(json=False) == 1
    assert "bad \\x1b[2J -> do that" in capsys.readouterr().out
    assert doctor.run_doctor(json=True) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    assert report["checks"][1] == {"name": "c", "status": "fail", "text": "bad \x1b[2J", "remedy": "do that"}


def test_a_check_that_breaks_does_not_hide_the_others() -> None:
    def broken() -> Check:
        message = "no such thing"
        raise OSError(message)

    found = doctor.examine([("x", broken), ("y", lambda: Check(name="y", status="ok", text=""))])
    assert [(check.name, check.status) for check in found] == [("x", "fail"), ("y", "ok")]
    assert "no such thing" in found[0].text


def test_a_missing_package_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    version = metadata.version

    def without_gguf(name: str) -> str:
        if name == "gguf":
            raise metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(metadata, "version", without_gguf)
    found = doctor_checks.check_packages()
    assert (found.status, found.text) == ("fail", "missing: gguf")
    assert "pip install" in found.remedy


@pytest.mark.parametrize(
    ("version", "is_used"),
    [("0.2.1", False), ("0.2.2", True), ("0.2.10", True), ("0.3", False), ("0.3.0", False), ("1.0", False)],
)
def test_the_doctor_and_the_stages_agree_on_the_dequantiser(
    version: str, is_used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "version", lambda _name: version)
    monkeypatch.setitem(sys.modules, "libgguf", SimpleNamespace())
    native_dequant._load.cache_clear()
    try:
        assert (native_dequant.describe() == f"libgguf {version}") is is_used
    finally:
        native_dequant._load.cache_clear()
    found = doctor_checks.check_dequantiser()
    assert (found.text == f"libgguf {version}") is is_used
    assert (found.status, bool(found.remedy)) == (("ok", False) if is_used else ("warn", True))


def test_a_missing_dequantiser_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_checks, "installed_version", lambda _name: None)
    found = doctor_checks.check_dequantiser()
    assert found.status == "ok"
    assert "libgguf" in found.text
    assert found.remedy == "pip install 'libgguf>=0.2.2,<0.3'"


def test_numactl_missing_and_refused_are_different_remedies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    missing = doctor_checks.check_numactl()
    monkeypatch.setattr("shutil.which", lambda _: "/usr/bin/numactl")
    monkeypatch.setattr(launcher, "numactl_works", lambda _: False)
    refused = doctor_checks.check_numactl()
    assert (missing.status, refused.status) == ("warn", "warn")
    assert "apt-get install numactl" in missing.remedy
    assert "seccomp" in refused.remedy


def test_too_few_open_files_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
    found = doctor_checks.check_open_files()
    assert found.status == "fail"
    assert "64" in found.text
    assert "256" in found.text


def test_a_runtime_folder_that_is_too_deep_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    found = doctor_checks.check_runtime_folder()
    assert found.status == "fail"
    assert "107" in found.text
    assert "XDG_RUNTIME_DIR" in found.remedy


def test_a_cache_that_cannot_be_written_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert doctor_checks.check_cache().status == "ok"
    monkeypatch.setattr(os, "access", lambda *_: False)
    found = doctor_checks.check_cache()
    assert found.status == "fail"
    assert "XDG_CACHE_HOME" in found.remedy


def test_a_full_disk_under_the_cache_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=5 * 2**20))
    found = doctor_checks.check_cache()
    assert found.status == "fail"
    assert "5 MiB" in found.text
    assert "100 MiB" in found.text
