"""What a captured step leaves in buffers and in attributes of modules and parameters.

Export sees writes to the tensors of buffers only; what is assigned becomes one.
"""

import contextlib
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from mpxla.errors import CaptureError
from mpxla.graph.capture.attached import Attached
from mpxla.graph.capture.carried import CarriedError, Form, all_carried, form_of, is_carried
from mpxla.graph.capture.tensor_places import Attribute, attributes_of
from mpxla.graph.capture.writes import described
from mpxla.graph.exchanged import exchanged
from mpxla.graph.fakes import storage_of
from mpxla.graph.partition.modules import joined_path
from mpxla.graph.user_code import at_user_line
from mpxla.log import warn_once

__all__ = [
    "Written",
    "all_written",
    "assigned_buffers_written",
    "carried_attributes_written",
    "parameter_attributes_written",
]

Written = list[tuple[torch.Tensor, torch.Tensor]]
"""Tensors of buffers, and what is to be written to them when the step function has returned."""


@contextlib.contextmanager
def all_written(returned: list[Any], note: Callable[[torch.Tensor], None]) -> Generator[Written]:
    """Gives a list to be filled, and writes what is in it.

    Args:
        returned: gets what the function returns; tensors in it keep the numbers that they have.
        note: gets each tensor before it is written to.
    """
    written: Written = []
    yield written
    # Copies first: some may be given to each other, as in a queue that moves on.
    copies = [(old, new.detach().clone()) for old, new in written]
    storages = {storage_of(old) for old, _ in written}
    for place, value in enumerate(returned):
        is_plain = isinstance(value, torch.Tensor) and value.layout is torch.strided
        if is_plain and storage_of(value) in storages:
            returned[place] = value.clone()
    for old, new in copies:
        note(old)
        old.copy_(new)


@contextlib.contextmanager
def assigned_buffers_written(
    model: nn.Module, written: Written, attached: Attached
) -> Generator[None]:
    """Makes `self.buffer = new` in a forward what `self.buffer.copy_(new)` is.

    Export sees changes of a buffer's tensor only, and would drop another tensor in its place.

    Args:
        model: whose buffers they are.
        written: gets them.
        attached: gets what is found and left there.

    Raises:
        CarriedError: the new tensor has another shape or dtype, and the buffer is in no checkpoint:
            it is to be an attribute, which may change both.
        CaptureError: the same of a buffer that is in checkpoints; or a buffer is new.
    """
    modules = [(path, m, dict(m._buffers)) for path, m in model.named_modules()]  # pyright: ignore[reportPrivateUsage]
    for path, _, before in modules:
        for name, old in before.items():
            attached.find(joined_path(path, name), old)
    yield
    resized: list[tuple[nn.Module, str, Form]] = []
    _refuse_parted(modules)
    for path, module, before in modules:
        table: dict[str, Any] = module._buffers  # pyright: ignore[reportPrivateUsage]
        for name, old in before.items():
            new = table[name]
            attached.leave(f"the buffer {joined_path(path, name)}", old, new)
            if new is old:
                continue
            table[name] = old
            form = form_of(new)
            passing = module._non_persistent_buffers_set  # pyright: ignore[reportPrivateUsage]
            is_kept = form is None or name not in passing
            if old is not None and new is not None and new.shape == old.shape:
                keeps_values = torch.can_cast(new.dtype, old.dtype)  # but for their precision
                if new.dtype is old.dtype or (is_kept and keeps_values):
                    written.append((old, new))
                    continue
            if old is None and form is not None and is_kept:
                _tell_of_new(module, name)
            elif form is None or is_kept:
                raise CaptureError(
                    f"The step function assigns to the buffer {joined_path(path, name)}, "
                    f"{described(old)}, another tensor, {described(new)}. Register it with the "
                    f"shape and dtype that it keeps, or with persistent=False if checkpoints need "
                    f"not have it."
                )
            resized.append((module, name, form))
        if made := [name for name in table if name not in before]:
            raise CaptureError(
                f"The step function makes the buffer {made[0]} of a {type(module).__name__} by its "
                f"table (_buffers). Assign it (self.{made[0]} = ...), which steps carry, or "
                f"register_buffer with a tensor before the first step call."
            )
    if resized:
        raise CarriedError(resized)


