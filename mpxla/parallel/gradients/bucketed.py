"""Gradients over replicas: packed as soon as they are complete, reduced in the background.

A bucket starts when the last stage that contributes to it has had its last backward; the others of
the pipeline may still be in their cool-down then. At the end of the step the results are unpacked
to `param.grad`, or to the pieces of parameters that this replica updates.

    REDUCE of stage 1   start:   pack program -> transport (copies and sums in threads)
    REDUCE of stage 0   start:   ...
    after the actions   finish:  wait, add over the holders of tied parameters, unpack

Tied parameters are reduced over replicas first, by each pipeline rank that holds them, and added
over those ranks afterwards in one fixed order, so that all copies stay equal bit for bit.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch

from mpxla.comm.codec import register
from mpxla.comm.handle import Handle
from mpxla.comm.transport import Group
from mpxla.device.backend import Buffer
from mpxla.errors import RankMismatch, StepError
from mpxla.parallel.gradients.buckets import (
    Bucket,
    Packer,
    cut_gradients,
    fill_buckets,
    sum_gradients,
)
from mpxla.parallel.gradients.join import Collective
from mpxla.parallel.replica import Replica
from mpxla.runtime.plans.cut import CutStep

if TYPE_CHECKING:
    from mpxla.parallel.gradients.reducer import GradientReducer

__all__ = ["BucketedReduction", "GradientFlow", "Reduced"]

Accumulators = Mapping[int, list[Buffer]]
"""Gradients of this rank's stages, in the order of each stage's trained parameters.

What is taken out of a list leaves None there: it would live beside the bucket that it is in.
"""


@dataclass(frozen=True)
class GradientFlow:
    """Which gradients a step gives, and where.

    Attributes:
        sources: this rank's: name -> (stage, place among its accumulators).
        trained: parameters that get a gradient on any pipeline rank.
        shared: those of them that this and other pipeline ranks hold, by the ranks.
        changed: buffers and parameters that this rank's stages change.
        order: stages in the order of which gradients are complete, where those of the sources say
            nothing about it.
        counted_elsewhere: shared parameters whose first holder is another rank. That one adds what
            they have had from an earlier reduction, which is the same on all holders.
    """

    sources: Mapping[str, Sequence[tuple[int, int]]]
    trained: frozenset[str]
    shared: Mapping[tuple[int, ...], Sequence[str]]
    changed: tuple[str, ...]
    order: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    counted_elsewhere: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        cuts: Sequence[CutStep],
        pp_rank: int,
        parameter_ranks: Mapping[str, tuple[int, ...]],
        names: Mapping[str, str],
    ) -> "GradientFlow":
        """The flow of one model's gradients in a captured step, on one pipeline rank.

        A step need not read a parameter on all of the pipeline ranks that hold it. Names are those
        in the step -> those in the model, of parameters and buffers. Several cuts are the ways of
        one call through a step; buckets are those of a call that goes the first way only.
        """
        sources: dict[str, list[tuple[int, int]]] = {}
        order: dict[str, tuple[int, ...]] = {}
        changed: set[str] = set()
        trained: frozenset[str] = frozenset()
        first = 0
        for cut in cuts:
            found: dict[str, list[tuple[int, int]]] = {}
            for stage in cut.stages:
                if cut.placement[stage.index] == pp_rank:
                    changed.update(names[n] for n in stage.new_buffers if n in names)
                    for place, name in enumerate(stage.trained):
                        if name in names:
                            found.setdefault(names[name], []).append((stage.index, place))
            for name, own in found.items():
                order.setdefault(name, tuple(stage for stage, _ in own))
                sources.setdefault(name, []).extend((first + stage, at) for stage, at in own)
            trained |= {names[n] for stage in cut.stages for n in stage.trained if n in names}
            first += len(cut.stages)
        shared = _shared(trained, pp_rank, parameter_ranks)
        elsewhere = frozenset(n for ranks, ns in shared.items() if ranks[0] != pp_rank for n in ns)
        return cls(sources, trained, shared, tuple(sorted(changed)), order, elsewhere)

    def joined(
        self,
        others: Sequence["Reduced"],
        pp_rank: int,
        parameter_ranks: Mapping[str, tuple[int, ...]],
    ) -> "GradientFlow":
        """This flow, with what other replicas train and change and this one does not.

        Nothing in it depends on how this replica goes through its stages.
        """
        trained = self.trained.union(*(other.trained for other in others))
        names = sorted({*self.sources}.union(*(other.sources for other in others)))
        changed = {*self.changed}.union(*(other.changed for other in others))
        return GradientFlow(
            {name: self.sources.get(name, ()) for name in names},
            trained,
            _shared(trained, pp_rank, parameter_ranks),
            tuple(sorted(changed)),
            dict.fromkeys(names, (0,)),
            self.counted_elsewhere,
        )

    def stages(self, name: str) -> tuple[int, ...]:
        """Stages that buckets of a gradient go by."""
        return self.order.get(name) or tuple(stage for stage, _ in self.sources[name])


def _shared(
    trained: Iterable[str], pp_rank: int, parameter_ranks: Mapping[str, tuple[int, ...]]
) -> dict[tuple[int, ...], list[str]]:
    shared: dict[tuple[int, ...], list[str]] = {}
    for name in sorted(trained):
        holders = parameter_ranks[name]
        if len(holders) > 1 and pp_rank in holders:
            shared.setdefault(holders, []).append(name)
    return shared


@register
class Reduced(NamedTuple):
    """What one replica reduces in a step."""

    options: str
    """The model, and the user's choices."""
    trained: frozenset[str]
    """Parameters that get a gradient on any pipeline rank."""
    sources: frozenset[str]
    """Those that get one on this rank."""
    changed: tuple[str, ...]
    """What the step changes besides."""


