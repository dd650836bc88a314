"""Clipping by the norm of all gradients; over stages and shards also in `test_parity_replicas`."""

import math

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

import mpxla as smp
from mpxla.tests.backends import backend_here
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks

ORDERS = (2.0, 1.0, 3.0, math.inf)


class Tied(nn.Module):
    """The first and the last layer share their weight."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.enter = nn.Linear(6, 6)
        self.middle = nn.Linear(6, 6)
        self.leave = nn.Linear(6, 6)
        self.leave.weight = self.enter.weight

    def forward(self, x):
        return self.leave(torch.tanh(self.middle(torch.tanh(self.enter(x)))))


def loss_of(model, x):
    loss = model(x).square().sum()
    model.backward(loss)
    return loss


def batch():
    torch.manual_seed(6)
    return torch.randn(4, 6)


def clip(stages, is_sharded, source):
    functions = {
        "mpxla": smp.clip_grad_norm_,
        "torch": nn.utils.clip_grad.clip_grad_norm_,  # imported before torch_xla
        "torch_xla": clip_grad_norm_,  # torch_xla has put its own in the place of torch's
    }
    function = functions[source]
    assert function.__module__.startswith(source)
    smp.init(
        {
            "ddp": True,
            "pipeline_parallel_degree": stages,
            "shard_optimizer_state": is_sharded,
            "auto_partition": False,
            "default_partition": 0,
        }
    )
    raw = Tied()
    model = smp.DistributedModel(raw)
    for layer in (raw.middle, raw.leave) if stages > 1 else ():
        smp.set_partition(layer, stages - 1)
    step, found = smp.step(loss_of), []
    for order in ORDERS:
        model.zero_grad()
        step(model, batch())
        norm = function(model.parameters(), 0.5, order)
        again = function(model.parameters(), 1e9, order)
        assert norm.device == backend_here().device
        found.append((norm.item(), again.item()))
    step(model, batch())
    part = function(raw.middle.parameters(), 1e9).item()
    return found, part, refused(model, step, function)


def refused(model, step, function):
    step(model, torch.full((4, 6), math.inf))
    try:
        function(model.parameters(), 1.0, error_if_nonfinite=True)
    except RuntimeError as error:
        return str(error)


def norm_of(model, order):
    """Not by `clip_grad_norm_`, which torch_xla exchanges for one without complex numbers."""
    norms = [torch.linalg.vector_norm(p.grad, order) for p in model.parameters()]
    return torch.linalg.vector_norm(torch.stack(norms), order).item()


@pytest.mark.parametrize(
    ("stages", "replicas", "is_sharded", "source"),
    [
        pytest.param(1, 1, False, "mpxla", marks=pytest.mark.slow),
        (2, 1, False, "torch"),
        pytest.param(2, 1, False, "torch_xla", marks=pytest.mark.torch_xla),
        (2, 2, True, "mpxla"),
        pytest.param(2, 2, True, "torch", marks=pytest.mark.slow),
    ],
)
def test_the_norm_is_that_of_one_process(stages, replicas, is_sharded, source):
    """Torch's functions were imported by name, as scripts do, before there was a session."""
    results = run_ranks(clip, stages * replicas, stages, is_sharded, source)
    for found, part, text in results:
        for order, (norm, again) in zip(ORDERS, found, strict=True):
            model = Tied()
            model(batch()).square().sum().backward()
            assert norm == pytest.approx(norm_of(model, order), rel=1e-5), order
            assert again == pytest.approx(0.5, rel=1e-5), order
        assert "the total norm of order 2.0 of the gradients is" in text
        assert results[0][1] == part > 0


def clip_too_early():
    smp.init({"pipeline_parallel_degree": 2})
    model = smp.DistributedModel(Tied())
    try:
        smp.clip_grad_norm_(model.parameters(), 1.0)
    except smp.MpxlaError as error:
        return str(error)


def test_clipping_before_the_first_step():
    for text in run_ranks(clip_too_early, 2):
        assert "clip_grad_norm_ needs gradients: call it after the first call of a step" in text


class Turning(nn.Module):
    """With complex weights in the middle."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.enter, self.leave = nn.Linear(6, 6), nn.Linear(6, 6)
        self.turn = nn.Parameter(torch.randn(6, 6, dtype=torch.complex64))

    def forward(self, x):
        return self.leave((self.enter(x).to(self.turn.dtype) @ self.turn).abs())


def clip_complex():
    smp.init({"pipeline_parallel_degree": 2})
    model = smp.DistributedModel(Turning())
    step = smp.step(loss_of)
    found = []
    for order in ORDERS:
        model.zero_grad()
        step(model, batch())
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5, order)
        found.append((norm.item(), smp.clip_grad_norm_(model.parameters(), 1e9, order).item()))
    return found


def test_complex_gradients_count_by_their_magnitudes():
    for found in run_ranks(clip_complex, 2):
        for order, (norm, again) in zip(ORDERS, found, strict=True):
            model = Turning()
            model(batch()).square().sum().backward()
            assert norm == pytest.approx(norm_of(model, order), rel=1e-5), order
            assert again == pytest.approx(0.5, rel=1e-5), order
