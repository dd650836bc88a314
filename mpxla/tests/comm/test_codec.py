import enum
import json
import math
import pickle
from collections import OrderedDict, defaultdict
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from mpxla.comm.codec import DATA, STATE, can_travel, find_class
from mpxla.comm.mesh import Mesh
from mpxla.comm.objects import OBJECTS
from mpxla.comm.xla_programs import Operand, Program
from mpxla.errors import MpxlaError, RankMismatch, StepError

pytestmark = pytest.mark.unit


class Colour(enum.Enum):
    RED = 1
    BLUE = ("b", 2)


class Level(enum.IntEnum):
    LOW = 1


class Access(enum.Flag):
    READ = 1
    WRITE = 2


class Number(int):
    """A subclass that is not itself in JSON."""


class Odd:
    def __eq__(self, other):
        return isinstance(other, Odd)

    def __hash__(self):
        return 1


def copy(value, form=DATA):
    return form.restore(form.dump(value, "a test"), 0, 1)


VALUES = [
    None,
    True,
    0,
    -(2**80),
    0.1,
    -0.0,
    math.inf,
    "",
    "a\n\u20ac\ud800",
    b"",
    b"\x00\xff",
    1 + 2j,
    [],
    (),
    [1, [2, (3, None)]],
    (1, [2.5, ("x",)]),
    {},
    {"a": 1, 2: (3,), (4, "b"): None, None: {}},
    {"tuple": [1]},
    OrderedDict([("b", 1), ("a", 2)]),
    {1, "a"},
    frozenset({2}),
    torch.float32,
    torch.device("xla:0"),
    torch.Size([2, 3]),
    Fraction(1, 3),
    Decimal("1.10"),
    Colour.RED,
    Colour.BLUE,
    Level.LOW,
    Access.READ | Access.WRITE,
    np.float32(0.1),
    np.int64(-3),
    np.bool_(True),
    np.datetime64("2026-01-01"),
    StepError,
    Program("transfer", Mesh(((0, 1),)), (Operand((2, 1), torch.bfloat16),), 1),
]


def name(value):
    """The same in every process, where the order of a set is not."""
    return repr(sorted(value, key=repr) if isinstance(value, set) else value)[:40]


@pytest.mark.parametrize("value", VALUES, ids=name)
def test_values_come_as_they_went(value):
    found = copy(value)
    assert type(found) is type(value) and found == value
    assert repr(found) == repr(value)
    assert can_travel(value)


def test_not_a_number():
    assert math.isnan(copy(math.nan)) and math.isnan(copy([np.float64("nan")])[0])


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6).reshape(2, 3).t(),
        torch.tensor(1.5),
        torch.zeros(0, 4),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j]).conj(),
        torch.randn(3, dtype=torch.bfloat16),
        torch.randn(1000)[::7],
        torch.randn(2, requires_grad=True),
        torch.nn.Parameter(torch.ones(2), requires_grad=False),
    ],
    ids=lambda tensor: f"{tensor.dtype}{list(tensor.shape)}",
)
def test_tensors_come_as_they_went(tensor):
    first, second = copy({"a": [tensor], "b": (tensor,)}).values()
    for found in (first[0], second[0]):
        assert torch.equal(found, tensor) and found.dtype == tensor.dtype
        assert type(found) is type(tensor) and found.requires_grad == tensor.requires_grad
        assert found.is_contiguous()
    first[0].data.zero_()  # each has memory of its own
    assert torch.equal(second[0], tensor)


def test_arrays_come_as_they_went():
    found = copy(np.arange(6.0, dtype=">f8").reshape(2, 3))
    assert found.tolist() == [[0, 1, 2], [3, 4, 5]] and found.dtype == np.dtype(">f8")
    found[0, 0] = 7.0  # writable


@pytest.mark.parametrize(
    "value",
    [Odd(), Number(3), defaultdict(list), print, Odd, object(), MpxlaError("x")],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_other_values_are_refused_by_their_place(value):
    assert not can_travel(value)
    with pytest.raises(MpxlaError, match=r"a test: obj\['a'\]\[1\] is of type \w+, which does not"):
        DATA.dump({"a": [0, value]}, "a test")


def test_classes_that_are_not_found_by_name_do_not_travel():
    class Local(enum.Enum):
        ONE = 1

    assert not can_travel(Local.ONE)
    assert find_class("os", "system") is None and find_class("no.such", "x") is None
    assert find_class(__name__, "Colour") is Colour


def test_errors_travel_by_the_name_of_a_public_one():
    class Special(RankMismatch):
        pass

    assert copy(Special) is RankMismatch


def test_states_may_hold_objects_of_the_user():
    state = {"state": {0: {"momentum": torch.ones(2), "own": Odd()}}, "x": defaultdict(list)}
    found = copy(state, STATE)
    assert found["state"][0]["own"] == Odd() and type(found["x"]) is defaultdict
    assert torch.equal(found["state"][0]["momentum"], torch.ones(2))
    sparse = torch.eye(2).to_sparse()
    assert torch.equal(copy([sparse], STATE)[0].to_dense(), torch.eye(2))


class Exploit:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def test_data_never_opens_a_pickle(tmp_path):
    path = tmp_path / "executed"
    for message in (
        STATE.dump([Exploit(path)], "a test"),
        OBJECTS.dump(Exploit(path), "a test"),
        torch.frombuffer(bytearray(pickle.dumps(Exploit(path))), dtype=torch.uint8),
    ):
        with pytest.raises(MpxlaError, match="rank 1 cannot read a message of rank 0"):
            DATA.restore(message, 0, 1)
    assert not path.exists()


def message_of(tree, behind=b""):
    text = json.dumps(tree).encode()
    head = -(-(8 + len(text)) // 64) * 64
    data = (len(text).to_bytes(8, "little") + text).ljust(head, b"\0") + behind
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


@pytest.mark.parametrize(
    "tree",
    [
        {"enum": ["os", "system", "x", 1]},
        {"enum": ["builtins", "int", "x", 1]},
        {"error": "ValueError"},
        {"error": "__doc__"},
        {"mpxla": ["Popen", [["true"]]]},
        {"mpxla": ["Mesh", []]},
        {"object": [0, 0]},
        {"dtype": "load"},
        {"numpy": ["O", [1], True, 0, 8]},
        {"tensor": ["float32", [1 << 40], 0, 8, False, False]},
        {"tensor": ["float32", [2], -8, 8, False, False]},
        {"tensor": ["float32", [2], 4096, 8, False, False]},
        {"bytes": [0, 1 << 60]},
        {"unknown": 1},
        {"tuple": 1, "list": 2},
        {},
    ],
    ids=json.dumps,
)
def test_what_makes_no_sense_is_an_error(tree):
    with pytest.raises(MpxlaError, match="rank 1 cannot read a message of rank 0"):
        DATA.restore(message_of(tree, b"\0" * 8), 0, 1)


@pytest.mark.parametrize("data", [b"", b"\xff" * 8, b"\0" * 8, b"\x05" + b"\0" * 7 + b"{]"])
def test_garbage_is_an_error(data):
    with pytest.raises(MpxlaError, match="cannot read a message"):
        DATA.restore(torch.tensor(list(data), dtype=torch.uint8), 0, 1)


def test_deep_nesting_is_an_error():
    text = b"[" * 100_000
    data = torch.tensor(list(len(text).to_bytes(8, "little") + text), dtype=torch.uint8)
    with pytest.raises(MpxlaError, match="RecursionError"):
        DATA.restore(data, 0, 1)
