"""Which modules `DistributedModel` can take, and plain ones in the place of scripted ones.

What a module is made of is known when it is wrapped; the text of an error that capture would raise
later, in the middle of torch, would not say it.

Tensors of modules that `torch.jit.script` or `trace` have made belong to an object of C++, in which
nobody can exchange them when they move to a device. A plain module takes the place of such a one in
the model: it has the tensors under the same names, and lends them to that object for each forward.
This module must not know how models are captured.
"""

import io
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from mpxla.errors import ConfigError, MpxlaError
from mpxla.log import warn_once

__all__ = ["check_module", "check_options", "without_scripts"]


def check_module(module: Any) -> None:
    """Checks that a model is made of plain modules.

    Raises:
        MpxlaError: it is none, is wrapped by another library part, or has parameters
            or observers without a shape.
    """
    if not isinstance(module, nn.Module):
        raise MpxlaError(
            f"smp.DistributedModel wraps a torch.nn.Module, not {type(module).__name__}."
        )
    if isinstance(module, nn.parallel.DistributedDataParallel):
        raise MpxlaError(
            "the model is wrapped in DistributedDataParallel; give smp.DistributedModel the plain "
            "module and set ddp: True in the configuration."
        )
    for path, part in module.named_modules():
        where = f"{path} of the model" if path else "the model"
        seen = getattr(part, "min_val", None)
        is_observer = type(part).__module__.startswith("torch.ao.quantization")
        if is_observer and isinstance(seen, torch.Tensor) and not seen.numel():
            raise MpxlaError(
                f"{where} is an observer (prepare_qat) that takes the shape of its buffers from "
                f"the first batch; call the model once on a batch before smp.DistributedModel."
            )
    for name, parameter in module.named_parameters():
        if is_lazy(parameter):
            raise MpxlaError(
                f"parameter {name} has no shape yet (a lazy module); call the model once on a "
                f"batch before smp.DistributedModel."
            )


def check_options(
    trace_device: str, trace_execution_times: bool, backward_passes_per_step: Any
) -> None:
    """Checks options of `DistributedModel`, of that name.

    Raises:
        ConfigError: one is not available.
    """
    if trace_device not in ("gpu", "cpu"):
        raise ConfigError(f"trace_device is {trace_device!r}; use 'gpu' or 'cpu'.")
    if trace_execution_times and trace_device == "cpu":
        raise ConfigError("trace_execution_times=True does not go with trace_device='cpu'.")
    if not isinstance(backward_passes_per_step, int) or backward_passes_per_step < 1:
        raise ConfigError(
            f"backward_passes_per_step is {backward_passes_per_step!r}; use an integer from 1."
        )


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

    def _lend(self) -> None:
        for name, tensor in (*self._parameters.items(), *self._buffers.items()):
            self._borrower.setattr(name, tensor)
        for part in self.children():
            part._lend()  # pyright: ignore[reportCallIssue]

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
        self._lend()
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
                    made[id(part)] = _replaced(f"{path}.{name}" if path else name, part)
                setattr(module, name, made[id(part)])
    return model


def _replaced(where: str, script: torch.jit.ScriptModule) -> nn.Module:
    warn_once(
        f"scripted {where}",
        f"{where} is scripted (torch.jit): a plain module with its parameters takes its place, and "
        f"the script runs operator by operator while a step is captured.",
    )
    return _Scripted(script)
