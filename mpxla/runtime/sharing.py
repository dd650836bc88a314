"""How the ranks of a tensor-parallel group agree on a call of a step function.

All of them compute the same batches with the same random numbers, except where their shards differ.

    prescaled_batch: True     all are given the same batch. Each would go on with another one
                              without noticing, and what is equal on all of them would drift apart;
                              so they compare digests before every call.
    prescaled_batch: False    each is given samples of its own, which all of them compute: the
                              microbatches of rank 0, then those of rank 1, and so on. Each rank
                              gets the results of its own microbatches, so that losses and gradients
                              are those of as many replicas (SMP API reference, "prescaled_batch").
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from mpxla.comm.agreement import agreed
from mpxla.comm.objects import Objects
from mpxla.comm.packing import as_memory
from mpxla.comm.transport import Group
from mpxla.device.backend import Backend
from mpxla.runtime.signature import Signature

__all__ = ["Sharing"]


class Sharing:
    """The first pipeline ranks that share the tensors of their partition.

    All of them have one batch, or each has its own.
    """

    def __init__(self, objects: Objects, ranks: Group, backend: Backend, is_prescaled: bool = True):
        self.is_prescaled = is_prescaled
        self._objects = objects
        self._ranks = ranks
        self._backend = backend

    def compare(
        self,
        text: str,
        plan: Any,
        tensors: Sequence[Sequence[torch.Tensor]],
        signature: Signature | None,
    ) -> None:
        """Checks that all ranks make one call, with one batch. All of them call it.

        `plan` says which plans run it, and is false if something is to be captured.

        Raises:
            RankMismatch: another rank has another call or other values; on all of them.
        """
        if len(self._ranks) > 1:
            values = self._digest(tensors)
            own = _with_shapes(text, tensors), _facts(signature), values, plan, text
            agreed(self._objects, self._ranks, own, self._problem)

    def gather(
        self, text: str, tensors: Sequence[Sequence[torch.Tensor]], signature: Signature
    ) -> list[list[torch.Tensor]]:
        """The microbatches of all ranks, one rank after the other. All of them call it.

        Raises:
            RankMismatch: another rank has another call or other shapes; on all of them.
        """
        flat = self._backend.get([t for leaves in tensors for t in leaves])
        own = _with_shapes(text, tensors), _facts(signature), flat
        everyone = agreed(self._objects, self._ranks, own, self._problem, lambda call: call[:2])
        found: list[list[torch.Tensor]] = []
        for _, _, values in everyone:
            rest = iter(values)
            found += [[next(rest) for _ in leaves] for leaves in tensors]
        return found

    def _problem(self, others: list[int], first: tuple[Any, ...], other: tuple[Any, ...]) -> str:
        """The error of ranks with different (text, facts, values, number of the plan, call)."""
        ranks = self._ranks[0], others[0]
        if first[0] == other[0] and first[1] != other[1]:
            pairs = zip(first[1], other[1], strict=True)
            names = [name for (name, own), (_, others_own) in pairs if own != others_own]
            return (
                f"the ranks {list(self._ranks)} share the tensors of a model, and have to call the "
                f"step function alike: {' and '.join(names)} differ on ranks {ranks[0]} and "
                f"{ranks[1]}, in {first[0]}. Make them equal on all of these ranks."
            )
        if first[:3] == other[:3]:
            return (
                f"the ranks {list(self._ranks)} share the tensors of a model, and {first[-1]} is "
                f"another step on rank {ranks[1]} than on rank {ranks[0]}: something that it reads "
                f"outside of its arguments (an attribute of the model, a global) has changed on "
                f"one of them only. Change it on all of them alike, or pass it as an argument."
            )
        what = f"rank {ranks[0]} came with {first[0]}, and rank {ranks[1]} with {other[0]}"
        if first[0] == other[0]:
            what = (
                f"the values that ranks {ranks[0]} and {ranks[1]} were given differ, in {other[0]}"
            )
        start = f"the ranks {list(self._ranks)} share the tensors of a model, and have to"
        if not self.is_prescaled:
            return (
                f"{start} call the step function together, with batches of one shape: {what}. "
                f"Give every rank as many samples, and equal arguments that are no tensors "
                f"(drop_last=True in the loader)."
            )
        return (
            f"{start} call the step function with the same batch: {what}. Divide the data by "
            f"smp.rdp_rank() and smp.rdp_size(), and draw it from the same seed in the whole "
            f"group; or set prescaled_batch: False, with which every rank has samples of its "
            f"own."
        )

    def seed(self, own: int) -> int:
        """The first rank's seed, on all ranks. All of them call it."""
        if len(self._ranks) == 1:
            return own
        return self._objects.allgather(own, self._ranks)[0]

    def _digest(self, tensors: Sequence[Sequence[torch.Tensor]]) -> str:
        digest = hashlib.blake2b(digest_size=16)
        for value in self._backend.get([t for leaves in tensors for t in leaves]):
            digest.update(as_memory(value.contiguous()))
        return digest.hexdigest()


def _facts(signature: Signature | None) -> tuple[tuple[str, str], ...]:
    """What a call is, beside the values of its tensors: (name for messages, digest)."""
    if signature is None:
        return ()
    facts = {
        "the arguments that are no tensors": (signature.structure, signature.leaves),
        "the modes of the model's modules (train or eval, activation checkpointing)": (
            signature.modes
        ),
        "requires_grad of the model's parameters": signature.trainable,
        "the modes of PyTorch (gradients, autocast)": (signature.grad_enabled, signature.autocast),
    }
    return tuple(
        (name, hashlib.blake2b(str(fact).encode(), digest_size=16).hexdigest())
        for name, fact in facts.items()
    )


def _with_shapes(text: str, tensors: Sequence[Sequence[torch.Tensor]]) -> str:
    shapes = [str(list(value.shape)) for value in (tensors[0] if tensors else ())]
    return f"{text} with microbatches of {', '.join(shapes) or 'nothing'}"
