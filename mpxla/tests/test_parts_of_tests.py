"""Which tests CI runs: the slow ones in parts, in turn, and some with the newest torch."""

import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from mpxla.tests.conftest import pytest_collection_modifyitems

pytestmark = pytest.mark.unit


def part(names, option):
    """What is left of the tests, and what is reported as left out."""
    unmarked = partial(SimpleNamespace, get_closest_marker=lambda marker: None)
    items, left_out = [unmarked(nodeid=name) for name in names], []
    hook = SimpleNamespace(pytest_deselected=lambda items: left_out.extend(items))
    pytest_collection_modifyitems(
        SimpleNamespace(option=SimpleNamespace(part=option), hook=hook), items
    )
    return [item.nodeid for item in items], [item.nodeid for item in left_out]


def test_every_test_is_in_one_part_and_stays_there():
    names = [f"test_file.py::test_case[{number}]" for number in range(100)]
    parts = [part(names, f"{number}/4")[0] for number in range(657, 661)]
    assert sorted(name for one in parts for name in one) == sorted(names)
    assert all(15 < len(one) < 35 for one in parts)
    assert part(names[50:], "657/4")[0] == [name for name in parts[0] if name in names[50:]]
    assert part(names, "1/4") == (parts[0], [name for name in names if name not in parts[0]])
    assert part(names, None) == (names, [])


def test_what_runs_with_the_newest_torch_is_there():
    tests = Path(__file__).parent
    makefile = (tests.parents[1] / "Makefile").read_text()
    found = re.search(r"addprefix mpxla/tests/,([^)]+)\)", makefile)
    names = found[1].replace("\\", " ").split()
    assert len(names) > 10
    assert [name for name in names if not (tests / name).exists()] == []
