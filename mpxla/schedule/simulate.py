"""Dry run of a schedule: proves that it cannot deadlock and predicts its timeline.

Every rank carries out its list strictly in order. Two semantics of transfers:

    rendezvous   A transfer begins when both ends have reached it and holds both ranks until it is
                 done. This is how a two-rank collective behaves, and the stricter promise: lists
                 that pass are free of deadlock under any buffering.
    buffered     Sending costs its rank nothing; messages between two ranks in one direction travel
                 one after another. A receive only announces the message, and the forward or
                 backward that reads it waits for it. Values and gradients are separate streams, in
                 each of which messages arrive in the order of sending.

Phases: check every list by itself (`validate.py`), run all ranks until nobody can go on, and either
explain who waits for whom or measure. The result depends on the lists and costs alone, not on the
order in which ranks are visited, because every wait is for one particular action.

This module must not know how schedules are made.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from mpxla.errors import ScheduleError
from mpxla.schedule.action import OTHER_END, Action, Op, peer_of
from mpxla.schedule.copies import has_copies, offloads_done
from mpxla.schedule.dataflow import Dataflow, Edge, Kind
from mpxla.schedule.grid import Cell, format_failure
from mpxla.schedule.timeline import Timeline
from mpxla.schedule.validate import check_lists, check_stages

__all__ = ["Costs", "Timeline", "simulate"]

_SENDS = (Op.SEND_FORWARD, Op.SEND_BACKWARD)
_RECEIVES = (Op.RECV_FORWARD, Op.RECV_BACKWARD)


@dataclass(frozen=True)
class Costs:
    """What actions cost, in any one unit of time.

    Attributes:
        forward: cost of a forward, for all stages or one number per stage.
        backward: cost of a backward, for all stages or one number per stage.
        input_gradient: cost of the first part of a split backward; None: half of the backward.
        weight_gradient: cost of the second part; None: what the first leaves of the backward.
        transfer: cost of a transfer, for all edges or by (source, destination) stage of what
            travels; edges that are not named cost nothing.
        reduce: cost of a reduction, for all stages or one number per stage.
        copy: cost of moving what a stage saved for one microbatch to the host, or back; for all
            stages or one number per stage. It runs beside programs.
    """

    forward: float | Sequence[float] = 1.0
    backward: float | Sequence[float] = 1.0
    transfer: float | Mapping[Edge, float] = 0.0
    reduce: float | Sequence[float] = 0.0
    input_gradient: float | Sequence[float] | None = None
    weight_gradient: float | Sequence[float] | None = None
    copy: float | Sequence[float] = 0.0

    def per_stage(self, num_stages: int) -> dict[Op, list[float]]:
        """Costs of what has no peer, by operation, one number per stage if lengths are right."""

        def spread(cost: float | Sequence[float]) -> list[float]:
            return [cost] * num_stages if isinstance(cost, int | float) else list(cost)

        backward = spread(self.backward)
        halves = [cost / 2 for cost in backward]
        first = halves if self.input_gradient is None else spread(self.input_gradient)
        rest = [max(whole - part, 0.0) for whole, part in zip(backward, first, strict=False)]
        return {
            Op.FORWARD: spread(self.forward),
            Op.BACKWARD: backward,
            Op.INPUT_GRADIENT: first,
            Op.WEIGHT_GRADIENT: rest
            if self.weight_gradient is None
            else spread(self.weight_gradient),
            Op.REDUCE: spread(self.reduce),
            Op.OFFLOAD: spread(self.copy),
            Op.LOAD: spread(self.copy),
        }

    def plus(self, more: Mapping[Op, Sequence[float]]) -> "Costs":
        """With more of what every stage's programs cost, by operation."""
        sums = {}
        for op, added in more.items():
            own = self.per_stage(len(added))[op]
            sums[op.name.lower()] = [a + b for a, b in zip(own, added, strict=True)]
        return replace(self, **sums)


