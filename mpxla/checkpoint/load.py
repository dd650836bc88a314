"""`resume_from_checkpoint`: any checkpoint into the wrapped model and optimizer, on any topology.

resolve   every rank reads the tag and the manifest, and all must have found the same
verify    the ranks share the files among them and check every byte
fit       names and shapes are compared with the model
load      every rank reads what it holds, at once or, before the first step, when the model is
          partitioned
"""

import json
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mpxla.checkpoint.commit import check_share, find_partial, partial_tags, read_manifest
from mpxla.checkpoint.content import model_names
from mpxla.checkpoint.files import check_zip, load_object
from mpxla.checkpoint.full import StateSource, open_state
from mpxla.checkpoint.layout import (
    PARAM_GROUPS,
    PARTITION,
    USER_CONTENT,
    check_tag,
    full_file,
    full_user_content,
    partial_folder,
    rank_file,
    rank_info,
    read_newest,
)
from mpxla.checkpoint.random_state import set_random_states, set_random_states_of_another_rank
from mpxla.checkpoint.save import finish_pending
from mpxla.checkpoint.shards import ShardReader, index_of
from mpxla.checkpoint.together import ObjectExchange, together
from mpxla.errors import CheckpointError
from mpxla.log import get_logger
from mpxla.nn.distribute import without_shards
from mpxla.nn.shards import Shard
from mpxla.parallel.model import DistributedModel
from mpxla.session import Session, current

__all__ = ["resume_from_checkpoint"]

Translate = Callable[[Mapping[str, Any]], Mapping[str, Any]]


def resume_from_checkpoint(
    path: str | os.PathLike[str],
    tag: str | None = None,
    partial: bool = True,
    strict: bool = True,
    load_optimizer: bool = True,
    load_sharded_optimizer_state: bool = True,
    translate_function: Translate | None = None,
    load_optimizer_states: bool | None = None,
    weights_only: bool | None = None,
    model: DistributedModel | None = None,
) -> Any:
    """Loads a checkpoint; every rank must call it, after wrapping model and optimizer.

    Everything is checked at once, and the model's values and settings of the optimizer, such as
    learning rates, are loaded at once. The optimizer's state, and values of a model that has none
    yet (`smp.delay_param_initialization`), are loaded in the first step, when it is known which
    rank holds what. The number of stages and replicas may differ from when it was saved. Random
    states are those of the same rank if the topology is the same, else the host's of the replica's
    first rank. A checkpoint that is still being written in the background is waited for.
    (SMP API reference, "smp.resume_from_checkpoint".)

    Args:
        path: folder of the checkpoints.
        tag: which one; None takes the one that `newest` names.
        partial: a checkpoint of `save_checkpoint(partial=True)`; otherwise the file `<path>/<tag>`
            with the state dict of the plain model: of `torch.save`, `.safetensors`, or an
            `*.index.json` of Hugging Face. Its optimizer is not loaded.
        strict: whether missing and unexpected names are errors.
        load_optimizer: whether to load the optimizer's state.
        load_sharded_optimizer_state: belongs to sharded data parallelism; only True is supported.
        translate_function: of a full checkpoint: makes a state dict of the plain model of what the
            file holds. Called on every rank.
        load_optimizer_states: the name of `load_optimizer` in SMP 1.10.
        weights_only: refuse objects whose loading could run code. Without it, the configuration's
            `trust_checkpoints` decides. Extension of SMP's API.
        model: where to, with its first optimizer; needed where there are several distributed
            models. Extension of SMP's API.

    Returns:
        The user content, None where there is none.

    Raises:
        CheckpointError: on all ranks: there is no such checkpoint, a file is missing, truncated or
            altered (named), or it does not fit the model or the optimizer.
        MpxlaError: there are several models, and `model` does not say which.
    """
    session = current()
    if session.models is None:
        raise CheckpointError(
            "smp.resume_from_checkpoint was called before smp.DistributedModel; wrap model and "
            "optimizer first."
        )
    model = session.models.only("smp.resume_from_checkpoint") if model is None else model
    if not load_sharded_optimizer_state:
        raise CheckpointError(
            "load_sharded_optimizer_state=False belongs to sharded data parallelism with fp16; use "
            "load_optimizer=False to load no optimizer state."
        )
    if load_optimizer_states is not None:
        load_optimizer = load_optimizer_states
    if weights_only is None:
        weights_only = not session.config.trust_checkpoints
    exchange = ObjectExchange(session, "smp.resume_from_checkpoint")
    folder = Path(os.path.abspath(path))
    what = f"resuming from {folder}"
    loader: Any = None
    finish_pending(session)

    def resolve() -> Any:
        nonlocal loader
        name = check_tag(read_newest(folder) if tag is None else tag)
        if not partial:
            loader = _FullLoader(model, folder, name, strict, weights_only, translate_function)
        else:
            name = _partial_tag(folder, name) if tag is None else name
            loader = _PartialLoader(session, model, folder, name, strict, weights_only)
        return [str(folder), name, loader.fingerprint()]

    found = together(exchange, what, resolve)
    for rank, other in enumerate(found):
        if other != found[0]:
            raise CheckpointError(
                f"rank 0 found the checkpoint {found[0][1]!r} in {found[0][0]} and rank {rank} "
                f"{other[1]!r} in {other[0]}, and they are not the same; call "
                f"smp.resume_from_checkpoint with the same arguments and one shared folder."
            )
    together(exchange, what, lambda: loader.verify(session.rank, exchange.world_size))
    user_content: list[Any] = []

    def load() -> None:
        user_content.append(loader.load(load_optimizer and partial))

    together(exchange, what, load)
    get_logger().info("resumed from checkpoint %s in %s", found[0][1], folder)
    return user_content[0]


