"""Splits a model over the ranks of a tensor-parallel group: `smp.set_tensor_parallelism`.

Before `DistributedModel` wraps a model, the layers that the user asked for get smaller parameters,
with the values that they had. Everything else (cutting, schedules, optimizers) sees a model that is
smaller on each rank. (SMP made new layers with new weights.)
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from mpxla.comm.transport import Members
from mpxla.errors import ConfigError
from mpxla.log import get_logger
from mpxla.nn.layers import divide_size, find_shards, split
from mpxla.nn.plans import Unit, units_of
from mpxla.nn.shards import Shard
from mpxla.stage.delayed import is_delayed

__all__ = ["distribute", "set_tensor_parallelism", "without_shards"]

_SWITCH = "_mpxla_tensor_parallelism"
_ANY_SETTING = frozenset(
    {
        *("fused_softmax", "fused_bias_gelu", "fused_dropout", "flash_attention"),
        *("distribute_embedding",),
    }
)
"""Settings that say how SMP's kernels compute; XLA fuses as it likes, and embeddings are split."""


def set_tensor_parallelism(module: nn.Module, enabled: bool = True, **settings: Any) -> None:
    """Says that a module's layers are to be split over the ranks of the tensor-parallel group.

    Call it before `DistributedModel`, on the whole model or on a part; the innermost call counts.
    Which layers are split follows from the model: transformers' own plan (`tp_plan`), or mpxla's
    for models that have none (GPT-2, BERT, RoBERTa). What cannot be split stays whole, and a log
    line says why. Loaded weights stay: every rank keeps its part of them. (SMP API reference,
    "smp.set_tensor_parallelism", where weights are drawn anew.)

    Args:
        module: the model, or a part of it.
        enabled: False leaves it whole.
        **settings: SMP's settings of fused kernels, without effect.

    Raises:
        ConfigError: an unknown setting.
    """
    unknown = sorted(set(settings) - _ANY_SETTING)
    if unknown:
        raise ConfigError(
            f"smp.set_tensor_parallelism has no setting {unknown[0]!r} here; the layers compute as "
            f"the model has them, and what they compute is set in the model's configuration."
        )
    vars(module)[_SWITCH] = bool(enabled)


def distribute(model: nn.Module, group: Members) -> dict[str, Shard]:
    """Splits what the user asked for, in place. All ranks of the group call it.

    Args:
        model: the whole model, before it is wrapped.
        group: the tensor-parallel group.

    Returns:
        Split parameters by the first of their names, with the part that this rank has.

    Raises:
        ConfigError: the model has no values yet.
    """
    size = len(group.ranks)
    if size == 1:
        return {}
    _check_values(model)
    _equalize(model, group)
    chosen = [unit for unit in units_of(model, size) if _is_enabled(model, unit)]
    index = group.ranks.index(group.transport.rank)
    known: dict[int, Shard] = {}
    for unit in chosen:
        if unit.problem is None:
            for entry in unit.entries:
                split(entry.module, entry.style, index, size, entry.blocks, known)
            for module, name in {(id(m), n): (m, n) for m, n in unit.sizes}.values():
                divide_size(module, name, size)
    _report(model, chosen, size, index)
    names = {id(p): n for n, p in model.named_parameters()}
    return find_shards(model, names)


def without_shards(
    values: Mapping[str, Any], shards: Mapping[str, Shard], names: Mapping[str, str]
) -> dict[str, Any]:
    """A state dict with this rank's parts in the place of whole tensors.

    Args:
        values: by any name.
        shards: by canonical name.
        names: any name -> canonical name.
    """
    found = dict(values)
    for name, value in values.items():
        shard = shards.get(names.get(name, name))
        if shard is not None and tuple(value.shape) == shard.whole:
            found[name] = shard.take(value)
    return found


def _check_values(model: nn.Module) -> None:
    tensors = (*model.named_parameters(), *model.named_buffers())
    missing = [name for name, tensor in tensors if tensor.is_meta or is_delayed(tensor)]
    if missing:
        raise ConfigError(
            f"tensor parallelism splits the values of a model, and {missing[0]} has none yet "
            f"(smp.delay_param_initialization, or the device meta). Build the model without delay."
        )


def _equalize(model: nn.Module, group: Members) -> None:
    """All ranks get the values of the first: parts of different wholes would fit nowhere."""
    for tensor in (*model.parameters(), *model.buffers()):
        value = tensor.detach()
        given = group.transport.broadcast(value, group.ranks[0], group.ranks).result()
        with torch.no_grad():
            value.copy_(given)


def _is_enabled(model: nn.Module, unit: Unit) -> bool:
    """What the innermost module around all layers of a unit says."""
    return all(_switch_of(model, entry.path, unit.is_asked_for) for entry in unit.entries)


def _switch_of(model: nn.Module, path: str, enabled: bool) -> bool:
    for module in _way_to(model, path):
        enabled = vars(module).get(_SWITCH, enabled)
    return enabled


def _way_to(model: nn.Module, path: str) -> Iterator[nn.Module]:
    yield model
    for name in path.split("."):
        model = model.get_submodule(name)
        yield model


def _report(model: nn.Module, units: Sequence[Unit], size: int, index: int) -> None:
    """Log lines of the first rank of the group: what is split, and what stays whole and why."""
    if index > 0:
        return
    done = [unit for unit in units if unit.problem is None]
    get_logger().info(
        "tensor parallelism: split %d of %d units of %s over %d ranks",
        len(done),
        len(units),
        type(model).__name__,
        size,
    )
    for reason, paths in _by_problem(units).items():
        more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        get_logger().warning(
            "tensor parallelism: %s%s stays whole on every rank: %s", paths[0], more, reason
        )
    if not units:
        get_logger().warning(
            "tensor parallelism: nothing is split. Call smp.set_tensor_parallelism(model) before "
            "smp.DistributedModel; it knows the models of transformers that have a tp_plan, GPT-2, "
            "BERT and RoBERTa."
        )


def _by_problem(units: Iterable[Unit]) -> dict[str, list[str]]:
    """Reason -> paths of the units that it keeps whole; reasons of blocks differ by a number."""
    found: dict[str, list[str]] = {}
    first: dict[str, str] = {}
    for unit in units:
        if unit.problem is not None:
            kind = "".join(c for c in unit.problem if not c.isdigit())
            found.setdefault(first.setdefault(kind, unit.problem), []).append(unit.path)
    return found
