"""Random numbers that Python draws in a step: the same ones as in plain PyTorch, call for call."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import mpxla as smp
from mpxla.tests.clients import logged
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks

STEPS, MICROBATCHES = 4, 2


def skipped(model, x):
    """Layers that are left out at random; how many numbers are drawn depends on those before."""
    x = torch.tanh(model.first(x))
    for layer in (model.middle, model.last):
        if random.random() < 0.5:
            x = torch.tanh(layer(x))
            if np.random.rand() < 0.5:
                x = torch.relu(x)
    return x


def mixed(model, x):
    """As mixup does; the numbers are inputs, and their functions as well."""
    share, scale = np.random.beta(0.4, 0.4), random.uniform(0.5, 1.5)
    y = torch.tanh(model.first(x))
    return model.last(y * share + (1 - share) * scale * y.flip(1))


def in_arrays(model, x):
    """An array of one number decides, and one of several is a constant of its program."""
    noise = torch.from_numpy(np.random.randn(6)).float() if np.random.rand(1) < 0.5 else 0.0
    return model.last(torch.tanh(model.first(x)) + noise)


def chosen(model, x):
    layer = random.choice([model.middle, model.last])
    return layer(torch.tanh(model.first(x))) * random.choices([0.5, 1.0], weights=[1, 2])[0]


def counted(model, x):
    for _ in range(random.randint(1, 3)):
        x = torch.tanh(model.middle(x))
    start = random.randrange(0, 2)
    return model.last(torch.cat([x[:, start:], x[:, :start]], 1))


def ordered(model, x):
    order = [0, 1, 2, 3, 4, 5]
    random.shuffle(order)
    x = model.last(torch.tanh(model.first(x[:, order])))
    few = random.sample(range(6), 2)
    return x[:, np.random.permutation(6)] + x[:, few].sum(1, keepdim=True)


def by_torch(model, x):
    """As layers are dropped in transformers."""
    x = torch.tanh(model.first(x))
    if torch.rand([]) < 0.5:
        x = torch.tanh(model.middle(x))
    if torch.rand(1).item() < 0.5:
        x = x * 2
    return model.last(x) / (1 + int(torch.randint(0, 2, (1,))))


def sized(model, x):
    """Shapes by a number that torch's functions want of Python, and say so in their own ways."""
    count = torch.randint(1, 3, (1,)).item()
    x = functional.pad(torch.tanh(model.first(x)), (count, 3 - count)).narrow(1, count, 6)
    x = x + x.new_ones(count, 6).sum(0) * torch.tensor_split(x, count, 1)[0].mean(1, keepdim=True)
    return model.last(x.expand(count, *x.shape).mean(0)) / 4


def seldom_dropped(model, x):
    """The number is another one in every call, and the way is not."""
    x = torch.tanh(model.first(x))
    for layer in (model.middle, model.last):
        if not torch.rand(1).item() <= 1e-6:
            x = torch.tanh(layer(x))
    return x


def of_generators(model, x):
    """By objects of the model's own."""
    x = torch.tanh(model.first(x)) * model.generator.normal() + model.legacy.uniform()
    if model.dice.random() < 0.5:
        x = torch.tanh(model.middle(x))
    return model.last(x[:, model.generator.permutation(6)]) * model.dice.choice([0.5, 2.0])


def seeded(model, x):
    """The same in every call, as the function says."""
    random.seed(3)
    return model.last(torch.tanh(model.first(x) * random.random()))


FUNCTIONS = [skipped, mixed, in_arrays, chosen, counted, ordered, by_torch, sized, of_generators]
QUICK = [skipped, mixed, seldom_dropped]


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.middle, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.function = function
        self.generator, self.dice = np.random.default_rng(5), random.Random(5)
        self.legacy = np.random.RandomState(5)

    def forward(self, x):
        return self.function(self, x)


def batch_of(number):
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(number))


def loss_of(model, x):
    return (model(x) - 1).square().mean()


