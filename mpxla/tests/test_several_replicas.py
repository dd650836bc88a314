"""Options of each of several models over replicas, uneven batches, hooks and plain backwards."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import mpxla as smp
from mpxla.tests.ranks.run import run_ranks
from mpxla.tests.several import Critic, Generator

pytestmark = pytest.mark.ranks

REPLICAS = {"ddp": True}


def made(kind, seed, **options):
    torch.manual_seed(seed)
    return smp.DistributedModel(kind(), **options)


def batch(replica, number, width=4):
    generator = torch.Generator().manual_seed(100 * replica + number)
    return torch.randn(4, width, generator=generator)


def gradients_of(model):
    module = getattr(model, "module", model)
    found = module.named_parameters()
    return {n: None if p.grad is None else p.grad.cpu() for n, p in found}


def both(g, d, z):
    loss = d(g(z)).square().mean()
    g.backward(loss)
    return loss


def plain_gradients(batches):
    """Of the sum over batches."""
    torch.manual_seed(1)
    g = Generator()
    torch.manual_seed(2)
    d = Critic()
    for z in batches:
        d(g(z)).square().mean().backward()
    return gradients_of(g), gradients_of(d)


def close(found, expected, scale):
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value * scale, rtol=1e-4, atol=1e-6, msg=name)


# Options.


def use_other_options(averages, has_hook, passes):
    smp.init({"microbatches": 2, **REPLICAS})
    g = made(Generator, 1, average_grads_across_microbatches=averages)
    d = made(Critic, 2, backward_passes_per_step=passes)

    def average(state, bucket):
        flat = bucket.buffer().div_(2 * dist.get_world_size(state))
        work = dist.all_reduce(flat, group=state, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    if has_hook:
        d.register_comm_hook(smp.get_dp_process_group(), average)
    step = smp.step(both)
    step(g, d, batch(smp.rank(), 0))
    first = gradients_of(d)
    step(g, d, batch(smp.rank(), 1))
    return gradients_of(g), first, gradients_of(d)


@pytest.mark.parametrize(
    ("averages", "has_hook", "passes"),
    [
        (False, False, 2),
        *(pytest.param(averages, True, 1, marks=pytest.mark.slow) for averages in (True, False)),
    ],
)
def test_each_model_has_its_options(averages, has_hook, passes):
    results = run_ranks(use_other_options, 2, averages, has_hook, passes)
    expected_g, expected_d = plain_gradients([batch(r, n) for r in (0, 1) for n in (0, 1)])
    for rank, (of_g, first, of_d) in enumerate(results):
        close(of_g, expected_g, 0.5 if averages else 1.0)
        close(of_d, expected_d, 0.5)
        if passes == 2:
            close(first, plain_gradients([batch(rank, 0)])[1], 1.0)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.leave = nn.BatchNorm1d(3), nn.Linear(3, 1)

    def forward(self, x):
        return self.leave(self.norm(x))


def train_around_a_frozen_critic():
    smp.init(REPLICAS)
    g, d = made(Generator, 1), made(Normed, 2, backward_passes_per_step=2)

    @smp.step
    def judge(g, d, z):
        loss = d(g(z).detach()).square().mean()
        d.backward(loss)
        return loss

    for number, function in enumerate((judge, smp.step(both), judge)):
        d.requires_grad_(function is judge)
        function(g, d, batch(smp.rank(), number))
    return gradients_of(d), {n: b.cpu() for n, b in d.local_named_buffers()}


@pytest.mark.slow
def test_a_step_that_only_changes_buffers_is_no_pass_of_a_model():
    first, second = run_ranks(train_around_a_frozen_critic, 2)
    for one, other in zip(first, second, strict=True):
        for name, value in one.items():
            assert torch.equal(value, other[name]), name
    assert first[1]["norm.num_batches_tracked"] == 3


# Uneven batches.


def train_unevenly(counts, stages):
    smp.init({"ddp": True, "pipeline_parallel_degree": stages})
    d, g = made(Normed, 2), made(Generator, 1)
    optimizers = [smp.DistributedOptimizer(torch.optim.SGD(m.parameters(), lr=0.5)) for m in (g, d)]
    step = smp.step(both)
    with g.join(), d.join():
        for number in range(counts[smp.rdp_rank()]):
            for optimizer in optimizers:
                optimizer.zero_grad()
            step(g, d, batch(smp.rdp_rank(), number))
            for optimizer in optimizers:
                optimizer.step()
    return g.state_dict(), d.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2])
def test_join_covers_all_models(stages):
    counts = (1, 3)
    results = run_ranks(train_unevenly, 2 * stages, counts, stages)
    torch.manual_seed(1)
    g = Generator()
    torch.manual_seed(2)
    d = Normed()
    optimizer = torch.optim.SGD([*g.parameters(), *d.parameters()], lr=0.5)
    for number in range(max(counts)):
        optimizer.zero_grad()
        for replica in (r for r, count in enumerate(counts) if number < count):
            (d(g(batch(replica, number))).square().mean() / 2).backward()
        optimizer.step()
    for found_g, found_d in results:
        close(found_g, dict(g.named_parameters()), 1.0)
        close(found_d, dict(d.named_parameters()), 1.0)
        assert torch.equal(found_d["norm.running_mean"], results[0][1]["norm.running_mean"])


# Backwards outside step functions.


def differentiate_plainly():
    smp.init(REPLICAS)
    g, d = made(Generator, 1), made(Critic, 2)
    for number in range(2):
        d(g(batch(smp.rank(), number).to("xla"))).square().mean().backward()
    return gradients_of(g), gradients_of(d)


@pytest.mark.slow
def test_plain_backwards_through_both_models_are_reduced():
    expected = plain_gradients([batch(r, n) for r in (0, 1) for n in (0, 1)])
    for found in run_ranks(differentiate_plainly, 2):
        for one, other in zip(found, expected, strict=True):
            close(one, other, 0.5)
