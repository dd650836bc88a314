"""Values of constants while a step is captured: what Python may read and branch on.

Tensors of a captured step have no values. But a mask that the step makes itself, or a tensor that
the user's function closes over, is the same in every call. So every call of torch whose tensors
are all such constants runs a second time, on real host tensors, and Python may read its results:
`if mask.all()`, `int(lengths.max())`, `mask.nonzero()`. What follows from parameters, buffers or
random numbers stays unknown. So do inputs, unless their values are given, because Python has to
read them: then `decisions` writes down what is read, and for which inputs that holds.

This module must not know what the captured graph is used for.
"""

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import nn
from torch._C import DisableTorchFunction
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import transformer
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]
from torch.utils.weak import WeakTensorKeyDictionary

from mpxla.graph.capture.shapes import DISTINCT, FixedShapes, is_place
from mpxla.graph.exchanged import exchanged
from mpxla.graph.python.answers import Answers
from mpxla.graph.python.arrays import ArrayRead, is_array_read, with_numbers
from mpxla.graph.python.decisions import OfModelError, Tape, Written
from mpxla.graph.python.floats import Floats
from mpxla.graph.python.number import (
    NumberRead,
    has_number,
    holds_objects,
    is_number,
    takes_numbers_as_tensors,
)
from mpxla.graph.user_code import at_user_line, needs_value

__all__ = ["Constants", "masks_decided"]

LARGEST_CONSTANT = 2**26
"""Elements; larger constants are not computed at capture."""

_READS = frozenset(
    "__array__ __bool__ __contains__ __float__ __index__ __int__ "
    "allclose equal is_nonzero item numpy tolist".split()
)
_COUNTS = frozenset(
    "argwhere bincount combinations masked_select nonzero one_hot repeat_interleave unique "
    "unique_consecutive".split()
)
"""The shape of their result depends on values."""
_TRUTHS = {"__bool__", "is_nonzero"}
_OPERANDS = ("exponent", "input", "max", "min", "other", "weight")
"""Names of arguments of arithmetic that are tensors as well as numbers."""
_MOST_NUMBERS = 2
"""So many integers that were read may be arguments of one call; sizes of all experts are not."""
_INTEGERS = {"__index__", "__int__"}
_NO_DECISIONS = _READS - _TRUTHS
_OF_FINITE = {"isfinite": True, **dict.fromkeys(("isnan", "isinf", "isposinf", "isneginf"), False)}
"""What tests say of finite values."""


@dataclass(frozen=True)
class _Known:
    """The value of a tensor without one, and the numbers of writes that both had then.

    Sources are the user's own tensors that it follows from, and tests whether values are finite.
    An input is what follows from inputs of the step.
    """

    value: torch.Tensor
    num_writes: int
    tensor_writes: int
    sources: tuple[torch.Tensor, ...] = ()
    is_assumed: bool = False
    is_input: bool = False


