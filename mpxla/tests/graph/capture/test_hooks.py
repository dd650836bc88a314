"""What a step function must not do besides computing, because the captured graph would lose it."""

import contextlib
import copy
import re

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

from mpxla import log
from mpxla.errors import CaptureError
from mpxla.graph.capture.recorder import current_recorder
from mpxla.graph.capture.step import TensorLeaf
from mpxla.graph.capture.torch_parts import torchs_recurrences
from mpxla.runtime.state import ModelState
from mpxla.tests.clients import logged
from mpxla.tests.graph.capture.test_capture import capture, run

pytestmark = pytest.mark.unit


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -grad


def differentiate(model, leaves):
    loss = model(leaves[0]).square().mean()
    current_recorder().backward(loss)
    return loss


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


def change(model, leaves):
    current_recorder().backward(Doubled.apply(model(leaves[0])).mean())


def hook(model, leaves):
    model.weight.register_hook(lambda grad: 2 * grad)
    differentiate(model, leaves)


def hook_late(model, leaves):
    out = model(leaves[0])
    current_recorder().backward(out.mean())
    out.register_hook(lambda grad: 2 * grad)


def unhook(model, leaves):
    out = model(leaves[0])
    handle = out.register_hook(lambda grad: 2 * grad)
    handle.remove()
    current_recorder().backward(out.mean())


def hook_by_value(model, leaves):
    out = model(leaves[0])
    out.register_hook(lambda g: g / g.norm() if g.norm() > 1 else g)
    current_recorder().backward(out.mean())


