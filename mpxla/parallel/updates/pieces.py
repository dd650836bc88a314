"""An inner optimizer that holds update copies instead of parameters.

Exchanges the contents of its param groups once, and translates its state between pieces and whole
parameters: outside of it, states look as those of the plain optimizer.
"""

import functools
import inspect
from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mpxla.errors import CheckpointError, MpxlaError
from mpxla.graph.exchanged import exchanged
from mpxla.log import warn_once
from mpxla.parallel.state_dicts import GONE_KEY, HELD_KEY, by_position, check_order, gone_of
from mpxla.parallel.store import ParameterStore
from mpxla.parallel.updates.copy import Range, UpdateCopy
from mpxla.parallel.updates.nested_state import flattened, mapped, restored

if TYPE_CHECKING:
    from mpxla.parallel.updates.others import ParametersOfOthers
    from mpxla.parallel.updates.update import CompiledUpdate

__all__ = ["SHARD_KEY", "OptimizerPieces", "cut_state", "join_shards", "join_states", "published"]

SHARD_KEY = "_mpxla_shard"
"""In the state of one replica's pieces: position -> (range of the piece, shape of the whole)."""


class OptimizerPieces:
    """The update copies that one optimizer holds on this rank.

    Positions in the plain optimizer are by the id of a parameter; copies are added.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, positions: dict[int, int]):
        self._optimizer = optimizer
        self._positions = positions
        self._names: dict[ParameterStore, list[str]] = {}
        self._ranges: dict[int, tuple[Range, tuple[int, ...]]] = {}
        self._exchanged: dict[int, UpdateCopy | None] = {}
        self._wide: set[int] = set()
        self._sources: dict[int, nn.Parameter] = {}
        self._num_parts: dict[ParameterStore, int] = {}
        self._written: dict[tuple[ParameterStore, str], tuple[int, object]] = {}

    @property
    def num_held(self) -> int:
        """How many parameters of the model have copies, or pieces, that the optimizer updates."""
        return sum(map(len, self._names.values()))

    @property
    def positions_of_copies(self) -> set[int]:
        """Positions of parameters in whose places there are copies of this rank."""
        copies = (copy for copy in self._exchanged.values() if copy is not None)
        return {self._positions[id(copy.parameter)] for copy in copies}

    def is_behind(self, store: ParameterStore) -> bool:
        """Whether a store has update copies that came after the last `exchange`."""
        return store.num_parts > self._num_parts.get(store, 0)

    def exchange(self, store: ParameterStore) -> None:
        """Puts a model's update copies in the place of parameters; those there stay."""
        self._num_parts[store] = store.num_parts
        name_of = {id(p): n for n, p in store.state.local_parameters() if store.has_copy(n)}
        for group in self._optimizer.param_groups:
            kept: list[nn.Parameter] = []
            for parameter in group["params"]:
                name = name_of.get(id(parameter))
                if name is None:
                    kept.append(parameter)
                else:
                    self._names.setdefault(store, []).append(name)
                    kept += self._exchange(store.copy_of(name), parameter, group)
            group["params"] = kept

    def _exchange(
        self, copy: UpdateCopy | None, parameter: nn.Parameter, group: Mapping[str, Any]
    ) -> list[nn.Parameter]:
        self._exchanged[id(parameter)] = copy
        state = self._optimizer.state.pop(parameter, None)
        if copy is None:
            return []
        if copy.parameter.dtype != parameter.dtype:
            self._wide.add(id(copy.parameter))
        if copy.extent is None:
            self._sources[id(copy.parameter)] = parameter
        position = self._positions[id(parameter)]
        self._positions[id(copy.parameter)] = position
        if copy.extent is not None:
            self._ranges[position] = copy.extent, copy.shape
        if state and any(isinstance(v, torch.Tensor) and v.is_meta for v in state.values()):
            self._optimizer.state[copy.parameter] = self._made_anew(copy.parameter, group)
        elif state:
            self._optimizer.state[copy.parameter] = self.cut_for(parameter, state)
        return [copy.parameter]

    def cut_for(self, parameter: nn.Parameter, state: Mapping[str, Any]) -> dict[str, Any]:
        """The state of a whole parameter, for this rank's copy of it."""
        copy = self._exchanged[id(parameter)]
        assert copy is not None
        cut = state if copy.extent is None else cut_state(state, copy.shape, *copy.extent)
        return mapped(lambda value: _widened(value, copy.parameter), cut)

    def _made_anew(self, piece: nn.Parameter, group: Mapping[str, Any]) -> dict[str, Any]:
        """State that an optimizer makes at once, as Adagrad does; it was given empty parameters."""
        kind: Any = type(self._optimizer)
        settings = {key: group[key] for key in self._optimizer.defaults if key in group}
        try:
            return dict(kind([piece], **settings).state.get(piece, {}))
        except Exception as error:  # an optimizer of the user may take other arguments
            raise MpxlaError(
                f"{kind.__name__} makes state for its parameters when it is created, and those are "
                f"empty where ranks hold parts (sharded_data_parallel_degree). Create it from the "
                f"parameters of the plain model, before smp.DistributedModel."
            ) from error

    def heir(self, parameter: nn.Parameter) -> tuple[bool, UpdateCopy | None]:
        """Whether a parameter was exchanged, and this rank's copy of it, if it has one."""
        return id(parameter) in self._exchanged, self._exchanged.get(id(parameter))

    def collect_gradients(self) -> None:
        """Before an update: masters take gradients that are on their parameters."""
        for store in self._names:
            store.collect_gradients()

    def source_of(self, parameter: nn.Parameter) -> nn.Parameter | None:
        """The parameter of the model that something in the groups is the master of, if it is."""
        return self._sources.get(id(parameter))

    def tell_of_writes(self) -> None:
        """Says so where something beside the optimizer has written to copies, which is lost.

        Where the parameter has been written to as well, its value counts.
        """
        for (store, name), (version, state) in self._marks().items():
            before, known = self._written.get((store, name), (version, state))
            if version != before and state == known:
                warn_once(
                    "writes to update copies",
                    f"what optimizer.param_groups holds of {name!r} was written to between "
                    f"updates. That is a float32 master or a part of the parameter, which takes "
                    f"the value of the model's parameter again: the write is lost. Write to "
                    f"model.parameters() instead (param.data.mul_(0.9)), or in a method of the "
                    f"optimizer that is called by smp.DistributedOptimizer.",
                )

    def _note_writes(self) -> None:
        self._written = self._marks()

    def _marks(self) -> dict[tuple[ParameterStore, str], tuple[int, object]]:
        """The number of writes to each copy, and what changes when its parameter is written to."""
        return {
            (store, name): (copy.parameter._version, _state_of(store.state.parameters[name]))
            for store, names in self._names.items()
            for name in names
            if (copy := store.copy_of(name)) is not None
        }

    def renew(self) -> None:
        """Copies take what was written to the parameters."""
        self.renew_divided()
        self.renew_masters()

    def renew_divided(self) -> None:
        """Pieces take what was written to the parameters; before an update."""
        for store, names in self._names.items():
            if store.is_divided:
                store.renew(names)
        self._note_writes()

    def renew_masters(self) -> None:
        """Masters of whole parameters do so; before an update that is not compiled."""
        for store, names in self._names.items():
            if not store.is_divided:
                store.renew(names)
        self._note_writes()

    def publish(self, has_masters: bool) -> None:
        """After an update: parameters take the values of the copies. Collective if divided.

        Masters of whole parameters may be published already.
        """
        for store, names in self._names.items():
            if store.is_divided or has_masters:
                store.publish(names)
        self._note_writes()

    def prints(self) -> list[float]:
        """Numbers that change when something is written to a copy, by `.data` too."""
        copies = (copy for copy in self._exchanged.values() if copy is not None)
        held = [copy.parameter.detach().double() for copy in copies]
        sums = [total for p in held for total in (p.sum(), p.square().sum())]
        return torch.stack(sums).tolist() if sums else []

    def clear_gradients(self) -> None:
        """Forgets gradients of earlier passes that wait for their reduction."""
        for store, names in self._names.items():
            store.clear_waiting(names)

    def is_wide(self, parameter: nn.Parameter) -> bool:
        """Whether something in the groups is a master, or a piece of one."""
        return id(parameter) in self._wide

    def ranges(self) -> dict[int, tuple[Range, tuple[int, ...]]]:
        """By position: (range of the piece, shape of the whole parameter)."""
        return dict(self._ranges)

    def cut(self, full: Mapping[str, Any]) -> dict[str, Any]:
        """A full optimizer state with the states of this rank's pieces in it."""
        state = dict(full["state"])
        for position, ((start, stop), shape) in self._ranges.items():
            if position in state:
                state[position] = cut_state(state[position], shape, start, stop)
        return {**full, "state": state}


