"""What the forward of a stage hands to its backward."""

import pytest
import torch
from torch import nn

from mpxla.graph.typed import outputs_of
from mpxla.runtime.saved import saved_bytes
from mpxla.stage.cleanup import is_view
from mpxla.tests.stage.single import differences
from mpxla.tests.stage.test_recompute import ROWS, WIDTH, traced

pytestmark = pytest.mark.unit


def attention(projected):
    """Two heads [2, ROWS, WIDTH / 2] of three times WIDTH columns; each row has a factor."""
    shape = 3, 2, WIDTH // 2, ROWS
    query, key, value = projected.t().reshape(shape).transpose(2, 3).unbind()
    mixed = torch.softmax(torch.bmm(query, key.transpose(1, 2)), dim=-1) @ value
    factors = projected.mean(dim=1, keepdim=True).exp()
    return mixed.transpose(0, 1).reshape(ROWS, WIDTH) * factors.expand(ROWS, WIDTH)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x):
        return attention(self.project(x))


def test_views_that_only_the_backward_reads_are_made_there():
    lowered = traced(Attention()).lowered()
    saved = outputs_of(lowered.forward.graph)[-lowered.num_saved :]
    views = [node for node in saved if is_view(node)]
    assert all(len(node.users) > 1 for node in views), views  # products read them, too
    # Input, queries, keys, values, what comes of them, the softmax of each head, factors of rows.
    assert saved_bytes(lowered) == 4 * (5 * ROWS * WIDTH + 2 * ROWS * ROWS + ROWS)
    errors, host = differences(attention, (ROWS, 3 * WIDTH))
    assert max(errors) < 1e-5 and not host
