"""Which plain values outside of its arguments a step function reads while it is captured.

Attributes of modules and of other objects that it is given or names, its globals and its closure:
their values become part of the program. What was read is remembered, so that a later change is
noticed; attributes that the step itself changes would change once per capture only: a warning says
so. This module must not know what is done with what was read.
"""

import copy
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from mpxla.graph.capture.carried import Carried, CarriedError, Form, carried_of, form_of, is_cache
from mpxla.graph.capture.recorder import BackwardRecorder
from mpxla.graph.containers import has_fakes, has_tensors, with_other_tensors
from mpxla.graph.python.counted import WrittenRead
from mpxla.graph.python.held_objects import OF_TORCH, Held, ObjectRead, has_attributes
from mpxla.graph.python.module_tables import MODULE_TABLES, ModuleTables
from mpxla.graph.python.noted_contents import (
    CONTAINERS,
    PLAIN_CONTAINERS,
    held_before,
    is_simple,
    left_again,
    note_content,
)
from mpxla.graph.python.number import is_number
from mpxla.graph.python.outside_reads import is_known, without_counted
from mpxla.graph.python.plain import FUNCTIONS, MISSING, PLAIN, Read, change, plain
from mpxla.graph.python.recorded import is_recordable, refuse_unrecordable
from mpxla.graph.python.refusals import refusal, warn_changed, warn_gone
from mpxla.graph.user_code import at_user_line

__all__ = [
    "FEW_ELEMENTS",
    "MODE",
    "AttributeLog",
    "is_made",
]

MODE = "training"
"""The attribute of a module that tells training from evaluation."""
_CONSTANT, _COMPUTED = object(), object()
FEW_ELEMENTS = 2**16
"""So much of what a step leaves in an attribute is there afterwards, also if no step reads it."""


