"""`save_checkpoint`: SMP's folder of checkpoints, partial or full, now or in the background.

A partial checkpoint is written by all ranks, each its share of what it holds; nobody gathers
anything. In the background, training stands still only while values are copied to the host.
"""

import contextlib
import os
import secrets
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mpxla.checkpoint.commit import Written, abandon, prepare, write_partial
from mpxla.checkpoint.content import Inventory, local_inventory, model_names
from mpxla.checkpoint.files import save_object, serialize, write_file
from mpxla.checkpoint.full import save_full
from mpxla.checkpoint.layout import (
    PARAM_GROUPS,
    PARTITION,
    USER_CONTENT,
    check_tag,
    rank_file,
    rank_info,
)
from mpxla.checkpoint.random_state import get_random_states
from mpxla.checkpoint.shards import Slot, assign_writers
from mpxla.checkpoint.together import BackgroundExchange, Exchange, ObjectExchange, together
from mpxla.comm.handle import FailureWatch
from mpxla.errors import CheckpointError
from mpxla.log import warn_once
from mpxla.parallel.model import DistributedModel
from mpxla.parallel.optimizer import DistributedOptimizer
from mpxla.session import Session, current

__all__ = ["PendingCheckpoint", "finish_pending", "save_checkpoint"]


class PendingCheckpoint:
    """A checkpoint that is being written in the background.

    A failure shows in `wait`, in the next `smp.save_checkpoint` or `smp.resume_from_checkpoint`, or
    in `smp.shutdown`.
    """

    def __init__(self, work: Callable[[], None], watch: FailureWatch | None = None):
        self._work = work
        self._watch = watch
        self._error: BaseException | None = None
        # Not a daemon: a process that ends in order finishes its checkpoint.
        self._thread = threading.Thread(target=self._run, name="mpxla-checkpoint")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # it is raised in the main thread
            self._error = error
        finally:
            del self._work  # it holds the copied values

    @property
    def is_done(self) -> bool:
        """Whether writing has ended, well or not."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Waits until the checkpoint is complete.

        Raises:
            CheckpointError: writing failed on some rank.
            PeerFailure: a rank died meanwhile.
        """
        with contextlib.nullcontext() if self._watch is None else self._watch.joining():
            self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            if self._watch is not None:
                self._watch.notice(error)
            raise error


