"""Checks that need no clock: is every action there once, on its rank, after what it reads?

A rank carries out its list in order, and everything a stage reads is computed or received on its
own rank. So data dependencies are a matter of order within one list, and only the question whether
the lists fit together (deadlock) is left to the simulator. This module must not know time.
"""

from collections.abc import Sequence

from mpxla.errors import ScheduleError
from mpxla.schedule.action import Action, Op
from mpxla.schedule.dataflow import Dataflow, Kind
from mpxla.schedule.grid import Cell, format_failure

__all__ = ["check_lists", "check_stages", "has_backwards"]

_Rules = dict[Kind, tuple[Kind, ...]]
_Steps = dict[Action, int]


def has_backwards(schedule: Sequence[Sequence[Action]]) -> bool:
    """Whether a schedule trains."""
    return any(action.op is Op.BACKWARD for actions in schedule for action in actions)


def check_stages(schedule: Sequence[Sequence[Action]], placement: Sequence[int]) -> None:
    """Checks that there are stages, lists for their ranks, and actions.

    Raises:
        ScheduleError: the placement is empty or negative, or the schedule has too few ranks or no
            actions.
    """
    if not placement or min(placement) < 0:
        raise ScheduleError(
            f"placement {tuple(placement)} is not the pipeline rank of every stage. Name a rank, "
            "counted from 0, for at least one stage."
        )
    if len(schedule) <= max(placement):
        raise ScheduleError(
            f"The schedule has {len(schedule)} lists of actions, but placement "
            f"{tuple(placement)} uses rank {max(placement)}. Give one list per rank."
        )
    if not any(schedule):
        raise ScheduleError(
            "The schedule has no actions. Generate it for at least one microbatch."
        )


def check_lists(schedule: Sequence[Sequence[Action]], flow: Dataflow) -> None:
    """Checks every rank's list by itself.

    Raises:
        ScheduleError: an action is on the wrong rank, malformed, duplicate, missing, or comes
            before something that it reads. The text shows the grid with that action marked.
    """
    rules = _rules(flow, len(schedule))
    microbatches = [a.microbatch for actions in schedule for a in actions if a.op.is_compute]
    num_microbatches = 1 + max((m for m in microbatches if m is not None), default=0)
    found = [
        _check_order(schedule, rank, rules[rank], flow, num_microbatches)
        for rank in range(len(schedule))
    ]
    reduces = any(action.op is Op.REDUCE for actions in schedule for action in actions)
    for rank, steps in enumerate(found):
        expected = [
            Action(kind.stage, kind.op, microbatch, kind.peer)
            for kind in rules[rank]
            for microbatch in range(num_microbatches)
        ]
        if reduces:
            expected += [Action(s, Op.REDUCE) for s, r in enumerate(flow.placement) if r == rank]
        if len(steps) < len(expected):
            missing = [str(action) for action in expected if action not in steps]
            more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
            headline = (
                f"Rank {rank} lacks {', '.join(missing[:8])}{more}: every stage runs microbatches "
                f"0..{num_microbatches - 1}, and every edge between ranks carries each of them. "
                "Add what is missing."
            )
            raise ScheduleError(
                format_failure(schedule, Cell(rank, len(schedule[rank])), headline)
            )


def _rules(flow: Dataflow, num_ranks: int) -> list[_Rules]:
    """What each rank does for a microbatch, and what must come before on the same rank."""
    rules: list[_Rules] = [{} for _ in range(num_ranks)]
    receive = {Op.FORWARD: Op.RECV_FORWARD, Op.BACKWARD: Op.RECV_BACKWARD}
    placement = flow.placement
    for kind in flow.computes():
        rank = placement[kind.stage]
        rules[rank][kind] = tuple(
            read
            if placement[read.stage] == rank
            else Kind(kind.stage, receive[read.op], read.stage)
            for read in flow.reads(kind.op, kind.stage)
        )
    for stage, op, peer in flow.sends():
        assert peer is not None, "a send has a peer"
        is_forward = op is Op.SEND_FORWARD
        produced = Kind(stage, Op.FORWARD if is_forward else Op.BACKWARD)
        rules[placement[stage]][Kind(stage, op, peer)] = (produced,)
        other = Op.RECV_FORWARD if is_forward else Op.RECV_BACKWARD
        rules[placement[peer]][Kind(peer, other, stage)] = ()
    return rules


