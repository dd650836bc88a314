"""An optimizer of two models goes on from its state where steps first use only one of them."""

import copy

import pytest
import torch
from torch import nn

import mpxla as smp
from mpxla.tests.clients import host
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks


def layers(width):
    torch.manual_seed(width)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 4))


def trained(is_plain):
    def made():
        models = [layers(width) for width in (8, 6)]
        if not is_plain:
            models = [smp.DistributedModel(model) for model in models]
        parameters = [parameter for model in models for parameter in model.parameters()]
        optimizer = torch.optim.Adam(parameters, lr=0.05, eps=1e-3)
        return models, optimizer if is_plain else smp.DistributedOptimizer(optimizer)

    def step(model, x):
        loss = model(x).square().mean()
        loss.backward() if is_plain else model.backward(loss)
        return loss

    step = step if is_plain else smp.step(step)

    def train(places):
        for number, place in enumerate(places):
            optimizer.zero_grad()
            step(models[place], torch.linspace(-1, number, 16).view(4, 4))
            optimizer.step()

    models, optimizer = made()
    train([0, 1, 0, 1])
    states = copy.deepcopy([one.state_dict() for one in (*models, optimizer)])
    models, optimizer = made()
    for one, state in zip((*models, optimizer), states, strict=True):
        one.load_state_dict(state)
    train([0, 0, 1, 0])
    return [host(model.state_dict().items()) for model in models]


def go_on():
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 1})
    return trained(is_plain=False)


def test_state_of_two_models_is_there_when_one_is_trained():
    expected = trained(is_plain=True)
    for found in run_ranks(go_on, 2):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
