"""Has an `AttributeLog` told what a step function that is captured does with attributes."""

import contextlib
from collections.abc import Callable, Generator, Set
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

from torch import nn

from mpxla.graph.capture.recorder import current_recorder
from mpxla.graph.exchanged import exchanged
from mpxla.graph.python.attributes import AttributeLog
from mpxla.graph.python.held_objects import Held
from mpxla.graph.python.made_objects import held_under, keep_made, registrations_noted
from mpxla.graph.python.module_tables import MODULE_TABLES
from mpxla.graph.python.parameter_attributes import held_parameters, parameters_noted
from mpxla.graph.python.plain import MISSING
from mpxla.graph.user_code import is_called_by_user

__all__ = ["attributes_noted"]

_OF_MODULES = frozenset(dir(nn.Module))


@contextlib.contextmanager
def attributes_noted(
    held: dict[int, Held],
    texts: Set[str],
    counted: Set[str],
    contents: list[tuple[Any, Any]],
    model: nn.Module,
    make: Callable[[str], None],
) -> Generator[AttributeLog]:
    """Notes what a step function that is captured inside does with attributes.

    Args:
        held: objects that count, by the id of their attributes.
        texts: in the code of the step function.
        counted: names of attributes that do not count, since they are inputs.
        contents: gets containers that are read, with what they hold.
        model: whose modules carry tensors.
        make: makes an object that the function keeps, given what it is called.
    """
    carrying = {id(vars(module)) for module in model.modules()}
    log = AttributeLog(held | held_parameters(held.values()), texts, counted, contents, carrying)
    kinds = {type(h.value) for h in held.values() if not isinstance(h.value, nn.Module)}
    for one in held.values() if SimpleNamespace in kinds else ():
        # Nothing can tell what is read of it; what is written, a look at it later.
        if type(one.value) is SimpleNamespace:
            for key in one.table.keys() & texts or one.table:
                log.note_read(one.table, key, one.table[key])
    with contextlib.ExitStack() as stack:
        stack.enter_context(parameters_noted(_is_own, log))
        for kind in (nn.Module, *(kinds - {SimpleNamespace})):
            stack.enter_context(_class_noted(kind, log, make))

        def register(module: nn.Module, name: str, value: Any) -> None:
            if (recorder := current_recorder()) is not None and value is not None:
                place, before = (id(vars(module)), name), held_under(vars(module), name)
                keep_made(value, before, held, place, recorder.is_constant, make)

        stack.enter_context(registrations_noted(register))
        yield log


def _is_own(value: Any) -> bool:
    """Whether this is a parameter of the model of the step function that is captured."""
    recorder = current_recorder()
    return recorder is not None and recorder.stand_in(value) is not value


def _class_noted(
    kind: Any, log: AttributeLog, make: Callable[[str], None]
) -> AbstractContextManager[None]:
    """Notes what is read and written of the objects of a class."""
    get_attribute, set_attribute = kind.__getattribute__, kind.__setattr__

    def get(self: Any, name: str) -> Any:
        try:
            value = get_attribute(self, name)
        except AttributeError:  # which modules have for their parameters, buffers and parts, too
            owner = object.__getattribute__(self, "__dict__")
            is_there = any(name in owner.get(table, ()) for table in MODULE_TABLES)
            if current_recorder() is not None:
                if not is_there:
                    log.note_read(owner, name, MISSING)
                elif name in log.buffers_beside(owner):
                    log.read_buffers.add((id(owner), name))
            raise
        if current_recorder() is not None:
            owner = object.__getattribute__(self, "__dict__")
            if name in owner:
                log.note_read(owner, name, value)
            elif name == "__dict__" and (
                not isinstance(self, nn.Module) or is_called_by_user("mpxla.graph.")
            ):
                for key in owner:
                    log.note_read(owner, key, owner[key])
            elif name not in _OF_MODULES:
                log.note_inherited(owner, type(self), name, value)
        return value

    def set_noted(self: Any, name: str, value: Any) -> None:
        recorder, owner = current_recorder(), object.__getattribute__(self, "__dict__")
        if recorder is not None:
            keep_made(
                value,
                held_under(owner, name),
                log.held,
                (id(owner), name),
                recorder.is_constant,
                make,
            )
            if not isinstance(value, nn.Module):
                old = owner.get(name, log.buffers_beside(owner).get(name, MISSING))
                log.note_assigned(owner, name, old, value, recorder)
        set_attribute(self, name, value)

    return exchanged(kind, __getattribute__=get, __setattr__=set_noted)
