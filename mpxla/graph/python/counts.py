"""Numbers of rows that depend on values, while a step is captured: `h[mask].shape[0]`.

PyTorch gives them symbols. Its own code asks of a symbol whether it is zero, or one, or another
size; it gets the answers of a large prime. The user's code may ask whether there are rows at all,
of a symbol or of the mask (`if mask.any():`); the way for some rows is captured, and the question
noted, so that somebody can see what would be without rows. Other questions need the value.

This module must not know what becomes of the rows.
"""

import builtins
import contextlib
import operator
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import sympy
import torch
from torch import fx
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.weak import WeakTensorKeyDictionary

from mpxla.errors import CaptureError
from mpxla.graph.exchanged import exchanged, restored
from mpxla.graph.python.number import NeedsValueError, NumberRead
from mpxla.graph.python.symbols import symbols_computed
from mpxla.graph.typed import SYMBOLIC, symbolic_numbers
from mpxla.graph.user_code import at_user_line, is_called_by_user

__all__ = ["Counts", "RaisesError", "check_counts", "without_exception"]

_Captured = TypeVar("_Captured")

_nonzero = torch.ops.aten.nonzero.default
_SUPPOSED = 1_000_003
"""What PyTorch supposes that a mask is true for; no size of a tensor, and no multiple of one."""
_SEVERAL = (2, 3, 64, 1000, _SUPPOSED)

_OPERATORS = {
    **dict.fromkeys(("IntTrueDiv", "FloatTrueDiv"), operator.truediv),
    **dict.fromkeys(("CleanDiv", "FloorDiv"), operator.floordiv),
    **dict.fromkeys(("Mod", "PythonMod"), operator.mod),
    **dict.fromkeys(("FloatPow", "PowByNatural"), operator.pow),
    "ToFloat": lambda value: value,
    "Max": lambda *values: builtins.max(values),
    "Min": lambda *values: builtins.min(values),
}
"""Torch's names in expressions of symbols."""
_OF_MASKS = {"any": "some", "all": "all", "sum": "count", "count_nonzero": "count"}
_SAME = frozenset("clone cpu detach int item long reshape to view".split())
_COMPARED = {
    **{(name, 0): "some" for name in ("gt", "ne")},
    **{(name, 0): "none" for name in ("eq", "le")},
    **{("ge", 1): "some", ("lt", 1): "none"},
}
_TURNED = {"some": "none", "none": "some", "all": "not all", "not all": "all"}
_OF_FINITE = frozenset("isfinite isinf isnan isneginf isposinf".split())
_IS_NO_MASK = None, "finite"
"""Said of tests whether values are finite, which are no masks of rows."""
_READS = frozenset(("__bool__", "is_nonzero"))
_DIVIDES = {"chunk": 2, "split": 2, "tensor_split": 2, "unbind": 1, "__iter__": 9, "tolist": 9}
"""They give lists; and where their argument `dim` is, which is 0 where it is not."""

_IN_TURN: Mapping[str, Callable[..., Any]] = {
    "unbind": tuple,
    "__iter__": iter,
    "tolist": lambda rows: [row.tolist() for row in rows],
}


