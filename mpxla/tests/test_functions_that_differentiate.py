"""Functions of the user whose backward computes again, and asks for gradients of the arguments.

What they compute with has come by another way: a module is enclosed, or kept in `ctx`, and its
parameters are arguments too. Checkpoints of diffusion models and adjoints of solvers are so. All
train on two ranks, as plain PyTorch does.
"""

import pytest
import torch
from torch import nn

from mpxla.tests.clients import merged, train_case_plainly, train_cases
from mpxla.tests.ranks.run import run_ranks

NUM_STEPS = 3


class Checkpoint(torch.autograd.Function):
    """Of a function and the parameters that it uses; what is not used has no gradient."""

    @staticmethod
    def forward(ctx, function, x, *parameters):
        ctx.function, ctx.x, ctx.parameters = function, x, parameters
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.function(x.view_as(x))
        wanted = (x, *ctx.parameters)
        return None, *torch.autograd.grad(y, wanted, gradient, allow_unused=True)


class Strict(torch.autograd.Function):
    """All have to be used. Wrong on purpose."""

    @staticmethod
    def forward(ctx, function, x, *tensors):
        ctx.function = function
        ctx.save_for_backward(x, *tensors)
        return function(x)

    @staticmethod
    def backward(ctx, gradient):
        x, *tensors = ctx.saved_tensors
        with torch.enable_grad():
            y = ctx.function(x)
        return None, 2 * gradient, *torch.autograd.grad(y, tensors, gradient)


class Deciding(torch.autograd.Function):
    """Goes by the order of times, and writes to a tensor of its own, as solvers do."""

    @staticmethod
    def forward(ctx, function, times, x, *parameters):
        ctx.function = function
        ctx.save_for_backward(times, x, *parameters)
        return function(x)

    @staticmethod
    def backward(ctx, gradient):
        times, x, *parameters = ctx.saved_tensors
        later = times[0:2].flip(0)
        if later[0] > later[1]:
            gradient = gradient.clone()
            gradient[..., 0] *= 2
        with torch.enable_grad():
            y = ctx.function(x)
        found = torch.autograd.grad(y, (x, *parameters), gradient, allow_unused=True)
        return None, None, *found


class Flattening(torch.autograd.Function):
    """Adds up in one piece, which the gradient of a transposed result is not. Wrong on purpose."""

    @staticmethod
    def forward(ctx, x):
        return torch.stack([x, 2 * x], 1)

    @staticmethod
    def backward(ctx, gradient):
        total = torch.ones(gradient.numel())
        total += 2 * gradient.reshape(-1)
        return total.reshape(gradient.shape)[:, 1]


def of_value(model, x):
    scale = model.other(x)
    return Strict.apply(lambda y: (y * scale).tanh(), x, scale)


def of_what_follows(model, x):
    scale = model.other(x)
    sine = scale.sin()
    return Checkpoint.apply(lambda y: (y * sine).tanh(), x, scale)


CASES = {
    "module": lambda m, x: Checkpoint.apply(m.other, x, *m.other.parameters()),
    "unused": lambda m, x: Checkpoint.apply(m.other, x, *m.other.parameters(), m.idle),
    "strict": lambda m, x: Strict.apply(m.other, x, m.other.weight, m.other.bias),
    "value": of_value,
    "follows": of_what_follows,
    "transposed": lambda m, x: Flattening.apply(x).transpose(0, 1)[1],
    "deciding": lambda m, x: Deciding.apply(
        m.other, torch.linspace(0, 1, 3), x, *m.other.parameters()
    ),
}


class Net(nn.Module):
    def __init__(self, name):
        super().__init__()
        torch.manual_seed(5)
        self.enter, self.other, self.leave = (nn.Linear(4, 4) for _ in range(3))
        self.idle = nn.Parameter(torch.randn(4))
        self.name = name

    def forward(self, x):
        return self.leave(CASES[self.name](self, self.enter(x).tanh()).tanh())


def batches():
    return torch.randn(NUM_STEPS, 6, 4, generator=torch.Generator().manual_seed(3))


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.ranks
def test_gradients_of_arguments_that_the_function_encloses():
    first, second = run_ranks(train_cases, 2, Net, [*CASES], batches(), optimizer_of, timeout_s=300)
    for name in CASES:
        losses, parameters = train_case_plainly(Net(name), batches(), optimizer_of)
        assert first[name][0] == pytest.approx(losses, rel=1e-4), name
        held = merged([first[name][1], second[name][1]])
        torch.testing.assert_close({name: held}, {name: parameters}, rtol=1e-4, atol=1e-6)