def simulate(
    schedule: Sequence[Sequence[Action]],
    placement: Sequence[int],
    forward_edges: Iterable[Edge],
    backward_edges: Iterable[Edge],
    costs: Costs | None = None,
    rendezvous: bool = True,
) -> Timeline:
    """Runs a schedule without running it; tells when every action ran.

    Edges are those of `Dataflow`; those of gradients are not looked at if there are no backwards.
    Without costs, forwards and backwards take 1, everything else nothing. Of `rendezvous` see the
    module.

    Raises:
        ScheduleError: an action is missing, duplicate, misplaced or before something it reads;
            messages overtake each other; the ranks deadlock; edges or costs do not fit the stages.
    """
    check_stages(schedule, placement)
    flow = Dataflow.of_schedule(schedule, placement, forward_edges, backward_edges)
    durations = _durations(costs or Costs(), flow)
    check_lists(schedule, flow)
    run_type = _RendezvousRun if rendezvous else _BufferedRun
    return run_type(schedule, flow, durations).timeline()


_Durations = dict[tuple[int, Op, int | None], float]


def _durations(costs: Costs, flow: Dataflow) -> _Durations:
    """Duration of every kind of action."""
    num_stages = len(flow.placement)
    result: _Durations = {}
    problems: list[str] = []
    for op, per_stage in costs.per_stage(num_stages).items():
        if len(per_stage) != num_stages:
            problems.append(f"{op.name.lower()} has {len(per_stage)} costs for {num_stages} stages")
        result |= {(stage, op, None): cost for stage, cost in enumerate(per_stage)}
    transfer = costs.transfer
    for stage, op, peer in flow.sends():
        is_mapping = isinstance(transfer, Mapping)
        cost = transfer.get((stage, peer), 0.0) if is_mapping else transfer
        result[stage, op, peer] = result[peer, OTHER_END[op], stage] = cost
    problems += [
        f"{op.name} of stage {stage} costs {cost}"
        for (stage, op, _), cost in result.items()
        if not 0 <= cost < float("inf")
    ]
    if problems:
        raise ScheduleError(
            f"Costs cannot be used: {'; '.join(problems)}. Give one number that is not negative, "
            "or one per stage."
        )
    return result


class _Run:
    """All ranks of a run: how far each has come, and when.

    Attributes:
        clock: per rank, the end of its last action.
        starts: per rank, when each action that it has done began.
        ends: per rank, when each ended.
        waiting: by what a rank waits for, a plain tuple that is equal to its Action: the rank.
    """

    def __init__(self, schedule: Sequence[Sequence[Action]], flow: Dataflow, durations: _Durations):
        self.schedule = schedule
        self.flow = flow
        self.placement = flow.placement
        self.durations = durations
        self.clock = [0.0] * len(schedule)
        self.starts: list[list[float]] = [[] for _ in schedule]
        self.ends: list[list[float]] = [[] for _ in schedule]
        self.waiting: dict[tuple[int, Op, int | None, int | None], int] = {}
        self.copies = [
            _Copies(actions, durations) if has_copies([actions]) else None for actions in schedule
        ]

    def timeline(self) -> Timeline:
        """Runs until nobody can go on.

        Raises:
            ScheduleError: some rank has not finished.
        """
        ready = list(range(len(self.schedule)))
        while ready:
            self.advance(ready.pop(), ready)
        if any(len(e) < len(a) for e, a in zip(self.ends, self.schedule, strict=True)):
            raise ScheduleError(self._explain())
        return Timeline(
            self.placement,
            tuple(map(tuple, self.schedule)),
            tuple(map(tuple, self.starts)),
            tuple(map(tuple, self.ends)),
        )

    def advance(self, rank: int, ready: list[int]) -> None:
        """Runs a rank until it must wait; ranks that it sets free are appended to `ready`."""
        raise NotImplementedError

    def awaited(self, rank: int) -> tuple[int, Action, str]:
        """Whom a blocked rank waits for: the rank, the action it must reach, and both in words."""
        raise NotImplementedError

    def _explain(self) -> str:
        blocked: dict[Cell, str] = {}
        waits_for: dict[int, int] = {}
        for rank, actions in enumerate(self.schedule):
            step = len(self.ends[rank])
            if step < len(actions):
                other, action, reason = self.awaited(rank)
                there = len(self.ends[other])
                waits_for[rank] = other
                blocked[Cell(rank, step)] = (
                    f"{reason} (step {self.schedule[other].index(action)} there; "
                    f"rank {other} is at step {there})"
                )
        cycle = _cycle(waits_for)
        circle = " -> ".join(f"rank {rank}" for rank in [*cycle, cycle[0]])
        headline = (
            f"Deadlock: {circle} wait for each other. Let both ends meet their transfers in the "
            "same order, as add_communication does."
        )
        failing = Cell(cycle[0], len(self.ends[cycle[0]]))
        return format_failure(self.schedule, failing, headline, blocked)


