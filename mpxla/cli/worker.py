"""One process of `python -m mpxla run`: the script as `python SCRIPT` would run it.

An error is written to torchrun's file for it, so that the parent can name it, and shown without
the lines of this file. A rank that only ends because another one has failed shows none.
"""

import runpy
import sys
import traceback
from pathlib import Path
from types import TracebackType

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from mpxla.errors import PeerFailure

__all__: list[str] = []


def main() -> None:
    """Runs the script that the command line names."""
    script = sys.argv[1]
    handler = get_error_handler()
    handler.initialize()

    def report(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        handler.record_exception(error)
        if not isinstance(error, PeerFailure):
            shown = _from_script(trace, script)
            traceback.print_exception(kind, error, shown)

    # A hook and not an `except`: `smp.init` chains its own to it, which tells the other ranks.
    sys.excepthook = report
    del sys.argv[0]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


def _from_script(trace: TracebackType | None, script: str) -> TracebackType | None:
    """The part of a traceback that starts in the script; all of it if it never got there."""
    inner = trace
    while inner is not None and inner.tb_frame.f_code.co_filename != script:
        inner = inner.tb_next
    return inner or trace


if __name__ == "__main__":
    main()
