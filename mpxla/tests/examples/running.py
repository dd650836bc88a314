"""Runs the scripts of an example on pooled ranks, as if each were started by hand."""

import runpy
import sys
from pathlib import Path
from typing import Any

from mpxla.testing import run_ranks

EXAMPLES = Path(__file__).parents[3] / "examples"

RELATIVE_TOLERANCE = 2e-4
"""Of a loss: training magnifies the rounding of sums over microbatches and replicas."""


def run_example(script: str, num_ranks: int, *arguments: str, result: str = "step_losses") -> list:
    """Runs a script below `examples/` on every rank.

    Returns:
        What it left in the global variable `result`, by rank.
    """
    path = EXAMPLES / script
    return run_ranks(_run, num_ranks, str(path), list(arguments), result, timeout_s=240)


def _run(script: str, arguments: list[str], result: str) -> Any:
    folder = str(Path(script).parent)
    saved = sys.argv, list(sys.path)
    sys.argv = [script, *arguments]
    sys.path.insert(0, folder)
    try:
        return runpy.run_path(script, run_name="__main__")[result]
    finally:
        sys.argv, sys.path[:] = saved
        # Another example may have a file of the same name.
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", None) or "").startswith(f"{folder}/"):
                del sys.modules[name]
