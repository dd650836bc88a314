"""Splitting the arguments of a step call."""

import logging
from argparse import Namespace
from collections import OrderedDict, UserDict, namedtuple

import pytest
import torch
import torch.utils._pytree as pytree
from torch import nn

from mpxla import log
from mpxla.errors import StepError
from mpxla.runtime.microbatch import SplitRule, split_arguments

pytestmark = pytest.mark.unit

Pair = namedtuple("Pair", ["left", "right"])


def rule(function, non_split_inputs=None, input_split_axes=None):
    return SplitRule.of(function, non_split_inputs, input_split_axes)


def takes(x, other=None, *rest, scale=1, **options):
    raise AssertionError("splitting must not call the function")


def split(*args, count=2, whole=None, axes=None, function=takes, **kwargs):
    return split_arguments(rule(function, whole, axes), args, kwargs, count)


def first_of(parts):
    """First positional argument of every microbatch."""
    return [args[0] for args, _ in parts]


@pytest.fixture
def warnings_of():
    """Lines that mpxla logs, with warnings of earlier tests forgotten."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(f"{record.levelname} {record.getMessage()}")
    log.forget_warnings()
    log.get_logger().addHandler(handler)
    yield lines
    log.get_logger().removeHandler(handler)
    log.forget_warnings()


def test_tensors_are_cut_along_the_first_axis():
    x = torch.arange(12).reshape(6, 2)
    assert [part.tolist() for part in first_of(split(x, count=3))] == [
        [[0, 1], [2, 3]],
        [[4, 5], [6, 7]],
        [[8, 9], [10, 11]],
    ]


def test_one_microbatch_is_the_whole_batch():
    x = torch.arange(4)
    assert torch.equal(first_of(split(x, count=1))[0], x)


def test_parts_share_memory_with_the_batch():
    x = torch.zeros(4, 2)
    first_of(split(x))[1].fill_(5)
    assert x[2:].eq(5).all()
    assert x[:2].eq(0).all()


def test_batch_axes_by_name():
    x, y = torch.arange(8).reshape(2, 4), torch.arange(8).reshape(4, 2)
    parts = split(x, other=y, axes={"x": 1, "other": -1})
    assert first_of(parts)[1].tolist() == [[2, 3], [6, 7]]
    assert parts[0][1]["other"].tolist() == [[0], [2], [4], [6]]


def test_the_axis_reaches_nested_tensors():
    x = torch.arange(8).reshape(2, 4)
    assert split([{"a": x}], axes={"x": 1})[1][0][0][0]["a"].tolist() == [[2, 3], [6, 7]]


def test_whole_arguments():
    table = torch.zeros(3)
    parts = split(torch.zeros(4), table, whole=["other"])
    assert all(args[1] is table for args, _ in parts)
    parts = split(torch.zeros(4), other={"t": table}, whole=["other"])
    assert all(kwargs["other"]["t"] is table for _, kwargs in parts)


def test_options_apply_to_variable_arguments():
    whole = torch.zeros(3)
    parts = split(torch.zeros(4), None, whole, whole=["rest", "extra"], extra=whole)
    assert all(args[2] is whole and kwargs["extra"] is whole for args, kwargs in parts)


def test_containers_keep_their_types():
    x = torch.arange(4)
    value = (
        [x],
        {"a": x},
        OrderedDict(b=x),
        Pair(x, "right"),
        {x},
        frozenset([x]),
        UserDict(c=x),
    )
    part = first_of(split(value))[1]
    assert [type(item) for item in part] == [type(item) for item in value]
    second = torch.tensor([2, 3])
    items = [part[0][0], part[1]["a"], part[2]["b"], part[3].left, *part[4], *part[5], part[6]["c"]]
    assert all(torch.equal(item, second) for item in items)
    assert part[3].right == "right"


def test_a_mapping_that_cannot_be_rebuilt_becomes_a_dict():
    class Fixed(UserDict):
        def __init__(self, x, y):
            super().__init__(x=x, y=y)

    part = first_of(split(Fixed(torch.arange(4), 3)))[0]
    assert type(part) is dict
    assert part["x"].tolist() == [0, 1]
    assert part["y"] == 3


def test_other_values_pass_through(warnings_of):
    values = [3, 2.5, True, None, "text", b"b", nn.Linear(1, 1), Namespace(a=1), torch.float32, len]
    part = first_of(split(values))[1]
    assert all(a is b for a, b in zip(part, values, strict=True))
    assert warnings_of == []


def test_keyword_arguments_keep_their_names():
    parts = split(torch.zeros(2), scale=3, mode="a", y=torch.arange(2))
    assert [kwargs["y"].item() for _, kwargs in parts] == [0, 1]
    assert {(kwargs["scale"], kwargs["mode"]) for _, kwargs in parts} == {(3, "a")}


class Sliceable:
    def __init__(self, calls):
        self.calls = calls

    def smp_slice(self, num_mb, mb, axis):
        self.calls.append((num_mb, mb, axis))
        return [mb, "part"]


def test_objects_split_themselves(warnings_of):
    calls = []
    assert first_of(split({"a": Sliceable(calls)}, axes={"x": 1}))[1] == {"a": [1, "part"]}
    assert calls == [(2, 0, 1), (2, 1, 1)]
    assert warnings_of == []


class Opaque:
    def __init__(self):
        self.parts = {"x": [torch.ones(4)]}


class Settings:
    """Holds nothing that could be split, as a scaler or what a script reads its options into."""

    def __init__(self):
        self.scale, self.rates = torch.tensor(1.0), [0.1]


def test_unknown_objects_are_passed_whole_with_one_warning(warnings_of):
    value = Opaque()
    assert all(part["a"] is value for part in first_of(split({"a": value}, count=4)))
    assert warnings_of == [
        "WARNING x['a'] of type Opaque is passed whole to every microbatch. Give the class a "
        "method smp_slice(num_mb, mb, axis) if it has to be split."
    ]


def test_optimizers_and_settings_are_passed_without_a_word(warnings_of):
    for value in (torch.optim.SGD([torch.zeros(1)], lr=1), Settings()):
        assert all(part is value for part in first_of(split(value)))
    assert not warnings_of


def test_gradients_of_arguments_are_not_computed(warnings_of):
    x = torch.zeros(4, requires_grad=True)
    with torch.no_grad():
        split(x)
    assert warnings_of == []
    assert not any(part.requires_grad for part in first_of(split(x)))
    (line,) = warnings_of
    assert "x requires a gradient, which a step does not compute" in line
    assert "or pass x.detach()" in line


@pytest.mark.parametrize(
    ("value", "axes", "text"),
    [
        (
            torch.zeros(4),
            {"x": 1},
            r"^x: a tensor of shape \[4\] has no axis 1 .* non_split_inputs",
        ),
        (torch.zeros(4), {"x": -2}, r"no axis -2 to split .* input_split_axes"),
        ([torch.zeros(2), torch.ones(1)], None, r"^x\[1\]: a batch of 1 samples"),
        ({"loss": torch.ones(1)}, None, r"^x\['loss'\]: a batch"),
        (Pair(torch.ones(1), 2), None, r"^x\.left: a batch"),
        (
            torch.zeros(5, 3),
            None,
            r"^x: a batch of 5 samples \(axis 0 of shape \[5, 3\]\) does not divide into 2 "
            r"microbatches\. Use a batch size that is a multiple of 2 and drop_last=True",
        ),
        ([{"a": torch.zeros(3)}], None, r"^x\[0\]\['a'\]: a batch of 3 samples"),
        (torch.zeros(4, 3), {"x": 1}, r"a batch of 3 samples \(axis 1 of shape \[4, 3\]\)"),
        ({torch.ones(1)}, None, r"^x\[\.\.\.\]: a batch of 1 samples"),
    ],
)
def test_what_cannot_be_split(value, axes, text):
    with pytest.raises(StepError, match=text):
        split(value, axes=axes)


def test_tensors_without_dims_are_passed_whole():
    weight = torch.tensor(2.0)
    parts = split({"x": torch.arange(4), "weights": [weight]})
    assert [part["weights"] for part in first_of(parts)] == [[weight], [weight]]
    assert [part["x"].tolist() for part in first_of(parts)] == [[0, 1], [2, 3]]


def strict(x, y=0):
    raise AssertionError("splitting must not call the function")


def test_arguments_have_to_fit_the_function():
    with pytest.raises(StepError, match=r"^strict: too many positional arguments\.$"):
        split(1, 2, 3, function=strict)
    with pytest.raises(StepError, match=r"strict: missing a required argument: 'x'"):
        split(function=strict)
    with pytest.raises(StepError, match="strict: got an unexpected keyword argument 'z'"):
        split(1, z=1, function=strict)


def test_options_have_to_name_parameters():
    text = r"smp\.step: targets, z in .* is not a parameter of strict; its parameters are x, y\."
    with pytest.raises(StepError, match=text):
        rule(strict, ["z"], {"targets": 1})
    assert rule(takes, ["anything"]).non_split_inputs == {"anything"}, "it goes to **options"


class Sample:
    def __init__(self, x):
        self.x = x
        self.name = "sample"


class Samples(Sample):
    def smp_slice(self, num_mb, mb, axis):
        return Sample(self.x.chunk(num_mb, axis)[mb])


def test_the_tensors_of_a_slice_are_inputs():
    parts = first_of(split({"a": Samples(torch.arange(4))}))
    leaves, structure = pytree.tree_flatten(parts[1])
    assert leaves[0].tolist() == [2, 3]
    assert leaves[1] == "sample"
    made = pytree.tree_unflatten(leaves, structure)["a"]
    assert type(made) is Sample
    assert made.x is leaves[0]
    assert made.name == "sample"
