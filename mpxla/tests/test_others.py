"""Optimizers that look at all parameters have plain PyTorch's results where ranks have stages."""

import pytest
import torch
from torch import optim

from mpxla.tests.test_training_habits import STEPS, check_against_plain, train_in_all_ways

pytestmark = pytest.mark.ranks


class ByDistance(optim.Optimizer):
    """Estimates its rate from how far all parameters have come, as D-Adaptation does."""

    def __init__(self, params, lr=1.0):
        super().__init__(params, {"lr": lr, "distance": 1e-3, "sum": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        numerator, denominator = 0.0, 0.0
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        for p in held:
            state = self.state[p]
            if not state:
                state["start"], state["mean"] = p.detach().clone(), torch.zeros_like(p)
            state["mean"].lerp_(p.grad, 0.3)
            numerator += float((p.grad * (state["start"] - p)).sum())
            denominator += float(state["mean"].abs().sum())
        for group in self.param_groups:
            group["sum"] += numerator
            group["distance"] = max(group["distance"], 2 * group["sum"] / denominator)
            for p in (p for p in group["params"] if p.grad is not None):
                p.sub_(self.state[p]["mean"], alpha=group["lr"] * group["distance"])


class SharpnessAware(optim.Optimizer):
    """Takes the gradient a step up, along that of all parameters; another one makes the update."""

    def __init__(self, params, base, distance=0.1, **settings):
        super().__init__(params, {"distance": distance, **settings})
        self.base = base(self.param_groups, **settings)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self):
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in held]).norm()
        for p in held:
            self.state[p]["old"] = p.detach().clone()
            p.add_(p.grad * (self.param_groups[0]["distance"] / norm))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                p.copy_(self.state[p]["old"])
        self.base.step()

    def step(self, closure=None):
        with torch.enable_grad():
            loss = closure()
        self.first_step()
        with torch.enable_grad():
            closure()
        self.second_step()
        return loss


class ClippingWithin(optim.Optimizer):
    """Clips within its step, by torch's function."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        held = [p for group in self.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(held, 0.1)
        for p in (p for p in held if p.grad is not None):
            p.sub_(p.grad, alpha=self.param_groups[0]["lr"])


class FromStart(optim.Optimizer):
    """Keeps where parameters began by parameter, in state that has a name, and one number of all.

    It moves no parameter where gradients are large, as those of a trial.
    """

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if "kept" not in self.state:
            starts = {p: p.detach().clone() for p in held}
            self.state["kept"] = {"way": torch.zeros(()), "product": torch.zeros(1), **starts}
        kept = self.state["kept"]
        kept["product"] += sum(float((p.grad * (kept[p] - p)).sum()) for p in held)
        kept["way"] += 1.0
        product = float(kept["product"].abs())
        factor = product if kept["way"] > 2 and product < 1 else 1.0
        for p in held:
            p.sub_(p.grad, alpha=self.param_groups[0]["lr"] * factor)


def by_distance(run):
    """Its state is loaded into another one midway, with one layer more."""
    run.raw.right.requires_grad_(False)
    old = run.wrapped(ByDistance(run.model.parameters()))
    run.loop(old, range(2))
    run.raw.right.requires_grad_(True)
    new = run.wrapped(ByDistance(run.model.parameters()))
    new.load_state_dict(old.state_dict())
    run.loop(new, range(2, 5))


def groups_of_their_own(run):
    names = ("first", "last", "left", "right", "spare")
    groups = [{"params": getattr(run.raw, name).parameters()} for name in names]
    groups[1]["lr"] = 0.5
    run.loop(run.wrapped(ByDistance(groups)))


def sharpness_aware(run):
    settings = {"lr": 0.02, "eps": 1e-3}
    optimizer = run.wrapped(SharpnessAware(run.model.parameters(), optim.Adam, **settings))
    for number in range(STEPS):
        optimizer.zero_grad()
        run.step(number)
        optimizer.first_step()
        run.step(number)
        optimizer.second_step()


def sharpness_aware_with_closures(run):
    settings = {"lr": 0.1, "momentum": 0.9}
    optimizer = run.wrapped(SharpnessAware(run.model.parameters(), optim.SGD, **settings))
    for number in range(STEPS):

        def closure(number=number):
            optimizer.zero_grad()
            return run.step(number)

        optimizer.step(closure)


def from_start(run):
    optimizer = run.wrapped(FromStart(run.model.parameters()))
    run.loop(optimizer)
    del optimizer.state["kept"]  # torch saves no names for its parameters


def clipping_within(run):
    run.loop(run.wrapped(ClippingWithin(run.model.parameters())))


HABITS = {
    habit.__name__: habit
    for habit in (
        by_distance,
        groups_of_their_own,
        sharpness_aware,
        sharpness_aware_with_closures,
        clipping_within,
        from_start,
    )
}


def train(config, names):
    return train_in_all_ways(config, names, HABITS)


@pytest.mark.parametrize(
    ("world", "names"),
    [
        ("stages", ["by_distance", "sharpness_aware_with_closures", "from_start"]),
        *(pytest.param(w, list(HABITS), marks=pytest.mark.slow) for w in ("stages", "pairs")),
    ],
)
def test_all_parameters_are_looked_at(world, names):
    check_against_plain(train, world, names, HABITS)
