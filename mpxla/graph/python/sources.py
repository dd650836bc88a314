"""What Python code in a step takes from outside that is another thing every time.

A step function is captured once, so a random number of Python or NumPy would stay the one of the
capture, and an iterator or a DataLoader would give the first batch for ever. The first becomes an
input of the step (`draws.py`), or is warned of; the second is an error. This module must not know
how a step is captured.
"""

import contextlib
import io
import random
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from mpxla.errors import CaptureError
from mpxla.graph.capture.recorder import current_recorder
from mpxla.graph.exchanged import exchanged
from mpxla.graph.python.draws import Draws, kind_of_generator
from mpxla.graph.python.reach import Place
from mpxla.graph.user_code import at_user_line
from mpxla.log import warn_once
from mpxla.random_states import OF_PYTHON, state_of, states_of

__all__ = ["argument_of_capture", "iterators_refused", "random_numbers_noted"]

_DRAWING: dict[str, Any] = {"random": random, "numpy.random": np.random}
"""Modules whose functions draw, by name."""
_NOT_DRAWING = ("getstate", "get_state", "default_rng")
_MOST_GENERATORS = 512
"""Larger containers are not looked into."""
_SCALARS = ("rand", "randn", "randint")
_SEEDING = ("seed", "setstate", "set_state")
_NO_DRAWS = ("getstate", "get_state", "spawn")
"""Of generators; all else that can be called draws."""
_LOADERS = "torch_xla.distributed.parallel_loader"


@contextlib.contextmanager
def random_numbers_noted(reached: Sequence[Place], draws: Draws | None) -> Generator[None]:
    """Makes random numbers of Python and NumPy inputs of a step, or warns of them, with the line.

    Generators that the step function reaches have stand-ins meanwhile.
    """
    places = [place for one in reached for place in _generators_of(one)]
    own = [(place.name, place.value) for place in places]
    before, around = [state_of(generator) for _, generator in own], states_of(OF_PYTHON)
    stand_ins: dict[int, Any] = {}
    with contextlib.ExitStack() as stack:
        for place in places:
            if draws is None or place.put is None:
                continue
            if id(place.value) not in stand_ins:
                stand_ins[id(place.value)] = _stand_in(place.value, place.name, place.get, draws)
            stack.callback(place.put, place.value)
            place.put(stand_ins[id(place.value)])
        found, elsewhere = stack.enter_context(_functions_replaced(draws))
        yield
    if not (found or elsewhere) and around != states_of(OF_PYTHON):
        found.append("a function of random or numpy.random")
    changed = zip(own, before, strict=True)
    found += [f"the generator {name}" for (name, g), state in changed if state != state_of(g)]
    for text in dict.fromkeys(found):
        warn_once(
            f"random numbers {text}",
            f"the step function draws random numbers by {text}. It is captured once, and all later "
            f"steps and microbatches use the same ones. Draw with torch (torch.rand, torch.randn, "
            f"dropout), or outside of the step function, and pass them as a tensor.",
        )


def _generators_of(place: Place) -> Iterator[Place]:
    """A place with a generator, or those that a list or a dictionary holds, which stay there."""
    if kind_of_generator(place.value):
        yield place
    elif isinstance(place.value, (list, dict)) and len(place.value) <= _MOST_GENERATORS:
        held = cast(Any, place.value)
        for key, value in held.items() if isinstance(held, dict) else enumerate(held):
            if kind_of_generator(value):
                yield Place(f"{place.name}[{key!r}]", value, place.get, None)


