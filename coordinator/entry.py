"""The installed command. So small that Ctrl-C finds a handler before the command line is even imported."""

import sys

INTERRUPTED = 130


def main() -> None:
    """Run the command line and leave the process with its exit code."""
    try:
        from strata_coord.coordinator.cli import main as run_cli

        run_cli()
    except KeyboardInterrupt:  # while importing; later ones are the commands' own
        print("strata-coord: interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
