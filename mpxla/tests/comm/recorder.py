"""What every rank did with its programs, and the proof that the ranks did it together.

A CPU forgives what an accelerator does not: there, a program with a collective waits while it loads
until all members of its groups load it, and while it executes until all members of the own group
execute it, strictly in the order of each rank. `check` runs the recordings of all ranks under these
rules and explains the first place where they disagree or would wait for each other for ever.

Pure; it must not know transports, nor torch_xla.
"""

from collections.abc import Iterable, Sequence
from enum import StrEnum
from itertools import chain, pairwise
from typing import Any, NamedTuple, Protocol

from mpxla.comm.mesh import Mesh
from mpxla.comm.transport import Group
from mpxla.errors import RankMismatch

__all__ = ["Event", "Kind", "Recorded", "Recorder", "check"]


class Recorded(Protocol):
    """What a recording needs of a program (`xla_programs.Program`)."""

    @property
    def op(self) -> str:
        """The operation."""
        ...

    @property
    def mesh(self) -> Mesh:
        """Its groups."""
        ...

    @property
    def operands(self) -> tuple[Any, ...]:
        """Shapes and dtypes."""
        ...


class Kind(StrEnum):
    """What a rank did with a program."""

    LOAD = "load"
    EXECUTE = "execute"


class Event(NamedTuple):
    """One entry of a recording."""

    kind: Kind
    program: Any
    """A `Recorded`."""
    group: Group
    """The group of the rank that recorded it."""

    def __str__(self) -> str:
        return f"{self.kind} {self.program}"


class Recorder:
    """A runner of programs (`xla_queue.Runner`) that notes what another one is about to do.

    Attributes:
        events: of this rank, in order.
    """

    def __init__(self, runner: Any, rank: int) -> None:
        self._runner, self._rank = runner, rank
        self.events: list[Event] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def lower(self, program: Recorded) -> tuple[Recorded, Any]:
        return program, self._runner.lower(program)

    def load(self, lowered: tuple[Recorded, Any]) -> tuple[Recorded, Any]:
        self._note(Kind.LOAD, lowered[0])
        return lowered[0], self._runner.load(lowered[1])

    def execute(self, loaded: tuple[Recorded, Any], operands: Any, to_host: bool) -> Any:
        self._note(Kind.EXECUTE, loaded[0])
        return self._runner.execute(loaded[1], operands, to_host)

    def _note(self, kind: Kind, program: Recorded) -> None:
        (group,) = (group for group in program.mesh.groups if self._rank in group)
        self.events.append(Event(kind, program, group))


def check(recordings: Sequence[Sequence[Event]], *, whole_mesh: bool = False) -> None:
    """Proves that the ranks of a world agree and never wait for each other for ever.

    Args:
        recordings: Events of every rank, by rank, from the start.
        whole_mesh: Whether a load waits for all groups of its mesh, not only for the own one: the
            strictest reading of how devices load. Programs that were prepared together pass it.

    Raises:
        RankMismatch: A program's groups are not a mesh or its operands have no dim; it executes
            before it was loaded; or ranks disagree on order, groups, shapes or dtypes, or block
            each other.
    """
    for rank, events in enumerate(recordings):
        _check_alone(rank, events)
    done = [0] * len(recordings)
    is_moving = True
    while is_moving:
        is_moving = False
        for rank in range(len(recordings)):
            event = _next(recordings, done, rank)
            if event is not None and _can_happen(recordings, done, event, whole_mesh):
                for member in _awaited(event, whole_mesh):
                    done[member] += 1
                is_moving = True
    if any(count < len(events) for count, events in zip(done, recordings, strict=True)):
        raise RankMismatch(_explain(recordings, done, whole_mesh))


