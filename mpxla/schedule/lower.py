"""Passes over schedules: add transfers, add reductions.

Lists of forwards and backwards say nothing about messages. `add_communication` walks them along one
global order of events and appends both ends of a transfer to their ranks' lists at the same point.
Every list is thus a projection of one linear order, and the earliest unfinished event can always
happen: there is no deadlock, even if a transfer completes only when both ends reach it.

Where in that order a transfer goes decides how well ranks overlap. Phases:

    phase 1, clock:  run the lists with one tick per forward or backward; messages take no time.
    phase 2, window: a transfer may go from the end of its producer to the start of its consumer,
                     but not past the sender's next compute, so that values leave at once.
    phase 3, moment: the last tick of the window at which both ends are idle, else its last tick.
                     So no rank waits for a message long before it needs it.
    phase 4, order:  at one tick the transfers go before the computes, the most urgent first and
                     gradients before values.

In the steady state of 1F1B this is the well-known "receive the backward, send the forward":

    rank 0   F0  SEND_F0            F1  RECV_B0 SEND_F1  B0  F2  RECV_B1 SEND_F2  B1
    rank 1       RECV_F0   F0   B0      SEND_B0 RECV_F1  F1  B1  SEND_B1 RECV_F2  F2

This module must not know costs, nor by which rule the lists were generated.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from mpxla.errors import ScheduleError
from mpxla.schedule.action import Action, Op
from mpxla.schedule.dataflow import Dataflow, Edge, Kind
from mpxla.schedule.grid import Cell, format_failure
from mpxla.schedule.validate import check_stages, has_backwards

__all__ = ["add_communication", "add_reduce"]


def add_communication(
    compute: Sequence[Sequence[Action]],
    placement: Sequence[int],
    forward_edges: Iterable[Edge],
    backward_edges: Iterable[Edge],
) -> list[list[Action]]:
    """Inserts a send and a receive for every edge between ranks and every microbatch.

    Args:
        compute: forwards and backwards of every rank.
        placement: pipeline rank of every stage.
        forward_edges: (source, destination) stages of values, source < destination.
        backward_edges: (source, destination) stages of gradients, reversed forward edges; not
            looked at if there are no backwards.

    Returns:
        The lists with transfers; free of deadlock under rendezvous semantics.

    Raises:
        ScheduleError: edges do not fit the stages, a list has more than forwards and backwards, or
            the lists wait for each other.
    """
    check_stages(compute, placement)
    _check_compute(compute, placement)
    flow = Dataflow.of(placement, forward_edges, backward_edges, has_backwards(compute))
    clock = _Clock(compute, flow)
    events: list[_Event] = []
    for rank, actions in enumerate(compute):
        for step, action in enumerate(actions):
            start = clock.starts[rank][step]
            events.append(_Event(start, 1, 0, False, rank, ((rank, action),)))
    for send in flow.sends():
        events += _transfers(send, clock, flow)
    result: list[list[Action]] = [[] for _ in compute]
    for event in sorted(events):
        for rank, action in event.parts:
            result[rank].append(action)
    return result


def add_reduce(
    schedule: Sequence[Sequence[Action]], placement: Sequence[int]
) -> list[list[Action]]:
    """Inserts a reduction right after the last backward of every stage.

    Args:
        schedule: actions of every rank, with or without transfers.
        placement: pipeline rank of every stage.

    Returns:
        The lists with one `REDUCE` per stage that has backwards.

    Raises:
        ScheduleError: the placement does not fit the lists, or there are reductions already.
    """
    check_stages(schedule, placement)
    result: list[list[Action]] = []
    for rank, actions in enumerate(schedule):
        for step, action in enumerate(actions):
            if action.op is Op.REDUCE:
                headline = f"Rank {rank}, step {step}: the reductions are there already. Add once."
                raise ScheduleError(format_failure(schedule, Cell(rank, step), headline))
        last = {a.stage: step for step, a in enumerate(actions) if a.op is Op.BACKWARD}
        with_reductions: list[Action] = []
        for step, action in enumerate(actions):
            with_reductions.append(action)
            if last.get(action.stage) == step:
                with_reductions.append(Action(action.stage, Op.REDUCE))
        result.append(with_reductions)
    return result


class _Event(NamedTuple):
    """A compute, or both ends of a transfer; events are sorted by their fields in this order."""

    time: float
    is_compute: int
    deadline: float
    is_forward: bool
    tie: int
    parts: tuple[tuple[int, Action], ...]


class _Clock:
    """When computes run if each takes one tick and messages take none (phase 1).

    Attributes:
        starts: per rank, the tick at which each of its computes starts.
        start_of: the same by action.
        next_start: by action, when its rank's following compute starts; infinite for the last one.
        busy: per rank, the ticks at which a compute starts.
    """

    def __init__(self, compute: Sequence[Sequence[Action]], flow: Dataflow):
        self.starts: list[list[int]] = [[] for _ in compute]
        self.start_of: dict[Action, int] = {}
        self._compute = compute
        self._reads = {kind: flow.reads(kind.op, kind.stage) for kind in flow.computes()}
        self._home = flow.placement
        self._run()
        self.busy = [set(starts) for starts in self.starts]
        self.next_start: dict[Action, float] = {}
        for actions, starts in zip(compute, self.starts, strict=True):
            followers = [*starts[1:], math.inf]
            self.next_start |= zip(actions, followers if actions else [], strict=True)

    def actions_of(self, stage: int, op: Op) -> list[Action]:
        """The forwards or backwards of a stage, in order."""
        actions = self._compute[self._home[stage]]
        return [action for action in actions if action.stage == stage and action.op is op]

    def _run(self) -> None:
        ready = list(range(len(self._compute)))
        waiting: dict[Action, list[int]] = {}
        while ready:
            rank = ready.pop()
            starts = self.starts[rank]
            for action in self._compute[rank][len(starts) :]:
                missing = self._missing(action)
                if missing is not None:
                    waiting.setdefault(missing, []).append(rank)
                    break
                reads = [self.start_of[read] + 1 for read in self._inputs(action)]
                start = max([starts[-1] + 1 if starts else 0, *reads])
                starts.append(start)
                self.start_of[action] = start
                ready += waiting.pop(action, [])
        self._check_finished()

    def _inputs(self, action: Action) -> list[Action]:
        reads = self._reads[action.stage, action.op, None]
        return [Action(stage, op, action.microbatch) for stage, op, _ in reads]

    def _missing(self, action: Action) -> Action | None:
        """An input that has not run yet."""
        return next((read for read in self._inputs(action) if read not in self.start_of), None)

    def _check_finished(self) -> None:
        blocked: dict[Cell, str] = {}
        for rank, (actions, starts) in enumerate(zip(self._compute, self.starts, strict=True)):
            if len(starts) < len(actions):
                missing = self._missing(actions[len(starts)])
                assert missing is not None, "only a compute without an input is blocked"
                home = self._home[missing.stage]
                if missing in self._compute[home]:
                    where = f"step {self._compute[home].index(missing)} of rank {home}"
                else:
                    where = f"which rank {home} lacks"
                blocked[Cell(rank, len(starts))] = f"{missing} ({where})"
        if blocked:
            headline = (
                "These forwards and backwards cannot run in their order. Put every action after "
                "those whose results it reads."
            )
            raise ScheduleError(format_failure(self._compute, min(blocked), headline, blocked))


def _transfers(send: Kind, clock: _Clock, flow: Dataflow) -> list[_Event]:
    """The transfers of one edge, for all microbatches, each at its moment (phases 2 and 3)."""
    source, op, target = send
    assert target is not None, "a send has a peer"
    is_forward = op is Op.SEND_FORWARD
    compute = Op.FORWARD if is_forward else Op.BACKWARD
    sender, receiver = flow.placement[source], flow.placement[target]
    events: list[_Event] = []
    for action in clock.actions_of(source, compute):
        consumer = Action(target, compute, action.microbatch)
        deadline = clock.start_of[consumer]
        earliest = clock.start_of[action] + 1
        latest = int(min(clock.next_start[action], deadline))
        time = next(
            (
                tick
                for tick in range(latest, earliest - 1, -1)
                if tick not in clock.busy[sender] and tick not in clock.busy[receiver]
            ),
            latest,
        )
        end = Action(source, op, action.microbatch, target)
        parts = ((sender, end), (receiver, end.other_end()))
        events.append(_Event(time, 0, deadline, is_forward, sender % 2, parts))
    return events


def _check_compute(compute: Sequence[Sequence[Action]], placement: Sequence[int]) -> None:
    """Checks that there are only forwards and backwards, each once and on its own rank."""
    seen: set[Action] = set()
    for rank, actions in enumerate(compute):
        for step, action in enumerate(actions):
            problem = None
            if not action.op.is_compute:
                problem = "is not a forward or backward. Add transfers before anything else"
            elif action.stage >= len(placement) or placement[action.stage] != rank:
                problem = f"does not belong on this rank by placement {tuple(placement)}. Move it"
            elif action in seen:
                problem = "is there twice. Remove one"
            if problem is not None:
                headline = f"Rank {rank}, step {step}: {action} {problem}."
                raise ScheduleError(format_failure(compute, Cell(rank, step), headline))
            seen.add(action)
