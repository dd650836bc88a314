"""Checks that need no clock: is every action there once, on its rank, after what it reads?

A rank carries out its list in order, and everything a stage reads is computed or received on its
own rank. So data dependencies are a matter of order within one list, and only the question whether
the lists fit together (deadlock) is left to the simulator. This module must not know time.
"""

from collections.abc import Collection, Sequence

from mpxla.errors import ScheduleError
from mpxla.schedule.action import OTHER_END, Action, Op
from mpxla.schedule.dataflow import Dataflow, Kind
from mpxla.schedule.grid import Cell, format_failure

__all__ = ["check_lists", "check_stages"]

_Rules = dict[Kind, tuple[Kind, ...]]
_Steps = dict[Kind, list[int]]
_NOT_YET = -1


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
        raise ScheduleError("The schedule has no actions. Generate it for at least one microbatch.")


def check_lists(schedule: Sequence[Sequence[Action]], flow: Dataflow) -> None:
    """Checks every rank's list by itself.

    Raises:
        ScheduleError: an action is on the wrong rank, malformed, duplicate, missing, or comes
            before something that it reads. The text shows the grid with that action marked.
    """
    forwards = [a.microbatch for actions in schedule for a in actions if a.op is Op.FORWARD]
    num_microbatches = 1 + max((m for m in forwards if m is not None), default=0)
    reduces = any(action.op is Op.REDUCE for actions in schedule for action in actions)
    copying = {a.stage for actions in schedule for a in actions if a.op.is_copy}
    found = [
        _check_order(schedule, rank, _steps(rules, num_microbatches, reduces), rules, flow)
        for rank, rules in enumerate(_rules(flow, len(schedule), copying))
    ]
    for rank, steps in enumerate(found):
        missing = [
            str(Action(kind.stage, kind.op, None if kind.op is Op.REDUCE else slot, kind.peer))
            for kind, slots in steps.items()
            for slot, step in enumerate(slots)
            if step == _NOT_YET and not kind.op.is_copy
        ]
        if missing:
            more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
            headline = (
                f"Rank {rank} lacks {', '.join(missing[:8])}{more}: every stage runs microbatches "
                f"0..{num_microbatches - 1}, and every edge between ranks carries each of them. "
                "Add what is missing."
            )
            failing = Cell(rank, len(schedule[rank]))
            raise ScheduleError(format_failure(schedule, failing, headline))


def _rules(flow: Dataflow, num_ranks: int, copying: Collection[int]) -> list[_Rules]:
    """What each rank does for a microbatch, and what must come before on the same rank."""
    rules: list[_Rules] = [{} for _ in range(num_ranks)]
    placement = flow.placement
    for kind in flow.computes():
        rank = placement[kind.stage]
        rules[rank][kind] = tuple(
            read
            if placement[read.stage] == rank
            else Kind(kind.stage, _receive_of(read.op), read.stage)
            for read in flow.reads(kind.op, kind.stage)
        )
    for stage, op, peer in flow.sends():
        produced = Kind(stage, flow.producer(op, stage))
        rules[placement[stage]][Kind(stage, op, peer)] = (produced,)
        rules[placement[peer]][Kind(peer, OTHER_END[op], stage)] = ()
    for stage in copying if flow.training else ():
        if stage in range(len(placement)):
            own, offload = rules[placement[stage]], Kind(stage, Op.OFFLOAD)
            own[offload] = (Kind(stage, Op.FORWARD),)
            own[Kind(stage, Op.LOAD)] = (offload,)
    return rules


def _receive_of(op: Op) -> Op:
    return Op.RECV_FORWARD if op is Op.FORWARD else Op.RECV_BACKWARD


def _steps(rules: _Rules, num_microbatches: int, reduces: bool) -> _Steps:
    """The step of every action of a rank, by kind and microbatch; a reduction has one slot."""
    steps: _Steps = {kind: [_NOT_YET] * num_microbatches for kind in rules}
    if reduces:
        steps |= {Kind(k.stage, Op.REDUCE): [_NOT_YET] for k in rules if k.op.ends_backward}
    return steps


def _check_order(
    schedule: Sequence[Sequence[Action]], rank: int, steps: _Steps, rules: _Rules, flow: Dataflow
) -> _Steps:
    """Checks one rank's actions in order and fills in their steps."""
    needs = {kind: [(need, steps[need]) for need in needed] for kind, needed in rules.items()}
    reduce = Op.REDUCE
    for step, action in enumerate(schedule[rank]):
        stage, op, microbatch, peer = action
        # Looked up by a plain tuple, which is equal to its Kind and much cheaper.
        kind = (stage, op, peer)
        slots = steps.get(kind)  # pyright: ignore[reportArgumentType, reportCallIssue]
        slot = 0 if microbatch is None else microbatch
        is_single = op is reduce
        problem = None
        if slots is None or not 0 <= slot < len(slots) or (microbatch is None) != is_single:
            problem = _misplaced(action, rank, flow, slots)
        elif slots[slot] != _NOT_YET:
            problem = f"the action is there twice; it came first at step {slots[slot]}. Remove it"
        elif is_single:
            last = flow.last_op(stage)
            backwards = steps[Kind(stage, last)]
            if _NOT_YET in backwards:
                need = Action(stage, last, backwards.index(_NOT_YET))
                problem = _unmet(action, need, schedule[rank])
        else:
            for need, need_slots in needs[kind]:  # pyright: ignore[reportArgumentType]
                if need_slots[slot] == _NOT_YET:
                    need = Action(need.stage, need.op, slot, need.peer)
                    problem = _unmet(action, need, schedule[rank])
                    break
            else:
                problem = _lost(action, steps, flow)
        if problem is not None:
            headline = f"Rank {rank}, step {step}, {action}: {problem}."
            raise ScheduleError(format_failure(schedule, Cell(rank, step), headline))
        assert slots is not None
        slots[slot] = step
    return steps


