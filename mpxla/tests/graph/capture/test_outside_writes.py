"""Writes of a step function to tensors that no model holds."""

import pytest
import torch
from torch import nn

from mpxla.errors import CaptureError
from mpxla.graph.capture.step import TensorLeaf, ToCapture, capture_step
from mpxla.runtime.state import ModelState

pytestmark = pytest.mark.unit

MEAN = torch.zeros(6)
TEACHER = nn.BatchNorm1d(6).requires_grad_(False)


def count_up():
    MEAN.add_(1)


def write_rows():
    MEAN[:2] = 1


def give_data():
    MEAN.data = MEAN.data * 0.5


def normalize():
    TEACHER(torch.ones(4, 6))


@pytest.mark.parametrize("write", [count_up, write_rows, give_data, normalize])
def test_they_are_refused_with_the_line_and_what_to_do(write):
    model = nn.Linear(6, 6)

    def step(leaves):
        write()
        return model(leaves[0]) + MEAN

    text = r"no DistributedModel holds at .*outside_writes\.py:\d+: (MEAN|TEACHER).*register_buffer"
    with pytest.raises(CaptureError, match=text):
        names = ModelState(model).canonical_names
        capture_step(ToCapture(step, model, [TensorLeaf((4, 6), torch.float32)], names))
