"""A partial checkpoint as one state dict, outside of any job (path given by SMP's scripts)."""

import os
from pathlib import Path

import torch

from mpxla.checkpoint.commit import find_partial, read_manifest
from mpxla.checkpoint.layout import check_tag, read_newest
from mpxla.checkpoint.shards import ShardReader, index_of
from mpxla.errors import CheckpointError

__all__ = ["get_full_state_dict_from_sharded_data_parallel_checkpoint"]


def get_full_state_dict_from_sharded_data_parallel_checkpoint(
    path: str | os.PathLike[str], tag: str | None = None, dtype: torch.dtype | None = None
) -> dict[str, torch.Tensor]:
    """The plain model's state dict of a partial checkpoint; needs no job and no device.

    Checkpoints of any topology are taken. (SMP's scripts,
    "sharded_data_parallel_checkpoint".)

    Args:
        path: folder of the checkpoints, as given to `smp.save_checkpoint`.
        tag: which one; None takes the one that `newest` names.
        dtype: of floating point tensors; None keeps what was saved.

    Returns:
        Tensors on the host by name; names of one tied parameter share it.

    Raises:
        CheckpointError: there is no such checkpoint, it holds no model, or something is missing.
    """
    folder = Path(os.path.abspath(path))
    name = check_tag(read_newest(folder) if tag is None else tag)
    found = find_partial(folder, name)
    manifest = read_manifest(found, name)
    if not manifest["has_model"]:
        raise CheckpointError(
            f"{found} was saved without a model; pass model= to smp.save_checkpoint."
        )
    reader = ShardReader(found, index_of(manifest))
    full: dict[str, torch.Tensor] = {}
    for one in reader.index.shapes("model"):
        value = reader.whole("model", one).clone()
        is_cast = dtype is not None and value.is_floating_point()
        full[one] = value.to(dtype) if is_cast else value
    return full | {alias: full[one] for alias, one in reader.index.aliases.items()}