def _check_order(
    schedule: Sequence[Sequence[Action]],
    rank: int,
    rules: _Rules,
    flow: Dataflow,
    num_microbatches: int,
) -> _Steps:
    """Checks one rank's actions in order; gives the step of each."""
    steps: _Steps = {}
    for step, action in enumerate(schedule[rank]):
        stage, op, microbatch, peer = action
        problem = None
        # Kinds and actions are looked up by plain tuples, which are equal to them and much cheaper.
        if op is Op.REDUCE:
            needs = [(stage, Op.BACKWARD, m, None) for m in range(num_microbatches)]
            problem = _misplaced(action, rank, flow)
        elif microbatch is None or (stage, op, peer) not in rules:
            needs, problem = [], _misplaced(action, rank, flow)
        else:
            needs = [(s, o, microbatch, p) for s, o, p in rules[stage, op, peer]]
        if problem is None and action in steps:
            problem = f"the action is there twice; it came first at step {steps[action]}. Remove it"
        if problem is None:
            for need in needs:
                if need not in steps:
                    problem = _unmet(action, Action(*need), schedule[rank])
                    break
        if problem is not None:
            headline = f"Rank {rank}, step {step}, {action}: {problem}."
            raise ScheduleError(format_failure(schedule, Cell(rank, step), headline))
        steps[action] = step
    return steps


def _unmet(action: Action, need: Action, actions: Sequence[Action]) -> str:
    """Says what an action reads that is not there yet."""
    what = {
        Op.FORWARD: f"the forward of stage {need.stage}",
        Op.BACKWARD: f"the backward of stage {need.stage}",
        Op.RECV_FORWARD: f"the values from stage {need.peer}",
        Op.RECV_BACKWARD: f"the gradients from stage {need.peer}",
    }[need.op]
    where = f"only at step {actions.index(need)}" if need in actions else "missing"
    return (
        f"it needs {what} for microbatch {need.microbatch} first, but {need} is {where}. "
        f"Put {need} before {action}"
    )


def _misplaced(action: Action, rank: int, flow: Dataflow) -> str | None:
    """Says why an action cannot be in this rank's list at all; None if it can."""
    stage, op, microbatch, peer = action
    num_stages = len(flow.placement)
    for which in (stage, peer):
        if which is not None and which not in range(num_stages):
            return f"stage {which} does not exist; there are stages 0..{num_stages - 1}"
    if flow.placement[stage] != rank:
        home = flow.placement[stage]
        return f"stage {stage} lives on rank {home}. Move the action there"
    if op is Op.REDUCE:
        if microbatch is not None or peer is not None:
            return f"a reduction has neither microbatch nor peer. Write {stage}REDUCE"
        return None if flow.training else "nothing is to be reduced, as there are no backwards"
    if microbatch is None:
        return "the action names no microbatch. Add one"
    if op.is_compute:
        return "a forward or backward has no peer. Leave it out"
    if peer is None:
        return "the transfer names no stage at its other end. Add it"
    source, target = (stage, peer) if op.is_send else (peer, stage)
    is_forward = op in (Op.SEND_FORWARD, Op.RECV_FORWARD)
    edges = flow.forward_edges if is_forward else flow.backward_edges
    if (source, target) not in edges:
        name = "forward" if is_forward else "backward"
        return f"there is no {name} edge {source} -> {target}, so nothing travels. Remove it"
    if flow.placement[source] == flow.placement[target]:
        return f"stages {source} and {target} share rank {rank}, so nothing travels. Remove it"
    return "the schedule has no backwards, so gradients do not travel. Remove it"
