"""Functions of the user whose backward gives no gradient, some of the time: None is not zeros.

Weight decay moves a parameter whose gradient is zeros, and none that has no gradient. All train on
two ranks, as plain PyTorch does.
"""

import pytest
import torch
from torch import nn
from torch.autograd.function import once_differentiable

from mpxla.tests.clients import merged, train_case_plainly, train_cases
from mpxla.tests.ranks.run import run_ranks

NUM_STEPS = 3


class Scaled(torch.autograd.Function):
    """Two results; a weight has no gradient where its result has none. Wrong on purpose."""

    @staticmethod
    def forward(ctx, x, first, second):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, first, second)
        return x * first, x * second

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        x, *weights = ctx.saved_tensors
        pairs = list(zip(gradients, weights, strict=False))
        of_x = sum(2 * g * w for g, w in pairs if g is not None)
        return of_x, *(None if g is None else 3 * (g * x).sum(0) for g, _ in pairs)


class WithPlaces(Scaled):
    """The last result has no gradient at all, so that the backward is given None."""

    @staticmethod
    def forward(x, first, second):
        return x * first, x * second, x.argmax(-1)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(output[2])
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, *gradients):
        assert gradients[2] is None
        return Scaled.backward(ctx, *gradients[:2])


class Filled(torch.autograd.Function):
    """Zeros come in the place of a gradient that there is none of."""

    @staticmethod
    def forward(ctx, x, first, second):
        ctx.save_for_backward(x)
        return x * first, x * second

    @staticmethod
    def backward(ctx, of_first, of_second):
        (x,) = ctx.saved_tensors
        return of_first + of_second, (of_first * x).sum(0), (of_second * x).sum(0)


class Ignoring(torch.autograd.Function):
    """No gradient comes back to the second argument."""

    @staticmethod
    def forward(ctx, x, y):
        return x + y

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class InList(torch.autograd.Function):
    """PyTorch sees no tensors in what it returns, which has no gradient then."""

    @staticmethod
    def forward(ctx, x, weight):
        return [x * weight, {"more": x + weight}]

    @staticmethod
    def backward(ctx, gradient):
        raise AssertionError("there is none")


class Mapped(torch.autograd.Function):
    """For one row; torch makes that for many. Wrong on purpose."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, weight):
        return x * weight, (x + weight).sum()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, of_product, of_sum):
        x, weight = ctx.saved_tensors
        return 2 * of_product * weight + of_sum, of_product * x + 3 * of_sum


class MappedByItself(Mapped):
    generate_vmap_rule = False

    @staticmethod
    def vmap(info, in_dims, x, weight):
        assert in_dims == (0, None)
        results = [MappedByItself.apply(row, weight) for row in x]
        return tuple(map(torch.stack, zip(*results, strict=True))), (0, 0)


class Mapping(torch.autograd.Function):
    """Calls `torch.vmap` inside. Wrong on purpose."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return torch.vmap(lambda row: row * weight)(x)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        of_weight = torch.vmap(torch.mul)(gradient, x).sum(0)
        return torch.vmap(lambda row: 2 * row * weight)(gradient), of_weight


def in_list(model, x):
    product, others = InList.apply(model.other(x), model.first)
    return x + product + others["more"]


def mapped(function):
    def call(model, x):
        product, total = torch.vmap(function.apply, in_dims=(0, None))(x, model.first)
        return product + total[:, None]

    return call


CASES = {
    "both": lambda m, x: sum(Scaled.apply(x, m.first, m.second)),
    "first": lambda m, x: Scaled.apply(x, m.first, m.second)[0],
    "second": lambda m, x: Scaled.apply(x, m.first, m.second)[1],
    "computed": lambda m, x: Scaled.apply(x, m.first, m.other(x).mean(0))[0],
    "behind": lambda m, x: Ignoring.apply(*Scaled.apply(x, m.first, m.second)),
    "places": lambda m, x: WithPlaces.apply(x, m.first, m.second)[1],
    "filled": lambda m, x: Filled.apply(x, m.first, m.second)[0],
    "ignoring": lambda m, x: Ignoring.apply(x, m.first),
    "far": lambda m, x: Ignoring.apply(x, m.other(x).tanh() @ m.enter.weight),
    "list": in_list,
    "mapped": mapped(Mapped),
    "itself": mapped(MappedByItself),
    "mapping": lambda m, x: Mapping.apply(x, m.first),
}


class Net(nn.Module):
    def __init__(self, name):
        super().__init__()
        torch.manual_seed(5)
        self.enter, self.other, self.leave = (nn.Linear(4, 4) for _ in range(3))
        self.first, self.second = (nn.Parameter(torch.randn(4)) for _ in range(2))
        self.name = name

    def forward(self, x):
        return self.leave(CASES[self.name](self, self.enter(x).tanh()).tanh())


def batches():
    return torch.randn(NUM_STEPS, 6, 4, generator=torch.Generator().manual_seed(3))


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.3)


@pytest.mark.ranks
def test_parameters_without_a_gradient_stay():
    first, second = run_ranks(train_cases, 2, Net, [*CASES], batches(), optimizer_of, timeout_s=300)
    for name in CASES:
        losses, parameters = train_case_plainly(Net(name), batches(), optimizer_of)
        assert first[name][0] == pytest.approx(losses, rel=1e-4), name
        held = merged([first[name][1], second[name][1]])
        torch.testing.assert_close({name: held}, {name: parameters}, rtol=1e-4, atol=1e-6)
