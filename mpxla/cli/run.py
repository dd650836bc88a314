"""`python -m mpxla run`: starts a script on several processes of this machine, by torchrun.

What it adds to torchrun: the cores of the machine are divided among the processes, and what is left
of an error is the traceback of the rank that failed and one line for each rank that ended with it.
"""

import argparse
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpxla.env import cores_per_process, set_variables
from mpxla.errors import MpxlaError

__all__ = ["add_parser"]

_CONSEQUENCE = "PeerFailure"
"""What the ranks raise that did not fail themselves."""


def add_parser(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "run",
        help="start a script on several processes of this machine",
        description="Starts a script on several processes of this machine, by torchrun. For "
        "several machines use torchrun itself.",
        allow_abbrev=False,  # or it would refuse options of the script that look like two of these
    )
    parser.add_argument("-n", "--ranks", type=int, default=1, metavar="N", help="processes")
    parser.add_argument(
        "--max-restarts", type=int, default=0, metavar="N", help="starts after a failure"
    )
    parser.add_argument("script", type=Path)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Runs the script and waits for its end.

    Raises:
        MpxlaError: There is no such script, or a rank failed; names the rank and its error.
    """
    if options.ranks < 1:
        raise MpxlaError(f"-n {options.ranks}: at least one process is needed")
    if not options.script.is_file():
        raise MpxlaError(f"there is no file {options.script}")
    # torch takes seconds to import: not before it is clear that something will run.
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    set_variables({"OMP_NUM_THREADS": str(cores_per_process(options.ranks))})
    # Its report of a failure says in twenty lines, twice, what `failure_text` says in two.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    words = ["--standalone", f"--nproc-per-node={options.ranks}"]
    words += [f"--max-restarts={options.max_restarts}", "--module", "mpxla.cli.worker"]
    settings = torchrun.parse_args(words)
    # Past its parser, which takes a script's `--n` for a short form of options of its own.
    settings.training_script_args = [str(options.script), *options.arguments]
    try:
        torchrun.run(settings)
    except ChildFailedError as error:
        raise MpxlaError(failure_text(error.failures, options.ranks)) from None
    except SignalException as error:
        raise MpxlaError(f"stopped by {error.sigval.name}; the ranks have ended too") from None


def failure_text(failures: Mapping[int, Any], num_ranks: int) -> str:
    """The rank that failed, above those that ended because of it.

    Args:
        failures: `ProcessFailure`s of torchrun by rank.
        num_ranks: Of the whole job.
    """
    reasons = {rank: _reason(failure) for rank, failure in sorted(failures.items())}

    def order(rank: int) -> tuple[bool, bool, int]:
        # torchrun itself ends the ranks that are left, by SIGTERM, and its clock counts seconds.
        is_ended = failures[rank].exitcode == -15
        return reasons[rank].startswith(_CONSEQUENCE), is_ended, failures[rank].timestamp

    first, *others = sorted(reasons, key=order)
    lines = [f"rank {first} of {num_ranks} failed: {reasons[first]}"]
    lines += [f"  rank {rank}: {reasons[rank].splitlines()[0]}" for rank in others]
    return "\n".join(lines)


def _reason(failure: Any) -> str:
    message = failure.error_file_data.get("message")
    if isinstance(message, dict):
        return str(message["message"])
    if failure.exitcode < 0:
        return f"was killed by {failure.signal_name()}"
    return f"exited with code {failure.exitcode}"
