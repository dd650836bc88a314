"""What a step function may do besides computing, and a captured step cannot keep.

The use of gradients or optimizers, and some hooks, would be left out of the graph without a word:
they are refused. Backwards that the user wrote (`torch.autograd.Function`) are captured.
Tensors that `forward` keeps as attributes are those of the capture: they are taken away again.
This module must not know how the step is captured or run.
"""

import contextlib
import copy
from collections import deque
from collections.abc import Callable, Generator
from typing import Any, cast

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.nn.modules import module as torch_modules
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.checkpoint import CheckpointFunction

from mpxla.errors import CaptureError
from mpxla.graph.capture.autograd import (
    apply_captured,
    bound,
    has_own_setup,
    own_containers,
)
from mpxla.graph.capture.checkpoints import run_checkpointed
from mpxla.graph.capture.collectives import Replicas
from mpxla.graph.capture.transforms import in_vmap, vmapped
from mpxla.graph.exchanged import exchanged
from mpxla.graph.python.module_tables import MODULE_TABLES
from mpxla.graph.python.noted_contents import CONTAINERS
from mpxla.graph.python.number import is_number
from mpxla.graph.python.plain import refill
from mpxla.graph.user_code import at_user_line

__all__ = [
    "attributes_kept",
    "optimizers_refused",
    "own_backwards_captured",
    "refuse_gradient_hooks",
    "refuse_gradients",
]

_WANTS_GRADIENT = torch.Tensor.register_post_accumulate_grad_hook
_gradient = cast(Any, torch.Tensor.grad)
_USES_GRADIENT = (_gradient.__get__, _gradient.__set__)


def refuse_gradients(func: Any, args: tuple[Any, ...]) -> None:
    """Checks a call of torch in a step function, as `__torch_function__` is given it.

    Raises:
        CaptureError: it reads or changes the gradient of a tensor that may have one.
    """
    if func is _WANTS_GRADIENT:
        raise CaptureError(
            f"{func.__name__}() was called in a step function{at_user_line()}, where gradients "
            f"stay inside of compiled programs. Return the gradient from the step function: "
            f"(g,) = torch.autograd.grad(loss, x, retain_graph=True)."
        )
    if func in _USES_GRADIENT and not _has_none_and_keeps_none(*args):
        raise CaptureError(
            f"The gradient of a tensor is used in a step function{at_user_line()}, where there is "
            f"none yet: gradients are those of all microbatches, and complete when the step call "
            f"has returned. Read, clip and clear them outside."
        )


def _has_none_and_keeps_none(tensor: torch.Tensor, new: Any = None, *_: Any) -> bool:
    """Whether a tensor has no gradient by itself, as a buffer, and is given none.

    A parameter that is frozen now may have one from before.
    """
    may_have = tensor.requires_grad or isinstance(tensor, nn.Parameter)
    return not may_have and tensor.grad is None and not isinstance(new, torch.Tensor)


@contextlib.contextmanager
def optimizers_refused() -> Generator[None]:
    """Makes `step()` and `zero_grad()` of any optimizer an error.

    Raises:
        CaptureError: an optimizer was used.
    """

    def refuse(optimizer: Any, *_: Any, **__: Any) -> None:
        raise CaptureError(
            f"{type(optimizer).__name__} is used in a step function{at_user_line()}, which is "
            f"captured once and runs for every microbatch. Call optimizer.zero_grad() before the "
            f"step call and optimizer.step() after it."
        )

    refused = exchanged(torch.optim.Optimizer, zero_grad=refuse)
    with register_optimizer_step_pre_hook(refuse), refused:
        yield


