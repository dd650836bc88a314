"""What a function reaches from outside its arguments, and how to put something else there.

Its closure and the globals that it names; and what the user's functions that it calls reach, among
them methods of modules and objects. This module must not know what is looked for.
"""

import dis
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from mpxla.env import environment, reads_variables
from mpxla.graph.python.held_objects import Held, contents_of, is_looked_into, own_attributes
from mpxla.graph.python.plain import SIMPLE
from mpxla.user_lines import is_script_code

__all__ = ["Outside", "Place", "outside", "places_in"]

_MISSING = object()
_DEPTH, _MOST_PARTS = 8, 20_000
"""How far functions and objects are looked for."""
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


@dataclass(frozen=True)
class Place:
    """A name with a value.

    Attributes:
        name: for the user.
        value: what was there when it was found.
        get: gives what is there.
        put: puts another value there; None where nothing can.
        owner: for an attribute, whose it is, and its name.
    """

    name: str
    value: Any
    get: Callable[[], Any]
    put: Callable[[Any], None] | None
    owner: tuple[int, str] | None = None


_ENVIRONMENT = Place("os.environ", environment(), environment, None)


@dataclass
class Outside:
    """What a function and the user's functions that it calls name.

    Attributes:
        places: their closures and globals, attributes of the user's modules, classes and functions
            among these, and plain ones of the classes of objects.
        names: attributes and texts in their code.
        owners: what may get names: the user's classes and functions, and tables of globals, by id,
            with the text before such a name.
    """

    places: list[Place] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    owners: dict[int, tuple[str, Any]] = field(default_factory=dict)


def outside(function: Callable[..., Any], model: nn.Module) -> Outside:
    """What is named by a function and by what it calls of the user's.

    Args:
        function: of the user's; may be a method or a partial.
        model: whose modules it calls.
    """
    found, seen = Outside(names={"forward", "__call__"}), set[int]()
    kinds: dict[type, None] = {}
    waiting: list[Any] = [function]
    looked_into: set[int] = set()

    def look_into(value: Any) -> None:
        for part in _parts(value, looked_into):
            if isinstance(part, (FunctionType, MethodType, partial)):
                inner, _ = _unwrapped(part)
                if inner is not None and _is_users(inner):
                    waiting.append(part)
            elif isinstance(part, type):  # which is called, or has class methods
                kinds.update(dict.fromkeys((*part.__mro__, *inspect.getmro(type(part)))))
                waiting.extend(_constructors(part))
            elif not isinstance(part, ModuleType):
                kinds.update(dict.fromkeys(type(part).__mro__))

    look_into(list(model.modules()))
    while waiting:
        own, bound = _unwrapped(waiting.pop())
        for name, value in bound:
            look_into(value)
            found.places.append(_of_bound(name, value))
        if own is not None and id(own) not in seen:
            seen.add(id(own))
            found.names.update(_texts(own.__code__))
            if _is_users(own):
                found.owners[id(own)] = f"{own.__name__}.", own
                found.owners[id(own.__globals__)] = "", own.__globals__
            for place in _of_function(own):
                found.places.append(place)
                if _is_followed(place.value, own):
                    waiting.append(place.value)
                else:
                    look_into(place.value)
        if not waiting:
            waiting = [f for f in _methods(kinds, found.names) if id(f) not in seen]
    found.places += _of_classes(kinds, found.names)
    found.owners |= {id(kind): (f"{kind.__name__}.", kind) for kind in filter(_is_users, kinds)}
    # A number that becomes an input has one place, by whatever names code gets to it.
    found.places = list({p.owner or (p.name, id(p.value)): p for p in found.places}.values())
    return found


def _parts(value: Any, seen: set[int]) -> Iterator[Any]:
    """A value, and what is in containers and in attributes of modules and of objects in it."""
    waiting = [(value, 0)]
    for part, depth in waiting:  # grows
        if id(part) in seen or isinstance(part, (*SIMPLE, bytes, torch.Tensor)):
            continue
        seen.add(id(part))
        yield part
        if depth == _DEPTH or len(waiting) > _MOST_PARTS:
            continue
        contents = contents_of(part)
        if contents is not None:
            inside = contents.values()
        elif isinstance(part, (set, frozenset)):
            inside = part
        elif isinstance(part, nn.Module):
            hooks = (hook for kind in _HOOKS for hook in vars(part)[kind].values())
            inside = (*own_attributes(part).values(), *hooks)
        elif isinstance(part, FunctionType):
            inside = (vars(part),)
        elif is_looked_into(part):
            inside = own_attributes(part).values()
        else:  # operators of the user hold functions that run later, on the host
            continue
        waiting += ((one, depth + 1) for one in inside)


def _of_classes(kinds: dict[type, None], names: set[str]) -> Iterator[Place]:
    """Attributes and methods of the user's classes that have one of the names."""
    for kind in filter(_is_users, kinds):
        owner = Place(kind.__name__, kind, lambda: None, lambda new: None)
        for name, value in vars(kind).items():
            is_plain = type(value) is FunctionType or not hasattr(type(value), "__get__")
            if name in names and is_plain:
                place = _of_owner(owner, name)
                if place is not None:
                    yield place


