"""Random numbers that Python code in a step draws, by the modules `random` and `numpy.random`.

Or by generators of its own (`self.rng = np.random.default_rng(0)`). So are single numbers of
PyTorch, `torch.rand(1)`, where Python decides by them.

A step function is captured once, and draws in every call. So what it draws is an input of the step:
each call draws as the function would, with the same generators, before the step runs. All of its
microbatches are given the same numbers, as the batch would be in one piece. What Python decides by
them is read as that of other inputs is (`decisions.py`), so that a call which decides otherwise
runs another program.

This module must not know how a step is captured or run.
"""

import copy
import itertools
import random
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch._C import DisableTorchFunction
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]

from mpxla.errors import CaptureError
from mpxla.graph.python.number import NumberRead, is_number
from mpxla.graph.user_code import at_user_line
from mpxla.random_states import OF_PROCESS, States, set_states, state_of, states_of

__all__ = ["Draw", "Drawer", "Draws", "Sources", "are_there", "kind_of_generator"]

Sources = dict[str, Callable[[], Any]]
"""What gives generators of the user's, by name."""
_GENERATORS: tuple[type, ...] = (random.Random, np.random.Generator, np.random.RandomState)
_PLAIN = (bool, int, float, torch.dtype)
_MOST_ARGUMENTS = 64
"""Elements of arguments, such as probabilities; what has more is not an input."""


@dataclass(frozen=True)
class Draw:
    """A call of a function that draws.

    Attributes:
        module: "random", "numpy.random" or "torch".
        name: of the function.
        args: its arguments, of plain data.
        kwargs: pairs of names and values.
        shape: of what it returns; [] for a number.
        dtype: likewise.
        is_array: whether it returns an array.
        source: name of the generator of the user's that draws; "" for those of the modules.
    """

    module: str
    name: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float64
    is_array: bool = False
    source: str = ""

    @property
    def request(self) -> tuple[Any, ...]:
        """What is known before it is called."""
        return self.source, self.module, self.name, repr(self.args), repr(self.kwargs)

    def __str__(self) -> str:
        return f"{self.source or self.module}.{self.name}()"


def kind_of_generator(value: Any) -> Any:
    """The class of an object that draws; None of what is none."""
    if not isinstance(value, _GENERATORS):  # as nearly all that steps read, in every call
        return None
    return next(kind for kind in _GENERATORS if isinstance(value, kind))


class Drawer:
    """Generators in the states of those of Python, NumPy and PyTorch, or in given ones.

    Args:
        states: of these.
        sources: generators of the user's, which it copies; None where they are not to be inputs.

    Attributes:
        began: the states in which they began.
    """

    def __init__(self, states: States | None = None, sources: Sources | None = None):
        self.sources = sources
        self._own: dict[str, Any] = {}
        self._all = random.Random(), np.random.RandomState(), torch.Generator()
        self._python, self._numpy, self._torch = self._all
        self.began = states or states_of(OF_PROCESS)
        set_states(self._all, self.began)

    def again(self) -> "Drawer":
        """Another one in the states in which this one began."""
        return Drawer(self.began, self.sources)

    def draw(self, draw: Draw) -> torch.Tensor:
        """What a call returns this time."""
        return _as_tensor(self.call(draw))

    def call(self, draw: Draw) -> Any:
        """The same in Python's form; places in order, for functions that choose of a list."""
        args, kwargs = draw.args, dict(draw.kwargs)
        if draw.module == "torch":
            with _disable_current_modes(), DisableTorchFunction():
                return getattr(torch, draw.name)(*args, **kwargs, generator=self._torch)
        is_numpy = draw.module != "random"
        owner: Any = self._numpy if is_numpy else self._python
        if draw.source:
            self.hold(draw.source)
            owner = self._own[draw.source]
        if draw.name == "shuffle":
            order = np.arange(args[0]) if is_numpy else list(range(args[0]))
            owner.shuffle(order)
            return np.asarray(order)
        if draw.name in ("sample", "choices"):
            found = getattr(owner, draw.name)(range(args[0]), *args[1:], **kwargs)
            return np.array(found, np.int64)
        return getattr(owner, draw.name)(*args, **kwargs)

    def hold(self, source: str) -> None:
        """Copies a generator of the user's, in the state that it has when it is needed first."""
        if source not in self._own:
            assert self.sources is not None, "such a draw has a source"
            self._own[source] = copy.deepcopy(self.sources[source]())

    def commit(self) -> None:
        """Puts the global generators, and those of the user's, into the states of these."""
        set_states(OF_PROCESS, states_of(self._all))
        for source, own in self._own.items():
            assert self.sources is not None, "it has copied one of them"
            set_states([self.sources[source]()], [state_of(own)])


