"""What a captured step depends on of tensors and modules that no distributed model holds.

A teacher or a table that the step function closes over, say. Programs read the numbers of such
tensors anew in every call; what Python has made of them when the step was captured, which of them
there were, and modes and hooks of the modules are looked at in every call. This module must not
know what is done with the answer.
"""

import operator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from mpxla.graph.python.module_tables import MODULE_TABLES
from mpxla.graph.python.plain import Change, Read, change

__all__ = ["ModuleRead", "ValueRead"]

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
_MOST_SHOWN = 4


@dataclass(frozen=True, eq=False)
class ValueRead(Read):
    """A tensor whose numbers Python has read, with a copy of them."""

    @classmethod
    def of(cls, tensor: torch.Tensor, line: str) -> "ValueRead":
        """Of the user's own tensor, read at a line."""
        return cls(f"the tensor read{line}", tensor.detach().clone(), lambda: tensor)

    def change(self) -> Change | None:
        """The first numbers that are others."""
        now, before = self.now().detach(), self.value
        if now.shape != before.shape:
            return Change(self.name, list(before.shape), list(now.shape))
        if torch.equal(now, before):
            return None
        places = (now != before).flatten()
        shown = (t.flatten()[places][:_MOST_SHOWN].tolist() for t in (before, now))
        return Change(self.name, *shown)


@dataclass(frozen=True, eq=False)
class ModuleRead(Read):
    """A module that has run, or whose tensors were read."""

    @classmethod
    def of(cls, module: nn.Module) -> "ModuleRead":
        """As it is now."""
        return cls(type(module).__name__, _facts(module), partial(_facts, module))

    def change(self) -> Change | None:
        """As for any read; models with hundreds of modules must not notice the look."""
        now, before = self.now(), self.value
        if now.keys() != before.keys():
            return Change(f"what the module {self.name} has", list(before), list(now))
        if all(map(operator.is_, now.values(), before.values())):
            return None
        return change(self.name, before, now)


def _facts(module: nn.Module) -> dict[str, Any]:
    own = vars(module)
    facts = {"training": own["training"], "forward": own.get("forward")}
    for table in MODULE_TABLES:
        facts |= own[table]
    for kind in _HOOKS:
        facts |= {f"{kind} {place}": hook for place, hook in enumerate(own[kind].values())}
    return facts
