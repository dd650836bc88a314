"""A user's own schedule, as text: one line per pipeline rank.

    0F0 0F1 0I0 0W0 0I1 0W1
    1F0 1I0 1F1 1I1 1W0 1W1

The text may consist of forwards and backwards alone; transfers are then added. Where a stage stands
tells which rank owns it, so a text also places stages: several per rank, in any order that starts
with stage 0 on rank 0. Everything that can be checked without the model is checked here; the
simulator checks the rest once it is known what travels between stages. This module must not know
the configuration's keys besides naming them in errors.
"""

from collections.abc import Iterable, Sequence

from mpxla.errors import ScheduleError
from mpxla.schedule.action import Action, parse_schedule
from mpxla.schedule.dataflow import Dataflow, Edge
from mpxla.schedule.grid import Cell, format_failure
from mpxla.schedule.lower import add_communication, add_reduce
from mpxla.schedule.simulate import simulate
from mpxla.schedule.timeline import stage_peaks
from mpxla.schedule.validate import check_lists

__all__ = ["CustomSchedule"]

Lists = Sequence[Sequence[Action]]


class CustomSchedule:
    """A schedule that was typed: actions of every rank as written, and the rank of every stage."""

    def __init__(self, text: str, num_ranks: int, num_microbatches: int, active_microbatches: int):
        """Reads a text and checks it, as far as that needs no model.

        Raises:
            ScheduleError: words that are no actions, another number of ranks or microbatches, a
                stage on two ranks or missing, or an order that cannot run; with the grid and the
                failing cell where there is one; or one that keeps too many microbatches in flight.
        """
        self.lists: Lists = tuple(tuple(line) for line in parse_schedule(text))
        if len(self.lists) != num_ranks:
            raise ScheduleError(
                f"schedule: the text has {len(self.lists)} lines for {num_ranks} pipeline ranks. "
                "Write one line per rank, and a dot for a rank that does nothing."
            )
        self.placement = _placement(self.lists)
        _check_microbatches(self.lists, num_microbatches)
        self._prove()
        peaks = stage_peaks(self.lists, len(self.placement))
        if max(peaks) > active_microbatches:
            raise ScheduleError(
                f"schedule: stage {peaks.index(max(peaks))} has {max(peaks)} microbatches in "
                f"flight, but active_microbatches is {active_microbatches}. Start backwards "
                "earlier, or raise active_microbatches."
            )

    @property
    def has_transfers(self) -> bool:
        """Whether the text says when values are sent."""
        return any(a.op.is_transfer for actions in self.lists for a in actions)

    def lower(self, forward_edges: Iterable[Edge], backward_edges: Iterable[Edge]) -> Lists:
        """The complete schedule of a step, with transfers and reductions.

        Raises:
            ScheduleError: it cannot run with these edges.
        """
        lists = self.lists
        if not self.has_transfers:
            lists = add_communication(lists, self.placement, forward_edges, backward_edges)
        if not any(a.peer is None and a.microbatch is None for line in lists for a in line):
            lists = add_reduce(lists)
        return lists

    def _prove(self) -> None:
        """Runs the text with stages in a chain; with transfers, the edges are those it names."""
        if not self.has_transfers:  # they can be added only where every stage does all its work
            check_lists(self.lists, Dataflow.of_schedule(self.lists, self.placement, (), ()))
        stages = range(len(self.placement) - 1)
        forward = {(s, s + 1) for s in stages}
        if self.has_transfers:
            actions = [a for line in self.lists for a in line if a.op.is_transfer]
            ends = [a if a.op.is_send else a.other_end() for a in actions]
            named = {(a.stage, a.peer) for a in ends if a.peer is not None}
            here = {(s, t) for s, t in forward if self.placement[s] == self.placement[t]}
            forward = {(s, t) for s, t in named if s < t} | here
            backward = {(s, t) for s, t in named if s > t} | {(t, s) for s, t in here}
        else:
            backward = {(t, s) for s, t in forward}
        simulate(self.lower(forward, backward), self.placement, forward, backward)


def _placement(lists: Lists) -> tuple[int, ...]:
    """Pipeline rank of every stage, by the lines that name it."""
    found: dict[int, int] = {}
    for rank, actions in enumerate(lists):
        for step, action in enumerate(actions):
            home = found.setdefault(action.stage, rank)
            if home != rank:
                headline = (
                    f"schedule: rank {rank}, step {step}: stage {action.stage} is on rank {home} "
                    "already. Keep all actions of a stage on one line."
                )
                raise ScheduleError(format_failure(lists, Cell(rank, step), headline))
    if not found or sorted(found) != list(range(len(found))):
        missing = sorted(set(range(max(found, default=0) + 1)) - set(found))
        raise ScheduleError(
            f"schedule: the text names stages {sorted(found)}, without {missing}. Number stages "
            "from 0 without gaps, in the order of the model."
        )
    if found[0] != 0:
        raise ScheduleError(
            f"schedule: stage 0 is on rank {found[0]}. Put it on the first line: rank 0 owns the "
            "inputs of the step."
        )
    return tuple(found[stage] for stage in range(len(found)))


def _check_microbatches(lists: Lists, num_microbatches: int) -> None:
    numbers = {a.microbatch for line in lists for a in line if a.microbatch is not None}
    if numbers != set(range(num_microbatches)):
        raise ScheduleError(
            f"schedule: the text runs microbatches {sorted(numbers)}, but a step has "
            f"{num_microbatches} (the key microbatches; with tensor parallelism and without "
            f"prescaled_batch as many for each rank of it). Write microbatches 0 to "
            f"{num_microbatches - 1}."
        )
    if not any(a.op.begins_backward for line in lists for a in line):
        raise ScheduleError(
            "schedule: the text has no backwards. It is for training steps; evaluation steps need "
            "none."
        )
