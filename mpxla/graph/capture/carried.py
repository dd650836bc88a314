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
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch._C._functorch import is_functorch_wrapped_tensor

from mpxla.errors import CaptureError
from mpxla.graph.capture.sparse import is_sparse
from mpxla.graph.capture.tensor_places import HeldTensor, fix_mask, is_constant
from mpxla.graph.partition.modules import joined_path
from mpxla.graph.python.plain import MISSING, refill
from mpxla.graph.user_code import AgainError

__all__ = [
    "Carried",
    "CarriedError",
    "CarriedTensor",
    "Form",
    "FormError",
    "all_carried",
    "carried_of",
    "carry_written",
    "forget_carried",
    "form_of",
    "is_cache",
    "settle",
]

_CARRIED = "_mpxla_carried"
"""An attribute of modules: what is known of those of their attributes that steps carry, by name."""
_NONE = "no tensors"
_MANY_FORMS = 8
"""An attribute that has had so many is one that grows."""


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

    def of_ones(self) -> Any:
        """Tensors of this form."""
        leaves = [torch.ones(shape, dtype=dtype) for shape, dtype in self.tensors]
        return pytree.tree_unflatten(leaves, self.spec)


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
        module, name: as given.
        is_carrying: whether the capture that runs, or the last one, has begun with tensors there.
        is_turning: whether it is to leave tensors of another form than those.
        is_read: whether it has read them before it gave others.
        is_written: whether it has given others.
        is_cache: whether they are the same in every call, so that it is not carried.
        is_changed: whether a step that finds some gives others.
        others: further attributes, mostly of other modules, that are the same list or dictionary.
        before: what was there before the capture.
    """

    def __init__(self, module: nn.Module, name: str):
        self.module, self.name = module, name
        self._forms: set[Form] = set()
        # The form that steps leave, by what they find. At first there may be nothing.
        self._turns: dict[Form | None, Form] = {}
        self._found: Form | None = None
        self.before: Any = MISSING
        self.is_carrying = self.is_turning = self.is_read = self.is_written = False
        self.is_cache = self.is_changed = False
        self.others: list[tuple[nn.Module, str]] = []
        # Whether a step has put another container there; the script may hold one that stays.
        self._is_exchanged, self._shown = False, None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Carried":
        copied = memo[id(self)] = Carried(self.module, self.name)
        copied.module = copy.deepcopy(self.module, memo)
        copied.others = copy.deepcopy(self.others, memo)
        copied._forms, copied._turns = set(self._forms), dict(self._turns)
        copied.is_cache, copied.is_changed = self.is_cache, self.is_changed
        copied._is_exchanged = self._is_exchanged
        return copied

    @property
    def value(self) -> Any:
        """What is there."""
        return vars(self.module).get(self.name)

    @property
    def form_now(self) -> Form | None:
        """The form of what is there; None if it is none of those that are known."""
        form = form_of(self.value)
        return form if form in self._forms else None

    def look(self) -> str:
        """The form of what is there, as a text."""
        return f"{self.form_now or _NONE}{', apart' * (not self._is_shared)}"

    @property
    def _is_shared(self) -> bool:
        """Whether the others are still the same object."""
        return all(vars(module).get(name) is self.value for module, name in self.others)

    def _set(self, value: Any) -> None:
        for module, name in (*self.others, (self.module, self.name)):
            if value is MISSING:
                vars(module).pop(name, None)
            else:
                vars(module)[name] = value

    def tensors(self) -> list["CarriedTensor"]:
        """Their places."""
        count = max(len(form.tensors) for form in self._forms)
        return [CarriedTensor(self.module, f"{self.name}__{i}", self, i) for i in range(count)]

    def start(self) -> None:
        """Puts tensors there that a step is to fill."""
        form = self._wanted(self.form_now)
        leaves = [torch.zeros(shape, dtype=dtype) for shape, dtype in form.tensors]
        self._fill(pytree.tree_unflatten(leaves, form.spec))

    def put(self, index: int, value: torch.Tensor) -> None:
        """Puts another tensor in the place of one, whatever there is."""
        if self.form_now is None:
            self.start()
        leaves, spec = pytree.tree_flatten(self.value)
        leaves[index] = value
        self._fill(pytree.tree_unflatten(leaves, spec))

    def _fill(self, value: Any) -> None:
        """Puts what a step has left there, into the container that is there if that stays."""
        held = self.value
        if not self._is_exchanged and type(value) in (list, dict) and type(held) is type(value):
            refill(held, value)
        else:
            self._set(value)

    def take_form(self, form: Form, found: Form | None) -> None:
        """Has it given tensors of this form from here on, where it has those that were found.

        Raises:
            FormError: there are too many forms.
        """
        self._forms.add(form)
        self._turns[found] = form
        if len(self._forms) > _MANY_FORMS:
            raise self._problem(form)
        if form_of(self.value) == form:  # one tensor may be there twice, or be another's, too
            leaves = [leaf.clone() for leaf in pytree.tree_leaves(self.value)]
            self._fill(pytree.tree_unflatten(leaves, form.spec))

    # --- in a capture ---------------------------------------------------------------------------

    def begin(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Hides what is there: export would take tensors for constants.

        Returns:
            What buffers stand for it, by name; also for what is to be there of another form.
        """
        if not self._is_shared:  # the script has given them objects of their own
            for module, name in self.others:
                del vars(module)[_CARRIED][name]
            self.others = []
        self._found = self.form_now
        self.is_carrying, self.is_read, self.is_written = self._found is not None, False, False
        wanted = self._wanted(self._found)
        self.is_turning = self.is_carrying and wanted != self._found
        self.before = vars(self.module).get(self.name, MISSING)
        if self._found is not None:
            self._hide(self._found.spec)
        elif isinstance(self.before, (list, dict)):  # which the step may fill
            self._set(copy.copy(self.before))
        self._shown = self.value if self._found is None else None
        places, own = self.tensors(), (self._found or wanted).tensors
        buffers = {place.key: like for place, like in zip(places, own, strict=False)}
        if self.is_turning:
            buffers |= {p.keys[1]: like for p, like in zip(places, wanted.tensors, strict=False)}
        return buffers

    def show(self) -> list[torch.Tensor]:
        """Has the function find these buffers there; gives those that get what it leaves."""
        places, buffers = self.tensors(), self.module.get_buffer
        if self._found is not None:
            own = [buffers(place.key) for place in places[: len(self._found.tensors)]]
            self._give(own, self._found)
            self._shown = self.value
        count = len(self._wanted(self._found).tensors)
        return [buffers(place.keys[self.is_turning]) for place in places[:count]]

    def end(self) -> list[torch.Tensor]:
        """What the captured step has put there, which is hidden again.

        Raises:
            CarriedError: tensors of another form than those that were to be there.
            FormError: it has taken tensors away.
        """
        value = self.value
        form = form_of(value)
        self._is_exchanged |= isinstance(self._shown, (list, dict)) and value is not self._shown
        self._shown = None
        if self._found is not None:
            self._hide(self._found.spec)
        if form is None and self.is_read:
            raise self._problem(form)
        if form is not None and form != self._wanted(self._found):
            raise CarriedError([(self.module, self.name, form)], self._found)
        return [] if form is None else pytree.tree_leaves(value)

    @property
    def found(self) -> str:
        """The form of what was there when it began, as a text."""
        return str(self._found or _NONE)

    def note_read(self) -> bool:
        """Notes a read before a write; says whether of tensors."""
        self.is_read = True
        return self.is_carrying

    def note_write(self) -> bool:
        """Notes a write; says whether of tensors in the place of others like them."""
        self.is_written = True
        return self.is_carrying and not self.is_turning

    def restore(self) -> None:
        """Puts back what was there before the capture."""
        self._set(self.before)
        self.before = MISSING

    def check_unused(self, is_used: Callable[[str], bool]) -> None:
        """Checks that a step does not compute with tensors in whose place it leaves larger ones.

        Raises:
            FormError: it does.
        """
        if self.is_turning and any(is_used(place.key) for place in self.tensors()):
            raise self._problem(self._wanted(self._found))

    def _wanted(self, found: Form | None) -> Form:
        return self._turns[None] if found is None else self._turns.get(found, found)

    def _give(self, leaves: Sequence[torch.Tensor], form: Form) -> None:
        self._set(pytree.tree_unflatten(leaves, form.spec))

    def _hide(self, spec: Any) -> None:
        """Puts None in the place of tensors.

        A dictionary keeps its keys: the module may look there for its attributes.
        """
        self._set(pytree.tree_unflatten([None] * spec.num_leaves, spec))

    def _problem(self, left: Form | None) -> "FormError":
        return FormError(
            f"The step function computes with the attribute {self.name} of a "
            f"{type(self.module).__name__}, where it finds {self._found or _NONE}, and "
            f"leaves {left or _NONE} there. Programs are compiled for one shape: keep it, "
            f"and count in a tensor how much of it is used; or return it, and pass it to the next "
            f"call as an argument."
        )


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
    def keys(self) -> tuple[str, ...]:
        """Also of a new tensor of another form."""
        return self.key, f"{self.key}__new"

    @property
    def is_left(self) -> bool:
        """Never: a script that sets it to None goes on later."""
        return False

    def get(self) -> torch.Tensor | None:
        """What is there."""
        known = self.attribute.form_now is not None
        leaves = pytree.tree_leaves(self.attribute.value) if known else ()
        return leaves[self.index] if self.index < len(leaves) else None

    def put(self, value: torch.Tensor) -> None:
        """Puts another tensor there, whatever there is."""
        self.attribute.put(self.index, value)