def _check_alone(rank: int, events: Iterable[Event]) -> None:
    """What can be seen on one rank."""
    loaded: set[Any] = set()
    for number, event in enumerate(events):
        where = f"rank {rank}, event {number}, {event}"
        groups = event.program.mesh.groups
        members = list(chain.from_iterable(groups))
        ascending = all(a < b for group in groups for a, b in pairwise(group))
        if not ascending or list(groups) != sorted(groups):
            raise RankMismatch(f"{where}: groups and their ranks have to be ascending.")
        if len(set(members)) < len(members) or len({len(group) for group in groups}) > 1:
            raise RankMismatch(f"{where}: groups have to be disjoint and of one size.")
        if event.group not in groups or rank not in event.group:
            raise RankMismatch(f"{where}: the rank is in no group of the program.")
        if any(not operand.shape for operand in event.program.operands):
            raise RankMismatch(f"{where}: operands need at least one dim.")
        if event.kind is Kind.LOAD:
            loaded.add(event.program)
        elif event.program not in loaded:
            raise RankMismatch(f"{where}: executed before it was loaded. Load it first.")


def _next(recordings: Sequence[Sequence[Event]], done: Sequence[int], rank: int) -> Event | None:
    events = recordings[rank]
    return events[done[rank]] if done[rank] < len(events) else None


def _awaited(event: Event, whole_mesh: bool) -> Group:
    """The ranks that have to come to an event."""
    is_wide = whole_mesh and event.kind is Kind.LOAD
    return event.program.mesh.members if is_wide else event.group


def _can_happen(
    recordings: Sequence[Sequence[Event]], done: Sequence[int], event: Event, whole_mesh: bool
) -> bool:
    return all(
        (there := _next(recordings, done, member)) is not None
        and (there.kind, there.program) == (event.kind, event.program)
        for member in _awaited(event, whole_mesh)
    )


def _explain(recordings: Sequence[Sequence[Event]], done: Sequence[int], whole_mesh: bool) -> str:
    """Why the ranks that are left cannot go on: a disagreement, an end too early, a circle."""
    waits_for: dict[int, int] = {}
    for rank in range(len(recordings)):
        event = _next(recordings, done, rank)
        if event is None:
            continue
        for other in _awaited(event, whole_mesh):
            there = _next(recordings, done, other)
            if there is None:
                return (
                    f"rank {rank}, event {done[rank]}: {event}, for which rank {other} never "
                    f"comes: its recording has ended. Run the same programs on all members."
                )
            if (there.kind, there.program) == (event.kind, event.program):
                continue
            if rank in _awaited(there, whole_mesh):
                return _difference((rank, done[rank], event), (other, done[other], there))
            waits_for.setdefault(rank, other)
    return _circle(recordings, done, waits_for)


def _difference(one: tuple[int, int, Event], two: tuple[int, int, Event]) -> str:
    """Two ranks wait for each other at events that differ."""
    (rank, step, event), (other, there, met) = one, two
    a, b = event.program, met.program
    if (event.kind, a.op) != (met.kind, b.op):
        what = "the order"
    elif a.mesh != b.mesh:
        what = "the groups"
    elif [operand.shape for operand in a.operands] != [operand.shape for operand in b.operands]:
        what = "the shapes"
    elif [operand.dtype for operand in a.operands] != [operand.dtype for operand in b.operands]:
        what = "the dtypes"
    else:
        what = "the order"
    return (
        f"ranks {rank} and {other} disagree on {what}: rank {rank}, event {step}, comes to "
        f"{event}; rank {other}, event {there}, comes to {met}. Run the same programs in the same "
        f"order on all members."
    )


def _circle(
    recordings: Sequence[Sequence[Event]], done: Sequence[int], waits_for: dict[int, int]
) -> str:
    rank = next(iter(waits_for))
    seen: list[int] = []
    while rank not in seen:
        seen.append(rank)
        rank = waits_for[rank]
    circle = seen[seen.index(rank) :]
    lines = [
        f"  rank {rank}, event {done[rank]}: {recordings[rank][done[rank]]}, waits for rank "
        f"{waits_for[rank]}"
        for rank in circle
    ]
    is_loading = any(recordings[rank][done[rank]].kind is Kind.LOAD for rank in circle)
    return "\n".join(
        [
            f"ranks {', '.join(map(str, circle))} block each other"
            f"{' while loading' if is_loading else ''}:",
            *lines,
            "Load programs together (prepare), and start them in one order on all ranks.",
        ]
    )