class Limited(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad / grad.norm() if grad.norm() > 1 else grad


def branch(model, leaves):
    """Not by what the memory of a tensor without values has."""
    weight = Limited.apply(model.weight)
    current_recorder().backward(F.linear(leaves[0], weight).mean())


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x if x.sum() > 3 else x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad


def branch_forward(model, leaves):
    """Nor by what the memory of its stand-in has."""
    current_recorder().backward(Doubling.apply(model(leaves[0])).mean())


def hook_after(model, leaves):
    leaves[0].requires_grad_().register_post_accumulate_grad_hook(print)
    differentiate(model, leaves)


def clip(model, leaves):
    differentiate(model, leaves)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def clear(model, leaves):
    model.zero_grad()
    differentiate(model, leaves)


def update(model, leaves):
    differentiate(model, leaves)
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def clear_by_optimizer(model, leaves):
    torch.optim.SGD(model.parameters(), lr=0.1).zero_grad()
    differentiate(model, leaves)


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (change, r"applies Doubled, .* changes an argument in place at .*hooks\.py:\d+: .*clone"),
        (hook, r"^register_hook was called in a step function at .* Register a hook of a param"),
        (hook_late, r"^register_hook was called in .*_hooks\.py:\d+: out\.reg.* after model\.back"),
        (unhook, r"^A hook was removed in a step function at .*hooks\.py:\d+: handle\.remove\(\)"),
        (
            hook_by_value,
            r"^The step function depends on a tensor's value in Python at .*g / g",
        ),
        (branch, r"^The step function depends on a tensor's value in Python at .*_hooks\.py"),
        (branch_forward, r"^The step function depends on .* in Python at .*: return 2 \* x if x"),
        (hook_after, r"^register_post_accumulate_grad_hook\(\) was called in a step function at "),
        (clip, r"The gradient of a tensor is used in a step function at .*hooks\.py:\d+: nn\.util"),
        (clear, r"The gradient of a tensor is used .* Read, clip and clear them outside"),
        (update, r"^SGD is used in a step function at .* and optimizer\.step\(\) after it"),
        (clear_by_optimizer, r"^SGD is used in a step function at .*: torch\.optim\.SGD\("),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
def test_what_the_graph_would_lose_is_refused(function, text):
    model = nn.Linear(6, 1)
    with pytest.raises(CaptureError, match=text):
        capture(model, lambda leaves: function(model, leaves))
    x = torch.ones(2, 6)
    Reversed.apply(model(x)).sum().backward()
    torch.testing.assert_close(model.bias.grad, torch.tensor([-2.0])), "autograd is itself again"
    torch.optim.SGD(model.parameters(), lr=0.1).zero_grad()
    assert model.bias.grad is None


def average(model, leaves):
    """Adds what somebody has accumulated, as codebooks of vector quantizers do."""
    for statistics in (model.running_mean, model.running_var.detach()):
        if statistics.grad is not None:
            raise AssertionError("a buffer has no gradient")
        statistics.grad = None
    return model(leaves[0])


def test_what_needs_no_gradient_has_none():
    model, x = nn.BatchNorm1d(6).eval(), torch.randn(4, 6)
    captured = capture(model, lambda leaves: average(model, leaves))
    torch.testing.assert_close(run(captured, model, [x])[0], model(x).detach())
    with pytest.raises(CaptureError, match="The gradient of a tensor is used"):
        capture(model, lambda leaves: setattr(model.running_mean, "grad", leaves[0][0]))
    model.running_mean.grad = torch.ones(6)
    with pytest.raises(CaptureError, match="The gradient of a tensor is used"):
        capture(model, lambda leaves: average(model, leaves))
    model.weight.requires_grad_(False)
    with pytest.raises(CaptureError, match="The gradient of a tensor is used"):
        capture(model, lambda leaves: model.weight.grad)


class Times(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bounds):
        ctx.number = int((bounds[1] - bounds[0]).item())
        return x * ctx.number + torch.arange(bounds[1].item()).sum()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.number, None


def test_own_functions_read_what_is_known_of_their_arguments():
    def step(leaves):
        loss = Times.apply(model(leaves[0]), torch.tensor([1.0, 4.0])).sum()
        current_recorder().backward(loss)
        return loss

    model, x = nn.Linear(6, 1), torch.randn(4, 6)
    *_, loss = run(capture(model, step), model, [x])
    torch.testing.assert_close(loss, (3 * model(x) + 6).sum().detach())


def test_own_backwards_do_not_matter_to_evaluation():
    model, x = nn.Linear(6, 1), torch.randn(4, 6)
    captured = capture(model, lambda leaves: Reversed.apply(model(leaves[0])))
    torch.testing.assert_close(run(captured, model, [x])[0], model(x).detach())


@pytest.mark.parametrize("is_reentrant", [True, False])
def test_checkpoints_are_ordinary_operators(is_reentrant):
    model, x = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1)), torch.randn(4, 6)

    def step(leaves):
        given = leaves[0].requires_grad_() if is_reentrant else leaves[0]
        hidden = torch.utils.checkpoint.checkpoint(model[:2], given, use_reentrant=is_reentrant)
        loss = model[2](hidden).mean()
        current_recorder().backward(loss)
        return loss

    captured = capture(model, step)
    torch.testing.assert_close(run(captured, model, [x])[1], model(x).mean().detach())
    products = [node for node in captured.graph.nodes if "linear" in str(node.target)]
    assert [node.meta["val"].requires_grad for node in products] == [True, True]


def test_a_reentrant_checkpoint_of_inputs_without_gradients_has_none():
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))

    def step(leaves):
        hidden = torch.utils.checkpoint.checkpoint(model[:2], leaves[0], use_reentrant=True)
        current_recorder().backward(model[2](hidden).mean())

    with pytest.warns(UserWarning, match="None of the inputs have requires_grad=True"):
        captured = capture(model, step)
    products = [node for node in captured.graph.nodes if "linear" in str(node.target)]
    assert not products[1].args[0].meta["val"].requires_grad


def hook_module(model):
    model.register_backward_hook(print)


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
@pytest.mark.parametrize(
    ("prepare", "text"),
    [(hook_module, "module model has a hook by register_backward_hook")],
)
def test_hooks_on_gradients_are_refused(prepare, text):
    model = nn.Linear(6, 1)
    prepare(model)
    with pytest.raises(CaptureError, match=text):
        capture(model, lambda leaves: differentiate(model, leaves))
    with pytest.raises(CaptureError, match=text):
        ModelState(model).place(["weight", "bias"], torch.device("meta"))
    capture(model, lambda leaves: model(leaves[0]))


