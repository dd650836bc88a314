"""Whether an optimizer updates every element by itself, so that replicas can share the work.

Torch's own are known. Any other is tried on small host tensors: whole, and as two flat parts.
This module must not know how parameters are divided.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import optim

from mpxla.errors import ConfigError
from mpxla.parallel.updates.companions import Heir, follow_parameters, tensors_beside
from mpxla.parallel.updates.nested_state import flattened
from mpxla.parallel.updates.python import (
    copied_attributes,
    own_attributes,
    refuse_outside_state,
    state_of_no_parameter,
)
from mpxla.parallel.updates.trace import clone_optimizer
from mpxla.random_states import random_kept

__all__ = ["ELEMENTWISE", "check_elementwise", "is_elementwise", "mixes_parameters"]

ELEMENTWISE = (
    optim.ASGD,
    optim.Adadelta,
    optim.Adagrad,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
    optim.SGD,
)
_SCALES = (1.0, 100.0, 0.01) * 10
"""Of the gradients of a trial's steps: on both sides of any limit that somebody clips at. So many,
because some begin late with what they do to whole tensors (Shampoo after 25), or rarely (AdamP)."""
_SHAPES = ((4, 6), (2, 3, 2, 2), (160, 150))
"""Of a trial: optimizers treat kernels otherwise, or what is large (Adafactor, those of 8 bits)."""


def check_elementwise(optimizer: torch.optim.Optimizer, key: str) -> None:
    """Checks that an optimizer gives the same numbers on parts of flattened parameters.

    Raises:
        ConfigError: it does not, or cannot be tried; it names the key that wants it.
    """
    if is_elementwise(optimizer):
        return
    kind = type(optimizer)
    found = _trial_fails(optimizer) or "its update of a parameter depends on others"
    names = ", ".join(sorted(known.__name__ for known in ELEMENTWISE))
    raise ConfigError(
        f"{key} divides parameters over replicas, and {kind.__name__} needs whole tensors: "
        f"{found}. Use an optimizer that updates every element by itself ({names}, or one of your "
        f"own), or remove {key}."
    )


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer gives the same numbers on parts of flattened parameters."""
    if type(optimizer) in ELEMENTWISE:
        return True
    return _trial_fails(optimizer) is None and not mixes_parameters(optimizer)


