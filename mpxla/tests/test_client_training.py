"""What SMP scripts rely on: optimizers, schedulers, evaluation and accumulation.

The numbers are those of the list of client behaviours. Every function above a test is a small
training script as those programs write it; it runs on every rank and returns what it saw.
"""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mpxla.tests.clients import (
    REPLICAS,
    Net,
    close,
    data,
    full_state,
    gradients,
    host,
    merged,
    plain_training,
    raw_model,
    start,
    train_step,
)
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks


# 3, 4


def train_with_optimizer(is_built_before):
    smp = start()
    raw = raw_model()
    if is_built_before:
        optimizer = torch.optim.AdamW(raw.parameters(), lr=0.02)
        model = smp.DistributedModel(raw)
    else:
        model = smp.DistributedModel(raw)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    optimizer = smp.DistributedOptimizer(optimizer)
    step, losses = smp.step(train_step), []
    for number in range(3):
        optimizer.zero_grad()
        losses.append(step(model, *data(number)).reduce_mean().item())
        optimizer.step()
    held = [p for group in optimizer.param_groups for p in group["params"]]
    local = list(model.local_parameters())
    assert [id(p) for p in held] == [id(p) for p in local]
    assert len(local) == 2
    return losses, host(model.local_named_parameters())


@pytest.mark.parametrize("is_built_before", [True])
def test_03_optimizer_of_the_raw_model_before_wrapping(is_built_before):
    check_training(run_ranks(train_with_optimizer, 2, is_built_before))


@pytest.mark.parametrize("is_built_before", [False])
def test_04_optimizer_of_the_distributed_model_before_partitioning(is_built_before):
    check_training(run_ranks(train_with_optimizer, 2, is_built_before))


def check_training(results):
    losses, state = plain_training(3, torch.optim.AdamW, 0.02)
    for found, _ in results:
        close(found, losses)
    close(merged(part for _, part in results), state)


# 5, 6


def schedule_wrapped():
    from transformers import get_scheduler

    smp = start()
    raw = raw_model()
    model = smp.DistributedModel(raw)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    step = smp.step(train_step)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        rates = train_with_scheduler(model, optimizer, step, steps)
        linear = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=4)
        rates += train_with_scheduler(model, optimizer, step, linear)
    return isinstance(optimizer, torch.optim.Optimizer), rates, full_state(model)


def schedule_inner():
    smp = start()
    raw = raw_model()
    inner = torch.optim.SGD(raw.parameters(), lr=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler = torch.optim.lr_scheduler.StepLR(inner, step_size=1, gamma=0.5)
        model = smp.DistributedModel(raw)
        optimizer = smp.DistributedOptimizer(inner)
        rates = train_with_scheduler(model, optimizer, smp.step(train_step), scheduler)
    return rates, full_state(model)


def train_with_scheduler(model, optimizer, step, scheduler):
    rates = []
    for number in range(2):
        optimizer.zero_grad()
        step(model, *data(number))
        optimizer.step()
        scheduler.step()
        rates.append((optimizer.param_groups[0]["lr"], scheduler.get_last_lr()[0]))
    return rates


def plain_scheduled(schedulers):
    model = raw_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for make in schedulers:
        scheduler = make(optimizer)
        for number in range(2):
            optimizer.zero_grad()
            x, y = data(number)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            scheduler.step()
    return host(model.named_parameters())


def halving(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)


def test_05_schedulers_on_the_wrapped_optimizer():
    from transformers import get_scheduler

    def linear(optimizer):
        return get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=4)

    expected = plain_scheduled([halving, linear])
    for is_optimizer, rates, state in run_ranks(schedule_wrapped, 2):
        assert is_optimizer
        assert rates[:2] == [(0.25, 0.25), (0.125, 0.125)]
        # Schedulers start from the rate that the first one of an optimizer has found there.
        assert rates[2:] == [(0.375, 0.375), (0.25, 0.25)]
        close(state, expected)


def test_06_scheduler_on_the_inner_optimizer_before_wrapping():
    expected = plain_scheduled([halving])
    for rates, state in run_ranks(schedule_inner, 2):
        assert rates == [(0.25, 0.25), (0.125, 0.125)]
        close(state, expected)


# 11


class Dropping(Net):
    def forward(self, x):
        return super().forward(F.dropout(x, 0.5, self.training))


def evaluate_between_steps():
    smp = start()
    torch.manual_seed(3)
    raw = Dropping()
    model = smp.DistributedModel(raw)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(raw.parameters(), lr=0.5))
    train = smp.step(train_step)

    @smp.step
    def evaluate(model, x, y):
        logits = model(x)
        return F.cross_entropy(logits, y, reduction="sum"), logits.requires_grad

    found = []
    for number in range(2):
        model.train()
        optimizer.zero_grad()
        train(model, *data(number))
        before = gradients(model)
        model.eval()
        with torch.no_grad():
            loss, has_grad = evaluate(model, *data(9))
        assert has_grad is False or has_grad == [False, False]
        for name, gradient in gradients(model).items():
            assert torch.equal(gradient, before[name]), "evaluation left gradients alone"
        found.append((loss.reduce_sum().item(), full_state(model)))
        optimizer.step()
    return found


