"""Numbers of rows that depend on values, while a step is captured: `h[mask].shape[0]`.

PyTorch gives them symbols. Its own code asks of a symbol whether it is zero, or one, or another
size; it gets the answers of a large prime. So does the user's code where all numbers but zero have
the same answer: the way for chosen rows is captured. Other questions need the value.

This module must not know what becomes of the rows.
"""

import contextlib
from collections.abc import Generator, Iterable
from typing import Any

import sympy
import torch
from torch import fx
from torch._subclasses import fake_impls

from mpxla.graph.exchanged import exchanged
from mpxla.graph.number import NeedsValueError

__all__ = ["check_counts", "counts_supposed"]

_nonzero = torch.ops.aten.nonzero.default
SUPPOSED = 1_000_003
"""What PyTorch supposes that a mask is true for; no size of a tensor, and no multiple of one."""
_SEVERAL = (2, 3, 64, 1000, SUPPOSED)


@contextlib.contextmanager
def counts_supposed() -> Generator[None]:
    """Lets PyTorch suppose a number where a mask decides a size, and note what it concluded."""
    rules: Any = fake_impls.op_implementations_dict
    original = rules[_nonzero]

    def supposing(mode: Any, operator: Any, mask: torch.Tensor) -> torch.Tensor:
        places = original(mode, operator, mask)
        count = places.shape[0]
        if isinstance(count, torch.SymInt):
            env = mode.shape_env
            # Of torch 2.9, and its name in 2.13.
            names = "set_unbacked_var_to_val", "set_real_tensor_prop_unbacked_vals"
            suppose = next(getattr(env, name) for name in names if hasattr(env, name))
            for symbol in count.node.expr.free_symbols:
                suppose(symbol, SUPPOSED)
        return places

    rules[_nonzero] = supposing
    try:
        yield
    finally:
        rules[_nonzero] = original


def check_counts(graph: fx.Graph) -> None:
    """Checks that nothing was concluded that holds for the supposed numbers only.

    Raises:
        NeedsValueError: something was.
    """
    for env in {id(e): e for e in map(_env_of, graph.nodes) if e is not None}.values():
        known = env.deferred_runtime_asserts.values()
        concluded = [made.expr for several in known for made in several]
        replaced = [sympy.Eq(*pair) for pair in env.replacements.items()]
        for expr in (*concluded, *replaced):
            if not _holds(expr):
                raise NeedsValueError(f"the number of rows that a mask chooses: {expr}")


def _env_of(node: fx.Node) -> Any:
    values: Any = node.meta.get("val")
    for value in values if isinstance(values, (list, tuple)) else [values]:
        for size in value.shape if isinstance(value, torch.Tensor) else [value]:
            if isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)):
                return size.node.shape_env
    return None


def _holds(expr: Any) -> bool:
    """Whether it is true for all numbers of rows above one; where masks are compared, for equal
    ones, of which the rows are compared later.
    """
    symbols = expr.free_symbols
    return bool(symbols) and all(
        expr.xreplace(dict.fromkeys(symbols, sympy.Integer(number))) == sympy.true
        for number in _SEVERAL
    )


_ = Iterable, exchanged
