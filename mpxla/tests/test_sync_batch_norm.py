"""Synchronized batch norms have the numbers of one batch norm over the samples of all replicas."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mpxla.tests.clients import merged
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks

NUM_STEPS = 3
SAMPLES = (8, 6)
"""Of a step, by replica."""


def built(momentum):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv1d(1, 6, 3),
        nn.BatchNorm1d(6, momentum=momentum),
        nn.ReLU(),
        nn.Conv1d(6, 6, 3),
        nn.BatchNorm1d(6, momentum=momentum),
        nn.Flatten(),
        nn.Linear(48, 3),
        nn.BatchNorm1d(3, affine=False),
    )


def batch_of(step, replica):
    """Samples of other sizes on each replica, in two microbatches."""
    generator = torch.Generator().manual_seed(10 * step + replica)
    return torch.randn(SAMPLES[replica], 1, 12, generator=generator) * (replica + 1)


def loss_of(scores):
    return F.softplus(scores * torch.arange(1, 4)).mean()


def trained(stages, momentum):
    """The last loss, one of evaluation, and the state of this rank."""
    import mpxla as smp

    smp.init({"pipeline_parallel_degree": stages, "microbatches": 2, "ddp": True})
    raw = nn.SyncBatchNorm.convert_sync_batchnorm(built(momentum))
    model = smp.DistributedModel(raw)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(raw.parameters(), lr=0.1))

    @smp.step
    def step(model, x):
        loss = loss_of(model(x))
        if model.training:
            model.backward(loss)
        return loss

    losses = []
    for i in range(NUM_STEPS):
        optimizer.zero_grad()
        losses.append(step(model, batch_of(i, smp.rdp_rank())).reduce_mean().item())
        optimizer.step()
    model.eval()
    losses.append(step(model, batch_of(0, 0)).reduce_mean().item())
    local = model.local_state_dict()
    return (
        smp.rdp_rank(),
        losses,
        {n: v.detach().cpu() for n, v in local.items() if isinstance(v, torch.Tensor)},
    )


def trained_plainly(momentum, num_replicas):
    """The same of every replica, with a plain batch norm over the samples of all of them."""
    model = built(momentum)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = [[] for _ in range(num_replicas)]
    for i in range(NUM_STEPS):
        optimizer.zero_grad()
        found = []
        parts = [batch_of(i, replica).chunk(2) for replica in range(num_replicas)]
        for samples in zip(*parts, strict=True):
            scores = model(torch.cat(samples)).split([len(s) for s in samples])
            found.append([loss_of(part) for part in scores])
            (sum(found[-1]) / num_replicas / 2).backward()
        optimizer.step()
        for replica, values in enumerate(zip(*found, strict=True)):
            losses[replica].append(sum(v.item() for v in values) / 2)
    model.eval()
    evaluated = sum(loss_of(model(part)).item() for part in batch_of(0, 0).chunk(2)) / 2
    return [[*values, evaluated] for values in losses], model.state_dict()


@pytest.mark.parametrize(
    ("num_ranks", "stages", "momentum"),
    [(2, 1, 0.1), *(pytest.param(n, 2, None, marks=pytest.mark.slow) for n in (2, 4))],
)
def test_statistics_are_those_of_all_replicas(num_ranks, stages, momentum):
    ranks = run_ranks(trained, num_ranks, stages, momentum, timeout_s=300)
    losses, state = trained_plainly(momentum, num_ranks // stages)
    for replica, found, _ in ranks:
        assert found == pytest.approx(losses[replica], rel=1e-5)
    for replica in range(num_ranks // stages):
        held = merged([part for index, _, part in ranks if index == replica])
        torch.testing.assert_close(held, dict(state), rtol=1e-4, atol=1e-6)


def refused():
    import torch.distributed as dist

    import mpxla as smp

    smp.init({"ddp": True, "microbatches": 1})
    groups = [dist.new_group([rank]) for rank in range(2)]
    model = nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2, process_group=groups[smp.rank()]))
    with pytest.raises(smp.ConfigError) as error:
        smp.DistributedModel(model)
    joined = smp.DistributedModel(nn.SyncBatchNorm.convert_sync_batchnorm(built(0.1)))
    with pytest.raises(smp.ConfigError) as of_join, joined.join():
        pass
    return str(error.value), str(of_join.value)


def test_what_replicas_cannot_share():
    for of_group, of_join in run_ranks(refused, 2, timeout_s=200):
        assert "SyncBatchNorm 1 has a process_group" in of_group
        assert "leave process_group out" in of_group
        assert "join() does not go with the SyncBatchNorm 1" in of_join
        assert "same number of batches" in of_join