def save_checkpoint(
    path: str | os.PathLike[str],
    tag: str,
    partial: bool = True,
    model: DistributedModel | None = None,
    optimizer: DistributedOptimizer | None = None,
    user_content: Any = None,
    translate_if_full: bool = True,
    num_kept_partial_checkpoints: int | None = None,
    asynchronous: bool = False,
    dtype: torch.dtype | None = None,
) -> PendingCheckpoint | None:
    """Saves a checkpoint; every rank must call it, after the first step.

    A partial checkpoint resumes under any number of stages and replicas. It is complete or not
    there: whatever happens while it is written, earlier checkpoints stay as they are, and `newest`
    names the last complete one. Random states are saved as well. Between the steps of a gradient
    accumulation (`backward_passes_per_step`) gradients are not saved.
    (SMP API reference, "smp.save_checkpoint".)

    Args:
        path: folder of the checkpoints, shared by all ranks.
        tag: name of this one; the same on all ranks. One of that name is replaced.
        partial: every rank writes its share, with optimizer state; otherwise rank 0 writes one file
            with the plain model's state dict, without optimizer.
        model: the distributed model, or None to save none.
        optimizer: the distributed optimizer, or None to save none.
        user_content: of rank 0: plain data (LR scheduler's state dict, number of steps, position in
            the data); `resume_from_checkpoint` returns it. Other objects are an error, unless the
            configuration says `trust_checkpoints`.
        translate_if_full: SMP's switch for names of Hugging Face; models keep their names here, so
            it changes nothing.
        num_kept_partial_checkpoints: older partial checkpoints beyond this number are deleted.
        asynchronous: return when values have been copied to the host, and write in the background.
            Waits for an earlier one that is still being written. Extension of SMP's API.
        dtype: of a full checkpoint: float32 gives the masters of 16-bit parameters, to the last
            bit; bfloat16 or float16 rounds what `bf16: True` would convert; None is the type that
            the model computes in. Extension of SMP's API.

    Returns:
        With `asynchronous`, the checkpoint under way; otherwise None.

    Raises:
        CheckpointError: on all ranks: arguments are wrong or differ between ranks, or something
            cannot be written on some rank.
    """
    session = current()
    finish_pending(session)
    folder = Path(os.path.abspath(path))
    what = f"saving checkpoint {tag!r} in {folder}"
    exchange = ObjectExchange(session, "smp.save_checkpoint")
    inventory = Inventory({}, [], {})

    def begin() -> dict[str, Any]:
        nonlocal inventory
        _check_objects(model, optimizer)
        text = check_tag(tag)
        if num_kept_partial_checkpoints is not None and num_kept_partial_checkpoints < 1:
            raise CheckpointError(
                f"num_kept_partial_checkpoints is {num_kept_partial_checkpoints}; keep at least 1, "
                f"or pass None to keep all."
            )
        if asynchronous and not partial:
            raise CheckpointError("asynchronous=True goes with partial=True only.")
        if dtype is not None and partial:
            raise CheckpointError(
                f"dtype={dtype} goes with partial=False only: a partial checkpoint keeps masters "
                f"beside 16-bit parameters, and resumes in either type."
            )
        if dtype not in (None, torch.float32, torch.bfloat16, torch.float16):
            raise CheckpointError(
                f"dtype is {dtype}; give torch.float32, torch.bfloat16 or torch.float16, or None."
            )
        if partial:
            is_first = session.topology.rdp_rank(session.rank) == 0
            inventory = local_inventory(model, optimizer, is_first)
        request: dict[str, Any] = {"path": str(folder), "tag": text, "partial": partial}
        request["model"], request["optimizer"] = model is not None, optimizer is not None
        request["num_kept"], request["asynchronous"] = num_kept_partial_checkpoints, asynchronous
        request["dtype"] = str(dtype)
        return {"request": request, "slots": list(inventory.values), "token": secrets.token_hex(8)}

    if session.models is not None and session.models.is_any_placed:
        with session.models.together("smp.save_checkpoint()", session.topology.world_group()):
            begun = together(exchange, what, begin)
    else:
        begun = together(exchange, what, begin)
    _check_equal([b["request"] for b in begun])
    tag, token = begun[0]["request"]["tag"], begun[0]["token"]
    if not partial:
        if optimizer is not None:  # as in SMP, whose scripts give it
            warn_once(
                "full checkpoint without optimizer",
                "smp.save_checkpoint(partial=False) saves the model alone: an optimizer that goes "
                "on from this checkpoint starts anew. Save with partial=True to resume training.",
            )
        return save_full(session, exchange, folder, tag, model, user_content, dtype)
    shares = assign_writers([b["slots"] for b in begun])
    part = _Part(session, inventory, shares[session.rank])

    def copy() -> None:
        if session.rank == 0:
            prepare(folder, tag, token)
        part.copy(model, optimizer, user_content)

    try:
        together(exchange, what, copy)
    except CheckpointError:
        if session.rank == 0:
            abandon(folder, tag, token)
        raise
    facts = part.facts(model, optimizer)

    def write(through: Exchange) -> None:
        kept = num_kept_partial_checkpoints
        write_partial(folder, tag, token, through, part.write, facts, kept)

    if not asynchronous:
        write(exchange)
        return None
    background = BackgroundExchange(session.transport)
    if session.lifeline is not None:
        session.lifeline.background = lambda: background.wait
    session.pending_checkpoint = PendingCheckpoint(lambda: write(background), session.lifeline)
    return session.pending_checkpoint


