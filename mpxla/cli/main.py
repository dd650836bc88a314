"""Commands and their options; errors of mpxla become one message and exit status 1."""

import argparse
import sys
from collections.abc import Sequence

from mpxla.cli import cache, keys, plan, run, schedule, top, trace
from mpxla.errors import MpxlaError

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        arguments: words after `python -m mpxla`; by default those of the process.

    Returns:
        Exit status: 0, or 1 after an error.
    """
    parser = argparse.ArgumentParser(
        prog="python -m mpxla",
        description=(
            "Runs scripts and watches them; looks at partitions, schedules and traces; keeps "
            "programs."
        ),
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for command in (cache, keys, plan, run, schedule, top, trace):
        command.add_parser(commands)
    options = parser.parse_args(arguments)
    try:
        options.run(options)
    except MpxlaError as error:
        notes = getattr(error, "__notes__", ())
        print("\n".join([f"error: {error}", *notes]), file=sys.stderr)
        return 1
    return 0
