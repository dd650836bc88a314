"""What an optimizer keeps in Python: numbers, containers and objects beside its parameters' state.

A compiled update holds them as constants. So they are part of what a program is found by, an update
that changes them cannot be compiled, and one that reads what nobody can compare cannot either.
"""

import copy
import dis
import inspect
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from mpxla.errors import LoweringError

__all__ = [
    "NotTraceableError",
    "copied_attributes",
    "describe",
    "described",
    "own_attributes",
    "refuse_outside_state",
    "state_of_no_parameter",
]

_NOT_ITS_OWN = ("state", "param_groups", "step", "_opt_called", "_step_count")
"""Attributes of every optimizer, or put there by LR schedulers (torch 2.9)."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type, torch.dtype, torch.device)
_CONTAINERS = (list, dict, set, deque)


class NotTraceableError(LoweringError):
    """An optimizer that keeps part of its state where a compiled update does not see it."""


def own_attributes(optimizer: Any) -> dict[str, Any]:
    """What the class of an optimizer keeps on it, without hooks."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in _NOT_ITS_OWN and not name.startswith(("_optimizer_", "_zero_grad_profile"))
    }


def copied_attributes(optimizer: Any, shared: Iterable[Any] = ()) -> dict[str, Any]:
    """Copies of them, so that a trial changes nothing. What is shared or cannot be copied stays."""
    copies: dict[str, Any] = {}
    memo: dict[int, Any] = {id(value): value for value in shared}
    for name, value in own_attributes(optimizer).items():
        try:
            copies[name] = copy.deepcopy(value, memo)
        except Exception:  # a lock, a file, a writer of logs
            copies[name] = value
    return copies


def state_of_no_parameter(optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
    """State of the optimizer as a whole, which it keeps by names: `optimizer.state["k"]`."""
    return {k: v for k, v in optimizer.state.items() if not torch.is_tensor(k)}


def described(optimizer: Any) -> tuple[Any, ...]:
    """Everything of `own_attributes`, comparable and hashable.

    Raises:
        NotTraceableError: something is a tensor, an iterator, or a container of the module.
    """
    refuse_outside_state(type(optimizer))
    shared = state_of_no_parameter(optimizer)
    attributes = {**own_attributes(optimizer), **({"state": shared} if shared else {})}
    return tuple((name, describe(value, name)) for name, value in attributes.items())


def describe(value: Any, path: str, above: tuple[int, ...] = ()) -> Any:
    """A value in plain, hashable data: equal if a program that reads it would be the same.

    `path` is what it is called in errors; `above` has ids of what it is inside of, for circles.

    Raises:
        NotTraceableError: it holds a tensor or an iterator.
    """
    if isinstance(value, _PLAIN):
        return (type(value).__name__, repr(value))
    if isinstance(value, torch.Tensor | torch.Generator):
        what = "a tensor" if isinstance(value, torch.Tensor) else "a generator"
        raise NotTraceableError(f"it keeps {what} outside of its state ({path})")
    if id(value) in above:
        return ("circle", len(above) - above.index(id(value)))
    inside = (*above, id(value))
    if isinstance(value, Mapping):
        parts = [(describe(k, path, inside), describe(v, f"{path}[{k!r}]", inside))
                 for k, v in value.items()]  # fmt: skip
        return (type(value).__name__, tuple(parts))
    if isinstance(value, list | tuple | deque):
        listed = [describe(v, f"{path}[{i}]", inside) for i, v in enumerate(value)]
        return (type(value).__name__, tuple(listed))
    if isinstance(value, set | frozenset):
        return (type(value).__name__, frozenset(describe(v, path, inside) for v in value))
    return _describe_object(value, path, inside)


def _describe_object(value: Any, path: str, inside: tuple[int, ...]) -> Any:
    kind = type(value).__name__
    if isinstance(value, np.ndarray | np.generic):
        return (kind, value.shape, str(value.dtype), value.tobytes())
    if isinstance(value, MethodType):
        return (kind, id(value.__func__), describe(value.__self__, path, inside))
    if isinstance(value, FunctionType):
        cells = [c.cell_contents for c in value.__closure__ or () if _is_filled(c)]
        return (kind, id(value), tuple(describe(c, path, inside) for c in cells))
    if isinstance(value, ModuleType | BuiltinFunctionType):
        return (kind, id(value))
    if isinstance(value, Iterator):
        raise NotTraceableError(f"it reads an iterator ({path})")
    if hasattr(value, "__dict__"):
        parts = [(n, describe(v, f"{path}.{n}", inside)) for n, v in vars(value).items()]
        return (kind, id(type(value)), tuple(parts))
    try:
        reduced = value.__reduce_ex__(2)
    except Exception:  # a lock, a file: nothing to compare
        return (kind, id(value))
    return (kind, reduced if isinstance(reduced, str) else describe(reduced[1:], path, inside))


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def refuse_outside_state(kind: type) -> None:
    """Checks that methods of an optimizer that is not torch's use only what is on it.

    Raises:
        NotTraceableError: a container of its class or module, or a variable, is used.
    """
    for base in kind.__mro__:
        if base.__module__.split(".")[0] in ("torch", "builtins", "typing"):
            continue
        for name, member in vars(base).items():
            if isinstance(member, _CONTAINERS) and not name.startswith("__"):
                raise NotTraceableError(f"its class keeps a {type(member).__name__} ({name})")
            function = inspect.unwrap(member) if callable(member) else None
            if isinstance(function, FunctionType):
                _refuse_outside_reads(function)


def _refuse_outside_reads(function: FunctionType) -> None:
    for instruction in _instructions(function.__code__):
        name = instruction.argval
        if instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            raise NotTraceableError(f"it changes the variable {name} of its module")
        value = function.__globals__.get(name) if instruction.opname == "LOAD_GLOBAL" else None
        if isinstance(value, _CONTAINERS):
            raise NotTraceableError(f"it reads the {type(value).__name__} {name} of its module")
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    for name, cell in cells.items():
        if _is_filled(cell) and isinstance(cell.cell_contents, (*_CONTAINERS, int, float)):
            raise NotTraceableError(f"it reads the variable {name} of a function around it")


def _instructions(code: CodeType) -> Iterator[dis.Instruction]:
    yield from dis.get_instructions(code)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _instructions(constant)
