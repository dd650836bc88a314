"""Python may read values of constants while a step is captured, and of nothing else."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mpxla.errors import CaptureError
from mpxla.tests.graph.capture.test_capture import capture, run

pytestmark = pytest.mark.unit

KEPT = torch.tensor([True, False, True, True])
ORDER = torch.tensor([2, 0])


def branch_on_what_is_made(x):
    table = torch.zeros(3, 3)
    table[0, 1] = 1
    table = table + torch.eye(3)
    return x * 2 if table.sum() > 3.5 else x


def branch_on_what_is_closed_over(x):
    return x * 3 if KEPT.all() else x * 5


def count(x):
    return x[:, : int(KEPT.sum())].sum(dim=1) / KEPT.sum().item()


def loop(x):
    return sum(x[:, i] for i in ORDER.tolist())


def choose_by_a_mask(x):
    table = torch.arange(4.0)
    return x[:, KEPT] * table[table > 0] + KEPT.nonzero().shape[0]


def write_through_a_view(x):
    values = torch.zeros(4)
    values[KEPT] = 1.0
    values.view(2, 2).add_(1)
    return x + 1 if values.sum() == 7 else x


def compare(x):
    table = torch.arange(4.0)
    is_near = torch.allclose(table, table + 1e-7) and table.allclose(other=table + 0.1, atol=0.2)
    is_same = torch.equal(ORDER, ORDER.clone()) and not ORDER.equal(ORDER + 1)
    return x * 2 if is_near and is_same and not torch.equal(table, ORDER) else x


def choose_by_a_mask_of_a_masked_table(x):
    same = torch.tensor([0, 1, 0, 1])
    same = same[:, None] == same
    is_other = ~torch.eye(4, dtype=torch.bool)
    same = same[is_other].view(4, -1)
    scores = (x @ x.T)[is_other].view(4, -1)
    return scores[same].view(4, -1) + scores.masked_select(~same).view(4, -1).sum(1, True)


def choose_by_lists_and_counts(x):
    counts = torch.arange(4)
    rows = x.repeat_interleave(counts, dim=0) + torch.repeat_interleave(x[:, 0], counts)[:, None]
    pairs = x[torch.combinations(counts)].sum(1) + x[[True, False, True, False]].sum()
    return rows + pairs * F.one_hot(ORDER, 4).sum() + x[counts[1] :].sum() + x[: ORDER[0], 0].sum()


def sizes_in_tensors(x):
    table = torch.arange(4)
    return torch.zeros(table.max() + 1, 4) + x * torch.arange(table[3] + 1) + x[:, table[2:3]]


def read_by_numpy(x):
    return x * float(ORDER.numpy().sum()) + np.asarray(torch.arange(4)).max()


ALLOWED = [
    choose_by_a_mask_of_a_masked_table,
    choose_by_lists_and_counts,
    sizes_in_tensors,
    read_by_numpy,
    compare,
    branch_on_what_is_made,
    branch_on_what_is_closed_over,
    count,
    loop,
    choose_by_a_mask,
    write_through_a_view,
]


@pytest.mark.parametrize("function", ALLOWED, ids=lambda f: f.__name__)
def test_values_of_constants_are_known(function):
    model, x = nn.Linear(6, 4), torch.randn(4, 6)
    before = KEPT.clone(), ORDER.clone(), torch.get_rng_state()
    captured = capture(model, lambda leaves: function(model(leaves[0])))
    torch.testing.assert_close(run(captured, model, [x])[0], function(model(x)).detach())
    after = KEPT, ORDER, torch.get_rng_state()
    assert all(map(torch.equal, before, after)), "the user's own tensors and numbers stay"


def branch_on_an_input(x):
    return x * 2 if x.sum() > 0 else x


def branch_on_what_an_input_was_written_to(x):
    values = torch.zeros(3)
    values[0] = x.sum()
    return x * 2 if values.sum() > 0 else x


def branch_on_what_a_view_was_written_to(x):
    values = torch.zeros(3)
    values[1:].copy_(x[0, :2])
    return x * 2 if values.sum() > 0 else x


def branch_on_random_numbers(x):
    return x * 2 if torch.rand(3).sum() > 0 else x


REFUSED = [
    branch_on_an_input,
    branch_on_what_an_input_was_written_to,
    branch_on_what_a_view_was_written_to,
    branch_on_random_numbers,
]


@pytest.mark.parametrize("function", REFUSED, ids=lambda f: f.__name__)
def test_other_values_are_not(function):
    model = nn.Linear(6, 4)
    with pytest.raises(CaptureError, match=r"depends on a tensor's value in Python at .*constants"):
        capture(model, lambda leaves: function(model(leaves[0])))


def test_branches_on_buffers_are_refused():
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("gate", torch.ones(()))

        def forward(self, x):
            return x * 2 if self.gate else x

    model = Gated()
    with pytest.raises(CaptureError, match="depends on a tensor's value"):
        capture(model, lambda leaves: model(leaves[0]))