def _stand_in(generator: Any, name: str, get: Callable[[], Any], draws: Draws) -> Any:
    """An object of the generator's class that gives what it draws to `draws`.

    The generator itself where that is to be no input. It has a name, and is where `get` looks.
    """
    source = draws.source(name, get)
    if source is None:
        return generator
    kind = kind_of_generator(generator)
    module = "random" if kind is random.Random else "numpy.random"
    own, is_seeded = threading.get_ident(), False

    def replaced(key: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_seeded
            is_seeded = is_seeded or key in _SEEDING
            given = NotImplemented
            if not is_seeded and key not in _NO_DRAWS and threading.get_ident() == own:
                given = draws.give(module, key, args, kwargs, source)
            return function(*args, **kwargs) if given is NotImplemented else given

        return call

    class StandIn(kind):  # pyright: ignore[reportGeneralTypeIssues]: one of three
        def __getattribute__(self, name: str) -> Any:
            if name.startswith("__"):
                return super().__getattribute__(name)
            value = getattr(generator, name)
            return replaced(name, value) if callable(value) else value

    if kind is random.Random:
        return StandIn.__new__(StandIn)  # to begin, it would seed the other one
    return StandIn(np.random.PCG64(0))  # bits by which it never draws


@contextlib.contextmanager
def _functions_replaced(draws: Draws | None) -> Generator[tuple[list[str], list[str]]]:
    """Gives calls of functions that draw to `draws`; those imported by name are not seen.

    Collects those that stay what they are. Those of other threads, which load data meanwhile, go to
    the second list.
    """
    found: list[str] = []
    elsewhere: list[str] = []
    own = threading.get_ident()

    def replaced(module: str, key: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != own:
                elsewhere.append(key)
            elif current_recorder() is not None and key in _SEEDING:
                if draws is not None:
                    draws.seeded()
            elif current_recorder() is not None:
                given = NotImplemented
                if draws is not None:
                    given = draws.give(module, key, args, kwargs)
                if given is not NotImplemented:
                    return given
                if module != "torch":
                    found.append(f"{module}.{key}{at_user_line()}")
            return function(*args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        for name, module in _DRAWING.items():
            drawing = {
                key: replaced(name, key, function)
                for key in module.__all__
                if callable(function := getattr(module, key))
                and not isinstance(function, type)
                and key not in _NOT_DRAWING
            }
            stack.enter_context(exchanged(module, **drawing))
        if draws is not None:
            scalars = {key: replaced("torch", key, getattr(torch, key)) for key in _SCALARS}
            stack.enter_context(exchanged(torch, **scalars))
        yield found, elsewhere


# --- iterators ----------------------------------------------------------------------------------


class _Refusing:
    """Stands for an iterator while a step is captured."""

    def __init__(self, name: str):
        self._name = name

    def __iter__(self) -> "_Refusing":
        return self

    def __next__(self) -> Any:
        raise _refusal(self._name)

    def __getattr__(self, name: str) -> Any:
        raise _refusal(self._name)


def _refusal(name: str) -> CaptureError:
    return CaptureError(
        f"The step function reads {name}{at_user_line()}. A step is captured once as a graph, so "
        f"that it would get the first batch for ever. Take the batch outside, and pass it to the "
        f"step function as an argument."
    )


@contextlib.contextmanager
def iterators_refused(reached: Sequence[Place]) -> Generator[None]:
    """Makes reading from iterators and DataLoaders an error in a step function.

    Those that it reaches have stand-ins meanwhile.

    Raises:
        CaptureError: the function read one.
    """
    loader: Any = DataLoader
    original = loader.__iter__
    own = threading.get_ident()

    def refuse(self: Any) -> Any:
        if threading.get_ident() != own or current_recorder() is None:
            return original(self)  # a thread that loads data meanwhile
        raise _refusal(f"a {type(self).__name__}")

    with contextlib.ExitStack() as stack:
        for place in reached:
            if place.put is not None and _is_iterator(place.value):
                stack.callback(place.put, place.value)
                place.put(_Refusing(f"the iterator {place.name}"))
        stack.enter_context(exchanged(loader, __iter__=refuse))
        yield


def argument_of_capture(value: Any, path: str, draws: Draws | None) -> Any:
    """A stand-in for an argument that is an iterator, or draws; all else as it is."""
    if _is_iterator(value):
        return _Refusing(f"the iterator in its argument {path}")
    if draws is not None and kind_of_generator(value):
        return _stand_in(value, f"argument {path}", lambda: value, draws)
    return value


def _is_iterator(value: Any) -> bool:
    """Whether reading from it is getting the next of something; files are not meant."""
    if isinstance(value, (torch.Tensor, nn.Module, io.IOBase, type)):
        return False
    return isinstance(value, Iterator) or type(value).__module__ == _LOADERS
