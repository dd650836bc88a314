"""Arguments of a step function that it changes in place.

The graph of a step has no inputs that change. So the function gets copies of those, and what it
has made of the copies comes back beside its results:

    step(x)  with x.clamp_(0)   ->   x = x.clone(); x.clamp_(0); Rewritten(returned, [x], paths)

This module must not know how arguments are cut into microbatches.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree

from mpxla.errors import CaptureError

__all__ = ["ChangedArgumentError", "Rewritten", "rewritten_paths", "with_copies"]


class ChangedArgumentError(CaptureError):
    """A step changes an input in place.

    Attributes:
        place: of the input among all of the step.
    """

    def __init__(self, text: str, place: int):
        super().__init__(text)
        self.place = place


@dataclass(frozen=True)
class Rewritten:
    """What a function returned, and the new values of arguments, by their paths."""

    returned: Any
    values: Sequence[Any]
    paths: tuple[str, ...]


pytree.register_pytree_node(
    Rewritten,
    lambda node: ([node.returned, [*node.values]], node.paths),
    lambda children, paths: Rewritten(*children, paths=paths),
)


def rewritten_paths(structure: Any) -> tuple[str, ...]:
    """The arguments whose new values are in results of a structure."""
    return structure.context if structure.type is Rewritten else ()


def with_copies(
    function: Callable[[Sequence[torch.Tensor]], Any],
    leaves: Sequence[torch.Tensor],
    tensor_paths: Sequence[str],
    changed: Collection[str],
) -> Any:
    """What a function of tensor leaves returns, with copies of those that it changes."""
    places = {path: place for place, path in enumerate(tensor_paths) if path in changed}
    if not places:
        return function(leaves)
    given = [*leaves]
    for place in places.values():
        given[place] = leaves[place].clone()
    returned = function(given)
    return Rewritten(returned, [given[place] for place in places.values()], tuple(places))