class Remembering(nn.Module):
    """Keeps tensors from call to call, as plain attributes."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.seen = []
        self.hidden = None
        self.count = 0

    def forward(self, x):
        x = self.layer(x) + (0 if self.hidden is None else self.hidden)
        self.hidden = x.detach()
        self.last = x
        self.seen.append(x)
        self.count += 1
        return x


def test_tensors_kept_by_a_module_are_gone_after_a_capture():
    model = nn.Sequential(Remembering())
    for _ in range(2):
        step = capture(model, lambda leaves: model(leaves[0]) + F.relu(model[0].last))
    assert model[0].hidden is None
    assert model[0].seen == []
    assert not hasattr(model[0], "last")
    assert model[0].count == 2
    assert {name for _, name in step.gone} == {"last", "seen", "hidden"}


class ReplacingForward(nn.Module):
    """Has another forward in the place of that of a layer for a while, which others share."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(6, 6))
        self.user = nn.Sequential(self.layer, nn.Tanh())

    def forward(self, x):
        forward = self.layer.forward
        self.layer.forward = lambda x: 2 * forward(x)
        try:
            y = self.user(x)
        finally:
            self.layer.forward = forward
        self.twin = self.layer
        return y + self.layer(x)


def test_forwards_and_layers_that_a_module_has_after_a_capture_are_its_own():
    model = nn.Sequential(ReplacingForward())
    x = torch.randn(4, 6)
    with torch.no_grad():
        expected = copy.deepcopy(model)(x)
    for _ in range(2):  # where the first would leave a forward of the tracer's
        step = capture(model, lambda leaves: model(leaves[0]))
        torch.testing.assert_close(run(step, model, [x])[0], expected)
        assert model[0].layer.forward.__self__ is model[0].layer
        assert vars(model[0])["_modules"]["twin"] is model[0].layer


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_recurrent_layers_compute_with_their_parameters(kind):
    """They list their weights a second time, outside of the tables of parameters."""
    with contextlib.suppress(ImportError):
        import torch_xla  # exchanges a class  # noqa: F401

    torch.manual_seed(0)
    model, x = getattr(nn, kind)(6, 3, batch_first=True), torch.randn(2, 4, 6)
    held = [id(weight) for weight in model._flat_weights]
    captured = capture(model, lambda leaves: model(leaves[0])[0], TensorLeaf((2, 4, 6), x.dtype))
    with torchs_recurrences():
        expected = model(x)[0].detach()
    torch.testing.assert_close(run(captured, model, [x])[0], expected)
    assert not captured.constants
    assert [id(weight) for weight in model._flat_weights] == held
    ModelState(model).place([], torch.device("meta"))
    with torchs_recurrences():
        assert model(x.to("meta"))[0].device.type == "meta"
    assert [id(weight) for weight in model._flat_weights] == held


def pack(tensor):
    raise AssertionError("what a program saves stays inside of it")


def differentiate_by_hooks(model, leaves):
    with torch.autograd.graph.saved_tensors_hooks(pack, pack), torch.autograd.graph.save_on_cpu():
        return differentiate(model, leaves)


def watch_gradients(mode):
    def differentiate_watched(model, leaves):
        outs = model(leaves[0]), model(2 * leaves[0])
        torch.autograd.graph.register_multi_grad_hook(outs, pack, mode=mode)
        loss = outs[0].mean() + outs[1].mean()
        current_recorder().backward(loss)
        return loss

    return differentiate_watched


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (differentiate_by_hooks, r"hooks on saved tensors .* at .*hooks\.py:\d+: .*offload_activ"),
        (watch_gradients("all"), r"hook .* at .*hooks\.py:\d+: .* changes no gradient"),
        (watch_gradients("any"), r"hook .* at .*hooks\.py:\d+: .* changes no gradient"),
    ],
)
def test_hooks_that_are_left_out_are_told_of(function, text, monkeypatch):
    monkeypatch.setattr(log, "_warned", set())
    model = nn.Linear(6, 1)
    with logged() as lines:
        capture(model, lambda leaves: function(model, leaves))
    assert any(re.search(text, line) for line in lines), lines
    with (
        pytest.raises(AssertionError, match="stays inside"),
        torch.autograd.graph.saved_tensors_hooks(pack, pack),
    ):
        model.weight.square()
