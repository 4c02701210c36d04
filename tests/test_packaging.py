"""What is installed is what is in the tree, and the documents say what the scripts do."""

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("coordinator", "ipc", "kernels", "stage_worker")


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def bash_blocks() -> list[str]:
    return re.findall(
        r"^```bash\n(.*?)^```$", (ROOT / "README.md").read_text("utf-8"), flags=re.DOTALL | re.MULTILINE
    )


def test_every_package_of_the_tree_is_installed() -> None:
    folders = {
        init.parent.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for init in (ROOT / package).rglob("__init__.py")
    }
    table = project()["tool"]["setuptools"]
    assert {name.replace("/", ".") for name in folders} == {
        name.split(".", 1)[1] for name in table["packages"]
    }
    assert table["package-dir"] == {f"strata_coord.{name.replace('/', '.')}": name for name in folders}


def test_every_python_folder_is_a_package() -> None:
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            assert (path.parent / "__init__.py").is_file(), f"{path} would be missing from the wheel"
        assert (ROOT / package / "py.typed").is_file()


def test_the_link_tree_names_the_same_folders() -> None:
    links = {path.name: path.resolve() for path in (ROOT / ".types" / "strata_coord").iterdir()}
    assert links == {package: ROOT / package for package in PACKAGES}
    tracked = subprocess.run(
        ["git", "ls-files", "-s", ".types"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=30
    )
    if tracked.returncode == 0 and tracked.stdout:  # an archive of the tree has no history to ask
        assert {line.split()[0] for line in tracked.stdout.splitlines()} == {"120000"}


def test_no_package_hides_among_the_tests() -> None:
    assert list((ROOT / "tests").rglob("__init__.py")) == []


def test_data_files_beside_the_code_are_installed() -> None:
    patterns = project()["tool"]["setuptools"]["package-data"]
    allowed = {"*": patterns["*"], "kernels/csrc": patterns["strata_coord.kernels.csrc"]}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*"):
            if path.is_dir() or "__pycache__" in path.parts or path.suffix in {".py", ".md"}:
                continue
            globs = allowed["*"] + allowed.get(path.parent.relative_to(ROOT).as_posix(), [])
            assert any(path.match(glob) for glob in globs), f"{path} would be missing from the wheel"


@pytest.mark.parametrize("name", ["cpu", "cuda13"])
def test_constraints_pin_every_direct_dependency(name: str) -> None:
    lines = (ROOT / "constraints" / f"{name}.txt").read_text("utf-8").splitlines()
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.!]+", line) for line in lines), (
        "name==version, no address"
    )
    pinned = {canonical(line.split("==")[0]) for line in lines}
    table = project()["project"]
    wanted = table["dependencies"] + table["optional-dependencies"]["dev"]
    if name != "cpu":
        wanted = table["dependencies"] + table["optional-dependencies"][name]
    names = {canonical(re.split(r"[<>=\[ ]", requirement)[0]) for requirement in wanted}
    assert names - pinned == set()


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_readme_sets_up_runs_and_tests_in_two_blocks() -> None:
    blocks = bash_blocks()
    assert len(blocks) >= 2
    first, second = blocks[0].splitlines(), blocks[1].splitlines()
    for block in (first, second):
        assert block[0] == "python3 -m venv .venv", "each block works alone in a fresh clone"
        assert any(line.startswith("pip install -c constraints/cpu.txt -e ") for line in block)
    assert first[-1].startswith("strata-coord launch configs/split24.toml --prompt ")
    assert second[-1].startswith("pytest")


def test_ci_runs_the_command_that_the_readme_gives() -> None:
    script = (ROOT / ".ci" / "run").read_text("utf-8").splitlines()
    command = bash_blocks()[1].splitlines()[-1]
    assert command in script
    assert command in (ROOT / "CONTRIBUTING.md").read_text("utf-8").splitlines()


def test_ci_is_executable() -> None:
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111 == 0o111
