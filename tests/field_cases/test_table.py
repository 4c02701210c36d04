"""The table of docs/field-cases.md names tests that exist, and leaves no case out."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
TABLE = TESTS.parent / "docs" / "field-cases.md"
# The cases about numbers and about GGUF files.
# fmt: off
NUMBERS = (
    1, 2, 3, 4, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 20, 21, 25, 27, 29, 31, 32, 33, 34,
    36, 37, 39, 40, 41, 42, 66, 82, 87, 110, 112, 113, 114, 115, 116, 118, 119, 120, 121, 123,
    124, 126, 127, 128, 129, 130, 132, 134, 135, 136, 137, 138, 139,
)
# fmt: on
CASES = [f"{number:03}" for number in NUMBERS]
MOST_NOTES = 5


def rows() -> dict[str, list[str]]:
    found = re.findall(r"^\| FC-(\d{3}) \| .* \| (.*) \|$", TABLE.read_text("utf-8"), re.MULTILINE)
    return {case: re.findall(r"`([^`]+)`", tests) for case, tests in found}


def functions(path: Path) -> set[str]:
    return {
        node.name
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.FunctionDef)
    }


def test_every_case_has_tests_that_exist() -> None:
    table = rows()
    assert sorted(table) == CASES
    for case, tests in table.items():
        assert tests, case
        for test in tests:
            file, name = test.split("::")
            assert name in functions(TESTS / file), f"FC-{case}: {test}"


def test_tests_named_for_a_case_are_in_its_row() -> None:
    named = {
        (match[1], f"{path.relative_to(TESTS)}::{name}")
        for path in TESTS.rglob("test_*.py")
        for name in functions(path)
        if (match := re.match(r"test_fc_(\d{3})_", name))
    }
    table = rows()
    assert {test for case, test in named if test not in table[case]} == set()


def test_at_most_five_cases_are_notes() -> None:
    notes = re.findall(r"^- \*\*FC-\d{3}\*\* needs", TABLE.read_text("utf-8"), re.MULTILINE)
    assert 1 <= len(notes) <= MOST_NOTES
