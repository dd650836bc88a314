"""The proof over recordings finds every kind of mistake."""

from typing import Any, NamedTuple

import pytest

from mpxla.comm.mesh import Mesh
from mpxla.errors import RankMismatch
from mpxla.tests.comm.recorder import Event, Kind, check

pytestmark = pytest.mark.unit


class Operand(NamedTuple):
    shape: tuple[int, ...] = (4,)
    dtype: str = "float32"


class Program(NamedTuple):
    op: str = "all_reduce"
    groups: tuple[tuple[int, ...], ...] = ((0, 1),)
    operands: tuple[Any, ...] = (Operand(),)
    slot: int = 0

    @property
    def mesh(self):
        return Mesh(self.groups)

    def __str__(self):
        shape, dtype = self.operands[0]
        return f"{self.op} of {dtype}{list(shape)} over {self.mesh}"


def record(*per_rank):
    """Recordings; a program stands for its load and an execution."""
    recordings = []
    for rank, entries in enumerate(per_rank):
        events, loaded = [], set()
        for entry in entries:
            kind, program = entry if isinstance(entry[0], Kind) else (None, entry)
            group = next((g for g in program.groups if rank in g), ())
            if kind is not None or program not in loaded:
                events.append(Event(kind or Kind.LOAD, program, group))
                loaded.add(program)
            if kind is None:
                events.append(Event(Kind.EXECUTE, program, group))
        recordings.append(events)
    return recordings


def refused(*per_rank, **options):
    with pytest.raises(RankMismatch) as caught:
        check(record(*per_rank), **options)
    return str(caught.value)


SUM = Program()
GATHER = Program("all_gather")


def test_equal_sequences_pass():
    check(record([SUM, GATHER, SUM], [SUM, GATHER, SUM]), whole_mesh=True)
    check([[], []])


def test_ranks_of_other_groups_need_not_keep_step():
    groups = ((0, 1), (2, 3))
    left, right = Program(groups=groups), Program("all_gather", groups)
    recordings = record([left, left], [left, left], [right], [right])
    check(recordings)
    with pytest.raises(RankMismatch, match=r"disagree on the order.*load all_gather"):
        check(recordings, whole_mesh=True)


def test_another_order():
    text = refused([SUM, GATHER], [GATHER, SUM])
    assert text == (
        "ranks 0 and 1 disagree on the order: rank 0, event 0, comes to load all_reduce of "
        "float32[4] over {0,1}; rank 1, event 0, comes to load all_gather of float32[4] over "
        "{0,1}. Run the same programs in the same order on all members."
    )


def test_another_direction_is_another_order():
    there, back = Program("transfer", slot=0), Program("transfer", slot=1)
    assert "disagree on the order" in refused([there], [back])


def test_other_groups():
    wide = Program(groups=((0, 1), (2, 3)))
    crossed = Program(groups=((0, 3), (1, 2)))
    assert "ranks 0 and 1 disagree on the groups" in refused(
        [Program(groups=((0, 1),))], [wide], [wide], [wide]
    )
    assert "ranks 0, 3, 2, 1 block each other while loading" in refused(
        [crossed, wide], [wide, crossed], [crossed, wide], [wide, crossed]
    )


def test_other_shapes():
    longer = Program(operands=(Operand((5,)),))
    text = refused([SUM], [longer])
    assert "disagree on the shapes" in text
    assert "float32[4]" in text
    assert "float32[5]" in text


def test_other_dtypes():
    text = refused([SUM], [Program(operands=(Operand(dtype="bfloat16"),))])
    assert "disagree on the dtypes" in text
    assert "bfloat16[4]" in text


def test_a_rank_that_never_comes():
    text = refused([SUM, SUM], [SUM])
    assert text == (
        "rank 0, event 2: execute all_reduce of float32[4] over {0,1}, for which rank 1 never "
        "comes: its recording has ended. Run the same programs on all members."
    )


def test_ranks_that_block_each_other_while_loading():
    """Three ranks, three pairs, each rank starts with another one."""
    ab, bc, ca = (Program("transfer", (pair,)) for pair in [(0, 1), (1, 2), (0, 2)])
    text = refused([ab, ca], [bc, ab], [ca, bc])
    assert text.startswith("ranks 0, 1, 2 block each other while loading:\n")
    assert "  rank 1, event 0: load transfer of float32[4] over {1,2}, waits for rank 2" in text
    assert text.endswith(
        "Load programs together (prepare), and start them in one order on all ranks."
    )


def test_ranks_that_block_each_other_while_executing():
    ab, bc, ca = (Program("transfer", (pair,)) for pair in [(0, 1), (1, 2), (0, 2)])
    loads = [(Kind.LOAD, program) for program in (ab, bc, ca)]
    mine = [[e for e in loads if rank in e[1].groups[0]] for rank in range(3)]
    text = refused([*mine[0], ab, ca], [*mine[1], bc, ab], [*mine[2], ca, bc])
    assert text.startswith("ranks 0, 1, 2 block each other:\n")


def test_loading_while_others_execute():
    """Rank 0 is one step late with a program: it loads while rank 1 waits for another."""
    late = [(Kind.LOAD, SUM), SUM, (Kind.LOAD, GATHER), GATHER]
    early = [(Kind.LOAD, SUM), (Kind.LOAD, GATHER), SUM, GATHER]
    text = refused(late, early)
    assert "rank 0, event 1, comes to execute all_reduce" in text
    assert "rank 1, event 1, comes to load all_gather" in text


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (Program(groups=((1, 0),)), "groups and their ranks have to be ascending"),
        (Program(groups=((2, 3), (0, 1))), "groups and their ranks have to be ascending"),
        (Program(groups=((0, 1), (1, 2))), "groups have to be disjoint and of one size"),
        (Program(groups=((0, 1), (2,))), "groups have to be disjoint and of one size"),
        (Program(groups=((1, 2),)), "the rank is in no group of the program"),
        (Program(operands=(Operand(()),)), "operands need at least one dim"),
    ],
)
def test_programs_that_are_wrong_by_themselves(program, expected):
    assert f"rank 0, event 0, load {program}: {expected}" in refused([program], [program])


def test_execution_before_loading():
    events = [Event(Kind.EXECUTE, SUM, (0, 1))]
    with pytest.raises(RankMismatch, match="executed before it was loaded"):
        check([events, events])
