"""Actions: the one representation of a pipeline schedule.

A schedule is one list of actions per pipeline rank, which that rank carries out in order. It prints
as one line per rank and is read back from that text:

    0F0 0SEND_F0>1 0F1 0RECV_B0<1 0SEND_F1>1 0B0 0RECV_B1<1 0B1
    1RECV_F0<0 1F0 1B0 1SEND_B0>0 1RECV_F1<0 1F1 1B1 1SEND_B1>0

The notation for compute ("2F0": stage 2, forward, microbatch 0) is that of
torch.distributed.pipelining; transfers also name the stage at the other end, because a value may
skip stages. A backward may be split in two (Qi et al., "Zero Bubble Pipeline Parallelism", ICLR
2024): "2I0" gives the gradients of the stage's inputs, which other stages wait for, and "2W0" those
of its weights, which nobody waits for. "2OFFLOAD0" begins to move what the forward saved to the
host, and "2LOAD0" back, while programs run. This module must not know how schedules come about or
what carries them out.
"""

import re
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import NamedTuple

from mpxla.errors import ScheduleError

__all__ = [
    "OTHER_END",
    "Action",
    "Op",
    "Schedule",
    "format_schedule",
    "microbatch_of",
    "parse_action",
    "parse_schedule",
    "peer_of",
]


class Op(StrEnum):
    """What an action does; the value is its text in a printed schedule."""

    FORWARD = "F"
    """Runs the forward of one microbatch."""
    BACKWARD = "B"
    """Runs the backward of one microbatch."""
    INPUT_GRADIENT = "I"
    """Runs the part of a backward that gives the gradients of the stage's inputs."""
    WEIGHT_GRADIENT = "W"
    """Runs the rest of that backward: the gradients of the stage's weights."""
    SEND_FORWARD = "SEND_F"
    """Sends the values that a later stage reads."""
    RECV_FORWARD = "RECV_F"
    """Receives values from an earlier stage."""
    SEND_BACKWARD = "SEND_B"
    """Sends the gradients of values that came from an earlier stage."""
    RECV_BACKWARD = "RECV_B"
    """Receives gradients from a later stage."""
    OFFLOAD = "OFFLOAD"
    """Begins to move what a forward saved to the host, see `copies`."""
    LOAD = "LOAD"
    """Begins to bring it back for the backward."""
    REDUCE = "REDUCE"
    """All gradients of the stage are complete: they may be reduced over data parallelism."""

    @property
    def is_compute(self) -> bool:
        """Whether the action runs a stage's program."""
        return self in _COMPUTES

    @property
    def is_copy(self) -> bool:
        """Whether the action moves saved values between the device and the host."""
        return self in (Op.OFFLOAD, Op.LOAD)

    @property
    def begins_backward(self) -> bool:
        """Whether the action gives the gradients that earlier stages wait for."""
        return self in (Op.BACKWARD, Op.INPUT_GRADIENT)

    @property
    def ends_backward(self) -> bool:
        """Whether nothing is left to do for the microbatch on that stage."""
        return self in (Op.BACKWARD, Op.WEIGHT_GRADIENT)

    @property
    def is_send(self) -> bool:
        """Whether the action is the sending end of a transfer."""
        return self in (Op.SEND_FORWARD, Op.SEND_BACKWARD)

    @property
    def is_receive(self) -> bool:
        """Whether the action is the receiving end of a transfer."""
        return self in (Op.RECV_FORWARD, Op.RECV_BACKWARD)

    @property
    def is_transfer(self) -> bool:
        """Whether the action is one end of a transfer."""
        return self.is_send or self.is_receive


_COMPUTES = (Op.FORWARD, Op.BACKWARD, Op.INPUT_GRADIENT, Op.WEIGHT_GRADIENT)

OTHER_END = {
    Op.SEND_FORWARD: Op.RECV_FORWARD,
    Op.RECV_FORWARD: Op.SEND_FORWARD,
    Op.SEND_BACKWARD: Op.RECV_BACKWARD,
    Op.RECV_BACKWARD: Op.SEND_BACKWARD,
}
"""What the stage at the other end of a transfer does."""


