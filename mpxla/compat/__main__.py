"""The command line: `python -m mpxla.compat [OPTIONS] SCRIPT [ARGUMENTS OF THE SCRIPT]`."""

import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["main"]

_USAGE = """\
usage: python -m mpxla.compat [OPTIONS] SCRIPT [ARGUMENTS OF THE SCRIPT]
       python -m mpxla.compat --check SCRIPT

Runs a training script that was written for SMP and CUDA devices on XLA devices, unedited; start it
by torchrun or mpirun for several processes. --check lists the names of SMP and CUDA that the script
uses, and which are supported, without running it.

Scripts that use Hugging Face's Trainer, or do not configure SMP themselves, need these options:

  --stages N        stages of the pipeline (all processes of a replica)
  --microbatches N  microbatches of every batch (one per stage)
  --replicas N      replicas of the model, each with batches of its own (processes / stages)
  --config JSON     further keys of the configuration, or a file that holds them"""

_PIPELINE = ("--stages", "--microbatches", "--replicas", "--config")


def main(arguments: Sequence[str]) -> int:
    """Runs or checks a script.

    Returns:
        Exit code; for `--check`, 1 if the script uses a name that is not supported.
    """
    is_check = bool(arguments) and arguments[0] == "--check"
    options, rest = ({}, arguments[1:]) if is_check else _split(arguments)
    if not rest or rest[0].startswith("-"):
        print(_USAGE, file=sys.stdout if list(rest) in (["-h"], ["--help"]) else sys.stderr)
        return 0 if list(rest) in (["-h"], ["--help"]) else 2
    script = Path(rest[0])
    if not script.is_file():
        print(f"python -m mpxla.compat: there is no file {script}", file=sys.stderr)
        return 2
    if is_check:
        from mpxla.compat.check import check_script, format_findings

        findings = check_script(script)
        print(format_findings(findings))
        return 1 if any(finding.is_refused for finding in findings) else 0
    from mpxla.compat.launcher import run_script

    run_script(script, rest[1:], pipeline=options or None)
    return 0


def _split(arguments: Sequence[str]) -> tuple[dict[str, str], Sequence[str]]:
    """The launcher's options by name without dashes, and all that follows."""
    options: dict[str, str] = {}
    rest = list(arguments)
    while rest and rest[0].partition("=")[0] in _PIPELINE:
        name, equals, value = rest.pop(0).partition("=")
        if not equals and not rest:
            break
        options[name.removeprefix("--")] = value if equals else rest.pop(0)
    return options, rest


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
