"""A teacher that no distributed model holds: its changes between steps are in the next one.

Numbers of its tensors reach the programs anew; modes, hooks, parts and what Python has read of
numbers are captured again.
"""

import copy
import re

import pytest
import torch
from torch import nn

import mpxla as smp
from mpxla.tests.clients import logged
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks


class Teacher(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(4, 4), nn.Dropout(1.0), nn.Linear(4, 4)
        self.register_buffer("shift", torch.ones(4))
        self.register_buffer("power", torch.tensor(1))
        self.array = torch.ones(4).numpy()
        self.table = torch.from_numpy(self.array)
        self.factor = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        y = self.drop(self.first(x)) * self.table * self.factor.item() ** int(self.power)
        return self.last(y) + self.shift


class Holder:
    """An object with a list of modules."""

    def __init__(self, teacher):
        self.teachers = [teacher]


def double(module, args, output):
    return 2 * output


def in_place(holder):
    with torch.no_grad():
        for p in holder.teachers[0].first.parameters():
            p.mul_(1.5)


def by_data(holder):
    for p in holder.teachers[0].last.parameters():
        p.data.lerp_(torch.ones(()), 0.3)


def other_data(holder):
    holder.teachers[0].last.weight.data = torch.full((4, 4), 0.7)


def loaded(holder):
    teacher = holder.teachers[0]
    teacher.load_state_dict({name: value + 1 for name, value in teacher.state_dict().items()})


def by_numpy(holder):
    holder.teachers[0].array[1] = -3.0


def read_by_python(holder):
    holder.teachers[0].power.fill_(3)


def read_parameter(holder):
    holder.teachers[0].factor.data.fill_(1.5)


def other_buffer(holder):
    holder.teachers[0].shift = torch.full((4,), 5.0)


def other_parameter(holder):
    holder.teachers[0].first.bias = nn.Parameter(torch.full((4,), 2.0), requires_grad=False)


def other_mode(holder):
    holder.teachers[0].train()


def hooked(holder):
    holder.teachers[0].last.register_forward_hook(double)


def other_part(holder):
    holder.teachers[0].drop = nn.Sigmoid()


def other_teacher(holder):
    holder.teachers[0] = copy.deepcopy(holder.teachers[0]).requires_grad_(False)
    holder.teachers[0].first = nn.Identity()


NUMBERS = [in_place, by_data, other_data, by_numpy]
CAPTURED = {
    loaded: "the tensor read at .* changed from",  # among others
    read_by_python: r"the tensor read at .* changed from \[2\] to \[3\]",
    read_parameter: r"the tensor read at .* changed from \[3.0\] to \[1.5\]",
    other_buffer: r"the tensor Teacher\['shift'\] was replaced",
    other_parameter: r"the tensor Linear\['bias'\] was replaced",
    other_mode: r"\['training'\] changed from False to True",
    hooked: "what the module Linear has changed from",
    other_part: r"the module Teacher\['drop'\] was replaced",
    other_teacher: r"the module \S*teachers\[0\] was replaced",
}
CHANGES = [*NUMBERS, *CAPTURED]
X = torch.linspace(-1, 1, 16).reshape(4, 4)


def made():
    torch.manual_seed(1)
    return nn.Linear(4, 4), Holder(Teacher().eval().requires_grad_(False))


def results(call, holder):
    """What `call()` gives before and after every change."""
    yield call()
    for change in CHANGES:
        change(holder)
        yield call()


def run(stages):
    smp.init({"pipeline_parallel_degree": stages, "microbatches": 2})
    raw, holder = made()
    model = smp.DistributedModel(nn.Sequential(raw, nn.Identity()))

    @smp.step
    def evaluate(model, x):
        return model(x) + holder.teachers[0](x)

    reasons = []

    def call():
        with logged() as lines:
            found = evaluate(model, X).concat().cpu()
        reasons.append([line for line in lines if "compiled step function" in line])
        return found

    return list(results(call, holder)), reasons[1:]


@pytest.mark.parametrize("stages", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_changes_are_in_the_next_step(stages):
    raw, holder = made()
    expected = list(results(lambda: (raw(X) + holder.teachers[0](X)).detach(), holder))
    ranks = run_ranks(run, stages, stages)
    for found, _ in ranks:
        for change, value, wanted in zip(["start", *CHANGES], found, expected, strict=True):
            torch.testing.assert_close(value, wanted, msg=str(change))
    for change, lines in zip(CHANGES, ranks[0][1], strict=True):
        assert len(lines) == (change in CAPTURED), (change, lines)
        assert change not in CAPTURED or re.search(CAPTURED[change], lines[0]), lines


def run_on_device():
    smp.init({"microbatches": 2})
    raw, holder = made()
    model = smp.DistributedModel(raw)
    teacher = holder.teachers[0].first.to(next(model.parameters()).device)

    @smp.step
    def evaluate(model, x):
        return model(x) + teacher(x)

    found = [evaluate(model, X).concat().cpu()]
    in_place(holder)
    return [*found, evaluate(model, X).concat().cpu()]


def test_a_teacher_may_be_on_the_device():
    (found,) = run_ranks(run_on_device, 1)
    raw, holder = made()
    for value in found:
        torch.testing.assert_close(value, raw(X) + holder.teachers[0].first(X))
        in_place(holder)
