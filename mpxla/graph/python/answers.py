"""Answers to what Python asks of values that no capture knows: `if loss > 2:`, `range(int(n))`.

A step function is captured once for each way through it. Where it asks what has no answer yet, the
capture ends: what it has computed up to there is an evaluation step, a question, whose results are
this answer and those before it. With what that step says of a microbatch, the function is captured
again, with one answer more, until it comes to its end.

    answers           captured                                        results
    ()                question: the step up to the first `if`         first
    (True,)           question: the step up to the second `if`        first, second
    (True, False)     the step                                        what it returns

This module must not know how a step is captured or run.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.fx.experimental import proxy_tensor

from mpxla.errors import CaptureError
from mpxla.graph.exchanged import exchanged
from mpxla.graph.user_code import at_user_line

__all__ = ["MOST_ANSWERS", "Answers", "Guess", "Undecided", "modules_left"]

MOST_ANSWERS = 32
"""So often one way through a step function may ask."""
MOST_INTEGERS = 8
"""So often it may ask for integers, each of whose values is a way of its own."""


class Guess(int):
    """What Python gets from here on; nobody runs what is captured so."""


class Undecided(BaseException):
    """Ends the user's function; no `except Exception` of its own is to catch it."""


def modules_left() -> AbstractContextManager[None]:
    """Lets torch's tracer leave the modules whose forwards end so; it forgets to.

    A module that is no part of the traced one is called as it is. Torch would print it first, for a
    log, and what `extra_repr` reads would seem to be read by the step.
    """
    original: Any = fx.Tracer.call_module

    def call_module(tracer: Any, module: Any, forward: Any, args: Any, kwargs: Any) -> Any:
        depth = len(tracer.module_stack)
        try:
            return original(tracer, module, forward, args, kwargs)
        except proxy_tensor._ModuleNotInstalledAsSubmoduleError:  # pyright: ignore[reportPrivateUsage]
            return forward(*args, **kwargs)
        except Undecided:
            while len(tracer.module_stack) > depth:
                tracer.module_stack.popitem()
            raise

    return exchanged(fx.Tracer, call_module=call_module)


class Answers:
    """Those of one capture.

    Args:
        given: what Python gets, in order; None where it may not ask.
        lines: the lines that asked for it in a capture that went another way at a mask; this one
            may leave out some.

    Attributes:
        asked: what it has asked, as tensors of one truth value or integer.
        lines: the user's lines that have asked it, as `at_user_line` gives them.
        is_open: whether the last of it has no answer.
        is_function_traced: whether a `torch.autograd.Function` is traced now, as a graph of its own
            that has no place for questions.
    """

    def __init__(self, given: tuple[int, ...] | None, lines: tuple[str, ...] | None = None):
        self._given, self._expected = given, lines
        self._place = -1
        self.asked: list[torch.Tensor] = []
        self.lines: list[str] = []
        self.is_open = False
        self.is_function_traced: Callable[[], bool] = lambda: False
        # By tensor, which is held so that no other one gets its id, and its writes.
        self._integers: dict[tuple[int, int], tuple[int, torch.Tensor]] = {}

    def may_answer(self, tensor: torch.Tensor) -> bool:
        """Whether Python may ask for the truth of a tensor, or the integer that it holds."""
        is_one = not is_functorch_wrapped_tensor(tensor) and tensor.numel() == 1
        return self._given is not None and is_one and not self.is_function_traced()

    def truth_of(self, tensor: torch.Tensor) -> bool:
        """The answer; see `_answer`."""
        return bool(self._answer(tensor.detach().reshape(()) != 0))

    def integer_of(self, tensor: torch.Tensor) -> int:
        """The answer; see `_answer`."""
        key = id(tensor), tensor._version
        if key in self._integers:
            return self._integers[key][0]
        if len(self._integers) == MOST_INTEGERS:
            raise CaptureError(
                f"The step function asks for integers that depend on the model more than "
                f"{MOST_INTEGERS} times, at last{at_user_line()}. Each value of each of them is a "
                f"way of its own through the step: use tensors as indices, or masks."
            )
        found = self._answer(tensor.detach().reshape(()).long())
        # By the first guess, 0, loops over numbers have a turn, so that what they run has a stage.
        found = int(not found) if isinstance(found, Guess) else found
        self._integers[key] = found, tensor
        return found

    def _answer(self, asked: torch.Tensor) -> int:
        """What Python gets.

        Raises:
            Undecided: there is none yet.
            CaptureError: there are too many of them.
        """
        assert self._given is not None, "`may_answer` has said so"
        if len(self.asked) == MOST_ANSWERS:
            raise CaptureError(
                f"The step function branches on values that depend on the model more than "
                f"{MOST_ANSWERS} times, at last{at_user_line()}. Each turn of such a loop is a "
                f"way of its own through the step: loop a fixed number of times, and choose with "
                f"torch.where."
            )
        line = at_user_line()
        self.asked.append(asked)
        self.lines.append(line)
        self._place += 1
        if self._expected is not None:
            if line not in self._expected[self._place :]:
                self.is_open = True
                raise Undecided
            self._place = self._expected.index(line, self._place)
        if self._place >= len(self._given):
            if self._given and isinstance(self._given[-1], Guess):
                return self._given[-1]
            self.is_open = True
            raise Undecided
        return self._given[self._place]

    def check(self) -> None:
        """After a whole capture.

        Raises:
            CaptureError: the function has not asked for all answers.
        """
        assert self._given is not None or not self.asked
        if self._expected is not None or self.is_open:
            return
        told = [answer for answer in self._given or () if not isinstance(answer, Guess)]
        if len(self.asked) < len(told):
            raise CaptureError(
                "The step function branches on values that depend on the model, and asked for "
                "fewer of them when it was captured again. What decides in Python must follow "
                "from its arguments and its model."
            )
