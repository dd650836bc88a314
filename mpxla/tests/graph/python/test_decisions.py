"""With the values of inputs, Python may branch on them; the graph says for which inputs it is."""

import re

import numpy as np
import pytest
import torch
from torch import nn

from mpxla.errors import CaptureError
from mpxla.graph.capture.known import Known
from mpxla.graph.capture.step import TensorLeaf, ToCapture, capture_step
from mpxla.runtime.state import ModelState
from mpxla.tests.graph.capture.test_capture import run

pytestmark = pytest.mark.unit

functional = nn.functional

OFFSET = torch.tensor([1, 0, 0])


def branch(x, ids):
    return x * 2 if (ids == 0).any() else x


def count(x, ids):
    return x[:, : int(ids.max())].sum(dim=1)


def write(x, ids):
    values = torch.zeros(3, dtype=torch.int64)
    values[1:] += ids[:2]
    values.view(-1).add_(OFFSET)
    return x + 1 if values.sum() > 3 else x


def places(x, ids):
    return x[ids.nonzero()[:, 0]].sum(0) + x[ids > 1].sum(0)


def chosen(x, ids):
    """What NumPy reads at the places of a mask, and lists of them."""
    (rows,) = torch.where(ids > 0)
    least = np.unique(ids[rows].numpy()).min()
    return x[rows.tolist()].sum(0) * float(least)


def several(x, ids):
    x = x * 2 if ids[0] > 1 else x
    mask = torch.ones(500, 500).tril()  # a constant that is known, too
    x = x + 1 if mask.all() else x
    return x - ids.sum().item() if ids[1] > 1 else x


def compare(x, ids):
    return x * 2 if torch.equal(ids, OFFSET) or torch.allclose(ids, 3 * OFFSET) else x


def sizes(x, ids):
    n = ids.max()
    wide = functional.pad(x[:, None].expand(-1, n, -1), (0, n)).sum(1)  # [3, 4 + n]
    wide = torch.cat([wide, x.new_zeros(3, n)], 1).repeat(1, n)
    square = functional.interpolate(x.view(1, 3, 2, 2), size=(n, n))
    square = square.view(3, n, -1).sum((1, 2))
    return wide.sum(1) + square + x.topk(n, 1).values.sum(1) + x.narrow(1, 0, n).sum(1)


CASES = [
    (sizes, [1, 2, 1], [2, 2, 2], [3, 1, 1], r"\.expand\(-1, n, -1\).* changed from 2 to 3"),
    (compare, [1, 2, 3], [2, 1, 1], [1, 0, 0], r"torch\.equal\(ids.* changed from False to True"),
    (branch, [1, 2, 3], [2, 1, 1], [1, 0, 1], r"== 0\)\.any\(\) else x changed from False to True"),
    (count, [1, 2, 1], [2, 2, 2], [3, 1, 1], r"\[:, : int\(ids\.max.* changed from 2 to 3"),
    (write, [1, 2, 0], [3, 3, 5], [1, 1, 9], r"if values\.sum\(\) > 3 .* from True to False"),
    (places, [1, 0, 2], [3, 1, 0], [2, 0, 3], r"x\[ids > 1\].* changed from 1 to 2"),
    (chosen, [1, 0, 2], [1, -1, 2], [1, 0, 0], r"torch\.where\(ids > 0\).* changed from 2 to 1"),
    (several, [2, 2, 1], [2, 2, 1], [2, 2, 2], r"ids\.sum\(\)\.item\(\) .* changed from 5 to 6"),
]


def captured(function, ids):
    model, x = nn.Linear(4, 4), torch.randn(3, 4)
    leaves = TensorLeaf((3, 4), torch.float32), TensorLeaf((3,), torch.int64)
    known = Known((x, torch.tensor(ids)), decide_sizes=True)
    names = ModelState(model).canonical_names
    step = capture_step(
        ToCapture(lambda v: function(model(v[0]), v[1]), model, leaves, names, known)
    )
    return model, x, step


@pytest.mark.parametrize(("function", "ids", "like", "other", "text"), CASES)
def test_a_graph_knows_its_inputs(function, ids, like, other, text):
    before = OFFSET.clone()
    model, x, step = captured(function, ids)
    for given in (ids, like):
        given = torch.tensor(given)
        expected = function(model(x), given).detach()
        torch.testing.assert_close(run(step, model, [x, given])[0], expected)
        for _ in range(2):
            assert step.decisions.follow([x, given])[0] is None
    given = torch.tensor(other)
    change = step.decisions.follow([x, given])[0]
    assert change.startswith("what is read of the inputs at ")
    assert torch.equal(given, torch.tensor(other)) and torch.equal(OFFSET, before)
    assert re.search(text, change), change


def test_what_follows_from_constants_alone_is_not_run_again():
    _, _, step = captured(several, [2, 2, 1])
    names = {call.run.__name__ for call in step.decisions.calls}
    assert "sum" in names and not names & {"ones", "tril", "all"}


def test_nothing_is_decided_where_nothing_is_read():
    _, _, step = captured(lambda x, ids: x * ids[:, None], [1, 2, 3])
    assert step.decisions is None


def test_values_of_parameters_stay_unknown():
    with pytest.raises(CaptureError, match=r"depends on a tensor's value in Python at .*decisions"):
        captured(lambda x, ids: x * 2 if x.sum() > ids.sum() else x, [1, 2, 3])
