"""Plain modules in the places of those that `torch.jit.script` or `trace` have made.

Tensors of scripted modules belong to an object of C++, in which nobody can exchange them when they
move to a device. A plain module takes the place of such a one in the model: it has the tensors
under the same names, and lends them to that object for each forward. This module must not know how
models are captured.
"""

import io
from typing import Any

import torch
from torch import nn

from mpxla.graph.partition.modules import joined_path
from mpxla.log import warn_once

__all__ = ["without_scripts"]


class _Held(nn.Module):
    """The tensors of a scripted module and of its parts, which a borrower gets for each forward."""

    def __init__(self, script: torch.jit.ScriptModule, borrower: Any):
        super().__init__()
        for name, parameter in script.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        for name, buffer in script.named_buffers(recurse=False):
            self.register_buffer(name, buffer)
        self._borrower = borrower
        for name, part in script.named_children():
            self.add_module(name, _Held(part, borrower.getattr(name)))  # pyright: ignore[reportArgumentType]
        self.training = script.training
        self._take_from(borrower)
        self._take_from(script._c)  # pyright: ignore[reportPrivateUsage]

    def lend_parameters(self) -> None:
        """Gives the borrower what this module has for parameters and buffers now."""
        for name, tensor in (*self._parameters.items(), *self._buffers.items()):
            self._borrower.setattr(name, tensor)
        for part in self.children():
            part.lend_parameters()  # pyright: ignore[reportCallIssue]

    def _take_back(self) -> None:
        self._take_from(self._borrower)
        for part in self.children():
            part._take_back()  # pyright: ignore[reportCallIssue]

    def _take_from(self, holder: Any) -> None:
        for name in (*self._parameters, *self._buffers):
            holder.setattr(name, torch.empty(0))

    def train(self, mode: bool = True) -> Any:
        """As for any module."""
        if self._borrower.hasattr("training"):
            self._borrower.setattr("training", mode)
        return super().train(mode)


class _Scripted(_Held):
    """Runs a scripted module."""

    def __init__(self, script: torch.jit.ScriptModule):
        # A copy, whose code has not run: torch keeps what it has optimized for other tensors.
        saved = io.BytesIO()
        torch.jit.save(script, saved)
        saved.seek(0)
        super().__init__(script, torch.jit.load(saved)._c)  # pyright: ignore[reportPrivateUsage]
        # A method of torch's own would run the Python function that it is made of, when exported.
        self._run: Any = self._borrower._get_method("forward")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the scripted module computes, operator by operator."""
        self.lend_parameters()
        try:
            with torch.jit.optimized_execution(False):  # fused ones have derivatives of their own
                return self._run(*args, **kwargs)
        finally:
            self._take_back()


def without_scripts(model: Any) -> Any:
    """Puts plain modules in the places of scripted ones.

    Changes the model, and returns it or what takes its place. The scripted modules themselves have
    no values afterwards.
    """
    if isinstance(model, torch.jit.ScriptModule):
        return _replaced("the model", model)
    if not isinstance(model, nn.Module):
        return model
    made: dict[int, nn.Module] = {}
    for path, module in list(model.named_modules()):
        if isinstance(module, torch.jit.ScriptModule):
            continue
        for name, part in module.named_children():
            if isinstance(part, torch.jit.ScriptModule):
                if id(part) not in made:
                    made[id(part)] = _replaced(joined_path(path, name), part)
                setattr(module, name, made[id(part)])
    return model


def _replaced(where: str, script: torch.jit.ScriptModule) -> nn.Module:
    warn_once(
        f"scripted {where}",
        f"{where} is scripted (torch.jit): a plain module with its parameters takes its place, and "
        f"the script runs operator by operator while a step is captured.",
    )
    return _Scripted(script)
