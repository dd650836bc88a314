"""Steps with sparse arguments and buffers train as in plain PyTorch."""

import copy

import pytest
import torch
from torch import nn

import mpxla as smp
from mpxla.errors import StepError
from mpxla.tests.ranks.run import run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore:Sparse ")]

EDGES = torch.tensor([[0, 1, 1, 2, 3, 0], [2, 1, 0, 0, 3, 1]])


def graph(number):
    """Steps have graphs with other numbers, and the last one with fewer elements."""
    places = EDGES[:, : 4 if number == 2 else 6]
    return torch.sparse_coo_tensor(places, torch.rand(places.shape[1]) + number, (4, 4))


class Convolved(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.enter, self.leave = nn.Linear(5, 6), nn.Linear(6, 3)
        self.register_buffer("fixed", graph(0).coalesce())

    def forward(self, x, adjacency):
        hidden = torch.sparse.mm(self.fixed, self.enter(x)).relu()
        return self.leave(adjacency @ hidden).square().mean()


def batches():
    torch.manual_seed(2)
    return [(torch.randn(8, 5), graph(number)) for number in range(3)]


def train(num_stages):
    smp.init({"microbatches": 2, "pipeline_parallel_degree": num_stages})
    model = smp.DistributedModel(Convolved())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step(non_split_inputs=["adjacency"])
    def step(model, x, adjacency):
        loss = model(x, adjacency)
        model.backward(loss)
        return loss

    losses = []
    for x, adjacency in batches():
        optimizer.zero_grad()
        losses.append(float(step(model, x, adjacency).reduce_mean()))
        optimizer.step()
    with pytest.raises(StepError, match=r"x: a sparse tensor of shape \[4, 4\] does not divide in"):
        step(model, graph(0), graph(0))
    return losses, {name: value.to_dense() for name, value in model.state_dict().items()}


def trained_plainly():
    model = copy.deepcopy(Convolved())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for x, adjacency in batches():
        optimizer.zero_grad()
        loss = sum(model(part, adjacency) for part in x.chunk(2)) / 2
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
    return losses, {name: value.to_dense() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("num_stages", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_trains_as_plain_torch(num_stages):
    losses, state = trained_plainly()
    for found, parameters in run_ranks(train, num_stages, num_stages):
        torch.testing.assert_close(found, losses, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(parameters, state, rtol=1e-5, atol=1e-5)
