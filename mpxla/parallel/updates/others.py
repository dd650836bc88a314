"""Parameters of other stages beside this rank's, for optimizers that look at all of them.

An optimizer that computes one number of all its parameters gives other numbers on a share of them:
Prodigy and D-Adaptation, SAM, and each that clips by a norm of its own. While such a one updates,
copies of what the other ranks of the pipeline hold are in its param groups, with their gradients
and state. So every rank computes the whole update, and keeps its part of it. All of that travels
before every update, so that nothing has to be kept, saved or loaded here.
"""

import contextlib
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import nn

from mpxla.log import get_logger, warn_once
from mpxla.parallel.models import Models
from mpxla.parallel.state_dicts import to_host
from mpxla.parallel.updates.companions import optimizers_within, tensors_beside
from mpxla.parallel.updates.elementwise import mixes_parameters
from mpxla.parallel.updates.groups import parameters_of
from mpxla.parallel.updates.optimizer_state import OptimizerState
from mpxla.parallel.updates.update import CompiledUpdate
from mpxla.session import Session

__all__ = ["ParametersOfOthers", "parameters_of_others"]


_MIXES = "updates a parameter by the values of others too"


def parameters_of_others(
    contents: OptimizerState,
    session: Session,
    models: Models,
    update: CompiledUpdate,
    rounds_by_chance: bool,
) -> "ParametersOfOthers | None":
    """For an optimizer that updates a parameter by the values of others too, not compiled then.

    None where it does not, where no other rank has parameters, and where they cannot be fetched.
    """
    optimizer = contents.optimizer
    if session.topology.pp_size == 1 or not mixes_parameters(optimizer):
        return None
    kind = type(optimizer).__name__
    if rounds_by_chance or _keeps_more_than_state(optimizer):
        why = "rounds by chance" if rounds_by_chance else "keeps tensors outside of its state"
        warn_once(
            f"{kind} mixes parameters",
            f"{kind} {_MIXES} (a norm over all of them, perhaps), and every rank has the "
            f"parameters of its stages only. As it {why}, the others cannot be fetched: the "
            f"update uses this rank's share, and differs from that of one process. Clip by "
            f"torch.nn.utils.clip_grad_norm_ before optimizer.step(), which sees all ranks, or "
            f"use norms of single parameters.",
        )
        return None
    update.give_up(f"it {_MIXES}")
    if session.rank == 0:
        get_logger().info(
            "%s %s (a norm over all of them, perhaps). So every rank fetches parameters, "
            "gradients and state of all stages for an update, and computes it for all: the "
            "numbers are those of one process, but an update takes longer, and memory for the "
            "whole model.",
            kind,
            _MIXES,
        )
    return ParametersOfOthers(contents, session, models)