class FormError(CaptureError):
    """A step computes with tensors in an attribute, and leaves others of another form there."""


class CarriedError(AgainError):
    """A step gives attributes of modules tensors, which are to be carried.

    Attributes had tensors of the form `found`.

    Attributes:
        of_found: whether the step had found such tensors there, in the place of none.
    """

    def __init__(
        self,
        left: Sequence[tuple[nn.Module, str, Form]],
        found: Form | None = None,
        of_found: bool = False,
    ) -> None:
        super().__init__(", ".join(name for _, name, _ in left))
        self._left, self._found, self.of_found = left, found, of_found

    def prepare(self) -> None:
        """Has the attributes carried from here on."""
        owners: dict[int, Carried] = {}
        forms: dict[Carried, Form] = {}
        for module, name, form in self._left:
            mask = module._buffers.get(name)  # pyright: ignore[reportPrivateUsage]
            if mask is not None and is_constant(mask) and not is_sparse(mask):
                fix_mask(mask, decides=False)  # it was tried as a constant, and is written to
                continue
            _make_attribute(module, name)
            held, table = vars(module).get(name), vars(module).setdefault(_CARRIED, {})
            if name not in table:
                table[name] = owners.get(id(held)) or Carried(module, name)
                if table[name].module is not module or table[name].name != name:
                    table[name].others.append((module, name))
            if isinstance(held, (list, dict, deque)):
                owners[id(held)] = table[name]
            forms.setdefault(table[name], form)
        for carried, form in forms.items():
            if self.of_found:
                carried.is_changed, carried.is_cache = True, False
            carried.take_form(form, self._found)


