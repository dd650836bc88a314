"""An inner optimizer that holds pieces of parameters instead of parameters.

Exchanges the contents of its param groups once, and translates its state between pieces and whole
parameters: outside of it, states look as those of the plain optimizer.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from mpxla.parallel.state_dicts import HELD_KEY
from mpxla.parallel.zero import Piece, Range, ShardedParameters, cut_state, join_states
from mpxla.runtime.state import ModelState

__all__ = ["SHARD_KEY", "OptimizerPieces", "join_shards"]

SHARD_KEY = "_mpxla_shard"
"""In the state of one replica's pieces: position -> (range of the piece, shape of the whole)."""


class _Holding(NamedTuple):
    """What an optimizer has of one model."""

    state: ModelState
    names: list[str]


class OptimizerPieces:
    """The pieces that one optimizer updates on this rank.

    Args:
        optimizer: the inner optimizer.
        positions: id of a parameter -> its position in the plain optimizer; pieces are added.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, positions: dict[int, int]):
        self._optimizer = optimizer
        self._positions = positions
        self._holdings: dict[ShardedParameters, _Holding] = {}
        self._ranges: dict[int, tuple[Range, tuple[int, ...]]] = {}
        self._exchanged: dict[int, Piece | None] = {}

    def divide(self, state: ModelState, shards: ShardedParameters) -> None:
        """Puts pieces in the place of parameters, in groups and state; those there stay.

        Args:
            state: a model's parameters.
            shards: how they are divided.
        """
        holding = self._holdings.setdefault(shards, _Holding(state, []))
        name_of = {id(p): name for name, p in state.local_parameters()}
        for group in self._optimizer.param_groups:
            kept: list[nn.Parameter] = []
            for parameter in group["params"]:
                name = name_of.get(id(parameter))
                if name is None or name not in shards:
                    kept.append(parameter)
                else:
                    holding.names.append(name)
                    kept += self._exchange(shards.piece_of(name), parameter)
            group["params"] = kept

    def _exchange(self, piece: Piece | None, parameter: nn.Parameter) -> list[nn.Parameter]:
        self._exchanged[id(parameter)] = piece
        state = self._optimizer.state.pop(parameter, None)
        if piece is None:
            return []
        position = self._positions[id(parameter)]
        self._positions[id(piece.parameter)] = position
        self._ranges[position] = (piece.start, piece.stop), tuple(parameter.shape)
        if state:
            cut = cut_state(state, parameter.shape, piece.start, piece.stop)
            self._optimizer.state[piece.parameter] = cut
        return [piece.parameter]

    def heir(self, parameter: nn.Parameter) -> tuple[bool, Piece | None]:
        """Whether a parameter was exchanged, and this rank's piece of it, if it has one."""
        return id(parameter) in self._exchanged, self._exchanged.get(id(parameter))

    def refresh(self) -> None:
        """Before an update: pieces take the parameters' values."""
        for shards, holding in self._holdings.items():
            shards.refresh(holding.names)

    def publish(self) -> None:
        """After an update: parameters take the values of all replicas' pieces. Collective."""
        for shards, holding in self._holdings.items():
            shards.publish(holding.names)

    def clear_gradients(self) -> None:
        """Forgets gradients of earlier passes that wait on the parameters; pieces keep theirs."""
        for holding in self._holdings.values():
            for name in holding.names:
                holding.state.parameters[name].grad = None

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


def join_shards(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The partial optimizer state of a pipeline rank from those of its replicas' pieces."""
    states = [(part["state"], part[SHARD_KEY]) for part in parts]
    rest = {key: value for key, value in parts[0].items() if key != SHARD_KEY}
    if all(HELD_KEY in part for part in parts):
        rest[HELD_KEY] = sorted({position for part in parts for position in part[HELD_KEY]})
    return {**rest, "state": join_states(states)}
