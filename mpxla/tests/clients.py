"""Model, data and plain training of the client behaviours' tests."""

import contextlib
import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mpxla.errors import MpxlaError

BATCH = 4
REPLICAS = {"pipeline_parallel_degree": 1, "ddp": True}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.second = nn.Linear(6, 3)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def data(seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(BATCH, 5, generator=generator)
    return x, torch.randint(3, (BATCH,), generator=generator)


def raw_model():
    torch.manual_seed(3)
    return Net()


def start(**config):
    import mpxla as smp

    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, **config})
    return smp


def train_step(model, x, y):
    loss = F.cross_entropy(model(x), y)
    model.backward(loss)
    return loss


def host(values):
    return {name: value.detach().cpu() for name, value in values}


def gradients(model):
    return host((name, p.grad) for name, p in model.local_named_parameters())


def full_state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def plain_training(num_steps, optimizer_type=torch.optim.SGD, lr=0.5, seeds=None):
    """Losses and final parameters of the plain model."""
    model = raw_model()
    optimizer = optimizer_type(model.parameters(), lr=lr)
    losses = []
    for number in range(num_steps):
        optimizer.zero_grad()
        x, y = data(number if seeds is None else seeds[number])
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return losses, host(model.named_parameters())


def trained_plainly(model, batches, microbatches, look):
    """Trains a model with plain PyTorch.

    Returns:
        The losses of all microbatches, the state, and what `look` says of the model after steps.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, seen = [], []
    for one in batches:
        optimizer.zero_grad()
        for x, y in zip(*(v.chunk(microbatches) for v in one), strict=True):
            loss = F.cross_entropy(model(x), y)
            (loss / microbatches).backward()
            losses.append(loss.item())
        optimizer.step()
        seen.append(look(model))
    return torch.tensor(losses), host(model.state_dict().items()), seen


def trained(keys, raw, batches, look):
    """The same with a distributed model of `raw`, at which `look` looks."""
    import mpxla as smp

    smp.init(keys)
    model = smp.DistributedModel(raw)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    step = smp.step(train_step)
    losses, seen = [], []
    for one in batches:
        optimizer.zero_grad()
        losses += [loss.item() for loss in step(model, *one).outputs]
        optimizer.step()
        seen.append(look(raw))
    state = {name: value.cpu().clone() for name, value in model.state_dict().items()}
    smp.shutdown()
    return torch.tensor(losses), state, seen


def train_each(num_stages, models, batches, rate):
    """Trains models one after the other, which give their own loss, by one step function.

    Returns:
        For each the losses of all microbatches, and the state.
    """
    import mpxla as smp

    smp.init({"microbatches": 2, "pipeline_parallel_degree": num_stages})

    @smp.step
    def step(model, x, y):
        loss = model(x, y)
        model.backward(loss)
        return loss

    found = []
    for raw in models:
        model = smp.DistributedModel(raw)
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=rate))
        losses = []
        for one in batches:
            optimizer.zero_grad()
            losses += [float(loss) for loss in step(model, *one).outputs]
            optimizer.step()
        found.append((losses, host(model.state_dict().items())))
    return found


def train_each_plainly(models, batches, rate):
    """The same with plain PyTorch."""
    found = []
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        losses = []
        for one in batches:
            optimizer.zero_grad()
            for x, y in zip(*(t.chunk(2) for t in one), strict=True):
                loss = model(x, y)
                (loss / 2).backward()
                losses.append(float(loss.detach()))
            optimizer.step()
        found.append((losses, dict(model.state_dict())))
    return found


def train_cases(model_of, names, batches, optimizer_of):
    """Trains a model for each name on two stages, by the mean square of what it gives.

    Returns:
        By name the losses, and the final parameters of this rank.
    """
    import mpxla as smp

    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})

    @smp.step
    def step(model, x):
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    found = {}
    for name in names:
        model = smp.DistributedModel(model_of(name))
        optimizer = smp.DistributedOptimizer(optimizer_of(model))
        losses = []
        for x in batches:
            optimizer.zero_grad()
            losses.append(step(model, x).reduce_mean().item())
            optimizer.step()
        found[name] = losses, {n: p.detach().cpu() for n, p in model.local_named_parameters()}
    return found


def train_case_plainly(model, batches, optimizer_of):
    """The losses and final parameters of one with plain PyTorch."""
    optimizer = optimizer_of(model)
    losses = []
    for x in batches:
        optimizer.zero_grad()
        loss = sum(model(part).square().mean() for part in x.chunk(2)) / 2
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return losses, {n: p.detach() for n, p in model.named_parameters()}


def plain_gradients(*seeds):
    """Mean over batches of the plain model's gradients."""
    model = raw_model()
    for seed in seeds:
        x, y = data(seed)
        (F.cross_entropy(model(x), y) / len(seeds)).backward()
    return host((name, p.grad) for name, p in model.named_parameters())


def merged(parts):
    """What all ranks hold, together; every name is held somewhere."""
    together: dict[str, torch.Tensor] = {}
    for part in parts:
        together.update(part)
    return together


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=1e-6)


class Lines(logging.Handler):
    """Collects what mpxla logs."""

    def __init__(self):
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record):
        self.lines.append(f"{record.levelname}: {record.getMessage()}")


@contextlib.contextmanager
def logged():
    from mpxla.log import get_logger

    lines = Lines()
    get_logger().addHandler(lines)
    try:
        yield lines.lines
    finally:
        get_logger().removeHandler(lines)


def refused_in_a_step(reduce):
    """What every rank raises where a step function calls a collective; `reduce(loss)` does."""
    smp = start(pipeline_parallel_degree=1, ddp=True)
    model = smp.DistributedModel(nn.Linear(3, 1))

    @smp.step
    def step(model, x):
        loss = reduce(model(x).mean())
        model.backward(loss)
        return loss

    # The rank that is first tells the others, which may hear of it before they are as far.
    with pytest.raises(MpxlaError, match="return the value, and call the collective") as caught:
        smp.barrier()  # start values are everywhere
        step(model, torch.ones(4, 3))
    return str(caught.value)
