"""Tensors that a step leaves in places where it reads others: caches, or state to be carried.

It is captured with other tensors there, to see whether it then computes something else, or leaves
others. Where nothing is carried, that is an error. See `state.py` for values that are no tensors.
"""

import contextlib
import copy
from collections import deque
from collections.abc import Callable, Generator, Iterable
from typing import Any

import torch
import torch.utils._pytree as pytree

from mpxla.graph.alike import is_same_step, outputs_of
from mpxla.graph.capture.carried import CarriedError
from mpxla.graph.containers import has_fakes, with_other_tensors
from mpxla.graph.python.attempt import Attempt, restore
from mpxla.graph.python.held_objects import contents_of, has_attributes
from mpxla.graph.python.left_numbers import MANY
from mpxla.graph.python.made_objects import fakes_in
from mpxla.graph.python.noted_contents import CONTAINERS, PLAIN_CONTAINERS, is_simple
from mpxla.graph.python.plain import Read, change, plain, refill
from mpxla.graph.python.recorded import may_be_appended
from mpxla.graph.python.refusals import LeftTensorError, refusal, refusal_of_number
from mpxla.graph.stepgraph import StepGraph
from mpxla.graph.user_code import AgainError, OutsideWriteError

__all__ = [
    "WrittenPlacesError",
    "carry_changed",
    "changed_again",
    "comes_again",
    "constants_of",
    "refuse_carried",
    "refuse_grown",
]


class WrittenPlacesError(AgainError):
    """A step writes to tensors of no model, which Python only adds to, if they are left there."""


def comes_again(one: Attempt, capture: Callable[[], Attempt]) -> bool:
    """Whether a capture gives the same step; it may raise anything by what it finds."""
    try:
        again = capture()
        restore(again.log, again.outer)
        return is_same_step(one.step, again.step)
    except Exception:
        return False


def constants_of(outer: Iterable[Read]) -> list[tuple[Read, Any]]:
    """Variables without tensors that have got some, of which others are no result of the step.

    With other tensors like those.
    """
    changed = [(r, with_other_tensors(r.now(), 1)) for r in outer if is_simple(r.value)]
    return [(read, other) for read, other in changed if other is not None]


def changed_again(first: Attempt, capture: Callable[[], Attempt]) -> set[str]:
    """Plain values that a step changes also where it finds the caches filled that it has filled.

    And what is in objects that it has made with tensors.

    Raises:
        CarriedError, CaptureError: these are no caches, as the step then computes something else.
    """
    constants = [*first.log.constants(with_unread=True), *constants_of(first.outer)]
    changed = first.changed()
    made = {name: read.now() for name, read in changed.items() if has_attributes(read.now())}
    fakes = [place for value in made.values() for place in fakes_in(value)]
    with _constants_given(constants):
        try:
            with _constants_given(constants_of(fakes)):
                again = capture()
        except Exception:  # of these values
            return set()
        names = set(again.changed())
        restore(again.log, again.outer)
    names = {n for n in names if n in changed or n.rpartition(".")[0] in made}
    if not names and not _computes_same(first.step, again.step):
        _carry_constants(first, constants, with_unread=True)
    return names


@contextlib.contextmanager
def _constants_given(
    constants: Iterable[tuple[Read, Any]],
) -> Generator[list[tuple[Read, Any]]]:
    """Puts other tensors where a step has left constant ones; gives the places with these."""
    # Other containers every time: the step may fill them.
    given = [(r, pytree.tree_map(copy.copy, value)) for r, value in constants if r.put is not None]
    before = [(read, read.now()) for read, _ in given]
    for read, value in given:
        read.give(value)
    try:
        yield given
    except CarriedError as error:
        error.of_found = True
        raise
    finally:
        for read, value in before:
            read.give(value)


def carry_changed(
    first: Attempt,
    constants: Iterable[tuple[Read, Any]],
    flags: Iterable[tuple[Read, Any]],
    capture: Callable[[], Attempt],
) -> None:
    """Captures with tensors in places that have got constant ones: are these caches?

    With flags beside them as they were left.

    Raises:
        CarriedError: the step gives them others then, as to a counter that begins with zeros, or
            computes something else.
        CaptureError: so it does, in a place whose tensors are not carried, or counts beside them.
    """
    changed, counted, is_other = list[str](), list[str](), False
    with _constants_given(constants) as given:
        for put in first.log.left_carried() if given else ():  # who finds some reads others too
            put()
        for read, value in flags if given else ():
            read.give(value)
        try:
            if given:
                before = [plain(value) for _, value in given]
                again = capture()
                if not is_same_step(first.step, again.step):
                    changed = [
                        read.name
                        for read, value in given
                        if read.now() is not value
                        or again.log.is_written(read.name)
                        or read.name in again.computed  # which is put back already
                    ]
                    pairs = zip(given, before, strict=True)
                    counted = [r.name for (r, v), old in pairs if change("", old, plain(v))]
                    is_other = not _computes_same(first.step, again.step)
                restore(again.log, again.outer)
        except LeftTensorError:
            raise
        except (WrittenPlacesError, OutsideWriteError):
            changed = [read.name for read, _ in given]
        except Exception:  # of these values
            pass
        finally:
            restore(first.log, first.outer)
    if changed:
        raise refusal(" or ".join(changed), "")
    if counted:
        raise refusal_of_number(" or ".join(counted))
    if is_other:
        _carry_constants(first, given)


