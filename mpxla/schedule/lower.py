"""Passes over schedules: add transfers, add reductions, take some of the microbatches.

Lists of forwards and backwards say nothing about messages. `add_communication` walks them along one
global order of events and appends both ends of a transfer to their ranks' lists at the same point.
Every list is thus a projection of one linear order, and the earliest unfinished event can always
happen: there is no deadlock, even if a transfer completes only when both ends reach it.

Where in that order a transfer goes decides how well ranks overlap. Phases:

    phase 1, clock:  run the lists with one tick per forward or backward; messages take no time.
                     All ranks are then between two computes at every tick, so that no choice below
                     makes a rank wait for another one's running compute.
    phase 2, window: a transfer may go from the end of its producer to the start of its consumer,
                     but not past the sender's next compute: a value never waits for a later one.
    phase 3, moment: the last tick of the window at which both ends are idle, else its last tick.
                     So no rank waits for a message before work that does not need it, if that can
                     be avoided, and transfers fall into bubbles where there are any.
    phase 4, order:  at one tick transfers go before computes, the most urgent first, gradients
                     before values, and those of even ranks before those of odd ones: in a chain of
                     ranks that all send, half of the pairs then go at once.

In the steady state of 1F1B this is the well-known "receive the backward, send the forward":

    rank 0   F0  SEND_F0  F1      RECV_B0 SEND_F1  B0  F2  RECV_B1 SEND_F2  B1
    rank 1       RECV_F0  F0  B0  SEND_B0 RECV_F1  F1  B1  SEND_B1 RECV_F2  F2

This module must not know costs, nor by which rule the lists were generated.
"""

import math
from collections.abc import Iterable, Sequence

from mpxla.errors import ScheduleError
from mpxla.schedule.action import Action, Op
from mpxla.schedule.dataflow import Dataflow, Edge
from mpxla.schedule.grid import Cell, format_failure

__all__ = ["actions_of", "add_communication", "add_reduce"]

_Key = tuple[int, Op, int | None, int | None]
"""A compute as a plain tuple, which is equal to its Action and much cheaper to make."""


def add_communication(
    compute: Sequence[Sequence[Action]],
    placement: Sequence[int],
    forward_edges: Iterable[Edge],
    backward_edges: Iterable[Edge],
) -> list[list[Action]]:
    """Inserts a send and a receive for every edge between ranks and every microbatch.

    Edges are those of `Dataflow`; those of gradients are not looked at if there are no backwards.

    Returns:
        The lists with transfers; free of deadlock under rendezvous semantics.

    Raises:
        ScheduleError: edges do not fit the stages, a list has more than forwards and backwards, or
            the lists wait for each other.
    """
    _check_compute(compute)
    flow = Dataflow.of_schedule(compute, placement, forward_edges, backward_edges)
    clock = _Clock(compute, flow)
    home = flow.placement
    result: list[list[Action]] = [[] for _ in compute]
    position = [0] * len(compute)
    for time, _, _, _, send in sorted(_place_transfers(compute, flow, clock)):
        for action in (send, send.other_end()):
            rank = home[action.stage]
            starts, begin = clock.starts[rank], position[rank]
            end = begin
            while end < len(starts) and starts[end] < time:
                end += 1
            result[rank] += compute[rank][begin:end]
            result[rank].append(action)
            position[rank] = end
    for actions, done, rest in zip(result, position, compute, strict=True):
        actions += rest[done:]
    return result


def add_reduce(schedule: Sequence[Sequence[Action]]) -> list[list[Action]]:
    """Inserts a reduction after the last backward of every stage.

    Sends that directly follow that backward go first: another rank may be waiting for them.

    Returns:
        The lists with one `REDUCE` per stage that has backwards.
    """
    result: list[list[Action]] = []
    for actions in schedule:
        last = {a.stage: step for step, a in enumerate(actions) if a.op.ends_backward}
        stage_at: dict[int, int] = {}
        for stage, step in last.items():
            while step + 1 < len(actions) and actions[step + 1][:2] == (stage, Op.SEND_BACKWARD):
                step += 1
            stage_at[step] = stage
        with_reductions: list[Action] = []
        for step, action in enumerate(actions):
            with_reductions.append(action)
            if step in stage_at:
                with_reductions.append(Action(stage_at[step], Op.REDUCE))
        result.append(with_reductions)
    return result


