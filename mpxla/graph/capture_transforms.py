"""Derivatives of `torch.func` in a step function: `grad`, `vjp`, `jvp`, `jacrev`, `hessian`.

Torch's own code runs, on plain tensors in the place of those that it wraps, so that it comes to
`torch.autograd.grad`, which `gradients.py` captures. A product with tangents is the derivative of
the one with cotangents, which is linear in them. Columns are computed one after the other.
"""

import contextlib
from collections.abc import Callable, Generator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._functorch import eager_transforms
from torch.autograd import forward_ad

from mpxla.errors import CaptureError
from mpxla.graph.exchanged import exchanged
from mpxla.graph.user_code import at_user_line

__all__ = ["transforms_captured"]

_torchs: Any = eager_transforms


def _leaf(tensor: Any) -> Any:
    if is_functorch_wrapped_tensor(tensor):
        raise CaptureError(
            f"A derivative of torch.func is taken inside of torch.vmap in a step function"
            f"{at_user_line()}, which a captured step cannot follow. Take one after the other: "
            f"torch.stack([grad(f)(row) for row in x])."
        )
    return tensor.requires_grad_()


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
    return output, pytree.tree_unflatten(pushed, structure), *aux


def _in_turn(function: Callable[[Any], Any], **_: Any) -> Callable[[Any], Any]:
    """In the place of `vmap` where torch calls it for the columns of a derivative."""

    def call(tree: Any) -> Any:
        stacked, structure = pytree.tree_flatten(tree)
        each = [
            function(pytree.tree_unflatten(list(row), structure))
            for row in zip(*stacked, strict=True)
        ]
        return pytree.tree_map(lambda *found: torch.stack(found), *each)

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
            grad_increment_nesting=lambda: contextlib.nullcontext(0),
            _wrap_all_tensors=mapped(torch.clone),  # by which something can be differentiated
            _create_differentiable=mapped(_leaf),
            _undo_create_differentiable=lambda tree, level=None: tree,
            _jvp_with_argnums=_pushed,
            vmap=_in_turn,
        ),
        exchanged(forward_ad, enter_dual_level=refuse),
    ):
        yield
