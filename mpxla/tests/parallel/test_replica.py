"""Start values: replicas and holders of shared tensors begin alike, whatever their seeds."""

import pytest
import torch
from torch import nn

import mpxla as smp
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks


class Buffered(nn.Module):
    """Initialized differently on every rank."""

    def __init__(self, rank):
        super().__init__()
        torch.manual_seed(rank)
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.norm = nn.BatchNorm1d(3)
        self.norm.running_mean += rank
        self.norm.num_batches_tracked += rank

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


@smp.step
def forward(model, x):
    return model(x)


def start_values(degree):
    smp.init({"pipeline_parallel_degree": degree, "ddp": True})
    model = smp.DistributedModel(Buffered(smp.rank()))
    if degree == 2:
        model.eval()
        forward(model, torch.ones(2, 3))
    return model.state_dict()


def test_replicas_start_with_the_values_of_the_first():
    first, second = run_ranks(start_values, 2, 1)
    expected = Buffered(0).state_dict()
    assert list(first) == list(second) == list(expected)
    for name, value in expected.items():
        assert torch.equal(first[name], value), name
        assert torch.equal(second[name], value), name


def test_replicas_of_a_pipeline_start_alike():
    results = run_ranks(start_values, 4, 2)
    origins = (Buffered(0).state_dict(), Buffered(1).state_dict())
    for name, value in results[0].items():
        assert any(torch.equal(value, origin[name]) for origin in origins), name
        assert all(torch.equal(value, other[name]) for other in results[1:]), name
