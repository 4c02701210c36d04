import subprocess
from pathlib import Path

import hygiene
import pytest

ROOT = Path(__file__).resolve().parent.parent


def tracked_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False, timeout=30)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.decode().split("\0") if name]


@pytest.mark.parametrize("check", sorted(hygiene.CHECKS))
def test_the_tree_is_clean(check: str) -> None:
    assert hygiene.problems(check, tracked_files()) == []


@pytest.mark.parametrize(
    ("check", "data"),
    [
        ("end-of-file", b"x"),
        ("end-of-file", b"x\n\n"),
        ("merge-markers", b"a\n" + b"<" * 7 + b" HEAD\n"),
        ("large-files", b"\0" * (hygiene.MAX_BYTES + 1)),
    ],
)
def test_a_problem_is_found(check: str, data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(data)
    assert len(hygiene.problems(check, [path])) == 1


def test_binary_and_empty_files_may_end_as_they_like(tmp_path: Path) -> None:
    for name, data in (("empty", b""), ("binary", b"\0\1")):
        (tmp_path / name).write_bytes(data)
        assert hygiene.problems("end-of-file", [tmp_path / name]) == []
