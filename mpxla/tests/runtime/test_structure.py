import enum
import re
from collections import OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, replace

import pytest
import torch
import torch.utils._pytree as pytree

from mpxla.comm.codec import DATA
from mpxla.errors import RankMismatch
from mpxla.graph.containers import open_containers
from mpxla.runtime.identity import Identities
from mpxla.runtime.signature import LocalObject, PlainValue, portable, received, sign
from mpxla.runtime.structure import describe_structure, rebuild_structure

pytestmark = pytest.mark.unit

Pair = namedtuple("Pair", "left right")


class Mode(enum.Enum):
    FAST = "fast"


class Batch(dict):
    """As a tokenizer's output: a mapping that pytree does not know."""


class Name(str):
    """A string that would not come as it went."""


@dataclass
class Sample:
    x: object
    note: str


class Holder:
    def __init__(self, x, tag):
        self.x, self.tag = x, tag


def _hold(values, context):
    return Holder(values[0], context.tag)


pytree.register_dataclass(Sample)
# A context that is no data and has no name: an object of the user's.
pytree.register_pytree_node(Holder, lambda holder: ([holder.x], holder), _hold)
Holder.__repr__ = lambda holder: f"Holder({holder.tag})"
Holder.__eq__ = lambda holder, other: repr(holder) == repr(other)
Holder.__hash__ = None


def structure_of(value):
    return pytree.tree_structure(open_containers(value))


def travel(value):
    return DATA.restore(DATA.dump(value, "a test"), 0, 1)


CONTAINERS = [
    (1, [2, {"b": 3, 4: (5,)}], None),
    OrderedDict(b=1, a=[2]),
    Pair(1, Pair([2], 3)),
    deque([1, 2], maxlen=4),
    defaultdict(list, a=[1]),
    Batch(ids=1, mask=[2]),
    {"a": Sample(1, "x")},
    torch.return_types.max((1, 2)),
    {Mode.FAST: 1},
]


@pytest.mark.parametrize("value", CONTAINERS, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("own", [None, "same"])
def test_structures_are_built_again(value, own):
    spec = structure_of(value)
    mine = None if own is None else structure_of(value)
    found = rebuild_structure(travel(describe_structure(spec)), mine)
    assert found == spec and str(found) == str(spec)
    leaves = list(range(spec.num_leaves))
    assert pytree.tree_unflatten(leaves, found) == pytree.tree_unflatten(leaves, spec)


def test_what_is_no_data_comes_from_the_own_arguments():
    spec = structure_of([Holder(1, "a")])
    described = travel(describe_structure(spec))
    found = rebuild_structure(described, structure_of([Holder(2, "a")]))
    assert pytree.tree_unflatten([7], found)[0].x == 7
    for own in (None, structure_of([Holder(2, "b")]), structure_of([1])):
        with pytest.raises(RankMismatch, match=r"a container with Holder\(a\).*same arguments"):
            rebuild_structure(described, own)


def test_contexts_may_be_dictionaries_with_functions():
    def context(holder):
        return pytree.TreeSpec(Holder, {"keys": ["x"], "make": make, "holder": holder}, [])

    described = travel(describe_structure(context(Holder(1, "a"))))
    found = rebuild_structure(described, context(Holder(2, "a")))
    assert found.context["make"] is make and found.context["holder"].x == 2
    with pytest.raises(RankMismatch, match=r"Holder\(a\).*or pass a plain dictionary"):
        rebuild_structure(described, context(1))


def test_classes_that_are_not_imported_are_not_looked_for():
    described = describe_structure(structure_of(Pair(1, 2)))
    strange = replace(described, context=replace(described.context, module="antigravity"))
    with pytest.raises(RankMismatch, match=r"antigravity\.Pair.*import the container's class"):
        rebuild_structure(strange, structure_of(Pair(1, 2)))
    unknown = replace(described, kind=replace(described.kind, qualname="Popen"))
    with pytest.raises(RankMismatch, match=re.escape("collections.Popen")):
        rebuild_structure(unknown, None)


def make(*args, **kwargs):
    return sign("step", [(args, kwargs)], ("", ""), Identities())[0]


@pytest.mark.parametrize(
    "args",
    [
        (torch.zeros(2, 3), Pair(1, 2.5), {"mode": Mode.FAST, "dtype": torch.bfloat16}),
        (Batch(ids=torch.zeros(2, dtype=torch.int64)), b"x", None, 1 + 2j),
        (torch.nn.Linear(1, 1), Name("x"), [torch.device("cpu")]),
    ],
    ids=["values", "mapping", "objects"],
)
def test_signatures_travel(args):
    signature = make(*args, flag=True)
    dummies = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor[:0], args)
    found = received(travel(portable(signature)), dummies, {"flag": True})
    assert found == signature and found.key == signature.key


def test_odd_values_are_taken_from_every_rank():
    leaves = make(Name("x"), "x", Mode.FAST).leaves
    assert [type(leaf) for leaf in leaves] == [LocalObject, PlainValue, PlainValue]