def _lost(action: Action, steps: _Steps, flow: Dataflow) -> str | None:
    """Says why saved values are not where an action looks for them: on the device."""
    stage, op, slot, _ = action
    offloaded = steps.get(Kind(stage, Op.OFFLOAD))
    if slot is None or offloaded is None:
        return None
    backward = flow.gradient_op(stage)
    if op.is_copy and steps[Kind(stage, backward)][slot] != _NOT_YET:
        return f"{stage}{backward}{slot} has read the saved values before. Put it before that"
    is_away = offloaded[slot] != _NOT_YET and steps[Kind(stage, Op.LOAD)][slot] == _NOT_YET
    if op is backward and is_away:
        return f"its saved values are on the host. Put {stage}LOAD{slot} before {action}"
    return None


def _unmet(action: Action, need: Action, actions: Sequence[Action]) -> str:
    """Says what an action reads that is not there yet."""
    what = {
        Op.FORWARD: f"the forward of stage {need.stage}",
        Op.BACKWARD: f"the backward of stage {need.stage}",
        Op.INPUT_GRADIENT: f"the input gradients of stage {need.stage}",
        Op.WEIGHT_GRADIENT: f"the weight gradients of stage {need.stage}",
        Op.OFFLOAD: f"the saved values of stage {need.stage} on the host",
        Op.RECV_FORWARD: f"the values from stage {need.peer}",
        Op.RECV_BACKWARD: f"the gradients from stage {need.peer}",
    }[need.op]
    where = f"only at step {actions.index(need)}" if need in actions else "missing"
    return (
        f"it needs {what} for microbatch {need.microbatch} first, but {need} is {where}. "
        f"Put {need} before {action}"
    )


def _misplaced(action: Action, rank: int, flow: Dataflow, slots: list[int] | None) -> str:
    """Says why an action cannot be in this rank's list at all."""
    stage, op, microbatch, peer = action
    num_stages = len(flow.placement)
    for which in (stage, peer):
        if which is not None and which not in range(num_stages):
            return f"stage {which} does not exist; there are stages 0..{num_stages - 1}"
    if flow.placement[stage] != rank:
        home = flow.placement[stage]
        return f"stage {stage} lives on rank {home}. Move the action there"
    if op is Op.REDUCE and (microbatch is not None or peer is not None):
        return f"a reduction has neither microbatch nor peer. Write {stage}REDUCE"
    if op is Op.REDUCE:
        return "there are no backwards, so nothing is to be reduced. Remove it"
    if microbatch is None:
        return "the action names no microbatch. Add one"
    if op is Op.BACKWARD and stage in flow.split:
        return (
            f"stage {stage} splits other backwards into I and W. Write {stage}I{microbatch} and "
            f"{stage}W{microbatch}, or B for all microbatches of the stage"
        )
    if op is Op.WEIGHT_GRADIENT and stage not in flow.split:
        return f"stage {stage} has no input gradients (I) that belong to it. Write I and W, or B"
    if op.is_copy and not flow.training:
        return "there are no backwards, so nothing is saved. Remove it"
    if (op.is_compute or op.is_copy) and peer is not None:
        return "only transfers have a peer. Leave it out"
    if op.is_transfer and peer is None:
        return "the transfer names no stage at its other end. Add it"
    if slots is not None:
        return f"microbatch {microbatch} does not exist; forwards run 0..{len(slots) - 1}"
    return _no_such_transfer(action.stage, action.peer, op, flow)


def _no_such_transfer(stage: int, peer: int | None, op: Op, flow: Dataflow) -> str:
    """Says why nothing travels where the action says so."""
    source, target = (stage, peer) if op.is_send else (peer, stage)
    assert source is not None and target is not None, "a transfer has a peer"
    is_forward = op in (Op.SEND_FORWARD, Op.RECV_FORWARD)
    if (source, target) not in (flow.forward_edges if is_forward else flow.backward_edges):
        name = "forward" if is_forward else "backward"
        return f"there is no {name} edge {source} -> {target}, so nothing travels. Remove it"
    if flow.placement[source] == flow.placement[target]:
        rank = flow.placement[source]
        return f"stages {source} and {target} share rank {rank}, so nothing travels. Remove it"
    return "there are no backwards, so gradients do not travel. Remove it"