def are_there(draws: Sequence[Draw], sources: Sources | None) -> bool:
    """Whether all generators of the user's that draw are where they were."""
    names = {draw.source for draw in draws} - {""}
    found = [(sources or {}).get(name) for name in names]
    return all(get is not None and kind_of_generator(get()) for get in found)


class Draws:
    """What a step function draws while it is captured, again and again.

    Attributes:
        known: what it drew, in order, with what was returned.
        is_complete: whether the last run was given inputs for all that it drew.
        has_scalars: whether PyTorch has drawn single numbers, which are inputs if they are to be.
    """

    def __init__(self, drawer: Drawer, with_scalars: bool = False):
        self._drawer, self._with_scalars = drawer, with_scalars
        self.has_scalars = False
        self._leaves: Sequence[torch.Tensor] = ()
        self._position = 0
        self._is_seeded = False
        self.known: list[tuple[Draw, Any]] = []
        self.is_complete = True

    def values(self) -> list[torch.Tensor]:
        """What is known as tensors."""
        return [_as_tensor(value) for _, value in self.known]

    def begin(self, leaves: Sequence[torch.Tensor]) -> None:
        """Before the function runs once more, with inputs for what is known."""
        self._leaves, self._position = leaves, 0
        self._is_seeded, self.is_complete = False, True

    def seeded(self) -> None:
        """The function seeds a generator: from here on it draws the same numbers in every call."""
        self._is_seeded = True

    def source(self, name: str, get: Callable[[], Any]) -> str | None:
        """A name for a generator of the user's that draws from here on; None if it is no input."""
        known = self._drawer.sources
        if known is None:
            return None
        names = (f"{name} ({i})" if i else name for i in itertools.count())
        own = next(n for n in names if n not in known or known[n]() is get())
        known.setdefault(own, get)
        self._drawer.hold(own)  # now: a stand-in takes its place
        return own

    def give(
        self,
        module: str,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        source: str = "",
    ) -> Any:
        """What a function that draws returns; NotImplemented for what cannot be an input."""
        if self._is_seeded or name in _NOT_AS_INPUTS or "out" in kwargs:
            return NotImplemented
        if module == "torch":
            kwargs = {key: value for key, value in kwargs.items() if key != "device"}
            self.has_scalars = self.has_scalars or _is_scalar(name, args, kwargs)
            if not (self._with_scalars and _is_scalar(name, args, kwargs)):
                return NotImplemented

        def ask(*args: Any, **kwargs: Any) -> Any:
            own = "randrange" if (module, name) == ("random", "choice") else name
            return self._draw(module, own, args, kwargs, source)

        function = _OF_LISTS.get((module, name))
        return ask(*args, **kwargs) if function is None else function(ask, *args, **kwargs)

    def _draw(
        self, module: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], source: str
    ) -> Any:
        plain, named = _plain(args), tuple((key, _plain(v)) for key, v in kwargs.items())
        if NotImplemented in (plain, *(value for _, value in named)):
            return NotImplemented
        asked = Draw(module, name, plain, named, source=source)
        place, self._position = self._position, self._position + 1
        if place == len(self.known):
            value = self._drawer.call(asked)
            is_tensor, is_array = isinstance(value, torch.Tensor), isinstance(value, np.ndarray)
            dtype = value.dtype if is_tensor else getattr(torch, str(np.asarray(value).dtype))
            kind = tuple(value.shape if is_tensor else np.shape(value)), dtype, is_array
            self.known.append((Draw(module, name, plain, named, *kind, source), value))
        draw, value = self.known[place]
        if draw.request != asked.request:
            raise CaptureError(
                f"The step function calls {asked}{at_user_line()}, and {draw} when it was captured "
                f"with the same inputs before. What decides that must follow from its arguments."
            )
        if place >= len(self._leaves):
            self.is_complete = False
            return value.copy() if draw.is_array else value
        return _in_python(draw, self._leaves[place])


