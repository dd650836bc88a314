"""What makes two calls of a step function the same program."""

import dataclasses
import pickle
from argparse import Namespace
from collections import UserDict

import numpy as np
import pytest
import torch
from torch import nn

from mpxla.errors import RankMismatch
from mpxla.graph.capture.step import TensorLeaf
from mpxla.graph.containers import open_object
from mpxla.runtime.identity import Identities
from mpxla.runtime.model_watch import model_flags
from mpxla.runtime.signature import (
    LocalObject,
    PlainValue,
    describe_change,
    fill,
    local_objects,
    sign,
)

pytestmark = pytest.mark.unit

NO_FLAGS = model_flags(None)


def signature(*args, function="train", count=2, model=None, identities=None, **kwargs):
    flags = model_flags(model)
    return sign(function, [(args, kwargs)] * count, flags, identities or Identities())[0]


def key(*args, **kwargs):
    return signature(*args, **kwargs).key


def test_a_call_is_described_leaf_by_leaf():
    module = nn.Linear(1, 1)
    found, tensors, objects = sign(
        "train",
        [((torch.full((2, 3), i), module), {"n": 4, "more": {"y": torch.ones(2).long()}})
         for i in range(2)],
        NO_FLAGS,
        Identities(),
    )  # fmt: skip
    assert dict(zip(found.paths, found.leaves, strict=True)) == {
        "[0][0]": TensorLeaf((2, 3), torch.int64),
        "[0][1]": LocalObject("[0][1]", "Linear", 0),
        "[1]['n']": PlainValue(4),
        "[1]['more']['y']": TensorLeaf((2,), torch.int64),
    }
    assert objects == {"[0][1]": module}
    assert [[t.flatten()[0].item() for t in mb] for mb in tensors] == [[0, 1], [1, 1]]
    assert len(found.tensor_leaves) == 2
    assert (found.num_microbatches, found.grad_enabled, found.autocast) == (2, True, ())


def test_equal_calls_share_a_program():
    assert key(torch.zeros(2), 1, a="x") == key(torch.ones(2), 1, a="x")
    assert hash(key(torch.zeros(2), n=None)) == hash(key(torch.ones(2), n=None))


def test_objects_are_told_apart():
    known = Identities()
    one, other = nn.Linear(1, 1), nn.Linear(1, 1)
    first = key(one, Namespace(a=1), identities=known)
    assert key(one, Namespace(a=1), identities=known) == first
    assert key(other, Namespace(a=1), identities=known) != first
    assert key(one, Namespace(a=2), identities=known) != first


def test_mappings_and_sets_of_any_type_are_containers():
    found, tensors, objects = sign(
        "train",
        [((UserDict(a=torch.ones(2), b="text"), {torch.zeros(3)}), {})],
        NO_FLAGS,
        Identities(),
    )
    assert objects == {}
    assert found.paths == ("[0][0]['a']", "[0][0]['b']", "[0][1][0]")
    (mapping, group), _ = fill(found, tensors[0], {})
    assert type(mapping) is UserDict
    assert mapping["a"] is tensors[0][0]
    assert mapping["b"] == "text"
    assert group == {tensors[0][1]}
    assert pickle.loads(pickle.dumps(found)) == found


def test_an_opened_object_is_a_container():
    part = open_object(Namespace(x=torch.ones(2), more=UserDict(y=torch.zeros(3), name="a")))
    found, tensors, objects = sign("train", [((part,), {})], NO_FLAGS, Identities())
    assert objects == {}
    assert [tuple(t.shape) for t in tensors[0]] == [(2,), (3,)]
    (made,), _ = fill(found, tensors[0], {})
    assert type(made) is Namespace
    assert made.x is tensors[0][0]
    assert type(made.more) is UserDict
    assert made.more["name"] == "a"


def test_objects_without_tensors_and_modules_stay_closed():
    for value in (Namespace(a=1), nn.Linear(1, 1), [torch.ones(1)], torch.ones(1), len, 3):
        assert open_object(value) is value
    tree = Namespace()
    for _ in range(60):  # there are more ways to the root than could be gone
        tree = Namespace(left=tree, right=tree)
    assert open_object(tree) is tree


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(2), torch.zeros(3)),
        (torch.zeros(2), torch.zeros(2, 1)),
        (torch.zeros(2), torch.zeros(2).double()),
        (torch.zeros(2), [torch.zeros(2)]),
        (torch.zeros(2), 0),
        ({"a": 1}, {"b": 1}),
        ([1], (1,)),
        (1, 2),
        (1, 1.0),
        (1, True),
        (0.0, -0.0),
        ("a", "b"),
        (None, 0),
        (nn.Linear(1, 1), nn.ReLU()),
        (torch.float32, torch.float64),
        (np.int64(1), np.int64(2)),
        (np.float32(1), np.float64(1)),
        (torch.device("cpu"), torch.device("meta")),
    ],
)
def test_different_calls_do_not_share_a_program(one, other):
    assert key(one) != key(other)


def test_nan_is_the_same_value_every_time():
    first, second = float("nan"), float("nan")
    assert key(first) == key(second)
    assert hash(key(first)) == hash(key(second))