class Constants:
    """Calls torch for a step that is captured, and follows the values of constants.

    Attributes:
        reads: the user's own tensors whose values Python has read, by id: the tensor, and the
            user's line.
        tests: whether values are finite, which Python has read, by id: the test, and the line.
        has_reads: whether Python has numbers or arrays without values.
        absent: ids of stand-ins for tensors whose values are on other ranks.
        shapes: exchanges calls whose shapes depend on values.
    """

    def __init__(
        self,
        tape: Tape | None = None,
        answers: Answers | None = None,
        floats: Floats | None = None,
    ) -> None:
        self._answers = answers or Answers(None)
        self._floats = floats or Floats()
        self.has_reads = False
        self.reads: dict[int, tuple[torch.Tensor, str]] = {}
        self.tests: dict[int, tuple[torch.Tensor, str]] = {}
        self.absent: set[int] = set()
        self._known: Any = WeakTensorKeyDictionary()
        self.shapes = FixedShapes(self._ask, self._varies)
        self._tape = tape
        self._decide_sizes = True

    def give_inputs(
        self, leaves: Sequence[Any], values: Sequence[torch.Tensor], decide_sizes: bool
    ) -> None:
        """Makes the values of one microbatch, on the host, known as those of a step's leaves.

        They decide sizes or not. Needs a tape.
        """
        assert self._tape is not None
        self._decide_sizes = decide_sizes
        for place, (leaf, given) in enumerate(zip(leaves, values, strict=True)):
            if given.numel() <= LARGEST_CONSTANT:
                with _disable_current_modes():
                    value = given.detach().clone()
                self._known[leaf] = _Known(value, value._version, leaf._version, is_input=True)
                self._tape.begin_input(value, place)

    def know_as(self, stand_in: torch.Tensor, tensor: torch.Tensor) -> None:
        """Makes the value of a tensor, if it is known, that of another one as well."""
        if self.has_value(tensor):
            self._follow(torch.clone, (tensor,), {}, stand_in)

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls what `__torch_function__` is given; reads of constants are answered."""
        func, args = _with_sizes(func, args)
        args, kwargs = self._with_values(func, args, kwargs)
        leaves = pytree.tree_leaves((args, kwargs))
        if any(map(is_array_read, leaves)):
            return self.call(func, *with_numbers((args, kwargs), getattr(func, "__name__", "")))
        tensors = [v for v in leaves if isinstance(v, torch.Tensor)]
        asked = func, args, kwargs
        func, args, kwargs = self.shapes.fixed(func, args, kwargs)
        name = getattr(func, "__name__", "")
        is_known = all(map(self.has_value, tensors)) and not any(map(_has_numbers_read, leaves))
        if name in _NO_DECISIONS and any(t.dtype is not torch.bool for t in tensors):
            is_known = is_known and not any(map(self._tests_of, tensors))
        if func in _NUMBERS and not is_known and _has_numbers(func, args[0]):
            self.has_reads = True
            return _NUMBERS[func](args[0])
        if func is torch.Tensor.numpy and not is_known and _is_for_numpy(args[0]):
            self.has_reads = True
            return ArrayRead.of_tensor(args[0], self._floats)
        if not is_known and name in _TRUTHS and self._answers.may_answer(args[0]):
            return self._answers.truth_of(args[0])
        if not is_known and name in _INTEGERS and self._answers.may_answer(args[0]):
            return self._answers.integer_of(args[0])
        if not is_known and name == "__float__" and tensors[0].numel() == 1:
            found = self._floats.of_unknown()
            if found is not None:
                return found
        if not is_known:
            try:
                result = func(*args, **kwargs)
            except Exception as error:
                if not needs_value(error) or sum(map(is_number, leaves)) > _MOST_NUMBERS:
                    raise
                given, structure = pytree.tree_flatten((args, kwargs))
                numbers = list(map(self._as_integer, given))
                if all(one is other for one, other in zip(numbers, given, strict=True)):
                    raise
                args, kwargs = pytree.tree_unflatten(numbers, structure)
                result = func(*args, **kwargs)
            # Inputs may have values, for which the step is captured again, with these.
            if name in _OF_FINITE and self._tape is not None:
                self._assume(result, _OF_FINITE[name], self._tape)
            return result
        is_size = name not in _READS and name not in DISTINCT
        if tensors and _depends_on_values(func, args) and self._may_decide(is_size, tensors):
            answer = self._run(func, args, kwargs, is_read=True)
            if answer is not None:
                return answer
        writes = [tensor._version for tensor in tensors]
        result = func(*args, **kwargs)
        is_write = writes != [tensor._version for tensor in tensors]
        if is_write or any(isinstance(v, FakeTensor) for v in pytree.tree_leaves(result)):
            self._follow(*asked, result)
        return result

    def _with_values(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with the values of numbers that are known, where tensors will not do."""
        if not has_number((args, kwargs)):
            return args, kwargs

        def valued(leaf: Any) -> Any:
            if isinstance(leaf, slice):
                return slice(*map(valued, (leaf.start, leaf.stop, leaf.step)))
            if not (issubclass(type(leaf), NumberRead) and self.has_value(leaf.tensor)):
                return leaf
            return self._run(torch.Tensor.item, (leaf.tensor,), {}, is_read=True)

        if takes_numbers_as_tensors(func):
            named = {k: v if k in _OPERANDS else valued(v) for k, v in kwargs.items()}
            return args, named
        return pytree.tree_map(valued, (args, kwargs))

    def has_unknown_numbers(self, tree: Any) -> bool:
        """Whether one of its leaves was read of a tensor whose value is not known."""
        leaves = pytree.tree_leaves(tree)
        read = [leaf for leaf in leaves if issubclass(type(leaf), NumberRead)]
        return any(not self.has_value(number.tensor) for number in read)

    def _as_integer(self, leaf: Any) -> Any:
        """The number in the place of a known tensor, or of what was read and may be asked for."""
        known = self.shapes.as_number(leaf) if isinstance(leaf, torch.Tensor) else leaf
        number = known.tensor if is_number(known) else known
        is_integer = is_place(known) or (is_number(known) and not number.is_floating_point())
        may_answer = is_integer and self._answers.may_answer(number)
        return self._answers.integer_of(number) if may_answer else known

    def as_number(self, part: Any) -> Any:
        """The number of a part of an index that no input of the step changes; else the part."""
        return self.shapes.as_number(part) if self._tape is None else part

    def _ask(self, function: Callable[[torch.Tensor], Any], argument: Any) -> Any:
        """What a function says of a known tensor; None of all else."""
        if not _is_tensor(argument) or not self.has_value(argument):
            return None
        if argument.dim() and not self._may_decide(True, [argument]):
            return None
        return self._run(function, (argument,), {}, is_read=True)

    def _may_decide(self, is_size: bool, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether values of inputs may decide what these do."""
        return self._decide_sizes or not is_size or not any(map(self._varies, tensors))

    def _varies(self, tensor: Any) -> bool:
        """Whether a value is known that follows from inputs of the step."""
        known = self._known.get(tensor) if _is_tensor(tensor) else None
        return known is not None and known.is_input

    def truth_of(self, mask: torch.Tensor) -> bool | None:
        """Whether a mask is true anywhere, if its value is known; which is read then."""
        if not self.has_value(mask):
            return None
        return self._run(torch.Tensor.any, (mask,), {}, is_read=True).item()

    def is_known(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's value follows from inputs alone."""
        return self.has_value(tensor) and not self._tests_of(tensor)

    def is_constant(self, tensor: torch.Tensor, changing: Sequence[torch.Tensor] = ()) -> bool:
        """Whether the tensor's value is the same in every call of the step.

        It is not if it follows from tensors of the user's that are `changing`.
        """
        ids = set(map(id, changing))
        return (
            self.is_known(tensor)
            and not self._varies(tensor)
            and not any(id(source) in ids for source in self._sources(tensor))
        )

    def leave(self, left: Mapping[str, Any], tape: Tape) -> None:
        """Writes down what a step leaves in places that it changes, by name.

        Raises:
            OfModelError: one follows from what the model computes.
        """
        for name, last in left.items():
            value = last.value if isinstance(last, Written) else last
            if not is_number(value):
                tape.leave(name, value)
            elif self.has_value(value.tensor):
                tape.leave(name, self._value_of(value.tensor))
            elif value is last:
                raise OfModelError(name)

    def finite(self) -> dict[str, torch.Tensor]:
        """Whether values were finite where Python has read that, by the user's line."""
        found: dict[str, torch.Tensor] = {}
        for test, line in self.tests.values():
            passed = test.all() if bool(self._known[test].value.all()) else ~test.any()
            found[line] = found[line] & passed if line in found else passed
        return found

    def _tests_of(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [source for source in self._sources(tensor) if self._is_test(source)]

    def _is_test(self, source: torch.Tensor) -> bool:
        known = self._known.get(source)
        return known is not None and known.is_assumed

    def _assume(self, test: torch.Tensor, value: bool, tape: Tape) -> None:
        """Takes a test whether values are finite for passed."""
        if is_functorch_wrapped_tensor(test) or test.numel() > LARGEST_CONSTANT:
            return
        with _disable_current_modes():
            passed = torch.full(test.shape, value)
        tape.begin_constant(passed)
        self._known[test] = _Known(passed, passed._version, test._version, (test,), True)

    def has_value(self, tensor: torch.Tensor) -> bool:
        """Whether the value of a tensor is known, in this call of the step or in every one."""
        if is_functorch_wrapped_tensor(tensor):  # a row of it, in `torch.vmap`
            return False
        if not isinstance(tensor, FakeTensor):
            is_constant = type(tensor) in (torch.Tensor, nn.Parameter)
            is_constant = is_constant and tensor.device.type == "cpu"
            is_constant = is_constant and id(tensor) not in self.absent
            return is_constant and tensor.numel() <= LARGEST_CONSTANT
        known = self._known.get(tensor)
        if known is None:
            return False
        # A write that was not followed (of an unknown value, say) shows in the numbers of writes.
        written = tensor._version - known.tensor_writes
        return written == known.value._version - known.num_writes

    def _follow(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Computes the result's value, unless it is random or large."""
        leaves = pytree.tree_leaves(result)
        sizes: list[Any] = [leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if any(not isinstance(size, int) or size > LARGEST_CONSTANT for size in sizes):
            return
        if any(isinstance(v, torch.Generator) for v in pytree.tree_leaves((args, kwargs))):
            return
        value = self._run(func, args, kwargs)
        values = pytree.tree_leaves(value)
        if value is None or len(values) != len(leaves):
            return
        sources = self._sources((args, kwargs))
        is_input = any(map(self._varies, pytree.tree_leaves((args, kwargs))))
        for leaf, real in zip(leaves, values, strict=True):
            if isinstance(leaf, FakeTensor) and _is_like(real, leaf):
                known = _Known(real, real._version, leaf._version, sources, is_input=is_input)
                self._known[leaf] = known

    def _sources(self, arguments: Any) -> tuple[torch.Tensor, ...]:
        known = [self._known.get(v) for v in pytree.tree_leaves(arguments) if _is_tensor(v)]
        return tuple({id(s): s for k in known if k is not None for s in k.sources}.values())

    def _run(self, func: Any, args: Any, kwargs: Any, is_read: bool = False) -> Any:
        """The value of a call, or None: it fails, or depends on random numbers."""
        given_ones = args, kwargs
        # Modes for functions are off as well: export would record what no_grad does.
        with _disable_current_modes(), DisableTorchFunction(), torch.no_grad():
            before = torch.get_rng_state()
            try:
                args, kwargs = pytree.tree_map(self._value_of, (args, kwargs))
                given = [t for t in pytree.tree_leaves((args, kwargs)) if _is_tensor(t)]
                writes = [tensor._version for tensor in given]
                value = func(*args, **kwargs)
            except Exception:  # the call on the tensor without a value says what is wrong
                return None
            if torch.equal(before, torch.get_rng_state()):
                where = at_user_line() if is_read else None
                if where is not None:
                    for source in self._sources(given_ones):
                        found = self.tests if self._is_test(source) else self.reads
                        found[id(source)] = source, where
                if self._tape is not None:
                    changed = [t for t, n in zip(given, writes, strict=True) if t._version != n]
                    self._tape.add((func, args, kwargs), value, changed, where)
                return value
            torch.set_rng_state(before)
            return None

    def _value_of(self, argument: Any) -> Any:
        if isinstance(argument, slice):
            return slice(*map(self._value_of, (argument.start, argument.stop, argument.step)))
        if isinstance(argument, FakeTensor):
            return self._known[argument].value
        if isinstance(argument, torch.Tensor):  # the user's own, which a write must not change
            if argument not in self._known:
                self._known[argument] = _Known(argument.detach().clone(), 0, 0, (argument,))
                if self._tape is not None:
                    self._tape.begin_constant(self._known[argument].value)
            return self._known[argument].value
        return argument


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _with_sizes(func: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """A call that takes another tensor only for its shape, with the shape."""
    if func not in _BY_SHAPE or len(args) != 2 or not all(type(n) is int for n in args[1].shape):
        return func, args
    return _BY_SHAPE[func], (args[0], args[1].shape)


_BY_SHAPE: dict[Any, Any] = {
    torch.Tensor.expand_as: torch.Tensor.expand,
    torch.Tensor.reshape_as: torch.Tensor.reshape,
    torch.Tensor.view_as: torch.Tensor.view,
}


def _has_numbers_read(value: Any) -> bool:
    """Whether there are numbers in it without a value."""
    return is_number(value) or holds_objects(value)


def _has_numbers(func: Any, tensor: torch.Tensor) -> bool:
    is_possible = func is torch.Tensor.tolist or tensor.numel() == 1
    return isinstance(tensor, FakeTensor) and is_possible and not tensor.is_complex()


def _is_for_numpy(tensor: torch.Tensor) -> bool:
    is_known = hasattr(np, str(tensor.dtype).removeprefix("torch."))
    return isinstance(tensor, FakeTensor) and is_known


def _listed(tensor: torch.Tensor) -> Any:
    return [*map(_listed, tensor.unbind())] if tensor.dim() else NumberRead(tensor)


_NUMBERS: dict[Any, Any] = {
    torch.Tensor.item: NumberRead,
    torch.Tensor.tolist: _listed,
}


def _is_like(real: Any, fake: torch.Tensor) -> bool:
    return isinstance(real, torch.Tensor) and (real.shape, real.dtype) == (fake.shape, fake.dtype)


def _depends_on_values(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether Python reads values, or a shape depends on them."""
    name = getattr(func, "__name__", "")
    if name == "where":
        return len(args) == 1
    return name in _READS or name in _COUNTS


@contextlib.contextmanager
def masks_decided(constants: Constants) -> Generator[None]:
    """Keeps torch's transformers from branching on the values of masks that are not known.

    Such a mask is used as it is, which is right for causal ones too. The fast path for inference,
    which looks for padding on the left, is left out.
    """
    module: Any = transformer
    detect = module._detect_is_causal_mask
    is_fast = torch.backends.mha.get_fastpath_enabled()

    def detect_if_known(mask: Any, is_causal: Any = None, size: Any = None) -> bool:
        if is_causal is None and mask is not None and not constants.is_known(mask):
            return False
        return detect(mask, is_causal, size)

    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with exchanged(module, _detect_is_causal_mask=detect_if_known):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(is_fast)
