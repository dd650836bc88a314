"""Whether an optimizer updates every element by itself, so that replicas can share the work.

Torch's own are known. Any other is tried on small host tensors: whole, and as two flat parts.
This module must not know how parameters are divided.
"""

import copy
from collections import OrderedDict, defaultdict

import torch
from torch import optim

from mpxla.errors import ConfigError

__all__ = ["check_elementwise"]

_ELEMENTWISE = (
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
_TRIAL_STEPS = 3


def check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Checks that an optimizer gives the same numbers on parts of flattened parameters.

    Raises:
        ConfigError: it does not, or cannot be tried.
    """
    kind = type(optimizer)
    if kind in _ELEMENTWISE or _passes_trial(optimizer):
        return
    names = ", ".join(sorted(known.__name__ for known in _ELEMENTWISE))
    raise ConfigError(
        f"shard_optimizer_state: True divides parameters over replicas, and {kind.__name__} needs "
        f"whole tensors: a trial on flat parts gave other numbers, or failed. Use an optimizer "
        f"that updates every element by itself ({names}, or one of your own), or remove "
        f"shard_optimizer_state."
    )


def _passes_trial(optimizer: torch.optim.Optimizer) -> bool:
    """Runs copies of the optimizer on a whole tensor [4, 6] and on two flat parts of it."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        start = torch.randn(4, 6)
        gradients = [torch.randn(4, 6) for _ in range(_TRIAL_STEPS)]
    try:
        whole = _trained(optimizer, [start], [[g] for g in gradients])
        parts = _trained(
            optimizer,
            [start.flatten()[:7], start.flatten()[7:]],
            [[g.flatten()[:7], g.flatten()[7:]] for g in gradients],
        )
    except Exception:  # an optimizer that was not made for this may raise anything
        return False
    return torch.equal(whole[0].flatten(), torch.cat(parts))


def _trained(
    optimizer: torch.optim.Optimizer,
    values: list[torch.Tensor],
    gradients: list[list[torch.Tensor]],
) -> list[torch.Tensor]:
    parameters = [torch.nn.Parameter(value.clone()) for value in values]
    twin = copy.copy(optimizer)
    twin.__dict__.pop("step", None)  # LR schedulers put their own in its place
    hooks = [name for name in twin.__dict__ if name.startswith("_optimizer_")]
    twin.__dict__.update({name: OrderedDict() for name in hooks})
    twin.state = defaultdict(dict)
    twin.param_groups = [{**optimizer.param_groups[0], "params": parameters}]
    for of_step in gradients:
        for parameter, gradient in zip(parameters, of_step, strict=True):
            parameter.grad = gradient.clone()
        twin.step()
    return [parameter.detach() for parameter in parameters]
