"""`StepOutput`, and results in the structure that the step function returned."""

from functools import partial

import pytest
import torch
import torch.utils._pytree as pytree

from mpxla.errors import StepError
from mpxla.graph.stepgraph import ResultLeaf
from mpxla.runtime.outputs import Part, StepOutput, build_outputs

pytestmark = pytest.mark.unit


def output(*parts):
    return StepOutput(lambda: [torch.tensor(part) for part in parts], list)


def test_reductions():
    found = output([1.0, 2.0], [3.0, 6.0])
    assert [part.tolist() for part in found.outputs] == [[1, 2], [3, 6]]
    assert found.reduce_mean().tolist() == [2, 4]
    assert found.reduce_sum().tolist() == [4, 8]
    assert found.concat().tolist() == [1, 2, 3, 6]
    assert found.stack().tolist() == [[1, 2], [3, 6]]


def test_reductions_of_scalars():
    found = output(1.0, 2.0, 6.0)
    assert found.reduce_mean().item() == 3
    assert found.reduce_mean().shape == ()
    assert found.reduce_sum().item() == 9
    assert found.stack().tolist() == [1, 2, 6]
    with pytest.raises(StepError, match=r"concat: .* returned a scalar, .* Use stack\(\)"):
        found.concat()


def test_reductions_of_numbers_that_are_not_floats():
    assert output(3, 4).reduce_sum().item() == 7
    assert output(3, 4).reduce_mean().item() == 3.5
    assert output([True], [False]).concat().tolist() == [True, False]


def test_values_are_fetched_once_when_they_are_looked_at():
    calls = []
    found = StepOutput(lambda: calls.append(1) or [torch.zeros(2)], list)
    assert repr(found) == "StepOutput(not read yet)"
    assert calls == []
    assert found.outputs is found.outputs
    found.reduce_mean()
    assert calls == [1]
    assert repr(found) == "StepOutput(1 x torch.float32[2])"


def test_the_structure_comes_back():
    leaves = [
        ResultLeaf(0),
        ResultLeaf(None, value="text"),
        ResultLeaf(1, is_number=True),
        ResultLeaf(None, is_number=True, value=4),
        ResultLeaf(None, value=None),
        ResultLeaf(2),
    ]
    structure = pytree.tree_structure((0, {"a": 0, "b": [0, 0]}, (0, 0)))
    values = [[torch.tensor(10 * i + mb) for mb in range(2)] for i in range(3)]
    fetched = []

    def fetch(index):
        fetched.append(index)
        return values[index]

    part = Part(leaves, structure, (0, 1), {i: partial(fetch, i) for i in range(3)})
    first, named, (none, last) = build_outputs([part], slice(None), list, list)
    assert fetched == [1], "only Python numbers are waited for"
    assert named == {"a": "text", "b": [[10, 11], [4, 4]]}
    assert [type(number) for number in named["b"][0]] == [int, int]
    assert none is None
    assert [v.item() for v in first.outputs] == [0, 1]
    assert [v.item() for v in last.outputs] == [20, 21]
    assert fetched == [1, 0, 2]
