"""Python's float() of values that nobody knows while a step is captured."""

import builtins
import logging
import math
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mpxla.errors import CaptureError
from mpxla.graph.capture.step import TensorLeaf, ToCapture, capture_step
from mpxla.graph.python.floats import Floats
from mpxla.graph.user_code import until_captured
from mpxla.runtime.state import ModelState
from mpxla.tests.graph.capture.test_capture import outputs_of

pytestmark = pytest.mark.unit


def counted(h):
    total = 0.0
    for row in h:
        total += float(row.mean())
    return h * total


def kinds(h):
    a = float(h.std())
    is_float = isinstance(a, float) and issubclass(float, float) and float("0.5") == float(1) / 2
    return h * a if is_float and {float: 1}[float] and float == float else h  # noqa: E721


SAME = {
    "product": lambda h: h * float(h.abs().max()),
    "integer": lambda h: h * (float((h > 0).sum()) / h.numel()),
    "truth": lambda h: h + float((h > 0).any()),
    "read before": lambda h: h / (1 + float(h.std().item())),
    "list": lambda h: h * sum(map(float, h[0])) * max([float(v) for v in h[1]]),
    "loop": counted,
    "kinds": kinds,
    "returned": lambda h: (h, float(h.mean()), {"std": float(h.std())}),
    "arrays": lambda h: h + torch.from_numpy(np.ones(4, float)).to(h) * float(h.sum()),
    "mean of an array": lambda h: h * float(np.mean(h.detach().numpy())),
    "function of an array": lambda h: h * np.tanh(h.detach().mean().numpy()),
    "an array of one": lambda h: h * float(h.detach().mean().cpu().numpy()),
    "full": lambda h: h * torch.full((4,), float(h.mean())),
    "full of integers": lambda h: h * torch.full((4,), fill_value=h.argmax().item()),
    "full_like": lambda h: h + torch.full_like(h, h.mean().item()),
    "new_full": lambda h: h + h.new_full((3, 4), float(h.std())),
    "full of a tensor": lambda h: h * torch.full((4,), h.detach().mean()),
    "full of integers of a tensor": lambda h: h * torch.full((4,), h.argmax().int()).bitwise_not(),
    "new_full of a constant": lambda h: h + h.new_full((3, 4), torch.tensor([8.0, 16.0])[1]),
    "alpha": lambda h: torch.add(h, h, alpha=float(h.mean())).sub_(h, alpha=h.std().item()),
    "value": lambda h: torch.addcmul(h, h, h, value=float(h.mean())),
    "functions of two": lambda h: (
        h * (math.hypot(h.mean().item(), 1) + math.pow(h.std().item(), 2))
        + math.fmod(5, h.std().item())
        + math.atan2(h.mean().item(), h.std().item()) * math.log(h.std().item(), 2)
        + math.copysign(1, h.mean().item())
    ),
    "scalar_tensor": lambda h: h * torch.scalar_tensor(float(h.mean())),
    "clamp": lambda h: torch.clamp(h, -float(h.std()), float(h.std())),
    "linspace": lambda h: h * torch.linspace(-1, float(h.std()), 4),
    "a linspace of one": lambda h: h * torch.linspace(h.mean().item(), 5, 1),
}

CLASSES = torch.tensor([2, 0, 3])
OF_SETTINGS = {
    "leaky_relu": lambda h, a: F.leaky_relu(h * 1, a, inplace=True) - F.leaky_relu(h, a),
    "elu": lambda h, a: F.elu(h * 500, a) * F.elu(h, alpha=a, inplace=False),
    "celu": lambda h, a: F.celu(h * 500, a) * torch.celu(h, alpha=a),
    "softplus": lambda h, a: F.softplus(h, a, threshold=a) + F.softplus(h * 500, beta=a),
    "threshold": lambda h, a: F.threshold(h, a / 9, a) + F.threshold(h, 0.1, -a),
    "hardtanh": lambda h, a: F.hardtanh(h * 9, -a, a) + F.hardtanh(h, max_val=a),
    "hardshrink": lambda h, a: F.hardshrink(h, a) + h.sin(),
    "softshrink": lambda h, a: F.softshrink(h * 2, a),
    "nan_to_num": lambda h, a: (h.detach().sqrt() / 0).nan_to_num(a, posinf=2 * a) * h,
    "layer_norm": lambda h, a: (
        F.layer_norm(h, (4,), h[0], h[1], a) + F.layer_norm(h, (3, 4), eps=a)
    ),
    "bfloat16": lambda h, a: F.elu(h.bfloat16(), a),
    "a norm of bfloat16": lambda h, a: F.layer_norm(h.bfloat16(), (4,), eps=a).detach() + h,
    "no dropout": lambda h, a: F.dropout(h, a * 0) + F.dropout(h, a, training=False),
    "all of a dropout": lambda h, a: F.dropout(h, a / a) + h,
    "huber_loss": lambda h, a: F.huber_loss(h, h.detach().relu() * 3, delta=a) + h,
    "smooth_l1_loss": lambda h, a: (
        F.smooth_l1_loss(h, 3 * h.detach().relu(), beta=a)
        + F.smooth_l1_loss(h, h.roll(1), beta=a * 0)
    ),
    "pad": lambda h, a: F.pad(h, (1, 0, 0, 2), value=a)[:3, :4] * h + F.pad(h, (1, -1)),
    "products": lambda h, a: (
        torch.addmm(h, h, h[[0, 1, 2, 0]], beta=a, alpha=-a)
        + torch.baddbmm(h[None], h[None], h[None, [0, 1, 2, 0]], beta=a)[0]
    ),
    "group_norm": lambda h, a: (
        F.group_norm(h, 2, h[0], h[1], a) + F.group_norm(h[:, :, None], 2, eps=a).sum(2)
    ),
    "rms_norm": lambda h, a: F.rms_norm(h, (4,), h[0], a) + F.rms_norm(h, (3, 4), eps=a),
    "cross_entropy": lambda h, a: (
        F.cross_entropy(h, CLASSES, h[0].detach().exp(), label_smoothing=a / 9, reduction="sum")
        + F.cross_entropy(h, h.softmax(1), label_smoothing=a / 9)
        + F.cross_entropy(h, CLASSES, ignore_index=2, label_smoothing=a / 9, reduction="none")
    ),
    "margin_ranking_loss": lambda h, a: F.margin_ranking_loss(h[0], h[1], h[2].sign(), a) + h,
    "hinge_embedding_loss": lambda h, a: F.hinge_embedding_loss(h, h.sign(), margin=a) + h,
    "cosine_embedding_loss": lambda h, a: (
        F.cosine_embedding_loss(h, h[:1] * 2 + 1, torch.tensor([1, -1, -1]), a / 9) + h
    ),
    "triplet_margin_loss": lambda h, a: (
        F.triplet_margin_loss(h, h[:1], h[1:2], margin=a, swap=True, reduction="none").sum() + h
    ),
    "multi_margin_loss": lambda h, a: (
        F.multi_margin_loss(h, CLASSES, margin=a)
        + F.multi_margin_loss(h, CLASSES, 2, a, h[0].detach())
    ),
    "attention": lambda h, a: F.scaled_dot_product_attention(*[h[None, None]] * 3, scale=a),
    "a known number": lambda h, a: F.leaky_relu(h, torch.tensor(0.25).item()),
}