class _RendezvousRun(_Run):
    """Transfers hold both ranks; the rank that reaches one first waits there for the other."""

    def advance(self, rank: int, ready: list[int]) -> None:
        clock, durations, waiting = self.clock, self.durations, self.waiting
        actions, now = self.schedule[rank], clock[rank]
        starts, ends, copies = self.starts[rank], self.ends[rank], self.copies[rank]
        for step in range(len(ends), len(actions)):
            action = actions[step]
            stage, op, microbatch, peer = action
            if copies is not None:
                now = copies.begin(step, action, now)
            if peer is not None:
                # Each end waits under its own name and looks for the other's, as a plain tuple.
                other = waiting.pop((peer, OTHER_END[op], microbatch, stage), None)
                if other is None:
                    waiting[action] = rank
                    break
                now = max(now, clock[other])
                self.starts[other].append(now)
                clock[other] = now + durations[stage, op, peer]
                self.ends[other].append(clock[other])
                ready.append(other)
            starts.append(now)
            now += 0.0 if op.is_copy else durations[stage, op, peer]
            ends.append(now)
        clock[rank] = now

    def awaited(self, rank: int) -> tuple[int, Action, str]:
        action = self.schedule[rank][len(self.ends[rank])].other_end()
        other = self.placement[action.stage]
        return other, action, f"rank {other} to reach {action}"


class _Copies:
    """Copies of one rank to and from the host: one after another in each direction."""

    def __init__(self, actions: Sequence[Action], durations: _Durations):
        self._durations = durations
        self._done = offloads_done(actions)
        self._free = {Op.OFFLOAD: 0.0, Op.LOAD: 0.0}
        self._ends: dict[Action, float] = {}

    def begin(self, step: int, action: Action, now: float) -> float:
        """When an action that is ready can begin; a copy then runs by itself."""
        awaited = [*self._done.get(step, ())]
        if action.op.begins_backward:
            awaited.append(action._replace(op=Op.LOAD))
        now = max([now, *(self._ends.get(copy, 0.0) for copy in awaited)])
        if action.op.is_copy:
            begin = max(now, self._free[action.op])
            end = begin + self._durations[action.stage, action.op, None]
            self._free[action.op] = self._ends[action] = end
        return now


_Message = tuple[int, Op, int | None, int]
"""A message as the plain tuple of the action that sends it: stage, op, microbatch, peer."""


