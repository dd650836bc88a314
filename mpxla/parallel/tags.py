"""Which pipeline rank the user wants a module on: `smp.partition` and `smp.set_partition`.

Tags are put on modules when they are created, before any session exists, so they live on the
modules themselves.
"""

import contextlib
from collections.abc import Generator
from typing import Any

from torch import nn

from mpxla.errors import MpxlaError, PartitionError
from mpxla.nn.marks import marking

__all__ = ["partition", "partition_pins", "set_partition"]

_TAG = "_mpxla_partition"


@contextlib.contextmanager
def partition(index: int) -> Generator[None]:
    """Places the modules created inside on pipeline rank `index`; the innermost context wins.

    Ignored with `auto_partition: True`. (SMP API reference, "smp.partition".)

    Args:
        index: pipeline rank, below `pipeline_parallel_degree`.

    Raises:
        PartitionError: the index is out of range.
    """
    _check_index(index)
    with marking(_TAG, index):
        yield


def set_partition(module: nn.Module, index: int) -> None:
    """Places an existing module, with everything in it, on pipeline rank `index`.

    Call it after `DistributedModel` and before the first step. (Seen in AWS's example scripts.)

    Raises:
        PartitionError: the index is out of range.
        MpxlaError: the model has been partitioned already.
    """
    from mpxla.session import current_models

    _check_index(index)
    models = current_models()
    if models is not None and models.placed_with(module) is not None:
        raise MpxlaError(
            "smp.set_partition was called after the model was partitioned; call it before the "
            "first step."
        )
    for part in module.modules():
        part.__dict__[_TAG] = index


def _check_index(index: Any) -> None:
    from mpxla.session import current, is_initialized

    if not isinstance(index, int) or isinstance(index, bool) or index < 0:
        raise PartitionError(f"smp.partition({index!r}): the index is an integer from 0.")
    if is_initialized() and index >= current().config.pipeline_parallel_degree:
        degree = current().config.pipeline_parallel_degree
        raise PartitionError(
            f"smp.partition({index}): pipeline_parallel_degree is {degree}, so valid indices are "
            f"0 to {degree - 1}."
        )


def partition_pins(model: nn.Module, prefix: str) -> dict[str, int]:
    """Module path -> pipeline rank of every tagged module of a model.

    A module on its own tag or none; nested ones without a tag follow their parent by path.
    """
    pins: dict[str, int] = {}
    for path, module in model.named_modules():
        tag = module.__dict__.get(_TAG)
        if tag is not None:
            pins[f"{prefix}.{path}" if path else prefix] = tag
    return pins
