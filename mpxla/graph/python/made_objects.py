"""Objects that a step function makes and keeps, as a model does that is not ready before it runs:

    if self.criterion is None:
        self.criterion = DetectionLoss(self)  # has tables of anchors, random weights
        self.criterion.scale = 2.0

A capture has no tensors with values. So it ends where a step puts a module, or an object with
tensors that are the same in every call, in an attribute that had nothing. The function runs once in
plain PyTorch, with the tensors of one microbatch: what it makes stays as it was when it was first
used, and all else that it has changed is put back. Then the step is captured once more, and finds
the objects in their places as any others that are held.

A module is used when it is called. Of other objects nothing tells setting up from use. They stay as
they are in the end, and so do plain values that the function gave attributes before the use
(`self.is_built = True`), but for what the next capture changes again: that belongs to the use.

Where the next capture makes such an object once more, it does so in every call. Then the place has
nothing again, and each program makes its own.

This module must not know how a step is captured.
"""

import contextlib
import copy
import random
from collections.abc import Callable, Container, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import getitem, setitem
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import module
from torch.nn.parameter import is_lazy

from mpxla.errors import CaptureError
from mpxla.graph.exchanged import exchanged
from mpxla.graph.python.container_state import is_as_left
from mpxla.graph.python.held_objects import Held, contents_of, has_attributes
from mpxla.graph.python.module_tables import MODULE_TABLES
from mpxla.graph.python.noted_contents import PLAIN_CONTAINERS, is_simple
from mpxla.graph.python.plain import MISSING, Read, refill
from mpxla.graph.user_code import AgainError, at_user_line

__all__ = ["Making", "fakes_in", "held_under", "keep_made", "registrations_noted"]

_MOST_PARTS, _MOST_ENTRIES = 5000, 2000
"""In a container that is looked into."""


def keep_made(
    value: Any,
    before: Any,
    held: Mapping[int, Held],
    place: tuple[int, str],
    is_constant: Callable[[torch.Tensor], bool],
    make: Callable[[str], None],
) -> None:
    """Has an object kept that a step has made.

    Args:
        value: given to an attribute.
        before: what the attribute has had.
        held: objects of before, by the id of their attributes.
        place: the id of the attributes, and the name.
        is_constant: whether a tensor of the capture is the same in every call.
        make: makes it, given what it is called.

    Raises:
        AgainError: it is to be made, or what was made is gone; the step is to be captured again.
        CaptureError: it is a module with tensors that every call makes anew.
    """
    owner = held.get(place[0])
    if owner is None:
        return
    name = f"{owner.name}.{place[1]}"
    if place[1] in owner.made:
        made, _ = owner.made[place[1]]
        if made is None:
            return
        if before is made and value is not before:
            raise AgainError(name, partial(_take_away, owner, place[1]))
        if isinstance(value, nn.Module) and (*value.parameters(), *value.buffers()):
            raise CaptureError(
                f"The step function makes a {type(value).__name__} for {name} in every call"
                f"{at_user_line()}, with parameters or buffers. Make it once, in __init__ or where "
                f"the attribute is None."
            )
        return
    if before is not None or _held_of(value, held) is not None:
        return
    is_layer = isinstance(value, (nn.Module, nn.Parameter))
    if is_layer or ((_is_open(value) or _is_mixed(value)) and _is_of(value, held, is_constant)):
        text = f"a {type(value).__name__} for {name}{at_user_line()}"

        def prepare() -> None:
            # Not once more, where it does not come so far or the step takes it away again.
            owner.made[place[1]] = None, MISSING
            make(text)

        raise AgainError(name, prepare)


def _is_of(
    value: Any, held: Mapping[int, Held], is_constant: Callable[[torch.Tensor], bool]
) -> bool:
    """Whether there are tensors of the capture in an object, all the same in every call."""
    entries = _entries_in(value, held) or []
    found = [inner for *_, inner in entries if isinstance(inner, FakeTensor)]
    return bool(found) and all(map(is_constant, found))


@dataclass(frozen=True, eq=False)
class _Change:
    """What a run has changed that made something, before it used that.

    Attributes:
        of: a table of attributes, another container, or a tensor.
        key: in a dictionary; MISSING for all of a container or tensor.
        place: the id of the attributes and the name, of an attribute.
    """

    of: Any
    key: Any
    old: Any
    new: Any
    place: tuple[int, str] | None = None

    @property
    def what(self) -> tuple[int, Any]:
        """Equal for changes of one thing."""
        return id(self.of), self.key

    def put(self, value: Any) -> None:
        """Puts the old or the new value there."""
        if isinstance(self.of, torch.Tensor):
            self.of.data.copy_(value)
        elif self.key is MISSING:
            refill(self.of, value)
        elif value is MISSING:
            self.of.pop(self.key, None)
        else:
            self.of[self.key] = value

    def is_again(self, written: Container[Any]) -> bool:
        """Whether it was changed once more; attributes are known that were written to."""
        if self.place is not None or isinstance(self.of, torch.Tensor):
            return self.place in written
        if self.key is MISSING:
            return not is_as_left((self.of, self.new))
        return self.of.get(self.key, MISSING) is not self.new


