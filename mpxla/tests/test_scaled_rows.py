"""`nn.Embedding(max_norm=...)`: rows that a step reads are scaled, and stay so."""

import pytest
import torch
from torch import nn

import mpxla as smp
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks

STEPS = 3
BATCH = 8


class Net(nn.Module):
    """A table that is read twice, and under another limit by a tied one; one is read in bags."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(20, 4, max_norm=0.9, norm_type=1.5, padding_idx=0)
        self.again = nn.Embedding(20, 4, max_norm=0.8, norm_type=1.5)
        self.again.weight = self.words.weight
        self.inner, self.bags = nn.Linear(4, 4), nn.EmbeddingBag(20, 4, max_norm=0.7)

    def forward(self, x):
        words = self.words(x).sum(1) + self.words(x + 5).sum(1) + self.again(x + 2).sum(1)
        return torch.tanh(self.inner(words)) * self.bags(x)


def batch_of(number):
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, 12, (BATCH, 3), generator=generator)


@smp.step
def train_step(model, x):
    loss = (model(x) - 1).square().mean()
    model.backward(loss)
    return loss


@smp.step
def evaluate(model, x):
    with torch.no_grad():
        return model(x).mean()


def train(config):
    """Weights after some steps, and after an evaluation that reads other rows."""
    smp.init({"microbatches": 2, **config})
    model = smp.DistributedModel(Net())
    if smp.pp_size() > 1:
        smp.set_partition(model.module.bags, 1)
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), 0.1, eps=1e-3))
    for number in range(STEPS):
        optimizer.zero_grad()
        train_step(model, batch_of(number).chunk(smp.rdp_size())[smp.rdp_rank()])
        optimizer.step()
    trained = model.state_dict()
    evaluate(model, batch_of(STEPS) + 3)
    return trained, model.state_dict()


def train_plainly():
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), 0.1, eps=1e-3)
    for number in range(STEPS):
        optimizer.zero_grad()
        (model(batch_of(number)) - 1).square().mean().backward()
        optimizer.step()
    trained = {name: value.clone() for name, value in model.state_dict().items()}
    model(batch_of(STEPS) + 3)
    return trained, model.state_dict()


@pytest.mark.parametrize(
    ("size", "config"),
    [
        pytest.param(1, {}, marks=pytest.mark.slow),
        (2, {"pipeline_parallel_degree": 2, "auto_partition": False, "default_partition": 0}),
        pytest.param(2, {"ddp": True, "shard_optimizer_state": True}, marks=pytest.mark.slow),
    ],
    ids=["one", "stages", "zero"],
)
def test_rows_that_are_read_are_scaled_as_in_plain_training(size, config):
    expected = train_plainly()
    assert any(not torch.equal(a, b) for a, b in zip(*(e.values() for e in expected), strict=True))
    for trained, evaluated in run_ranks(train, size, config):
        for name, value in expected[0].items():
            torch.testing.assert_close(trained[name], value, rtol=1e-4, atol=1e-5)
            # Replicas evaluate each by itself, and leave the parameters that they share.
            after = value if "ddp" in config else expected[1][name]
            torch.testing.assert_close(evaluated[name], after, rtol=1e-4, atol=1e-5)


def divide_a_table():
    config = {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 10}
    smp.init({"ddp": True, "microbatches": 2, **config})
    try:
        train_step(smp.DistributedModel(Net()), batch_of(0))
    except smp.CaptureError as error:
        return str(error)


def test_rows_of_divided_tables_are_refused():
    for found in run_ranks(divide_a_table, 2):
        assert (
            "scales rows of bags.weight in place (nn.Embedding(max_norm=...)), whose values are"
            in found
        )
