"""`torch._check` of what a step has computed: transformers counts tokens of images by it."""

import pytest
import torch
from torch import nn

import mpxla as smp
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks


class Checked(nn.Module):
    """Looks at its inputs and at what it has computed."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 4)

    def forward(self, x):
        torch._check_tensor_all((x < 100).sum() == x.numel(), lambda: "large numbers")
        torch._check((x < 100).sum().item() == x.numel())
        y = self.layer(x)
        torch._check_tensor_all(y < 1000)
        return y.pow(2).mean()


def train(value):
    smp.init({"microbatches": 2})
    model = smp.DistributedModel(Checked())

    @smp.step
    def step(model, x):
        loss = model(x)
        model.backward(loss)
        return loss

    try:
        return step(model, torch.full((4, 6), value)).reduce_mean().item()
    except RuntimeError as error:
        return str(error)


def test_checks_are_asserts():
    (found,) = run_ranks(train, 1, 2.0)
    assert found == pytest.approx(Checked()(torch.full((4, 6), 2.0)).item())
    (text,) = run_ranks(train, 1, 200.0)
    assert "large numbers" in text
