"""The doctor command: one line per check, with what mends it. Exit code 1 if a check fails.

Looks without touching: torch and cupy are judged by their metadata, since loading them takes seconds and a
broken installation would take the doctor down with it.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Final, Literal

INSTALL: Final = "pip install -c constraints/cpu.txt -e . in a clone of strata-coord"

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One finding. remedy: what to do about it; empty where nothing needs doing."""

    name: str
    status: Status
    text: str
    remedy: str = ""


def installed_version(package: str) -> str | None:
    """Return the version of an installed package, or None, without importing it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def run_doctor(*, json: bool) -> int:
    """Check this machine and installation, print the findings, return the exit code."""
    from strata_coord.coordinator.doctor_checks import CHECKS

    checks = examine(CHECKS)
    has_failed = any(check.status == "fail" for check in checks)
    if json:
        from strata_coord.coordinator.output import print_json

        print_json({"ok": not has_failed, "checks": [asdict(check) for check in checks]})
    else:
        for line in doctor_lines(checks):
            print(line)
    return 1 if has_failed else 0


def examine(checks: Sequence[tuple[str, Callable[[], Check]]]) -> list[Check]:
    """Run every check. One that breaks is itself a finding, and does not hide the others."""
    found = []
    for name, look in checks:
        try:
            found.append(look())
        except Exception as error:
            text = f"the check itself failed: {type(error).__name__}: {error}"
            found.append(Check(name=name, status="fail", text=text, remedy="please report this"))
    return found


def doctor_lines(checks: Sequence[Check]) -> list[str]:
    """Return the findings as lines, the last one the summary."""
    from strata_coord.coordinator.printable import printable

    width = max((len(check.name) for check in checks), default=0)
    lines = []
    for check in checks:
        remedy = f" -> {check.remedy}" if check.remedy else ""
        lines.append(f"{check.status:4}  {check.name:{width}}  {printable(check.text + remedy, limit=500)}")
    counts = Counter(check.status for check in checks)
    lines.append(f"{counts['ok']} ok, {counts['warn']} to know, {counts['fail']} failed")
    return lines