class _BufferedRun(_Run):
    """Messages travel by themselves; computes wait for those that they read."""

    def __init__(self, schedule: Sequence[Sequence[Action]], flow: Dataflow, durations: _Durations):
        super().__init__(schedule, flow, durations)
        self._check_streams()
        self._arrivals: dict[_Message, float] = {}
        self._link_free: dict[tuple[int, int], float] = {}
        self._sources: dict[tuple[int, Op], list[tuple[int, Op]]] = {
            (kind.stage, kind.op): self._sources_of(kind) for kind in flow.computes()
        }

    def _sources_of(self, kind: Kind) -> list[tuple[int, Op]]:
        """Stages that send what a compute reads, and how."""
        send = Op.SEND_FORWARD if kind.op is Op.FORWARD else Op.SEND_BACKWARD
        reads = self.flow.reads(kind.op, kind.stage)
        here = self.placement[kind.stage]
        return [(read.stage, send) for read in reads if self.placement[read.stage] != here]

    def _check_streams(self) -> None:
        """Checks that messages are received in the order in which they are sent."""
        sent: dict[tuple[int, int, Op], list[Action]] = {}
        for rank, actions in enumerate(self.schedule):
            for action in actions:
                if action.op in _SENDS:
                    stream = (rank, self.placement[peer_of(action)], action.op)
                    sent.setdefault(stream, []).append(action)
        streams = {stream: iter(actions) for stream, actions in sent.items()}
        for rank, actions in enumerate(self.schedule):
            for step, action in enumerate(actions):
                if action.op not in _RECEIVES:
                    continue
                expected = action.other_end()
                source = self.placement[expected.stage]
                arriving = next(streams[source, rank, expected.op])
                if arriving != expected:
                    headline = (
                        f"Rank {rank}, step {step}, {action}: the next message from rank {source} "
                        f"is {arriving}, as messages arrive in the order of sending. Receive in "
                        "that order, as add_communication does."
                    )
                    raise ScheduleError(format_failure(self.schedule, Cell(rank, step), headline))

    def advance(self, rank: int, ready: list[int]) -> None:
        actions, ends, now = self.schedule[rank], self.ends[rank], self.clock[rank]
        copies = self.copies[rank]
        for step in range(len(ends), len(actions)):
            action = actions[step]
            start = now
            if action.peer is None:
                missing, arrival = self._arrival(action)
                if missing is not None:
                    self.waiting[missing] = rank
                    break
                start = max(now, arrival)
                if copies is not None:
                    start = copies.begin(step, action, start)
                is_copy = action.op.is_copy
                now = start + (0.0 if is_copy else self.durations[action.stage, action.op, None])
            elif action.op in _SENDS:
                self._depart(action, now, ready)
            self.starts[rank].append(start)
            ends.append(now)
        self.clock[rank] = now

    def _depart(self, message: Action, now: float, ready: list[int]) -> None:
        """Puts a message on its link and wakes the rank that waits for it."""
        stage, op, microbatch, peer = message
        assert peer is not None, "a send has a peer"
        link = (self.placement[stage], self.placement[peer])
        begin = max(now, self._link_free.get(link, 0.0))
        self._link_free[link] = begin + self.durations[stage, op, peer]
        key = (stage, op, microbatch, peer)
        self._arrivals[key] = self._link_free[link]
        if key in self.waiting:
            ready.append(self.waiting.pop(key))

    def _arrival(self, action: Action) -> tuple[_Message | None, float]:
        """A message that the action reads and nobody has sent yet, or when all have arrived."""
        latest = 0.0
        for source, send in self._sources.get((action.stage, action.op), ()):
            message = (source, send, action.microbatch, action.stage)
            arrival = self._arrivals.get(message)
            if arrival is None:
                return message, latest
            latest = max(latest, arrival)
        return None, latest

    def awaited(self, rank: int) -> tuple[int, Action, str]:
        message, _ = self._arrival(self.schedule[rank][len(self.ends[rank])])
        assert message is not None, "only a compute without its message is blocked"
        action = Action(*message)
        other = self.placement[action.stage]
        return other, action, f"rank {other} to send {action}"


def _cycle(waits_for: Mapping[int, int]) -> list[int]:
    """Ranks that wait for each other in a circle, from the lowest one on."""
    rank = next(iter(waits_for))
    seen: list[int] = []
    while rank not in seen:
        seen.append(rank)
        rank = waits_for[rank]
    cycle = seen[seen.index(rank) :]
    lowest = cycle.index(min(cycle))
    return cycle[lowest:] + cycle[:lowest]
