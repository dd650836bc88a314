"""Which modules `DistributedModel` can take.

What a module is made of is known when it is wrapped; the text of an error that capture would raise
later, in the middle of torch, would not say it. This module must not know how models are captured.
"""

from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from mpxla.errors import ConfigError, MpxlaError

__all__ = ["check_module", "check_options"]


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
