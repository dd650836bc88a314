"""How ranks of several pipelines agree on a call of a step function: their first ranks compare it.

Those of a tensor-parallel group compute the same batches with the same random numbers, except where
their shards differ.

    prescaled_batch: True     all are given the same batch. Each would go on with another one
                              without noticing, and what is equal on all of them would drift apart;
                              so they compare digests before every call.
    prescaled_batch: False    each is given samples of its own, which all of them compute: the
                              microbatches of rank 0, then those of rank 1, and so on. Each rank
                              gets the results of its own microbatches, so that losses and gradients
                              are those of as many replicas (SMP API reference, "prescaled_batch").

Those of a sharding group gather each other's parts of parameters while they run, so that all have
to run the same function, and go the same way through it: one that gathers something else would get
a mixture of two parameters, and one that runs nothing would leave the rest waiting. They compare
before every call. Where one has to make a plan first, all compare once more when it is there.
Batches may differ, as those of other replicas may.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from mpxla.comm.agreement import agreed, check_agreement
from mpxla.comm.objects import Objects
from mpxla.comm.packing import as_memory
from mpxla.comm.transport import Group
from mpxla.device.backend import Backend
from mpxla.runtime.plans.cache import Plan
from mpxla.runtime.signature import Signature

__all__ = ["ShardedCalls", "Sharing"]

_ADVICE = (
    "They hold the parameters of a model together (sharded_data_parallel_degree), and have to go "
    "the same way through its layers. Give the step function arguments that lead to the same "
    "layers on all of them, freeze the same parameters, and draw numbers that choose layers from "
    "equal seeds."
)


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

    def first(self, text: str, own: Any) -> Any:
        """What the first rank has for a call, on all ranks. All of them call it.

        Raises:
            RankMismatch: another rank makes another call; on all of them.
        """
        call = text, (), own
        everyone = agreed(self._objects, self._ranks, call, self._problem, lambda call: call[:2])
        return everyone[0][2]

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


class ShardedCalls:
    """The first pipeline ranks of the replicas of one sharding group."""

    def __init__(self, objects: Objects, ranks: Group):
        self._objects = objects
        self._ranks = ranks

    def compare(self, text: str, plan: Plan | None, line: str = "") -> None:
        """Checks that all ranks make one call, or end in one error. All of them call it.

        Without a plan yet, `settle` has to follow. The user's line is for the text.

        Raises:
            RankMismatch: another rank makes another call; on all of them.
        """

        def problem(others: list[int], first: Sequence[Any], other: Sequence[Any]) -> str:
            return (
                f"the ranks {list(self._ranks)} hold the parameters of a model together "
                f"(sharded_data_parallel_degree), and have to call the same step functions, "
                f"and what gathers parameters or norms, in the same order: rank "
                f"{self._ranks[0]} came with {first[0]}{first[2]}, and rank {others[0]} with "
                f"{other[0]}{other[2]}. Evaluate, save and log on all of them, or on none; what "
                f"is for one rank alone goes into `if smp.rank() == 0:` after such a call."
            )

        digest = None if plan is None else plan.digest
        own = text, digest, line
        everyone = agreed(self._objects, self._ranks, own, problem, lambda call: call[0])
        if plan is not None and any(d is None or d != digest for _, d, _ in everyone):
            self.settle(plan.exchanges)

    def settle(self, exchanges: Sequence[str]) -> None:
        """Checks that all ranks gather and scatter the same. All of them call it, or none.

        Raises:
            RankMismatch: another rank does something else; on all of them.
        """
        what = "gather or scatter other parameters in this call"
        check_agreement(self._objects, self._ranks, exchanges, what, _ADVICE)
