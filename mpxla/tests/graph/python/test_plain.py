"""Copies of what modules hold in Python, by which later calls see that it has changed."""

import pytest

from mpxla.graph.python.plain import plain

pytestmark = pytest.mark.unit


class Degrees(tuple):
    """Numbers that are no sequence to users, as libraries of representations have them."""

    __slots__ = ()

    def __len__(self):
        raise NotImplementedError

    def __iter__(self):
        raise NotImplementedError


def test_a_class_of_tuples_need_not_tell_its_length():
    assert plain([Degrees((1, 2)), (3,)]) == [(1, 2), (3,)]