class _Content:
    """What objects and containers hold, with copies, and the values of tensors there.

    Args:
        roots: objects or containers.
        looks_into: says of the id of the attributes of an object whether it counts.
    """

    def __init__(self, roots: Iterable[Any], looks_into: Callable[[int], bool]):
        self._held: list[tuple[Any, Any]] = []
        self._tensors: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.tables: set[int] = set()
        # Tables of attributes: their own ids, and those of the tables that a module has in its own.
        self._owners: dict[int, int] = {}
        waiting, seen = [*roots], set[int]()
        for part in waiting:  # grows
            table = vars(part) if _is_open(part) else part
            if id(table) in seen or (table is not part and not looks_into(id(table))):
                continue
            seen.add(id(table))
            if table is not part:
                self.tables.add(id(table))
                own = map(table.get, MODULE_TABLES if isinstance(part, nn.Module) else ())
                self._owners |= {id(one): id(table) for one in (table, *own)}
            if isinstance(table, torch.Tensor):
                if not (table.is_meta or is_lazy(table)) and table.layout is torch.strided:
                    self._tensors.append((table, table.detach().clone()))
            elif type(table) in (*PLAIN_CONTAINERS, set):
                self._held.append((table, copy.copy(table)))
            entries = contents_of(table) or {}
            if len(entries) <= _MOST_ENTRIES:
                waiting += (value for value in entries.values() if not is_simple(value))

    def changes(self) -> list[_Change]:
        """How it is by now."""
        found: list[_Change] = []
        for table, old in self._held:
            if is_as_left((table, old)):
                continue
            if not isinstance(table, dict):
                found.append(_Change(table, MISSING, old, copy.copy(table)))
                continue
            own = self._owners.get(id(table))
            for key in {**old, **table}:
                before, now = old.get(key, MISSING), table.get(key, MISSING)
                if now is not before:
                    place = None if own is None else (own, key)
                    found.append(_Change(table, key, before, now, place))
        for tensor, old in self._tensors:
            if not torch.equal(tensor.detach(), old):
                found.append(_Change(tensor, MISSING, old, tensor.detach().clone()))
        return found

    def restore(self) -> None:
        """Puts it back."""
        for change in self.changes():
            change.put(change.old)


def held_under(attributes: dict[str, Any], name: str) -> Any:
    """An attribute, parameter, buffer or part of an object; None if there is none."""
    tables = (attributes, *(attributes.get(of, {}) for of in MODULE_TABLES))
    return next((one[name] for one in tables if one.get(name) is not None), None)


@contextlib.contextmanager
def registrations_noted(note: Callable[[nn.Module, str, Any], None]) -> Generator[None]:
    """Has told which modules get which parts and parameters, as layers in lists do, before."""
    of_parts = module.register_module_module_registration_hook(note)
    of_parameters = module.register_module_parameter_registration_hook(note)
    try:
        yield
    finally:
        of_parts.remove()
        of_parameters.remove()


