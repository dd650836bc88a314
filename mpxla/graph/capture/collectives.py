"""Collectives of `torch.distributed` in a step function, over the replicas of the model.

Contrastive losses gather the features of all replicas; codebooks, centers and counts are summed
over them. Each becomes a gather of what the replicas have in one microbatch, and arithmetic on
that: the step then runs in stages like any other. Ranks of one pipeline work on the same samples
and have nothing to add, so the members have to be the replicas, all of them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable

from mpxla.errors import CaptureError
from mpxla.graph.collectives import join_replicas
from mpxla.graph.normalize import COLLECTIVES_OUTSIDE
from mpxla.graph.user_code import at_user_line

__all__ = ["Replicas"]

_MODULE = "torch.distributed.distributed_c10d"
_FUNCTIONS: Any = differentiable
_ALL_GATHER, _ALL_REDUCE = _FUNCTIONS._AllGather, _FUNCTIONS._AllReduce

_REDUCTIONS: tuple[tuple[Any, Callable[[torch.Tensor], torch.Tensor]], ...] = (
    (dist.ReduceOp.SUM, lambda joined: joined.sum(0, dtype=joined.dtype)),
    (dist.ReduceOp.AVG, lambda joined: joined.mean(0)),
    (dist.ReduceOp.MAX, lambda joined: joined.amax(0)),
    (dist.ReduceOp.MIN, lambda joined: joined.amin(0)),
    (dist.ReduceOp.PRODUCT, lambda joined: joined.prod(0, dtype=joined.dtype)),
)
_LINEAR = 2
"""So many of them have the derivative that `torch.distributed.nn` gives them."""


class _Done:
    """What `async_op=True` returns: a program orders its collectives by itself."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class Replicas:
    """The replicas of a model, for the step functions that are captured with it.

    Args:
        ranks: those that hold the same tensors as this one, itself among them.
    """

    def __init__(self, ranks: Sequence[int]):
        self._ranks = list(ranks)

    def takes(self, function: Any) -> bool:
        """Whether a function that is called in a step is a collective on tensors."""
        return function in (_ALL_GATHER, _ALL_REDUCE) or (
            getattr(function, "__module__", "") == _MODULE
        )

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a collective gives, of torch's functions or of their autograd functions' `apply`.

        Raises:
            CaptureError: it is of another kind, or has other members.
        """
        run = _RUN.get(getattr(function, "__name__", ""))
        if run is None:
            raise self._refused(function)
        return getattr(self, run)(function, *args, **kwargs)

    def _refused(self, function: Any) -> CaptureError:
        names = ", ".join(name for name in _RUN if not name.startswith("_"))
        name = function.__name__.lstrip("_")
        return CaptureError(
            f"{name} is a collective inside a step function{at_user_line()}. {COLLECTIVES_OUTSIDE} "
            f"What goes over the replicas alone may be there: {names} (SUM, AVG, MAX, MIN, "
            f"PRODUCT), and all_gather and all_reduce (SUM, AVG) of torch.distributed.nn."
        )

    def _joined(self, function: Any, value: torch.Tensor, group: Any) -> torch.Tensor:
        """The values of all members, [members, ...]."""
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        if len(ranks) == 1:
            return value.unsqueeze(0)
        if ranks != self._ranks:
            name = function.__name__.lstrip("_")
            raise CaptureError(
                f"{name} is a collective inside a step function{at_user_line()}, between the ranks "
                f"{ranks}. There it is possible between replicas, the ranks {self._ranks}: pass "
                f"group=smp.get_dp_process_group(). {COLLECTIVES_OUTSIDE}"
            )
        return join_replicas(value.unsqueeze(0), len(ranks))

    def _reduced(self, function: Any, value: torch.Tensor, op: Any, group: Any) -> torch.Tensor:
        kinds = _REDUCTIONS[:_LINEAR] if function is _ALL_REDUCE else _REDUCTIONS
        reduce = next((reduce for kind, reduce in kinds if kind == op), None)
        if reduce is None:
            raise self._refused(function)
        return reduce(self._joined(function, value, group))

    def _all_reduce(
        self,
        function: Any,
        tensor: torch.Tensor,
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> _Done | None:
        _put(tensor, self._reduced(function, tensor.detach(), op, group))
        return _Done() if async_op else None

    def _all_gather(
        self,
        function: Any,
        tensor_list: Sequence[torch.Tensor],
        tensor: torch.Tensor,
        group: Any = None,
        async_op: bool = False,
    ) -> _Done | None:
        for place, value in zip(
            tensor_list, self._joined(function, tensor.detach(), group).unbind(0), strict=True
        ):
            _put(place, value)
        return _Done() if async_op else None

    def _all_gather_into_tensor(
        self,
        function: Any,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any = None,
        async_op: bool = False,
    ) -> _Done | None:
        joined = self._joined(function, input_tensor.detach(), group)
        _put(output_tensor, joined.reshape(output_tensor.shape))
        return _Done() if async_op else None

    def _gathered(
        self, function: Any, group: Any, tensor: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        return self._joined(function, tensor, group).unbind(0)

    def _summed(self, function: Any, op: Any, group: Any, tensor: torch.Tensor) -> torch.Tensor:
        return self._reduced(function, tensor, op, group)


_RUN = {
    "all_reduce": "_all_reduce",
    "all_gather": "_all_gather",
    "all_gather_into_tensor": "_all_gather_into_tensor",
    _ALL_GATHER.__name__: "_gathered",
    _ALL_REDUCE.__name__: "_summed",
}


def _put(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Writes a result, which no derivative sees: one that goes through the tensor goes on."""
    if tensor.requires_grad:
        tensor.add_(value - tensor.detach())
    else:
        tensor.copy_(value)
