"""Methods that only a user's optimizer has, such as `first_step` of SAM and `eval` of a schedule.

They may write to what the optimizer holds. Where that is no parameter of the model but its update
copy (a float32 master, or a piece), the parameter has to take the value before the next step call.
"""

import functools
import inspect
from typing import Any

import torch

from mpxla.parallel.pieces import OptimizerPieces
from mpxla.parallel.update import CompiledUpdate

__all__ = ["published"]


def published(
    found: Any, optimizer: torch.optim.Optimizer, pieces: OptimizerPieces, update: CompiledUpdate
) -> Any:
    """An attribute of an optimizer, where it is a method whose writes to the model are published.

    The method finds gradients and values of the model in the update copies. With divided copies,
    all ranks have to call it.
    """
    is_own = inspect.ismethod(found) and found.__self__ is optimizer
    if not is_own or hasattr(torch.optim.Optimizer, found.__name__):
        return found

    @functools.wraps(found)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not pieces.num_held:  # which is known when the model has been placed
            return found(*args, **kwargs)
        pieces.collect_gradients()
        pieces.renew()
        known = pieces.prints()

        def publish() -> None:
            nonlocal known
            before, known = known, pieces.prints()
            if known != before:
                pieces.publish(has_masters=True)

        update.was_compiled = False
        update.begins = publish  # it would take parameters that differ for written to
        try:
            result = found(*args, **kwargs)
        finally:
            update.begins = None
        if update.was_compiled:
            pieces.publish(has_masters=False)
        publish()
        return result

    return call
