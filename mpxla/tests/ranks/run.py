"""Helpers for tests of programs with several ranks: the ranks compute, the test asserts.

    def add(a):                                     # at the top level of the test module
        smp.init({"pipeline_parallel_degree": 2})
        return a + smp.rank()

    def test_add():
        assert run_ranks(add, 2, 10) == [10, 11]

Ranks are real processes on the CPU, kept between calls. They meet in a file, so no ports are taken.
The test process itself never touches an XLA device.
"""

import importlib.util
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from mpxla.device.choice import BACKENDS
from mpxla.errors import MpxlaError
from mpxla.tests.backends import name_here
from mpxla.tests.ranks.pool import (
    Outcome,
    RankPool,
    borrow_pool,
    discard_pool,
    make_call,
)
from mpxla.tests.ranks.worker import Failed, Finished

__all__ = ["RankError", "RankResult", "run_ranks", "run_ranks_unpooled"]

_TAIL_LINES = 60
_PART_LINES = 20


class RankError(MpxlaError):
    """A function failed on some rank, or took too long.

    The text has one line per rank on top, the rank that failed first above all, then the traceback
    and the end of the output of every rank.
    """


@dataclass(frozen=True)
class RankResult:
    """How a process of `run_ranks_unpooled` ended."""

    exit_code: int
    """0, what it exited with, or minus the number of the signal that killed it."""
    stdout: str
    """Everything it wrote to standard output."""
    stderr: str
    """Everything it wrote to standard error."""
    duration_s: float
    """From the call of the function to the end of the process."""
    value: Any = None
    """What the function returned; None if it did not return."""


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 120.0,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Calls a function on every rank of a world of processes.

    The processes have the environment that torchrun would give them. A session of mpxla that the
    function starts is shut down after it returned, and the processes are used again, so that the
    next call does not wait for imports. After an error they are replaced.

    Args:
        fn: Function at the top level of a module, called as `fn(*args)` on every rank.
        world_size: Number of ranks.
        *args: Picklable arguments, the same for every rank.
        timeout_s: Longest time for all ranks, without the start of the processes.
        env: Further environment variables. Processes are kept per set of them.

    Returns:
        What the function returned on each rank, by rank; tensors come as host tensors.

    Raises:
        RankError: A rank raised, died or was late. The others get a few seconds to say what they
            noticed of it.
        TypeError: `fn` is not a function of a module's top level.
    """
    env = env or {}
    _require_backend(env)
    if env == {"MPXLA_DEVICE": name_here()}:
        env = {}  # processes without that have the same backend, and may be there
    call = make_call(fn, args)
    pool = borrow_pool(world_size, env)
    try:
        outcomes = pool.call(call, timeout_s)
    except BaseException:
        discard_pool(pool)
        raise
    is_reusable = all(outcome.is_finished and outcome.exit_code is None for outcome in outcomes)
    if not is_reusable:
        discard_pool(pool)
    if not all(outcome.is_finished for outcome in outcomes):
        raise RankError(_failure_text(fn.__qualname__, outcomes, timeout_s))
    return [_value(outcome) for outcome in outcomes]


def run_ranks_unpooled(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 120.0,
    env: Mapping[str, str] | None = None,
) -> list[RankResult]:
    """Calls a function on fresh processes and lets them end as scripts do, however they end.

    For tests of failures: an exception ends its process with a traceback, and no rank is disturbed
    because another one failed.

    Args:
        fn: As for `run_ranks`.
        world_size: Number of ranks.
        *args: As for `run_ranks`.
        timeout_s: Longest time until all processes have ended.
        env: As for `run_ranks`.

    Returns:
        How each rank ended, by rank.

    Raises:
        RankError: A process had not ended after `timeout_s`; shows every rank's stacks.
        TypeError: `fn` is not a function of a module's top level.
    """
    call = make_call(fn, args)
    pool = RankPool(world_size, env or {}, mode="once")
    try:
        outcomes = pool.call(call, timeout_s, grace_s=None)
    finally:
        pool.kill()
    if any(outcome.exit_code is None for outcome in outcomes):
        raise RankError(_failure_text(fn.__qualname__, outcomes, timeout_s))
    return [_result(outcome) for outcome in outcomes]


def _require_backend(env: Mapping[str, str]) -> None:
    """Skips the test if the backend that it asks for is not installed."""
    package = BACKENDS.get(env.get("MPXLA_DEVICE", ""), ("torch",))[0]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


def _result(outcome: Outcome) -> RankResult:
    assert outcome.exit_code is not None and outcome.ended_s is not None
    duration_s = outcome.ended_s - (outcome.started_s or outcome.ended_s)
    value = _value(outcome) if outcome.is_finished else None
    return RankResult(outcome.exit_code, outcome.stdout, outcome.stderr, duration_s, value)


def _value(outcome: Outcome) -> Any:
    assert isinstance(outcome.message, Finished)
    return pickle.loads(outcome.message.value)


def _failure_text(name: str, outcomes: Sequence[Outcome], timeout_s: float) -> str:
    lines = [_headline(name, outcomes, timeout_s)]
    lines += [f"  rank {outcome.rank}: {_summary(outcome, timeout_s)}" for outcome in outcomes]
    for outcome in outcomes:
        if isinstance(outcome.message, Failed):
            lines += [f"--- rank {outcome.rank}: traceback", outcome.message.trace.rstrip()]
        for stream, text in (("stdout", outcome.stdout), ("stderr", outcome.stderr)):
            if tail := _end_of(text.splitlines()):
                lines += [f"--- rank {outcome.rank}: end of {stream}", *tail]
    return "\n".join(lines)


def _end_of(lines: list[str]) -> list[str]:
    """The last lines; before them, of a crash, what was said last and the thread that crashed.

    Python writes the stacks of all threads behind the line that names the crash.
    """
    tail, earlier = lines[-_TAIL_LINES:], lines[:-_TAIL_LINES]
    crash = [i for i, line in enumerate(earlier) if line.startswith("Fatal Python error: ")]
    if not crash:
        return tail
    around = earlier[max(0, crash[-1] - _PART_LINES) : crash[-1] + _PART_LINES]
    thread = [i for i, line in enumerate(earlier) if line.startswith("Current thread ")]
    culprit = earlier[thread[-1] :][:_PART_LINES] if thread else []
    return [*around, "...", *culprit, "...", *tail]


def _headline(name: str, outcomes: Sequence[Outcome], timeout_s: float) -> str:
    failed = [outcome for outcome in outcomes if not outcome.is_finished and not outcome.is_late]
    if not failed:
        late = ", ".join(str(outcome.rank) for outcome in outcomes if outcome.is_late)
        return f"{name} timed out after {timeout_s:g} s on rank {late} of {len(outcomes)}"
    first = min(failed, key=lambda outcome: (_is_consequence(outcome), outcome.ended_s))
    return f"{name} failed on rank {first.rank} of {len(outcomes)}: {_summary(first, timeout_s)}"


def _is_consequence(outcome: Outcome) -> bool:
    return isinstance(outcome.message, Failed) and outcome.message.is_consequence


def _summary(outcome: Outcome, timeout_s: float) -> str:
    """One line: how the call ended on a rank."""
    if isinstance(outcome.message, Failed):
        return outcome.message.error.split("\n")[0]
    if outcome.is_finished:
        return "returned"
    if outcome.exit_code is None:
        return "had not returned (stacks below)"
    if outcome.exit_code < 0:
        return f"was killed by signal {-outcome.exit_code}"
    return f"exited with code {outcome.exit_code}"
