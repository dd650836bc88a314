"""Methods of an optimizer that write to its parameters between updates, as SAM's do."""

import pytest
import torch
from torch import nn

import mpxla as smp
from mpxla.tests.clients import logged
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks


class Sharp(torch.optim.SGD):
    """Takes the gradient somewhere else, and goes back for the update."""

    @torch.no_grad()
    def first_step(self):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["old"] = parameter.detach().clone()
            parameter.sub_(parameter.grad, alpha=2)

    @torch.no_grad()
    def second_step(self):
        for parameter in self.param_groups[0]["params"]:
            parameter.data = self.state[parameter].pop("old")
        return self.step()


def make_model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))


def batches():
    return torch.randn(3, 8, 6, generator=torch.Generator().manual_seed(0))


def loss_of(model, x):
    return (model(x) - 1).square().mean()


def expected():
    model, losses = make_model(), []
    optimizer = Sharp(model.parameters(), lr=0.2)
    for x in batches():
        for finish in (optimizer.first_step, optimizer.second_step):
            optimizer.zero_grad()
            loss = loss_of(model, x)
            loss.backward()
            losses.append(loss.item())
            finish()
    return losses


@smp.step
def train_step(model, x):
    loss = loss_of(model, x)
    model.backward(loss)
    return loss


def train(config):
    smp.init({"microbatches": 2, "sdp_gradient_clipping": 1e6, **config})
    model = smp.DistributedModel(make_model())
    optimizer = smp.DistributedOptimizer(Sharp(model.parameters(), lr=0.2))
    losses = []
    for x in batches():
        for finish in (optimizer.first_step, optimizer.second_step):
            optimizer.zero_grad()
            loss = train_step(model, x.chunk(smp.rdp_size())[smp.rdp_rank()])
            losses.append(loss.reduce_mean().item())
            finish()
    return torch.tensor(losses)


SHARDED = {"ddp": True, "sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 1}


@pytest.mark.parametrize(
    ("size", "config", "tolerance"),
    [
        pytest.param(1, {"bf16": True}, 3e-2, marks=pytest.mark.slow),
        (2, {"ddp": True, "shard_optimizer_state": True}, 1e-5),
        pytest.param(2, SHARDED, 1e-5, marks=pytest.mark.slow),
        pytest.param(
            2, {"pipeline_parallel_degree": 2, "bf16": True}, 3e-2, marks=pytest.mark.slow
        ),
    ],
)
def test_the_model_has_what_they_write(size, config, tolerance):
    found = run_ranks(train, size, config)
    replicas = found if "ddp" in config else found[:1]
    losses = torch.stack(replicas).mean(dim=0)
    torch.testing.assert_close(losses, torch.tensor(expected()), rtol=tolerance, atol=tolerance)


def write_beside(config):
    """Lines of the log of a loop that writes to what the groups hold, and to parameters."""
    smp.init({"microbatches": 2, **config})
    model = smp.DistributedModel(make_model())
    optimizer = smp.DistributedOptimizer(Sharp(model.parameters(), lr=0.2))
    found = []
    groups = optimizer.param_groups
    for held in (list, model.local_parameters, lambda: groups[0]["params"], list):
        optimizer.zero_grad()
        train_step(model, batches()[0].chunk(smp.rdp_size())[smp.rdp_rank()])
        with logged() as lines:
            with torch.no_grad():
                for parameter in held():
                    parameter.mul_(0.9)
            optimizer.step()
        found.append([line for line in lines if "the write is lost" in line])
    return found


@pytest.mark.parametrize(
    ("size", "config"),
    [(1, {"bf16": True}), (2, {"ddp": True, "shard_optimizer_state": True})],
)
def test_other_writes_to_copies_are_told_of(size, config):
    for found in run_ranks(write_beside, size, config):
        assert [len(lines) for lines in found] == [0, 0, 1, 0]
        assert "'0.weight' was written to between updates" in found[2][0]