@dataclass
class AttributeLog:
    """What a step function did with attributes of modules and objects.

    Attributes:
        held: objects by the id of their tables of attributes.
        texts: in the code that may read them, as for `plain`.
        counted: names of attributes that are inputs of the step (`counted.py`).
        contents: containers with what they held before the step.
        carrying: ids of the tables of modules that carry tensors, those of the model; others are
            objects like any.
        first: values at the first read, by table's id and attribute.
        written: the user's line of the first write, and the value of the last one, of tensors
            whether they are constants.
        inherited: reads of attributes of classes.
        methods: those of classes that were read, as reads of attributes in their places: an object
            may get a function of its own under that name.
        before: values at the first write.
        containers: lists and dictionaries that were read, which the step may fill.
        forms: of the tensors that it has given attributes.
        recorded: attributes of objects whose tensors are there when the step has run.
        counters: numbers that count beside caches.
        mixed: containers with constant tensors and other things that it has given attributes, with
            other tensors.
        of_constants: containers to which it has only given tensors that are the same in every call.
        read_buffers: of modules beside the model, places that were read.
        tables: of hooks and parts of modules.
        model: whose modules carry tensors, when it has run.
    """

    held: dict[int, Held]
    texts: Set[str]
    counted: Set[str]
    contents: list[tuple[Any, Any]]
    carrying: Set[int]
    first: dict[tuple[int, str], Any] = field(default_factory=dict)
    written: dict[tuple[int, str], tuple[str, Any]] = field(default_factory=dict)
    inherited: dict[tuple[int, str], Read] = field(default_factory=dict)
    methods: dict[tuple[int, str], Read] = field(default_factory=dict)
    before: dict[tuple[int, str], Any] = field(default_factory=dict)
    containers: dict[tuple[int, str], Any] = field(default_factory=dict)
    forms: dict[tuple[int, str], Form | None] = field(default_factory=dict)
    recorded: set[tuple[int, str]] = field(default_factory=set)
    counters: set[str] = field(default_factory=set)
    mixed: dict[tuple[int, str], Any] = field(default_factory=dict)
    of_constants: set[int] = field(default_factory=set)
    read_buffers: set[tuple[int, str]] = field(default_factory=set)
    tables: ModuleTables = field(init=False)
    model: nn.Module = field(init=False)
    _at_first: dict[int, dict[str, Any]] = field(init=False)
    _gone: list[tuple[int, str]] = field(init=False)

    def __post_init__(self) -> None:
        own = ((key, held) for key, held in self.held.items() if held.value is not None)
        # But for parameters; with buffers, some of which are attributes while a step is captured.
        self._at_first = {k: {**held.table.get("_buffers", {}), **held.table} for k, held in own}
        values = (one.value for one in self.held.values())
        self.tables = ModuleTables(value for value in values if isinstance(value, nn.Module))

    def note_read(self, owner: dict[str, Any], key: str, value: Any) -> None:
        """Notes a read, if the value is plain and was not made by the step itself."""
        place = id(owner), key
        if place in self.first or place in self.written or id(owner) not in self.held:
            return
        carried = carried_of(owner).get(key)
        if carried is not None and carried.is_written:
            return
        if _is_of_user(key) and not self._is_counted(place) and not is_number(value):
            is_carrying = carried is not None and carried.note_read()
            # What was put there by `__dict__` since then is known to `note_tables`.
            before = self._at_first.get(id(owner), owner).get(key, MISSING)
            self.first[place] = carried.found if carried else plain(before, self.texts)
            is_there = carried is not None or value is before
            if isinstance(value, CONTAINERS) and not is_carrying and is_there:
                self.containers[place] = value
                note_content(value, self.contents)

    def note_inherited(self, owner: dict[str, Any], kind: type, key: str, value: Any) -> None:
        """Notes a read of an attribute that an object has from its class, until it gets its own."""
        place = id(owner), key
        if place in self.inherited or id(owner) not in self.held or self._is_counted(place):
            return
        name = self._name(place)
        if is_number(value):  # of the class, whose number is an input until the object has its own
            self.inherited[place] = Read(name, MISSING, self.held[id(owner)].reader(key))
            return
        # Not by `getattr`: descriptors run code, which an enumeration's may do without an end.
        static = next((vars(base)[key] for base in kind.__mro__ if key in vars(base)), MISSING)
        held = self.held[id(owner)]
        if isinstance(value, FUNCTIONS) or static is not value:  # or what a property has computed
            if static is not MISSING and not hasattr(type(static), "__set__"):
                self.methods[place] = Read(name, MISSING, held.reader(key))
            return

        def now() -> Any:
            own = held.get(key)
            return getattr(kind, key, MISSING) if own is MISSING else own

        self.inherited[place] = Read(name, plain(value, self.texts), now, self.texts)

    def note_assigned(
        self, owner: dict[str, Any], key: str, before: Any, value: Any, recorder: BackwardRecorder
    ) -> None:
        """Notes that an attribute gets another value, or tensors."""
        written, form, place = value, None, (id(owner), key)
        tensors = [v for v in pytree.tree_leaves(value) if isinstance(v, torch.Tensor)]
        if tensors:  # which must not be held beyond the step
            old = pytree.tree_leaves(None if before is MISSING else before)
            is_alias = _are_parameters(tensors, old, recorder)
            is_same = all(recorder.is_constant(tensor, old) for tensor in tensors)
            is_same = is_same or is_alias or is_cache(owner, key)
            at_first = self.before.get(place, before)
            if id(owner) not in self.carrying and form_of(at_first) == form_of(value):
                is_same = is_alias  # no cache, which has no tensors between calls: `count + 1`
            written = _CONSTANT if is_same else _COMPUTED
            is_buffer = key in self.buffers_beside(owner)
            if place in self.read_buffers and place not in self.written:
                self.first.setdefault(place, before)
            is_attribute = is_buffer or not any(key in owner.get(t, ()) for t in MODULE_TABLES)
            form = form_of(value) if is_attribute and not is_alias else None
        self.note_write(owner, key, before, written, form)

    def buffers_beside(self, owner: dict[str, Any]) -> dict[str, Any]:
        """Those of a module beside the model, which are attributes like any."""
        return {} if id(owner) in self.carrying else owner.get("_buffers", {})

    def note_tables(self, recorder: BackwardRecorder) -> None:
        """Notes what the step, which has run, has put into attributes by their `__dict__`."""
        for owner, before in self._at_first.items():
            table = self.held[owner].table
            for key, value in table.items():
                place, old = (owner, key), before.get(key, MISSING)
                if value is old or place in self.written or self._is_counted(place):
                    continue
                if not _is_of_user(key) or isinstance(value, nn.Module):
                    continue
                carried = carried_of(table).get(key)
                is_first = carried is not None and not carried.is_carrying
                if carried is None or (is_first and isinstance(value, torch.Tensor)):
                    self.note_assigned(table, key, old, value, recorder)
                    self.written[place] = "", self.written[place][1]  # nobody saw where
                    self.first.setdefault(place, plain(old, self.texts))

    def note_write(
        self, owner: dict[str, Any], key: str, before: Any, value: Any, form: Form | None = None
    ) -> None:
        """Notes a write, with the line, and the form of tensors."""
        place = id(owner), key
        carried = carried_of(owner).get(key)
        if carried is not None and carried.note_write():
            return
        value = _COMPUTED if carried is not None and value is _CONSTANT else value
        if id(owner) in self.held and not self._is_counted(place):
            self.forms[place] = form
            line = self.written[place][0] if place in self.written else at_user_line()
            self.written[place] = line, value
            self.before.setdefault(place, before if carried is None else carried.before)

    def reads(self) -> list[Read]:
        """What the captured step depends on: what was read, and not changed by the step."""
        found = [read for read in self.inherited.values() if is_known(read.name, read.value)]
        found += [read for place, read in self.methods.items() if place not in self.written]
        for place, value in self.first.items():
            line, last = self.written.get(place, ("", None))
            if last is _COMPUTED and not (self._is_carried(place) or place in self.recorded):
                raise refusal(self._name(place), line)
            is_cache = last is _CONSTANT  # which all calls fill alike
            if is_known(self._name(place), value) and not (is_cache and value is MISSING):
                found.append(without_counted(self._read(place), self.counted))
        changes = self._changes()
        return [*self.objects(), *(read for read in found if read.name not in changes)]

    def objects(self) -> list[Read]:
        """Objects that it has found in attributes or globals; those that hold others first."""
        found: list[Read] = []
        for held in self.held.values():
            gets = [get for get, place in held.places if place is None or place in self.first]
            if gets and not isinstance(held.value, nn.Module):
                found.append(ObjectRead.of(held, gets))
        return found

    def note_contents(
        self, is_constant: Callable[[torch.Tensor], bool], others: Iterable[Any] = ()
    ) -> None:
        """Notes tensors that the step has put in the places of others, or None, in containers.

        And which of those, and of others, have got only what is the same in every call.
        """
        for container in (*self.containers.values(), *others):
            leaves = [v for v in pytree.tree_leaves(container) if isinstance(v, FakeTensor)]
            if leaves and all(map(is_constant, leaves)):
                self.of_constants.add(id(container))
        for place, (line, last) in [*self.written.items()]:
            value = self.held[place[0]].get(place[1])
            if last is not _CONSTANT or self.forms[place] is not None or not has_fakes(value):
                continue
            leaves = [v for v in pytree.tree_leaves(value) if isinstance(v, FakeTensor)]
            if all(map(is_constant, leaves)):
                self.mixed[place] = with_other_tensors(value, 1)
            else:  # it was given constants, and then filled otherwise
                self.written[place] = line, _COMPUTED
        held = {id(container): content for container, content in self.contents}
        for place, container in self.containers.items():
            before = held_before(container, held)
            known, like = pytree.tree_flatten(before)
            leaves, spec = pytree.tree_flatten(container)
            form = form_of(container)
            is_carried = self._is_carried(place)  # it may get its tensors under new keys
            is_like = spec == like or is_carried
            is_carrying = place[0] in self.carrying  # others carry nothing
            if form is None or not is_like or place in self.written or not is_carrying:
                continue
            old = set(map(id, known))
            new = [leaf for leaf in leaves if id(leaf) not in old]
            written = _CONSTANT if all(map(is_constant, new)) else _COMPUTED
            if written is _COMPUTED or (new and (is_carried or form_of(before) == form)):
                self.note_write(self.held[place[0]].table, place[1], before, written, form)
        # They get back what they held.
        self.containers = {place: copy.copy(one) for place, one in self.containers.items()}

    def start_carried(self, model: nn.Module, gone: Sequence[tuple[nn.Module, str]]) -> None:
        """Puts tensors into attributes that the step will give some.

        Args:
            model: whose modules carry them; others are objects like any.
            gone: attributes that the capture has given back, for `tell_of_gone`.

        Raises:
            CarriedError: there are others to be carried: what it gives tensors and reads, what is
                small, and what has such tensors, which other steps may read.
        """
        self.model = model
        new = [
            (self.held[place[0]].value, place[1], form)
            for place, form in self.forms.items()
            if form is not None and self._is_to_carry(place, form)
            if _is_of_user(place[1]) and not self._is_carried(place)
        ]
        if new := self._of_model(new):
            raise CarriedError(new)
        self._gone = [(id(vars(module)), name) for module, name in gone]
        for place in self._started():
            self._carried(place).start()

    def carry_filled(self, name: str) -> None:
        """Has a dictionary of tensors carried, by which the next microbatch would go.

        Raises:
            CarriedError: it is a module's, and was not carried.
        """
        held = {id(one): content for one, content in self.contents}
        for place, filled in self.containers.items():
            owner, form = self.held[place[0]].value, form_of(filled)
            if self._name(place) != name or form is None or self._is_carried(place):
                continue
            found = self._of_model([(owner, place[1], form)] if isinstance(filled, dict) else [])
            if found:
                before = held_before(self.held[place[0]].get(place[1]), held)
                raise CarriedError(found, form_of(before), of_found=True)

    def _of_model(self, found: list[tuple[Any, str, Form]]) -> list[tuple[Any, str, Form]]:
        """Those attributes that are of modules of the model: others carry nothing."""
        modules = set(map(id, self.model.modules())) if found else ()
        return [one for one in found if id(one[0]) in modules]

    def _is_to_carry(self, place: tuple[int, str], form: Form) -> bool:
        if self.written[place][1] is _COMPUTED:
            return place in self.first or form.size <= FEW_ELEMENTS
        return form_of(self.before[place]) == form  # `self.hidden = torch.zeros(...)` to begin anew

    def constants(self, with_unread: bool = False) -> list[tuple[Read, Any]]:
        """Attributes that it has read without tensors, and has given constant ones; with others."""
        found = [(place, form.of_ones()) for place, form in self._constant_places(with_unread)]
        found += [pair for pair in self.mixed.items() if with_unread or self._is_read(pair[0])]
        return [(self._written_read(place), other) for place, other in found]

    def _constant_places(self, with_unread: bool = False) -> list[tuple[tuple[int, str], Form]]:
        written = [place for place, (_, last) in self.written.items() if last is _CONSTANT]
        places = written if with_unread else filter(self._is_read, written)
        known = [(place, self.forms.get(place)) for place in places if _is_of_user(place[1])]
        return [
            (place, form)
            for place, form in known
            if form is not None and is_simple(self.before[place])
        ]

    def carry_constants(self, with_unread: bool = False) -> None:
        """Has constants carried that it has given modules: it goes another way where it finds them.

        Raises:
            CarriedError: there are some.
        """
        places = self._constant_places(with_unread)
        found = [(self.held[owner].value, key, form) for (owner, key), form in places]
        if found := self._of_model(found):
            raise CarriedError(found, of_found=True)

    def changed(self) -> list[Read]:
        """What was read, and changed by the step; with its first value."""
        return [read for read, _ in self._changes().values()]

    def numbers_left(self) -> list[tuple[Read, Any]]:
        """Those to which it has given numbers that the model computes, with the last ones."""
        found: list[tuple[Read, Any]] = []
        for place, (_, last) in self.written.items():
            before = self.before[place]
            is_left = place[0] not in self.carrying  # others carry them
            if last is _COMPUTED and is_left and (is_simple(before) or form_of(before)):
                value = self.held[place[0]].get(place[1])
                if is_recordable(value, with_tensors=True):
                    found.append((self._written_read(place), value))
                    self.recorded.add(place)
                continue
            is_open = is_simple(before) or not self._is_read(place)
            if _is_of_user(place[1]) and is_open:
                refuse_unrecordable(self._name(place), last)
            if _is_of_user(place[1]) and is_open and is_recordable(last):
                found.append((self._written_read(place), last))
        return found

    def is_read(self, name: str) -> bool:
        """Whether an attribute was read, or a name is none of those that were written."""
        places = [place for place in self.written if self._name(place) == name]
        return not places or any(map(self._is_read, places))

    def is_written(self, name: str) -> bool:
        """Whether it has given an attribute a value."""
        return any(self._name(place) == name for place in self.written)

    def only_written(self) -> dict[str, Read]:
        """Those that it has given plain values without reading them, by name."""
        found: dict[str, Read] = {}
        for place, (_, last) in self.written.items():
            if self._is_read(place) or self._is_carried(place) or not _is_of_user(place[1]):
                continue
            if is_simple(last) and is_simple(self.before[place]):
                found[self._name(place)] = self._written_read(place)
        return found

    def constants_written(self) -> list[WrittenRead]:
        """Those that it has given plain values without reading them, whatever was there."""
        found: list[WrittenRead] = []
        for place, (_, last) in self.written.items():
            before, is_user = self.before[place], _is_of_user(place[1]) and place[1] != MODE
            is_open = is_simple(before) or place[0] not in self.carrying
            is_plain = is_simple(last) and not is_number(last)
            if is_user and is_open and is_plain and not self._is_read(place):
                read = self._in_place(before, place)
                found.append(WrittenRead.at(read, left=last, is_of_tensors=self._is_carried(place)))
        return found

    def places(self) -> list[Read]:
        """All attributes of the user that it has read or written, and that can be put back."""
        read = {*self.first, *self.inherited} - self.before.keys()
        own = [place for place in read if _is_of_user(place[1])]
        written = [place for place in self.before if _is_of_user(place[1])]
        return [*map(self._read, own), *map(self._written_read, written)]

    def filled(self) -> list[tuple[Read, Any]]:
        """Containers that were read, with copies that have the tensors of the capture."""
        return [(self._read(place), self._filled(place)) for place in self.containers]

    def _filled(self, place: tuple[int, str]) -> Any:
        left, now = self.containers[place], self.held[place[0]].get(place[1])
        if isinstance(left, dict) and isinstance(now, dict):
            return {k: v if has_fakes(v) else now.get(k, v) for k, v in left.items()}
        if isinstance(left, list) and isinstance(now, list) and len(left) == len(now):
            return [a if has_fakes(a) else b for a, b in zip(left, now, strict=True)]
        return left

    def is_of_object(self, name: str) -> bool:
        """Whether a container is in an attribute of an object that carries nothing."""
        owners = {place[0] for place in self.containers if self._name(place) == name}
        return owners.isdisjoint(self.carrying)

    def read_of_modules(self, names: Set[str]) -> list[str]:
        """Attributes of some names with tensors that modules beside the model have, if read."""
        places = [p for p in self.written if self._is_read(p) and p[0] not in self.carrying]
        of_tensors = [p for p in places if form_of(self.before[p]) is not None]
        own = [p for p in of_tensors if isinstance(self.held[p[0]].value, nn.Module)]
        return sorted(names & set(map(self._name, own)))

    def line(self, name: str) -> str:
        """Where something was changed first, if that is known."""
        lines = (line for place, (line, _) in self.written.items() if self._name(place) == name)
        return next(lines, "")

    def warn(self, names: Iterable[str]) -> None:
        """Tells the user that something does not change with every step."""
        for name in names:
            warn_changed(name, self.line(name))

    def tell_of_gone(self) -> None:
        """Warns of attributes whose tensors nothing carries."""
        for place in self._gone:
            if not self._is_carried(place):
                warn_gone(self._name(place))

    @property
    def has_tensors(self) -> bool:
        """Whether the step has put tensors into attributes or containers."""
        written = [value for _, value in self.written.values()]
        is_written = any(value is _CONSTANT or value is _COMPUTED for value in written)
        return is_written or has_tensors([*self.containers.values()])

    def has_constants(self, names: Set[str]) -> bool:
        """Whether constant tensors were put beside something that was changed, and counts not."""
        owners = {
            self.held[place[0]].name for place, (_, v) in self.written.items() if v is _CONSTANT
        }
        return any(name.rpartition(".")[0] in owners for name in names - self.counters)

    def left(self) -> list[Callable[[], None]]:
        """Put back what it has left of plain values and callables, hooks and parts of modules."""
        places = [(self.held[owner], key) for owner, key in self.before]
        known = [(own, key, own.get(key)) for own, key in places]
        values = [(own, key, v) for own, key, v in known if v is not MISSING and _may_be_left(v)]
        return [*self.tables.left(), *(left_again(partial(o.put, key), v) for o, key, v in values)]

    def left_carried(self) -> list[Callable[[], None]]:
        """Put tensors where the step will give some."""
        return [self._carried(place).start for place in self._started()]

    def restore(self) -> None:
        """Gives attributes plain values and callables of before, and modules hooks and parts."""
        self.tables.restore()
        for (owner_id, key), value in self.before.items():
            owner = self.held[owner_id]
            if _is_whole(value) and _may_be_left(owner.get(key)):
                owner.put(key, value)
        self.empty_caches()
        for place in self._started():
            self.held[place[0]].put(place[1], self.before[place])

    def empty_caches(self) -> None:
        """Takes tensors of the capture out of attributes that had none."""
        for (owner_id, key), value in self.before.items():
            owner = self.held[owner_id]
            is_left = _is_whole(value) or owner_id not in self.carrying
            if is_left and has_fakes(owner.get(key)):
                owner.put(key, value)

    def _started(self) -> list[tuple[int, str]]:
        """Carried attributes that had no tensors, and have got some."""
        given = [place for place, (_, last) in self.written.items() if last is _COMPUTED]
        return [place for place in given if self._is_carried(place)]

    def _is_carried(self, place: tuple[int, str]) -> bool:
        return place[1] in carried_of(self.held[place[0]].table)

    def _carried(self, place: tuple[int, str]) -> Carried:
        return carried_of(self.held[place[0]].table)[place[1]]

    def _is_read(self, place: tuple[int, str]) -> bool:
        return place in self.first or place in self.inherited

    def _written_read(self, place: tuple[int, str]) -> Read:
        """With what it was before the first write."""
        return self._with(self.before[place], place)

    def _with(self, value: Any, place: tuple[int, str]) -> Read:
        if self._is_carried(place):  # whose numbers are read anew
            return Read(self._name(place), value, self._carried(place).look)
        return self._in_place(value, place)

    def _in_place(self, value: Any, place: tuple[int, str]) -> Read:
        owner, key = self.held[place[0]], place[1]
        put = partial(owner.put, key)
        return Read(self._name(place), value, owner.reader(key), self.texts, put)

    def _name(self, place: tuple[int, str]) -> str:
        return f"{self.held[place[0]].name}.{place[1]}"

    def _is_counted(self, place: tuple[int, str]) -> bool:
        return bool(self.counted) and self._name(place) in self.counted

    def _changes(self) -> dict[str, tuple[Read, str]]:
        found: dict[str, tuple[Read, str]] = {}
        for place, (line, last) in self.written.items():
            if last is _CONSTANT or (last is _COMPUTED and not self._is_carried(place)):
                continue
            if not self._is_read(place):
                continue
            read = self._read(place)
            if not is_known(read.name, read.value):
                continue
            if read.change() or change("", read.value, plain(last, self.texts)):
                found[read.name] = read, line
        return found

    def _read(self, place: tuple[int, str]) -> Read:
        """Of an attribute that can be put back."""
        if place in self.first:
            return self._with(self.first[place], place)
        return replace(self.inherited[place], put=partial(self.held[place[0]].put, place[1]))


def _are_parameters(
    tensors: Sequence[torch.Tensor], old: Sequence[Any], recorder: BackwardRecorder
) -> bool:
    """Whether all are parameters, in the place of nothing, or of the same ones."""
    held = [id(leaf) for leaf in old if isinstance(leaf, torch.Tensor)]
    are_own = all(recorder.stand_in(tensor) is not tensor for tensor in tensors)
    return are_own and (not held or held == [*map(id, tensors)])


def _is_of_user(key: str) -> bool:
    """Whether an attribute of a module is one that user code changes."""
    return key == MODE or key not in OF_TORCH


def _is_whole(value: Any) -> bool:
    """Whether an attribute can be given it back; a method, say, that a flag says is wrapped.

    Keys of caches are tuples, of a shape and a dtype, say.
    """
    if isinstance(value, tuple):
        return all(map(_is_whole, cast(tuple[Any, ...], value)))
    return is_simple(value) or isinstance(value, PLAIN) or callable(value)


def is_made(value: Any) -> bool:
    """Whether it is a container without tensors, or an object, which a step may have made."""
    return has_attributes(value) or (type(value) in PLAIN_CONTAINERS and not has_fakes(value))


def _may_be_left(value: Any) -> bool:
    return _is_whole(value) or is_made(value)