@contextlib.contextmanager
def own_backwards_captured(
    read: Callable[[Any], Any],
    reentrant: Callable[[Callable[[], Any]], Any],
    replicas: Replicas,
    know_as: Callable[[torch.Tensor, torch.Tensor], None],
) -> Generator[None]:
    """Captures every `torch.autograd.Function` whose backward would count.

    A reentrant checkpoint is such a function as well: its body is a checkpointed region. Others of
    torch belong to operators that stay one node.

    Args:
        read: gives arguments with the values that tensors among them have now.
        reentrant: runs such a checkpoint.
        replicas: run collectives that torch has made such functions.
        know_as: makes known of one tensor what is known of the value of another.
    """
    function: Any = torch.autograd.Function
    original = function.__dict__["apply"]
    # Its apply calls that of its base, also one that a module has bound before: `f = F.apply`.
    base: Any = function.__mro__[1]

    def apply(
        cls: Any, own: Callable[..., Any], args: Any, kwargs: Any, is_of_rows: bool = False
    ) -> Any:
        args, kwargs = own_containers(args, read(args)), read(kwargs)
        if cls is CheckpointFunction:
            body, _, *inputs = args
            return reentrant(lambda: run_checkpointed(body, inputs))
        if replicas.takes(cls):
            return replicas.call(cls, args, kwargs)
        if in_vmap() and has_own_setup(cls):
            return vmapped(cls, bound(cls, args, kwargs), of_rows)
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
        counts = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        if counts and (is_of_rows or not cls.__module__.startswith(("torch.", "mpxla.graph."))):
            return apply_captured(cls, args, kwargs, know_as=know_as)
        return own(*args, **kwargs)

    def of_rows(cls: Any, *args: Any) -> Any:
        return apply(cls, original.__get__(None, cls), args, {}, is_of_rows=True)

    def of_function(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return apply(cls, original.__get__(None, cls), args, kwargs)

    def of_base(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return apply(cls, super(base, cls).apply, args, kwargs)

    with (
        exchanged(function, apply=classmethod(of_function)),
        exchanged(base, apply=classmethod(of_base)),
    ):
        yield


def refuse_gradient_hooks(model: nn.Module) -> None:
    """Checks that there are no hooks that a captured step cannot call.

    Raises:
        CaptureError: there is one by `register_backward_hook`, which torch has given up.
    """
    modules = model.named_modules()
    found = [f"module {n or 'model'}" for n, m in modules if _has_former_hooks(m, "_")]
    if _has_former_hooks(torch_modules, "_global_"):
        found.append("every module")
    if found:
        raise CaptureError(
            f"{found[0]} has a hook by register_backward_hook, which PyTorch calls with gradients "
            f"of single operators. Use register_full_backward_hook."
        )


def _has_former_hooks(owner: Any, prefix: str) -> bool:
    """Whether backward hooks are of the form that torch has given up."""
    hooks = getattr(owner, f"{prefix}backward_hooks", None)
    return bool(hooks) and getattr(owner, f"{prefix}is_full_backward_hook") is not True


@contextlib.contextmanager
def attributes_kept(model: nn.Module, gone: list[tuple[nn.Module, str]]) -> Generator[None]:
    """Gives every module back the attributes that it had, where `forward` puts tensors into them.

    Numbers and other values stay as `forward` leaves them.

    Args:
        model: whose modules they are.
        gone: gets those attributes.
    """
    copies: dict[int, Any] = {}  # of what several modules have, one
    before = [(module, _attributes(module, copies)) for module in model.modules()]
    try:
        yield
    finally:
        for module, attributes in before:
            now = {k: v for k, v in vars(module).items() if k not in MODULE_TABLES}
            had = {name: content for name, (_, content) in attributes.items()}
            changed = [name for name, value in now.items() if _is_new(value, had.get(name))]
            for name in changed:
                if name not in attributes:
                    del vars(module)[name]
                    continue
                container, content = attributes[name]
                if now[name] is container:  # which others may hold, too
                    _take_new(container, content)
                elif type(container) in CONTAINERS:
                    refill(container, content)
                vars(module)[name] = container
            if not type(module).__module__.startswith("torch."):
                gone += ((module, name) for name in changed)


def _attributes(module: nn.Module, copies: dict[int, Any]) -> dict[str, tuple[Any, Any]]:
    """All of them, and copies of the containers that `forward` may fill in place."""

    def copied(value: Any) -> Any:
        return copies.setdefault(id(value), copy.copy(value))

    return {
        name: (value, copied(value) if type(value) in CONTAINERS else value)
        for name, value in vars(module).items()
        if name not in MODULE_TABLES
    }


def _take_new(container: Any, content: Any) -> None:
    """Gives a container with new tensors what a copy of it has; but numbers in it count on.

    A flag that says that a table is there goes with the table: every capture makes it anew.
    """
    if isinstance(container, dict):
        counts = {key: value for key, value in container.items() if _counts(value)}
        refill(container, {k: counts.get(k, content.get(k)) for k in {**content, **counts}})
    elif len(container) == len(content):
        pairs = zip(container, content, strict=True)
        refill(container, [new if _counts(new) else old for new, old in pairs])
    else:
        refill(container, content)


def _counts(value: Any) -> bool:
    return type(value) in (int, float) or is_number(value)


def _is_new(value: Any, old: Any) -> bool:
    """Whether a value is, or holds, a tensor that the old value does not."""
    if not isinstance(value, (torch.Tensor, list, tuple, dict, deque)) or value is old:
        return False
    known = {id(leaf) for leaf in pytree.tree_leaves(old)}
    leaves = pytree.tree_leaves(value)
    return any(isinstance(v, torch.Tensor) and id(v) not in known for v in leaves)