def _refuse_parted(modules: Iterable[tuple[str, nn.Module, Mapping[str, Any]]]) -> None:
    """Refuses to give two buffers that are one tensor different ones: they have one name here."""
    left: dict[int, tuple[str, Any]] = {}
    for path, module, before in modules:
        for name, old in before.items():
            new, called = module._buffers[name], joined_path(path, name)  # pyright: ignore[reportPrivateUsage]
            other, left_there = left.setdefault(id(old), (called, new))
            if old is not None and new is not left_there:
                raise CaptureError(
                    f"The step function assigns to one of the buffers {other} and {called}, which "
                    f"were one tensor, and not to the other. Write to both "
                    f"(self.buffer.copy_(new)), or let each have a tensor of its own from the "
                    f"start: register_buffer(name, tensor.clone())."
                )


@contextlib.contextmanager
def carried_attributes_written(
    model: nn.Module, written: Written, attached: Attached
) -> Generator[None]:
    """Lets modules have the attributes that steps carry, and writes what they are given.

    Args:
        model: whose modules they are.
        written: gets them.
        attached: gets what is found and left there.

    Raises:
        CarriedError: one was given tensors of another form than it was to have.
        CaptureError: one had tensors, and lost them.
    """
    carried = all_carried(model)
    buffers = [one.show() for one in carried]
    register, own = nn.Module.register_buffer, {id(vars(module)) for module in model.modules()}

    def register_buffer(
        self: nn.Module, name: str, tensor: torch.Tensor | None, persistent: bool = True
    ) -> None:
        was_buffer = is_carried(vars(self), name)
        is_new = id(vars(self)) in own and not (was_buffer or hasattr(self, name))
        if is_new and persistent and tensor is not None:
            _tell_of_new(self, name)
        if was_buffer or (is_new and tensor is not None):
            setattr(self, name, tensor)
        else:
            register(self, name, tensor, persistent)

    with exchanged(nn.Module, register_buffer=register_buffer):
        yield
    for one, held in zip(carried, buffers, strict=True):
        for old, value in zip(held, one.end() or held, strict=True):
            attached.leave(f"the attribute {one.name} of a {type(one.module).__name__}", old, value)
            if value is not old:
                written.append((old, value))


def _tell_of_new(module: nn.Module, name: str) -> None:
    kind = type(module).__name__
    warn_once(
        f"new buffer {kind}.{name}",
        f"the step function makes the buffer {name} of a {kind}{at_user_line()}. Steps carry it "
        f"as an attribute of the module, which no state dict has. If checkpoints are to have it, "
        f"register it with a tensor before the first step call.",
    )


@contextlib.contextmanager
def parameter_attributes_written(
    model: nn.Module,
    known: Sequence[Attribute],
    written: Written,
    attached: Attached,
    is_copy: Callable[[torch.Tensor, torch.Tensor], bool],
) -> Generator[list[Attribute]]:
    """Lets parameters have their attributes in a forward, and writes to these what it assigns.

    Gives a list for new ones that are copies of their parameters.

    Args:
        model: whose parameters they are.
        known: attributes that are buffers meanwhile.
        written: gets them.
        attached: gets what is left there.
        is_copy: whether a tensor has the values that a parameter had when the step began.

    Raises:
        CaptureError: an attribute is new, and anything else.
    """
    new: list[Attribute] = []
    before = [(found, found.table[found.slot]) for found in known]
    for found in known:
        setattr(found.owner, found.name, getattr(found.module, found.key))
    try:
        yield new
        for found in [a for module in model.modules() for a in attributes_of(module)]:
            value, old = vars(found.owner)[found.name], getattr(found.module, found.key, None)
            attached.leave(f"the attribute {found.name} of a parameter", old, value)
            if old is not None and old is not value:
                written.append((old, value))
            elif old is None and is_copy(value, found.owner):
                new.append(found)
            elif old is None:
                raise CaptureError(
                    f"The step function gives the parameter {found.parameter} of a "
                    f"{type(found.module).__name__} a tensor as its attribute {found.name}, which "
                    f"the next microbatch or step could read. Assign it before the first step call "
                    f"(parameter.{found.name} = parameter.data.clone()), or make it a buffer."
                )
    finally:
        for found in [a for module in model.modules() for a in attributes_of(module)]:
            delattr(found.owner, found.name)
        for found, value in before:
            found.table[found.slot] = value
