"""Which class takes the place of another in a tensor-parallel model, and how one is made of it.

    tp_register(dist)(Block)               Block(config)           a module of the user's
    tp_register_with_module(Block, dist)       |  init_hook(config) -> (args, kwargs)
                                           dist(*args, **kwargs)   takes its place, with values of
                                                                   its own, in `DistributedModel`
    block(x, mask=m)                       forward_hook(x, mask=m) -> (args, kwargs)
                                           return_hook(dist(*args, **kwargs)) -> what Block gives

Constructors of registered classes are noted as they run, so classes have to be registered before
the model is built. (SMP API reference, "smp.tp_register".)
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from torch import nn

from mpxla.errors import ConfigError
from mpxla.nn.layers import DistributedModule

__all__ = ["exchange", "is_registered", "known_arguments", "tp_register", "tp_register_with_module"]

_BUILT_WITH = "_mpxla_built_with"
_Hook = Callable[..., Any]
_Class = TypeVar("_Class", bound=type[nn.Module])


@dataclass(frozen=True)
class _Registration:
    """What takes the place of a class.

    Attributes:
        dist_module: the class that does.
        init_hook: translates arguments of constructors; None where they are the same.
        forward_hook: likewise, of calls.
        return_hook: translates results.
    """

    dist_module: type[DistributedModule]
    init_hook: _Hook | None
    forward_hook: _Hook | None
    return_hook: _Hook | None


_registered: dict[type[nn.Module], _Registration] = {}


def tp_register(
    dist_module: type[DistributedModule],
    init_hook: _Hook | None = None,
    forward_hook: _Hook | None = None,
    return_hook: _Hook | None = None,
) -> Callable[[_Class], _Class]:
    """Says, as a decorator of a class, which class takes its place under tensor parallelism.

    Args:
        dist_module: a subclass of `smp.nn.DistributedModule`.
        init_hook: called as the class's `__init__`, without self; returns (args, kwargs) for that
            of `dist_module`. Without it they are the same.
        forward_hook: likewise, for `forward`.
        return_hook: called with what `dist_module` returns; returns what the class would.

    Raises:
        ConfigError: the classes or hooks are none.
    """

    def register(module_cls: _Class) -> _Class:
        tp_register_with_module(module_cls, dist_module, init_hook, forward_hook, return_hook)
        return module_cls

    return register


def _is_class_of(value: Any, kind: type) -> bool:
    return isinstance(value, type) and issubclass(value, kind)


def tp_register_with_module(
    module_cls: type[nn.Module],
    dist_module: type[DistributedModule],
    init_hook: _Hook | None = None,
    forward_hook: _Hook | None = None,
    return_hook: _Hook | None = None,
) -> None:
    """As `tp_register`, for a class that is there already. Before the model is built.

    Args:
        module_cls: the class.
        dist_module: what takes its place.
        init_hook: see `tp_register`.
        forward_hook: likewise.
        return_hook: likewise.

    Raises:
        ConfigError: the classes or hooks are none.
    """
    if not _is_class_of(module_cls, nn.Module):
        raise ConfigError(f"smp.tp_register: {module_cls!r} is no class of modules.")
    if not _is_class_of(dist_module, DistributedModule):
        raise ConfigError(
            f"smp.tp_register of {module_cls.__name__}: {dist_module!r} is no subclass of "
            f"smp.nn.DistributedModule; derive it from that."
        )
    hooks = {"init_hook": init_hook, "forward_hook": forward_hook, "return_hook": return_hook}
    for name, hook in hooks.items():
        if hook is not None and not callable(hook):
            raise ConfigError(f"smp.tp_register of {module_cls.__name__}: {name} is no function.")
    if module_cls not in _registered:
        _note_constructors(module_cls)
    _registered[module_cls] = _Registration(dist_module, *hooks.values())


def _note_constructors(module_cls: type[nn.Module]) -> None:
    """Lets every module of a class keep what it was built with; for good."""
    original = module_cls.__init__

    @functools.wraps(original)
    def construct(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if type(self) is module_cls:  # subclasses have arguments of their own
            vars(self)[_BUILT_WITH] = args, kwargs

    module_cls.__init__ = construct  # type: ignore[method-assign]


def is_registered(module: nn.Module) -> bool:
    """Whether another class takes the place of a module's."""
    return type(module) in _registered


def known_arguments() -> set[str]:
    """Names of what constructors of registered distributed classes take."""
    found: set[str] = set()
    for registration in _registered.values():
        found.update(inspect.signature(registration.dist_module).parameters)
    return found


def exchange(path: str, module: nn.Module, settings: Mapping[str, Any]) -> nn.Module:
    """The distributed module that takes the place of one, with values of its own.

    Args:
        path: of the module, for messages.
        module: of a registered class.
        settings: those that its constructor takes win over `init_hook`.

    Raises:
        ConfigError: the module was built before its class was registered, a hook returns the wrong
            things, or the constructor does not take them.
    """
    kind, registration = type(module), _registered[type(module)]
    if _BUILT_WITH not in vars(module):
        raise ConfigError(
            f"{path or 'the model'} is a {kind.__name__} that was built before smp.tp_register of "
            f"its class, so nobody knows its arguments. Register classes before building the model."
        )
    args, kwargs = vars(module)[_BUILT_WITH]
    if registration.init_hook is not None:
        returned = registration.init_hook(*args, **kwargs)
        args, kwargs = _translated(returned, "init_hook", kind)
    target = _hooked(registration, kind)
    accepted = inspect.signature(registration.dist_module).parameters
    own = {name: value for name, value in settings.items() if name in accepted}
    try:
        bound = inspect.signature(registration.dist_module).bind_partial(*args, **kwargs)
        made = target(**{**bound.arguments.pop("options", {}), **bound.arguments, **own})
    except TypeError as error:
        raise ConfigError(
            f"{registration.dist_module.__name__}, which takes the place of {kind.__name__} "
            f"({path or 'the model'}), cannot be built of what init_hook gives: {error}."
        ) from error
    reference = next(module.parameters(), None)
    made = made if reference is None else made.to(reference.dtype)
    return made.train(module.training)


def _translated(returned: Any, what: str, kind: type) -> tuple[Iterable[Any], dict[str, Any]]:
    """(args, kwargs) out of what a hook returns."""
    is_pair = isinstance(returned, tuple | list) and len(returned) == 2
    if is_pair and isinstance(returned[1], dict) and isinstance(returned[0], Iterable):
        return tuple(returned[0]), returned[1]
    text = f"{type(returned).__name__} of {len(returned)}" if isinstance(returned, tuple) else ""
    raise ConfigError(
        f"the {what} of {kind.__name__} returned {text or type(returned).__name__}; it has to "
        f"return (args, kwargs): positional arguments as a tuple, and a dict of those by name."
    )


def _hooked(registration: _Registration, kind: type) -> type[nn.Module]:
    """The distributed class with translated calls."""
    base = registration.dist_module

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if registration.forward_hook is not None:
            returned = registration.forward_hook(*args, **kwargs)
            given, kwargs = _translated(returned, "forward_hook", kind)
            args = tuple(given)
        result = base.forward(self, *args, **kwargs)
        if registration.return_hook is None:
            return result
        translated = registration.return_hook(result)
        if translated is None and result is not None:
            raise ConfigError(
                f"the return_hook of {kind.__name__} returned None; it has to return what "
                f"{kind.__name__}.forward would."
            )
        return translated

    names = {"forward": forward, "__module__": base.__module__, "__doc__": base.__doc__}
    return cast(type[nn.Module], type(base.__name__, (base,), names))