def test_11_evaluation_between_training_steps():
    x, y = data(9)
    results = run_ranks(evaluate_between_steps, 2)
    for found in results:
        for loss, state in found:
            model = Net()
            model.load_state_dict(state)
            with torch.no_grad():
                close(loss, F.cross_entropy(model(x), y, reduction="sum").item())
    first, second = results[0]
    assert first[0] != second[0]


# 12


def evaluate_on_rank_0():
    smp = start(**REPLICAS)
    raw = raw_model()
    model = smp.DistributedModel(raw)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(raw.parameters(), lr=0.5))
    train = smp.step(train_step)

    @smp.step
    def evaluate(model, x, y):
        return F.cross_entropy(model(x), y)

    losses = []
    for number in range(2):
        if smp.rank() == 0:
            with torch.no_grad():
                losses.append(evaluate(model, *data(9)).reduce_mean().item())
        optimizer.zero_grad()
        train(model, *data(2 * number + smp.dp_rank()))
        optimizer.step()
    return losses, full_state(model)


def test_12_evaluation_on_rank_0_only_with_one_partition():
    (losses, state), (none, same) = run_ranks(evaluate_on_rank_0, 2)
    model, x_y = raw_model(), data(9)
    expected = []
    for number in range(2):
        with torch.no_grad():
            expected.append(F.cross_entropy(model(x_y[0]), x_y[1]).item())
        model.zero_grad()
        for seed in (2 * number, 2 * number + 1):
            x, y = data(seed)
            (F.cross_entropy(model(x), y) / 2).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.5 * parameter.grad
    close(losses, expected)
    assert none == []
    close(state, host(model.named_parameters()))
    assert all(torch.equal(state[name], same[name]) for name in state)


# 15


class WithoutParametersAtTheEnd(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = Net()
        self.activation = nn.Tanh()

    def forward(self, x):
        return self.activation(self.body(x))


def train_with_empty_rank():
    smp = start(auto_partition=False, default_partition=0)
    torch.manual_seed(3)
    raw = WithoutParametersAtTheEnd()
    model = smp.DistributedModel(raw)
    smp.set_partition(raw.activation, 1)
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(raw.parameters(), lr=0.1))
    step, losses = smp.step(train_step), []
    for _ in range(3):
        optimizer.zero_grad(set_to_none=True)
        losses.append(step(model, *data()).reduce_mean().item())
        if len(list(model.local_parameters())) > 0:
            optimizer.step()
    optimizer.step()  # harmless where there is nothing to update
    return len(list(model.local_parameters())), losses


def test_15_a_rank_may_own_no_parameter():
    torch.manual_seed(3)
    model, losses = WithoutParametersAtTheEnd(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    x, y = data()
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
    (num_first, first), (num_second, second) = run_ranks(train_with_empty_rank, 2)
    assert (num_first, num_second) == (4, 0)
    close(first, losses)
    close(second, losses)


# 22


def accumulate(pipeline_parallel_degree, passes, num_steps):
    smp = start(pipeline_parallel_degree=pipeline_parallel_degree, ddp=True)
    raw = raw_model()
    model = smp.DistributedModel(raw, backward_passes_per_step=passes)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(raw.parameters(), lr=0.5))
    step = smp.step(train_step)
    first: dict[str, torch.Tensor] = {}
    for update in range(2):
        optimizer.zero_grad()
        for number in range(num_steps):
            step(model, *data(10 * update + num_steps * smp.dp_rank() + number))
        if update == 0:
            first = gradients(model)
        optimizer.step()
    return first, host(model.local_named_parameters())


def plainly_accumulated(num_replicas, num_steps):
    """Sum over the steps of a replica, mean over replicas."""
    model, first = raw_model(), None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for update in range(2):
        optimizer.zero_grad()
        for number in range(num_replicas * num_steps):
            x, y = data(10 * update + number)
            (F.cross_entropy(model(x), y) / num_replicas).backward()
        if first is None:
            first = {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
    return first, host(model.named_parameters())


@pytest.mark.parametrize(
    ("degree", "passes"),
    [(2, 2), (1, 2), *(pytest.param(n, 1, marks=pytest.mark.slow) for n in (2, 1))],
)
def test_22_gradients_accumulate_over_steps(degree, passes):
    results = run_ranks(accumulate, 2, degree, passes, 2)
    expected, state = plainly_accumulated(2 // degree, 2)
    if degree == 2:
        close(merged(first for first, _ in results), expected)
        close(merged(last for _, last in results), state)
    else:
        for first, last in results:
            close(first, expected)
            close(last, state)