def mixes_parameters(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an update of one parameter depends on others, as by a norm over all of them.

    Tried on small host tensors, together and one by one; with a closure where it wants one. What
    cannot be tried is taken for no.
    """
    if type(optimizer).__module__.startswith("torch.optim"):
        return False
    return any(_mixes(optimizer, has_closure) for has_closure in (False, True))


def _mixes(optimizer: torch.optim.Optimizer, has_closure: bool) -> bool:
    with random_kept():
        torch.manual_seed(0)
        starts = [torch.randn(shape, dtype=torch.float64) for shape in ((4, 6), (5,))]
        gradients = [[torch.randn_like(s) * scale for s in starts] for scale in _SCALES]
        try:
            refuse_outside_state(type(optimizer))
            both = _trained(optimizer, starts, gradients, has_closure)
            alone = [
                _trained(optimizer, [start], [[of_step[i]] for of_step in gradients], has_closure)
                for i, start in enumerate(starts)
            ]
        except Exception:  # an optimizer that was not made for this may raise anything
            return False
    are_equal = all(
        torch.equal(value, one.values[0]) for value, one in zip(both.values, alone, strict=True)
    )
    # What is estimated from all may have no effect in so few steps, but it is kept somewhere.
    return not are_equal or any(both.numbers != one.numbers for one in alone)


def _trial_fails(optimizer: torch.optim.Optimizer) -> str | None:
    """What goes wrong on whole tensors and on two flat parts of each, if anything does."""
    for shape in _SHAPES:
        with random_kept():
            torch.manual_seed(0)
            start = torch.randn(shape, dtype=torch.float64)
            gradients = [torch.randn_like(start) * scale for scale in _SCALES]
        cut = start.numel() // 3
        try:
            whole = _trained(optimizer, [start], [[g] for g in gradients])
            parts = _trained(
                optimizer,
                [start.flatten()[:cut], start.flatten()[cut:]],
                [[g.flatten()[:cut], g.flatten()[cut:]] for g in gradients],
            )
        except Exception as error:  # an optimizer that was not made for this may raise anything
            mode = ". If it has a mode for training, call optimizer.train() before it is wrapped"
            text = f"a trial of it raised {type(error).__name__}: {str(error).rstrip('.')}"
            return text + (mode if hasattr(optimizer, "train") else "")
        moved, other = (
            torch.cat([value.flatten() for value in trained.values]) - start.flatten()
            for trained in (whole, parts)
        )
        # Not to the bit: powers and the like are computed otherwise at the ends of a tensor.
        is_equal = torch.allclose(moved, other, rtol=0.0, atol=1e-10 * float(moved.abs().max()))
        if not is_equal or any(of_part != whole.states[0] for of_part in parts.states):
            return "a trial on flat parts gave other numbers"
    return None


class _Trained(NamedTuple):
    """What a trial has come to: the parameters, and numbers of each of them and of all."""

    values: list[torch.Tensor]
    states: list[str]
    numbers: str


def _trained(
    optimizer: torch.optim.Optimizer,
    values: list[torch.Tensor],
    gradients: list[list[torch.Tensor]],
    has_closure: bool = False,
) -> _Trained:
    parameters = [torch.nn.Parameter(value.clone()) for value in values]
    twin = _twin(optimizer, parameters)
    for of_step in gradients:

        def closure(of_step: list[torch.Tensor] = of_step) -> torch.Tensor:
            for parameter, gradient in zip(parameters, of_step, strict=True):
                # By its value as well: what moves before it calls this again is seen then.
                parameter.grad = gradient + (parameter.detach() if has_closure else 0)
            return torch.zeros(())

        closure()
        twin.step(closure) if has_closure else twin.step()
    of_all = [value for group in twin.param_groups for value in group.values()]
    of_all += [*own_attributes(twin).values(), *flattened(state_of_no_parameter(twin)).values()]
    return _Trained(
        [parameter.detach() for parameter in parameters],
        [_numbers_in(twin.state.get(parameter, {}).values()) for parameter in parameters],
        _numbers_in(of_all, largest=64),
    )


def _numbers_in(kept: Iterable[Any], largest: int = 1) -> str:
    """Numbers and small tensors in plain text, which is equal for nan as well.

    Of a dictionary that has something by parameter, what it has by name is among them.
    """
    found: list[Any] = []
    for value in kept:
        if isinstance(value, dict) and any(map(torch.is_tensor, value)):
            by_name = (v for key, v in value.items() if isinstance(key, str))
            found.append(_numbers_in(by_name, largest))
        elif torch.is_tensor(value) and value.numel() <= largest:
            found.append(value.tolist())
        elif isinstance(value, int | float):
            found.append(value)
    return str(found)


def _twin(optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter]) -> Any:
    """A copy of an optimizer with other parameters in the place of its first one."""
    before = [list(group["params"]) for group in optimizer.param_groups]
    held = [p for group in before for p in group]  # without values where ranks hold parts
    first = next((p for p in held if not p.is_meta), held[0])
    groups = [
        {**group, "params": parameters if any(p is first for p in of_group) else []}
        for group, of_group in zip(optimizer.param_groups, before, strict=True)
    ]
    shared = [*held, *tensors_beside(optimizer)]
    twin = clone_optimizer(optimizer, groups, {}, copied_attributes(optimizer, shared))

    def heirs(parameter: torch.nn.Parameter) -> list[Heir]:
        return [_tried(p, i, first) for i, p in enumerate(parameters) if parameter is first]

    follow_parameters(twin, before, heirs, torch.Tensor.clone)
    return twin


def _tried(parameter: torch.nn.Parameter, number: int, first: torch.nn.Parameter) -> Heir:
    """A tensor of the trial, for which copies become copies of it, and zeros zeros."""

    def convert(value: torch.Tensor) -> torch.Tensor:
        if first.is_meta:
            raise ValueError("it is unknown what this would be in the trial")
        if torch.equal(value.cpu().to(first.dtype), first.detach().cpu()):
            return parameter.detach().to(value.dtype).clone()
        if value.any():
            raise ValueError("it is unknown what this would be in the trial")
        return torch.zeros_like(parameter, dtype=value.dtype)

    return Heir(parameter, number, convert)
