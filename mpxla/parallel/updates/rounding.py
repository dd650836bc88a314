"""Updates that are rounded stochastically: what they need, and those that are not compiled.

A compiled update widens its arguments and rounds its results inside the program. An optimizer that
runs by itself gets float32 tensors in the place of narrow ones for the length of its step.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from mpxla.device.backend import Buffer
from mpxla.parallel.programs import Programs
from mpxla.parallel.store import set_gradients, set_values
from mpxla.parallel.updates.state import dtypes_of_start
from mpxla.parallel.updates.stochastic_rounding import (
    Origin,
    StochasticRounding,
    is_narrow,
    origin_of_state,
    rounded_values,
)

__all__ = ["UpdateRounding"]


def _convert(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Exchanges a parameter's memory and type; torch wants its gradient to have the same type."""
    gradient = parameter.grad
    set_gradients([parameter], [None])
    set_values([parameter], [value])
    set_gradients([parameter], [None if gradient is None else gradient.to(value.dtype)])


class UpdateRounding:
    """Stochastic rounding in the updates of one optimizer.

    `origins` gives for the id of everything in the groups where it is in the model.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        rounding: StochasticRounding,
        origins: Callable[[], Mapping[int, Origin]],
        programs: Programs,
    ):
        self._optimizer = optimizer
        self._rounding = rounding
        self._programs = programs
        self.origins = origins
        self._widened: list[nn.Parameter] = []

    def key(self) -> Buffer:
        """The key of the current update, on the device."""
        (key,) = self._programs.backend.put([self._rounding.key()])
        return key

    def widen(self) -> None:
        """Before an optimizer steps by itself: what it reads and changes becomes float32."""
        self._widened = [
            parameter
            for group in self._optimizer.param_groups
            for parameter in group["params"]
            if is_narrow(parameter) and parameter.grad is not None
        ]
        self._made = dtypes_of_start(self._optimizer, torch.bfloat16) if self._widened else {}
        self._kept: dict[tuple[int, str], torch.dtype] = {}
        for parameter in self._widened:
            _convert(parameter, parameter.data.float())
            state = self._optimizer.state.get(parameter, {})
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    self._kept[id(parameter), key] = value.dtype
                    state[key] = value.float() if is_narrow(value) else value

    def narrow(self) -> None:
        """After it, or after its failure: what was narrow is rounded."""
        held, self._widened = self._widened, []
        if not held:
            return
        origins = self.origins()
        places: list[tuple[dict[str, Any], str]] = []
        sources = [origins[id(parameter)] for parameter in held]
        values: list[torch.Tensor] = [parameter.data for parameter in held]
        for parameter in held:
            state = self._optimizer.state.get(parameter, {})
            for key, value in state.items():
                if self._is_to_be_narrow(parameter, key, value):
                    places.append((state, key))
                    values.append(value)
                    source = origins[id(parameter)]
                    sources.append(origin_of_state(source, key, value, parameter))
        results = self._round(sources, values)
        for parameter, result in zip(held, results, strict=False):
            _convert(parameter, result)
        for (state, key), result in zip(places, results[len(held) :], strict=True):
            state[key] = result

    def _is_to_be_narrow(self, parameter: torch.Tensor, key: str, value: Any) -> bool:
        if not isinstance(value, torch.Tensor) or value.dtype is not torch.float32:
            return False
        # New state is of the type that the optimizer gives it beside a narrow parameter.
        like = torch.bfloat16 if value.shape == parameter.shape else value.dtype
        before = self._kept.get((id(parameter), key), self._made.get(key, like))
        return before is torch.bfloat16

    def _round(
        self, origins: Sequence[Origin], values: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        backend = self._programs.backend
        arguments = [self.key(), *backend.adopt(values)]
        results = self._programs.run(
            "stochastic rounding", rounded_values, (tuple(origins),), arguments
        )
        return backend.publish(results)