def _make_attribute(module: nn.Module, name: str) -> None:
    """Makes a buffer a plain attribute, which may change its shape.

    Raises:
        CaptureError: its values are on another rank.
    """
    buffers: dict[str, Any] = module._buffers  # pyright: ignore[reportPrivateUsage]
    if name not in buffers:
        return
    value = buffers[name]
    if value is not None and value.is_meta and value.numel():
        raise CaptureError(
            f"The step function assigns a tensor of another shape to the buffer {name} of a "
            f"{type(module).__name__}, which is on its rank already. Register it with the shape "
            f"that it keeps."
        )
    if value is not None:
        value = value.cpu() if value.numel() else torch.zeros(value.shape, dtype=value.dtype)
    del buffers[name]
    vars(module)[name] = value


def carry_written(model: nn.Module, written: Sequence[torch.Tensor]) -> None:
    """Sees whether a step has written to tensors in attributes of its model, in place.

    Raises:
        CarriedError: it has.
    """
    ids, found = set(map(id, written)), list[tuple[nn.Module, str, Form]]()
    for module in model.modules() if ids else ():
        for name, value in vars(module).items():
            if not is_constant(value) and not ids.isdisjoint(map(id, pytree.tree_leaves(value))):
                form = form_of(value)
                found += [] if form is None else [(module, name, form)]
    if found:
        raise CarriedError(found)


def forget_carried(model: nn.Module) -> None:
    """Makes a model a plain one, whose attributes are what they are."""
    for module in model.modules():
        vars(module).pop(_CARRIED, None)


def carried_of(attributes: Mapping[str, Any]) -> dict[str, Carried]:
    """Those of a module's attributes that steps carry, by name; one that is the same object as
    another module's is that one.
    """
    found = attributes.get(_CARRIED)
    return {name: one for name, one in found.items() if not one.is_cache} if found else {}


def all_carried(model: nn.Module) -> list[Carried]:
    """Those of all modules, each once."""
    return list({c: None for m in model.modules() for c in carried_of(vars(m)).values()})


def is_carried(attributes: Mapping[str, Any], name: str) -> bool:
    """Whether steps give an attribute of a module tensors."""
    return name in attributes.get(_CARRIED, ())


def is_cache(attributes: Mapping[str, Any], name: str) -> bool:
    """Whether steps give an attribute of a module what is the same in every call."""
    return is_carried(attributes, name) and name not in carried_of(attributes)


def settle(
    model: nn.Module, is_used: Callable[[str], bool], is_same: Callable[[str], bool]
) -> None:
    """Looks at what a step just captured does with attributes that are carried.

    What it gives the same in every call is carried no more: tables for positions, say. Every stage
    that reads one computes its own.

    Args:
        model: that the step uses.
        is_used: says whether the step computes with a buffer, by its name in the model.
        is_same: says whether it gives one the same in every call.

    Raises:
        CarriedError: there are such. The step is to be captured again.
        FormError: it computes with tensors that it exchanges for others of another form.
    """
    found = False
    for path, module in model.named_modules():
        for carried in carried_of(vars(module)).values():
            if carried.module is not module:
                continue
            carried.check_unused(lambda key, path=path: is_used(joined_path(path, key)))
            is_first = carried.is_written and not (carried.is_carrying or carried.is_changed)
            names = (joined_path(path, place.key) for place in carried.tensors())
            if is_first and all(map(is_same, names)):
                carried.is_cache = found = True
    if found:
        raise CarriedError([])
