"""What of a model a captured step depends on, besides its values: it is looked at in every call.

A program keeps what the model was when its step was captured: modules, forward hooks, parameters,
flags, and plain attributes that `forward` read. Where one of them has changed, the step is captured
again. A call of a model with thousands of modules must not notice the look.
This module must not know what is done with the answer.
"""

import hashlib
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_modules

from mpxla.graph.capture.gradient_hooks import hooks_of
from mpxla.graph.capture.held_tensors import held_names
from mpxla.graph.python.plain import Read
from mpxla.graph.regions import CHECKPOINTED
from mpxla.runtime.identity import Identities

__all__ = ["ModelView", "ModelWatch", "model_flags"]

_GRADIENT_HOOKS = ("_backward_hooks", "_backward_pre_hooks")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", *_GRADIENT_HOOKS)
_PARAMETER_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_GLOBAL_HOOKS = tuple(f"_global{name}" for name in _HOOKS)
_MOST_NUMBERS = 10_000


@dataclass(frozen=True, eq=False)
class ModelView:
    """What a model was at one time.

    Attributes:
        modes: digest of the modules' train/eval flags, and of whether they are checkpointed.
        trainable: digest of the `requires_grad` flags of the parameters.
        modules: all modules.
        kinds: their classes, which scripts may assign.
        parameters: all parameters, module by module.
        hooks: (module's index, kind, number of the function) of everything that runs around or in
            place of a `forward` or its backward; index -1 for hooks on all modules, and for those
            on gradients of parameters.
        buffers: (module's index, name) of every buffer, whatever tensor it is.
        paths: name of every module, in the captured view only.
        reads: what the step read outside of its arguments, in the captured view only.
    """

    modes: str
    trainable: str
    modules: Sequence[nn.Module]
    kinds: Sequence[type]
    parameters: Sequence[Any]
    hooks: tuple[tuple[int, str, int], ...]
    buffers: tuple[tuple[int, str], ...] = ()
    paths: Mapping[int, str] | None = None
    reads: tuple[Read, ...] = ()

    def captured(self, model: nn.Module, reads: Sequence[Read]) -> "ModelView":
        """This view with what tells about changes later."""
        paths = {id(m): f"model.{p}" if p else "model" for p, m in model.named_modules()}
        return replace(self, paths=paths, reads=tuple(reads))

    def difference(self, now: "ModelView") -> str | None:
        """What has changed since this view was taken, apart from the flags; None if nothing has."""
        if not _are_same(self.modules, now.modules):
            return f"{self._first_module(now)} was replaced, added or removed"
        if not _are_same(self.kinds, now.kinds):
            pairs = zip(self.modules, self.kinds, now.kinds, strict=True)
            module = next(module for module, before, after in pairs if before is not after)
            return f"the class of {self._path(module)} changed"
        if not _are_same(self.parameters, now.parameters):
            return "a parameter of the model was replaced"
        if self.buffers != now.buffers:
            index, name = min(set(self.buffers) ^ set(now.buffers))
            return f"the buffer {self._path(self.modules[index])}.{name} was added or removed"
        if self.hooks != now.hooks:
            before, after = Counter(self.hooks), Counter(now.hooks)
            pairs = zip(self.hooks, now.hooks, strict=False)
            # One hook may be there twice, or hooks in another order.
            changed = (before - after) + (after - before) or [a for a, b in pairs if a != b]
            index = min(index for index, *_ in changed)
            where = self._path(self.modules[index]) if index >= 0 else "all modules"
            return f"hooks (or forward itself) of {where} changed"
        for read in self.reads:
            if (change := read.change()) is not None:
                return str(change)
        return None

    def _first_module(self, now: "ModelView") -> str:
        kept = {id(m) for m in now.modules}
        gone = [m for m in self.modules if id(m) not in kept]
        return f"the module {self._path(gone[0])}" if gone else "a module of the model"

    def _path(self, module: nn.Module) -> str:
        return (self.paths or {}).get(id(module), type(module).__name__)


def _are_same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one, other))


class ModelWatch:
    """Looks at one model, or at a container of several."""

    def __init__(self, model: Callable[[], nn.Module]):
        self._model = model
        self._functions = Identities()
        self._numbers: dict[int, tuple[Any, int]] = {}

    def look(self) -> ModelView:
        """What the model is now."""
        modules = _modules(self._model())
        modes, trainable, parameters = _flags(modules)
        hooks = [
            (-1, kind, self._number(hook))
            for kind in _GLOBAL_HOOKS
            for hook in getattr(torch_modules, kind).values()
        ]
        for index, module in enumerate(modules):
            own = vars(module)
            if any(map(own.get, _HOOKS)) or "forward" in own:
                hooks += [
                    (index, kind, self._number(hook))
                    for kind in _HOOKS
                    for hook in own[kind].values()
                ]
                if "forward" in own:
                    hooks.append((index, "forward", self._number(own["forward"])))
        for place, parameter in enumerate(parameters):
            for kind in _PARAMETER_HOOKS:
                if getattr(parameter, kind, None):
                    numbers = map(self._number, hooks_of(parameter, kind))
                    hooks += [(-1, f"{kind} {place}", number) for number in numbers]
        kinds = [*map(type, modules)]
        buffers = tuple(
            (i, name) for i, module in enumerate(modules) for name in held_names(module)
        )
        return ModelView(modes, trainable, modules, kinds, parameters, tuple(hooks), buffers)

    def keep(self, views: Sequence[ModelView]) -> None:
        """Forgets all functions that none of these views has."""
        used = {number for view in views for *_, number in view.hooks}
        self._functions.keep(used)
        self._numbers = {key: found for key, found in self._numbers.items() if found[1] in used}

    def _number(self, function: Callable[..., Any]) -> int:
        """Equal for functions that say the same; hooks are often made anew for every step."""
        found = self._numbers.get(id(function))
        if found is None:
            if len(self._numbers) >= _MOST_NUMBERS:
                self._numbers.clear()
            # The function is kept, so that its id stays its own.
            found = self._numbers[id(function)] = function, self._functions.number(function)
        return found[1]


def model_flags(model: nn.Module | None) -> tuple[str, str]:
    """Digests of the train/eval flags of all modules, and of what is trained of their parameters.

    A rank that does not hold a parameter knows whether it is trained all the same.
    """
    if model is None:
        return "", ""
    modes, trainable, _ = _flags(_modules(model))
    return modes, trainable


def _modules(model: nn.Module) -> list[nn.Module]:
    """All modules, in an order that is the same on all ranks; cheaper than `model.modules()`."""
    found, seen = [model], {id(model)}
    for module in found:  # grows
        for child in module._modules.values():  # pyright: ignore[reportPrivateUsage]
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                found.append(child)
    return found


def _flags(modules: Sequence[nn.Module]) -> tuple[str, str, list[Any]]:
    modes = bytearray(m.training | (CHECKPOINTED in vars(m)) << 1 for m in modules)
    parameters = [
        p
        for m in modules
        for p in m._parameters.values()  # pyright: ignore[reportPrivateUsage]
        if p is not None
    ]
    return _digest(modes), _digest(bytearray(p.requires_grad for p in parameters)), parameters


def _digest(flags: bytearray) -> str:
    return hashlib.blake2b(flags, digest_size=8).hexdigest()