def _unwrapped(function: Any) -> tuple[FunctionType | None, list[tuple[str, Any]]]:
    """The function in methods and partials, and what it is bound to, with names."""
    bound: list[tuple[str, Any]] = []
    while not isinstance(function, FunctionType):
        if isinstance(function, partial):
            bound += [(f"argument {place}", value) for place, value in enumerate(function.args)]
            bound += function.keywords.items()
        elif getattr(function, "__self__", None) is not None:
            bound.append(("self", function.__self__))
        function = getattr(function, "func", None) or getattr(function, "__func__", None)
        if function is None:
            return None, bound
    defaults, code = function.__defaults__ or (), function.__code__
    names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    bound += zip(names, defaults, strict=True)
    return function, [*bound, *(function.__kwdefaults__ or {}).items()]


def _is_followed(value: Any, caller: FunctionType) -> bool:
    if not isinstance(value, (FunctionType, MethodType, partial)):
        return False
    inner, _ = _unwrapped(value)
    if inner is None:
        return False
    return inner.__globals__ is caller.__globals__ or _is_users(inner)


def _methods(kinds: dict[type, None], names: set[str]) -> Iterator[FunctionType]:
    """The user's methods that are called by one of the names; by `getattr`, any may be."""
    for kind in filter(_is_users, kinds):
        for name, value in vars(kind).items():
            if isinstance(value, property):
                value = value.fget
            elif isinstance(value, (classmethod, staticmethod)):
                value = value.__func__
            is_named = name in names or "getattr" in names
            if is_named and isinstance(value, FunctionType):
                yield value


def _constructors(kind: type) -> Iterator[FunctionType]:
    """What runs of the user's where a class is called; modules are rather asked for their class."""
    for base in () if issubclass(kind, nn.Module) else filter(_is_users, kind.__mro__):
        for name in ("__new__", "__init__"):
            value = vars(base).get(name)
            if isinstance(value, staticmethod):
                value = value.__func__
            if isinstance(value, FunctionType):
                yield value


def _is_users(value: Any) -> bool:
    """Whether a module, class or function is of the user's files."""
    if isinstance(value, FunctionType):
        return is_script_code(value.__code__.co_filename)
    module = value if isinstance(value, ModuleType) else sys.modules.get(value.__module__)
    name, file = getattr(module, "__name__", ""), getattr(module, "__file__", None)
    return name == "__main__" or (file is not None and is_script_code(file))


def _of_function(function: FunctionType) -> Iterator[Place]:
    """Closure and globals of a function, and what it names of the user's modules and classes."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    roots = {name: _of_cell(name, cell) for name, cell in cells if _is_assigned(cell)}
    table = function.__globals__
    chains = _chains(function.__code__)
    for name, *_ in chains:
        if name in table and name not in roots:
            roots[name] = _of_key(name, table, name)
    yield from roots.values()
    if "globals" in function.__code__.co_names:  # globals()["count"] += 1
        texts = set(_texts(function.__code__))
        yield from (_of_key(n, table, n) for n in texts & table.keys() - roots.keys())
    for name, *attributes in chains:
        place = roots.get(name)
        if place is not None and reads_variables(place.value, attributes):
            yield _ENVIRONMENT
        for attribute in attributes:
            if place is None or not isinstance(place.value, (ModuleType, type, FunctionType)):
                break
            place = _of_owner(place, attribute) if _is_users(place.value) else None
            if place is not None:
                yield place


@functools.lru_cache(maxsize=2**17)  # every capture looks at the same code, of whole packages
def _chains(code: CodeType) -> tuple[tuple[str, ...], ...]:
    """Names of globals and closed-over values that a function and those inside it use.

    Each with the attributes that are taken of it: `settings.alpha` is one chain.
    """
    found: list[tuple[str, ...]] = []
    chain: list[str] = []
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and chain:
            chain.append(instruction.argval)
            continue
        if chain:
            found.append(tuple(chain))
        chain = []
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_DEREF"):
            chain = [instruction.argval]
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found += _chains(constant)
    return tuple(found)


def _texts(code: CodeType) -> Iterator[str]:
    """Attributes and texts in the code of a function and of those inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _texts(constant)
        elif isinstance(constant, str):
            yield constant
        elif isinstance(constant, tuple):
            yield from (part for part in constant if isinstance(part, str))


def _is_assigned(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _of_cell(name: str, cell: CellType) -> Place:
    def put(new: Any) -> None:
        cell.cell_contents = new

    return Place(name, cell.cell_contents, lambda: cell.cell_contents, put)


def _of_key(name: str, table: dict[str, Any], key: str) -> Place:
    return Place(name, table[key], lambda: table.get(key), lambda new: table.update({key: new}))


def _of_bound(name: str, value: Any) -> Place:
    return Place(name, value, lambda: value, lambda new: None)


def _of_owner(owner: Place, attribute: str) -> Place | None:
    """An attribute of a module, class or function."""
    held = owner.value
    if isinstance(held, type):  # the class that has it: one that inherits it would get its own
        held = next((kind for kind in held.__mro__ if attribute in vars(kind)), held)
    value = getattr(held, attribute, _MISSING)
    if value is _MISSING:
        return None
    get = partial(getattr, held, attribute, None)
    is_computed = isinstance(getattr(type(held), attribute, None), property)
    put = None if is_computed else partial(setattr, held, attribute)
    return Place(f"{owner.name}.{attribute}", value, get, put, (id(held), attribute))


def places_in(held: Iterable[Held]) -> list[Place]:
    """The attributes of modules, and of other objects that are looked into."""
    return [
        Place(f"{one.name}.{key}", value, partial(one.get, key), partial(one.put, key))
        for one in held
        if isinstance(one.value, nn.Module) or is_looked_into(one.value)
        for key, value in own_attributes(one.value).items()
    ]
