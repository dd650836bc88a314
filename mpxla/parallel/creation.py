"""How models are created: `smp.delay_param_initialization` and `smp.model_creation`."""

import contextlib
from collections.abc import Generator
from typing import Any

import torch

from mpxla.errors import ConfigError
from mpxla.nn.distribute import mark_modules
from mpxla.stage.delayed import build_delayed

__all__ = ["delay_param_initialization", "model_creation"]


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
        zero_init: belongs to sharded data parallelism, which is not available yet.
        **tensor_parallel_config: settings of tensor parallelism; without it they have no effect.

    Raises:
        ConfigError: a missing feature was asked for, or a setting is unknown.
    """
    if zero_init:
        raise ConfigError(
            "smp.model_creation(zero_init=True): sharded data parallelism is not available yet; "
            "leave it False."
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