def captured(function):
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    names, leaf = ModelState(model).canonical_names, TensorLeaf((3, 4), torch.float32)
    floats = Floats()

    def step(leaves):
        return function(model(leaves[0]))

    found = until_captured(
        lambda: capture_step(ToCapture(step, model, [leaf], names, floats=floats))
    )
    return model, step, found


@pytest.mark.parametrize("name", SAME)
def test_numbers_compute_as_python_has_them(name):
    model, step, found = captured(SAME[name])
    assert "float" not in globals()
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        results = outputs_of(found, model, [x])
        expected = torch.utils._pytree.tree_leaves(step([x]))
    for leaf, value in zip(found.result_leaves, expected, strict=True):
        got = results[leaf.output]
        torch.testing.assert_close(got.to(torch.as_tensor(value).dtype), torch.as_tensor(value))


@pytest.mark.parametrize("name", OF_SETTINGS)
def test_settings_that_were_read(name):
    def function(h):
        h = h * torch.tensor([1.0, 2, -1, 1])
        found = OF_SETTINGS[name](h, h.std().item())
        (change,) = torch.autograd.grad((found * found).sum(), h)
        return found, change

    model, step, found = captured(function)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    results = outputs_of(found, model, [x])
    for leaf, value in zip(found.result_leaves, step([x]), strict=True):
        torch.testing.assert_close(results[leaf.output], value, equal_nan=True)


def test_an_operator_that_needs_a_number_says_where():
    with pytest.raises(CaptureError, match=r"test_floats\.py:\d+: .*torch\.renorm"):
        captured(lambda h: torch.renorm(h, 2, 0, h.std().item()))


def test_a_dropout_that_was_read():
    model, _, found = captured(lambda h: F.dropout(h * 0 + 1, 0.25 + h.std().item() * 0))
    results = outputs_of(found, model, [torch.ones(3, 4)])
    values = results[found.result_leaves[0].output].unique().tolist()
    assert values == pytest.approx([0, 1 / 0.75])


def test_texts_say_that_there_is_no_number(caplog):
    texts = []

    def write(h):
        texts.append("%s: %.3f" % ("mean", h.mean().item()))  # noqa: UP031
        texts.append("%.1f" % h.max())  # noqa: UP031
        return h

    with caplog.at_level(logging.WARNING, "mpxla"):
        captured(write)
    assert texts == ["mean: nan", "nan"]
    assert "test_floats.py" in caplog.text and "smp.debug_print(tensor)" in caplog.text


SOURCES = {
    "identity": "def function(h): return h * float(h.sum()) if type(h) is not float else h",
    "dtype": "def function(h): return h * float(h.sum()) + torch.ones(4, dtype=float)",
    "to": "def function(h): return (h * float(h.sum())).to(float)",
}


@pytest.mark.parametrize("name", SOURCES)
def test_modules_keep_a_float_that_has_to_be_pythons(name, tmp_path):
    file = tmp_path / "script.py"
    file.write_text(SOURCES[name])
    script = types.ModuleType("script")
    script.__dict__["torch"] = torch
    exec(compile(file.read_text(), str(file), "exec"), script.__dict__)
    with pytest.raises(CaptureError, match=r"depends on a tensor's value in Python at .*script.py"):
        captured(script.function)


def test_other_modules_see_the_class_only_while_a_step_is_captured():
    seen = []

    def look(h):
        seen.append(float)
        return F.relu(h) * float(h.sum())

    captured(look)
    assert seen[-1] is not builtins.float and seen[-1] == builtins.float
    assert "float" not in globals()
    assert seen[-1](3) == 3.0 and type(seen[-1]("2")) is builtins.float
