"""Torch's exporter, prepared for steps: quiet, and with attributes and names as they are."""

import contextlib
import keyword
import logging
import warnings
from collections.abc import Generator
from contextlib import AbstractContextManager
from typing import Any

from torch import fx
from torch._export.passes import replace_autocast_with_hop_pass, replace_set_grad_with_hop_pass
from torch.export import _trace as torch_exporter
from torch.fx import graph
from torch.fx.experimental import proxy_tensor
from torch.nn.modules import module as nn_module

from mpxla.graph.exchanged import exchanged, restored

__all__ = ["exporter_prepared"]

_LOGGERS = ("torch.fx.experimental.symbolic_shapes", "torch._subclasses.fake_tensor")
"""What logs an error of the user's code with its own frames, before it is raised."""


@contextlib.contextmanager
def exporter_prepared() -> Generator[None]:
    """What holds of `torch.export.export` inside."""
    with (
        _quiet_export(),
        _attributes_left(),
        _registration_hooks_kept(),
        _attributes_named_by_keywords(),
        _modules_as_they_are(),
        _inlined_without_text(replace_autocast_with_hop_pass),
        _inlined_without_text(replace_set_grad_with_hop_pass),
    ):
        yield


@contextlib.contextmanager
def _quiet_export() -> Generator[None]:
    """Keeps torch from logging a page of graph for an error that `explain` puts in one line.

    And from warning of what it does itself (torch 2.13).
    """
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    # What it writes of an error to standard error.
    with warnings.catch_warnings(), exchanged(torch_exporter, print=lambda *_, **__: None):
        warnings.filterwarnings("ignore", r".isinstance\(treespec, LeafSpec\)", FutureWarning)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def _attributes_left() -> AbstractContextManager[None]:
    """Plain attributes stay as the function leaves them.

    Torch 2.13 puts back what was there before, so that nobody saw what a step leaves in them, and
    all versions warn of tensors, which `attributes_kept` looks after.
    """
    return exchanged(
        torch_exporter, _detect_attribute_assignment=lambda *_: contextlib.nullcontext()
    )


def _registration_hooks_kept() -> AbstractContextManager[None]:
    """Takes away the hook that export registers for all modules, and leaves when it fails.

    It holds the step's function, and so the model and the session.
    """
    return restored(nn_module._global_buffer_registration_hooks)  # pyright: ignore[reportPrivateUsage]


def _inlined_without_text(regions: Any) -> AbstractContextManager[None]:
    """Lets pieces between regions be put back one by one without Python text each time.

    Torch writes the text of the whole program after each piece, which takes a minute where
    `torch.func` has made some hundred regions without gradients; and once more after all.
    """
    inline = regions.node_inline_

    def inline_only(node: fx.Node) -> Any:
        with exchanged(fx.GraphModule, recompile=lambda module: None):
            return inline(node)

    return exchanged(regions, node_inline_=inline_only)


def _modules_as_they_are() -> AbstractContextManager[None]:
    """Shows modules themselves where some module of the model has two names.

    Torch shows stand-ins of other classes then, to tell which name was used: with one of these,
    `type(layer) is nn.Linear` is not true, and `self.__class__(...)` makes no module.
    """
    tracer: Any = getattr(proxy_tensor, "_ModuleStackTracer", None)
    if tracer is None:
        return contextlib.nullcontext()
    return exchanged(tracer, enable_attr_proxy=property(lambda _: False, lambda *_: None))


def _attributes_named_by_keywords() -> AbstractContextManager[None]:
    """Lets a module be called "class" or "in", as keys of a `ModuleDict` are.

    Export writes Python text that reads parameters; torch 2.9 writes `self.heads.class.weight`.
    """

    def format_target(base: str, target: str) -> str:
        for name in target.split("."):
            is_plain = name.isidentifier() and not keyword.iskeyword(name)
            base = f"{base}.{name}" if is_plain else f'getattr({base}, "{name}")'
        return base

    return exchanged(graph, _format_target=format_target)
