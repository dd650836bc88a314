"""The tensors of an optimizer's update: which they are, in which order, and where they go.

This module must not know how an update is traced or compiled.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch

from mpxla.device.backend import Backend, Buffer
from mpxla.parallel.store import release
from mpxla.parallel.updates.python import describe, described

__all__ = ["NOT_CONSTANT", "Arrangement", "Places", "Slots", "constants_of"]

NOT_CONSTANT = ("params", "lr", "initial_lr", "param_names")
"""Of a group of parameters, what an update does not hold as constants."""

_Trained = Sequence[Sequence[torch.nn.Parameter]]


class Places(NamedTuple):
    """Slots of one parameter of an optimizer."""

    parameter: int
    gradient: int
    state: dict[str, int]
    source: int | None
    """Of the compute copy, where the parameter is a master."""

    @property
    def changed(self) -> list[int]:
        """What an update of the parameter changes."""
        source = () if self.source is None else (self.source,)
        return sorted({self.parameter, *self.state.values(), *source})


@dataclass(frozen=True)
class Arrangement:
    """How the arguments and results of one update belong to parameters.

    Attributes:
        trained: the parameters with a gradient, by group.
        places: the slots of every parameter, by group.
        rate_of: for every group the index of its rate; None without one.
        changed: slots that the update changes, in the order of the results.
        num_slots: how many arguments there are before the rates.
        num_rates: how many rates.
    """

    trained: _Trained
    places: Sequence[Sequence[Places]]
    rate_of: tuple[int | None, ...]
    changed: Sequence[int]
    num_slots: int
    num_rates: int

    def alone(self, group: int, index: int) -> tuple["Arrangement", list[int]]:
        """That of one parameter by itself, and which slots here its slots are."""
        held = self.places[group][index]
        slots = sorted({held.gradient, *held.changed})
        number = {slot: i for i, slot in enumerate(slots)}
        own = Places(
            number[held.parameter],
            number[held.gradient],
            {key: number[slot] for key, slot in held.state.items()},
            None if held.source is None else number[held.source],
        )
        arrangement = Arrangement(
            [[self.trained[g][index]] if g == group else [] for g in range(len(self.places))],
            [[own] if g == group else [] for g in range(len(self.places))],
            self.rate_of,
            own.changed,
            len(slots),
            self.num_rates,
        )
        return arrangement, slots


class Slots:
    """The tensors of one update in the order of the program's arguments, and the way back.

    From step to step the same parameters have new gradients and new state: `renew` finds them where
    the last ones were, for a fraction of what finding their arrangement costs. Constants are what
    `constants_of` says; `source_of` gives the parameter that something in the groups is the master
    of.

    Attributes:
        tensors: parameters, their gradients, their state; every tensor once.
        arrangement: how they belong to parameters.
        rates: different learning rates of the groups, as the groups hold them.
        donated: slots that an update changes, and whose memory the results may take.
        held: for every tensor the buffer that it was made of; None where that is not known.
        key: equal for updates that the same program can do.
    """

    def __init__(
        self,
        optimizer: Any,
        trained: _Trained,
        constants: tuple[Any, ...],
        backend: Backend,
        source_of: Callable[[torch.nn.Parameter], torch.nn.Parameter | None] = lambda _: None,
    ):
        self._optimizer = optimizer
        self._backend = backend
        self.tensors: list[Any] = []
        index_of: dict[int, int] = {}

        def slot(tensor: torch.Tensor | None) -> int:
            if id(tensor) not in index_of:
                index_of[id(tensor)] = len(self.tensors)
                self.tensors.append(tensor)
            return index_of[id(tensor)]

        places: list[list[Places]] = []
        self._sources: dict[int, torch.nn.Parameter] = {}
        for parameters in trained:
            places.append([])
            for p in parameters:
                state = {
                    key: slot(value)
                    for key, value in optimizer.state.get(p, {}).items()
                    if isinstance(value, torch.Tensor)
                }
                own, source = (slot(p), slot(p.grad), state), source_of(p)
                if source is not None:
                    self._sources[slot(source)] = source
                places[-1].append(Places(*own, None if source is None else slot(source)))
        self.rates, rate_of = _rates(optimizer.param_groups)
        flat = list(chain.from_iterable(places))
        # Sorted as `donated` is: jax gives the memory of the first donated argument of a shape to
        # the first result of that shape. Else each takes another's, and XLA copies both.
        changed = sorted({slot for places in flat for slot in places.changed})
        counts = len(self.tensors), len(self.rates)
        self.arrangement = Arrangement(trained, places, rate_of, changed, *counts)
        self.key = (
            constants,
            tuple(tuple(id(p) for p in group) for group in trained),
            tuple((p.parameter, p.gradient, p.source, *p.state.items()) for p in flat),
            rate_of,
            tuple(map(_dtype, self.tensors)),  # `load_state_dict` may change those of counters
        )
        self._remember(flat)

    def _remember(self, flat: Sequence[Places]) -> None:
        """Notes where each tensor was found."""
        self._ids = [list(map(id, group)) for group in self.arrangement.trained]
        self._parameters = list(chain.from_iterable(self.arrangement.trained))
        self._gradient_places = [places.gradient for places in flat]
        states = self._optimizer.state
        self._states = [states[p] if p in states else None for p in self._parameters]
        self._sizes = [len(state or ()) for state in self._states]
        self._entries = [
            (state, key, place)
            for state, places in zip(self._states, flat, strict=True)
            if state is not None
            for key, place in places.state.items()
        ]
        parameter_places = [places.parameter for places in flat]
        self.donated = sorted(set(self.arrangement.changed) - set(self._gradient_places))
        self._written = [*zip(parameter_places, self._parameters, strict=True)]
        self._written += self._sources.items()
        written = {place for place, _ in self._written}
        self._state_places = list({place for _, _, place in self._entries} - written)
        self._own: list[Any] = [None] * len(self.tensors)  # what the last update has left, and
        self.held: list[Any] = list(self._own)  # the buffers that it was

    def renew(self, trained: _Trained, constants: tuple[Any, ...]) -> bool:
        """Takes the tensors of another step, if they are arranged like those of the last one.

        Returns:
            Whether they are; otherwise this object must not be used any more.
        """
        groups, states = self._optimizer.param_groups, self._optimizer.state
        if [list(map(id, group)) for group in trained] != self._ids:
            return False
        if constants != self.key[0]:
            return False
        self.rates, rate_of = _rates(groups)
        if rate_of != self.arrangement.rate_of:
            return False
        for parameter, state, size in zip(self._parameters, self._states, self._sizes, strict=True):
            if states.get(parameter) is not state or len(state or ()) != size:
                return False
        return self._refill()

    def _refill(self) -> bool:
        found: list[Any] = [None] * len(self.tensors)
        for place, parameter in self._written:
            found[place] = parameter
        for place, parameter in zip(self._gradient_places, self._parameters, strict=True):
            found[place] = parameter.grad
        for state, key, place in self._entries:
            value = state.get(key)
            if found[place] is None:
                found[place] = value
            elif found[place] is not value:
                return False
        self.tensors = found
        # What the last update has left needs no other look.
        places = zip(found, self._own, self.key[-1], strict=True)
        new = [(tensor, dtype) for tensor, own, dtype in places if tensor is not own]
        is_there = self._backend.is_on_device
        is_complete = all(_dtype(tensor) is dtype and is_there(tensor) for tensor, dtype in new)
        return is_complete and len(set(map(id, found))) == len(found)

    def let_go(self, arguments: list[Buffer]) -> None:
        """Forgets what is donated, before the program that takes its memory is called.

        A view that somebody sees keeps its memory from being taken, and those here would. So do
        views that users hold: parameters with such keep their memory, and are written to later.
        Parameters among the program's arguments are replaced by their values.
        """
        taken = set(self.donated)
        for state, key, place in self._entries:
            if place in taken:
                state[key] = None
        has_views = self._backend.has_views
        written = [(place, p) for place, p in self._written if place in taken and not has_views(p)]
        for place, parameter in written:
            if arguments[place] is parameter:
                arguments[place] = parameter.detach()
        release(parameter for _, parameter in written)
        self._forget()

    def _forget(self) -> None:
        """Lets go of all tensors: until the next update they would live beside the new ones."""
        self.tensors = [None] * len(self.tensors)
        self._own = list(self.tensors)
        self.held = list(self.tensors)

    def take_back(self, donated: Sequence[Buffer]) -> None:
        """Puts what was donated back, after a program that could not be called."""
        self._put_back(self.donated, donated)

    def store(self, results: Sequence[Buffer]) -> None:
        """Makes a program's results the parameters and the state, and lets go of the old ones."""
        self._put_back(self.arrangement.changed, results)

    def _put_back(self, places: Sequence[int], values: Sequence[Buffer]) -> None:
        self._forget()
        held, own = self.held, self._own
        for place, value in zip(places, values, strict=True):
            held[place] = value
        written = [(place, p) for place, p in self._written if held[place] is not None]
        self._backend.assign([p for _, p in written], [held[place] for place, _ in written])
        state_places = [place for place in self._state_places if held[place] is not None]
        published = self._backend.publish([held[place] for place in state_places], is_held=True)
        for place, value in (*written, *zip(state_places, published, strict=True)):
            own[place] = value
        for state, key, place in self._entries:
            if own[place] is not None:
                state[key] = own[place]
        for place, _ in written:  # the backend knows the buffers of parameters
            own[place] = held[place] = None


