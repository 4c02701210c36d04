"""Renders one chat template and exits: python -P -m strata_coord.coordinator.template_child.

A template comes with the model file and is as untrusted as the file. The sandbox stops code; it does not
stop a loop or a string that grows, and those run inside C code where no signal handler does. So the rendering
has a process of its own with hard limits, and the parent keeps the clock. Request and answer are JSON on
stdin and stdout:

    {"template", "messages", "add_generation_prompt", "extra", "output_limit"}
    {"text"} or {"refused"} (the template's fault) or {"rejected"} (the template rejects these messages)
"""

import contextlib
import json
import resource
import sys
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment

MEMORY_BYTES = 512 << 20
CPU_SECONDS = 2
_LAST_STANDARD_DESCRIPTOR = 2


class _Rejected(Exception):  # noqa: N818  # not an error of ours: the template calls raise_exception
    """The template called raise_exception."""


def main() -> int:
    """Read the request, render, answer."""
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_AS, MEMORY_BYTES)
    _limit(resource.RLIMIT_CPU, CPU_SECONDS, CPU_SECONDS + 1)  # SIGXCPU first, which the parent can name
    request = json.loads(sys.stdin.buffer.read())
    answer = json.dumps(_answer(request), ensure_ascii=False)
    sys.stdout.buffer.write(answer.encode(errors="replace"))
    sys.stdout.buffer.flush()
    return 0


def _limit(kind: int, soft: int, hard: int | None = None) -> None:
    """Lower a limit for good, never above what the process was given."""
    _, given = resource.getrlimit(kind)
    hard = soft if hard is None else hard
    hard = hard if given == resource.RLIM_INFINITY else min(hard, given)
    resource.setrlimit(kind, (min(soft, hard), hard))


def _answer(request: Mapping[str, Any]) -> dict[str, str]:
    from jinja2 import TemplateError

    try:
        return {"text": _render(request)}
    except _Rejected as error:
        return {"rejected": str(error)[:1_000]}
    except MemoryError:
        return {"refused": f"it needs more than {MEMORY_BYTES >> 20} MiB of memory"}
    except TemplateError as error:
        line = getattr(error, "lineno", None)
        where = f" in line {line}" if line else ""
        return {"refused": f"{type(error).__name__}{where}: {str(error)[:1_000]}"}
    except Exception as error:  # whatever a template can raise is an answer about the template
        return {"refused": f"{type(error).__name__}: {str(error)[:1_000]}"}


def _render(request: Mapping[str, Any]) -> str:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    _warm_up(environment)
    # From here on no file, socket or pipe can be opened.
    _limit(resource.RLIMIT_NOFILE, _LAST_STANDARD_DESCRIPTOR + 1)
    template = environment.from_string(request["template"])
    names = {**request["extra"], "messages": request["messages"]}
    names["add_generation_prompt"] = request["add_generation_prompt"]
    parts: list[str] = []
    length = 0
    for part in template.generate(names):
        length += len(part)
        if length > request["output_limit"]:
            message = f"its output exceeds {request['output_limit']} characters"
            raise ValueError(message)
        parts.append(part)
    return "".join(parts)


def _warm_up(environment: "Environment") -> None:
    """Have everything loaded that rendering loads on first use: parts of Jinja, the codec of literals."""
    from jinja2 import UndefinedError

    datetime.now().astimezone()  # the time zone's file
    environment.from_string("{% macro f(x) %}{{ x | tojson }}{% endmacro %}{{ f('\\n') }}").render()
    with contextlib.suppress(UndefinedError):
        environment.from_string("{{ nothing.at_all }}").render()


def _raise_exception(message: object = "") -> None:
    raise _Rejected(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _to_json(
    value: object,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002  # templates pass these by position and by name
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    """Dump without HTML escapes, unlike Jinja's own filter: models were trained on plain JSON."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


if __name__ == "__main__":
    sys.exit(main())
