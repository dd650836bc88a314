"""A float that changes with every call compiles once more; what cannot be an input is warned of."""

import collections
import re

import pytest
import torch
from torch import nn

import mpxla as smp
from mpxla.tests.clients import close, host, logged, merged
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks

WEIGHTS = [0.0, 0.25, 0.5, 0.9]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def raw_model():
    torch.manual_seed(0)
    return Net()


def inputs():
    return torch.linspace(-1, 1, 16).reshape(4, 4)


def loss_of(y, weight, scales):
    rate = scales["rate"]
    factor = 2.0 if rate > 0.5 else 1.0  # a branch: this one stays a constant
    return (y.square() * (1 - weight) + weight**2 * y.abs()).mean() * factor * rate


def train_step(model, x, weight, scales):
    loss = loss_of(model(x), weight, scales)
    model.backward(loss)
    return loss, weight


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.5)


def anneal(stages):
    smp.init({"pipeline_parallel_degree": stages, "microbatches": 2})
    raw = raw_model()
    model = smp.DistributedModel(raw)
    optimizer = smp.DistributedOptimizer(optimizer_of(raw))
    step = smp.step(train_step)
    losses, numbers = [], []
    with logged() as lines:
        for weight in WEIGHTS:
            optimizer.zero_grad()
            own = weight if smp.pp_rank() == 0 else 77.0  # only pp_rank 0's inputs count
            loss, number = step(model, inputs(), own, {"rate": 0.25})
            losses.append(loss.reduce_mean().item())
            numbers.append(number)
            optimizer.step()
        for rate in (0.75, 0.3):
            loss, _ = step(model, inputs(), 0.1, {"rate": rate})
            losses.append(loss.reduce_mean().item())
    return losses, numbers, host(model.local_named_parameters()), lines


def train_plainly():
    model = raw_model()
    optimizer = optimizer_of(model)
    losses = []
    for weight in WEIGHTS:
        optimizer.zero_grad()
        loss = loss_of(model(inputs()), weight, {"rate": 0.25})
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    more = [loss_of(model(inputs()), 0.1, {"rate": rate}).item() for rate in (0.75, 0.3)]
    return losses + more, host(model.named_parameters())