_NOT_AS_INPUTS = ("bytes", "randbytes", "getrandbits")
_Ask = Callable[..., Any]


def _choice(ask: _Ask, seq: Any) -> Any:
    place = ask(len(seq))
    return place if place is NotImplemented else seq[place]


def _chosen(ask: _Ask, population: Any, *args: Any, **kwargs: Any) -> Any:
    places = ask(len(population), *args, **kwargs)
    return places if places is NotImplemented else [population[i] for i in places]


def _shuffle(ask: _Ask, x: Any) -> Any:
    places = ask(len(x))
    if places is not NotImplemented:
        x[:] = x[places] if isinstance(x, np.ndarray) else [x[i] for i in places]
        return None
    return places


def _of_array(ask: _Ask, a: Any, *args: Any, **kwargs: Any) -> Any:
    if np.ndim(a) == 0:
        return ask(a, *args, **kwargs)
    places = ask(len(a), *args, **kwargs)
    return places if places is NotImplemented else np.asarray(a)[places]


_OF_LISTS: dict[tuple[str, str], Callable[..., Any]] = {
    ("random", "choice"): _choice,
    ("random", "sample"): _chosen,
    ("random", "choices"): _chosen,
    ("random", "shuffle"): _shuffle,
    ("numpy.random", "shuffle"): _shuffle,
    ("numpy.random", "choice"): _of_array,
    ("numpy.random", "permutation"): _of_array,
}
"""Functions that choose of what they are given; the places are what is drawn."""


def _is_scalar(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether `torch.rand` and its like make one element."""
    size = kwargs.get("size", args[-1:] if name == "randint" else args)
    dims = list(pytree.tree_leaves(size))
    return all(type(dim) is int and dim == 1 for dim in dims)


def _in_python(draw: Draw, leaf: torch.Tensor) -> Any:
    """An input as what Python goes on with; the value of what is no float is read."""
    if draw.module == "torch":
        return _with_open_number(leaf) if leaf.is_floating_point() else leaf
    is_float = draw.dtype is torch.float64
    if is_float and not draw.is_array:
        return NumberRead(leaf)
    if is_float and leaf.numel() == 1:
        array = np.empty(draw.shape, dtype=object)  # compares its element
        array.reshape(-1)[0] = NumberRead(leaf.reshape(()))
        return array
    return leaf.numpy() if draw.is_array else int(leaf.item())


def _with_open_number(leaf: torch.Tensor) -> torch.Tensor:
    """The same tensor, of which `.item()` reads no value.

    `torch.rand(1).item() < p` then decides by the side that the number is on, and not by its value,
    which would ask for a program in every call.
    """
    reference, given = weakref.ref(leaf), cast(Any, leaf)  # whoever has drawn it keeps it
    given.item = lambda: NumberRead(cast(torch.Tensor, reference()))
    return leaf


def _as_tensor(value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    return torch.from_numpy(np.ascontiguousarray(value).reshape(np.shape(value)))


def _plain(value: Any) -> Any:
    """An argument as plain data, or NotImplemented."""
    if isinstance(value, (np.ndarray, np.generic)):
        value = value.tolist() if value.size <= _MOST_ARGUMENTS else NotImplemented
    if type(value) in (list, tuple):
        parts = [_plain(v) for v in value] if len(value) <= _MOST_ARGUMENTS else [NotImplemented]
        return NotImplemented if NotImplemented in parts else tuple(parts)
    if is_number(value):
        return float(value)
    return value if value is None or type(value) in _PLAIN else NotImplemented
