"""What an optimizer keeps of its parameters outside of `state`: copies, lists, another optimizer.

A float32 copy of every parameter, made in `__init__` and found by its position, is the common case.
When parameters leave the param groups, or give way to pieces, what belongs to them goes the same
way: by identity of the parameter, or by position and shape. What looks like theirs and cannot be
assigned is an error that names it. This module must not know why parameters go.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import torch
from torch import nn

from mpxla.errors import MpxlaError
from mpxla.parallel.updates.python import own_attributes

__all__ = ["Heir", "follow_parameters", "optimizers_within", "tensors_beside"]

_Parameters = Sequence[nn.Parameter]
_Kept = TypeVar("_Kept")
_LEAVES = (str, bytes, int, float, complex, type, FunctionType, MethodType, ModuleType, nn.Module)


@dataclass(frozen=True)
class Heir:
    """What stands in the param groups in the place of a parameter from now on.

    Attributes:
        parameter: the parameter itself, or a part of it.
        share: equal for heirs that hold the same part of their parameters.
        convert: makes its value out of one of the parameter's shape.
    """

    parameter: nn.Parameter
    share: Hashable
    convert: Callable[[torch.Tensor], torch.Tensor]


def follow_parameters(
    optimizer: torch.optim.Optimizer,
    before: Sequence[_Parameters],
    heirs: Callable[[nn.Parameter], Sequence[Heir]],
    move: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Lets everything that an optimizer keeps of its parameters follow them.

    Its param groups hold the heirs already; `before` is what they held. `heirs` gives what stands
    in the place of a parameter now, nothing where another rank has it. `move` is for other tensors.

    Raises:
        MpxlaError: something cannot be assigned to parameters.
    """
    _Following(optimizer, before, heirs, move).run()


