"""Whether two objects mean the same to a captured program."""

from argparse import Namespace
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import nn

from mpxla.runtime.identity import Identities, is_same

pytestmark = pytest.mark.unit


@dataclass
class Options:
    scale: object


def make(value, default=0, *, word=None):
    def inner(x, y=default, *, z=word):
        return x * value

    return inner


def recursive():
    def count(n):
        return n and count(n - 1)

    return count


def unassigned():
    def inner():
        return later

    if inner is None:
        later = 1
    return inner


class Box:
    def method(self):
        pass


BOX, LINEAR, LIST = Box(), nn.Linear(1, 1), [1]


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (LINEAR, LINEAR),
        (Namespace(a=1), Namespace(a=1)),
        (Options(2), Options(2)),
        (make(2), make(2)),
        (make(LINEAR), make(LINEAR)),
        (make([1, "a"]), make([1, "a"])),
        (make({"a": make(1)}), make({"a": make(1)})),
        (recursive(), recursive()),
        (unassigned(), unassigned()),
        (partial(make, 1, default=2), partial(make, 1, default=2)),
        (BOX.method, BOX.method),
        (len, len),
    ],
)
def test_the_same(a, b):
    assert is_same(a, b)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (nn.Linear(1, 1), nn.Linear(1, 1)),
        (Namespace(a=1), Namespace(a=2)),
        (Namespace(a=1), Options(1)),
        (Options(torch.ones(2)), Options(torch.ones(2))),
        (torch.ones(2), torch.ones(2)),
        (make(2), make(3)),
        (make(1), make(1.0)),
        (make(1), make(True)),
        (make(2, 1), make(2, 2)),
        (make(2, word=1), make(2, word=2)),
        (make(nn.Linear(1, 1)), make(nn.Linear(1, 1))),
        (make([1]), make([1, 2])),
        (make({"a": 1}), make({"b": 1})),
        (lambda x: x, lambda x: -x),
        (partial(make, 1), partial(make, 2)),
        (partial(make, 1), partial(len, 1)),
        (Box().method, Box().method),
        (Box(), Box()),
        (make(1), unassigned()),
    ],
)
def test_not_the_same(a, b):
    assert not is_same(a, b)


def test_numbers_are_kept():
    known = Identities()
    one, other = nn.Linear(1, 1), nn.Linear(1, 1)
    assert [known.number(v) for v in (one, other, "a", one, other, "a")] == [0, 1, 2, 0, 1, 2]


def test_forgotten_objects_leave_their_numbers():
    known = Identities()
    assert [known.number(value) for value in ("a", "b", "c")] == [0, 1, 2]
    known.keep([1])
    assert known.numbers() == [1]
    assert [known.number(value) for value in ("a", "b")] == [3, 1]
