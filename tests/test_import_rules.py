"""Who may import whom, and what loads when: read from the source, imports inside functions included.

coordinator -> ipc; stage_worker -> kernels, ipc; kernels and ipc -> nothing of ours. The coordinator never
loads torch, and nothing anywhere pickles.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OURS = "strata_coord"
PACKAGES = ("coordinator", "ipc", "kernels", "stage_worker")

# Of ours, third-party at module level, third-party inside functions or for annotations only.
ALLOWED: dict[str, tuple[set[str], set[str], set[str]]] = {
    "kernels": (set(), {"torch"}, {"cupy", "fla", "triton", "numpy", "gguf", "libgguf"}),
    "ipc": (set(), {"msgpack", "zmq"}, {"cupy"}),
    "stage_worker": ({"kernels", "ipc"}, {"torch", "numpy", "zmq"}, {"cupy"}),
    "coordinator": (
        {"ipc"},
        {"typer", "pydantic", "zmq"},
        {"zmq", "rich", "gguf", "numpy", "tokenizers", "jinja2", "psutil", "pynvml", "pydantic"},
    ),
}
# Kernels in Triton's language name it at module level; what launches them imports them inside functions.
TRITON_SOURCES = "kernels/triton_src/"
# Where a heavy third-party import at module level is the module's own business, and nowhere else.
ONLY_IN = {
    "typer": {"coordinator/cli.py"},
    "pydantic": {"coordinator/config.py", "coordinator/config_checks.py", "coordinator/config_errors.py"},
    "msgpack": {"ipc/codec.py"},
    "zmq": {
        "ipc/links.py",
        "stage_worker/control_thread.py",
        "coordinator/control_loop.py",  # these two wait on the sockets of ipc.links and on processes at once
        "coordinator/stage_set.py",
    },
}

PICKLE_FAMILY = {
    "pickle", "_pickle", "cPickle", "pickletools", "marshal", "shelve", "copyreg", "dill", "cloudpickle",
    "joblib", "multiprocessing", "torch.multiprocessing", "torch.package",
}  # fmt: skip
# Calls that unpickle, or run text, behind a harmless import.
BANNED_ATTRIBUTES = {
    "send_pyobj",
    "recv_pyobj",
    "ProcessPoolExecutor",
    "send_object_list",
    "broadcast_object_list",
}
BANNED_CALLS = {("torch", "load"), ("torch", "save"), ("time", "time")}
BANNED_BUILTINS = {"eval", "exec", "compile", "__import__"}

PURE = {
    "coordinator": frozenset(
        {
            "assignments", "budget", "chrome_trace", "config_checks", "cost_model",
            "device_choice", "device_facts", "launch_options", "launch_report", "pipeline",
            "plan", "plan_json", "planned_model", "planner", "printable", "prompt_planner", "requests", "rig",
            "routes", "scheduler", "stage_costs", "stage_planner", "state_sizes", "super_chunks",
            "supervisor", "telemetry", "terminal_text",
        }
    ),
    "ipc": frozenset({"assignment", "errors", "link_side", "messages", "slots"}),
    "kernels": frozenset({"formats"}),
    "stage_worker": frozenset({"blobs", "page_pool", "residency", "snapshot", "sub_chunks", "uploads"}),
}  # fmt: skip
PURE_STANDARD_LIBRARY = {
    "__future__", "abc", "bisect", "collections", "contextlib", "dataclasses", "difflib", "enum", "fractions",
    "functools", "heapq", "itertools", "json", "math", "numbers", "operator", "re", "string", "struct",
    "textwrap", "tomllib", "types", "typing",
}  # fmt: skip
PATHS_AS_VALUES = {
    "coordinator/launch_options.py",
    "coordinator/requests.py",
}  # holds paths that a user named, opens none
RECORDS = {"config", "config_errors"}  # pure but for pydantic and for reading its own file
PURE_IPC = {"errors", "messages", "assignment", "status_page"}  # the last for its enums only


@dataclass(frozen=True)
class Import:
    """One imported module. is_lazy: inside a function, or under TYPE_CHECKING."""

    file: str
    line: int
    module: str
    is_lazy: bool

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line} imports {self.module}"

    @property
    def root(self) -> str:
        return self.module.split(".")[0]


def source_files() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def imports_of(file: str, source: str) -> list[Import]:
    found: list[Import] = []

    def visit(node: ast.AST, *, is_lazy: bool) -> None:
        for child in ast.iter_child_nodes(node):
            names: list[str] = []
            if isinstance(child, ast.Import):
                names = [alias.name for alias in child.names]
            elif isinstance(child, ast.ImportFrom):
                if child.level:
                    names = ["." * child.level + (child.module or "")]
                elif child.module in {OURS, *(f"{OURS}.{package}" for package in PACKAGES)}:
                    names = [f"{child.module}.{alias.name}" for alias in child.names]
                else:
                    names = [child.module or ""]
            elif isinstance(child, ast.Call) and ast.unparse(child.func).endswith("import_module"):
                argument = child.args[0] if child.args else None
                is_text = isinstance(argument, ast.Constant) and isinstance(argument.value, str)
                names = [argument.value if is_text else "?"]  # type: ignore[union-attr]  # is_text says so
            line = getattr(child, "lineno", 0)
            found.extend(Import(file=file, line=line, module=name, is_lazy=is_lazy) for name in names)
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            is_typing = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            visit(child, is_lazy=is_lazy or is_function or is_typing)

    visit(ast.parse(source), is_lazy=False)
    return found


def all_imports() -> Iterator[Import]:
    for path in source_files():
        yield from imports_of(path.relative_to(ROOT).as_posix(), path.read_text("utf-8"))


def package_problem(imported: Import) -> str | None:
    """Return why a package may not import this, or None."""
    package = imported.file.split("/")[0]
    ours, top_level, lazy = ALLOWED[package]
    if imported.module.startswith((".", "?")):
        return "is relative or computed: spell it out"
    if imported.file.startswith(TRITON_SOURCES) and imported.root == "triton":
        return None
    if imported.root == OURS:
        if imported.module.startswith(f"{OURS}.kernels.triton_src") and not imported.is_lazy:
            return "loads Triton: only inside functions"
        target = imported.module.split(".")[1] if "." in imported.module else ""
        return None if target == package or target in ours else f"{package} may not know {target or OURS}"
    if imported.root in sys.stdlib_module_names:
        return None
    if imported.root not in (top_level | lazy if imported.is_lazy else top_level):
        return f"not allowed in {package}{'' if imported.is_lazy else ' at module level'}"
    if not imported.is_lazy and imported.file not in ONLY_IN.get(imported.root, {imported.file}):
        return f"at module level only in {', '.join(sorted(ONLY_IN[imported.root]))}"
    return None


def pure_problem(imported: Import) -> str | None:
    """Return why a pure module may not import this, or None."""
    package = imported.file.split("/")[0]
    if imported.root == OURS:
        _, target, module = (*imported.module.split("."), "", "")[:3]
        if target == "ipc" and package != "ipc":
            return None if module in PURE_IPC else "not one of the plain records of ipc"
        return None if target == package and module in PURE[package] | RECORDS else "not a pure module"
    if imported.module in {"pathlib"} and imported.file in PATHS_AS_VALUES:
        return None
    return (
        None if imported.root in PURE_STANDARD_LIBRARY else "a pure module has no clock, file, log or device"
    )


def pickles(path: str, source: str) -> list[str]:
    """Return the places of a file that pickle, or run text as code."""
    found = [
        imported.place
        for imported in imports_of(path, source)
        if any(imported.module == name or imported.module.startswith(f"{name}.") for name in PICKLE_FAMILY)
    ]
    for node in ast.walk(ast.parse(source)):
        text = None
        if isinstance(node, ast.Attribute):
            base = node.value.id if isinstance(node.value, ast.Name) else ""
            if node.attr in BANNED_ATTRIBUTES or (base, node.attr) in BANNED_CALLS:
                text = f"{base}.{node.attr}"
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            is_off = isinstance(node.value, ast.Constant) and node.value.value is False
            text = None if is_off else "allow_pickle"
        elif (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BANNED_BUILTINS
        ):
            text = f"{node.func.id}()"
        if text is not None:
            found.append(f"{path}:{getattr(node, 'lineno', 0)} uses {text}")
    return found


def test_packages_import_only_what_they_may() -> None:
    problems = [
        f"{imported.place}: {problem}"
        for imported in all_imports()
        if (problem := package_problem(imported)) is not None
    ]
    assert problems == []


def test_pure_modules_stay_pure() -> None:
    pure_files = {f"{package}/{module}.py" for package, modules in PURE.items() for module in modules}
    problems = [
        f"{imported.place}: {problem}"
        for imported in all_imports()
        if imported.file in pure_files and (problem := pure_problem(imported)) is not None
    ]
    assert problems == []


def test_pure_modules_exist_and_touch_no_file() -> None:
    for package, modules in PURE.items():
        for module in modules:
            path = ROOT / package / f"{module}.py"
            assert path.is_file(), f"{path} is listed as pure"
            names = {
                node.func.id
                for node in ast.walk(ast.parse(path.read_text("utf-8")))
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            }
            assert not names & {"open", "print", "input"}, f"{package}/{module}.py"


def test_nothing_is_pickled() -> None:
    problems = [
        place
        for path in source_files()
        for place in pickles(path.relative_to(ROOT).as_posix(), path.read_text("utf-8"))
    ]
    assert problems == []


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("coordinator/x.py", "import torch"),
        ("coordinator/x.py", "def f():\n    import torch.nn"),
        ("coordinator/x.py", "from strata_coord import kernels"),
        ("coordinator/x.py", "def f():\n    from strata_coord.stage_worker import walk"),
        ("coordinator/x.py", "import rich.live"),
        ("coordinator/x.py", "import typer"),
        ("coordinator/x.py", "import importlib\nimportlib.import_module('transformers')"),
        ("coordinator/x.py", "def f(name):\n    return importlib.import_module(name)"),
        ("kernels/x.py", "from strata_coord.ipc.messages import Segment"),
        ("kernels/x.py", "from ..ipc import messages"),
        ("kernels/x.py", "import triton"),
        ("kernels/x.py", "from strata_coord.kernels.triton_src import rows"),
        ("ipc/x.py", "import torch"),
        ("stage_worker/x.py", "from strata_coord.coordinator.plan import Plan"),
    ],
)
def test_a_forbidden_import_is_found(file: str, source: str) -> None:
    assert [imported for imported in imports_of(file, source) if package_problem(imported) is not None]


@pytest.mark.parametrize(
    "source",
    [
        "import time",
        "import os.path",
        "from strata_coord.coordinator.cli import app",
        "def f():\n    import logging",
    ],
)
def test_an_impure_import_is_found(source: str) -> None:
    assert [
        imported
        for imported in imports_of("coordinator/plan.py", source)
        if pure_problem(imported) is not None
    ]


@pytest.mark.parametrize(
    "source",
    [
        "import pickle", "from multiprocessing import Process", "import torch\ntorch.load(f)", "eval('1')",
        "socket.recv_pyobj()", "numpy.load(f, allow_pickle=True)", "time.time()",
        "import multiprocessing.shared_memory",
    ],
)  # fmt: skip
def test_a_pickle_is_found(source: str) -> None:
    assert pickles("x.py", source)


def loaded_after(statement: str) -> set[str]:
    """Return the top-level modules that a fresh interpreter holds after the statement."""
    program = f"{statement}\nimport sys\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    return set(done.stdout.split())


def test_help_loads_nothing_heavy() -> None:
    heavy = {"torch", "cupy", "numpy", "gguf", "zmq", "rich"}
    assert loaded_after(f"import {OURS}.coordinator.cli") & heavy == set()
    shown = f"from {OURS}.coordinator.cli import app\napp(['launch', '--help'], standalone_mode=False)"
    assert loaded_after(shown) & heavy == set()


def test_the_whole_coordinator_loads_no_torch() -> None:
    names = [path.stem for path in sorted((ROOT / "coordinator").glob("*.py")) if path.stem != "__main__"]
    statement = "\n".join(f"import {OURS}.coordinator.{name}" for name in names)
    assert (
        loaded_after(statement) & {"torch", "cupy", "transformers", "gguf", "rich", "jinja2", "tokenizers"}
        == set()
    )


def test_the_carriers_load_no_torch() -> None:
    names = [path.stem for path in sorted((ROOT / "ipc").glob("*.py"))]
    statement = "\n".join(f"import {OURS}.ipc.{name}" for name in names)
    assert loaded_after(statement) & {"torch", "cupy", "numpy", "gguf"} == set()


def test_a_worker_says_hello_before_it_loads_torch() -> None:
    assert "torch" not in loaded_after(f"import {OURS}.stage_worker.__main__")
