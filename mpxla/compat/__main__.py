"""The command line: `python -m mpxla.compat [OPTIONS] SCRIPT [ARGUMENTS OF THE SCRIPT]`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["main"]

_PIPELINE = {
    "stages": ("N", "stages of the pipeline (default: all processes of a replica)"),
    "microbatches": ("N", "microbatches of every batch (default: one per stage)"),
    "replicas": ("N", "replicas of the model, each with batches of its own (processes / stages)"),
    "config": ("JSON", "further keys of the configuration, or a file that holds them"),
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mpxla.compat",
        usage="python -m mpxla.compat [OPTIONS] SCRIPT [ARGUMENTS OF THE SCRIPT]",
        description="Runs a training script that was written for SMP and CUDA devices on XLA "
        "devices, unedited. Start it by torchrun or mpirun for several processes.",
        allow_abbrev=False,  # what is not the launcher's is a mistake, not half a name
    )
    parser.add_argument("script", metavar="SCRIPT", type=Path)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.add_argument(
        "--check",
        action="store_true",
        help="list the names of SMP and CUDA that the script uses, and which are supported, "
        "without running it",
    )
    parser.add_argument(
        "--traceback", action="store_true", help="show errors with all frames, and on all ranks"
    )
    parser.add_argument(
        "--trust-checkpoints",
        action="store_true",
        help="save and load objects in checkpoints whose loading can run code; only for files "
        "that you trust",
    )
    pipeline = parser.add_argument_group(
        "pipeline",
        "for scripts that use Hugging Face's Trainer, or do not configure SMP themselves",
    )
    for name, (metavar, text) in _PIPELINE.items():
        pipeline.add_argument(f"--{name}", metavar=metavar, help=text)
    return parser


def main(arguments: Sequence[str]) -> int:
    """Runs or checks a script.

    Returns:
        Exit code; for `--check`, 1 if the script uses a name that is not supported.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if not options.script.is_file():
        parser.error(f"there is no file {options.script}")
    if options.check:
        from mpxla.compat.check import check_script, format_findings

        findings = check_script(options.script)
        print(format_findings(findings))
        return 1 if any(finding.is_refused for finding in findings) else 0
    _run(options)
    return 0


def _run(options: argparse.Namespace) -> None:
    from mpxla.compat.launcher import run_script
    from mpxla.env import read_environment
    from mpxla.session import show_uncaught

    show_uncaught(read_environment(), is_complete=options.traceback)
    if options.trust_checkpoints:
        from mpxla.compat.settings import configure

        configure({"trust_checkpoints": True})
    given = {name: getattr(options, name) for name in _PIPELINE}
    pipeline = {name: value for name, value in given.items() if value is not None}
    run_script(options.script, options.arguments, pipeline=pipeline or None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
