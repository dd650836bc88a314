"""Plain values outside of a step function that its code names, as reads that show changes.

Globals, closed-over values, and attributes of modules and classes. This module must not know what
is done with what was read.
"""

from collections.abc import Sequence, Set
from typing import Any, cast

import torch
from torch import nn

from mpxla.graph.python.plain import LARGE, MISSING, UNKNOWN, Read, plain
from mpxla.graph.python.reach import Outside
from mpxla.log import warn_once

__all__ = ["is_known", "kept", "outside_values", "without_counted"]

_EXCHANGED = (torch.Tensor, nn.Module)


def outside_values(found: Outside) -> list[Read]:
    """Plain globals, closed-over values, and attributes of modules and classes that code names."""
    copies = [(p, plain(p.value, found.names)) for p in found.places]
    known = [(p, value) for p, value in copies if is_known(p.name, value)]
    return [Read(p.name, value, p.get, found.names, p.put) for p, value in known]


def is_known(name: str, value: Any) -> bool:
    """Whether a value can be compared with a later one; of a large one a warning tells."""
    if value is LARGE:
        warn_once(
            f"large value {name}",
            f"the step function names {name}, which is too large, or holds too many objects, to be "
            f"compared in every call. If the step reads it, it reads what it is now, and a later "
            f"change in place is not noticed: pass what changes as an argument.",
        )
    return value is not UNKNOWN and value is not LARGE


def kept(reads: Sequence[Read]) -> tuple[list[Read], list[Read]]:
    """Those whose value the capture itself has not changed, and those that it has.

    What a step function counts or collects changes with every capture, and would ask for the next.
    Tensors are exchanged by the capture itself.
    """
    unchanged: list[Read] = []
    others: list[Read] = []
    for read in reads:
        found = read.change()
        if found is None:
            unchanged.append(read)
        elif found.before is not MISSING and not isinstance(found.before, _EXCHANGED):
            others.append(read)
    return unchanged, others


def without_counted(read: Read, counted: Set[str]) -> Read:
    """A read of a container without the entries that are inputs; others as they are."""
    if not any(name.startswith(f"{read.name}[") for name in counted):
        return read

    def others(name: str, value: Any) -> Any:
        if isinstance(value, list):
            return [*others(name, dict(enumerate(cast(list[Any], value)))).values()]
        if not isinstance(value, dict):
            return value
        parts = ((k, f"{name}[{k!r}]", v) for k, v in cast(dict[Any, Any], value).items())
        return {k: others(part, v) for k, part, v in parts if part not in counted}

    def now() -> Any:
        return others(read.name, plain(read.now(), read.names))

    value = others(read.name, read.value)
    return Read(read.name, value, now, put=read.put, whole=read.whole or read.now)