def published(
    found: Any,
    optimizer: torch.optim.Optimizer,
    pieces: OptimizerPieces,
    update: "CompiledUpdate",
    others: "ParametersOfOthers | None" = None,
) -> Any:
    """An attribute of an optimizer, where it is a method whose writes to the model are published.

    That are methods that only a user's optimizer has, such as `first_step` of SAM and `eval` of a
    schedule. They find gradients and values of the model in the update copies, and where they write
    to one, its parameter has to take the value before the next step call. With divided copies, or
    `others` that they look at, all ranks have to call them.
    """
    is_own = inspect.ismethod(found) and found.__self__ is optimizer
    if not is_own or hasattr(torch.optim.Optimizer, found.__name__):
        return found

    def method(*args: Any, **kwargs: Any) -> Any:
        if others is None:
            return found(*args, **kwargs)
        with others.there(f"optimizer.{found.__name__}() of {type(optimizer).__name__}"):
            return found(*args, **kwargs)

    @functools.wraps(found)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not pieces.num_held:  # which is known when the model has been placed
            return method(*args, **kwargs)
        pieces.collect_gradients()
        pieces.renew()
        known = pieces.prints()

        def publish() -> None:
            nonlocal known
            before, known = known, pieces.prints()
            if known != before:
                pieces.publish(has_masters=True)

        update.was_compiled = False
        with exchanged(update, begins=publish):  # it takes parameters that differ for written to
            result = method(*args, **kwargs)
        if update.was_compiled:
            pieces.publish(has_masters=False)
        publish()
        return result

    return call


