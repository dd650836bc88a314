"""Parameters that a step compares, looks up and chooses by what Python says of them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpxla as smp
from mpxla.errors import CaptureError
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks

MICROBATCHES = 2


class Held(nn.Module):
    """Holds its parameters, their ids and views of them a second time."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.chosen = {self.first.weight, self.last.bias}
        self.ids = {id(self.last.weight)}
        self.factors = {self.first.bias: 0.3, self.last.weight: 0.2}
        self.views = [self.first.weight.data, self.last.weight.detach()]

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


def by_set(model):
    return sum(p.pow(2).sum() for p in model.parameters() if p in model.chosen)


def by_id(model):
    return sum(p.pow(2).sum() for p in model.parameters() if id(p) in model.ids)


def by_key(model):
    return sum(model.factors.get(p, 0.0) * p.abs().sum() for p in model.parameters())


def by_identity(model):
    held = next(iter(model.factors))
    return model.first.weight.norm() if held is model.first.bias else model.last.weight.norm()


def by_type(model):
    return sum(p.sum() for p in model.parameters() if type(p) is nn.Parameter and p.ndim == 2)


def by_views(model):
    return sum((view * view.sum()).pow(2).sum() for view in model.views) * model.first.bias.sum()


def by_copy(model):
    return nn.Parameter(model.first.weight.detach()).sum() * model.first.weight.sum()


def by_written_view(model):
    with torch.no_grad():
        model.views[0].mul_(0.9)
    return model.first.weight.abs().sum()


PENALTIES = [by_set, by_id, by_key, by_identity, by_type, by_views, by_copy, by_written_view]


def batches():
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(8, 6, generator=generator), torch.randint(3, (8,), generator=generator))
        for _ in range(3)
    ]


def loss_of(penalty, model, own, x, y):
    return F.cross_entropy(model(x), y) + 0.1 * penalty(own)


def trained_plainly(penalty):
    model = Held()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    losses = []
    for x, y in batches():
        optimizer.zero_grad()
        parts = zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True)
        each = [loss_of(penalty, model, model, *part) / MICROBATCHES for part in parts]
        sum(each).backward()
        optimizer.step()
        losses.append(sum(each).item())
    return losses, model.state_dict()


def trained(num_stages):
    results = []
    for penalty in PENALTIES:
        smp.init({"microbatches": MICROBATCHES, "pipeline_parallel_degree": num_stages})
        own = Held()
        model = smp.DistributedModel(own)
        optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.05))

        @smp.step
        def step(model, x, y, penalty=penalty, own=own):
            loss = loss_of(penalty, model, own, x, y)
            model.backward(loss)
            return loss

        losses = []
        for x, y in batches():
            optimizer.zero_grad()
            losses.append(step(model, x, y).reduce_mean().item())
            optimizer.step()
        results.append((losses, model.state_dict()))
        smp.shutdown()
    return results


@pytest.mark.parametrize("num_stages", [1, 2])
def test_python_sees_the_own_parameters(num_stages):
    expected = [trained_plainly(penalty) for penalty in PENALTIES]
    for found in run_ranks(trained, num_stages, num_stages):
        for penalty, one, other in zip(PENALTIES, found, expected, strict=True):
            text = penalty.__name__
            torch.testing.assert_close(one[0], other[0], msg=lambda m, text=text: f"{text}: {m}")
            torch.testing.assert_close(one[1], other[1], msg=lambda m, text=text: f"{text}: {m}")


def refuse():
    """Code that a capture does not see would have a parameter as it is in the first call."""
    smp.init({"microbatches": 1, "pipeline_parallel_degree": 2})
    model = smp.DistributedModel(Held())

    @smp.step
    def step(model, x):
        with torch._C.DisableTorchFunction():
            hidden = model.module.first.weight.sum()
        model.backward(hidden * model(x).sum())

    with pytest.raises(CaptureError, match=r"parameter of shape \[8, 6\] to code .*view_as"):
        step(model, torch.randn(4, 6))


def test_parameters_that_a_capture_does_not_see_are_refused():
    run_ranks(refuse, 2)
