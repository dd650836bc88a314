"""What one rank really did, action by action, while a profile is taken.

Programs run asynchronously, so a recorded rank waits for each of them: its spans are the device's
work, at the price that dispatching is not hidden behind it. Times are seconds of this process's
monotonic clock. This module must not know how records are merged or drawn.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from mpxla.runtime.buffers import LiveValues
from mpxla.schedule.action import Action

__all__ = ["ActionRecord", "CopyRecord", "Recorder", "StepRecord", "Wait"]


@dataclass
class Wait:
    """The wait for one message.

    Attributes:
        peer: stage that sent it.
        begin: when the rank began to wait.
        arrived: when the message was there.
        end: when its values were on the device.
    """

    peer: int
    begin: float
    arrived: float
    end: float


@dataclass
class ActionRecord:
    """One action.

    Attributes:
        action: its text.
        begin: when its turn came.
        dispatched: when its program was started, or the message handed over.
        end: when its program was done.
        held_bytes: saved activations on the device after it.
        waits: messages that it waited for before it started its program.
    """

    action: str
    begin: float
    dispatched: float
    end: float
    held_bytes: int = 0
    waits: list[Wait] = field(default_factory=list)


@dataclass
class CopyRecord:
    """One copy of saved values to the host or back, beside the actions.

    Attributes:
        action: the text of the action that began it.
        begin: when its turn came in its direction.
        end: when it was done.
    """

    action: str
    begin: float
    end: float


@dataclass
class StepRecord:
    """One call of a step function on one rank.

    Attributes:
        name: the step function.
        begin: when the call began.
        end: when it returned.
        actions: what the rank did, in order.
        copies: of saved values, in the order in which they were done.
        plan: what was going to run, as plain data, from `describe_plan`.
    """

    name: str
    begin: float
    end: float = 0.0
    actions: list[ActionRecord] = field(default_factory=list)
    copies: list[CopyRecord] = field(default_factory=list)
    plan: dict[str, object] = field(default_factory=dict)


class Recorder:
    """Collects the records of a rank. `wait_for_device` waits for all that was started."""

    def __init__(self, wait_for_device: Callable[[], None]):
        self.steps: list[StepRecord] = []
        self._wait_for_device = wait_for_device
        self._waits: list[Wait] = []

    def begin_step(self, name: str, plan: dict[str, object]) -> None:
        """A step function was called, and will run by this plan."""
        self._wait_for_device()
        self.steps.append(StepRecord(name, time.monotonic(), plan=plan))

    def end_step(self) -> None:
        """The call returns."""
        self._wait_for_device()
        self.steps[-1].end = time.monotonic()

    def run(self, action: Action, handler: Callable[[], None], values: LiveValues) -> None:
        """Runs an action by its handler and notes its times, and what is held of `values` then."""
        self._waits = []
        begin = time.monotonic()
        handler()
        dispatched = time.monotonic()
        if action.op.is_compute:
            self._wait_for_device()
        end, held = time.monotonic(), values.saved_bytes
        record = ActionRecord(str(action), begin, dispatched, end, held, self._waits)
        self.steps[-1].actions.append(record)

    def note_copy(self, action: Action, begin: float, end: float) -> None:
        """Saved values were moved; called by the threads that copy."""
        self.steps[-1].copies.append(CopyRecord(str(action), begin, end))

    def note_wait(self, wait: Wait) -> None:
        """The running action waited for a message."""
        self._waits.append(wait)
