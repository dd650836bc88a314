"""Activation checkpointing of modules: SMP's functions.

A checkpointed module keeps its inputs and is computed again in the backward, with the same random
numbers (SMP API reference, "Activation Checkpointing"). In a step function the marks on modules
decide what a stage's programs keep (`stage/recompute.py`); outside of one, torch's own checkpoint
does it.
"""

import contextlib
import re
from collections.abc import Generator
from typing import Any

import torch.utils.checkpoint as torch_checkpoint
from torch import nn

from mpxla.errors import MpxlaError
from mpxla.graph.capture.recorder import current_recorder
from mpxla.graph.regions import CHECKPOINTED, Checkpointed
from mpxla.user_lines import at_script_line

__all__ = ["checkpoint", "checkpoint_sequential", "set_activation_checkpointing"]

_GROUP = re.compile(r"group_([1-9]\d*)", re.ASCII)


def set_activation_checkpointing(
    module: nn.Module,
    preserve_rng_state: bool = True,
    pack_args_as_tuple: bool = False,
    strategy: str = "each",
) -> None:
    """Marks a module of the model: its activations are computed again in the backward.

    Call it on every rank, before the first step. (SMP API reference.)

    Args:
        module: of the model. The layers of an `nn.Sequential` are checkpointed as `strategy` says,
            and may be on several partitions; any other module has to be on one.
        preserve_rng_state: random numbers are the same in any case.
        pack_args_as_tuple: not needed.
        strategy: of an `nn.Sequential`: `each` layer by itself, `contiguous` for all consecutive
            layers of a stage together, `group_<x>` for up to x of them.

    Raises:
        MpxlaError: it is no module, or there is no such strategy.
    """
    call = "smp.set_activation_checkpointing"
    module.__dict__[CHECKPOINTED] = _mark(_checked(module, call), strategy, call)


def checkpoint(
    module: nn.Module, *args: Any, preserve_rng_state: bool = True, **kwargs: Any
) -> Any:
    """Runs `module(*args, **kwargs)` checkpointed; for use in a `forward`.

    Args:
        module: a module, not a function.
        *args: its arguments.
        preserve_rng_state: random numbers are the same in any case.
        **kwargs: likewise.

    Raises:
        MpxlaError: it is no module.
    """
    _checked(module, "checkpoint")
    if current_recorder() is None:
        return torch_checkpoint.checkpoint(
            module, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state, **kwargs
        )
    with _marked(module, Checkpointed()):
        return module(*args, **kwargs)


def checkpoint_sequential(
    sequential_module: nn.Sequential,
    input: Any,
    strategy: str = "each",
    preserve_rng_state: bool = True,
    pack_args_as_tuple: bool = False,
) -> Any:
    """Runs the layers of an `nn.Sequential` checkpointed; for use in a `forward`.

    Args:
        sequential_module: the layers.
        input: of the first one.
        strategy: as for `set_activation_checkpointing`.
        preserve_rng_state: random numbers are the same in any case.
        pack_args_as_tuple: not needed.

    Raises:
        MpxlaError: it is no `nn.Sequential`, or there is no such strategy.
    """
    if not isinstance(sequential_module, nn.Sequential):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise MpxlaError(
            f"{at_script_line()}: checkpoint_sequential takes an nn.Sequential, not a "
            f"{type(sequential_module).__name__}; use checkpoint for other modules."
        )
    mark = _mark(sequential_module, strategy, "checkpoint_sequential")
    if current_recorder() is not None:
        with _marked(sequential_module, mark):
            return sequential_module(input)
    for layer in sequential_module:
        input = checkpoint(layer, input, preserve_rng_state=preserve_rng_state)
    return input


def _checked(module: Any, call: str) -> nn.Module:
    if not isinstance(module, nn.Module):
        raise MpxlaError(
            f"{at_script_line()}: {call} takes a module of the model, not a "
            f"{type(module).__name__}."
        )
    return module


def _mark(module: nn.Module, strategy: str, call: str) -> Checkpointed:
    group = _GROUP.fullmatch(strategy) if isinstance(strategy, str) else None  # pyright: ignore[reportUnnecessaryIsInstance]
    if strategy not in ("each", "contiguous") and group is None:
        raise MpxlaError(
            f"{at_script_line()}: {call}: there is no strategy {strategy!r}. Give each, contiguous "
            f"or group_<x> with a number of layers x, such as group_2."
        )
    if not isinstance(module, nn.Sequential):
        return Checkpointed()
    sizes = {"each": 1, "contiguous": None}
    return Checkpointed(is_whole=False, group_size=int(group[1]) if group else sizes[strategy])


@contextlib.contextmanager
def _marked(module: nn.Module, mark: Checkpointed) -> Generator[None]:
    """Marks a module for one call of it."""
    before = module.__dict__.get(CHECKPOINTED)
    module.__dict__[CHECKPOINTED] = mark
    try:
        yield
    finally:
        if before is None:
            del module.__dict__[CHECKPOINTED]
        else:
            module.__dict__[CHECKPOINTED] = before
