"""What Python and torch do beside while graphs are made, and need not."""

import contextlib
from collections.abc import Generator

import torch
from torch.fx._lazy_graph_module import (
    _use_lazy_graph_module,  # pyright: ignore[reportPrivateUsage]
)

from mpxla.collection import collection_paused
from mpxla.log import warn_once

__all__ = ["graphs_made_quickly"]


@contextlib.contextmanager
def graphs_made_quickly() -> Generator[None]:
    """No search for garbage in cycles meanwhile, and no Python code for graphs that nobody calls.

    The search takes a quarter of the time to the first step of a small GPT. Code takes a tenth of
    the rest, and most graphs become programs without it. Nor does torch look for NaN in derivatives
    that have no values yet.
    """
    if torch.is_anomaly_enabled():
        warn_once(
            "anomalies",
            "torch.autograd.set_detect_anomaly has no effect on steps: their derivatives are "
            "programs. Look for NaN in the loss and in param.grad after a step.",
        )
    unwatched = torch.autograd.set_detect_anomaly(False)
    with collection_paused(), _use_lazy_graph_module(True), unwatched:
        yield
