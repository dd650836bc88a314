"""A stage's derivative as it runs for a microbatch: seeded, and added to what came before."""

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import fx

from mpxla.stage.spec import TensorSpec

__all__ = ["AccumulatingBackward", "accumulator_spec", "added"]

_NARROW = (torch.bfloat16, torch.float16)


def accumulator_spec(parameter: TensorSpec) -> TensorSpec:
    """What the gradients of a parameter are summed in: float32 for 16-bit types, else its own.

    A sum of n microbatches in bfloat16 loses log2(n) of its 8 bits, and stands still once a term is
    below half an ulp of the sum.
    """
    is_narrow = parameter.dtype in _NARROW
    return replace(parameter, dtype=torch.float32) if is_narrow else parameter


class AccumulatingBackward(torch.nn.Module):
    """(accumulators, saved, gradients, seed) -> (accumulators, gradients of inputs).

    Args:
        derivative: (saved, gradient of every attached output) -> gradients of the arguments.
        num_accumulators: how many parameters are trained.
        num_saved: how many values are saved.
        port_of_grad: for every gradient that arrives, the output that it belongs to.
        objective_specs: specs of the objectives, whose gradient is the seed.
        input_specs: specs of the inputs that get a gradient.
        gradients: which results of the derivative are wanted: those of parameters, then of inputs.
        disguises_sums: see `added`.
    """

    def __init__(
        self,
        derivative: fx.GraphModule,
        num_accumulators: int,
        num_saved: int,
        port_of_grad: tuple[int, ...],
        objective_specs: tuple[TensorSpec, ...],
        input_specs: tuple[TensorSpec, ...],
        gradients: tuple[int, ...],
        disguises_sums: bool = False,
    ):
        super().__init__()
        self.derivative = derivative
        self._num_accumulators = num_accumulators
        self._num_saved = num_saved
        self._port_of_grad = port_of_grad
        self._objective_specs = objective_specs
        self._input_specs = input_specs
        self._gradients = gradients
        self._disguises_sums = disguises_sums

    def forward(self, *arguments: torch.Tensor) -> list[torch.Tensor]:
        """Arguments and results as in the docstring of the class."""
        first_grad = self._num_accumulators + self._num_saved
        accumulators = arguments[: self._num_accumulators]
        saved = arguments[self._num_accumulators : first_grad]
        seed = arguments[-1]
        tangents = self._sum_by_port(arguments[first_grad:-1])
        tangents += [seed.to(spec.dtype).expand(spec.shape) for spec in self._objective_specs]
        results = self.derivative(*saved, *tangents)
        grads = [results[i] for i in self._gradients]
        updated = added(accumulators, grads, seed if self._disguises_sums else None)
        for grad, spec in zip(grads[len(updated) :], self._input_specs, strict=True):
            if grad is None:
                grad = torch.zeros(spec.shape, dtype=spec.dtype, device=seed.device)
            updated.append(grad)
        return updated

    def _sum_by_port(self, grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """One gradient per output; an output read by several stages gets the sum."""
        by_port: dict[int, list[torch.Tensor]] = {}
        for port, grad in zip(self._port_of_grad, grads, strict=True):
            by_port.setdefault(port, []).append(grad)
        return [functools.reduce(torch.add, parts) for parts in by_port.values()]


def added(
    accumulators: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor | None],
    seed: torch.Tensor | None,
) -> list[torch.Tensor]:
    """The accumulators with the first gradients added, in their dtypes; None adds nothing.

    Args:
        accumulators: sums so far.
        grads: of the same shapes; there may be more.
        seed: a scalar of the program, to disguise the sums with; None leaves them plain.

    XLA's CPU backend compiles every lone addition by itself, but fused operations of one kind and
    shape only once. So there (`Lowering.disguises_sums`) a gradient is multiplied by a one that XLA
    does not know to be one: 34 additions of a GPT with 8 blocks took 1.3 s to compile, and take
    0.2 s.
    """
    # Not `seed - seed + 1`: an infinite seed (a loss scale that overflows) would make it NaN.
    one = None if seed is None else (seed * 0 == 1).to(seed.dtype) + 1
    return [
        a if g is None else a + (g.to(a.dtype) if one is None else g.to(a.dtype) * one.to(a.dtype))
        for a, g in zip(accumulators, grads, strict=False)
    ]
