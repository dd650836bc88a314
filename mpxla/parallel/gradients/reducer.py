"""What becomes of the gradients of one model on one rank: options, passes, hooks.

The reducer makes a `BucketedReduction` for every training step, and knows what they have in common:
how many step calls make an update, whether a user's hook communicates, how parameters are divided.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mpxla.errors import ConfigError
from mpxla.parallel.gradients.comm_hook import CommHook
from mpxla.parallel.gradients.rounds import Rounds
from mpxla.parallel.replica import Replica, equalize, follow
from mpxla.parallel.sharded import divide_over_group, refuse_with_divided_gradients

__all__ = ["TRANSFER_DTYPES", "GradientReducer", "ReductionOptions"]

TRANSFER_DTYPES = {"same": None, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Value of the key `reduction_dtype` -> in what gradients travel; None for their own type."""


@dataclass(frozen=True)
class ReductionOptions:
    """What users choose.

    Attributes:
        bucket_cap_mb: largest bucket, in MiB.
        backward_passes_per_step: step calls whose gradients are summed before a reduction.
        is_averaged: whether gradients are the mean over microbatches (else the sum).
        is_overlapping: reduce a bucket once it is complete, or all at the end of the step.
        broadcasts_buffers: whether buffers follow the first replica after every training step.
        transfer_dtype: in which gradients travel; None for their own.
        num_batches: that the ranks of one replica bring to a step, over which gradients are means.
        is_sharded: whether replicas divide the updates; gradients go to the owners only then.
    """

    bucket_cap_mb: float = 25
    backward_passes_per_step: int = 1
    is_averaged: bool = True
    is_overlapping: bool = True
    broadcasts_buffers: bool = True
    transfer_dtype: torch.dtype | None = None
    is_sharded: bool = False
    num_batches: int = 1

    @property
    def capacity_bytes(self) -> int:
        """Largest bucket."""
        return int(self.bucket_cap_mb * 2**20)


class GradientReducer:
    """Reduces the gradients of one model's parameters on one rank over its data-parallel group.

    `settings` and `loss_scale` give those of the optimizers, the former in words that are equal on
    all replicas. What the model shares with an earlier one belongs to that one, and is not in
    `names`.
    """

    def __init__(
        self,
        replica: Replica,
        options: ReductionOptions,
        settings: Callable[[], str],
        loss_scale: Callable[[], float],
        rounds: Rounds,
        label: str,
        names: Callable[[], Mapping[str, str]],
    ):
        self.replica = replica
        self.options = options
        self.settings = settings
        self.loss_scale = loss_scale
        self.rounds = rounds
        self.label = label
        self._names = names
        self.hook: CommHook | None = None
        self.is_prepared = False
        self.unreduced: set[str] = set()
        self.accumulated: set[str] = set()  # by passes since the last reduction, on this rank
        self.rewritten: set[str] = set()  # buffers and parameters, by the same
        self.drifted: set[str] = set()
        self._pass = 0
        replica.store.lent.gather = self._gathered

    def _gathered(self, name: str, line: str, value: Any) -> list[Any]:
        """What all replicas give, in a call of the user that they make together."""
        self.rounds.meet(f"param.grad of {name}", line)
        return self.replica.objects.allgather(value, self.replica.group)

    @property
    def names(self) -> Mapping[str, str]:
        """Name in steps of each parameter and buffer that belongs to it -> name in the model."""
        return self._names()

    def set_hook(self, state: Any, hook: Callable[[Any, Any], Any], has_ddp: bool) -> None:
        """Lets a user's function communicate; see `DistributedModel.register_comm_hook`."""
        refuse_with_divided_gradients("model.register_comm_hook()", self.replica.state)
        problems = {
            "needs ddp: True": not has_ddp,
            "needs DistributedModel(overlapping_allreduce=True)": not self.options.is_overlapping,
            "decides itself how gradients travel; remove the key reduction_dtype": (
                self.options.transfer_dtype is not None
            ),
            "does not go with shard_optimizer_state: True": self.options.is_sharded,
            "was called a second time; a model has one hook": self.hook is not None,
            "was called after the first training step; register the hook before": (
                self.is_prepared
            ),
        }
        for problem, is_there in problems.items():
            if is_there:
                raise ConfigError(f"model.register_comm_hook {problem}.")
        replica = self.replica
        self.hook = CommHook(state, hook, replica.transport, self.rounds.hooks, replica.backend)

    def equalize(
        self, parameter_ranks: Mapping[str, tuple[int, ...]], names: Iterable[str]
    ) -> None:
        """Gives all replicas, and all holders of a shared parameter, the same start values.

        All have the ranks given; the names are of those that have just been placed.
        """
        replica, own = self.replica, self.names.values()
        replica.store.ranks = parameter_ranks
        equalize(replica, 0, names)
        if replica.state.shards:
            divide_over_group(replica)
        parameters = replica.state.parameters
        self.prepare_updates(n for n in own if n in parameters and parameters[n].requires_grad)

    def prepare_updates(self, names: Iterable[str]) -> None:
        """Makes the update copies of some parameters that have none yet.

        All replicas call it with equal names: for those that are not frozen when they are placed,
        and for those that a step trains.
        """
        replica, names = self.replica, list(names)
        store = replica.store
        store.trained.update(names)
        over = self.options.capacity_bytes, replica.transport, replica.group
        if replica.state.gradient_shards:
            store.divide_gradients(names, *over)
        elif self.options.is_sharded:
            store.divide(names, *over)
        store.widen(names)

    def take_over(self, source: int) -> None:
        """Gives all replicas the values of one of them."""
        equalize(self.replica, source, self.replica.store.ranks)

    def note_written(self, names: Iterable[str]) -> None:
        """Notes what an evaluation has written, by names in steps: each replica has its own now."""
        if self.replica.count > 1:
            own = self.names
            written = {own[name] for name in names if name in own}
            if not self.options.broadcasts_buffers:
                written &= self.replica.state.parameters.keys()
            self.drifted |= written

    def follow_first(self, names: Iterable[str]) -> None:
        """Gives all replicas what the first one has, of what evaluations have written."""
        follow(self.replica, 0, names)
        self.drifted.clear()

    def objective_scale(self, num_microbatches: int) -> float:
        """1 / microbatches for the mean; comm hooks get sums and average by themselves."""
        if self.hook is not None:
            return 1.0
        return 1.0 / (num_microbatches if self.options.is_averaged else self.options.num_batches)

    def next_pass_reduces(self) -> bool:
        """Counts step calls; whether the one that begins is the last before an update."""
        if self.replica.count == 1:
            return True
        self._pass += 1
        return self._pass % self.options.backward_passes_per_step == 0

    def reduce_next(self) -> None:
        """Makes the step call that comes next the last before an update."""
        self._pass += -(self._pass + 1) % self.options.backward_passes_per_step
