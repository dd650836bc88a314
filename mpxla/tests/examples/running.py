"""Runs the scripts of an example on pooled ranks, as if each were started by hand."""

import contextlib
import importlib
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from mpxla.tests.ranks.run import run_ranks

EXAMPLES = Path(__file__).parents[3] / "examples"

RELATIVE_TOLERANCE = 2e-4
"""Of a loss: training magnifies the rounding of sums over microbatches and replicas."""
BFLOAT16_TOLERANCE = 1e-2
"""Of a loss of a model in bfloat16, against one in float32; numbers are rounded by up to 2^-9."""


def run_example(script: str, num_ranks: int, *arguments: str, result: str = "step_losses") -> list:
    """Runs a script below `examples/` on every rank.

    Returns:
        What it left in the global variable `result`, by rank.
    """
    words = [str(EXAMPLES / script), *(str(argument) for argument in arguments)]
    return run_ranks(_run, num_ranks, words, result, timeout_s=240)


def load_beside(example: str, name: str) -> ModuleType:
    """Imports a file of an example; to be called on a rank, where transformers may be imported."""
    with _importing_from(EXAMPLES / example):
        return importlib.import_module(name)


def _run(words: list[str], result: str) -> Any:
    saved, sys.argv = sys.argv, words
    try:
        with _importing_from(Path(words[0]).parent):
            return runpy.run_path(words[0], run_name="__main__")[result]
    finally:
        sys.argv = saved


@contextlib.contextmanager
def _importing_from(folder: Path) -> Iterator[None]:
    """The files of a folder can be imported; afterwards they are forgotten, as others may have
    files of the same name."""
    saved = list(sys.path)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path[:] = saved
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", None) or "").startswith(f"{folder}/"):
                del sys.modules[name]
