"""What models bring to steps: parameters and buffers that are not placed yet.

The first step that uses a model brings all of it, a later one what scripts have added since. All
ranks have to have the same of it, and it lives where the first replica puts it.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mpxla.comm.agreement import agreed, check_agreement
from mpxla.errors import StepError
from mpxla.graph.user_code import at_user_line
from mpxla.runtime.placement import Placement
from mpxla.runtime.plans.cut import CutStep
from mpxla.runtime.plans.cutting import StepCutter
from mpxla.runtime.reduction import Reducers
from mpxla.runtime.states import Member, ModelStates
from mpxla.session import Session

__all__ = ["Arrivals"]

_NEW = "a step function, or the model, with new parameters or buffers"


class Arrivals:
    """Those of all models, which are there by label."""

    def __init__(
        self,
        session: Session,
        states: ModelStates,
        members: Mapping[str, Member],
        placement: Placement,
        reducers: Reducers,
        cutter: StepCutter,
    ):
        self._session, self._states, self._members = session, states, members
        self._placement, self._reducers, self._cutter = placement, reducers, cutter
        self._group = session.topology.pp_group(session.rank)

    def take_in(self) -> None:
        """Names parameters and buffers that models have now and had not before."""
        for member in self._members.values():
            member.before_new()
        self._states.take_in()

    def meet_new(self) -> None:
        """What models have got since they were placed is the same on all ranks of the pipeline.

        What was computed from values of some ranks (a mask of a weight) has values on those only.

        Raises:
            RankMismatch: it is not the same.
            StepError: no rank has values of it.
        """
        placed = [label for label in self._states.labels if self._states[label].is_placed]
        new = self._placement.unsettled(placed)
        owners = [(self._states[label], own) for label, own in map(self._states.own_name, new)]
        own = self._states.describe(new), [state.holds(name) for state, name in owners]
        everyone = agreed(self._session.objects, self._group, own, _changed, lambda found: found[0])
        for place, name in enumerate(new):
            holders = tuple(rank for rank, (_, held) in enumerate(everyone) if held[place])
            if not holders:
                raise StepError(
                    f"{name}, which the model got after smp.DistributedModel, has no values on any "
                    f"rank: it was computed from parameters that are divided over ranks "
                    f"(sharded_data_parallel_degree). Compute it before smp.DistributedModel, or "
                    f"from model.state_dict(), which gives whole values on all ranks."
                )
            if len(holders) < len(everyone):
                self._placement.note_holders(name, holders)

    def follow_first_replica(self, cut: CutStep, function: str, new: Sequence[str]) -> CutStep:
        """The step cut so that new models live where the first replica puts them.

        Batches of other shapes (other sequence lengths) may have led this replica elsewhere.
        """
        objects, world = self._session.objects, self._session.topology.world_group()
        if self._states.is_any_placed():
            self._reducers.meet(_NEW, at_user_line())
        model = [f"the first step function is {function}", *self._states.describe(new)]
        check_agreement(objects, world, model, "have another model or script")
        mine = self._placement.of_new(cut, new), self._cutter.chosen
        first = objects.allgather(mine, world)[0]
        if mine == first:
            return cut
        ranks, self._cutter.chosen = first
        placed = {**self._placement.ranks, **ranks}
        return self._cutter.cut_captured(cut.step, saved=cut.saved, fixed=placed)

    def settle(self, ranks: Mapping[str, tuple[int, ...]], labels: Iterable[str]) -> None:
        """Places what models have on these ranks."""
        for label in labels:
            if not self._placement.is_settled(label):
                self._placement.settle(label, ranks)
                self._members[label].on_placed()

    def settle_copies(self, cut: CutStep) -> None:
        """Places models that are copies of those in the step beside them.

        Scripts average weights into them before a step uses them.
        """
        ranks = self._placement.with_twins(self._placement.twins(cut.step))
        for label in self._states.labels:
            new = self._placement.unsettled([label])
            if not self._states[label].is_placed and new and ranks.keys() >= set(new):
                self.settle({name: ranks[name] for name in new}, [label])

    def adopt_single_stage(self, label: str) -> None:
        """Places all of a model here, where there is only one stage: what is not placed yet."""
        self.take_in()
        world, new = self._session.topology.world_group(), self._placement.unsettled([label])
        if not new and self._states[label].is_placed:
            return
        if self._states[label].is_placed:
            self._reducers.meet(_NEW, at_user_line())
        model = self._states.describe(new)
        check_agreement(self._session.objects, world, model, "have another model")
        self.settle(dict.fromkeys(new, (0,)), [label])


def _changed(others: list[int], first: tuple[list[str], Any], other: tuple[list[str], Any]) -> str:
    """Text of the error of ranks that have added other tensors to their models."""
    return (
        f"the models have other new parameters or buffers on ranks {others} than on the first rank "
        f"of the pipeline: {', '.join(other[0]) or 'none'} there, {', '.join(first[0]) or 'none'} "
        f"here. Change models in the same way on all ranks."
    )
