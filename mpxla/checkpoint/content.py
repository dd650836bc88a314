"""What a checkpoint holds of a model and an optimizer, as slots on this rank.

Values stay where they are until they are asked for. This module must not know files.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from mpxla.checkpoint.shards import Slot
from mpxla.errors import CheckpointError
from mpxla.nn.shards import Shard
from mpxla.parallel.model import DistributedModel
from mpxla.parallel.optimizer import DistributedOptimizer

__all__ = ["Inventory", "local_inventory", "model_names"]


class Inventory(NamedTuple):
    """What this rank can write."""

    values: dict[Slot, torch.Tensor]
    """Tensors that any of their holders may write."""
    numbers: list[tuple[str, str, Any]]
    """(parameter, state key, number) of the optimizer."""
    own: dict[str, torch.Tensor]
    """Buffers of this replica, which differ between replicas."""


def model_names(model: DistributedModel) -> dict[str, list[str]]:
    """Every parameter and persistent buffer, by its one name: all its names.

    Raises:
        CheckpointError: a module has state that is no tensor.
    """
    canonical, first = model.canonical_names, model.tensors.names_now
    names: dict[str, list[str]] = {}
    for name, value in model.get_module().state_dict(keep_vars=True).items():
        if name not in canonical or not isinstance(value, torch.Tensor):
            raise CheckpointError(
                f"the model's state {name!r} is no parameter or buffer (get_extra_state), which "
                f"checkpoints cannot hold; keep it in user_content, or use "
                f"smp.save(model.state_dict(), ...) and model.load_state_dict."
            )
        names.setdefault(first[canonical[name]], []).append(name)
    return names


def local_inventory(
    model: DistributedModel | None, optimizer: DistributedOptimizer | None, is_first_replica: bool
) -> Inventory:
    """What this rank holds, after partitioning; a checkpoint's buffers are the first replica's."""
    values: dict[Slot, torch.Tensor] = {}
    own: dict[str, torch.Tensor] = {}
    if model is not None:
        names = model_names(model)
        canonical, state = model.canonical_names, model.tensors
        for name, parameter in model.local_named_parameters():
            one = canonical[name]
            shard, divided = model.shards_of_tensors.get(one), state.shards.get(one)
            held, offset = state.held(one), 0 if divided is None else divided.extent[0]
            values[_slot("model", name, "", held, parameter.shape, offset, shard)] = held
        for name, buffer in model.local_named_buffers():
            if name not in names:
                continue
            if is_first_replica:
                values[_slot("model", name, "", buffer)] = buffer
            else:
                own[name] = buffer
    numbers: list[tuple[str, str, Any]] = []
    for piece in optimizer.contents.entries() if optimizer is not None else ():
        if isinstance(piece.value, torch.Tensor):
            values[_slot("optimizer", *piece)] = piece.value
        elif piece.value is None or isinstance(piece.value, bool | int | float):
            numbers.append((piece.name, piece.key, piece.value))
        else:
            raise CheckpointError(
                f"the optimizer's state {piece.key!r} of {piece.name} is a "
                f"{type(piece.value).__name__}; checkpoints hold tensors, numbers, and lists and "
                f"dictionaries of them. Save with "
                f"smp.save(optimizer.local_state_dict(), ...) instead."
            )
    return Inventory(values, numbers, own)


def _slot(
    kind: str,
    name: str,
    key: str,
    value: torch.Tensor,
    shape: Sequence[int] | None = None,
    offset: int = 0,
    shard: Shard | None = None,
) -> Slot:
    dtype = str(value.dtype).removeprefix("torch.")
    if shard is not None:
        return Slot(kind, name, key, dtype, shard.whole, offset, value.numel(), shard.place)
    whole = tuple(value.shape if shape is None else shape)
    return Slot(kind, name, key, dtype, whole, offset, value.numel())
