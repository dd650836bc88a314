"""What a step function leaves in plain attributes that it reads: flags, counters, caches.

A capture runs the function once, and a program does not run Python. Numbers become inputs of the
step, in a second capture (`counted.py`). For the others, the function is captured again with what
the first capture has left, to see whether that matters:

    the same graph       a text for the log; it stays what it is, of which a warning tells
    another one, once    a flag (`if not self.initialized:`): the first program serves one
                         microbatch, those after it have the second
    another one again    a flag that is toggled: it is followed from one microbatch to the next, as
                         all flags are where the function counts; an error for what is no flag
    a missing tensor     a cache of tables, which captures do not keep: its attributes stay what
                         they were, and programs fill it

Tensors in attributes of modules are carried, as buffers are (`capture/carried.py`).

Where the function also branches on values of the model, nothing is followed; what it only counts is
left as numbers of the model are (`recorded.py`).

This module must not know how steps are run.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from mpxla.errors import CaptureError
from mpxla.graph.alike import is_same_step, outputs_of
from mpxla.graph.capture.carried import CarriedError, FormError
from mpxla.graph.containers import has_fakes
from mpxla.graph.python.attempt import Attempt, is_changed, is_state, restore, stood_in
from mpxla.graph.python.attributes import MODE
from mpxla.graph.python.container_state import (
    has_no_others,
    is_as_left,
)
from mpxla.graph.python.counted import (
    Count,
    Counting,
    CountRead,
    FollowedRead,
    LeftRead,
    StateRead,
)
from mpxla.graph.python.decisions import OfModelError
from mpxla.graph.python.held_objects import Held
from mpxla.graph.python.left_numbers import RecordRead, may_go_on
from mpxla.graph.python.left_tensors import (
    WrittenPlacesError,
    carry_changed,
    changed_again,
    comes_again,
    constants_of,
    refuse_carried,
    refuse_grown,
)
from mpxla.graph.python.made_objects import Making
from mpxla.graph.python.noted_contents import CONTAINERS, is_simple, note_content
from mpxla.graph.python.numbers_of_ways import LeftNames, numbers_of_way
from mpxla.graph.python.outside_reads import kept
from mpxla.graph.python.plain import MISSING, Change, Read, change, plain, refill
from mpxla.graph.python.reach import Place
from mpxla.graph.python.recorded import Recorded
from mpxla.graph.python.refusals import refusal, refusal_of_number, warn_changed
from mpxla.graph.stepgraph import StepGraph
from mpxla.graph.user_code import AgainError, OutsideWriteError, UndecidedError, ValueNeededError

__all__ = ["OnceRead", "PythonState"]


@dataclass(frozen=True, eq=False)
class OnceRead(Read):
    """An attribute that the function reads and changes, once: its program is not used again."""

    def change(self) -> Change | None:
        """Always one, also where somebody has set the attribute back."""
        return Change(self.name, self.value, self.now())


class PythonState:
    """Judges captures of one call.

    Args:
        outside: names of numbers that have changed outside of steps, which are inputs, too.
        names: of places in which the function leaves something, if it asks for values.

    Attributes:
        filled_once: lists by which a step goes that appends plain data or tensors to them.
        contents: gets containers that a capture reads, with what they hold before.
        held: gets objects whose attributes captures may read.
        filled_memos: how often functions that remember tensors were called (`memos.py`), by id.
        made: gets names that the function makes outside of these (`new_names.py`).
        making: gets runs that have made what the function keeps (`made_objects.py`).
        unmade: gets texts of what they have not made, for a capture that ends with an error.
        is_trial: whether captures are not to be used, and leave nothing.
    """

    def __init__(self, outside: Collection[str] = (), names: LeftNames | None = None) -> None:
        self._outside = outside
        self._names = LeftNames() if names is None else names
        self._left: list[Callable[[], None]] = []
        self._followed: dict[str, FollowedRead] = {}
        self._of_model: set[str] = set()
        self._may_count = True
        self._asks = self.is_trial = False
        self._written: dict[str, RecordRead] = {}
        self._refusal: CaptureError | None = None
        self.filled_once: set[str] = set()
        self.contents: list[tuple[Any, Any]] = []
        self.held: dict[int, Held] = {}
        self.made: list[Place] = []
        self.making: list[Making] = []
        self.unmade: list[str] = []
        self.filled_memos: Counter[int] = Counter()

    def stop_counting(self, asks: bool = False) -> None:
        """From here on nothing is followed, and only counted where the step asks for values."""
        self._followed, self._may_count, self._asks = {}, False, asks

    @property
    def counts(self) -> tuple[Count, ...]:
        """The numbers that are inputs."""
        return Counting(self._followed).counts

    @property
    def is_following(self) -> bool:
        """Whether the last capture has followed values."""
        return bool(self._followed)

    def take(self) -> None:
        """Leaves in attributes what the last capture does, which is to be used."""
        for put in self._left:
            put()

    def judged(self, capture: Callable[..., Attempt]) -> tuple[StepGraph, list[Read]]:
        """The step and what it reads; attributes are then what they were before.

        Args:
            capture: captures the step with attributes as they are, a `Counting` that says which
                numbers are inputs, and places for which there are to be stand-ins.

        Raises:
            ValueNeededError: numbers are inputs, and the capture has no values of inputs.
            CaptureError: the step computes with a value that it changes, or reads tensors that it
                has left in a list or a dictionary.
        """
        while True:
            try:
                found = self._found(capture)
                if found[0].is_question or self.is_trial:  # the whole step comes after it
                    self._restart()
                return found
            except AgainError as error:
                self._restart()
                error.prepare()
            except BaseException as error:
                self._restart()
                if self._refusal is not None and not isinstance(error, CaptureError):
                    raise self._refusal from error  # it does not only add to those tensors
                raise
            finally:
                self.contents.clear()  # parameters cannot move while a copy has weak references

    def _found(self, capture: Callable[..., Attempt]) -> tuple[StepGraph, list[Read]]:
        while self._may_count:
            try:
                first = capture(Counting(self._followed), self._written)
            except (ValueNeededError, UndecidedError):
                raise
            except Exception as error:
                if not self._followed:
                    raise
                self._restart()
                if isinstance(error, OfModelError):
                    self._of_model.add(error.name)
                    del self._followed[error.name]
                else:
                    self.stop_counting()
                continue
            if first.beside_caches():
                again = partial(capture, Counting(self._followed), self._written)
                try:
                    first.log.counters |= changed_again(first, again)
                except BaseException:
                    restore(first.log, first.outer)  # else the next capture would count twice
                    raise
            numbers = first.numbers(self._outside)
            more = _all_of(CountRead, numbers)
            more |= _all_of(StateRead, first.states(self._outside))
            if self._followed:
                for name, read in first.given.items():
                    if first.log.is_read(name):
                        kind = StateRead if is_state(read.value) else CountRead
                        more[name] = kind.at(read)
            more = {name: read for name, read in more.items() if name not in self._of_model}
            if more and not self._followed:
                more |= _all_of(StateRead, first.begun())
            if self._followed or more:
                written = first.log.only_written()
                more |= _all_of(
                    LeftRead, {n: r for n, r in written.items() if n not in first.computed}
                )
            if not more:
                try:
                    return self._judged(first, lambda *a: capture(Counting(self._followed), *a))
                except _FlagError as error:
                    more = _all_of(StateRead, error.flags)
            again = partial(capture, Counting(), self._written)
            self._empty_caches(first)
            try:
                is_cache = numbers and first.log.has_tensors and not _goes_on(first, again)
            finally:  # else the next capture would begin with what this one has left
                restore(first.log, first.outer)
            self._restart()
            if is_cache:
                self.stop_counting()
            else:
                self._followed |= more
        return self._judged(capture(Counting(), self._written), lambda *a: capture(Counting(), *a))

    def leave_written(self, error: OutsideWriteError, reads: Iterable[Read]) -> None:
        """Sees whether a step writes only to tensors in places where others can be put.

        Raises:
            WrittenPlacesError: it does; it is to be captured with stand-ins there.
        """
        ids = {id(tensor) for tensor in error.written}
        found = {
            read.name: RecordRead.at(read, is_in_place=True)
            for read in reads
            if read.put is not None and id(read.now()) in ids and read.name not in self._written
        }
        if found and ids == {id(read.now()) for read in found.values()}:
            raise WrittenPlacesError(found, partial(self._stand_in, found, error))

    def _stand_in(self, places: dict[str, RecordRead], refusal: CaptureError) -> None:
        """Has stand-ins in places from here on; says why not where that is no way."""
        self._written |= places
        self._refusal = refusal

    def _empty_caches(self, first: Attempt) -> None:
        """Takes tensors of a capture out of what it leaves: every capture fills caches anew."""
        first.log.empty_caches()
        for place in first.outside:
            now = place.get()
            if now is not place.value and place.put is not None and has_fakes(now):
                place.put(place.value)
        for container, content in self.contents:
            if isinstance(container, dict):
                for key in [key for key, value in container.items() if has_fakes(value)]:
                    if key in content:
                        container[key] = content[key]
                    else:
                        del container[key]
            elif any(map(has_fakes, container)):
                before = content if len(content) == len(container) else container
                pairs = zip(container, before, strict=True)
                values = [old if has_fakes(new) else new for new, old in pairs]
                refill(container, [value for value in values if not has_fakes(value)])

    def _restart(self) -> None:
        """Before another capture: containers, and what is followed, are what they were."""
        self._refill()
        self.contents.clear()

    def _refill(self) -> None:
        """The same, where stand-ins are put into containers before their contents are noted."""
        for container, content in reversed(self.contents):
            refill(container, content)
        for read in self._followed.values():  # numbers without values were read there
            read.give(read.value)

    def _judged(
        self, first: Attempt, capture: Callable[..., Attempt]
    ) -> tuple[StepGraph, list[Read]]:
        self._left = []
        way = None
        if self._asks:
            # Metrics compare sums, and stand-ins, which are no tensors, would be equal.
            computed = first.computed.values()
            sums = {read.name for read in computed if not (read.is_more or read.is_in_place)}
            if sums := first.log.read_of_modules(sums):
                restore(first.log, first.outer)
                raise refusal(" or ".join(sums), first.log.line(sums[0]))
            way = numbers_of_way(first, capture, self._names, self._refill)
        if way is None:
            first, records = self._recorded(first, capture)
            reads, names, stand_ins = [], records.keys(), records
        else:
            first, records, reads = way.attempt, way.records, way.reads
            names, stand_ins = way.names, way.stand_ins
        capture = partial(capture, stand_ins)
        changed, outer = first.changed(), [r for r in first.outer if not is_changed(r)]
        changed = {name: read for name, read in changed.items() if name not in names}
        own = first.own_reads
        if not self._followed:  # calls compare modes; microbatches may leave others
            own = [read for read in own if not _is_mode(read.name)]
        known, filled = kept([*outer, *own])
        reads = [*reads, *known, *self._followed.values(), *records.values()]
        written = first.log.constants_written()
        is_question = first.step.is_question  # which leaves nothing
        if not is_question:
            told = {*names, *self._followed}
            reads += [r for r in written if r.name not in told]
        left = [] if is_question else first.left()
        self._left = [*first.log.left_carried(), first.log.tell_of_gone]
        constants = [*first.log.constants(), *constants_of(first.outer)]
        is_cache, once, counts = False, list[Read](), set[str]()
        flags = [(r, now) for r in changed.values() if r.put and is_simple(now := r.now())]
        try:
            if changed:
                once, counts = self._once(first, changed, capture)
        except _CacheError:
            is_cache = True
        finally:
            restore(first.log, first.outer)
        settled = [(read, value) for read, value in flags if read.name not in counts]
        settled += [(r, r.left) for r in written if r.put and not r.is_of_tensors]
        carry_changed(first, constants, settled, capture)
        if is_cache:
            if not is_question:
                _warn_of(filled)
            self._empty_caches(first)
            return first.step, [*reads, *changed.values()]
        refuse_carried(first, capture)
        memos = self._memos(first, capture)
        if not is_question:
            caches = first.log.of_constants
            others = [r for r in filled if not (id(r.content) in caches and _only_got_tensors(r))]
            others = [read for read in others if read.name not in memos]
            refuse_grown(first, others, capture)
            _warn_of(others)
        reads += [_as_it_is(read) for read in filled if read.name in memos]
        if not once and not is_question:
            first.log.warn(name for name in changed if name in counts)
        self._left += left
        self._empty_caches(first)
        return first.step, [*reads, *once]

    def _recorded(
        self, first: Attempt, capture: Callable[..., Attempt]
    ) -> tuple[Attempt, dict[str, RecordRead]]:
        """Captures with stand-ins in the places that get numbers which the model has computed.

        Returns:
            The capture to go on with, and the places with what is recorded there.

        Raises:
            CaptureError: the step goes by what is there.
        """
        found = {one.name: one for one in first.step.recorded}
        computed = {name: read for name, read in first.computed.items() if name in found}
        if not any(map(first.log.is_read, computed)):
            return first, {n: replace(r, recorded=found[n]) for n, r in computed.items()}
        restore(first.log, first.outer)
        self._refill()
        again, error_type = None, CaptureError
        try:
            again = stood_in(first, capture, computed, self._refill)
        except (ValueNeededError, UndecidedError):
            error_type = UndecidedError  # a function that asks may branch by them
        except Exception:  # of stand-ins, which Python needs the values of
            pass
        later = {} if again is None else {one.name: one for one in again.step.recorded}
        later = {
            name: computed[name].numbered(found[name], one) if name in found else one
            for name, one in later.items()
        }
        starts = self._starts(first, capture, computed, later)
        is_same = later.keys() == found.keys() and starts is not None
        # Tensors in a list that each step clears first are its own: see `refuse_carried`.
        lists = {
            name
            for name, read in computed.items()
            if found[name].is_plain or (read.is_more and found[name].has_tensors)
        }
        lists -= self.filled_once
        if again is not None and not is_same:
            restore(again.log, again.outer)
        if not is_same and lists:
            # It appends to them once, as caches are filled, or has cleared them.
            raise AgainError(lists, partial(self.filled_once.update, lists))
        if again is None or starts is None or not is_same:
            names = sorted(computed.keys() - later.keys() or computed)
            line = next(filter(None, map(first.log.line, names)), "")
            hint = _SHORTENED if any(computed[name].is_more for name in names) else ""
            if any(found[name].has_tensors for name in names):
                raise error_type(f"{refusal(' or '.join(names), line)}{_SUMMED}")
            raise error_type(
                f"The step function computes with {' or '.join(names)}, and gives it a number that "
                f"the model has computed{line}, by which the next microbatch would go. Make it a "
                f"buffer: register_buffer with a tensor, then self.name.copy_(value).{hint}"
            )
        first.log.warn(name for name in computed if not found[name].is_like(later[name]))
        records: dict[str, RecordRead] = {}
        for name, read in computed.items():
            is_first = not (read.is_more or may_go_on(read.value))
            known = found[name] if is_first and name not in starts else None
            start = starts.get(name, MISSING)
            records[name] = replace(read, recorded=later[name], first=known, start=start)
        return again, records

    def _starts(
        self,
        first: Attempt,
        capture: Callable[..., Attempt],
        computed: dict[str, RecordRead],
        later: dict[str, Recorded],
    ) -> dict[str, Any] | None:
        """What places without a number begin with, where tensors are added to it.

        `sums[name] = sums.get(name, 0) + loss.detach()` begins with 0. None if that is not known.
        """
        open_ = [
            read
            for name, read in computed.items()
            if name in later and later[name].goes_on and later[name].has_tensors
            if not read.is_more and read.put is not None
            if not may_go_on(read.value)
        ]

        def begins_with(read: RecordRead, start: float) -> bool:
            read.give(start)
            try:
                return comes_again(first, capture)
            finally:
                read.give(read.value)
                self._refill()

        pairs = ((read, start) for read in open_ for start in (0, 0.0))
        found = {read.name: start for read, start in pairs if begins_with(read, start)}
        return found if len(found) == len(open_) else None

    def _once(
        self, first: Attempt, changed: dict[str, Read], capture: Callable[[], Attempt]
    ) -> tuple[list[Read], set[str]]:
        """Reads of flags by which the step goes another way the next time, and counts."""
        self._empty_caches(first)
        try:
            second = _next(first, capture)
        except FormError:
            raise
        except Exception as error:  # it finds no tensors where it has put them
            if names := changed_again(first, capture):
                try:
                    first.log.carry_constants(with_unread=True)
                except CarriedError:
                    self._may_count = not self._asks  # again: with its tensors it can go on
                    raise
                line = first.log.line(min(names))
                raise refusal_of_number(min(names), line) from error
            raise _CacheError from error
        try:
            again = second.changed().keys() & changed.keys()
            begun = [read for name, read in first.begun().items() if name in again]
            is_same = is_same_step(first.step, second.step)
            for more in (1000, 1001) if is_same and begun else ():
                # `2 * x if n % 2 else n * x` is the same for n = 1, 2 and 3.
                for read in begun:
                    read.give(read.now() + more)
                is_same = is_same and comes_again(second, capture)
            if is_same:
                return [], again
            if again:
                self._follow(first, again)
                if not comes_again(second, capture):
                    line = second.log.line(min(again))
                    raise refusal_of_number(min(again), line)
        finally:
            restore(second.log, second.outer)
        flags = [read for name, read in changed.items() if name not in again]
        # `self.last = (self.last + [1])[-2:]` comes to rest. Functions are wrapped once.
        flags = flags or [r for r in changed.values() if isinstance(r.now(), CONTAINERS)]
        if not flags or outputs_of(first.step) == outputs_of(second.step):
            return [], set(changed)
        names = {read.name for read in flags}
        if first.log.has_constants(names):
            raise _CacheError
        if self._followed or any(map(_is_mode, names)):  # which loops set back before every step
            self._follow(first, names)
        return [OnceRead.at(read) for read in flags], again

    def _memos(self, first: Attempt, capture: Callable[[], Attempt]) -> set[str]:
        """Captures with what the step has left in containers of plain values.

        Returns:
            Names of those that are then left as they are: what is looked up there is put in once.

        Raises:
            CaptureError: the step then is another one.
        """
        filled = first.filled()
        if not filled:
            return set()
        left: dict[str, list[tuple[Any, Any]]] = {read.name: [] for read in filled}
        for read in filled:
            note_content(read.content, left[read.name])
        # Of kinds that nothing is put back into.
        closed = [(r, plain(r.content, r.names)) for r in filled if not left[r.name]]
        is_same = comes_again(first, capture)
        memos = {name for name, contents in left.items() if all(map(is_as_left, contents))}
        memos -= {r.name for r, old in closed if change("", old, plain(r.content, r.names))}
        for container, content in (pair for contents in left.values() for pair in contents):
            refill(container, content)
        entries, others = first.entries(), [read for read in filled if read.name not in memos]
        if self._may_count and others and all(has_no_others(read, entries) for read in others):
            raise _FlagError(entries)
        if is_same:
            stay = {id(container) for name in memos for container, _ in left[name]}
            # Questions start again, but for these, which they are known with.
            self.contents[:] = [known for known in self.contents if id(known[0]) not in stay]
            return memos
        raise refusal_of_number(filled[0].name)

    def _follow(self, first: Attempt, names: Collection[str]) -> None:
        """Has flags of some names followed from here on, where they all can be."""
        flags = first.flags(names)
        if self._may_count and len(flags) == len(names):
            raise _FlagError(flags)


def _all_of(kind: type[FollowedRead], reads: dict[str, Read]) -> dict[str, FollowedRead]:
    return {name: kind.at(read) for name, read in reads.items()}


def _as_it_is(read: Read) -> Read:
    return replace(read, value=plain(read.now(), read.names))


def _warn_of(reads: Iterable[Read]) -> None:
    for read in reads:
        warn_changed(read.name)


def _only_got_tensors(read: Read) -> bool:
    """Whether a dictionary is what it was but for tensors."""
    if not isinstance(held := read.content, dict):
        return False
    rest = {key: value for key, value in held.items() if not isinstance(value, torch.Tensor)}
    return change("", read.value or {}, plain(rest, read.names)) is None


def _is_mode(name: str) -> bool:
    return name.rpartition(".")[2] == MODE


def _next(first: Attempt, capture: Callable[..., Attempt]) -> Attempt:
    """What comes after a capture; with tensors in what is carried, if it does not go without."""
    left = first.log.left_carried()
    try:
        return capture()
    except FormError:
        raise
    except Exception:
        if not left:
            raise
    for put in left:
        put()
    return capture()


def _goes_on(first: Attempt, capture: Callable[..., Attempt]) -> bool:
    """Whether a step can go on with what it has left, though its tensors are not there."""
    try:
        again = _next(first, capture)
    except Exception:  # of what is missing
        return False
    restore(again.log, again.outer)
    return True


_SUMMED = " Only what the step does not go by may be added up elsewhere: total += loss.detach()."
_SHORTENED = (
    " Where it only takes old numbers out of a list that is too long, make that a "
    "collections.deque with a maxlen."
)


class _FlagError(Exception):
    """The step goes another way by flags that it changes."""

    def __init__(self, flags: dict[str, Read]):
        super().__init__()
        self.flags = flags


class _CacheError(Exception):
    """Attributes hold tensors beside the flag, and captures leave none: it is to stay as it was."""