@pytest.mark.parametrize("stages", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_an_annealed_weight_is_an_input(stages):
    expected, parameters = train_plainly()
    results = run_ranks(anneal, stages, stages)
    for losses, numbers, _, lines in results:
        close(torch.tensor(losses), torch.tensor(expected))
        assert numbers == [[weight] * 2 for weight in WEIGHTS]
        compiled = [line for line in lines if "compiled step" in line]
        assert len(compiled) == 4, compiled
        assert "argument [0][2] changed from 0.0 to a float that is an input" in compiled[1]
        assert "argument [0][3]['rate'] changed from 0.25 to" in compiled[2]
    lines = results[0][3]
    assert any("argument [0][3]['rate'] of step function train_step stays a constant" in line
               for line in lines)  # fmt: skip
    (warning,) = (line for line in lines if line.startswith("WARNING"))
    assert "because argument [0][3]['rate'] changed, for the second time (now 0.3)" in warning
    close(merged([found for _, _, found, _ in results]), parameters)


def scale_by_recent(step_of, model):
    """Outputs that are scaled by numbers of a full deque, to which the script appends."""
    recent = collections.deque([1.0, 2.0], maxlen=2)
    step = step_of(lambda model, x: model(x) * sum(recent) / recent[0])
    found = []
    for number in (2.0, 4.0, 8.0, 0.5):
        found.append(step(model, inputs()))
        recent.append(number)
    return found


class Settings:
    rate = 1.0


class Inherited(Settings):
    pass


def scale_by_a_class(step_of, model):
    """The same, by one number of a class that has two names."""
    step = step_of(lambda model, x: model(x) * Inherited.rate + Settings.rate)
    found = []
    for Settings.rate in (1.0, 0.5, 0.7, 0.2):
        found.append(step(model, inputs()))
    Settings.rate = 1.0
    return found


def scale_in_steps(scale):
    smp.init({"microbatches": 2})
    outputs = scale(smp.step, smp.DistributedModel(raw_model()))
    assert "rate" not in vars(Inherited)
    return [output.concat().cpu() for output in outputs]


@pytest.mark.parametrize("scale", [scale_by_recent, scale_by_a_class])
def test_numbers_that_scripts_change_in_places_of_several_kinds(scale):
    (found,) = run_ranks(scale_in_steps, 1, scale)
    for value, expected in zip(found, scale(lambda f: f, raw_model()), strict=True):
        torch.testing.assert_close(value, expected.detach())


def loss_by_mask(model, x, mask):
    is_padded = mask.eq(0)
    y = model(x)
    if is_padded.any():
        y = y.masked_fill(is_padded[:, None], 0.5)
    return (y.square() * x.shape[1]).mean() / int(mask.max())


MASKS = [[1, 1, 1, 1], [1, 0, 0, 1], [1, 1, 1, 1], [0, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 1]]


def branch_on_masks():
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    raw = raw_model()
    model = smp.DistributedModel(raw)
    optimizer = smp.DistributedOptimizer(optimizer_of(raw))

    @smp.step
    def train(model, x, mask):
        loss = loss_by_mask(model, x, mask)
        model.backward(loss)
        return loss

    losses = []
    with logged() as lines:
        for mask in MASKS:
            optimizer.zero_grad()
            own = mask if smp.pp_rank() == 0 else [0, 0, 0, 0]  # only pp_rank 0's inputs count
            losses.append(train(model, inputs(), torch.tensor(own)).reduce_mean().item())
            optimizer.step()
    return losses, host(model.local_named_parameters()), lines


def test_branches_on_inputs_are_taken_for_each_batch():
    plain = raw_model()
    optimizer = optimizer_of(plain)
    expected = []
    for mask in MASKS:
        optimizer.zero_grad()
        halves = zip(inputs().split(2), torch.tensor(mask).split(2), strict=True)
        loss = sum(loss_by_mask(plain, x, part) for x, part in halves) / 2
        loss.backward()
        expected.append(loss.item())
        optimizer.step()
    results = run_ranks(branch_on_masks, 2)
    for losses, _, lines in results:
        close(torch.tensor(losses), torch.tensor(expected))
        where = r"at .*test_changing_numbers\.py:\d+: if is_padded\.any\(\):"
        change = rf"what is read of the inputs {where} changed from False to True"
        compiled = [line for line in lines if "compiled step" in line]
        assert len(compiled) == 2, "the mixed batch goes both ways"
    assert re.search(rf"\({change}\)", [x for x in results[0][2] if "compiled step" in x][1])
    close(merged([found for _, found, _ in results]), host(plain.named_parameters()))


class Options:
    """Another object in every call, that no other equals."""


def scale(model, x, by, _):
    return model(x) * by


def change_much():
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    model = smp.DistributedModel(raw_model())
    model._engine.calls.plans._limit = 2
    step = smp.step(scale)
    with logged() as lines:
        values = [step(model, inputs(), by, Options()).concat().mean().item() for by in (1, 2, 1)]
    kept = len(model._engine.calls.plans), len(model._engine.calls._objects.numbers())
    return values, kept, lines


def test_plans_are_bounded_and_changing_objects_warned_of():
    with torch.no_grad():
        mean = raw_model()(inputs()).mean().item()
    results = run_ranks(change_much, 2)
    for values, count, lines in results:
        assert values == pytest.approx([mean, 2 * mean, mean], abs=1e-6)
        # The first rank knows the objects of its calls: the model, and one for each plan.
        assert count in ((2, 3), (2, 0))
        assert sum("dropped a program of step function scale: 2 are kept" in line
                   for line in lines) == 1  # fmt: skip
    warnings = [line for line in results[0][2] if "for the second time" in line]
    assert any("argument [0][3] changed, for the second time (now Options)" in w for w in warnings)


def cycle():
    """Among more programs than are kept, those in use stay, and the ranks agree."""
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    model = smp.DistributedModel(raw_model())
    model._engine.calls.plans._limit = 2
    step = smp.step(lambda model, x, by: model(x) * by)
    found = []
    for by in (1, 2, 1, 3, 1, 2, 3):
        with logged() as lines:
            found.append(step(model, inputs(), by).concat().mean().item())
        found.append(any("compiled step" in line for line in lines))
    return found


def test_programs_in_use_are_kept():
    with torch.no_grad():
        mean = raw_model()(inputs()).mean().item()
    for found in run_ranks(cycle, 2):
        expected = [mean * by for by in (1, 2, 1, 3, 1, 2, 3)]
        assert found[::2] == pytest.approx(expected, abs=1e-6)
        assert found[1::2] == [True, True, False, True, False, True, True]
