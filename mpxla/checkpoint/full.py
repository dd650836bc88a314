"""Full checkpoints: one file with the plain model's state dict, as anybody reads and writes it.

Read are files of `torch.save`, `.safetensors`, and the `*.index.json` with which Hugging Face names
the files of a large model. They are mapped: a rank reads what it needs of them.
"""

import json
from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mpxla.checkpoint.commit import record_newest
from mpxla.checkpoint.files import (
    check_zip,
    is_zip,
    load_object,
    remove_stale,
    replace_files,
    serialize,
)
from mpxla.checkpoint.layout import full_file, full_user_content
from mpxla.checkpoint.together import Exchange, together
from mpxla.errors import CheckpointError
from mpxla.parallel.compute_dtype import in_dtype
from mpxla.parallel.model import DistributedModel
from mpxla.session import Session

__all__ = ["StateSource", "open_state", "save_full"]


def save_full(
    session: Session,
    exchange: Exchange,
    path: Path,
    tag: str,
    model: DistributedModel | None,
    user_content: Any,
    dtype: torch.dtype | None = None,
) -> None:
    """Writes a full checkpoint; every rank must call it. Rank 0 gathers the model.

    The user content is that of rank 0; `dtype` is that of `save_checkpoint`.

    Raises:
        CheckpointError: rank 0 cannot write; raised on all, and earlier checkpoints stay. Or
            `dtype` is given with masters of split parameters.
    """
    topology = session.topology
    if model is None:
        raise CheckpointError("a full checkpoint (partial=False) is of a model; pass model=.")
    if dtype is not None and topology.tp_size > 1 and model.store.has_copies:
        raise CheckpointError(
            f"smp.save_checkpoint(partial=False, dtype={dtype}): masters of split parameters are "
            f"not put together yet (tensor_parallel_degree: {topology.tp_size}); save without "
            f"dtype=, or save a partial checkpoint, which keeps the masters."
        )
    # Parts of parameters come from all ranks.
    is_divided = bool(model.tensors.shards)
    taking_part = range(session.env.world_size) if is_divided else topology.mp_group(0)
    state = model.state_dict(gather_to_rank0=True) if session.rank in taking_part else {}
    if dtype is not None:
        state = in_dtype(model.module, {**state, **_gather_masters(session, model)}, dtype)

    def write() -> None:
        if session.rank != 0:
            return
        path.mkdir(parents=True, exist_ok=True)
        for file in (full_file(path, tag), full_user_content(path, tag)):
            remove_stale(file)
        content = serialize(
            user_content, "user_content", session.config.trust_checkpoints, has_to_load=True
        )
        replace_files(
            {
                full_user_content(path, tag): lambda file: file.write(content),
                full_file(path, tag): lambda file: torch.save(state, file),
            }
        )
        record_newest(path, tag)

    together(exchange, f"saving full checkpoint {tag!r} in {path}", write)


def _gather_masters(session: Session, model: DistributedModel) -> dict[str, torch.Tensor]:
    """What 16-bit parameters round, whole, by every name of theirs; on rank 0, {} elsewhere.

    All ranks call it: with ZeRO-1 the pieces of a master are on all replicas.
    """
    store, topology = model.store, session.topology
    if not store.has_copies:
        return {}
    ranks = topology.world_group() if store.is_divided else topology.pp_group(0)
    if session.rank not in ranks:
        return {}
    copies = list(store.copies())
    store.renew([copy.name for copy in copies])
    values = session.backend.get(session.backend.adopt([copy.parameter for copy in copies]))
    own = [(c.name, c.shape, c.extent, v) for c, v in zip(copies, values, strict=True)]
    if session.rank != 0:
        session.state_objects.send(own, 0)
        return {}
    others = (session.state_objects.recv_from(rank) for rank in ranks if rank != 0)
    whole: dict[str, torch.Tensor] = {}
    for name, shape, extent, value in chain(own, *others):
        target = whole.setdefault(name, torch.empty(shape, dtype=value.dtype))
        target.view(-1)[slice(*extent) if extent else slice(None)] = value.reshape(-1)
    names = model.canonical_names.items()
    return {name: whole[canonical] for name, canonical in names if canonical in whole}


class StateSource(NamedTuple):
    """A state dict on the disk."""

    shapes: Mapping[str, tuple[int, ...]]
    """By name."""
    read: Callable[[str], torch.Tensor]
    """One tensor, on the host; may be mapped, so copy before writing to it."""


def open_state(
    path: Path,
    weights_only: bool = True,
    translate: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None,
) -> StateSource:
    """Opens a state dict of the plain model, of `torch.save`, `.safetensors` or `*.index.json`.

    `translate` makes the plain model's state dict of what the file holds.

    Raises:
        CheckpointError: the file is missing, damaged or no state dict; names it.
    """
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; check the path and the tag.")
    if path.name.endswith(".index.json"):
        source = _several(path, weights_only)
    elif path.suffix == ".safetensors":
        source = _safetensors(path)
    else:
        check_zip(path)
        values = load_object(path, weights_only, mmap=is_zip(path))
        return _loaded(_tensors(path, values if translate is None else translate(values)))
    if translate is not None:
        values = {name: source.read(name) for name in source.shapes}
        source = _loaded(_tensors(path, translate(values)))
    return source


def _loaded(values: Mapping[str, torch.Tensor]) -> StateSource:
    """Tensors that are mapped from a file."""
    return StateSource(
        {name: tuple(value.shape) for name, value in values.items()}, values.__getitem__
    )


def _safetensors(path: Path) -> StateSource:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise CheckpointError(
            f"{path} needs the package safetensors; install it with pip install safetensors."
        ) from error
    try:
        file = safe_open(path, framework="pt")
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} cannot be read, it may be truncated or altered: {error}"
        ) from error
    return StateSource(shapes, file.get_tensor)


def _several(index: Path, weights_only: bool) -> StateSource:
    """Several files that share the names of one model."""
    try:
        places: dict[str, str] = json.loads(index.read_text())["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{index} is no index of model files (it has no weight_map); pass the file that "
            f"names the parts, such as model.safetensors.index.json."
        ) from error
    files = {file: open_state(index.parent / file, weights_only) for file in set(places.values())}
    missing = [name for name, file in places.items() if name not in files[file].shapes]
    if missing:
        raise CheckpointError(
            f"{index} says that {missing[0]} is in {places[missing[0]]}, which does not have "
            f"it; fetch the files again."
        )
    shapes = {name: files[file].shapes[name] for name, file in places.items()}
    return StateSource(shapes, lambda name: files[places[name]].read(name))


def _tensors(path: Path, values: Any) -> dict[str, torch.Tensor]:
    if not isinstance(values, Mapping):
        raise CheckpointError(
            f"{path} holds a {type(values).__name__}, not a state dict; save model.state_dict()."
        )
    for name, value in values.items():
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(
                f"{path} is no state dict of a model: {name!r} is a {type(value).__name__}. If the "
                f"state dict is inside, pass translate_function=lambda saved: saved['model']."
            )
    return dict(values)
