"""From which state optimizers start."""

import pytest
import torch
from torch import optim

from mpxla.parallel.updates.state import (
    counts_of,
    idles_without_gradients,
    makes_such_state,
    start_from_zeros,
    starts_from_zeros,
)
from mpxla.tests.device.null import NullBackend
from mpxla.tests.parallel.updates.test_update import ByMeanNorms

pytestmark = pytest.mark.unit


class WithMeans(optim.Optimizer):
    """Keeps means over columns of some parameters, in the place of all elements."""

    takes_means = staticmethod(lambda p: False)

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                gradient, key = p.grad, "all"
                if self.takes_means(p):
                    gradient, key = p.grad.flatten(1).mean(1), "means"
                self.state[p].setdefault(key, torch.zeros_like(gradient)).add_(gradient)


class OfMatrices(WithMeans):
    takes_means = staticmethod(lambda p: p.dim() == 2)


class OfKernels(WithMeans):
    takes_means = staticmethod(lambda p: p.dim() == 4)


class OfLarge(WithMeans):
    takes_means = staticmethod(lambda p: p.dim() == 2 and min(p.shape) >= 128)


class OfRatios(WithMeans):
    """Keeps a number in Python beside tensors, of what is no vector (Lamb's trust ratio)."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                if p.dim() > 2:
                    self.state[p]["ratio"] = 1.0


SHAPES = ((3,), (2, 1, 3, 1), (160, 150), ())


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        *((WithMeans, True), (optim.SGD, True), (optim.AdamW, True), (ByMeanNorms, True)),
        *((OfMatrices, False), (OfKernels, False), (OfLarge, False), (OfRatios, False)),
    ],
)
def test_what_has_other_state_for_some_parameters_makes_it_itself(kind, found):
    parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in SHAPES]
    optimizer = kind(parameters)
    starts = {torch.float32: starts_from_zeros(optimizer)}
    assert (starts[torch.float32] is None) is (kind is OfMatrices)
    if kind is not OfMatrices:
        assert makes_such_state(optimizer, [parameters], starts) is found
    assert not optimizer.state


class Growing(ByMeanNorms):
    """Keeps an estimate, which first moves where gradients are large."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                estimate = self.state[p].setdefault("estimate", torch.tensor(50.0))
                torch.maximum(estimate, p.grad.norm(), out=estimate)


def test_numbers_that_follow_gradients_are_no_counts():
    (held,) = parameters = [torch.nn.Parameter(torch.ones(3))]
    assert counts_of(ByMeanNorms(parameters)) == counts_of(Growing(parameters)) == {"step"}
    assert counts_of(optim.NAdam(parameters)) == {"step", "mu_product"}
    assert counts_of(optim.ASGD(parameters)) >= {"step", "eta"}
    assert held.grad is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_counts_are_wide_and_other_numbers_are_of_the_type_that_the_optimizer_gave_them(dtype):
    class OfOwnType(ByMeanNorms):
        def change(self, p, state, lr):
            if not state:
                state |= {"step": p.new_zeros(()), "mean": p.new_zeros(())}
            return super().change(p, state, lr)

    parameter = torch.nn.Parameter(torch.ones(3, dtype=dtype))
    optimizer = OfOwnType([parameter])
    start = starts_from_zeros(optimizer, dtype)
    start_from_zeros(optimizer.state, {parameter: start}, NullBackend(), counts_of(optimizer))
    assert {key: value.dtype for key, value in optimizer.state[parameter].items()} == {
        "step": torch.promote_types(dtype, torch.float32),
        "mean": dtype,
    }


class Decaying(optim.SGD):
    """Decays weights before it looks at gradients."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(1 - group["lr"])
        return super().step(closure)


class ByLists(optim.SGD):
    """Works on lists of tensors if it is told to, and not on empty ones."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            trained = [p for p in group["params"] if p.grad is not None]
            if group["foreach"]:
                torch._foreach_add_(trained, [p.grad for p in trained], alpha=-group["lr"])
            else:
                super().step(closure)


def test_forms_for_lists_may_not_take_empty_ones():
    parameters = [torch.nn.Parameter(torch.ones(2))]
    assert idles_without_gradients(ByLists(parameters, lr=0.1))
    assert not idles_without_gradients(ByLists(parameters, lr=0.1, foreach=True))
    assert idles_without_gradients(optim.SGD(parameters, lr=0.1, foreach=True))
    assert idles_without_gradients(optim.AdamW(parameters, foreach=True))
    assert idles_without_gradients(optim.AdamW(parameters, fused=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_idles_without_gradients_does_in_every_dtype(dtype, default_dtype):
    default_dtype(dtype)
    parameters = [torch.nn.Parameter(torch.ones(2))]
    assert idles_without_gradients(optim.SGD(parameters, lr=0.1))
    assert idles_without_gradients(optim.AdamW(parameters))
    assert not idles_without_gradients(Decaying(parameters, lr=0.1))


@pytest.fixture
def default_dtype():
    """Sets it for one test."""
    yield torch.set_default_dtype
    torch.set_default_dtype(torch.float32)
