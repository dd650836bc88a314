"""Tensors in attributes of modules that steps carry from one microbatch or call to the next.

    self.hidden = hidden.detach()                     of recurrent layers
    self.mean = 0.9 * self.mean + 0.1 * x.mean()      also in tuples, lists and dictionaries
    self.count += 1                                   of a tensor

For a step they are buffers of the module, under names like `hidden__0`; outside of steps they stay
the attributes that they are. Where an attribute has no tensors yet, the step is captured as it goes
without them, and gives it some: the next microbatch has another program.

This module must not know how a step is captured or run.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch._C._functorch import is_functorch_wrapped_tensor

from mpxla.errors import CaptureError
from mpxla.graph.plain import MISSING
from mpxla.graph.tensor_places import HeldTensor

__all__ = [
    "Carried",
    "CarriedError",
    "CarriedTensor",
    "Form",
    "carried_of",
    "carry_written",
    "end_caches",
    "forget_carried",
    "form_of",
    "is_cache",
]

_CARRIED = "_mpxla_carried"
"""An attribute of modules: what is known of those of their attributes that steps carry, by name."""


class Form(NamedTuple):
    """What can be compared of tensors in an attribute: their container, shapes and dtypes."""

    spec: Any
    tensors: tuple[tuple[torch.Size, torch.dtype], ...]

    def __str__(self) -> str:
        return ", ".join(f"{str(dtype)[6:]}{list(shape)}" for shape, dtype in self.tensors)

    @property
    def size(self) -> int:
        """The number of elements."""
        return sum(shape.numel() for shape, _ in self.tensors)

    def zeros(self) -> list[torch.Tensor]:
        """Tensors of this form, on the host."""
        return [torch.zeros(shape, dtype=dtype) for shape, dtype in self.tensors]


def form_of(value: Any) -> Form | None:
    """The form of a tensor, or of a container of nothing else; None of anything else."""
    leaves, spec = pytree.tree_flatten(value)
    if leaves and all(map(_has_form, leaves)):
        return Form(spec, tuple((v.shape, v.dtype) for v in leaves))
    return None


def _has_form(leaf: Any) -> bool:
    if not isinstance(leaf, torch.Tensor) or is_functorch_wrapped_tensor(leaf):
        return False
    return leaf.layout is torch.strided and all(type(size) is int for size in leaf.shape)


class Carried:
    """An attribute of a module that steps carry from one microbatch or call to the next.

    Args:
        module: that has it.
        name: of the attribute.

    Attributes:
        is_carrying: whether the capture that runs, or the last one, has begun with tensors there.
        is_read: whether it has read them before it gave others.
        is_written: whether it has given others.
        is_cache: whether they are the same in every call, so that it is not carried.
        before: what was there before the capture.
    """

    def __init__(self, module: nn.Module, name: str):
        self._module, self.name = module, name
        self._forms: list[Form] = []
        self._wanted: Form | None = None
        self.before: Any = MISSING
        self.is_carrying = self.is_read = self.is_written = self.is_cache = False

    def __deepcopy__(self, memo: dict[int, Any]) -> "Carried":
        copied = Carried(copy.deepcopy(self._module, memo), self.name)
        copied._forms, copied.is_cache = list(self._forms), self.is_cache
        return copied

    @property
    def value(self) -> Any:
        """What is there."""
        return vars(self._module).get(self.name)

    @property
    def form_now(self) -> Form | None:
        """The form of what is there; None if it is none of those that are known."""
        form = form_of(self.value)
        return form if form in self._forms else None

    @property
    def form(self) -> Form:
        """The one that a step captured now is to give it."""
        return self._wanted or self.form_now or self._forms[-1]

    def tensors(self) -> list["CarriedTensor"]:
        """Their places."""
        count = len(self.form.tensors)
        return [CarriedTensor(self._module, f"{self.name}__{i}", self, i) for i in range(count)]

    def give(self, leaves: Sequence[torch.Tensor]) -> None:
        """Puts tensors there, in a new container."""
        vars(self._module)[self.name] = pytree.tree_unflatten(leaves, self.form.spec)

    def start(self) -> None:
        """Puts tensors there that a step is to fill."""
        self.give(self.form.zeros())

    def take_form(self, form: Form) -> None:
        """Has it given tensors of this form from here on."""
        was_given = self.form_now is not None
        self._forms = [*(other for other in self._forms if other != form), form]
        if self.form_now is not None:  # one tensor may be there twice, or be another's, too
            self.give([leaf.clone() for leaf in pytree.tree_leaves(self.value)])
        if was_given and self.form_now != form:  # which nobody reads
            vars(self._module)[self.name] = None
            self.start()

    def hide(self) -> None:
        """A capture begins. Export would take tensors that are there for constants."""
        self.is_carrying, self._wanted = self.form_now is not None, self.form
        self.is_read = self.is_written = False
        self.before = vars(self._module).get(self.name, MISSING)
        if self.is_carrying:
            vars(self._module)[self.name] = None
        elif isinstance(self.before, (list, dict)):  # which the step may fill
            vars(self._module)[self.name] = copy.copy(self.before)

    def end(self) -> list[torch.Tensor]:
        """What the captured step has put there, which is hidden again.

        Raises:
            CarriedError: tensors of another form than those that were to be there.
            CaptureError: it goes on by tensors of another form, or of none.
        """
        value = self.value
        form = form_of(value)
        if self.is_carrying:
            vars(self._module)[self.name] = None
        if self.is_read and form != self._wanted:
            raise CaptureError(
                f"The step function reads the attribute {self.name} of a "
                f"{type(self._module).__name__}, where it finds {self._wanted}, and leaves "
                f"{form or 'no tensors'} there. Programs are compiled for one shape: keep it, and "
                f"count in a tensor how much of it is used."
            )
        if form is None:
            return []
        if form != self._wanted:
            raise CarriedError([(self._module, self.name, form)])
        return pytree.tree_leaves(value)

    def restore(self) -> None:
        """Puts back what was there before the capture."""
        if self.before is MISSING:
            vars(self._module).pop(self.name, None)
        else:
            vars(self._module)[self.name] = self.before
        self.before, self._wanted = MISSING, None


@dataclass(frozen=True, eq=False)
class CarriedTensor(HeldTensor):
    """A tensor in an attribute that steps carry.

    Attributes:
        attribute: which one.
        index: of the tensor in it.
    """

    attribute: Carried
    index: int

    @property
    def is_left(self) -> bool:
        """Never: a script that sets it to None goes on later."""
        return False

    def get(self) -> torch.Tensor | None:
        """What is there."""
        known = self.attribute.form_now is not None
        return pytree.tree_leaves(self.attribute.value)[self.index] if known else None

    def put(self, value: torch.Tensor) -> None:
        """Puts another tensor there, whatever there is."""
        is_known = self.attribute.form_now is not None
        leaves = (
            pytree.tree_leaves(self.attribute.value) if is_known else self.attribute.form.zeros()
        )
        leaves[self.index] = value
        self.attribute.give(leaves)


class CarriedError(BaseException):
    """A step gives attributes of modules tensors, which are to be carried.

    It passes what catches the errors of users' code.
    """

    def __init__(self, found: Sequence[tuple[nn.Module, str, Form]]):
        super().__init__(", ".join(name for _, name, _ in found))
        self._found = found

    def carry(self) -> None:
        """Has the attributes carried from here on."""
        for module, name, form in self._found:
            carried = vars(module).setdefault(_CARRIED, {}).setdefault(name, Carried(module, name))
            carried.take_form(form)


def carry_written(model: nn.Module, written: Sequence[torch.Tensor]) -> None:
    """Sees whether a step has written to tensors in attributes of its model, in place.

    Raises:
        CarriedError: it has.
    """
    ids, found = set(map(id, written)), list[tuple[nn.Module, str, Form]]()
    for module in model.modules() if ids else ():
        for name, value in vars(module).items():
            if not ids.isdisjoint(map(id, pytree.tree_leaves(value))):
                form = form_of(value)
                found += [] if form is None else [(module, name, form)]
    if found:
        raise CarriedError(found)


def forget_carried(model: nn.Module) -> None:
    """Makes a model a plain one, whose attributes are what they are."""
    for module in model.modules():
        vars(module).pop(_CARRIED, None)


def carried_of(attributes: Mapping[str, Any]) -> dict[str, Carried]:
    """Those of a module's attributes that steps carry, by name."""
    found = attributes.get(_CARRIED)
    return {name: one for name, one in found.items() if not one.is_cache} if found else {}


def is_cache(attributes: Mapping[str, Any], name: str) -> bool:
    """Whether steps give an attribute of a module what is the same in every call."""
    return name in attributes.get(_CARRIED, ()) and name not in carried_of(attributes)


def end_caches(model: nn.Module, is_same: Callable[[str], bool]) -> None:
    """Carries attributes no more that the step just captured gives what is the same in every call.

    Tables for positions, say. Every stage that reads one computes its own.

    Args:
        model: that the step uses.
        is_same: says that of a buffer by its name in the model.

    Raises:
        CarriedError: there are some. The step is to be captured again.
    """
    found = False
    for path, module in model.named_modules():
        for carried in carried_of(vars(module)).values():
            keys = (f"{path}.{place.key}".lstrip(".") for place in carried.tensors())
            if carried.is_written and not carried.is_carrying and all(map(is_same, keys)):
                carried.is_cache = found = True
    if found:
        raise CarriedError([])
