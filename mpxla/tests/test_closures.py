"""`optimizer.step(closure)` has plain PyTorch's results, also where it is called several times."""

import pytest
import torch
from torch import nn, optim

import mpxla as smp
from mpxla.tests.ranks.run import run_ranks
from mpxla.tests.test_training_habits import check_against_plain, train_in_all_ways
from mpxla.tests.wrong_uses import REPLICAS, batch, check_texts, made, refused, train

pytestmark = pytest.mark.ranks


class SharpnessAware(optim.Optimizer):
    """Takes the gradient where the loss is higher."""

    def __init__(self, params, lr, distance):
        super().__init__(params, {"lr": lr, "distance": distance})

    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            loss = closure()
        moved = []
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                moved.append((p, p.grad.sign() * group["distance"], group["lr"]))
                p.add_(moved[-1][1])
        with torch.enable_grad():
            closure()
        for p, way, lr in moved:
            p.sub_(way + lr * p.grad)
        return loss


def training(run, optimizer, numbers):
    """Some steps; the losses are part of the result."""
    losses = []
    for number in numbers:

        def closure(number=number):
            optimizer.zero_grad()
            return run.step(number)

        losses.append(torch.tensor(float(optimizer.step(closure))))
    plain = run.result
    run.result = lambda: plain() | {f"loss {i}": loss for i, loss in enumerate(losses)}


def hooked(optimizer):
    """Has a hook before the closure, which clears gradients that it leaves, and one at the end."""

    def before(optimizer, *_):
        for group in optimizer.param_groups:
            group["lr"] *= 0.8
            for p in (p for p in group["params"] if p.grad is not None):
                p.grad.mul_(3)

    def after(optimizer, *_):
        for group in optimizer.param_groups:
            group["lr"] *= 0.9

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    return optimizer


def adam(run):
    optimizer = hooked(run.wrapped(optim.Adam(run.model.parameters(), 0.01, eps=1e-3)))
    training(run, optimizer, range(3))


def lbfgs(run):
    """Its state is loaded into another one midway."""
    old = hooked(run.wrapped(optim.LBFGS(run.model.parameters(), 0.5, max_iter=4)))
    training(run, old, [0, 0])
    new = run.wrapped(optim.LBFGS(run.model.parameters(), 0.5, max_iter=4))
    new.load_state_dict(old.state_dict())
    training(run, new, [1])


def lbfgs_with_a_line_search(run):
    settings = {"max_iter": 3, "line_search_fn": "strong_wolfe"}
    optimizer = run.wrapped(optim.LBFGS(run.model.parameters(), **settings))
    schedule = optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for number in range(2):
        training(run, optimizer, [number])
        schedule.step()


def sharpness_aware(run):
    training(run, run.wrapped(SharpnessAware(run.model.parameters(), 0.1, 0.05)), range(3))


HABITS = {h.__name__: h for h in (adam, lbfgs, lbfgs_with_a_line_search, sharpness_aware)}


def train_with_closures(config, names):
    return train_in_all_ways(config, names, HABITS)


@pytest.mark.parametrize(
    ("world", "names"),
    [
        ("stages", ["lbfgs"]),
        *(pytest.param(w, list(HABITS), marks=pytest.mark.slow) for w in ("stages", "replicas")),
    ],
)
def test_closures(world, names):
    check_against_plain(train_with_closures, world, names, HABITS)


class Averaging(nn.Module):
    """Its forward keeps an average of a layer's parameters in others."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(6)
        self.own, self.average, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.average.requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            for kept, new in zip(self.average.parameters(), self.own.parameters(), strict=True):
                kept.lerp_(new, 0.1)
        return self.last(torch.tanh(self.own(x)) + self.average(x))


def optimizer_of(kind, model):
    if kind == "LBFGS":
        return optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
    return SharpnessAware(model.parameters(), 0.1, 0.01)


def averaged(kind, stages):
    """States of the plain and of the distributed model after steps that write to parameters."""
    smp.init({"pipeline_parallel_degree": stages, "microbatches": 2})
    model, plain = smp.DistributedModel(Averaging().double()), Averaging().double()
    optimizer = smp.DistributedOptimizer(optimizer_of(kind, model))
    plain_optimizer = optimizer_of(kind, plain)

    @smp.step
    def step(model, x):
        loss = (model(x) - 1).square().mean()
        model.backward(loss)
        return loss

    for number in range(3):
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(number)).double()

        def closure(x=x):
            optimizer.zero_grad()
            return step(model, x).reduce_mean()

        def plain_closure(x=x):
            plain_optimizer.zero_grad()
            total = torch.zeros((), dtype=x.dtype)
            for part in x.chunk(2):
                loss = (plain(part) - 1).square().mean() / 2
                loss.backward()
                total += loss.detach()
            return total

        optimizer.step(closure)
        plain_optimizer.step(plain_closure)
    return plain.state_dict(), model.state_dict()


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("kind", ["LBFGS", "SharpnessAware"])
def test_what_the_step_writes_to_parameters_stays(kind, stages):
    for expected, actual in run_ranks(averaged, stages, kind, stages):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def resumed(path):
    """LBFGS that goes on, and new ones with its state, from memory and from a checkpoint."""
    results = []
    for source in ("none", "memory", "file"):
        smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
        model = smp.DistributedModel(Averaging().double())
        optimizer = smp.DistributedOptimizer(optimizer_of("LBFGS", model))
        step = smp.step(lambda model, x: backward(model, (model(x) - 1).square().mean()))

        def train(number, model=model, optimizer=optimizer, step=step):
            x = torch.randn(4, 4, generator=torch.Generator().manual_seed(number)).double()

            def closure():
                optimizer.zero_grad()
                return step(model, x).reduce_mean()

            optimizer.step(closure)

        if source == "none":
            train(0)
            kept = model.state_dict(), optimizer.state_dict()
            smp.save_checkpoint(path, "one", model=model, optimizer=optimizer)
        elif source == "memory":
            model.load_state_dict(kept[0])
            optimizer.load_state_dict(kept[1])
        else:
            smp.resume_from_checkpoint(path, "one")
        train(1)
        train(2)
        results.append((model.state_dict(), optimizer.state_dict()["state"][0]["n_iter"]))
        smp.shutdown()
    return results


def backward(model, loss):
    model.backward(loss)
    return loss


def test_lbfgs_goes_on_where_it_was(tmp_path):
    for (state, number), *others in run_ranks(resumed, 2, str(tmp_path)):
        for other, other_number in others:
            assert other_number == number
            torch.testing.assert_close(other, state)


def use_wrongly():
    model = made({**REPLICAS, "fp16": True})
    found = []
    for kind, settings in ((SharpnessAware, (0.1, 0.1)), (optim.LBFGS, ())):
        optimizer = smp.DistributedOptimizer(kind(model.parameters(), *settings))
        step = optimizer.step
        found.append(refused(lambda step=step: step(lambda: train(model, batch()).reduce_mean())))
    return found


@pytest.mark.slow
def test_closures_that_are_called_within_do_not_go_with_loss_scales():
    for found in run_ranks(use_wrongly, 1):
        check_texts(found, smp.MpxlaError, r"does not go with the loss scale of fp16: True")
