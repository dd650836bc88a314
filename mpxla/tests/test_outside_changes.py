"""Teachers outside of models, which a script averages between steps."""

import copy

import pytest
import torch
from torch import nn

import mpxla as smp
from mpxla.errors import PeerFailure, StepError
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks

NUM_STEPS = 4


def net():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])


def distance(model, teacher, x):
    with torch.no_grad():
        wanted = teacher(x) + 1
    return (model(x) - wanted).square().mean()


def average(teacher, model):
    with torch.no_grad():
        for kept, own in zip(teacher.parameters(), model.parameters(), strict=True):
            if not own.is_meta:
                kept.lerp_(own.cpu(), 0.5)


def distilled(in_block):
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    raw = net()
    teacher, model = copy.deepcopy(raw), smp.DistributedModel(raw)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def step(model, x):
        loss = distance(model, teacher, x)
        model.backward(loss)
        return loss

    losses = []
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        losses.append(step(model, torch.ones(4, 4)).reduce_mean().item())
        optimizer.step()
        if in_block:
            with model.summon_full_params(writeback=False) as module:
                average(teacher, module)
        else:
            average(teacher, model)
    return losses


def test_averages_whole_parameters_in_a_block():
    model, expected = net(), []
    teacher = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = distance(model, teacher, torch.ones(4, 4))
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
        average(teacher, model)
    for losses in run_ranks(distilled, 2, True):
        assert losses == pytest.approx(expected, rel=1e-4)


def distilled_by_halves():
    with pytest.raises((StepError, PeerFailure)) as caught:
        distilled(False)
    return str(caught.value)


def test_averages_of_each_rank_alone_are_refused():
    for text in run_ranks(distilled_by_halves, 2):
        assert "tensor of shape [4, 4] outside of its models" in text
        assert "has changed between calls on the ranks [0], and not on [1]" in text
