"""Turns whatever ends a command into one line on stderr and the exit code of design.md section 8.

Every command runs inside run_command; none of them prints an error or calls sys.exit itself.
"""

import sys
from collections.abc import Callable
from typing import Final

from strata_coord.coordinator.output import named_stdout

FAILED: Final = 1
USAGE: Final = 2
DOES_NOT_FIT: Final = 3
INTERNAL: Final = 7
INTERRUPTED: Final = 130

MAX_LINE: Final = 4000  # characters of an error; a name from a file can be of any length
PROGRAM: Final = "strata-coord"


def run_command(invoke: Callable[[], object], *, debug: bool, json: bool) -> int:
    """Call invoke and return the exit code: its own int, 0 for None, or that of the error it ended with.

    debug: unexpected and expected errors alike print their traceback first. json: the error is also one
    JSON object on stdout, so that a script has a single place to read.
    """
    try:
        result = invoke()
        with named_stdout():
            sys.stdout.flush()  # here, where a closed pipe is caught, and not at the interpreter's exit
    except BrokenPipeError:
        _abandon_stdout()
        return FAILED
    except KeyboardInterrupt:
        return _report("KeyboardInterrupt", "interrupted", INTERRUPTED, json=False)
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else FAILED
    except Exception as error:  # the outermost frame: nothing may leave it as a traceback
        if debug:
            _print_traceback(error)
        return _report_error(error, debug=debug, json=json)
    if result == INTERRUPTED:  # typer catches Ctrl-C itself and returns its code without a word
        return _report("KeyboardInterrupt", "interrupted", INTERRUPTED, json=False)
    return result if isinstance(result, int) and not isinstance(result, bool) else 0


def _report_error(error: Exception, *, debug: bool, json: bool) -> int:
    from strata_coord.ipc.errors import StrataError

    kind = type(error).__name__
    if isinstance(error, StrataError):
        return _report(kind, str(error) or kind, error.exit_code, json=json)
    if (usage := _usage_text(error)) is not None:
        return _report(kind, usage, USAGE, json=json)
    if kind == "Abort":  # end of input at a question
        return _report(kind, "interrupted", INTERRUPTED, json=json)
    if isinstance(error, OSError) and error.strerror:  # a file, a full disk, a limit: the machine's answer
        where = f"{error.filename}: " if error.filename else ""
        return _report(kind, f"{where}{error.strerror}", FAILED, json=json)
    if isinstance(error, MemoryError):
        return _report(kind, "out of host memory", DOES_NOT_FIT, json=json)
    hint = "" if debug else "; run again with --debug for the traceback"
    text = " ".join(str(error).split())[:500]
    return _report(kind, f"internal error: {kind}: {text}{hint}", INTERNAL, json=json)


def _usage_text(error: Exception) -> str | None:
    """Return typer's message for a wrong command line, in one line or as the help text, or None.

    Told by shape and not by class: typer carries its own copy of click in some versions and uses the
    installed one in others.
    """
    format_message = getattr(error, "format_message", None)
    if format_message is None or not hasattr(error, "exit_code"):
        return None
    message = str(format_message())
    if type(error).__name__ == "NoArgsIsHelpError":
        return message
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else PROGRAM
    return f"{' '.join(message.split())} (see {path} --help)"


def _report(kind: str, text: str, code: int, *, json: bool) -> int:
    from strata_coord.coordinator.printable import printable

    is_help = kind == "NoArgsIsHelpError"
    lines = [printable(line, limit=MAX_LINE) for line in text.split("\n") if is_help or line.strip()]
    try:
        for line in lines:
            print(line if is_help else f"{PROGRAM}: {line}", file=sys.stderr)
        if json:
            import json as json_module

            record = {"error": {"kind": kind, "exit_code": code, "messages": lines}}
            print(json_module.dumps(record), flush=True)
    except OSError:  # nobody reads: the exit code is all that is left to say
        _abandon_stdout()
    return code


def _print_traceback(error: Exception) -> None:
    import traceback

    traceback.print_exception(error, file=sys.stderr)


def _abandon_stdout() -> None:
    """Point stdout at nothing, so that the interpreter's own flush at exit does not raise again."""
    import os

    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
    except (OSError, ValueError):
        pass