def _carry_constants(
    first: Attempt, constants: Iterable[tuple[Read, Any]], with_unread: bool = False
) -> None:
    """Has constant tensors carried where they are in modules; others cannot be."""
    first.log.carry_constants(with_unread)
    raise refusal(" or ".join(read.name for read, _ in constants), "")


def _computes_same(one: StepGraph, other: StepGraph) -> bool:
    """Whether steps differ in constants only."""
    return outputs_of(one, with_buffers=False) == outputs_of(other, with_buffers=False)


def _left_in(read: Read, again: Attempt) -> Any:
    """What another capture has left in a container."""
    left = {one.name: content for one, content in again.log.filled()}
    return left.get(read.name, read.now())


def _holds_same(container: Any, filled: Any) -> bool:
    """Whether tensors are still those with which it was filled."""
    leaves = (pytree.tree_leaves(one) for one in (container, filled))
    held, given = ([id(v) for v in one if isinstance(v, torch.Tensor)] for one in leaves)
    return held == given


def refuse_carried(first: Attempt, capture: Callable[[], Attempt]) -> None:
    """Captures with other tensors in the place of those that the step has left in containers.

    Raises:
        CaptureError: the step then is another one.
    """
    outer = [(read, now) for read in first.outer if isinstance(now := read.now(), CONTAINERS)]
    fillings = [(read, with_other_tensors(now)) for read, now in (*first.log.filled(), *outer)]
    for read, filled in [*fillings]:
        is_list = isinstance(read.value, list) and isinstance(filled, list)
        if is_list and len(filled) > len(read.value):  # does the step go by how many there are?
            fillings.append((read, (filled * MANY)[:MANY]))
    for read, filled in fillings:
        if filled is None or read.put is None:
            continue
        own = read.now()
        content, is_left = copy.copy(own), has_fakes(own)  # modules have got back what they had
        if is_left:
            refill(own, filled)
        else:
            read.put(copy.copy(filled))
        try:
            again = capture()
            restore(again.log, again.outer)
            is_same = is_same_step(first.step, again.step) or (
                id(own) in first.log.of_constants
                and _holds_same(_left_in(read, again), filled)
                and _computes_same(first.step, again.step)
            )
        except CarriedError as error:
            error.of_found = True
            raise
        except (Exception, WrittenPlacesError):  # of these tensors
            is_same = False
        finally:  # also where it is found that they are to be carried
            if is_left:
                refill(own, content)
            else:
                read.put(own)
        if not is_same:
            first.log.carry_filled(read.name)
            raise refusal(read.name, "")


def refuse_grown(first: Attempt, reads: Iterable[Read], capture: Callable[[], Attempt]) -> None:
    """Captures with more in lists and sets of plain data that have grown, and what else is left.

    Nothing else can be put into sets, context variables, objects with `__slots__`, and attributes
    of objects that the step replaces.

    Raises:
        CaptureError: the step then is another one, or has left tensors where none can be.
    """
    reads = [r for r in reads if is_simple(r.content) or not is_simple(r.value)]  # but caches
    is_closed = any(not isinstance(read.value, (dict, list)) for read in reads)
    held = [(read.content, read.value) for read in reads]
    grown = [now for now, before in held if _has_grown(now, before) and may_be_appended([*now])]
    contents = [(one, copy.copy(one)) for one, _ in held if isinstance(one, (list, deque, set))]
    is_same = not is_closed or comes_again(first, capture)
    for one in grown:
        num = MANY - len(one)
        more = range(-num, 0) if isinstance(one, set) else [one[-1]] * num
        (one.update if isinstance(one, set) else one.extend)(more)
    is_same = is_same and (not grown or comes_again(first, capture))
    for one, content in contents:
        refill(one, content)
    if not is_same:
        raise refusal_of_number(" or ".join(read.name for read in reads))
    for now, _ in held:
        if type(now) not in PLAIN_CONTAINERS and has_fakes(contents_of(now)):
            raise refusal(" or ".join(read.name for read in reads if read.content is now), "")


def _has_grown(now: Any, before: Any) -> bool:
    is_known = isinstance(now, (list, deque, set)) and isinstance(before, (list, frozenset))
    return is_known and len(now) > len(before)
