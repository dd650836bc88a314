"""`smp.partition` holds under `torch.autocast`, and the numbers are those of plain PyTorch."""

import contextlib

import pytest
import torch
from torch import nn

import mpxla as smp
from mpxla.errors import PartitionError
from mpxla.tests.clients import close, gradients, merged
from mpxla.tests.ranks.run import run_ranks
from mpxla.tests.wrong_uses import check_texts, refused

pytestmark = pytest.mark.ranks


class Half(nn.Module):
    def __init__(self, is_inside):
        super().__init__()
        self.is_inside = is_inside
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        with torch.autocast("xla", enabled=False) if self.is_inside else torch.enable_grad():
            return self.second(torch.tanh(self.first(x)))


class Net(nn.Module):
    def __init__(self, is_inside, place):
        super().__init__()
        with place(0):
            self.one = Half(is_inside)
        with place(1):
            self.two = Half(is_inside)

    def forward(self, x):
        return self.two(self.one(x))


def made(is_inside, place):
    torch.manual_seed(1)
    return Net(is_inside, place)


def inputs():
    return torch.linspace(-1, 1, 16).reshape(4, 4)


def loss_of(model, x, around):
    with around():
        y = model(x)
    return y.float().square().mean()


def without_effect():
    return torch.autocast("xla", enabled=False)


def reduced():
    return torch.autocast("xla", dtype=torch.bfloat16)


def train(around, is_inside):
    import mpxla as smp

    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, "auto_partition": False,
              "default_partition": 0})  # fmt: skip
    model = smp.DistributedModel(made(is_inside, smp.partition))

    @smp.step
    def step(model, x):
        loss = loss_of(model, x, around)
        model.backward(loss)
        return loss

    loss = step(model, inputs()).reduce_mean().item()
    names = sorted(name for name, _ in model.local_named_parameters())
    found = loss, names, gradients(model), model.partition_report()
    smp.shutdown()
    return found


def train_all():
    return [train(without_effect, False), train(torch.enable_grad, True), train(reduced, False)]


@pytest.mark.slow
def test_partition_holds_under_autocast():
    plain = made(False, lambda _: contextlib.nullcontext())
    loss = loss_of(plain, inputs(), torch.enable_grad)
    loss.backward()
    expected = {name: p.grad for name, p in plain.named_parameters()}
    ranks = run_ranks(train_all, 2)
    for place, results in enumerate(zip(*ranks, strict=True)):
        for rank, (_, names, _, report) in enumerate(results):
            half = ("one", "two")[rank]
            assert names == sorted(n for n in expected if n.startswith(half)), (place, rank)
            assert "one" in report and "two" in report, report
        found = merged([result[2] for result in results])
        if place < 2:
            close(found, expected)
            close(torch.tensor(results[0][0]), loss.detach())
        else:
            torch.testing.assert_close(found, expected, rtol=0.05, atol=0.01)


class Bypassed(nn.Module):
    def __init__(self, place):
        super().__init__()
        self.body = nn.Linear(4, 4)
        with place(1):
            self.head = nn.Linear(4, 4)

    def forward(self, x):
        return nn.functional.linear(self.body(x), self.head.weight)


def place_in_vain():
    import mpxla as smp

    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, "auto_partition": False,
              "default_partition": 0})  # fmt: skip
    model = smp.DistributedModel(Bypassed(smp.partition))
    return refused(lambda: smp.step(lambda model, x: model(x))(model, inputs()))


def test_a_placement_in_vain_is_refused():
    text = r"The module 'model\.head' is placed on partition 1, but the step never calls it"
    check_texts(run_ranks(place_in_vain, 2), PartitionError, text)


def cut_under_autocast():
    """Trains under autocast, evaluates without; returns both losses and those of the plain net."""
    import mpxla as smp

    smp.init({"pipeline_parallel_degree": 2})
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    ways = reduced, contextlib.nullcontext
    with torch.no_grad():
        expected = [loss_of(plain, inputs(), around).item() for around in ways]
    model = smp.DistributedModel(plain)

    def step(model, x, around):
        loss = loss_of(model, x, around)
        if around is reduced:
            model.backward(loss)
        return loss

    found = [smp.step(step)(model, inputs(), around).reduce_mean().item() for around in ways]
    return found, expected


@pytest.mark.slow
def test_a_step_without_autocast_runs_where_one_with_it_was_cut():
    for found, expected in run_ranks(cut_under_autocast, 2):
        assert found == pytest.approx(expected, rel=0.02)


class Gated(nn.Module):
    """Gates without gradients, and a gradient within; both also with regions inside."""

    def __init__(self):
        super().__init__()
        self.first, self.gate, self.again, self.last = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        x = self.first(x)
        with torch.no_grad():
            gate = self.gate(x).sigmoid()
            with torch.autocast("cpu", enabled=False):
                gate = gate + self.gate(x.float()).sigmoid()
            with torch.enable_grad():
                again = self.again(x)
        with torch.autocast("cpu", enabled=False), torch.no_grad():
            gate = gate * x.float().sigmoid()
        return (self.last(x) * gate * again).float().sum()


def gradients_under_autocast(make):
    torch.manual_seed(3)
    model, x = make(Gated()), torch.randn(4, 8)

    def run(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(x)
        model.backward(loss) if isinstance(model, smp.DistributedModel) else loss.backward()
        return loss

    (smp.step(run) if isinstance(model, smp.DistributedModel) else run)(x)
    return [None if p.grad is None else p.grad.tolist() for p in model.parameters()]


def differentiate_gated():
    smp.init({})
    return gradients_under_autocast(smp.DistributedModel)


def test_no_grad_within_a_region_stays():
    (found,) = run_ranks(differentiate_gated, 1)
    expected = gradients_under_autocast(lambda model: model)
    assert [g is None for g in found] == [g is None for g in expected]
    for gradient, other in zip(found, expected, strict=True):
        if other is not None:
            torch.testing.assert_close(
                torch.tensor(gradient), torch.tensor(other), rtol=0.02, atol=0.02
            )
