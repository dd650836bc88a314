"""Step functions that write to parameters train as in PyTorch: the same losses and parameters."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import mpxla as smp
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks


def max_norm(model, x):
    """As EEGNet does it."""
    model.first.weight.data = torch.renorm(model.first.weight.data, p=2, dim=0, maxnorm=0.3)
    return model.last(torch.tanh(model.first(x)))


def normalized(model, x):
    """As prototypes and cosine heads do it, and layers that are not to be negative."""
    with torch.no_grad():
        model.last.weight.copy_(F.normalize(model.last.weight, dim=1))
        model.first.bias.clamp_(min=0)
        model.first.weight.data[0].zero_()
    model.first.weight.data.div_(model.first.weight.norm())
    return model.last(torch.tanh(model.first(x)))


def decayed(model, x):
    """No two microbatches have the same weights."""
    model.first.weight.data.mul_(0.8)
    model.last.weight.data *= 0.9
    torch.mul(model.last.bias.data, 0.9, out=model.last.bias.data)
    return model.last(torch.tanh(model.first(x)))


def binary(model, x):
    """The first layer's full weights come back when the backward has been called."""
    model.full = model.first.weight.data
    model.first.weight.data = model.full.sign() * model.full.abs().mean()
    mixed = F.linear(x, model.full) + model.first(x) + model.first.weight.T.sum(1)
    return model.last(torch.tanh(mixed))


def momentum(model, x):
    """A frozen copy follows a layer, as in MoCo."""
    with torch.no_grad():
        for slow, fast in zip(model.slow.parameters(), model.last.parameters(), strict=True):
            slow.data = slow.data * 0.9 + fast.data * 0.1
    y = torch.tanh(model.first(x))
    return model.last(y) * model.slow(y)


def twice(model, x):
    """Siamese: the second call writes what the first has left."""
    return max_norm(model, x) * max_norm(model, x + 1)


def again(model, x):
    """What is computed again is not written again, as PyTorch would do."""
    return checkpoint(decayed, model, x, use_reentrant=False)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ (2 * weight).t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return 2 * grad @ weight, 2 * grad.t() @ x


def own_backward(model, x):
    model.first.weight.data = model.first.weight.data.clamp(-0.2, 0.2)
    return model.last(torch.tanh(Double.apply(x, model.first.weight)))


def by_batch(model, x):
    """The new value depends on the inputs."""
    y = torch.tanh(model.first(x))
    model.last.bias.data.lerp_(y.detach().mean(0), 0.1)
    return model.last(y)


INSTEAD = {again: decayed}
FUNCTIONS = [max_norm, normalized, decayed, binary, momentum, twice, again, own_backward, by_batch]


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last, self.slow = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.slow.requires_grad_(False)
        self.function = function

    def forward(self, x):
        return self.function(self, x)


def batch_of(number):
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(number))


STEPS, MICROBATCHES = 3, 2


def loss_of(model, x):
    return (model(x) - 1).square().mean()


def restore(model):
    model = getattr(model, "module", model)
    if hasattr(model, "full"):
        model.first.weight.data = model.full


def expected(function, replicas=1):
    """Losses, gradients of the last step, and parameters before and after an evaluation."""
    model = Model(INSTEAD.get(function, function))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    losses = []
    for number in range(STEPS):
        optimizer.zero_grad()
        x = batch_of(number)
        for part in zip(*(x.chunk(MICROBATCHES) for x in x.chunk(replicas)), strict=True):
            loss = loss_of(model, torch.cat(part))
            (loss / MICROBATCHES).backward()
            restore(model)
            losses.append(loss.item())
        optimizer.step()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    trained = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for x in batch_of(STEPS).chunk(MICROBATCHES):
            loss_of(model, x)
            restore(model)
    return losses, gradients, trained, model.state_dict()


@smp.step
def train_step(model, x):
    loss = loss_of(model, x)
    model.backward(loss)
    restore(model)
    return loss


@smp.step
def evaluate(model, x):
    with torch.no_grad():
        loss = loss_of(model, x)
    restore(model)
    return loss


def train(config, functions):
    smp.init({"microbatches": MICROBATCHES, **config})
    return [train_one(function) for function in functions]


def train_one(function):
    model = smp.DistributedModel(Model(function))
    optimizer = smp.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    )
    losses = []
    for number in range(STEPS):
        optimizer.zero_grad()
        x = batch_of(number).chunk(smp.rdp_size())[smp.rdp_rank()]
        losses += [loss.item() for loss in train_step(model, x).outputs]
        optimizer.step()
    own = {n.removeprefix("module."): p.grad for n, p in model.named_parameters()}
    gradients = {n: g.cpu() for n, g in own.items() if g is not None}
    trained = {name: value.cpu() for name, value in model.state_dict().items()}
    evaluate(model, batch_of(STEPS))
    return losses, gradients, trained, {n: v.cpu() for n, v in model.state_dict().items()}


def check(found, functions, replicas=1):
    for function, results in zip(functions, zip(*found, strict=True), strict=True):
        losses, gradients, trained, evaluated = expected(function, replicas)
        mean = torch.tensor([one[0] for one in results]).mean(0)
        torch.testing.assert_close(mean, torch.tensor(losses), msg=lambda m: function.__name__ + "\n" + m)
        for _, own, *states in results:
            wanted = {name: gradients[name] for name in own}
            torch.testing.assert_close(own, wanted, msg=lambda m: function.__name__ + "\n" + m)
            torch.testing.assert_close(states, [trained, evaluated], msg=lambda m: function.__name__ + "\n" + m)


def test_one_rank():
    check(run_ranks(train, 1, {}, FUNCTIONS), FUNCTIONS)


@pytest.mark.parametrize("config", [{}, {"auto_partition": False, "default_partition": 0}])
def test_two_stages(config):
    check(run_ranks(train, 2, {"pipeline_parallel_degree": 2, **config}, FUNCTIONS), FUNCTIONS)


def test_two_replicas():
    functions = [f for f in FUNCTIONS if f is not by_batch]
    check(run_ranks(train, 2, {"ddp": True}, functions), functions, replicas=2)
