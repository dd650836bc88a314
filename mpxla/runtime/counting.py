"""Calls of step functions that change plain values outside of their arguments (`counted.py`).

Every microbatch is given what the one before it has left, which is known before any of them runs.
So the first rank of a pipeline follows a call from one microbatch to the next: by what is there,
it finds the plan, and that says what is there afterwards. Where there is none, all ranks put what
is there into the places, and capture the next one. When all plans are known, they put there what
the last microbatch leaves.

This module must not know how ranks agree on a call.
"""

from collections.abc import Hashable, Mapping
from typing import Any

from mpxla.graph.python.counted import FollowedRead, as_count
from mpxla.log import warn_once
from mpxla.runtime.call import Call, as_drawn, counted
from mpxla.runtime.model_watch import ModelView
from mpxla.runtime.plans.cache import Plan, Plans
from mpxla.runtime.signature import Signature

__all__ = ["Counters", "leave"]

_MANY_WAYS = 4
"""So many programs for what Python decides by numbers are worth a warning."""


class Counters:
    """What is known of functions that count.

    Args:
        plans: all plans.
    """

    def __init__(self, plans: Plans):
        self._plans = plans
        self._uses: set[Hashable] = set()

    def __contains__(self, signature: Signature) -> bool:
        """Whether a step function counts in the models that it is called with."""
        return bool(self._uses) and signature.use in self._uses

    def add(self, call: Call, plan: Plan, has_asked: bool) -> str | None:
        """A plan was captured for a call.

        Args:
            call: the call.
            plan: for the microbatch that is wanted.
            has_asked: whether the function has branched on values that depend on the model.

        Returns:
            Why it cannot be used, as the text of an error.
        """
        assert call.wanted is not None, "it was captured for that one"
        function = call.signature.function
        if plan.followed:
            self._uses.add(call.signature.use)
        if call.signature not in self:
            return None
        if has_asked or plan.signature.answers is not None:
            use = call.signature.use
            same = [other for other in self._plans if other.signature.use == use]
            names = " and ".join(sorted({name for other in same for name in other.followed}))
            return (
                f"{function} changes {names}, and branches on values that depend on the model, "
                f"too. Count in a buffer: register_buffer with a tensor, then self.name += 1."
            )
        view, names = plan.view, set[str]()
        for other in self._plans.like(call.signature, view):
            names.update(other.followed)
        if exact := sorted(_read_exactly(plan) & names):
            return (
                f"{function} changes {' and '.join(exact)}, and uses the value in a way that "
                f"cannot be followed from one microbatch to the next (a function of NumPy, say). "
                f"Count in a buffer: register_buffer with a tensor, then self.name += 1."
            )
        call.ways[call.wanted] = plan
        return None

    def find(self, call: Call, view: ModelView) -> None:
        """Finds the plan of each microbatch, as far as there are some; one is wanted if not."""
        count = call.signature.num_microbatches
        once = [way if way is not None and way.is_once else None for way in call.ways]
        once = once or [None] * count
        given = [way for way in once if way is not None]
        plans = [p for p in self._plans.like(call.signature, view) if not p.is_question]
        for plan in (*plans, *given):
            for name, read in plan.followed.items():
                call.began.setdefault(name, read.now())
        # Some were captured before it was known that these change in calls.
        plans = [plan for plan in plans if _read_exactly(plan).isdisjoint(call.began)]
        drawn = {plan: as_drawn(call, plan) for plan in (*plans, *given)}
        call.ways, call.states, call.left = [None] * count, [], dict(call.began)
        call.wanted = None
        for number, way in enumerate(once):
            call.states.append(dict(call.left))
            for plan in plans if way is None else [way]:
                wanted = [as_count(c.name, call.left[c.name]) for c in plan.signature.counts]
                if wanted != [*plan.signature.counts] or not _serves(plan, call.left):
                    continue
                change, left = plan.follow([*drawn[plan][number], *counted(call, plan, number)])
                if change is None:
                    call.ways[number] = plan
                    call.left.update(left)
                    break
            else:
                call.wanted = number
                return

    def reason(self, signature: Signature) -> str | None:
        """Why a call of a function that counts needs a new program, if it has others."""
        key = signature.of_arguments.key
        ways = [plan for plan in self._plans if plan.followed and plan.key == key]
        if len(ways) == _MANY_WAYS:
            warn_once(
                f"counted decisions {signature.function}",
                f"step function {signature.function.rpartition('.')[2]} was compiled {_MANY_WAYS} "
                f"times, since Python decides by values outside of its arguments that change "
                f"({', '.join(ways[-1].followed)}), or needs their values. It is compiled for "
                f"every way that they decide. Where these are many, compute with tensors: "
                f"torch.where, or a buffer that the step changes.",
            )
        return "by values that have changed, Python decides otherwise" if ways else None


def leave(call: Call, values: Mapping[str, Any]) -> None:
    """Puts values into their places, by name."""
    for plan in call.plans.values():
        for read in plan.objects:  # what follows is in those that are held now
            read.change()
        for name, read in plan.followed.items():
            if name in values and read.put is not None:
                read.put(values[name])


def _read_exactly(plan: Plan) -> set[str]:
    """Names of what has to have the value that it had when a plan was captured."""
    return {read.name for read in plan.view.reads if not isinstance(read, FollowedRead)}


def _serves(plan: Plan, values: Mapping[str, Any]) -> bool:
    """Whether a plan can be used with what is in the places that it follows."""
    return all(read.serves(values[name]) for name, read in plan.followed.items())
