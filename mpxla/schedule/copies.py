"""Saved values on the host between a forward and its backward, as actions of the schedule.

A copy runs beside the rank's programs. What that means for memory is one rule, which the executor,
the simulator and the forecast share:

    OFFLOAD  begins the copy. The next compute hides it; the device's memory is free before anything
             else takes some: a load, or the compute after that.
    LOAD     begins the copy back. The device's memory is taken from then on; the backward waits.

    rank 0   F0 OFFLOAD0 F1 OFFLOAD1 |free 0| F2 OFFLOAD2 |free 1| F3 LOAD0 F4 B0 ...

With a horizon of 2, LOAD0 has two computes before B0. A microbatch stays on the device where its
backward is so near that no compute would find the memory free.

This module must not know what is copied or how long that takes.
"""

from collections.abc import Mapping, Sequence

from mpxla.schedule.action import Action, Op

__all__ = ["add_copies", "has_copies", "offloads_done"]


def add_copies(schedule: Sequence[Sequence[Action]], horizon: int) -> list[list[Action]]:
    """Inserts offloads and loads into the lists of every rank, wherever they free memory.

    Sends that directly follow a forward go before its offload: another rank may wait for them. A
    microbatch is loaded `horizon` computes before its backward, at least 1.

    Returns:
        The lists with copies. Evaluation steps keep nothing, and have none.
    """
    return [_with_copies(actions, horizon) for actions in schedule]


def has_copies(schedule: Sequence[Sequence[Action]]) -> bool:
    """Whether some rank moves saved values."""
    return any(action.op.is_copy for actions in schedule for action in actions)


def _with_copies(actions: Sequence[Action], horizon: int) -> list[Action]:
    computes = [step for step, action in enumerate(actions) if action.op.is_compute]
    forwards: dict[tuple[int, int | None], int] = {}
    after: dict[int, Action] = {}
    before: dict[int, list[Action]] = {}
    for number, step in enumerate(computes):
        stage, op, microbatch, _ = actions[step]
        if op is Op.FORWARD:
            forwards[stage, microbatch] = number
        elif op.begins_backward:
            forward = forwards[stage, microbatch]
            # Between them are one compute that hides the offload, the horizon, and what gains.
            if number - forward - 1 < horizon + 2:
                continue
            place, sends = computes[forward], (stage, Op.SEND_FORWARD)
            while actions[place + 1][:2] == sends:
                place += 1
            after[place] = Action(stage, Op.OFFLOAD, microbatch)
            load = Action(stage, Op.LOAD, microbatch)
            before.setdefault(computes[number - horizon], []).append(load)
    result: list[Action] = []
    for step, action in enumerate(actions):
        result += before.get(step, ())
        result.append(action)
        if step in after:
            result.append(after[step])
    return result


def offloads_done(actions: Sequence[Action]) -> Mapping[int, tuple[Action, ...]]:
    """Which offloads have to be complete before each action of a rank.

    Returns:
        Step of the action -> offloads; empty for schedules without copies.
    """
    found: dict[int, tuple[Action, ...]] = {}
    hidden: list[Action] = []
    begun: list[Action] = []
    for step, action in enumerate(actions):
        if action.op is Op.OFFLOAD:
            begun.append(action)
        elif action.op is Op.LOAD:
            own = action._replace(op=Op.OFFLOAD)
            hasty = [own] if own in begun else []
            begun = [offload for offload in begun if offload != own]
            if hidden or hasty:
                found[step] = (*hidden, *hasty)
            hidden = []
        elif action.op.is_compute:
            if hidden:
                found[step] = tuple(hidden)
            hidden, begun = begun, []
    return found