def _dtype(value: Any) -> torch.dtype | None:
    return value.dtype if isinstance(value, torch.Tensor) else None


def _rates(groups: Sequence[Mapping[str, Any]]) -> tuple[list[Any], tuple[int | None, ...]]:
    """The different learning rates of the groups, and which one each group has."""
    rates: list[Any] = []
    index_of: dict[Any, int] = {}
    rate_of: list[int | None] = []
    for group in groups:
        rate = group.get("lr")
        if not isinstance(rate, (float, int, torch.Tensor)):
            rate_of.append(None)
            continue
        is_tensor = isinstance(rate, torch.Tensor)
        number = index_of.setdefault(id(rate) if is_tensor else float(rate), len(rates))
        if number == len(rates):
            rates.append(rate if is_tensor else float(rate))
        rate_of.append(number)
    return rates, tuple(rate_of)


def constants_of(optimizer: Any) -> tuple[Any, ...]:
    """What a program holds as constants: attributes, and all settings but the learning rate.

    Raises:
        NotTraceableError: something of it cannot be compared from step to step.
    """
    settings = tuple(
        tuple(
            (k, describe(v, f"param_groups[{i}][{k!r}]"))
            for k, v in g.items()
            if k not in NOT_CONSTANT
        )
        for i, g in enumerate(optimizer.param_groups)
    )
    return settings, described(optimizer)
