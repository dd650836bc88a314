"""`optimizer.step(closure)`: the closure calls the step function and returns the loss.

    torch's own optimizers   call it once, at first: the closure runs, and then a step as ever
    optimizers of the user   call it when they like, on parameters that they have just changed
    LBFGS                    looks at all parameters at once, and decides by losses: it runs on the
                             host, on whole copies of all parameters, alike on every rank

This file must not know how gradients get to the parameters.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mpxla.errors import MpxlaError
from mpxla.parallel.state_dicts import to_host
from mpxla.parallel.store import ParameterStore
from mpxla.parallel.updates.optimizer_state import OptimizerState
from mpxla.parallel.updates.update import CompiledUpdate
from mpxla.session import Session

if TYPE_CHECKING:
    from mpxla.parallel.optimizer import DistributedOptimizer

__all__ = ["Closure", "ClosureSteps"]

Closure = Callable[[], Any]


class ClosureSteps:
    """Steps of one optimizer that call a closure.

    Attributes:
        are_needed: whether it cannot step without a closure.
    """

    def __init__(self, contents: OptimizerState, session: Session, update: CompiledUpdate):
        self._kind = type(contents.optimizer)
        self._update = update
        self._has_scale = session.config.fp16
        self._pieces = contents.pieces
        self.are_needed = isinstance(contents.optimizer, torch.optim.LBFGS)
        self._whole = _WholeUpdate(contents, session)

    def step(self, update: "DistributedOptimizer", closure: Closure | None) -> Any:
        """One step; returns what the closure did at first.

        Raises:
            MpxlaError: there is no closure, or a loss scale that does not go with it.
        """
        if closure is None:
            raise MpxlaError(
                "LBFGS calls the loss function several times in one step: give optimizer.step a "
                "closure that calls optimizer.zero_grad() and the step function, and returns the "
                "loss, as loss.reduce_mean()."
            )
        if self._kind.__module__.startswith("torch.optim") and not self.are_needed:
            with self._update.hooks_called(closure, is_elsewhere=False):
                with torch.enable_grad():
                    loss = closure()
                update.step()
            return loss
        if self._has_scale:
            raise MpxlaError(
                f"{self._kind.__name__} calls a closure within its step, which does not go with "
                f"the loss scale of fp16: True: no update can be left out in between. Use "
                f"bf16: True or float32."
            )
        if self.are_needed:
            with self._update.hooks_called(closure, is_elsewhere=True):
                return self._whole.step(closure, update.prepare_update)
        return self._step_of_user(update, closure)

    def _step_of_user(self, update: "DistributedOptimizer", closure: Closure) -> Any:
        is_first = True

        def evaluated() -> Any:
            nonlocal is_first
            if not is_first:  # parameters may have been changed
                update.settle_update()
                self._pieces.publish(has_masters=True)
            is_first = False
            with torch.enable_grad():
                loss = closure()
            update.prepare_update()
            self._pieces.renew_masters()
            return loss

        loss = update.run_update(evaluated)
        self._pieces.publish(has_masters=True)
        return loss


class _WholeUpdate:
    """Runs an optimizer on host copies of all its parameters, of all ranks of a pipeline.

    Every rank of every replica steps its copies with equal numbers. The optimizer has one param
    group; its state is that of its first parameter, and shown there.
    """

    def __init__(self, contents: OptimizerState, session: Session):
        self._inner, self._contents = contents.optimizer, contents
        self._session, self._backend = session, session.backend
        self._pipeline = session.topology.pp_group(session.rank)
        self._host: torch.optim.Optimizer | None = None
        self._copies: list[nn.Parameter] = []
        self._shown: dict[str, Any] | None = None

    def step(self, closure: Closure, collect: Callable[[], object]) -> Any:
        """One step; all ranks call it. `collect` brings gradients to where optimizers look."""
        host, is_first = self._settled(), True

        def evaluated() -> float:
            nonlocal is_first
            if not is_first:
                self._write()
            loss = float(closure())
            if is_first:  # the first step of a model loads what waited for it
                self._take_state(host)
            is_first = False
            collect()
            self._take_writes()
            gradients = self._gathered(lambda held: held.grad)
            for position, copy in enumerate(self._copies):
                copy.grad = gradients.get(position)
            return self._mean(loss)

        loss: Any = host.step(evaluated)
        self._write()
        first = self._first()
        if first is not None:
            self._inner.state[first] = self._shown = host.state[self._copies[0]]
        return loss

    def _held(self) -> Iterator[tuple[int, ParameterStore, str, nn.Parameter]]:
        """(position, store, name, what is updated) of the parameters of this rank."""
        positions = self._contents.positions
        for model in self._contents.models:
            for name, parameter in model.tensors.local_parameters():
                held = model.store.owner(name)
                if id(parameter) in positions and held is not None:
                    yield positions[id(parameter)], model.store, name, held

    def _gathered(
        self, of: Callable[[nn.Parameter], torch.Tensor | None]
    ) -> dict[int, torch.Tensor]:
        """Values of all ranks of the pipeline on the host, by position."""
        own = {position: value for position, *_, p in self._held() if (value := of(p)) is not None}
        own = {position: value.detach() for position, value in own.items()}
        return self._merged(to_host(own, self._backend))

    def _merged(self, own: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """What all ranks of the pipeline have, by position."""
        merged: dict[int, torch.Tensor] = {}
        for part in self._session.state_objects.allgather(own, self._pipeline):
            merged = {**part, **merged}  # a tied one has its first holder's
        return merged

    def _take_writes(self) -> None:
        """Copies take what the closure has written to parameters, as averages kept by forwards."""
        own = {position: held.detach() for position, *_, held in self._held()}
        copies = self._copies
        written = {
            position: value
            for position, value in to_host(own, self._backend).items()
            if not torch.equal(value.to(copies[position].dtype), copies[position].detach())
        }
        for position, value in self._merged(written).items():
            copies[position].data.copy_(value)

    def _settled(self) -> torch.optim.Optimizer:
        """The optimizer on the host, with the values, state and settings that there are now."""
        values = self._gathered(lambda held: held)
        host = self._host = self._host or self._made(values)
        for position, copy in enumerate(self._copies):
            copy.data = values[position].to(copy.dtype).clone()
        (own,), (group,) = self._inner.param_groups, host.param_groups
        group.update({key: value for key, value in own.items() if key != "params"})
        self._take_state(host)
        return host

    def _take_state(self, host: torch.optim.Optimizer) -> None:
        """The optimizer on the host gets a state that was loaded, or cleared."""
        first = self._first()
        state = None if first is None else self._inner.state.get(first)
        is_known = state is self._shown or not (state or self._shown)
        news = None if first is None or is_known else [to_host(state, self._backend)]
        self._shown = state
        for found in self._session.state_objects.allgather(news, self._pipeline):
            if found is not None:  # in place: a step under way has it
                entry = host.state[self._copies[0]]
                entry.clear()
                entry.update(found[0] or {})

    def _made(self, values: Mapping[int, torch.Tensor]) -> torch.optim.Optimizer:
        self._copies = [nn.Parameter(values[position].clone()) for position in sorted(values)]
        kind: Any = type(self._inner)
        taken = inspect.signature(kind).parameters  # loading a state adds defaults
        settings = {k: v for k, v in self._inner.defaults.items() if k in taken}
        return kind(self._copies, **settings)

    def _first(self) -> nn.Parameter | None:
        """The parameter that has the state, if it is here."""
        return next((held for position, *_, held in self._held() if position == 0), None)

    def _write(self) -> None:
        """Parameters take the values of their copies."""
        values: dict[ParameterStore, dict[str, torch.Tensor]] = {}
        for position, store, name, _ in self._held():
            values.setdefault(store, {})[name] = self._copies[position].detach()
        for store, of_names in values.items():
            store.load(of_names)

    def _mean(self, loss: float) -> float:
        """Over replicas, which decide alike then."""
        group = self._session.topology.rdp_group(self._session.rank)
        losses = self._session.objects.allgather(loss, group)
        return sum(losses) / len(losses)