def finish_pending(session: Session) -> None:
    """Waits for the checkpoint that is being written in the background, if there is one."""
    pending, session.pending_checkpoint = session.pending_checkpoint, None
    if pending is not None:
        with session.progress.busy("the end of the checkpoint in the background"):
            pending.wait()


class _Part:
    """One rank's part of a partial checkpoint: first copied to the host, then written."""

    def __init__(self, session: Session, inventory: Inventory, share: list[Slot]):
        self._session = session
        self._inventory = inventory
        self._share = share
        topology, rank = session.topology, session.rank
        self._info = rank_info(
            topology.pp_rank(rank), topology.tp_rank(rank), topology.rdp_rank(rank)
        )
        self._tensors: dict[str, dict[str, torch.Tensor]] = {}
        self._own: dict[str, Any] = {}
        self._blobs: dict[str, bytes] = {}

    def copy(
        self, model: DistributedModel | None, optimizer: DistributedOptimizer | None, user: Any
    ) -> None:
        """Takes everything at this moment; afterwards training may go on."""
        values, own = self._inventory.values, self._inventory.own
        flat = self._session.backend.get([*(values[slot] for slot in self._share), *own.values()])
        for slot, copy in zip(self._share, flat, strict=False):
            self._tensors.setdefault(slot.kind, {})[slot.title] = copy
        buffers = dict(zip(own, flat[len(self._share) :], strict=True))
        self._own = {"random": get_random_states(self._session.backend), "buffers": buffers}
        if self._session.rank == 0:
            self._blobs[USER_CONTENT] = serialize(
                user, "user_content", self._session.config.trust_checkpoints, has_to_load=True
            )
            if optimizer is not None:
                settings = optimizer.contents.group_settings()
                self._blobs[PARAM_GROUPS] = serialize(settings, "the optimizer's settings")
            if model is not None:
                self._blobs[PARTITION] = serialize(model.partition_decision(), "the partition")

    def facts(
        self, model: DistributedModel | None, optimizer: DistributedOptimizer | None
    ) -> dict[str, Any]:
        """What the manifest says about all ranks."""
        topology = self._session.topology
        names = {} if model is None else model_names(model)
        return {
            "topology": {"pp": topology.pp_size, "tp": topology.tp_size, "rdp": topology.rdp_size},
            "aliases": {n: one for one, every in names.items() for n in every if n != one},
            "has_model": model is not None,
            "optimizer": None if optimizer is None else optimizer.kind,
        }

    def write(self, folder: Path) -> Written:
        """Writes this rank's files."""
        files = {}
        for kind, tensors in self._tensors.items():
            name = rank_file(kind, self._info)
            files[name] = save_object(folder / name, tensors)
        name = rank_file("rank", self._info)
        files[name] = save_object(folder / name, self._own)
        for name, blob in self._blobs.items():
            files[name] = write_file(folder / name, lambda file, blob=blob: file.write(blob))
        slots = [[*slot, rank_file(slot.kind, self._info)] for slot in self._share]
        return Written(files, {"slots": slots, "numbers": self._inventory.numbers})


def _check_objects(model: Any, optimizer: Any) -> None:
    kinds = ("model", model, DistributedModel), ("optimizer", optimizer, DistributedOptimizer)
    for name, value, kind in kinds:
        if value is not None and not isinstance(value, kind):
            raise CheckpointError(
                f"{name} is a {type(value).__name__}; pass the smp.{kind.__name__} that wraps it."
            )
    is_placed = (model is None or model.partitioned) and (optimizer is None or optimizer.is_placed)
    if not is_placed:
        raise CheckpointError(
            "the model is not partitioned yet; call smp.save_checkpoint after the first step that "
            "uses it."
        )


def _check_equal(requests: list[dict[str, Any]]) -> None:
    for rank, request in enumerate(requests):
        for key, value in request.items():
            if value != requests[0][key]:
                raise CheckpointError(
                    f"smp.save_checkpoint was called with {key} {requests[0][key]!r} on rank 0 and "
                    f"{value!r} on rank {rank}; call it with the same arguments on all ranks. "
                    f"Nothing was written."
                )
