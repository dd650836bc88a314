"""Who writes what, and how any part is found again."""

import pytest
import torch

from mpxla.checkpoint.files import save_object
from mpxla.checkpoint.shards import ShardIndex, ShardReader, Slot, assign_writers
from mpxla.errors import CheckpointError

pytestmark = pytest.mark.unit


def slot(name, count, offset=0, whole=None, key="", kind="model"):
    return Slot(kind, name, key, "float32", (whole or count,), offset, count)


def test_what_several_hold_is_shared_evenly():
    common = [slot(f"p{i}", 100) for i in range(6)]
    alone = slot("mine", 150)
    shares = assign_writers([[*common, alone], common])
    assert sorted(s for share in shares for s in share) == sorted([*common, alone])
    assert alone in shares[0]
    loads = [sum(s.num_bytes for s in share) for share in shares]
    assert max(loads) == 1600 and min(loads) == 1400


def test_the_assignment_depends_on_nothing_but_the_slots():
    held = [[slot("b", 5), slot("a", 5)], [slot("a", 5), slot("b", 5)]]
    assert assign_writers(held) == assign_writers([list(h) for h in held])
    assert [len(share) for share in assign_writers(held)] == [1, 1]


def test_slots_know_their_size_and_name():
    part = Slot("optimizer", "w", "exp_avg", "bfloat16", (4, 3), 6, 5)
    assert (part.num_elements, part.num_bytes, part.is_whole) == (12, 10, False)
    assert part.title == "exp_avg/w[6:11]"
    assert slot("w", 3).title == "w"
    assert Slot("model", "s", "", "float32", (), 0, 1).is_whole


@pytest.fixture
def reader(tmp_path):
    """A tensor of 12 elements in three files, in pieces of 5, 4 and 3."""
    whole = torch.arange(12.0)
    entries = []
    for number, (first, last) in enumerate([(5, 9), (0, 5), (9, 12)]):
        s = Slot("optimizer", "w", "m", "float32", (3, 4), first, last - first)
        save_object(tmp_path / f"f{number}", {s.title: whole[first:last].clone()})
        entries.append((s, f"f{number}"))
    return ShardReader(tmp_path, ShardIndex(entries, {"tied": "w"}, {}))


def test_any_part_is_put_together(reader):
    assert torch.equal(reader.whole("optimizer", "w", "m"), torch.arange(12.0).view(3, 4))
    for first in range(12):
        for last in range(first, 13):
            part = reader.flat("optimizer", "w", "m", first, last - first)
            assert part.tolist() == list(range(first, last))


def test_only_what_is_needed_is_read(reader):
    reader.flat("optimizer", "w", "m", 5, 3)
    assert reader.num_bytes_read == 12
    assert list(reader._files) == ["f0"]


def test_what_is_not_there_is_named(reader, tmp_path):
    with pytest.raises(CheckpointError, match=r"does not hold elements 12 to 14 of optimizer m w"):
        reader.flat("optimizer", "w", "m", 10, 4)
    with pytest.raises(CheckpointError, match=r"of optimizer v w; it may come from another model"):
        reader.flat("optimizer", "w", "v", 0, 1)
    gap = ShardIndex([(slot("w", 2, offset=2, whole=4), "f0")], {}, {})
    with pytest.raises(CheckpointError, match=r"does not hold elements 0 to 4 of model  w"):
        ShardReader(tmp_path, gap).whole("model", "w")


def test_tied_names_are_found(reader):
    index = reader.index
    assert index.saved_name("optimizer", ["other", "tied"]) == "w"
    assert index.saved_name("optimizer", ["w"]) == "w"
    assert index.saved_name("model", ["w"]) is None
    assert index.keys("optimizer", "w") == ["m"]
    assert index.shapes("optimizer") == {"w": (3, 4)}
