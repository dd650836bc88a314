"""Places that tensors tell, `table[t]`: one program for all of them."""

import pytest
import torch
from torch import nn

from mpxla.errors import CaptureError
from mpxla.graph.capture.step import TensorLeaf, ToCapture, capture_step
from mpxla.runtime.state import ModelState
from mpxla.tests.graph.capture.test_capture import run

pytestmark = pytest.mark.unit

TABLE = torch.arange(24.0).reshape(6, 4)


def read(h, t):
    return h * TABLE[t] + h[t - 1].sum() + h[1:, t] @ h[:-1, -t] + h[None, ..., t].sum()


def follow(h, t):
    return h[h.sum(1).argmax()], h[:, h.sum(0).argmax()]


def write(h, t):
    h = h.clone()
    h[:, t] = 1.0
    h[-t] = h[0] * 2
    h[1:, t - 1] += 2.0
    return h


def share(h, t):
    h = h.clone()
    h[t].mul_(2)
    return h


def change_later(h, t):
    table = h.clone()
    row = table[t]
    table.mul_(2)
    return row


def captured(function):
    model = nn.Linear(4, 4)
    leaves = TensorLeaf((4, 4), torch.float32), TensorLeaf((), torch.int64)
    names = ModelState(model).canonical_names
    return model, capture_step(
        ToCapture(lambda v: function(model(v[0]), v[1]), model, leaves, names)
    )


@pytest.mark.parametrize("function", [read, follow, write])
def test_places_stay_tensors(function):
    model, step = captured(function)
    x = torch.randn(4, 4)
    for place in (1, 2, 3):
        given = [x, torch.tensor(place)]
        with torch.no_grad():
            expected = function(model(x), given[1])
        expected = [*expected] if function is follow else [expected]
        torch.testing.assert_close(list(run(step, model, given)), expected)


@pytest.mark.parametrize("function", [share, change_later])
def test_a_part_and_its_whole_share_what_is_written(function):
    with pytest.raises(CaptureError, match=r"changes in place what it has read at .*shapes.py"):
        captured(function)
