"""Which optimizers may be divided over replicas."""

from functools import partial

import pytest
import torch
from torch import nn, optim

from mpxla.errors import ConfigError
from mpxla.parallel.updates.elementwise import check_elementwise, mixes_parameters
from mpxla.tests.test_others import ByDistance, SharpnessAware

pytestmark = pytest.mark.unit


class SignDescent(optim.Optimizer):
    """An elementwise optimizer of a user, with state."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                seen = self.state[p].setdefault("seen", torch.zeros_like(p))
                seen.add_(p.grad.abs())
                p.sub_(group["lr"] * p.grad / seen)


class NormedDescent(SignDescent):
    """Divides by the norm of the whole gradient."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * p.grad / p.grad.norm())


class ClippingDescent(SignDescent):
    """Clips the gradient of each parameter by its norm, which only large ones reach."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * p.grad * (10.0 / p.grad.norm()).clamp(max=1.0))


class OfKernels(SignDescent):
    """Divides by the norm of the gradient of kernels."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * p.grad / (p.grad.norm() if p.dim() == 4 else 1.0))


class OfLarge(SignDescent):
    """Divides by the norm of the gradient of large matrices."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                is_large = p.dim() == 2 and min(p.shape) >= 128
                p.sub_(group["lr"] * p.grad / (p.grad.norm() if is_large else 1.0))


class Late(SignDescent):
    """Divides by the norm of the gradient from some step on."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            for p in group["params"]:
                p.sub_(group["lr"] * p.grad / (p.grad.norm() if group["steps"] > 25 else 1.0))


class Switching(SignDescent):
    """Counts a number of the whole gradient, which might matter much later."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["moved"] = state.get("moved", 0.0) + p.grad.norm().item()
                p.sub_(group["lr"] * (p.grad if state["moved"] < 1e9 else 0))


class Lamb(SignDescent):
    """Scales every update by the norm of its parameter."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=float(group["lr"] * p.norm() / (p.grad.norm() + 1e-6)))


class ClippingLamb(Lamb):
    """Clips by the norm of all gradients first, if it is large."""

    @torch.no_grad()
    def step(self, closure=None):
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        norm = torch.stack([g.norm() for g in gradients]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * p.grad / max(norm.item() / 20.0, 1.0))


def parameters():
    torch.manual_seed(0)
    return list(nn.Linear(4, 3, bias=False).parameters())


@pytest.mark.parametrize("kind", [optim.SGD, optim.AdamW, optim.Adagrad, optim.Rprop, SignDescent])
def test_elementwise_optimizers_pass(kind):
    check_elementwise(kind(parameters(), lr=0.1), "shard_gradients")


@pytest.mark.parametrize(
    "kind",
    [
        *(optim.LBFGS, optim.Adafactor, optim.Muon, NormedDescent, ClippingDescent, ClippingLamb),
        *(OfKernels, OfLarge, Late, Switching),
    ],
)
def test_others_are_refused(kind):
    text = rf"^shard_gradients divides .* {kind.__name__} needs whole tensors: .* SGD, or"
    with pytest.raises(ConfigError, match=text):
        check_elementwise(kind(parameters(), lr=0.1), "shard_gradients")


class InMode(SignDescent):
    """Refuses to be used before a mode is chosen, as optimizers without a schedule do."""

    is_training = False

    def train(self):
        self.is_training = True

    def step(self, closure=None):
        if not self.is_training:
            raise ValueError("not in train mode.")
        super().step(closure)


def test_what_a_trial_raises_is_said():
    optimizer = InMode(parameters(), lr=0.1)
    text = r"a trial of it raised ValueError: not in train mode\. .*call optimizer\.train"
    with pytest.raises(ConfigError, match=text):
        check_elementwise(optimizer, "shard_gradients")
    optimizer.train()
    check_elementwise(optimizer, "shard_gradients")


def test_the_trial_leaves_the_optimizer_alone():
    mine = parameters()
    before = [p.detach().clone() for p in mine]
    optimizer = SignDescent(mine)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("hook"))
    scheduler = optim.lr_scheduler.StepLR(optimizer, 1)
    state = torch.random.get_rng_state()
    check_elementwise(optimizer, "shard_gradients")
    assert calls == []
    assert not optimizer.state
    assert all(torch.equal(p, b) for p, b in zip(mine, before, strict=True))
    assert torch.equal(torch.random.get_rng_state(), state)
    mine[0].grad = torch.ones_like(mine[0])
    optimizer.step()
    assert calls == ["hook"]
    scheduler.step()


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        *((optim.Adafactor, False), (SignDescent, False), (NormedDescent, False), (Lamb, False)),
        *((ClippingLamb, True), (ByDistance, True)),
        (partial(SharpnessAware, base=optim.SGD), True),
    ],
)
def test_optimizers_that_mix_parameters_are_found(kind, expected):
    mine = parameters()
    before = [p.detach().clone() for p in mine]
    state = torch.get_rng_state()
    assert mixes_parameters(kind(mine, lr=0.1)) is expected
    assert all(torch.equal(a, b) for a, b in zip(mine, before, strict=True))
    assert torch.equal(torch.get_rng_state(), state)