def actions_of(
    actions: Sequence[Action], microbatches: Sequence[int], reduces: bool = True
) -> tuple[Action, ...]:
    """One rank's actions for some microbatches, in order; gradients may be complete then.

    They are those of the first microbatches, with other numbers: the first n of a schedule are
    those of a schedule of n. Without all actions of some microbatches, what is left keeps its
    order, so that a schedule free of deadlock stays so.
    """
    kept = (
        action
        for action in actions
        if (reduces or action.op is not Op.REDUCE)
        and (action.microbatch is None or action.microbatch < len(microbatches))
    )
    return tuple(
        action if action.microbatch is None else action._replace(microbatch=microbatches[number])
        for action in kept
        for number in [action.microbatch or 0]
    )


_Transfer = tuple[float, int, bool, int, Action]
"""A send and its moment, its deadline, whether it is of values, and a tie: sorted in this order."""


class _Clock:
    """When computes run if each takes one tick and messages take none (phase 1).

    Attributes:
        starts: per rank, the tick at which each of its computes starts, in order.
        start_of: the same by action.
    """

    def __init__(self, compute: Sequence[Sequence[Action]], flow: Dataflow):
        self.starts: list[list[int]] = [[] for _ in compute]
        self.start_of: dict[_Key, int] = {}
        self._compute = compute
        self._home = flow.placement
        self._reads = {
            (kind.stage, kind.op): [(stage, op) for stage, op, _ in flow.reads(kind.op, kind.stage)]
            for kind in flow.computes()
        }
        while any([self._advance(rank) for rank in range(len(compute))]):
            pass
        self._check_finished()

    def _advance(self, rank: int) -> bool:
        """Runs a rank until an input is missing; whether it has run anything."""
        starts, actions = self.starts[rank], self._compute[rank]
        free = starts[-1] + 1 if starts else 0
        begun = len(starts)
        for action in actions[begun:]:
            for read in self._inputs(action):
                if read not in self.start_of:
                    return len(starts) > begun
                free = max(free, self.start_of[read] + 1)
            starts.append(free)
            self.start_of[action] = free
            free += 1
        return len(starts) > begun

    def _inputs(self, action: Action) -> list[_Key]:
        microbatch = action.microbatch
        return [(s, op, microbatch, None) for s, op in self._reads[action.stage, action.op]]

    def _check_finished(self) -> None:
        blocked: dict[Cell, str] = {}
        for rank, (actions, starts) in enumerate(zip(self._compute, self.starts, strict=True)):
            if len(starts) == len(actions):
                continue
            inputs = self._inputs(actions[len(starts)])
            missing = next(Action(*read) for read in inputs if read not in self.start_of)
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


def _place_transfers(
    compute: Sequence[Sequence[Action]], flow: Dataflow, clock: _Clock
) -> list[_Transfer]:
    """Finds the moment of every transfer (phases 2 and 3)."""
    home, busy = flow.placement, [set(starts) for starts in clock.starts]
    sends: dict[tuple[int, Op], list[tuple[int, Op]]] = {}
    for stage, op, peer in flow.sends():
        sends.setdefault((stage, flow.producer(op, stage)), []).append((peer, op))
    transfers: list[_Transfer] = []
    for rank, actions in enumerate(compute):
        starts = clock.starts[rank]
        for step, (stage, producer, microbatch, _) in enumerate(actions):
            following = starts[step + 1] if step + 1 < len(starts) else math.inf
            for peer, op in sends.get((stage, producer), ()):
                deadline = clock.start_of[peer, flow.producer(op, peer), microbatch, None]
                earliest, latest = starts[step] + 1, int(min(following, deadline))
                time = _moment(earliest, latest, busy[rank], busy[home[peer]])
                is_forward = producer is Op.FORWARD
                send = Action(stage, op, microbatch, peer)
                transfers.append((time, deadline, is_forward, rank % 2, send))
    return transfers


def _moment(earliest: int, latest: int, busy: set[int], peer_busy: set[int]) -> int:
    """The last tick of the window at which neither end starts a compute, else its last tick."""
    for tick in range(latest, earliest - 1, -1):
        if tick not in busy and tick not in peer_busy:
            return tick
    return latest


def _check_compute(compute: Sequence[Sequence[Action]]) -> None:
    """Checks that there are only forwards and backwards, which a user's text may have more than."""
    for rank, actions in enumerate(compute):
        for step, action in enumerate(actions):
            if not action.op.is_compute:
                headline = (
                    f"Rank {rank}, step {step}: {action} is not a forward or backward. Add "
                    f"transfers before anything else."
                )
                raise ScheduleError(format_failure(compute, Cell(rank, step), headline))