def seed(number):
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def drawn_next():
    return random.random(), np.random.rand(), torch.rand(()).item()


def expected(function):
    """What one process does with whole batches; each draws once."""
    model = Model(function)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    seed(0)
    losses = []
    for number in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, batch_of(number))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return losses, model.state_dict(), drawn_next()


@smp.step
def train_step(model, x):
    loss = loss_of(model, x)
    model.backward(loss)
    return loss


@smp.step(non_split_inputs=["generator"])
def evaluate(model, x, generator):
    return model(x) * generator.normal()


def train(functions, config):
    smp.init({"microbatches": MICROBATCHES, **config})
    return [train_one(function) for function in functions]


def train_one(function):
    model = smp.DistributedModel(Model(function))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3))
    seed(smp.rank())  # the first rank draws for all
    losses = []
    with logged() as lines:
        for number in range(STEPS):
            optimizer.zero_grad()
            losses.append(train_step(model, batch_of(number)).reduce_mean().item())
            optimizer.step()
    drawn = drawn_next()
    compiled = sum("compiled step function" in line for line in lines)
    state = {name: value.cpu() for name, value in model.state_dict().items()}
    return losses, state, drawn, compiled


def compare(functions, num_stages, backend, num_sharing=1):
    config = {"pipeline_parallel_degree": num_stages}
    if num_sharing > 1:
        config |= {"tensor_parallel_degree": num_sharing, "ddp": True, "prescaled_batch": True}
    size, env = num_stages * num_sharing, {"MPXLA_DEVICE": backend}
    found = run_ranks(train, size, functions, config, env=env)
    first = found[0]
    for function, results in zip(functions, first, strict=True):
        losses, state, drawn = expected(function)
        assert results[0] == pytest.approx(losses, rel=1e-5), function.__name__
        torch.testing.assert_close(results[1], state, rtol=1e-4, atol=1e-6)
        if function is not by_torch or num_stages == 1:
            assert results[2][:2] == drawn[:2], function.__name__
    for others in found[1:]:
        assert [one[0] for one in others] == [one[0] for one in first]
        torch.testing.assert_close([one[1] for one in others], [one[1] for one in first])
    return {f.__name__: results[3] for f, results in zip(functions, first, strict=True)}


def test_numbers_are_drawn_in_every_call():
    compiled = compare([*QUICK, sized, of_generators], 1, "pjrt")
    assert compiled["mixed"] == compiled["seldom_dropped"] == 1
    assert 1 < compiled["skipped"] <= STEPS
    assert 1 < compiled["of_generators"] <= STEPS


def test_ranks_that_share_tensors_draw_what_the_first_one_does():
    compare([mixed], 1, "pjrt", num_sharing=2)


def evaluate_by_an_argument():
    smp.init({"microbatches": MICROBATCHES})
    model = smp.DistributedModel(Model(lambda model, x: model.first(x)))
    generator, x = np.random.default_rng(7), batch_of(0)
    with torch.no_grad():
        return [evaluate(model, x, generator).concat().cpu() for _ in range(3)]


def test_a_generator_may_be_an_argument():
    (found,) = run_ranks(evaluate_by_an_argument, 1)
    generator, x = np.random.default_rng(7), batch_of(0)
    for value in found:
        torch.testing.assert_close(value, Model(None).first(x) * generator.normal())


@pytest.mark.slow
@pytest.mark.parametrize("num_stages", [1, 2])
def test_all_that_draws_by_ranks_that_share_tensors(num_stages):
    compare([*QUICK, chosen, counted, by_torch], num_stages, "pjrt", num_sharing=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("functions", "num_stages", "backend"),
    [
        ([in_arrays, chosen, counted, ordered, by_torch, of_generators], 1, "torch_xla"),
        ([skipped, mixed, by_torch, sized, of_generators], 2, "pjrt"),
        pytest.param(FUNCTIONS, 2, "pjrt", marks=pytest.mark.long),
    ],
)
def test_all_that_draws(functions, num_stages, backend):
    compare(functions, num_stages, backend)
