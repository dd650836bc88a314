"""Torch's own clipping functions, made to see all gradients of the distributed model.

Scripts call `torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)`, or a library does it for
them. Torch would take the norm of what this process holds: the gradients of one stage, or nothing
where replicas divide the updates. From the first `DistributedModel` on, the functions look whether
they are given parameters of the session's models, and what they hold is somewhere else too; all
else goes to torch as before.

Scripts may have imported the functions by name long ago, so the functions themselves stay, and
their bodies are exchanged: inside torch's `no_grad` wrapper (torch 2.9), and the code of
torch_xla's `clip_grad_norm_`, which torch's gives way to once torch_xla is imported (2.9).

`get_total_norm` takes tensors. Given all gradients (or parameters) that a rank holds of some
models, it gives the norm over all ranks; given some of them, that of this rank, with a warning.
"""

from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad

from mpxla.errors import MpxlaError
from mpxla.graph.user_code import at_user_line
from mpxla.log import warn_once
from mpxla.parallel.gradients.norms import GradientNorm, clip_grad_norm_
from mpxla.parallel.models import Models
from mpxla.session import current_models

__all__ = ["new_body", "see_all_gradients"]

_Parameters = torch.Tensor | Iterable[torch.Tensor]
_bodies: dict[str, Callable[..., torch.Tensor]] = {}
"""What torch_xla's functions did before."""
_done: set[str] = set()


def see_all_gradients() -> None:
    """Exchanges the bodies of the functions; once in a process."""
    for name, make in _BODIES.items():
        if name not in _done:
            _done.add(name)
            # `func` of torch's wrapper, which every reference to the function shares.
            (cell,) = getattr(clip_grad, name).__closure__
            cell.cell_contents = make(cell.cell_contents)
    known: Any = nn.utils.clip_grad_norm_
    if known is not clip_grad.clip_grad_norm_ and known.__name__ not in _bodies:
        before = FunctionType(known.__code__, known.__globals__, argdefs=known.__defaults__)
        _bodies[known.__name__] = _clip_norm(before)
        known.__code__ = _clip_by_new_body.__code__


def _clip_by_new_body(
    parameters: _Parameters,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """The code of torch_xla's function from then on; it runs with the globals of that module."""
    from mpxla.parallel.gradients.torch_clipping import new_body

    return new_body(parameters, max_norm, norm_type, error_if_nonfinite, foreach)


def new_body(*args: Any) -> torch.Tensor:
    """What torch_xla's `clip_grad_norm_` does now."""
    return _bodies["clip_grad_norm_"](*args)


def _models_with(given: list[torch.Tensor]) -> Models | None:
    """The models, if some parameters are theirs and torch would not see all gradients of them.

    A rank that holds none of the parameters may give an empty list, and has to take part.
    """
    models = current_models()
    if models is None or models.sees_all or not models.gradient_norm.is_spread:
        return None
    is_ours = not given or len(models.gradient_norm.strangers(given)) < len(given)
    return models if is_ours else None


def _listed(parameters: _Parameters) -> list[torch.Tensor]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


def _clip_norm(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def clip_all(
        parameters: _Parameters,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        given = _listed(parameters)
        if _models_with(given) is not None:
            return clip_grad_norm_(given, max_norm, norm_type, error_if_nonfinite)
        rest = given or parameters  # torch warns of an empty generator
        norm = original(rest, max_norm, norm_type, error_if_nonfinite, foreach)
        _start()
        return norm

    return clip_all


def _start() -> None:
    models = current_models()
    if models is not None:
        models.gradient_norm.start()


def _clip_value(original: Callable[..., None]) -> Callable[..., None]:
    def clip_all(parameters: _Parameters, *rest: Any, **named: Any) -> None:
        given = _listed(parameters)
        models = _models_with(given)
        if models is not None:
            models.unscale()
        owners = given if models is None else models.gradient_norm.owners(given)
        if models is not None and all(owner.grad is None for owner in owners):
            return  # torch raises, but other ranks may have gradients
        original(owners, *rest, **named)

    return clip_all


def _clip_with_norm(original: Callable[..., None]) -> Callable[..., None]:
    def clip_all(parameters: _Parameters, *rest: Any, **named: Any) -> None:
        given = _listed(parameters)
        models = _models_with(given)
        if models is not None and models.gradient_norm.has_copies:
            raise MpxlaError(
                "torch.nn.utils.clip_grads_with_norm_ was called with shard_optimizer_state or "
                "mixed precision, where gradients are on what the optimizer holds in the place of "
                "parameters, so that get_total_norm has not seen them. Use "
                "torch.nn.utils.clip_grad_norm_ or smp.clip_grad_norm_, which do both."
            )
        original(given, *rest, **named)
        _start()

    return clip_all


def _total_norm(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def norm_of_all(
        tensors: _Parameters,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        given = _listed(tensors)
        models = _models_with([])
        if models is None or (given and not models.gradient_norm.knows(given)):
            return original(given, norm_type, error_if_nonfinite, foreach)
        norm = models.gradient_norm
        if norm.has_copies or not norm.covers(given):
            _warn_of_share(norm, len(given))
            return original(given, norm_type, error_if_nonfinite, foreach)
        with models.together("get_total_norm()", norm.ranks):
            total = norm.total(given, float(norm_type))
        if error_if_nonfinite and not total.isfinite().item():
            raise RuntimeError(f"the total norm of order {norm_type} is {total.item()}.")
        return total

    return norm_of_all


def _warn_of_share(norm: GradientNorm, count: int) -> None:
    why = (
        "gradients are on what the optimizer holds in the place of parameters"
        if norm.has_copies
        else "they are not all that this rank holds, so that others cannot know what belongs to it"
    )
    warn_once(
        "get_total_norm",
        f"torch.nn.utils.get_total_norm was given {count} tensors{at_user_line()}; {why}. The "
        f"result is the norm of this rank's share. For that over all ranks, call "
        f'smp.clip_grad_norm_(parameters, float("inf")), which returns it.',
    )


_BODIES: dict[str, Callable[[Any], Any]] = {
    "clip_grad_norm_": _clip_norm,
    "clip_grad_value_": _clip_value,
    "_clip_grads_with_norm_": _clip_with_norm,
    "_get_total_norm": _total_norm,
}