class BucketedReduction:
    """The reduction of one model's gradients, times a factor, in one training step.

    Attributes:
        description: what is reduced, in words that are equal on replicas that do the same.
        source: index of the replica whose buffers count.
    """

    def __init__(self, reducer: "GradientReducer", flow: GradientFlow, factor: float = 1.0):
        self.reducer = reducer
        self._factor = factor
        self._joined: dict[tuple[Set[str], Set[str], Sequence[str]], BucketedReduction] = {}
        self._replica = reducer.replica
        self._store = reducer.replica.store
        self._is_sharded = reducer.options.is_sharded
        self._flow = flow
        self._sources = flow.sources
        self._shared = {name for names in flow.shared.values() for name in names}
        self._programs = self._store.programs
        self._buckets = self._form_buckets()
        self._packers: dict[tuple[int, tuple[str, ...]], Packer] = {}
        for index, bucket in enumerate(self._buckets):
            if present := self._present(bucket):
                self._packer(index, present)
        bucketed = {name for bucket in self._buckets for name in bucket.names}
        self._direct = [name for name in self._sources if name not in bucketed]
        self.description = self._usual = self._describe(flow.changed)
        self.source = 0
        self._reduces = True
        self._waiting: dict[int, set[int]] = {}
        self._under_way: dict[int, Handle[torch.Tensor]] = {}

    # --- preparation ----------------------------------------------------------------------------

    def _form_buckets(self) -> list[Bucket]:
        """Buckets of what is reduced or shared, in the order in which they are complete."""
        store = self._store
        if self._is_sharded:
            return [b for b in store.shards if not self._flow.trained.isdisjoint(b.names)]
        capacity = self.reducer.options.capacity_bytes
        groups: dict[tuple[tuple[int, ...], tuple[int, ...], bool], Sequence[str]] = {}
        # Backwards come to the last stage first.
        for name in sorted(self._sources, key=lambda name: -self._flow.stages(name)[0]):
            if name not in self._shared and self._transfers(name):
                key = self._flow.stages(name), (self._replica.pp_rank,), self._is_part(name)
                groups[key] = [*groups.get(key, ()), name]
        for holders, names in sorted(self._flow.shared.items()):
            for name in names:
                key = (), holders, self._is_part(name)
                groups[key] = [*groups.get(key, ()), name]
        buckets: list[Bucket] = []
        for (_, holders, _), names in groups.items():
            specs = {name: store.gradient_spec(name) for name in names}
            buckets += fill_buckets(specs, holders, capacity)
        return buckets

    def _is_part(self, name: str) -> bool:
        return name in self._replica.state.gradient_shards

    def _group_of(self, name: str) -> Group:
        """Ranks whose gradients of a parameter are still to be averaged."""
        return self._replica.part_group if self._is_part(name) else self._replica.group

    def _transfers(self, name: str) -> bool:
        """Whether gradients of a parameter leave this rank at all."""
        return len(self._group_of(name)) > 1 or self.reducer.hook is not None

    def _packer(self, index: int, names: Sequence[str]) -> Packer:
        """Packs gradients of some names of a bucket."""
        key = index, tuple(names)
        if key not in self._packers:
            bucket = self._buckets[index]
            dtype, shape = self._travels_as(bucket)
            self._packers[key] = Packer(bucket, names, dtype, self._replica.backend, shape)
        return self._packers[key]

    def _travels_as(self, bucket: Bucket) -> tuple[torch.dtype, tuple[int, ...]]:
        """Type and shape of a bucket, also on replicas that have no gradient of it."""
        dtype = self.reducer.options.transfer_dtype if self._replica.count > 1 else None
        shape = (bucket.parts, -1) if self._is_sharded else (-1,)
        return dtype or bucket.dtype, shape

    def _present(self, bucket: Bucket) -> list[str]:
        return [name for name in bucket.names if self._sources.get(name)]

    def _held(self, bucket: Bucket) -> dict[str, Buffer]:
        """Takes what a bucket has from earlier passes, and this pass adds to on other ranks only.

        What it has from an earlier reduction, replicas count as they count their own gradients, and
        the mean is of all replicas; of the holders, the first does. (Divided updates keep it
        apart.)
        """
        if not self._accumulates_locally:
            return {}
        is_first = not bucket.holders or bucket.holders[0] == self._replica.pp_rank
        is_counted = is_first and not self._is_sharded
        names = [
            name
            for name in bucket.names
            if not self._sources.get(name)
            and (is_counted or name in self.reducer.accumulated)
            and self._store.has_gradient(name)
        ]
        found = zip(names, self._store.take_gradients(names), strict=True)
        return {name: value for name, value in found if value is not None}

    def _describe(self, changed: Sequence[str]) -> str:
        # Parts of one parameter differ in length, and replicas compare what they reduce.
        shapes = {n: tuple(p.shape) for n, p in self._replica.state.parameters.items()}
        buckets = [([(n, shapes[n]) for n in b.names], b.dtype) for b in self._buckets]
        what = f"{buckets} {sorted(self._sources)} {changed}"
        return f"{self.reducer.label} {self.reducer.options} {what}"

    # --- every call -----------------------------------------------------------------------------

    def begin(self) -> bool:
        """Counts the pass of a model that is trained; whether replicas reduce in this call."""
        self._reduces = not self._flow.trained or self.reducer.next_pass_reduces()
        if self._flow.trained and self._reduces:
            self._check_left_out()
        changed = self._changed
        is_usual = changed == self._flow.changed
        self.description = self._usual if is_usual else self._describe(changed)
        self.source = 0
        self._under_way.clear()
        self._waiting = {
            index: {stage for name in self._present(bucket) for stage, _ in self._sources[name]}
            for index, bucket in enumerate(self._buckets)
        }
        return self._reduces

    def _check_left_out(self) -> None:
        """Checks that this pass reduces all that earlier ones have added up on this rank alone."""
        earlier, self.reducer.unreduced = self.reducer.unreduced, set()
        # What another holder trains now is in a bucket here, too (`_held`).
        for name in sorted(earlier.difference(self._sources, self._shared)):
            if self._store.has_gradient(name):
                count = self.reducer.options.backward_passes_per_step
                raise StepError(
                    f"the last of {count} passes (backward_passes_per_step) does not train the "
                    f"parameter {name}, and an earlier one did: only what the last one trains is "
                    f"averaged over replicas, so they would drift apart. Train the same parameters "
                    f"in all passes, or set backward_passes_per_step=1, which averages every pass."
                )

    def what(self) -> "Reduced":
        """What is reduced, for other replicas."""
        flow, reducer = self._flow, self.reducer
        options = f"{reducer.label} {reducer.options}"
        return Reduced(options, flow.trained, frozenset(self._sources), self._changed)

    def joined(self, others: Sequence["Reduced"]) -> "BucketedReduction":
        """For `finish` of this call, the reduction of what any replica trains; all of them make it.

        Raises:
            RankMismatch: replicas have other options, or parameters are divided over them.
        """
        reducer, state = self.reducer, self._replica.state
        if any(other.options != self.what().options for other in others):
            raise RankMismatch(
                f"rank {self._replica.rank} was given other options of smp.DistributedModel than "
                f"another replica, so their gradients cannot be averaged. Give all replicas the "
                f"same options, and call the same step functions on them."
            )
        if state.shards or state.gradient_shards or reducer.hook is not None:
            raise RankMismatch(
                f"rank {self._replica.rank} trains other parameters in this step than another "
                f"replica, and their gradients are divided (sharded_data_parallel_degree, "
                f"shard_gradients) or averaged by model.register_comm_hook. Call the same step "
                f"function on all replicas, with arguments that lead to the same layers, freeze "
                f"the same parameters, and draw numbers that choose layers from equal seeds."
            )
        ranks = self._store.ranks
        flow = self._flow.joined(others, self._replica.pp_rank, ranks)
        key = flow.trained, frozenset(flow.sources), flow.changed
        if key not in self._joined:
            reducer.prepare_updates(flow.trained)
            self._joined[key] = BucketedReduction(reducer, flow, self._factor)
        joined = self._joined[key]
        joined.source = self.source
        return joined

    def outline(self) -> list[Collective]:
        """The collectives of one call, for replicas that have to take part without a step."""
        outline = [
            Collective("all_reduce", (bucket.num_elements,), self._travels_as(bucket)[0])
            for bucket in self._buckets
        ]
        outline += [
            Collective("broadcast", tuple(tensor.shape), tensor.dtype)
            for tensor in self._following().values()
        ]
        return outline

    def complete(self, stage: int) -> list[int]:
        """The buckets that were waiting for this stage alone, and are to be started now."""
        if not (self._reduces and self.reducer.options.is_overlapping):
            return []
        ready: list[int] = []
        for index, stages in self._waiting.items():
            if stage in stages:
                stages.remove(stage)
                if not stages:
                    ready.append(index)
        return ready

    def finish(self, gradients: Accumulators) -> None:
        """Leaves all gradients with the store, and what follows the first replica.

        That are buffers and parameters that the step has changed.
        """
        if not self._reduces:
            self._store.take_gradients(sorted(self._counted_elsewhere))
            self.reducer.accumulated.update(self._sources)
            self._accumulate(list(self._sources), self._sums(self._sources, gradients))
            self.reducer.unreduced |= {
                n for n in self._sources if n in self._shared or self._transfers(n)
            }
            self.reducer.rewritten |= set(self._flow.changed)
            return
        for index in range(len(self._buckets)):
            if index not in self._under_way:
                self.launch(index, gradients)
        transport, group = self._replica.transport, self._replica.group
        following = {
            name: transport.broadcast(tensor.detach(), group[self.source], group)
            for name, tensor in self._following().items()
        }
        direct = self._sums(self._direct, gradients, earlier=True)
        self._accumulate(self._direct, direct, is_total=True)
        # In the order of the list, which pipeline ranks have in common for what they share.
        for index, bucket in enumerate(self._buckets):
            self._deliver(bucket, index)
        for name, handle in following.items():
            self._store.write([name], [handle.result()])
        self.reducer.accumulated.clear()
        self.reducer.rewritten.clear()

    def _deliver(self, bucket: Bucket, index: int) -> None:
        """Waits for one bucket and gives its gradients to the store."""
        flat = self._under_way.pop(index).result()
        if len(bucket.holders) > 1:
            flat = self._sum_over_holders(flat, bucket.holders)
        if self._is_sharded:
            self._store.receive(bucket, flat, self._flow.trained)
        else:
            parts = cut_gradients(self._programs, flat, bucket.cuts, bucket.dtype)
            self._accumulate(bucket.names, parts, is_total=True)

    def _sum_over_holders(self, term: Buffer, holders: Sequence[int]) -> Buffer:
        """The sum over the pipeline ranks that hold the same parameters; all of them call it.

        The first holder adds, in the order of ranks, and hands the sum back.
        """
        link, backend = self._replica.link, self._replica.backend
        first, *others = holders
        specs = [backend.spec(term)]
        if self._replica.pp_rank != first:
            link.send_to(first, [term], "tied")
            (total,) = link.expect_from(first, specs, "tied")()
            return total
        # On the host, where the terms arrive and the total leaves from.
        total = backend.view(term)
        for arrival in [link.expect_from(rank, specs, "tied") for rank in others]:
            (term,) = arrival()
            total = total + backend.view(term)
        for rank in others:
            link.send_to(rank, [total], "tied")
        return total

    def launch(self, index: int, gradients: Accumulators) -> None:
        """Starts a bucket, whose gradients are complete."""
        bucket, hook = self._buckets[index], self.reducer.hook
        present, held = self._present(bucket), self._held(bucket)
        group, transport = self._group_of(bucket.names[0]), self._replica.transport
        scale = 1.0 if hook is not None else 1.0 / len(group)
        if not present and not held:
            dtype, shape = self._travels_as(bucket)
            flat = torch.zeros(bucket.num_elements, dtype=dtype).view(shape)
        else:
            terms = [*self._sums(present, gradients, earlier=True), *held.values()]
            flat = self._packer(index, [*present, *held])(terms, scale)
        if hook is not None:
            parameters = [self._replica.state.parameters[name] for name in bucket.names]
            is_last = len(self._under_way) == len(self._buckets) - 1
            number = len(self._under_way)
            self._under_way[index] = hook.submit(bucket, flat, number, is_last, parameters)
        elif self._is_sharded:
            self._under_way[index] = transport.reduce_scatter(flat, self._replica.group)
        elif len(group) > 1:
            self._under_way[index] = transport.all_reduce(flat, group, is_spent=True)
        else:
            self._under_way[index] = _done(self._replica, flat)

    def _sums(
        self, names: Iterable[str], gradients: Accumulators, earlier: bool = False
    ) -> list[Buffer]:
        """Sums over this rank's stages, and over earlier passes that were not reduced.

        Takes the gradients out.
        """
        names = list(names)
        groups = [[_taken(gradients[i], at) for i, at in self._sources[name]] for name in names]
        dtypes = [self._store.gradient_spec(name).dtype for name in names]
        totals = sum_gradients(self._programs, groups, dtypes, self._factor)
        if not (earlier and self._accumulates_locally):
            return totals
        self._store.take_gradients([name for name in names if name in self._counted_elsewhere])
        before = self._store.take_gradients(names)
        groups = [[t] if g is None else [g, t] for g, t in zip(before, totals, strict=True)]
        return sum_gradients(self._programs, groups, dtypes)

    @property
    def _counted_elsewhere(self) -> frozenset[str]:
        """What this rank trains and has from an earlier reduction, which another holder adds.

        Every holder would else add the whole of it. What was added since is each holder's own.
        """
        names = self._flow.counted_elsewhere.intersection(self._sources)
        return names - self.reducer.accumulated

    @property
    def _accumulates_locally(self) -> bool:
        """Whether gradients of earlier passes are those of this replica alone."""
        return self._replica.count > 1 and self.reducer.options.backward_passes_per_step > 1

    def _accumulate(
        self, names: Sequence[str], values: Sequence[Buffer], is_total: bool = False
    ) -> None:
        """Adds to the gradients; totals of several passes already hold what is there."""
        if is_total and self._accumulates_locally:
            self._store.take_gradients(names)
        self._store.add_gradients(names, values)

    def _following(self) -> dict[str, torch.Tensor]:
        """What all replicas have as the first one has it, after a step that changes it."""
        state = self._replica.state
        if self._replica.count == 1:
            return {}
        parameters = {n: state.parameters[n] for n in self._changed if n in state.parameters}
        buffers = state.buffers if self.reducer.options.broadcasts_buffers else {}
        own = (n for n in self._changed if n in buffers and not state.is_carried(n))
        return {**parameters, **{n: buffers[n] for n in own}}

    @property
    def _changed(self) -> tuple[str, ...]:
        """What this step changes, or passes without a reduction have since the last one."""
        return tuple(sorted(self.reducer.rewritten.union(self._flow.changed)))


def _taken(gradients: list[Buffer | None], place: int) -> Buffer:
    found, gradients[place] = gradients[place], None
    assert found is not None, "each is taken once"
    return found


def _done(replica: Replica, value: torch.Tensor) -> Handle[torch.Tensor]:
    handle: Handle[torch.Tensor] = Handle(replica.transport.watch, "nothing")
    handle.set_result(value)
    return handle
