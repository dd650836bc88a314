"""Numbers that a function which asks for values (`answers.py`) leaves in Python, and goes by.

    if loss.item() < state["best"]:           a question, which goes by what one way leaves
        state["best"] = loss.item()
        state["bad"] = 0                      one way sets what another one counts
    else:
        state["bad"] += 1

A capture is one question or way of the function; what others leave is known by name. In another
capture stand-ins are in these places. If it is the same step, it does not go by them, and shows how
a microbatch goes on from the one before it. The places that it goes by keep their numbers, and what
was captured holds for these; microbatches that write there then run one after the other.

This module must not know how captures are made or run.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from mpxla.graph.python.attempt import Attempt, restore, stood_in
from mpxla.graph.python.left_numbers import RecordRead, may_go_on
from mpxla.graph.python.plain import Change, Read, change, plain
from mpxla.graph.python.recorded import Recorded

__all__ = ["DecidingRead", "LeftNames", "LeftNamesRead", "NumbersOfWay", "numbers_of_way"]


class DecidingRead(Read):
    """A place that some way of a function leaves a number in, and that this one goes by."""


@dataclass
class LeftNames:
    """Places in which any way through a function leaves numbers, by name; it grows.

    Attributes:
        are_more: whether they are lists, to which these are appended.
    """

    are_more: dict[str, bool] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class LeftNamesRead(Read):
    """The places that a capture knows of: it does not hold when there are more."""

    @classmethod
    def of(cls, names: LeftNames) -> "LeftNamesRead":
        """As many as there are."""
        return cls("what its ways leave", len(names.are_more), lambda: len(names.are_more))

    def change(self) -> Change | None:
        """Whether there are more of them now."""
        now = self.now()
        return None if now == self.value else Change(self.name, self.value, now)


@dataclass
class NumbersOfWay:
    """What was found.

    Attributes:
        attempt: the capture to go on with.
        stand_ins: places by which it does not go.
        names: of all places in which it may leave something.
        records: what it leaves in places, by name.
        reads: what it depends on.
    """

    attempt: Attempt
    stand_ins: Mapping[str, RecordRead]
    names: Collection[str]
    records: dict[str, RecordRead]
    reads: list[Read]


def numbers_of_way(
    first: Attempt,
    capture: Callable[[Mapping[str, RecordRead]], Attempt],
    names: LeftNames,
    refill: Callable[[], None],
) -> NumbersOfWay | None:
    """Captures a question or way with stand-ins.

    Args:
        first: a capture without.
        capture: makes another one with stand-ins in some places.
        names: known of the function; gets those of this way.
        refill: gives containers back what they held.

    Returns:
        None if the step computes with a number of the model, in whose place it leaves another.
    """
    found = {one.name: one for one in first.step.recorded}
    computed = {name: read for name, read in first.computed.items() if name in found}
    counted = {name: RecordRead.at(read) for name, read in first.counted().items()}
    changed = {name: RecordRead.at(read) for name, read in first.states_changed().items()}
    names.are_more |= {name: read.is_more for name, read in computed.items()}
    names.are_more |= dict.fromkeys(first.numbers(()).keys() | changed.keys(), False)
    places = first.places(names.are_more) | counted | changed | computed
    if not places:
        return NumbersOfWay(first, {}, (), {}, [LeftNamesRead.of(names)])
    restore(first.log, first.outer)
    refill()

    def captured(chosen: Mapping[str, RecordRead]) -> Attempt | None:
        """Another capture, if it is the same step and leaves numbers in the same places."""
        try:
            return stood_in(first, capture, chosen, refill)
        except Exception:  # of stand-ins, which Python needs the values of
            refill()
            return None

    def is_free(name: str) -> bool:
        again = captured({name: places[name]})
        if again is not None:
            restore(again.log, again.outer)
            refill()
        return again is not None

    free, again = places, captured(places)
    if again is None:
        free = {name: read for name, read in places.items() if is_free(name)}
        again = captured(free)
    if again is None:
        free, again = {}, capture({})
    later = {one.name: one for one in again.step.recorded}
    reads: list[Read] = [LeftNamesRead.of(names)]
    records: dict[str, RecordRead] = {}
    for name, read in places.items():
        one, before = later.get(name), None
        if name not in free:
            is_number = read.is_more or may_go_on(read.value)
            if one is not None and is_number and not first.step.is_question:
                restore(again.log, again.outer)
                refill()
                return None
            reads.append(DecidingRead.at(read))
            now = read.now()
            if read.put is not None and change("", read.value, plain(now, read.names)) is not None:
                one = Recorded.of_value(name, now)
                read.give(read.value)
        elif name in found and one is not None:
            one = read.numbered(found[name], one)
            if not found[name].is_like(one):
                again.log.warn([name])
            if not (read.is_more or may_go_on(read.value)):
                before = found[name]
        if one is not None or name in counted:
            one = one or Recorded.as_before(name)
            records[name] = replace(read, recorded=one, first=before)
    if first.step.is_question:  # which leaves nothing
        records = {}
    return NumbersOfWay(again, free, places.keys(), records, reads)
