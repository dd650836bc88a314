"""Runs scripts on pooled ranks as the launcher does, or plainly in a process of their own."""

import json
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mpxla.compat import CompatError
from mpxla.tests.ranks.run import run_ranks

EXAMPLES = Path(__file__).parents[3] / "examples" / "smp_clients"


def launch(script: str, arguments: list[str], config: dict[str, Any] | None = None) -> Any:
    """The launcher's work on one rank; SageMaker hands the configuration over like this.

    Returns:
        `final_loss` of the script, if it has one.
    """
    from mpxla.compat.launcher import run_script

    os.environ.pop("SM_HP_MP_PARAMETERS", None)
    if config is not None:
        os.environ["SM_HP_MP_PARAMETERS"] = json.dumps(config)
    forget_files_beside(script)
    return run_script(Path(script), arguments).get("final_loss")


def inside(function: Callable[[], Any]) -> Any:
    """Calls a function of a test on one rank inside the launcher, as if a script called it."""
    return run_ranks(_call_mapped, 1, function)[0]


def _call_mapped(function: Callable[[], Any]) -> Any:
    from mpxla.compat.launcher import mapped

    os.environ.pop("SM_HP_MP_PARAMETERS", None)  # of another test
    with mapped():
        return function()


def refusal(function: Callable[[], Any], kind: type[Exception] = CompatError) -> str:
    """Text of the error that a call raises."""
    with pytest.raises(kind) as refused:
        function()
    return str(refused.value)


def run_plainly(script: str, arguments: list[str]) -> Any:
    """Runs a script by itself and returns its `final_loss`, if it has one."""
    forget_files_beside(script)
    saved = sys.argv, list(sys.path)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    try:
        return runpy.run_path(script, run_name="__main__").get("final_loss")
    finally:
        sys.argv, sys.path[:] = saved


def forget_files_beside(script: str | Path) -> None:
    """A pooled process may have imported files of another run."""
    folder = str(Path(script).parent)
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(f"{folder}/"):
            del sys.modules[name]