def _partial_tag(folder: Path, newest: str) -> str:
    """The newest partial checkpoint; `newest` may name a full one."""
    tags = partial_tags(folder)
    if not partial_folder(folder, newest).exists() and full_file(folder, newest).exists() and tags:
        return tags[-1]
    return newest


def _check_fit(
    model: DistributedModel,
    shapes: Mapping[str, tuple[int, ...]],
    find: Callable[[Sequence[str]], str | None],
    strict: bool,
    where: Path,
) -> dict[str, str]:
    """Name in the model -> name in the checkpoint of everything that is in both.

    Raises:
        CheckpointError: listing what is missing, unexpected or of another shape.
    """
    saved = {name: find(every) for name, every in model_names(model).items()}
    state = model.get_module().state_dict(keep_vars=True)
    own_shapes = {name: tuple(value.shape) for name, value in state.items()}
    own_shapes |= {name: shard.whole for name, shard in model.shards_of_tensors.items()}
    problems = []
    missing = [name for name, other in saved.items() if other is None]
    known = {n for every in model_names(model).values() for n in every} | set(saved.values())
    unexpected = [name for name in shapes if name not in known]
    if strict and missing:
        problems.append(f"it does not have {_some(missing)}")
    if strict and unexpected:
        problems.append(f"it has {_some(unexpected)}, which the model does not have")
    for name, other in saved.items():
        if other is not None and own_shapes[name] != shapes[other]:
            problems.append(
                f"{name} is {list(shapes[other])} in it and {list(own_shapes[name])} in the model"
            )
    if problems:
        raise CheckpointError(
            f"{where} does not fit the model: {'; '.join(problems)}. Build the model as it was, or "
            f"pass strict=False to load what fits by name."
        )
    return {name: other for name, other in saved.items() if other is not None}


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _copy_into(
    model: DistributedModel, names: Mapping[str, str], read: Callable[[str, Shard | None], Any]
) -> None:
    """Loads what this rank holds, and reads nothing else (of formats that allow it)."""
    local = set(names)
    if model.partitioned:
        local = {name for name, _ in model.local_named_parameters()}
        local |= {name for name, _ in model.local_named_buffers()}
    shards, canonical = model.shards_of_tensors, model.canonical_names
    divided = {n for n in names if canonical[n] in model.tensors.parts}
    for name in sorted(divided & local):  # one by one: together they may be more than a host has
        whole = {name: read(names[name], None)}
        model.load_values(without_shards(whole, shards, canonical), strict=False)
    values = {n: read(names[n], shards.get(n)) for n in names if n in local - divided}
    model.load_values(without_shards(values, shards, canonical), strict=False)


class _FullLoader:
    """A state dict of the plain model."""

    def __init__(
        self,
        model: DistributedModel,
        folder: Path,
        tag: str,
        strict: bool,
        weights_only: bool,
        translate: Translate | None,
    ):
        self._model = model
        self._file = full_file(folder, tag)
        if not self._file.exists() and partial_folder(folder, tag).exists():
            raise CheckpointError(
                f"{folder} has no full checkpoint {tag!r} but a partial one; pass partial=True."
            )
        self._user_file = full_user_content(folder, tag)
        self._weights_only = weights_only
        self._source: StateSource = open_state(self._file, weights_only, translate)
        shapes = self._source.shapes
        canonical = model.canonical_names
        tied = {n: {m for m in canonical if canonical[m] == c} for n, c in canonical.items()}

        def find(names: Sequence[str]) -> str | None:
            every = [*names, *(m for n in names for m in sorted(tied[n]))]
            return next((n for n in every if n in shapes), None)

        self._names = _check_fit(model, shapes, find, strict, self._file)

    def fingerprint(self) -> Any:
        """Equal on two ranks if they see the same checkpoint."""
        return self._file.stat().st_size

    def verify(self, rank: int, world_size: int) -> None:
        """The file was checked when it was opened, as far as its format allows."""
        if self._user_file.exists() and rank == 0:
            check_zip(self._user_file)

    def load(self, load_optimizer: bool) -> Any:
        """Loads the model, see `load_when_placed`; returns the user content."""
        model, read = self._model, self._source.read
        # The model takes its parts of whole tensors itself.
        model.load_when_placed(lambda: _copy_into(model, self._names, lambda name, _: read(name)))
        if not self._user_file.exists():
            return None
        return load_object(self._user_file, self._weights_only)


