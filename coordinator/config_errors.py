"""Turns what is wrong with a configuration into lines that name file, line, key, expectation and suggestion.

Pure. tomllib keeps no positions, so a key's line is found by a text search of its table.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, get_args

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pydantic import BaseModel, ValidationError

__all__ = ["KeyPath", "Problem", "Source", "problems_from_pydantic"]

KeyPath = tuple[str | int, ...]

_HEADER = re.compile(r"^\s*(\[\[?)\s*([^\[\]]+?)\s*\]\]?\s*(#.*)?$")
_KEY = re.compile(r"^\s*([A-Za-z0-9_\-.\"' ]+?)\s*=")
_MAX_VALUE = 60  # characters of a wrong value that are shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One error: where, what was expected, and what the user may have meant."""

    path: KeyPath
    text: str
    option: str = ""  # the command-line option at fault, when its path could not be read


@dataclass(slots=True, kw_only=True)
class Source:
    """The text of one configuration file and the overrides laid over it."""

    name: str
    text: str
    overridden: dict[KeyPath, str] = field(default_factory=dict)  # key path -> option that set it

    def apply_override(self, tables: dict[str, Any], override: str) -> list[Problem]:
        """Set one "table.key=value" in tables, in place; returns what is wrong with it."""
        name, equals, raw = override.partition("=")
        parts = [part.strip() for part in name.split(".")]
        option = f"--set {override}"
        if not equals or len(parts) < 2 or not all(parts):
            text = "expected table.key=value, for example prefill.mode=layer-major"
            return [Problem(path=(), text=text, option=option)]
        path: list[str | int] = []
        here: Any = tables
        for depth, part in enumerate(parts):
            last = depth == len(parts) - 1
            if isinstance(here, list):
                if not part.isdigit() or int(part) >= len(here):
                    name = ".".join(parts[:depth])
                    text = f"no {name} {_shown(part)}: the file has {len(here)}, counted from 0"
                    return [Problem(path=(), text=text, option=option)]
                key: str | int = int(part)
            elif isinstance(here, dict):
                key = part
            else:
                text = f"{'.'.join(parts[:depth])} is not a table"
                return [Problem(path=(), text=text, option=option)]
            path.append(key)
            if last:
                here[key] = _override_value(raw)
            else:
                here = here[int(key)] if isinstance(here, list) else here.setdefault(key, {})
        self.overridden[tuple(path)] = option
        return []

    def lines(self, problems: Iterable[Problem]) -> list[str]:
        """Return the problems as lines in the order of the file, each once."""
        placed = []
        for problem in problems:
            setters = (o for p, o in self.overridden.items() if problem.path[: len(p)] == p)
            option = problem.option or next(setters, "")
            line = None if option else find_line(self.text, problem.path)
            where = option or (f"{self.name}:{line}" if line else self.name)
            key = key_text(problem.path)
            text = f"{where}: {key}: {problem.text}" if key else f"{where}: {problem.text}"
            placed.append((line or 10**9, text))  # problems without a line come last
        return list(dict.fromkeys(text for _, text in sorted(placed)))


def key_text(path: KeyPath) -> str:
    """Return a key path as the user writes it: stage.1.device."""
    return ".".join(str(part) for part in path)


def find_line(text: str, path: KeyPath) -> int | None:
    """Return the line, from 1, where a key stands; its table's header where it does not; None if neither.

    Understands [table], [[array]] counted from 0, dotted keys and keys before the first header. Lines inside
    multi-line strings are skipped.
    """
    wanted = [part for part in path if isinstance(part, str)]
    index = next((part for part in path if isinstance(part, int)), 0)
    best: tuple[int, int] | None = None  # matched parts, line
    counts: dict[str, int] = {}
    table: list[str] = []
    occurrence = 0
    closing = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if closing:
            closing = "" if closing in line else closing
            continue
        closing = _opened_string(line)
        header = _HEADER.match(line)
        if header:
            table = [part.strip().strip("\"'") for part in header.group(2).split(".")]
            name = ".".join(table)
            occurrence = counts.get(name, 0) if header.group(1) == "[[" else 0
            counts[name] = occurrence + 1
            keys: list[str] = table
        elif key := _KEY.match(line):
            keys = table + [part.strip().strip("\"'") for part in key.group(1).split(".")]
        else:
            continue
        if len(path) > 1 and isinstance(path[1], int) and table[:1] == wanted[:1] and occurrence != index:
            continue
        matched = len(keys) if keys == wanted[: len(keys)] else 0
        if matched and (best is None or matched > best[0]):
            best = (matched, number)
    return best[1] if best else None


