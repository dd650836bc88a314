"""Derivatives of `torch.func` in a step function: `grad`, `vjp`, `jvp`, `jacrev`, `hessian`.

Torch's own code runs, on plain tensors in the place of those that it wraps, so that it comes to
`torch.autograd.grad`, which `gradients.py` captures. A product with tangents is the derivative of
the one with cotangents, which is linear in them. Columns are computed one after the other, and so
are the rows of a `torch.vmap` with a derivative inside, as the gradients of every sample have one.
"""

import contextlib
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._C._functorch import peek_interpreter_stack
from torch._functorch import autograd_function, eager_transforms
from torch._functorch import vmap as vmap_module
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch.autograd import forward_ad

from mpxla.errors import CaptureError
from mpxla.graph.exchanged import exchanged
from mpxla.graph.user_code import at_user_line
from mpxla.log import warn_once

__all__ = ["in_vmap", "transforms_captured", "vmapped"]

_torchs: Any = eager_transforms
_torchs_vmap: Any = vmap_module
_functions: Any = autograd_function
_levels: Callable[[], Any] = peek_interpreter_stack


class _InsideOfVmapError(CaptureError):
    """A derivative inside of `torch.vmap`, whose rows are to be computed one after the other."""


def in_vmap() -> bool:
    """Whether `torch.vmap` is running; derivatives have no level in a captured step."""
    return _levels() is not None


def vmapped(function: Any, args: tuple[Any, ...], call: Callable[..., Any]) -> Any:
    """What a `torch.autograd.Function` returns inside of `torch.vmap`.

    Torch goes by the function's own `vmap`, or makes a function for all rows of it, which is
    applied outside of this `torch.vmap` by `call`.
    """
    with exchanged(_functions, custom_function_call=call):
        interpreter = retrieve_current_functorch_interpreter()
        return _functions.custom_function_call_vmap(interpreter, function, *args)


def _leaf(tensor: Any) -> Any:
    if in_vmap():
        raise _InsideOfVmapError(
            f"A derivative of torch.func is taken inside of torch.vmap with randomness='same' in a "
            f"step function{at_user_line()}, which a captured step cannot follow. Take one after "
            f"the other: torch.stack([grad(f)(row) for row in x])."
        )
    return tensor.requires_grad_()


def _in_turn(
    function: Callable[..., Any],
    num_rows: int,
    in_dims: Sequence[int | None],
    given: Sequence[Any],
    structure: pytree.TreeSpec,
    out_dims: Any,
    **kwargs: Any,
) -> Any:
    """What `torch.vmap` returns for flat arguments, of one row after the other."""
    results: list[Any] = []
    for i in range(num_rows):
        row = [v if d is None else v.select(d, i) for v, d in zip(given, in_dims, strict=True)]
        results.append(function(*pytree.tree_unflatten(row, structure), **kwargs))
    spec = pytree.tree_structure(results[0])
    if isinstance(results[0], torch.Tensor) and isinstance(out_dims, tuple):
        (out_dims,) = out_dims
    dims: Any = _torchs_vmap._broadcast_to_and_flatten(out_dims, spec)
    of_all = zip(dims, *map(pytree.tree_leaves, results), strict=True)
    return pytree.tree_unflatten([torch.stack(found, dim) for dim, *found in of_all], spec)


def _by_rows(original: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.vmap` with flat arguments, row by row where it has a derivative inside."""

    def call(function: Callable[..., Any], num_rows: int, *mapped: Any, **kwargs: Any) -> Any:
        *of_rows, randomness = mapped  # the first are as `_in_turn` takes them
        try:
            return original(function, num_rows, *mapped, **kwargs)
        except _InsideOfVmapError:
            if randomness == "same":
                raise
        line = at_user_line()
        warn_once(
            f"vmap{line}",
            f"a derivative is taken inside of torch.vmap{line}: the {num_rows} rows are captured "
            f"and computed one after the other.",
        )
        return _in_turn(function, num_rows, *of_rows, **kwargs)

    return call


def _left(tree: Any, has_gradients: bool) -> Any:
    """What a derivative leaves: torch computes it with gradients under `no_grad` too."""
    if has_gradients:
        return tree
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, tree)


def _pushed(
    function: Callable[..., Any],
    primals: tuple[Any, ...],
    tangents: Any,
    argnums: Any,
    *,
    strict: bool = False,
    has_aux: bool,
) -> tuple[Any, ...]:
    """What `torch.func.jvp` returns."""
    output, pull, *aux = _torchs._vjp_with_argnums(
        function, *primals, argnums=argnums, has_aux=has_aux
    )
    results, structure = pytree.tree_flatten(output)
    with torch.enable_grad():
        seeds = [torch.zeros_like(result).requires_grad_() for result in results]
        pulled = pytree.tree_leaves(pull(pytree.tree_unflatten(seeds, structure)))
        given = pytree.tree_leaves(tangents)
        pushed = _torchs._autograd_grad(pulled, seeds, given, create_graph=True)
    pushed = _left(pushed, torch.is_grad_enabled())
    return output, pytree.tree_unflatten(pushed, structure), *aux


def _columns(function: Callable[[Any], Any], **_: Any) -> Callable[[Any], Any]:
    """In the place of `vmap` where torch calls it for the columns of a derivative."""

    def call(*trees: Any) -> Any:
        stacked, structure = pytree.tree_flatten(trees)
        return _in_turn(function, len(stacked[0]), [0] * len(stacked), stacked, structure, 0)

    return call


@contextlib.contextmanager
def transforms_captured() -> Generator[None]:
    """Lets the derivatives of `torch.func` be captured.

    Raises:
        CaptureError: one is taken in another way.
    """

    def mapped(function: Any) -> Any:
        return lambda tree, level=None: pytree.tree_map_only(torch.Tensor, function, tree)

    def refuse() -> None:
        raise CaptureError(
            f"A forward-mode derivative is taken in a step function{at_user_line()}, which a "
            f"captured step cannot follow. Use torch.func.jvp, or torch.autograd.grad."
        )

    with (
        exchanged(
            eager_transforms,
            # In the place of a level: whether there are gradients outside.
            grad_increment_nesting=lambda: contextlib.nullcontext(torch.is_grad_enabled()),
            _wrap_all_tensors=mapped(torch.clone),  # by which something can be differentiated
            _create_differentiable=mapped(_leaf),
            _undo_create_differentiable=lambda tree, level: _left(tree, level),
            _jvp_with_argnums=_pushed,
            vmap=_columns,
        ),
        exchanged(vmap_module, _flat_vmap=_by_rows(_torchs_vmap._flat_vmap)),
        exchanged(forward_ad, enter_dual_level=refuse),
    ):
        yield
