"""`torch.cond`, `while_loop`, `scan` and `map` in a step, as the Python that they stand for.

A stage's program has no control flow. So a branch becomes what `if` is in a step function, and a
loop is captured turn by turn.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

__all__ = ["CONTROL_FLOW"]

Branch = Callable[..., Any]


def _cond(pred: Any, true_fn: Branch, false_fn: Branch, operands: Sequence[Any] = ()) -> Any:
    return (true_fn if pred else false_fn)(*operands)


def _while_loop(
    cond_fn: Branch, body_fn: Branch, carried: Sequence[Any], additional: Sequence[Any] = ()
) -> tuple[Any, ...]:
    while cond_fn(*carried, *additional):
        carried = body_fn(*carried, *additional)
    return tuple(carried)


def _scan(
    combine_fn: Branch, init: Sequence[Any], xs: Sequence[Any], additional_inputs: Sequence[Any]
) -> list[Any]:
    """What is carried in the end, and then the results of all turns."""
    carried, rows = list(init), []
    for row in zip(*xs, strict=True):
        found = list(combine_fn(*carried, *row, *additional_inputs))
        carried = found[: len(init)]
        rows.append(found[len(init) :])
    return carried + [_stacked(*results) for results in zip(*rows, strict=True)]


def _map(f: Branch, xs: Sequence[Any], additional: Sequence[Any]) -> Any:
    return tree_map(_stacked, *(f(*row, *additional) for row in zip(*xs, strict=True)))


def _stacked(*results: Any) -> Any:
    return None if results[0] is None else torch.stack(results)


CONTROL_FLOW: dict[str, Callable[..., Any]] = {
    "cond": _cond,
    "while_loop": _while_loop,
    "scan": _scan,
    "map_impl": _map,
}
"""By the names of torch's higher-order operators, with their arguments."""