def problems_from_pydantic(error: ValidationError, model: type[BaseModel]) -> list[Problem]:
    """Return one problem for each key that pydantic complains about.

    A union reports every alternative that failed, each with its own tail in the path: they are joined into
    "expected ... or ...".
    """
    grouped: dict[KeyPath, list[Any]] = {}
    for detail in error.errors(include_url=False):
        grouped.setdefault(_real_path(detail["loc"], model), []).append(detail)
    # An array whose items are wrong also counts as too short: only the items are worth a line.
    parents = {path[:length] for path in grouped for length in range(1, len(path))}
    return [
        Problem(path=path, text=_text(path, details, model))
        for path, details in grouped.items()
        if path not in parents
    ]


def suggestion(word: str, known: Sequence[str]) -> str:
    """Return '; did you mean "x"?', or nothing when no known word is near."""
    close = difflib.get_close_matches(word, known, 1)
    return f'; did you mean "{close[0]}"?' if close else ""


def _text(path: KeyPath, details: list[Any], model: type[BaseModel]) -> str:
    first = details[0]
    if first["type"] == "extra_forbidden":
        siblings = _fields(path[:-1], model)
        kind = "table" if len(path) == 1 else "key"
        return f"unknown {kind}{suggestion(str(path[-1]), siblings)}"
    if first["type"] == "missing":
        return "missing, and it has no default"
    found = first["input"]
    texts = list(dict.fromkeys(_expectation(detail) for detail in details))
    expected = " or ".join(texts)
    words = [word for text in texts for word in re.findall(r"'([^']*)'", text)]
    hint = suggestion(found, words) if isinstance(found, str) else ""
    return f"expected {expected}, got {_shown(found)}{hint}"


def _expectation(detail: Any) -> str:
    if detail["type"] == "string_pattern_mismatch":
        return "'auto', 'cpu', 'cuda:N' or 'cuda:GPU-<uuid>'"
    if detail["type"] in {"tuple_type", "too_short", "too_long"}:
        return "an array" if detail["type"] == "tuple_type" else _lower(str(detail["msg"]))
    message = str(detail["msg"])
    for prefix in ("Input should be a valid ", "Input should be "):
        if message.startswith(prefix):
            rest = message.removeprefix(prefix)
            if not prefix.endswith("valid "):
                return f"a value {rest}" if rest.startswith(("greater", "less")) else rest
            rest = rest.split(",")[0].split(" or instance")[0]
            rest = {"dictionary": "table", "tuple": "array"}.get(rest, rest)
            return f"an {rest}" if rest[0] in "aio" else f"a {rest}"
    return _lower(message)


def _lower(message: str) -> str:
    return message[:1].lower() + message[1:]


def _real_path(location: tuple[int | str, ...], model: type[BaseModel]) -> KeyPath:
    """Cut a pydantic location to the part that the file has: union tails name types, not keys."""
    path: list[str | int] = []
    here: type[BaseModel] | None = model
    for part in location:
        if isinstance(part, int):
            if here is not None and path:
                path.append(part)
            continue
        if here is None:
            break
        path.append(part)
        if part not in here.model_fields:
            break
        here = _table_of(here, part)
    return tuple(path)


def _fields(path: KeyPath, model: type[BaseModel]) -> list[str]:
    here = model
    for part in path:
        if isinstance(part, str):
            inner = _table_of(here, part)
            if inner is None:
                return []
            here = inner
    return list(here.model_fields)


def _table_of(model: type[BaseModel], name: str) -> type[BaseModel] | None:
    """Return the model of a table or of an array of tables, or None for a plain key."""
    annotation = model.model_fields[name].annotation
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and hasattr(candidate, "model_fields"):
            return candidate
    return None


def _override_value(raw: str) -> object:
    try:
        return tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        return raw.strip()


def _opened_string(line: str) -> str:
    for quotes in ('"""', "'''"):
        if line.count(quotes) % 2:
            return quotes
    return ""


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_VALUE else text[: _MAX_VALUE - 3] + "..."
