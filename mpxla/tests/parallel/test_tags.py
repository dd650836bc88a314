"""`smp.partition` and `smp.set_partition`: tags on modules, before and without a session."""

import pytest
from torch import nn

from mpxla.errors import PartitionError
from mpxla.parallel.tags import partition, partition_pins, set_partition

pytestmark = pytest.mark.unit


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(1, 1))
        with partition(2):
            self.special = nn.Linear(1, 1)
        self.last = nn.Linear(1, 1)


def test_modules_created_inside_are_tagged():
    model = nn.Module()
    model.before = nn.Linear(1, 1)
    with partition(1):
        model.inside = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    model.after = nn.Linear(1, 1)
    assert partition_pins(model, "model") == {
        "model.inside": 1,
        "model.inside.0": 1,
        "model.inside.1": 1,
    }


def test_the_innermost_context_wins():
    with partition(1):
        block = Block()
    assert partition_pins(block, "net") == {
        "net": 1,
        "net.inner": 1,
        "net.inner.0": 1,
        "net.special": 2,
        "net.last": 1,
    }


def test_a_module_may_place_its_own_parts():
    assert partition_pins(Block(), "") == {".special": 2}


def test_classes_without_keyword_arguments_still_work():
    class Old(nn.Module):
        def __init__(self, width, *, bias):
            nn.Module.__init__(self)
            self.linear = nn.Linear(width, 1, bias=bias)

    with partition(0):
        old = Old(3, bias=False)
    assert partition_pins(old, "m") == {"m": 0, "m.linear": 0}


def test_the_constructor_is_put_back():
    original = nn.Module.__init__
    with partition(0), partition(1):
        assert nn.Module.__init__ is not original
    assert nn.Module.__init__ is original
    with pytest.raises(KeyError), partition(0):
        raise KeyError
    assert nn.Module.__init__ is original
    assert partition_pins(nn.Linear(1, 1), "m") == {}


def test_set_partition_tags_a_whole_tree_again():
    with partition(1):
        block = Block()
    set_partition(block, 0)
    assert set(partition_pins(block, "m").values()) == {0}
    set_partition(block.last, 3)
    pins = partition_pins(block, "m")
    assert pins["m.last"] == 3
    assert pins["m.special"] == 0


def test_tags_are_no_state():
    with partition(1):
        linear = nn.Linear(1, 1)
    assert list(linear.state_dict()) == ["weight", "bias"]


@pytest.mark.parametrize("index", [-1, "0", 1.0, None, True])
def test_indices_are_integers_from_0(index):
    text = "index is an integer from 0"
    with pytest.raises(PartitionError, match=text), partition(index):
        pass
    with pytest.raises(PartitionError, match=text):
        set_partition(nn.Linear(1, 1), index)