def tensors_beside(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """All tensors that an optimizer keeps outside of groups and state."""
    return _beside(optimizer, torch.Tensor)


def optimizers_within(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """An optimizer and those that it keeps, as SAM does with the one that it is based on."""
    return [optimizer, *_beside(optimizer, torch.optim.Optimizer)]


def _beside(optimizer: torch.optim.Optimizer, kind: type[_Kept]) -> list[_Kept]:
    """All of a kind that an optimizer keeps outside of groups and state."""
    found: dict[int, _Kept] = {}
    seen = {id(optimizer), id(optimizer.param_groups), id(optimizer.state)}

    def look(value: Any) -> None:
        if isinstance(value, kind) and value is not optimizer:
            found[id(value)] = value
        if not isinstance(value, (torch.Tensor, *_LEAVES)) and id(value) not in seen:
            seen.add(id(value))
            for part in _parts(value):
                look(part)

    for group in optimizer.param_groups:
        for key, value in group.items():
            if key not in ("params", "lr"):
                look(value)
    for value in own_attributes(optimizer).values():
        look(value)
    return list(found.values())


def _parts(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return [*value.keys(), *value.values()]
    if isinstance(value, list | tuple):
        return list(value)
    if isinstance(value, torch.optim.Optimizer):
        return [value.param_groups, value.state, *own_attributes(value).values()]
    return list(vars(value).values()) if hasattr(value, "__dict__") else []


class _Following:
    """One walk through the attributes of an optimizer."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        before: Sequence[_Parameters],
        heirs: Callable[[nn.Parameter], Sequence[Heir]],
        move: Callable[[torch.Tensor], torch.Tensor],
    ):
        self._optimizer = optimizer
        self._before = [list(group) for group in before]
        self._flat = list(chain.from_iterable(self._before))
        self._heirs = {id(p): list(heirs(p)) for p in self._flat}
        self._move = move
        kept = [h.parameter for p in self._flat for h in self._heirs[id(p)]]
        self._changes = list(map(id, kept)) != list(map(id, self._flat))
        self._done: dict[Any, Any] = {}
        """What became of a value, by its id; with the value itself, which keeps the id taken."""

    def run(self) -> None:
        """Rewrites groups and attributes in place."""
        optimizer = self._optimizer
        for known in (optimizer, optimizer.param_groups, optimizer.state, *optimizer.param_groups):
            self._done[id(known)] = known, known
        for number, group in enumerate(optimizer.param_groups):
            for key in [key for key in group if key not in ("params", "lr", "initial_lr")]:
                path = f"param_groups[{number}][{key!r}]"
                group[key] = self._walk(group[key], path, number)
        for name, value in own_attributes(optimizer).items():
            if name != "defaults":
                vars(optimizer)[name] = self._walk(value, name, None)

    def _walk(self, value: Any, path: str, group: int | None) -> Any:
        """The value, rewritten; lists, dictionaries and objects stay the same objects."""
        if isinstance(value, nn.Module):
            self._check_module(value, path)
        if value is None or isinstance(value, _LEAVES):
            return value
        if id(value) not in self._done:
            self._done[id(value)] = value, value  # until it is known: circles end here
            self._done[id(value)] = value, self._rewritten(value, path, group)
        return self._done[id(value)][1]

    def _rewritten(self, value: Any, path: str, group: int | None) -> Any:
        if isinstance(value, torch.Tensor):
            return self._alone(value, path)
        if isinstance(value, dict):
            return self._mapping(value, path, group)
        if isinstance(value, list):
            value[:] = self._sequence(value, path, group)
        elif type(value) is tuple:
            return tuple(self._sequence(value, path, group))
        elif isinstance(value, torch.optim.Optimizer):
            self._walk(value.param_groups, f"{path}.param_groups", group)
            self._walk(value.state, f"{path}.state", group)
            for name, part in own_attributes(value).items():
                vars(value)[name] = self._walk(part, f"{path}.{name}", group)
        elif hasattr(value, "__dict__"):
            for name, part in list(vars(value).items()):
                vars(value)[name] = self._walk(part, f"{path}.{name}", group)
        return value

    # --- containers -----------------------------------------------------------------------------

    def _sequence(self, value: Sequence[Any], path: str, group: int | None) -> list[Any]:
        if any(id(part) in self._heirs for part in value):
            return list(chain.from_iterable(map(self._successors, value)))
        if group is None and self._is_by_group(value):
            return [self._walk(part, f"{path}[{i}]", i) for i, part in enumerate(value)]
        owners = self._owners(value, path, group)
        if owners is not None:
            return [
                self._inherited(part, owner, heir)
                for part, owner in zip(value, owners, strict=True)
                for heir in self._heirs[id(owner)]
            ]
        if self._changes and self._resembles(value):
            raise self._unclear(path, f"{len(value)} values that do not go with them one by one")
        return [self._walk(part, f"{path}[{i}]", group) for i, part in enumerate(value)]

    def _mapping(self, value: dict[Any, Any], path: str, group: int | None) -> dict[Any, Any]:
        by_id = {id(p): p for p in self._flat}
        owners: Sequence[Any] | None = None
        if any(id(key) in by_id for key in value):
            owners = [key if id(key) in by_id else None for key in value]
        elif value and all(type(key) is int and key in by_id for key in value):
            owners = [by_id[key] for key in value]
        elif len(value) > 1 and not self._is_by_group(list(value.values())):
            owners = self._owners(tuple(value.values()), path, group)
        rewritten: dict[Any, Any] = {}
        if owners is None:
            rewritten = {k: self._walk(v, f"{path}[{k!r}]", group) for k, v in value.items()}
        else:
            for number, ((key, part), owner) in enumerate(zip(value.items(), owners, strict=True)):
                if owner is None:
                    rewritten[key] = self._walk(part, f"{path}[{key!r}]", group)
                    continue
                for heir in self._heirs[id(owner)]:
                    place = _key_of(heir, key, number, len(rewritten))
                    rewritten[place] = self._inherited(part, owner, heir)
        value.clear()
        value.update(rewritten)
        return value

    def _successors(self, part: Any) -> list[Any]:
        """What stands in a list in the place of a parameter; other values stay."""
        heirs = self._heirs.get(id(part))
        return [part] if heirs is None else [heir.parameter for heir in heirs]

    def _is_by_group(self, value: Sequence[Any]) -> bool:
        """Whether there is a list of values of the parameters for every param group."""
        if len(value) != len(self._before):
            return False
        return all(
            any(isinstance(inner, list | tuple) and _have_shapes(inner, group) for inner in inners)
            for part, group in zip(value, self._before, strict=True)
            for inners in [[part, *part.values()] if isinstance(part, dict) else [part]]
        )

    # --- whose is what --------------------------------------------------------------------------

    def _owners(self, value: Sequence[Any], path: str, group: int | None) -> _Parameters | None:
        """The parameters that the values of a container belong to, one each."""
        main = self._flat if group is None else self._before[group]
        lists = [main, *([] if group is not None else self._before)]
        selections: list[_Parameters] = []
        for listed in lists:
            selections += [listed, [p for p in listed if p.requires_grad]]
            selections += [[p for p in listed if p.dim() > 1]]
        fitting = [chosen for chosen in selections if _have_shapes(value, chosen)]
        if not fitting and isinstance(value, list) and _is_one_each(value, main):
            return main
        if len({tuple(self._fate(p) for p in chosen) for chosen in fitting}) > 1:
            raise self._unclear(path, "values whose shapes go with several param groups")
        return fitting[0] if fitting else None

    def _fate(self, parameter: nn.Parameter) -> tuple[Hashable, ...]:
        return tuple(heir.share for heir in self._heirs[id(parameter)])

    def _inherited(self, value: Any, owner: nn.Parameter, heir: Heir) -> Any:
        """The value of a parameter as that of its heir; tensors of its shape are converted."""
        if value is owner:
            return heir.parameter
        if isinstance(value, dict):
            return {k: self._inherited(v, owner, heir) for k, v in value.items()}
        if isinstance(value, list):
            return [self._inherited(v, owner, heir) for v in value]
        if type(value) is tuple:
            return tuple(self._inherited(v, owner, heir) for v in value)
        if not isinstance(value, torch.Tensor):
            return value
        key = id(value), id(heir.parameter)
        if key not in self._done:
            is_alike = value.shape == owner.shape
            self._done[key] = value, heir.convert(value) if is_alike else self._move(value)
        return self._done[key][1]

    def _alone(self, value: torch.Tensor, path: str) -> torch.Tensor:
        if id(value) in self._heirs:
            return next((heir.parameter for heir in self._heirs[id(value)]), value)
        sizes = {sum(p.numel() for p in group) for group in (self._flat, *self._before) if group}
        if self._changes and len(self._flat) > 1 and value.dim() == 1 and value.numel() in sizes:
            raise self._unclear(path, "one flat tensor as long as all of them together")
        return self._move(value)

    def _resembles(self, value: Sequence[Any]) -> bool:
        """Whether a list looks as if it held values of parameters."""
        shapes = {p.shape for p in self._flat if p.dim() > 0}
        tensors = [part for part in value if isinstance(part, torch.Tensor)]
        return len(tensors) > 1 and any(tensor.shape in shapes for tensor in tensors)

    def _check_module(self, module: nn.Module, path: str) -> None:
        """A module of copies stays where it is, on the host and whole."""
        tensors = list(module.parameters())
        is_other = not any(id(tensor) in self._heirs for tensor in tensors)
        shapes = [sorted(tuple(t.shape) for t in held) for held in (tensors, self._flat)]
        if self._changes and is_other and shapes[0] == shapes[1]:
            raise self._unclear(path, f"the module {type(module).__name__}, which cannot be cut")

    def _unclear(self, path: str, what: str) -> MpxlaError:
        kind = type(self._optimizer).__name__
        return MpxlaError(
            f"{kind} keeps tensors of its parameters outside of its state, in {path}: {what}. "
            f"Stages and replicas divide the parameters, and it is unclear what belongs to which. "
            f"Keep it in optimizer.state[parameter], or in a list with one value for every "
            f"parameter of a param group."
        )


def _key_of(heir: Heir, key: Any, number: int, next_number: int) -> Any:
    """The key in the place of one that was a parameter, its id, or its number."""
    if isinstance(key, torch.Tensor):
        return heir.parameter
    if type(key) is int:
        return next_number if key == number else id(heir.parameter)
    return key


def _have_shapes(value: Sequence[Any], parameters: _Parameters) -> bool:
    """Whether values are, or directly hold, tensors of the parameters' shapes, in their order."""
    if len(value) != len(parameters) or not parameters:
        return False
    return all(
        any(isinstance(part, torch.Tensor) and part.shape == owner.shape for part in _flatly(held))
        for held, owner in zip(value, parameters, strict=True)
    )


def _flatly(held: Any) -> list[Any]:
    if isinstance(held, dict):
        return list(held.values())
    return list(held) if isinstance(held, list | tuple) else [held]


def _is_one_each(value: list[Any], parameters: _Parameters) -> bool:
    """Whether a list seems to have a number, name or small tensor for every parameter.

    Pairs of numbers are rather coefficients.
    """
    if len(value) != len(parameters) or not value:
        return False
    if all(isinstance(part, torch.Tensor) for part in value):
        return len(value) > 1
    plain = all(type(part) in (int, float, bool) for part in value)
    return all(isinstance(part, str) for part in value) or (plain and len(value) > 2)
