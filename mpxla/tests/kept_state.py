"""Trains models whose middle layer keeps something from one call to the next."""

import torch
from torch import nn

import mpxla as smp

MICROBATCHES, STEPS = 2, 3


def model_of(layer):
    torch.manual_seed(0)
    first, last = nn.Linear(4, 3), nn.Linear(3, 2)
    return nn.Sequential(first, layer, nn.Tanh(), last).double()


def batch_of(number):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(8, 4, dtype=torch.float64, generator=generator)


def loss_of(model, x):
    return model(x).square().mean()


def train_layer_plainly(layer, after, microbatches=MICROBATCHES):
    """The losses of steps, each with those that `after` gives for the model and the number."""
    model = model_of(layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for number in range(STEPS):
        optimizer.zero_grad()
        losses.append(0.0)
        for part in batch_of(number).chunk(microbatches):
            loss = loss_of(model, part) / microbatches
            loss.backward()
            losses[-1] += loss.item()
        optimizer.step()
        losses += after(model, number)
    return losses


@smp.step
def train_step(model, x):
    loss = loss_of(model, x)
    model.backward(loss)
    return loss


def train_layer(layer, after):
    """The same with a distributed model; in a session."""
    model = smp.DistributedModel(model_of(layer))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    for number in range(STEPS):
        optimizer.zero_grad()
        losses.append(train_step(model, batch_of(number)).reduce_mean().item())
        optimizer.step()
        losses += after(model, number)
    return losses
