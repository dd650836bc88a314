"""How models are created: `smp.delay_param_initialization` and `smp.model_creation`."""

import contextlib
from collections.abc import Generator
from typing import Any

import torch
from torch import nn

from mpxla.delayed import build_delayed
from mpxla.errors import ConfigError
from mpxla.nn.distribute import mark_modules
from mpxla.session import current

__all__ = ["delay_param_initialization", "model_creation", "register_parameter"]


@contextlib.contextmanager
def delay_param_initialization(enabled: bool = True) -> Generator[None]:
    """A model built in this block takes no memory; every rank then makes only its own parameters.

    They get the values that they would have without the block, under the same seed, and random
    generators are afterwards where they would be. What the block cannot do: take values of a
    parameter to NumPy, move parameters to a device, and let code after the block initialize them.
    (SMP API reference, "smp.delay_param_initialization".)

    Args:
        enabled: whether to delay; False changes nothing.
    """
    with build_delayed() if enabled else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def model_creation(
    tensor_parallelism: bool = False,
    dtype: torch.dtype | None = None,
    zero_init: bool = False,
    **tensor_parallel_config: Any,
) -> Generator[None]:
    """`delay_param_initialization`, with another default dtype, and `tensor_parallelism`.

    (SMP API reference, "smp.model_creation".)

    Args:
        tensor_parallelism: as a block of `smp.tensor_parallelism` around it. Ranks that share
            tensors make them in `DistributedModel` then, and keep their parts.
        dtype: of floating point parameters; None keeps torch's default.
        zero_init: for sharded data parallelism only: no rank ever has more than its parts of the
            parameters and one whole parameter. Every model built here is made that way.
        **tensor_parallel_config: settings of tensor parallelism; without it they have no effect.

    Raises:
        ConfigError: a missing feature was asked for, or a setting is unknown.
    """
    if zero_init and current().config.sharded_data_parallel_degree == 1:
        raise ConfigError(
            "smp.model_creation(zero_init=True) belongs to sharded data parallelism, which the key "
            "sharded_data_parallel_degree switches on; leave it False, or set the key."
        )
    marked: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if tensor_parallelism or tensor_parallel_config:  # checked in any case
        marked = mark_modules("smp.model_creation", tensor_parallelism, tensor_parallel_config)
    before = torch.get_default_dtype()
    if dtype is not None:
        torch.set_default_dtype(dtype)
    try:
        with marked, build_delayed():
            yield
    finally:
        torch.set_default_dtype(before)


def register_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Says that `module.forward` reads a parameter of another module; without effect here.

    Sharded data parallelism gathers what the captured step reads, whoever owns it, so a parameter
    that was not registered is gathered as well. (SMP API reference, "smp.register_parameter".)

    Args:
        module: reads the parameter.
        parameter: of another module.

    Raises:
        ConfigError: they are something else.
    """
    # Scripts pass anything.
    if not isinstance(module, nn.Module) or not isinstance(parameter, nn.Parameter):  # pyright: ignore
        raise ConfigError(
            f"smp.register_parameter takes a module and a parameter that its forward reads, not a "
            f"{type(module).__name__} and a {type(parameter).__name__}."
        )