class Action(NamedTuple):
    """One step of one rank.

    Attributes:
        stage: the stage that acts.
        op: what it does.
        microbatch: for which microbatch; None for `REDUCE`.
        peer: the stage (not the rank) at the other end of a transfer, else None.
    """

    stage: int
    op: Op
    microbatch: int | None = None
    peer: int | None = None

    def __str__(self) -> str:
        microbatch = "" if self.microbatch is None else self.microbatch
        if self.peer is None:
            return f"{self.stage}{self.op}{microbatch}"
        arrow = ">" if self.op.is_send else "<"
        return f"{self.stage}{self.op}{microbatch}{arrow}{self.peer}"

    def other_end(self) -> "Action":
        """The same transfer as the stage at its other end sees it.

        Raises:
            ScheduleError: the action is not a transfer.
        """
        if self.op not in OTHER_END or self.peer is None:
            raise ScheduleError(
                f"{self} has no other end, because it is not a transfer. Ask for the other end of "
                "sends and receives only."
            )
        return Action(self.peer, OTHER_END[self.op], self.microbatch, self.stage)


Schedule = tuple[tuple[Action, ...], ...]
"""Actions of every rank."""


def microbatch_of(action: Action) -> int:
    """The microbatch of an action that has one: of all but `REDUCE`."""
    assert action.microbatch is not None, action
    return action.microbatch


def peer_of(action: Action) -> int:
    """The stage at the other end of a transfer."""
    assert action.peer is not None, action
    return action.peer


_PATTERN = re.compile(
    r"(?P<stage>\d+)(?:(?P<reduce>REDUCE)|(?P<work>[FBIW]|OFFLOAD|LOAD)(?P<done>\d+)"
    r"|(?P<transfer>SEND_[FB]|RECV_[FB])(?P<moved>\d+)(?P<arrow>[<>])(?P<peer>\d+))",
    re.ASCII,
)
_IDLE = "."


def parse_action(text: str) -> Action:
    """Reads one action; the inverse of `str(action)`.

    Raises:
        ScheduleError: the text is not an action.
    """
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise ScheduleError(
            f"{text!r} is not an action. Write stage, operation and microbatch: 2F0, 2B0, "
            "2I0, 2W0, 0SEND_F2>1, 1RECV_F2<0, 1SEND_B2>0, 0RECV_B2<1, 2OFFLOAD0, 2LOAD0 or "
            "0REDUCE."
        )
    stage = int(match["stage"])
    if match["reduce"]:
        return Action(stage, Op.REDUCE)
    if match["work"]:
        return Action(stage, Op(match["work"]), int(match["done"]))
    action = Action(stage, Op(match["transfer"]), int(match["moved"]), int(match["peer"]))
    if str(action) != text:
        raise ScheduleError(
            f"{text!r} is not an action: a send points to its peer and a receive comes from it. "
            f"Write {action}."
        )
    return action


def format_schedule(schedule: Iterable[Iterable[Action]]) -> str:
    """Prints a schedule, one line per rank; a rank that does nothing is a line with a dot."""
    return "\n".join(" ".join(map(str, actions)) or _IDLE for actions in schedule)


def parse_schedule(text: str) -> list[list[Action]]:
    """Reads a schedule, one line per rank; the inverse of `format_schedule`.

    Blank lines are skipped, and so is a dot, which stands for an idle step: schedules can be typed
    in the shape of their timeline.

    Raises:
        ScheduleError: a word is not an action; the text says on which line.
    """
    schedule: list[list[Action]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        words: Sequence[str] = line.split()
        if not words:
            continue
        try:
            schedule.append([parse_action(word) for word in words if word != _IDLE])
        except ScheduleError as error:
            error.add_note(f"in line {number} of the schedule (rank {len(schedule)}): {line}")
            raise
    return schedule
