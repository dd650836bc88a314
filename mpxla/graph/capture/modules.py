"""Which modules a captured step uses that belong to no distributed model: a teacher's, say."""

from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from mpxla.graph.exchanged import exchanged

__all__ = ["modules_noted"]


def modules_noted(
    model: nn.Module, found: list[nn.Module], running: list[nn.Module]
) -> AbstractContextManager[None]:
    """Collects modules that run, or whose tensors and parts are read.

    Export exchanges the same methods when it begins, so it has to have begun.

    Args:
        model: whose modules do not count.
        found: where to.
        running: has those that run, the innermost last.
    """
    call, get = nn.Module.__call__, nn.Module.__getattr__
    known = {id(module) for module in model.modules()}

    def note(module: nn.Module) -> None:
        if id(module) not in known:
            known.add(id(module))
            found.append(module)

    def noted_call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        note(self)
        running.append(self)
        try:
            return call(self, *args, **kwargs)
        finally:
            running.pop()

    def noted_get(self: nn.Module, name: str) -> Any:
        note(self)
        return get(self, name)

    return exchanged(nn.Module, __call__=noted_call, __getattr__=noted_get)
