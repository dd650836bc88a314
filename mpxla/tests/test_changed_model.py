"""What a captured step would ignore is noticed: the model's own changes between and in steps."""

import re
from argparse import Namespace

import pytest
import torch
from torch import nn

import mpxla as smp
from mpxla.tests.clients import logged
from mpxla.tests.ranks.run import run_ranks
from mpxla.tests.wrong_uses import refused

pytestmark = pytest.mark.ranks


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.alpha, self.sizes, self.act = 1.0, [1, 2], torch.tanh
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.mixed(x) * self.alpha * sum(self.sizes) + 0 * self.calls

    def mixed(self, x):
        return self.act(self.layer(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Scaled(), Scaled()

    def forward(self, x):
        return self.second(self.first(x))


def inputs():
    return torch.linspace(-1, 1, 16).reshape(4, 4)


def raw_model():
    torch.manual_seed(0)
    return Net()


@smp.step
def evaluate(model, x):
    return model(x)


def double(module, args, output):
    return 2 * output


def negate(module, args):
    return (-args[0],)


def change_act(model):
    model.first.act = torch.sigmoid


def change_alpha(model):
    model.second.alpha = 0.5


def change_list(model):
    model.second.sizes.append(3)


def add_hook(model):
    model.first.register_forward_hook(double)


def add_it_again(model):
    model.first.register_forward_hook(double)


def add_early_hook(model):
    model.second.layer.register_forward_pre_hook(negate)


def exchange_forward(model):
    layer = model.second.layer
    layer.forward = lambda x: nn.functional.linear(x, layer.weight)


def exchange_method(model):
    before = model.second.mixed
    model.second.mixed = lambda x: 0.7 * before(x)


def exchange_it_again(model):
    before = model.second.mixed
    model.second.mixed = lambda x: before(x).sin()


def give_it_back(model):
    del model.second.mixed


class Halved(Scaled):
    def forward(self, x):
        return super().forward(x) / 2


def exchange_class(model):
    model.first.__class__ = Halved


def remove_module(model):
    model.second.layer = nn.Identity()


def swap_modules(model):
    model.first, model.second = model.second, model.first


CHANGES = {
    change_act: r"model\.first\.act changed from",
    change_alpha: r"model\.second\.alpha changed from 1\.0 to 0\.5",
    change_list: r"model\.second\.sizes changed from \[1, 2\] to \[1, 2, 3\]",
    add_hook: r"hooks \(or forward itself\) of model\.first changed",
    add_it_again: r"hooks \(or forward itself\) of model\.first changed",
    add_early_hook: r"hooks \(or forward itself\) of model\.second\.layer changed",
    exchange_forward: r"hooks \(or forward itself\) of model\.second\.layer changed",
    exchange_method: r"model\.second\.mixed changed from",
    exchange_it_again: r"model\.second\.mixed changed from",
    give_it_back: None,  # as it was captured first
    exchange_class: r"the class of model\.first changed",
    swap_modules: r"a module of the model was replaced",
    remove_module: r"the module model\.second\.layer was replaced",
}


QUICK = (change_alpha, add_hook, exchange_method, exchange_class, remove_module)


def apply_changes(stages, changes):
    smp.init({"pipeline_parallel_degree": stages, "microbatches": 2})
    model = smp.DistributedModel(raw_model())
    outputs, reasons = [evaluate(model, inputs()).concat().cpu()], []
    for change in changes:
        change(model.module)
        with logged() as lines:
            outputs.append(evaluate(model, inputs()).concat().cpu())
            evaluate(model, inputs())
        reasons.append([line for line in lines if "compiled step function" in line])
    return outputs, reasons


@pytest.mark.parametrize(
    ("stages", "changes"),
    [
        (2, QUICK),
        *(pytest.param(stages, tuple(CHANGES), marks=pytest.mark.slow) for stages in (1, 2)),
    ],
    ids=lambda given: given if isinstance(given, int) else "all" if len(given) > 3 else "some",
)
def test_a_changed_model_is_captured_again(stages, changes):
    plain = raw_model()
    expected = [plain(inputs())]
    for change in changes:
        change(plain)
        expected.append(plain(inputs()))
    for outputs, reasons in run_ranks(apply_changes, stages, stages, changes):
        for found, value in zip(outputs, expected, strict=True):
            torch.testing.assert_close(found, value.detach(), rtol=1e-5, atol=1e-6)
        for pattern, lines in zip(map(CHANGES.get, changes), reasons, strict=True):
            assert len(lines) == (pattern is not None)  # the second call does not compile
            assert not lines or re.search(pattern, lines[0]), lines


def there_and_back():
    smp.init({"microbatches": 2})
    model = smp.DistributedModel(raw_model())
    evaluate(model, inputs())
    with logged() as lines:
        for _ in range(3):
            handle = model.module.first.register_forward_hook(lambda m, a, out: 2 * out)
            evaluate(model, inputs())
            handle.remove()
            evaluate(model, inputs())
    return [line for line in lines if "compiled" in line], len(model._engine.calls.plans)


def test_a_change_that_comes_back_is_known():
    ((lines, count),) = run_ranks(there_and_back, 1)
    assert len(lines) == 1
    assert count == 2


def change_one_rank():
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    model = smp.DistributedModel(raw_model())
    evaluate(model, inputs())
    if smp.rank() == 1:
        model.module.first.alpha = 3.0
    return refused(lambda: evaluate(model, inputs()))


def test_a_change_on_one_rank_is_an_error():
    first, second = run_ranks(change_one_rank, 2)
    assert second[0] == "RankMismatch"
    assert "on rank 1, model.first.alpha changed from 1.0 to 3.0 since the step" in second[1]
    assert first[0] in ("PeerFailure", "nothing")


def count_calls():
    smp.init({"microbatches": 2})
    model = smp.DistributedModel(raw_model())
    with logged() as lines:
        for _ in range(3):
            evaluate(model, inputs())
    return lines, model.module.first.calls, model.module.second.calls


def test_counters_of_forward_count_every_microbatch():
    ((lines, first, second),) = run_ranks(count_calls, 1)
    assert first == second == 6
    assert not [line for line in lines if line.startswith("WARNING")]
    assert sum("compiled" in line for line in lines) == 1


# Values that a step function reads outside of its arguments and of the model.

factor = 2.0
criterion = nn.SmoothL1Loss(beta=1.0)
settings = Namespace(scale=1.0, unread=0)


def helper(y):
    return y * factor


def read_outside(model, x, options):
    loss = criterion(helper(model(x)), x) * settings.scale * options.weight
    return loss * COUNTED.rate


class Counted:
    rate, unread = 1.0, 0

    def __init__(self):
        self.rate = 3.0


COUNTED = Counted()


def closure():
    power = 1

    def function(model, x):
        return model(x) ** power

    def change(value):
        nonlocal power
        power = value

    return function, change


def change_outside(place, options):
    """One change a call; the last changes nothing that is read."""
    global factor
    if place == 1:
        factor = 3.0
    elif place == 2:
        criterion.beta = 0.1
    elif place == 3:
        settings.scale = 0.5
    elif place == 4:
        options.weight = 4.0
    elif place == 5:
        COUNTED.rate = 7.0
    elif place == 6:
        settings.unread = options.unread = COUNTED.unread = 1


def read_all(call, call_power):
    global factor
    factor, criterion.beta, settings.scale, COUNTED.rate = 2.0, 1.0, 1.0, 3.0
    options = Namespace(weight=1.0, unread=0)
    found = []
    for place in range(7):
        change_outside(place, options)
        found.append(call(read_outside, options))
    function, change = closure()
    for value in (1, 2):
        change(value)
        found.append(call_power(function))
    return found


def read_captured():
    smp.init({"microbatches": 1})
    model = smp.DistributedModel(raw_model())

    def call(function, *more):
        with logged() as lines:
            value = smp.step(function)(model, inputs(), *more).outputs[0].cpu()
        return value, [line for line in lines if "compiled" in line]

    return read_all(call, call)


@pytest.mark.slow
def test_values_outside_of_the_arguments_are_noticed():
    plain = raw_model()
    expected = read_all(lambda f, o: f(plain, inputs(), o), lambda f: f(plain, inputs()))
    (found,) = run_ranks(read_captured, 1)
    for (value, _), wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(value, wanted.detach(), rtol=1e-5, atol=1e-6)
    reasons = [lines[0] if lines else "" for _, lines in found]
    patterns = [
        r"\(first call\)",
        r"\(factor changed from 2\.0 to 3\.0\)",
        r"\(criterion\.beta changed from 1\.0 to 0\.1\)",
        r"\(settings\.scale changed from 1\.0 to 0\.5\)",
        r"\(argument \[0\]\[2\]\.weight changed from 1\.0 to 4\.0\)",
        r"\(COUNTED\.rate changed from 3\.0 to 7\.0\)",
        r"^$",
        r"\(first call\)",
        r"\(power changed from 1 to 2\)",
    ]
    for pattern, reason in zip(patterns, reasons, strict=True):
        assert re.search(pattern, reason), (pattern, reason)
