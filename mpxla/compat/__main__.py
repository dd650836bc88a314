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

options:
  --traceback          show errors with all frames, and on all ranks
  --trust-checkpoints  save and load objects in checkpoints whose loading can run code; only for
                       files that you trust"""
_SWITCHES = ("--check", "--traceback", "--trust-checkpoints")


def main(arguments: Sequence[str]) -> int:
    """Runs or checks a script.

    Returns:
        Exit code; for `--check`, 1 if the script uses a name that is not supported.
    """
    rest, switches = list(arguments), set[str]()
    while rest and rest[0] in _SWITCHES:
        switches.add(rest.pop(0))
    if not rest or rest[0].startswith("-"):
        print(_USAGE, file=sys.stdout if rest in (["-h"], ["--help"]) else sys.stderr)
        return 0 if rest in (["-h"], ["--help"]) else 2
    script = Path(rest[0])
    if not script.is_file():
        print(f"python -m mpxla.compat: there is no file {script}", file=sys.stderr)
        return 2
    if "--check" in switches:
        from mpxla.compat.check import check_script, format_findings

        findings = check_script(script)
        print(format_findings(findings))
        return 1 if any(finding.is_refused for finding in findings) else 0
    from mpxla.compat.launcher import run_script
    from mpxla.env import read_environment
    from mpxla.session import show_uncaught

    show_uncaught(read_environment(), is_complete="--traceback" in switches)
    if "--trust-checkpoints" in switches:
        from mpxla.compat.settings import configure

        configure({"trust_checkpoints": True})
    run_script(script, rest[1:])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