class Making:
    """What one run of a step function in plain PyTorch makes.

    Args:
        held: objects of before, by the id of their attributes.
        others: containers that it may reach besides.
    """

    def __init__(self, held: Mapping[int, Held], others: Iterable[Any]):
        self._held = held
        objects = [one.value for one in held.values() if one.value is not None]
        self._before = _Content([*objects, *others], held.__contains__)
        self._made: dict[tuple[int, str], tuple[Held, str, Any, Any]] = {}
        # What made objects held when they got their places, and when they were first used.
        self._begun: dict[int, _Content] = {}
        self._used: dict[int, _Content] = {}
        self._ready: list[_Change] = []
        self._inside: list[_Change] = []

    @property
    def names(self) -> list[str]:
        """Of the places that have got objects."""
        return [f"{owner.name}.{name}" for owner, name, *_ in self._made.values()]

    @contextlib.contextmanager
    def noted(self) -> Generator[None]:
        """Notes what a run inside makes. Afterwards that is there, and all else as it was."""
        values = [held.value for held in self._held.values() if held.value is not None]
        kinds: set[Any] = {type(value) for value in values if not isinstance(value, nn.Module)}
        call: Any = nn.Module.__call__
        states = random.getstate(), np.random.get_state()

        def use(used: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self._begin(used)
            return call(used, *args, **kwargs)

        try:
            with contextlib.ExitStack() as stack:
                for kind in (nn.Module, *kinds):
                    stack.enter_context(exchanged(kind, __setattr__=self._setter(kind.__setattr__)))
                stack.enter_context(registrations_noted(self._register))
                stack.enter_context(exchanged(nn.Module, __call__=use))
                yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            self._end()

    def check(self, written: Container[Any]) -> None:
        """Looks at what a capture has changed that finds the objects made, when it has run.

        Args:
            written: attributes, by the id of the table and the name.

        Raises:
            AgainError: it has changed what was taken for setting up, and belongs to the use: that
                is to be as it was before.
        """
        self._put_back([change for change in self._ready if change.is_again(written)])

    def check_tensors(self, written: Container[int]) -> None:
        """The same of tensors that a step writes to, by their ids."""
        tensors = [change for change in self._ready if isinstance(change.of, torch.Tensor)]
        self._put_back([change for change in tensors if id(change.of) in written])

    def _put_back(self, changes: Sequence[_Change]) -> None:
        if not changes:
            return
        self._ready = [change for change in self._ready if change not in changes]

        def put_back() -> None:
            for change in changes:
                change.put(change.old)

        raise AgainError([change.key for change in changes], put_back)

    def _setter(self, set_attribute: Any) -> Any:
        def set_noted(owner: Any, name: str, value: Any) -> None:
            self._register(owner, name, value)
            set_attribute(owner, name, value)

        return set_noted

    def _register(self, owner: Any, name: str, value: Any) -> None:
        """Takes in an object that an attribute gets."""
        table = object.__getattribute__(owner, "__dict__")
        before, held = held_under(table, name), self._held.get(id(table))
        is_known = _held_of(value, self._held) is not None
        is_object = _is_open(value) or _is_mixed(value) or isinstance(value, nn.Parameter)
        if held is not None and is_object and not is_known and before is None:
            self._made[id(table), name] = held, name, value, table.get(name, MISSING)
            self._begun[id(value)] = self._content_of(value)

    def _content_of(self, value: Any) -> _Content:
        return _Content([value], lambda table: table not in self._held)

    def _begin(self, used: nn.Module) -> None:
        """Takes objects as ready that a module is, or is a part of."""
        for *_, value, _ in [*self._made.values()]:
            if id(value) not in self._used:
                content = self._content_of(value)
                if id(vars(used)) in content.tables:
                    self._used[id(value)] = content
                    self._inside += self._begun[id(value)].changes()
                    self._ready = self._before.changes()

    def _end(self) -> None:
        """Puts back what was there, but for what was made and seems to belong to that."""
        unused = [value for *_, value, _ in self._made.values() if id(value) not in self._used]
        for value in unused:
            self._inside += self._begun[id(value)].changes()
        if unused:
            self._ready = self._before.changes()
        # What the use has changed as well was set up before it.
        later = {change.what for one in self._used.values() for change in one.changes()}
        self._inside = [change for change in self._inside if change.what not in later]
        self._before.restore()
        for content in reversed(self._used.values()):  # an object may be a part of a later one
            content.restore()
        for change in self._ready:
            change.put(change.new)
        for owner, name, value, before in self._made.values():
            if held_under(owner.table, name) is value:
                owner.made[name] = value, before
        self._ready += self._inside


def fakes_in(value: Any) -> list[Read]:
    """Places in an object that have got tensors of a capture."""
    entries = _entries_in(value, {}) or []
    return [
        Read(f"{key}", None, partial(getitem, table, key), put=partial(setitem, table, key))
        for table, key, inner in entries
        if isinstance(inner, FakeTensor) and not isinstance(table, tuple)
    ]


def _entries_in(value: Any, held: Mapping[int, Held]) -> list[tuple[Any, Any, Any]] | None:
    """What is in an object, but not in those that are held: what holds it, and under which key.

    None if that is too much.
    """
    found: list[tuple[Any, Any, Any]] = []
    waiting, seen = [value], set[int]()
    for part in waiting:  # grows
        if len(waiting) > _MOST_PARTS:
            return None
        table = vars(part) if _is_open(part) else part
        for key, inner in (contents_of(table) or {}).items():
            found.append((table, key, inner))
            is_end = _held_of(inner, held) is not None and not isinstance(table, tuple)
            if is_end or isinstance(inner, FakeTensor) or id(inner) in seen:
                continue
            if _is_open(inner) or contents_of(inner):
                seen.add(id(inner))
                waiting.append(inner)
    return found


def _held_of(value: Any, held: Mapping[int, Held]) -> Held | None:
    return held.get(id(vars(value))) if _is_open(value) else None


def _take_away(held: Held, key: str) -> None:
    """Puts back what was there; the entry stays, so that the place is not filled again."""
    delattr(held.value, key)
    if (before := held.made[key][1]) is not MISSING:
        setattr(held.value, key, before)


def _is_mixed(value: Any) -> bool:
    """Whether it is a container of tensors and of others, by which microbatches may count."""
    if type(value) not in (dict, list):
        return False
    leaves = pytree.tree_leaves(value)
    are_tensors = [isinstance(leaf, torch.Tensor) for leaf in leaves]
    return any(are_tensors) and not all(are_tensors)


def _is_open(value: Any) -> bool:
    return isinstance(value, nn.Module) or has_attributes(value)