def _keeps_more_than_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer keeps tensors that are neither numbers nor in the state of one.

    It may expect one for every parameter, which there is not for those of other ranks.
    """
    known = {id(p) for p in parameters_of(optimizer)}
    for inner in optimizers_within(optimizer):
        states = [state for state in inner.state.values() if isinstance(state, dict)]
        known |= {id(value) for state in states for value in state.values()}
    return any(t.numel() > 1 and id(t) not in known for t in tensors_beside(optimizer))


class ParametersOfOthers:
    """Copies of the parameters that the other ranks of a pipeline hold, for one optimizer."""

    def __init__(self, contents: OptimizerState, session: Session, models: Models):
        self._optimizer, self._contents = contents.optimizer, contents
        self._session, self._models = session, models
        self._group = session.topology.pp_group(session.rank)
        self._own: list[list[nn.Parameter]] | None = None
        """Of each param group, while copies are in it."""
        self._copies: dict[int, nn.Parameter] = {}
        self._states: dict[int, list[Any]] = {}
        """By position, for each optimizer within; while copies are in none."""

    @contextlib.contextmanager
    def there(self, what: str) -> Generator[None]:
        """Around an update, which `what` names: copies are in the groups. Collective."""
        if self._own is not None:  # a method of the optimizer calls another one
            yield
            return
        before = self._copies, self._states  # a closure may call a method
        self._copies, self._states, session = {}, {}, self._session
        if self._is_placed:
            with self._models.together(what, self._group), session.gathering(what, self._group):
                self._fetch()
            self._enter()
        try:
            yield
        finally:
            self._leave()
            self._copies, self._states = before

    def around(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """A closure without the copies, which have the gradients that it leaves from then on."""

        def called() -> Any:
            was_placed = self._is_placed
            self._leave()
            result = closure()
            if not was_placed:  # its step call has cut the model
                self._fetch()
            else:
                gradients = self._gathered(lambda held: held.grad)
                for position, copy in self._copies.items():
                    copy.grad = _moved(gradients[position], copy.device)
            self._enter()
            return result

        return called

    @property
    def _is_placed(self) -> bool:
        """Whether other ranks have what this one has not; all agree."""
        return all(model.partitioned for model in self._contents.models)

    def _fetch(self) -> None:
        device = torch.device("cpu")
        own = {self._contents.positions[id(p)]: p for p in parameters_of(self._optimizer)}
        for parameter in own.values():
            device = parameter.device
        tables = [_tables(optimizer) for optimizer in optimizers_within(self._optimizer)]
        everyone = self._gathered(
            lambda held: [
                held.detach(),
                held.requires_grad,
                held.grad,
                [_state_of(held, of_one) for of_one in tables],
            ]
        )
        for position in sorted(everyone.keys() - own.keys()):
            value, is_trained, gradient, states = everyone[position]
            copy = nn.Parameter(_moved(value, device), requires_grad=is_trained)
            copy.grad = _moved(gradient, device)
            self._copies[position] = copy
            self._states[position] = [
                {name: _converted(kept, device, value.shape) for name, kept in state.items()}
                for state in states
            ]

    def _gathered(self, of: Callable[[nn.Parameter], Any]) -> dict[int, Any]:
        """Something of the parameters of all ranks, on the host, by position."""
        positions = self._contents.positions
        own = {positions[id(p)]: of(p) for p in parameters_of(self._optimizer)}
        own = to_host(own, self._session.backend)
        merged: dict[int, Any] = {}
        for part in self._session.state_objects.allgather(own, self._group):
            merged = {**part, **merged}  # a tied one has its first holder's
        return merged

    def _enter(self) -> None:
        groups, positions = self._optimizer.param_groups, self._contents.positions
        self._own = [list(group["params"]) for group in groups]
        for number, (own, order) in enumerate(
            zip(self._own, self._contents.groups.orders, strict=True)
        ):
            held = {positions[id(p)]: p for p in own}
            held |= {at: self._copies[at] for at in order if at in self._copies}
            self._show(number, [held[at] for at in order if at in held])
        for number, optimizer in enumerate(optimizers_within(self._optimizer)):
            tables = _tables(optimizer)
            for position, states in self._states.items():
                for name, state in states[number].items():
                    if name in tables:
                        tables[name][self._copies[position]] = state
        self._models.sees_all = True

    def _leave(self) -> None:
        if self._own is None:
            return
        self._models.sees_all = False
        tables = [_tables(optimizer) for optimizer in optimizers_within(self._optimizer)]
        for position, copy in self._copies.items():
            self._states[position] = [_state_of(copy, of_one) for of_one in tables]
            for table in (table for of_one in tables for table in of_one.values()):
                table.pop(copy, None)
        for number, own in enumerate(self._own):
            self._show(number, own)
        self._own = None

    def _show(self, number: int, parameters: list[nn.Parameter]) -> None:
        """Lets a param group have these; optimizers within may have groups, or lists, in common."""
        before = list(self._optimizer.param_groups[number]["params"])
        for optimizer in optimizers_within(self._optimizer):
            for group in optimizer.param_groups[number : number + 1]:
                if list(map(id, group["params"])) == list(map(id, before)):
                    group["params"][:] = parameters


_Tables = dict[str | None, dict[Any, Any]]


def _tables(optimizer: torch.optim.Optimizer) -> _Tables:
    """Where an optimizer keeps what belongs to a parameter: its state, and dictionaries in it."""
    named = {k: v for k, v in optimizer.state.items() if isinstance(k, str) and isinstance(v, dict)}
    return {None: optimizer.state, **named}


def _state_of(parameter: nn.Parameter, tables: _Tables) -> dict[str | None, Any]:
    """What each of `_tables` has for a parameter."""
    found = {name: table.get(parameter) for name, table in tables.items()}
    return {k: v for k, v in found.items() if v is not None and not (isinstance(v, dict) and not v)}


def _converted(kept: Any, device: torch.device, shape: torch.Size) -> Any:
    """State of a parameter of another rank, with tensors of its shape on a device."""
    if isinstance(kept, dict):
        return {key: _converted(value, device, shape) for key, value in kept.items()}
    is_like = isinstance(kept, torch.Tensor) and kept.shape == shape
    return _moved(kept, device) if is_like else kept


def _moved(value: torch.Tensor | None, device: torch.device) -> Any:
    return None if value is None else value.to(device)
