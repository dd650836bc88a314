"""`requires_grad` of parameters, where a step function changes it as those of GANs do.

In PyTorch an operator differentiates by a parameter whose flag is set when it is used, and the
parameter takes the gradient if its flag is set in the backward. While a step is captured, the flag
of the stand-in only says whether the step trains the parameter at all. What reads one that is
frozen at that time is given it detached (`contents.py`), and what backwards reach is looked
at when the function has run.

This module must not know how the step is captured.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch._C import DisableTorchFunction

from mpxla.errors import CaptureError
from mpxla.graph.capture.own_parameters import OwnParameters
from mpxla.graph.capture.recorder import autograd_nodes
from mpxla.graph.stepgraph import LeftFlag
from mpxla.graph.user_code import at_user_line

__all__ = ["Flags"]


class Flags:
    """Of the parameters of a model, while its step function runs.

    Args:
        model: has stand-ins for parameters, which require gradients if the step trains them.
        thawed: names of those that are frozen when it begins nevertheless.
        own: the parameters of the model itself.

    Attributes:
        thawed: names of others that the function has unfrozen, and whose earlier uses are not
            known to be without a gradient.
    """

    def __init__(self, model: nn.Module, thawed: Collection[str], own: OwnParameters):
        named = [*model.named_parameters()]
        self._own = own
        self._parameters = {id(parameter): (name, parameter) for name, parameter in named}
        self._frozen = {id(parameter) for name, parameter in named if name in thawed}
        self._began = {id(p): p.requires_grad and name not in thawed for name, p in named}
        self._left: dict[int, LeftFlag] = {}
        self._used: set[int] = set()
        self._read_frozen: set[int] = set()
        self._regions: list[tuple[set[int], list[torch.Tensor]]] = []
        self._backwards: list[tuple[Sequence[torch.Tensor], frozenset[int], str]] = []
        self.thawed: set[str] = set()

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The stand-in of a parameter of the model; None for another tensor.

        Scripts hold parameters themselves: in lists, or in `optimizer.param_groups`.
        """
        stand_in = self._own.stand_in(tensor)
        return stand_in if id(stand_in) in self._parameters else None

    def put(self, parameter: torch.Tensor, value: bool) -> None:
        """`parameter.requires_grad = value`."""
        key, known = id(parameter), self._left.get(id(parameter))
        # Uses of what is not trained are not noted.
        is_early = key not in self._used and parameter.requires_grad
        self._left[key] = LeftFlag(
            value, value != self._began[key], known.is_early if known else is_early
        )
        if not value:
            self._frozen.add(key)
            return
        self._frozen.discard(key)
        if not parameter.requires_grad:
            self.thawed.add(self._parameters[key][0])
            with DisableTorchFunction():
                parameter.requires_grad_()  # so that the function can go on to its end

    def is_frozen(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a parameter that is frozen now, which something is about to use."""
        key = id(tensor)
        if key in self._parameters:
            self._used.add(key)
        if key not in self._frozen:
            return False
        self._read_frozen.add(key)
        return True

    def reentrant(self, run: Callable[[], Any]) -> Any:
        """Runs a reentrant checkpoint, which PyTorch runs again with the flags of the backward."""
        before, self._read_frozen = self._read_frozen, set()
        found = run()
        tensors = [leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, torch.Tensor)]
        if self._read_frozen:
            self._regions.append((self._read_frozen, tensors))
        self._read_frozen = before | self._read_frozen
        return found

    def note_backward(self, tensors: Sequence[torch.Tensor]) -> None:
        """`model.backward(tensors)`."""
        line = at_user_line() if self._left or self._frozen else ""
        self._backwards.append((tensors, frozenset(self._frozen), line))

    def untrained(self) -> set[str]:
        """Parameters whose uses differ from what PyTorch gives gradients to: they get none.

        Raises:
            CaptureError: they are trained by another backward of the step.
        """
        if not any(frozen for _, frozen, _ in self._backwards) and not self._regions:
            return set()
        trained: set[int] = set()
        dropped: dict[int, str] = {}
        for tensors, frozen, line in self._backwards:
            nodes = set(autograd_nodes(tensors))
            leaves = {id(getattr(n, "variable", None)) for n in nodes} & self._parameters.keys()
            self._check_regions(nodes, frozen, line)
            if leaves and leaves <= frozen:
                raise CaptureError(
                    f"model.backward was called{line} while all parameters that the loss depends "
                    f"on were frozen ({self._names(leaves)}), so that nothing would be learned. "
                    f"Set requires_grad before."
                )
            trained |= leaves - frozen
            dropped |= dict.fromkeys(leaves & frozen, line)
        if both := dropped.keys() & trained:
            raise CaptureError(
                f"model.backward was called{dropped[min(both)]} while parameters were frozen that "
                f"the loss depends on by an earlier use ({self._names(both)}). PyTorch gives them "
                f"no gradient of this loss, and they have one of another backward of the step "
                f"function. Freeze parameters before the loss is computed, or unfreeze them after "
                f"its backward."
            )
        return {self._parameters[key][0] for key in dropped}

    def _check_regions(self, nodes: set[Any], frozen: frozenset[int], line: str) -> None:
        for read, results in self._regions:
            now = read - frozen
            if now and any(result.grad_fn in nodes for result in results):
                raise CaptureError(
                    f"model.backward was called{line} with a checkpointed region that has used "
                    f"frozen parameters, which are not frozen any more ({self._names(now)}). With "
                    f"use_reentrant=True, PyTorch runs it again with the flags of the backward. "
                    f"Use use_reentrant=False, or unfreeze parameters after the backward."
                )

    def _names(self, keys: Iterable[int]) -> str:
        names = sorted(self._parameters[key][0] for key in keys)
        return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")

    def left(self) -> dict[str, LeftFlag]:
        """What the function has set, by the name of the parameter."""
        return {self._parameters[key][0]: flag for key, flag in self._left.items()}

    def release(self) -> None:
        """Lets go of tensors, and so of the graph of autograd, at the end."""
        for held in (self._parameters, self._backwards, self._regions):
            held.clear()