def test_modes_that_change_what_a_function_does():
    model = nn.Sequential(nn.Linear(1, 1), nn.Dropout())
    base = key(1, model=model)
    model[1].eval()
    part = key(1, model=model)
    model.eval()
    assert len({base, part, key(1, model=model)}) == 3
    model.train()
    assert key(1, model=model) == base
    with torch.no_grad():
        assert key(1, model=model) != base
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert key(1, model=model) != base
    assert key(1, model=model, function="other") != base
    assert key(1, model=model, count=3) != base
    model[0].requires_grad_(False)
    assert key(1, model=model) != base
    assert model_flags(None) == ("", "")


def test_autocast_of_another_dtype_is_another_program():
    keys = []
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            keys.append(key(1))
    assert keys[0] != keys[1]


def test_faulty_parts_are_refused():
    def call(*parts):
        return sign("train", [((part,), {}) for part in parts], NO_FLAGS, Identities())

    text = r"train: microbatch 1 differs from microbatch 0 .* smp_slice has to return equally"
    for parts in (
        (torch.zeros(2), torch.zeros(3)),
        (torch.zeros(2), torch.zeros(2).int()),
        ([torch.zeros(2)], [torch.zeros(2)] * 2),
    ):
        with pytest.raises(RankMismatch, match=text):
            call(*parts)
    with pytest.raises(RankMismatch, match="microbatch 2 differs"):
        call(torch.zeros(1), torch.zeros(1), torch.zeros(2))


def test_it_survives_the_way_to_another_rank():
    found = signature(torch.zeros(2), nn.Linear(1, 1), Namespace(a=1), [None, "s"], k=torch.int8)
    copy = pickle.loads(pickle.dumps(found))
    assert copy.key == found.key
    assert copy == found


def test_filling_puts_everything_in_its_place():
    args = (torch.zeros(2), [nn.Linear(1, 1), 3], None)
    found, _, objects = sign("train", [(args, {"k": torch.ones(1)})], NO_FLAGS, Identities())
    x, y = torch.full((2,), 5.0), torch.full((1,), 6.0)
    (first, (module, number), none), named = fill(found, [x, y], objects)
    assert first is x
    assert module is args[1][0]
    assert (number, none) == (3, None)
    assert named == {"k": y}


def test_other_ranks_put_their_own_objects():
    mine, theirs = nn.Linear(1, 1), nn.Linear(1, 1)
    found, _, _ = sign("train", [((torch.zeros(2), mine), {})], NO_FLAGS, Identities())
    own = local_objects((torch.zeros(2, 0), theirs), {})
    assert own == {"[0][1]": theirs}
    assert fill(found, [torch.zeros(2)], own)[0][1] is theirs


def test_a_rank_without_the_object():
    found, _, _ = sign("train", [((nn.Linear(1, 1),), {})], NO_FLAGS, Identities())
    text = r"train: pp_rank 0 passes a Linear at \[0\]\[0\], and this rank passes none there\."
    with pytest.raises(RankMismatch, match=text):
        fill(found, [], local_objects((None,), {}))


# What the log says about a new program.


def test_first_call():
    assert describe_change(signature(1), []) == "first call"
    assert describe_change(signature(1), [signature(1, function="evaluate")]) == "first call"


@pytest.mark.parametrize(
    ("new", "old", "text"),
    [
        (
            lambda: signature(torch.zeros(4, 3)),
            lambda: signature(torch.zeros(2, 3)),
            "argument [0][0] changed from float32[2, 3] to float32[4, 3]",
        ),
        (lambda: signature(n=1), lambda: signature(n=2), "argument [1]['n'] changed from 2 to 1"),
        (
            lambda: signature([1]),
            lambda: signature([1, 2]),
            "the structure of the arguments changed",
        ),
        (
            lambda: signature(1, count=4),
            lambda: signature(1),
            "num_microbatches changed from 2 to 4",
        ),
        (
            lambda: signature(1, model=nn.ReLU().eval()),
            lambda: signature(1, model=nn.ReLU()),
            "the train/eval mode of the model changed",
        ),
        (
            lambda: signature(1, model=nn.Linear(1, 1).requires_grad_(False)),
            lambda: signature(1, model=nn.Linear(1, 1)),
            "requires_grad of the model's parameters changed",
        ),
        (
            lambda: dataclasses.replace(signature(2), grad_enabled=False),
            lambda: signature(1),
            "argument [0][0] changed from 1 to 2 and grad_enabled changed from True to False",
        ),
        (
            lambda: dataclasses.replace(signature(1), default_dtype=torch.float64),
            lambda: signature(1),
            "default_dtype changed from torch.float32 to torch.float64",
        ),
        (
            lambda: signature(nn.ReLU()),
            lambda: signature(3),
            "argument [0][0] changed from 3 to ReLU",
        ),
    ],
)
def test_what_changed(new, old, text):
    assert describe_change(new(), [old()]) == text


def test_it_is_compared_with_the_most_similar_call():
    known = [signature(1, 1), signature(1, 2), signature(3, 3)]
    assert describe_change(signature(1, 3), known[:1]) == "argument [0][1] changed from 1 to 3"
    assert describe_change(signature(4, 2), known) == "argument [0][0] changed from 1 to 4"
