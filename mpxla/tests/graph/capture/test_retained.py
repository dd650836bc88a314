"""Gradients that tensors keep in a step function, and gradients of tensors that it writes to."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mpxla.errors import CaptureError
from mpxla.graph.capture.step import TensorLeaf
from mpxla.graph.stepgraph import OutputKind
from mpxla.tests.graph.capture.test_capture import backward, capture, outputs_of

pytestmark = pytest.mark.unit


def loss_of(model, x):
    return F.cross_entropy(model(x), torch.tensor([0, 2, 1, 1]))


def pgd(model, x, backward):
    noise = torch.zeros_like(x, requires_grad=True)
    for _ in range(2):
        loss_of(model, x + noise).backward(inputs=[noise])
        noise.data = (noise.data + 0.2 * noise.grad.sign()).clamp(-0.3, 0.3)
        noise.grad.zero_()
    return loss_of(model, x + noise.detach())


def pgd_in_place(model, x, backward):
    noise = torch.zeros_like(x, requires_grad=True)
    for _ in range(2):
        torch.autograd.backward(loss_of(model, x + noise), inputs=noise)
        with torch.no_grad():
            noise += 0.5 * noise.grad
        noise.grad = None
    return loss_of(model, x + noise.detach())


def fgsm(model, x, backward):
    x = x.clone().requires_grad_()
    assert x.grad is None
    loss = loss_of(model, x)
    backward(loss)
    return loss_of(model, x.detach() + x.grad.sign())


def added_up(model, x, backward):
    """A script may hold the gradient to which another one is added."""
    noise = torch.zeros_like(x, requires_grad=True)
    loss_of(model, x + noise).backward(inputs=(noise,))
    held = noise.grad
    loss_of(model, x - 2 * noise).backward(inputs=(noise,))
    return loss_of(model, x + held)


def seeded(model, x, backward):
    x = x.clone().requires_grad_()
    scores = model(x)
    scores.backward(gradient=scores.detach().square(), inputs=[x], retain_graph=True)
    return loss_of(model, x.grad) + scores.sum()


def penalized(model, x, backward):
    x = x.clone().requires_grad_()
    loss = loss_of(model, x)
    loss.backward(create_graph=True, inputs=[x])
    return loss + x.grad.square().sum()


def on_both_sides_of_a_write(model, x, backward):
    noise = torch.zeros_like(x, requires_grad=True)
    first = loss_of(model, x + noise)
    with torch.no_grad():
        noise += 0.3
    second = loss_of(model, x + noise)
    (slopes,) = torch.autograd.grad(first + 2 * second, noise, retain_graph=True)
    return loss_of(model, x + slopes) + second


def of_written_parameters(model, x, backward):
    """As steps of meta-learning do: gradients where the parameters are for a moment."""
    parameters = list(model.parameters())
    before = [p.detach().clone() for p in parameters]
    slopes = torch.autograd.grad(loss_of(model, x), parameters)
    with torch.no_grad():
        for parameter, slope in zip(parameters, slopes, strict=True):
            parameter.sub_(0.5 * slope)
    there = torch.autograd.grad(loss_of(model, x), parameters)
    for parameter, value in zip(parameters, before, strict=True):
        parameter.data.copy_(value)
    return sum((p * g).sum() for p, g in zip(parameters, there, strict=True))


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.parametrize(
    "function",
    [
        *(pgd, pgd_in_place, fgsm, added_up, seeded, penalized),
        *(on_both_sides_of_a_write, of_written_parameters),
    ],
    ids=lambda function: function.__name__,
)
def test_gradients_are_those_of_pytorch(function):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)).double()
    plain, x = copy.deepcopy(model), torch.randn(4, 6, dtype=torch.float64)

    def step(leaves):
        loss = function(model, leaves[0], backward)
        backward(loss)
        return loss

    captured = capture(model, step, TensorLeaf((4, 6), torch.float64))
    values = outputs_of(captured, model, [x])
    roles = list(zip(captured.outputs, values, strict=True))
    sum(value for role, value in roles if role.kind is OutputKind.OBJECTIVE).backward()
    (found,) = (value for role, value in roles if role.kind is OutputKind.RESULT and not role.name)
    wanted = function(plain, x, lambda loss: loss.backward(retain_graph=True))
    wanted.backward()
    torch.testing.assert_close(found.detach(), wanted.detach())
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


@pytest.mark.parametrize("call", [torch.Tensor.backward, torch.autograd.backward])
def test_a_backward_to_parameters_is_refused_with_what_to_write(call):
    model = nn.Linear(6, 1)
    for keys in ({}, {"inputs": [model.weight]}):
        with pytest.raises(CaptureError, match=r"model\.backward\(loss\).*inputs=\[x\]\)"):
            capture(model, lambda leaves, keys=keys: call(model(leaves[0]).sum(), **keys))
