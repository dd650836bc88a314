"""Which parameters the groups of an optimizer have, numbered as in the plain optimizer.

A rank's groups hold its own parameters only. Scripts change them between steps: groups are added
and taken away, parameters put in (`group["params"].append(p)`) and taken out. Of what is taken out
a rank notices its own; partial states tell the others.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

__all__ = ["Groups", "parameters_of", "settings_of"]

_PLAIN = (bool, int, float, str)


class Groups:
    """The groups of one optimizer, which is made with all parameters.

    Attributes:
        positions: number of all that is or was in the groups, by its id.
        orders: for every group the numbers of its parameters, of all ranks.
        gone: numbers that were taken out of this rank's groups.
        taken: those that the last look has missed in groups that are still there.
    """

    def __init__(self, optimizer: torch.optim.Optimizer):
        self._optimizer = optimizer
        self.positions: dict[int, int] = {}
        self.orders: list[list[int]] = []
        self.gone: set[int] = set()
        self.taken: set[int] = set()
        self._next = 0
        self._alive: list[nn.Parameter] = []  # so that ids stay theirs
        self._known: list[tuple[dict[str, Any], set[int]]] = []
        self._remembered: list[list[int]] = []
        self.notice()
        self.remember()

    def notice(self) -> bool:
        """Takes in what has changed since `remember`; whether a group has got parameters."""
        if self._ids() == self._remembered:  # as nearly always
            self.taken = set()
            return False
        groups = self._optimizer.param_groups
        places = {id(group): place for place, (group, _) in enumerate(self._known)}
        left = set(range(len(self._known))) - {places.get(id(group)) for group in groups}
        orders: list[list[int]] = []
        added: list[set[int]] = []
        taken = set[int]()
        for number, group in enumerate(groups):
            # Loading a state dict makes groups anew.
            place = places.get(id(group), number if number in left else None)
            held = set[int]() if place is None else self._known[place][1]
            before = [] if place is None else self.orders[place]
            now = dict.fromkeys(map(self._position, group["params"]))  # in order, and quick to ask
            order = [at for at in before if at not in held or at in now]
            added.append(now.keys() - order)
            taken |= held - now.keys()
            orders.append(order + [at for at in now if at in added[-1]])
        for number, order in enumerate(orders):  # a parameter is in the group that it came to last
            others = set[int]().union(*added) - added[number]
            orders[number] = [at for at in order if at not in others]
        here = set[int]().union(*orders)
        before = set[int]().union(*(held for _, held in self._known))
        self.gone, self.taken = (self.gone | before) - here, taken - here
        self.orders = orders
        return any(added)

    def remember(self) -> None:
        """Takes the groups as they are, after those of other ranks have left them."""
        ids = self._ids()
        if ids == self._remembered:
            return
        self._remembered = ids
        self._known = [
            (group, {self.positions[id(p)] for p in group["params"]})
            for group in self._optimizer.param_groups
        ]

    def forget(self, gone: Iterable[int]) -> None:
        """Leaves out what other ranks have taken out."""
        gone = set(gone)
        self.orders = [[at for at in order if at not in gone] for order in self.orders]

    def by_position(self, full: Mapping[str, Any]) -> dict[str, Any]:
        """A full state dict, which counts what is in the groups, by position."""
        everything = [at for order in self.orders for at in order]
        count = len(everything)
        state = {
            everything[key] if isinstance(key, int) and key < count else key: entry
            for key, entry in full["state"].items()
        }
        pairs = zip(full["param_groups"], self.orders, strict=True)
        return {
            **full,
            "state": state,
            "param_groups": [{**group, "params": list(order)} for group, order in pairs],
        }

    def _ids(self) -> list[list[int]]:
        groups = self._optimizer.param_groups
        return [[id(group), *map(id, group["params"])] for group in groups]

    def _position(self, parameter: nn.Parameter) -> int:
        if id(parameter) not in self.positions:
            self.positions[id(parameter)] = self._next
            self._alive.append(parameter)
            self._next += 1
        return self.positions[id(parameter)]


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """What an optimizer holds, in the order of its groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def settings_of(optimizer: torch.optim.Optimizer) -> str:
    """Class and settings of all param groups, without values on a device."""
    groups = [{k: v for k, v in group.items() if _is_plain(v)} for group in optimizer.param_groups]
    return f"{type(optimizer).__name__} {groups}"


def _is_plain(value: Any) -> bool:
    parts = value if isinstance(value, tuple) else (value,)
    return all(isinstance(part, _PLAIN) for part in parts)
