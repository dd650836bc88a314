"""Which nodes of a captured step belong to checkpointed regions.

A region is what runs inside `torch.utils.checkpoint.checkpoint` (of both kinds), and so also what
Hugging Face's `gradient_checkpointing_enable()` and SMP's functions wrap, or a module that
`smp.set_activation_checkpointing` has marked. Its body runs as it is while a step is captured;
what is done about it is decided when a stage is lowered (`stage/recompute.py`).
"""

import contextlib
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from mpxla.graph.exchanged import exchanged
from mpxla.graph.regions import CHECKPOINTED, Checkpointed, Layers, Region, tag
from mpxla.graph.user_code import at_user_line
from mpxla.log import warn_once

__all__ = ["checkpoints_noted", "inside", "run_checkpointed"]


@contextlib.contextmanager
def inside(region: Region) -> Generator[None]:
    """What runs inside belongs to a region, if a step is being captured."""
    mode = get_proxy_mode()
    if mode is None:
        yield
        return
    graph: fx.Graph = cast(Any, mode).tracer.graph
    known = set(graph.nodes)
    yield
    tag((node for node in graph.nodes if node not in known), region)


def run_checkpointed(body: Callable[..., Any], inputs: Sequence[Any]) -> Any:
    """Runs the body of a reentrant checkpoint.

    PyTorch gives the body's parameters gradients only if one of its inputs takes part in them, and
    warns.
    """
    torch_checkpoint.check_backward_validity(inputs)
    counts = any(isinstance(v, torch.Tensor) and v.requires_grad for v in inputs)
    with inside(Region(_name(body))), contextlib.nullcontext() if counts else torch.no_grad():
        return body(*inputs)


def _name(function: Any) -> str:
    owner = getattr(function, "func", function)  # of a functools.partial
    owner = getattr(owner, "__self__", owner)
    return getattr(owner, "__qualname__", None) or type(owner).__qualname__


@contextlib.contextmanager
def checkpoints_noted() -> Generator[None]:
    """Notes the regions of torch's non-reentrant checkpoints and of marked modules.

    Hooks on what PyTorch saves for the backward are left out, with a warning.
    """
    with _torchs_noted(), _modules_noted(), _saved_hooks_left_out():
        yield


def _saved_hooks_left_out() -> AbstractContextManager[None]:
    """Leaves out what would pack and unpack tensors that stay inside of compiled programs."""

    def enter(_: Any) -> None:
        line = at_user_line()
        warn_once(
            f"saved {line}",
            f"hooks on saved tensors (saved_tensors_hooks, save_on_cpu){line} are not called in a "
            f"step function: backwards read values as the forward had them. To save memory, use "
            f"offload_activations or activation checkpointing.",
        )

    return exchanged(saved_tensors_hooks, __enter__=enter, __exit__=lambda *_: None)


def _torchs_noted() -> AbstractContextManager[None]:
    """`checkpoint(use_reentrant=False)` without the hooks by which it computes again.

    Its generator runs up to `yield` before the body and goes on after it. `checkpoint` itself
    cannot be exchanged: other libraries hold references to it.
    """

    def generator(
        function: Any,
        preserve_rng_state: bool = True,
        context_fn: Any = torch_checkpoint.noop_context_fn,
        *args: Any,
        **kwargs: Any,
    ) -> Generator[None]:
        context, _ = context_fn()
        # A selective policy sees the operators of the derivative, not those of the user's code.
        policy = getattr(context, "policy_fn", None)
        if policy is not None:
            context = contextlib.nullcontext()
        with context, inside(Region(_name(function), policy=policy)):
            yield

    return exchanged(torch_checkpoint, _checkpoint_without_reentrant_generator=generator)


def _modules_noted() -> AbstractContextManager[None]:
    """Calls of marked modules, and of the layers of marked sequences.

    Torch's tracer calls modules through proxies that share their `__dict__`.
    """
    original = nn.Module.__call__
    layers_of: list[dict[int, tuple[Region, ...]]] = []

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        mark: Checkpointed | None = self.__dict__.get(CHECKPOINTED)
        waiting = layers_of[-1].get(id(self.__dict__), ()) if layers_of else ()
        if mark is not None and not mark.is_whole:
            layers_of.append(_layers(self, mark.group_size))
            try:
                return original(self, *args, **kwargs)
            finally:
                layers_of.pop()
        if not waiting and mark is None:
            return original(self, *args, **kwargs)
        if waiting:  # a layer may come twice in its sequence
            layers_of[-1][id(self.__dict__)] = waiting[1:]
            region = waiting[0]
        else:
            region = Region(type(self).__qualname__, is_module=True)
        with inside(region):
            return original(self, *args, **kwargs)

    return exchanged(nn.Module, __call__=call)


def _layers(sequence: nn.Module, group_size: int | None) -> dict[int, tuple[Region, ...]]:
    """Regions of the layers of a sequence, by the identity of what proxies share with them."""
    layers, found = Layers(group_size), {}
    for index, child in enumerate(sequence.__dict__["_modules"].values()):
        region = Region(f"{type(sequence).__qualname__}[{index}]", True, layers, index)
        found[id(child.__dict__)] = (*found.get(id(child.__dict__), ()), region)
    return found