class Counts:
    """Follows one captured step.

    Args:
        none_at: the user's line, as `at_user_line` gives it, where the answer is that there are no
            rows.
        raises_at: lines where it is the same answer, or that a mask is true everywhere, since the
            function raises an exception otherwise; what they ask is noted.
        decided: lines that get no answer here; Python asks for the value.

    Attributes:
        asked: where the user's code asks whether there are rows, and whether the mask is true
            somewhere, in order.
        denied: the same for `raises_at`, and whether the answer is right.
        last: the line that asked last.
        tried: lines that ask whether a mask is true everywhere, and got the answer that it is not:
            if the function goes on then, they have to be `decided`.
    """

    def __init__(
        self,
        none_at: str | None = None,
        raises_at: frozenset[str] = frozenset(),
        decided: Collection[str] = (),
    ) -> None:
        self.asked: list[tuple[str, torch.Tensor]] = []
        self.denied: list[tuple[str, torch.Tensor]] = []
        self.last: str | None = None
        self.tried: set[str] = set()
        self.none_at = none_at
        self._raises_at, self._decided = raises_at, decided
        self._truth_of: Callable[[torch.Tensor], bool | None] = lambda mask: None
        # With their versions, which writes in place change.
        self._masks: dict[sympy.Symbol, tuple[torch.Tensor, int]] = {}
        # What a tensor says of a mask.
        self._said: Any = WeakTensorKeyDictionary()

    @property
    def has_unknown(self) -> bool:
        """Whether a mask has decided a size."""
        return bool(self._masks)

    @contextlib.contextmanager
    def supposed(self) -> Generator[None]:
        """Lets PyTorch suppose a number where a mask decides a size, and note its conclusions."""
        rules: Any = fake_impls.op_implementations_dict
        original = rules[_nonzero]

        def supposing(mode: Any, operator: Any, mask: torch.Tensor) -> torch.Tensor:
            places = original(mode, operator, mask)
            count = places.shape[0]
            if isinstance(count, torch.SymInt):
                env = mode.shape_env
                # In torch 2.9, and in 2.13.
                names = "set_unbacked_var_to_val", "set_real_tensor_prop_unbacked_vals"
                suppose = next(getattr(env, name) for name in names if hasattr(env, name))
                for symbol in count.node.expr.free_symbols:
                    suppose(symbol, _SUPPOSED)
                    self._masks.setdefault(symbol, (mask, mask._version))
            return places

        with restored(rules):
            rules[_nonzero] = supposing
            yield

    @contextlib.contextmanager
    def answering(self, truth_of: Callable[[torch.Tensor], bool | None]) -> Generator[None]:
        """Answers the user's questions about symbols while the step function runs.

        Args:
            truth_of: whether a mask is true anywhere, if its value is known; else None.
        """
        self.asked.clear()
        self.denied.clear()
        self._truth_of = truth_of
        length = builtins.len

        def with_truth(kind: Any, asked: Callable[[Any], Any]) -> AbstractContextManager[None]:
            truth = kind.__bool__

            def is_true(value: Any) -> bool:
                expr = value.node.expr
                is_known = self._masks.keys() & expr.free_symbols and is_called_by_user()
                return self._answer(asked(expr)) if is_known else truth(value)

            return exchanged(kind, __bool__=is_true)

        def is_not_zero(expr: Any) -> Any:
            # Torch compares in its own name, which gets the answers of a large prime.
            return sympy.Ne(expr, 0)

        def length_of(value: Any) -> Any:
            # Python would want a number; what compares it takes a symbol as well.
            if type(value) is FakeTensor and value.dim():
                return value.shape[0]
            return length(value)

        with (
            with_truth(torch.SymBool, lambda expr: expr),
            with_truth(torch.SymInt, is_not_zero),
            with_truth(torch.SymFloat, is_not_zero),
            symbols_computed(self.number_of, self.is_of_masks),
            exchanged(builtins, len=length_of),
        ):
            yield

    def _answer(self, expr: Any) -> bool:
        """What holds for all numbers of rows but zero; asked for where that is not one answer."""
        symbols = [*expr.free_symbols]
        holds = _function(expr, symbols)
        masks = [*map(self._mask_of, symbols)]
        alike = len(symbols) == 1 and {bool(holds(n)) for n in _numbers(expr, masks[0])}
        if not alike or len(alike) > 1 or (alike != {bool(holds(0))} and self._is_decided()):
            # As numbers of the program, which may be asked for.
            return bool(holds(*(mask.count_nonzero() for mask in masks)))
        (with_rows,) = alike
        if bool(holds(0)) == with_rows:
            return with_rows
        return with_rows is not self._ask(masks[0])

    def is_of_masks(self, value: Any) -> bool:
        """Whether a value is a number that masks decide, and nothing else."""
        symbols = value.node.expr.free_symbols if isinstance(value, SYMBOLIC) else ()
        return bool(symbols) and symbols <= self._masks.keys()

    def most(self, value: Any) -> int | None:
        """The greatest number of rows of one mask; None for all else, and if nobody knows."""
        expr = value.node.expr if self.is_of_masks(value) else None
        size = self._masks[expr][0].numel() if isinstance(expr, sympy.Symbol) else None
        return size if type(size) is int else None

    def mask_of_size(self, size: Any) -> torch.Tensor | None:
        """The mask whose rows there are as many of; None for all else, and if it was written to."""
        if not self.is_of_masks(size) or size.node.expr not in self._masks:
            return None
        mask, version = self._masks[size.node.expr]
        return mask if mask._version == version else None

    def number_of(self, value: Any) -> Any:
        """What is read of the masks in the place of a symbol of theirs; all else as it is."""
        if not self.is_of_masks(value):
            return value
        expr = value.node.expr
        symbols = [*expr.free_symbols]
        counts = [NumberRead(self._mask_of(symbol).count_nonzero()) for symbol in symbols]
        return _function(expr, symbols)(*counts)

    def _mask_of(self, symbol: sympy.Symbol) -> torch.Tensor:
        mask, version = self._masks[symbol]
        if mask._version != version:
            raise CaptureError(
                f"The step function asks{at_user_line()} how many rows a mask chooses, and has "
                f"written to that mask since it chose them. Write to a copy: mask = mask & other "
                f"in place of mask &= other."
            )
        return mask

    def _is_decided(self) -> bool:
        return bool(self._decided) and at_user_line() in self._decided

    def _ask(self, mask: torch.Tensor) -> bool:
        """Notes a question about a mask; whether the answer is that it is true nowhere."""
        known = self._truth_of(mask)
        if known is not None:
            return not known
        self.last = line = at_user_line()
        if line in self._raises_at:
            self.denied.append((line, mask.any().logical_not()))
            return True
        if line != self.none_at:
            self.asked.append((line, mask.any()))
        return line == self.none_at

    def _ask_whole(self, mask: torch.Tensor) -> bool | None:
        """Notes a question whether a mask is true everywhere; None if its value is known."""
        if self._truth_of(mask.logical_not()) is not None:
            return None
        self.last = line = at_user_line()
        if line in self._raises_at:
            self.denied.append((line, mask.all()))
            return True
        self.tried.add(line)
        return False

    def call(
        self, call: Callable[..., Any], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Calls a function of torch; what it says of masks without a value is followed."""
        value = args[0] if args else None
        if not isinstance(value, FakeTensor):
            return call(func, args, kwargs)
        name = getattr(func, "__name__", "")
        if _are_divided(func, args, kwargs):
            raise NeedsValueError(f"{name} of rows that a mask chooses")
        said = self._said.get(value)
        if said not in (None, _IS_NO_MASK) and said[0]._version != said[2]:
            said = None  # it was said of the mask before somebody wrote to it
        if said is not None and said != _IS_NO_MASK and name in _READS and not self._is_decided():
            if said[1] not in ("all", "not all"):
                return (said[1] == "none") is self._ask(said[0])
            if (is_full := self._ask_whole(said[0])) is not None:
                return (said[1] == "all") is is_full
        result = call(func, args, kwargs)
        found = self._follow(name, value, args, kwargs, said)
        others = (said, *map(self._said.get, (v for v in args[1:] if isinstance(v, FakeTensor))))
        if name in _OF_FINITE or _IS_NO_MASK in others:
            found = _IS_NO_MASK
        if found is not None:
            made = result if isinstance(result, FakeTensor) else getattr(result, "tensor", None)
            if isinstance(made, FakeTensor):  # of a number too, which was read
                self._said[made] = found
        return result

    def takes_in_turn(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a function of torch gives chosen rows one by one."""
        return (
            getattr(func, "__name__", "") in _IN_TURN
            and _are_divided(func, args, kwargs)
            and self.is_of_masks(args[0].shape[_divided(func.__name__, args, kwargs)])
        )

    def in_turn(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Such rows, after Python has asked how many there are."""
        value, dim = args[0], _divided(func.__name__, args, kwargs)
        number = operator.index(self.number_of(value.shape[dim]))
        return _IN_TURN[func.__name__](value.select(dim, row) for row in range(number))

    def _follow(self, name: str, value: torch.Tensor, args: Any, kwargs: Any, said: Any) -> Any:
        name = name.removeprefix("__").removesuffix("__")
        if said is None:
            is_whole = len(args) == 1 and not kwargs and value.dim()
            is_whole = is_whole and value.dtype is torch.bool
            return (
                (value, _OF_MASKS[name], value._version) if is_whole and name in _OF_MASKS else None
            )
        if name in _SAME:
            return said
        if name in ("logical_not", "invert", "bitwise_not"):
            return (said[0], _TURNED[said[1]], said[2]) if said[1] in _TURNED else None
        if said[1] == "count" and len(args) == 2 and type(args[1]) in (int, float):
            kind = _COMPARED.get((name, args[1]))
            return None if kind is None else (said[0], kind, said[2])
        return None


def _function(expr: Any, symbols: list[sympy.Symbol]) -> Callable[..., Any]:
    return sympy.lambdify(symbols, expr, [_OPERATORS, "math"])


def _are_divided(func: Any, args: tuple[Any, ...], kwargs: Any) -> bool:
    """Whether a function would give a list with as many tensors as rows are chosen."""
    name, value = getattr(func, "__name__", ""), args[0] if args else None
    if name not in _DIVIDES or not isinstance(value, FakeTensor) or not value.dim():
        return False
    return isinstance(value.shape[_divided(name, args, kwargs)], torch.SymInt)


def _divided(name: str, args: tuple[Any, ...], kwargs: Any) -> int:
    place = _DIVIDES[name]
    return kwargs.get("dim", args[place] if len(args) > place else 0)


def _numbers(expr: Any, mask: torch.Tensor) -> Collection[int]:
    """So many rows, but none, that an expression that says the same of all says it of others."""
    size: int | torch.SymInt = mask.numel()  # of rows that another mask chooses, a symbol
    if type(size) is int and size <= _SUPPOSED // 1000:
        return range(1, size + 1)
    parts = [int(part) for part in expr.atoms(sympy.Integer) if part] or [1]
    near = {one // other + step for one in parts for other in parts for step in (-1, 0, 1)}
    return {n for n in (1, *_SEVERAL, *near) if n > 0}


def check_counts(graph: fx.Graph) -> None:
    """Checks that PyTorch concluded nothing that holds for the supposed numbers only.

    Raises:
        NeedsValueError: it did.
    """
    numbers = [number for node in graph.nodes for number in symbolic_numbers(node)]
    for env in {id(n.node.shape_env): n.node.shape_env for n in numbers}.values():
        known = env.deferred_runtime_asserts.values()
        concluded = [made.expr for several in known for made in several]
        replaced = [sympy.Eq(*pair) for pair in env.replacements.items()]
        for expr in (*concluded, *replaced):
            if not _holds(expr):
                raise NeedsValueError(f"how many rows a mask chooses: {expr}")


def _holds(expr: Any) -> bool:
    """Whether it is true for all numbers of rows above one; where masks are compared, for equal
    ones, of which the rows are compared later.
    """
    symbols = expr.free_symbols
    return bool(symbols) and all(
        expr.xreplace(dict.fromkeys(symbols, sympy.Integer(number))) == sympy.true
        for number in _SEVERAL
    )


class RaisesError(BaseException):
    """The function has raised an exception after it has asked whether a mask is true anywhere."""

    def __init__(self, line: str, raised: Exception):
        super().__init__(line, raised)
        self.line, self.raised = line, raised


def without_exception(
    capture: Callable[[Counts], _Captured], decided: Collection[str]
) -> tuple[_Captured, frozenset[str], frozenset[str]]:
    """What is captured, and the lines where it supposes that the function raises no exception.

    Masks are supposed to be true somewhere, and not everywhere, but where the function raises an
    exception then, as `assert not (x > 100).any()` and `assert (x < 100).all()` do. Where it goes
    on though a mask is not true everywhere, that is `decided`: those lines come last.
    """
    lines, asking, first = frozenset[str](), frozenset(decided), None
    while True:
        counts = Counts(None, lines, asking)
        try:
            captured = capture(counts)
            if not counts.tried:
                return captured, lines, asking
        except RaisesError as error:
            first = first or error.raised
            if error.line in lines:  # it raises one both ways
                raise first from None
            lines |= {error.line}
            continue
        except Exception:
            if not counts.tried:
                raise
        asking |= counts.tried