class _PartialLoader:
    """A partial checkpoint."""

    def __init__(
        self,
        session: Session,
        model: DistributedModel,
        folder: Path,
        tag: str,
        strict: bool,
        weights_only: bool,
    ):
        self._session, self._model = session, model
        topology, rank = session.topology, session.rank
        self._place = topology.rdp_rank(rank), topology.pp_rank(rank), topology.tp_rank(rank)
        self._folder = find_partial(folder, tag)
        self._weights_only = weights_only
        self._manifest = read_manifest(self._folder, tag)
        self._reader = ShardReader(self._folder, index_of(self._manifest))
        self._names: dict[str, str] = {}
        if self._manifest["has_model"]:
            index = self._reader.index
            self._names = _check_fit(
                model,
                index.shapes("model"),
                lambda names: index.saved_name("model", names),
                strict,
                self._folder,
            )

    def fingerprint(self) -> Any:
        """Equal on two ranks if they see the same checkpoint."""
        return zlib.crc32(json.dumps(self._manifest, sort_keys=True).encode())

    def verify(self, rank: int, world_size: int) -> None:
        """Checks this rank's share of the files."""
        check_share(self._folder, self._manifest, rank, world_size)

    def load(self, load_optimizer: bool) -> Any:
        """Loads everything, see `load_when_placed`; returns the user content."""
        model, optimizer = self._model, self._model.first_optimizer()
        if load_optimizer and optimizer is not None:
            self._check_optimizer(optimizer.kind)
            optimizer.contents.load_group_settings(load_object(self._folder / PARAM_GROUPS))
        elif load_optimizer and PARAM_GROUPS in self._manifest["files"]:
            get_logger().warning(
                "the optimizer's state in %s is not loaded, because no smp.DistributedOptimizer "
                "was made yet. To train on, make it before smp.resume_from_checkpoint; otherwise "
                "pass load_optimizer=False.",
                self._folder,
            )
        if not self._manifest["has_model"]:
            get_logger().warning(
                "no weights are loaded from %s: it was saved without a model. Pass it to "
                "smp.save_checkpoint as model=.",
                self._folder,
            )
        self._restore_partition()

        def load_values() -> None:
            if self._manifest["has_model"]:
                _copy_into(model, self._names, lambda n, s: self._reader.whole("model", n, "", s))
                self._load_own_buffers()

        def load_beside() -> None:
            if load_optimizer and optimizer is not None:
                optimizer.contents.load_entries(self._reader, self._names)
            num_bytes = self._reader.num_bytes_read
            get_logger().info("read %.1f MiB of %s", num_bytes / 2**20, self._folder)

        model.load_when_placed(load_values, load_beside)
        self._restore_random_states()
        return load_object(self._folder / USER_CONTENT, self._weights_only)

    def _check_optimizer(self, kind: str) -> None:
        if PARAM_GROUPS not in self._manifest["files"]:
            raise CheckpointError(
                f"{self._folder} was saved without an optimizer; pass load_optimizer=False."
            )
        saved = self._manifest.get("optimizer", kind)
        if saved != kind:
            raise CheckpointError(
                f"{self._folder} holds the state of {saved}, and this optimizer is {kind}. Build "
                f"the optimizer as it was, or pass load_optimizer=False to start it anew."
            )

    def _own_file(self, rdp_rank: int, pp_rank: int, tp_rank: int) -> dict[str, Any] | None:
        name = rank_file("rank", rank_info(pp_rank, tp_rank, rdp_rank))
        if name not in self._manifest["files"]:
            return None
        return load_object(self._folder / name)

    def _is_same_topology(self) -> bool:
        topology = self._session.topology
        sizes = {"pp": topology.pp_size, "tp": topology.tp_size, "rdp": topology.rdp_size}
        return self._manifest["topology"] == sizes

    def _restore_partition(self) -> None:
        is_placed = self._model.partitioned
        if not is_placed and self._is_same_topology() and PARTITION in self._manifest["files"]:
            self._model.restore_partition(load_object(self._folder / PARTITION))

    def _restore_random_states(self) -> None:
        if self._is_same_topology():
            own = self._own_file(*self._place)
            assert own is not None, "every rank wrote its file"
            set_random_states(own["random"], self._session.backend)
            return
        own = self._own_file(self._place[0], 0, 0) or self._own_file(0, 0, 0)
        if own is not None:
            set_random_states_of_another_rank(own["random"])

    def _load_own_buffers(self) -> None:
        """Buffers of this replica, where replicas are as they were."""
        replica, stage, part = self._place
        if replica == 0 or not self._is_same_topology():
            return
        local = {name for name, _ in self._model.get_module().named_buffers()}
        stages = [stage]
        if self._model.partitioned:
            local = {name for name, _ in self._model.local_named_buffers()}
        else:  # the rank has all of them, and it is not known yet which it keeps
            stages = list(range(self._session.topology.pp_size))
        for stage in stages:
            own = self._own_file(replica, stage, part)
            if own is not None and own["buffers"].keys() <= local:
                self._model.load_values(own["buffers"], strict=False)