def _state_of(parameter: torch.Tensor) -> object:
    is_here = parameter.device.type == "cpu"
    return parameter._version, parameter.data_ptr() if is_here else None


def _widened(value: Any, parameter: nn.Parameter) -> Any:
    """State of a parameter, for an update copy of another type."""
    is_like = isinstance(value, torch.Tensor) and value.shape == parameter.shape
    return value.to(parameter.dtype) if is_like and value.is_floating_point() else value


def join_shards(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The partial optimizer state of a pipeline rank from those of its replicas' pieces.

    Raises:
        CheckpointError: the replicas gave their optimizers the parameters in different orders.
    """
    check_order(parts)
    states = [(part["state"], part[SHARD_KEY]) for part in parts]
    rest = {key: value for key, value in parts[0].items() if key != SHARD_KEY}
    if all(HELD_KEY in part for part in parts):
        rest[HELD_KEY] = sorted({position for part in parts for position in part[HELD_KEY]})
        rest[GONE_KEY] = sorted(gone_of(parts))
    return {**rest, "state": join_states(states)}


def cut_state(
    state: Mapping[str, Any], shape: Sequence[int], start: int, stop: int
) -> dict[str, Any]:
    """The part of a parameter's optimizer state that belongs to its elements from start to stop.

    The state has tensors of the parameter's shape, and values such as a step count.
    """

    def cut(value: Any) -> Any:
        is_like = isinstance(value, torch.Tensor) and value.shape == torch.Size(shape)
        return value.reshape(-1)[start:stop].clone() if is_like else value

    return mapped(cut, state)


def join_states(
    parts: Sequence[tuple[Mapping[int, Any], Mapping[int, tuple[Range, tuple[int, ...]]]]],
) -> dict[int, Any]:
    """Optimizer state of whole parameters from that of the pieces of all replicas.

    Args:
        parts: for every replica, by position of the parameter: the state of its piece, and
            (range of the piece, shape of the parameter). Others are whole on every replica.

    Raises:
        CheckpointError: pieces of a parameter are missing.
    """
    found: dict[int, list[tuple[Range, Mapping[str, Any], tuple[int, ...]]]] = {}
    whole: dict[int, Any] = {}
    for states, ranges in parts:
        for position, state in states.items():
            if position not in ranges:
                whole[position] = dict(state) if isinstance(state, Mapping) else state
                continue
            extent, shape = ranges[position]
            found.setdefault(position, []).append((extent, flattened(state), shape))
    joined = {position: _joined(position, pieces) for position, pieces in found.items()}
    return by_position({**whole, **joined})


def _joined(
    position: int, pieces: list[tuple[Range, Mapping[str, Any], tuple[int, ...]]]
) -> dict[str, Any]:
    pieces.sort(key=lambda piece: piece[0])
    states = {extent: state for extent, state, _ in pieces}
    shape = pieces[0][2]
    ends = [0, *(stop for _, stop in states)]
    is_complete = [start for start, _ in states] == ends[:-1] and ends[-1] == prod(shape)
    joined: dict[str, Any] = {}
    for key, value in pieces[0][1].items():
        values: list[Any] = [state.get(key) for state in states.values()]
        is_cut = [
            isinstance(v, torch.Tensor) and v.shape == (stop - start,)
            for v, (start, stop) in zip(values, states, strict=True)
        ]
        if any(is_cut) and not (is_complete and all(is_cut)):
            there = [
                f"{a} to {b}" for (a, b), is_there in zip(states, is_cut, strict=True) if is_there
            ]
            raise CheckpointError(
                f"the optimizer state {key!r} of parameter {position}, of shape {list(shape)}, is "
                f"not complete: of {prod(shape)} elements there are {', '.join(there)}. Give the "
                f"partial states of all replicas, each on the rank that saved it."
            )
        joined[key] = torch.cat(values).view(shape) if any(is_cut) else value
    return restored(joined)
