"""Floats that are inputs of a step compute as Python floats do, and so does what is read."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mpxla.errors import CaptureError
from mpxla.graph.capture.recorder import current_recorder
from mpxla.graph.capture.step import NumberLeaf, TensorLeaf, ToCapture, capture_step
from mpxla.graph.python.number import Number
from mpxla.runtime.state import ModelState

pytestmark = pytest.mark.unit

SAME = {
    "mul": lambda h, a: h * a,
    "rmul": lambda h, a: a * h,
    "sub": lambda h, a: a - h,
    "div": lambda h, a: h / a + a / (h.abs() + 1),
    "pow": lambda h, a: h.abs() ** a + a**h,
    "python": lambda h, a: h * (1 - a) + (2**a) * h.relu() + a**2 // 1 - (-a) % 0.3 + abs(a - 1),
    "in place": lambda h, a: (h * 1).mul_(a).add_(a),
    "bfloat16": lambda h, a: h.bfloat16() * a,
    "scalar of float32": lambda h, a: h.sum() * a,
    "double": lambda h, a: h.double() * a,
    "integers": lambda h, a: torch.arange(4) * a + h,
    "where": lambda h, a: torch.where(h > a, h, a),
    "clamp": lambda h, a: torch.clamp(h, max=a),
    "lerp": lambda h, a: torch.lerp(h, h.relu(), a),
    "masked_fill": lambda h, a: h.masked_fill(h > 0, a),
    "softmax": lambda h, a: (h / a).softmax(-1),
    "is a float": lambda h, a: h * (a if isinstance(a, float) else 0),
    "complex": lambda h, a: (h.to(torch.complex64) * a).abs(),
    "max and min": lambda h, a: h / max(a, 0.4) + min(0.5, a) * max([0.1, a, 2 * a]),
    "tensor": lambda h, a: h * torch.tensor(a),
}
NEED_THE_VALUE = {
    "branch": lambda h, a: h * a if a > 0 else h,
    "truth": lambda h, a: h if a else -h,
    "dropout": lambda h, a: F.dropout(h, a),
    "math": lambda h, a: h * math.exp(a),
    "int": lambda h, a: h[: int(a)],
    "max of an int": lambda h, a: h * max(a, 1),
    "text": lambda h, a: (h, f"{a:.2f}")[0],
    "smoothing": lambda h, a: F.cross_entropy(h, h.argmax(1), label_smoothing=a),
    "key": lambda h, a: h * {0.5: 2}.get(a, 1),
}


def capture(*functions):
    """A step that returns the results of some functions, and the number."""
    model = nn.Linear(4, 4)

    def step(leaves):
        number = Number(leaves[1])
        h = model(leaves[0])
        current_recorder().backward(h.mean() * number)
        return [function(h, number) for function in functions], number

    leaves = [TensorLeaf((3, 4), torch.float32), NumberLeaf((), torch.float64, 0.5)]
    return model, capture_step(ToCapture(step, model, leaves, ModelState(model).canonical_names))


def test_one_program_for_all_values():
    model, step = capture(*SAME.values())
    assert [leaf.is_number for leaf in step.result_leaves] == [False] * len(SAME) + [True]
    x = torch.linspace(-2, 2, 12).reshape(3, 4)
    program = torch.fx.GraphModule(nn.Module(), step.graph)
    for value in (0.3, 0.5, 2.0):
        inputs = {0: x, 1: torch.tensor(value, dtype=torch.float64)}
        named = dict(model.named_parameters())
        given = [named[r.name] if r.name else inputs[r.index] for r in step.inputs]
        with torch.no_grad():
            _, *results, number = program(*given)
        for (name, function), found in zip(SAME.items(), results, strict=True):
            with torch.no_grad():
                expected = function(model(x), value)
            assert found.dtype == expected.dtype, name
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6, msg=name)
        assert number.item() == value


@pytest.mark.parametrize("name", NEED_THE_VALUE)
def test_code_that_needs_the_value_is_an_error(name):
    with pytest.raises((CaptureError, TypeError)):
        capture(NEED_THE_VALUE[name])


def metrics(h, y):
    """What scripts return beside the loss."""
    hits = (h.argmax(1) == y).sum().item()
    loss = F.cross_entropy(h, y).item()
    largest = h.abs().max().item()
    weights = [w * 2 for w in h[0].tolist()]
    return (
        *(hits / y.size(0), 100.0 * hits / len(y), hits // 2 + 1, hits % 3, -hits, hits * 2 - 0.5),
        *(loss * h.size(0), round(loss, 3), round(hits / 3), abs(-loss), loss**2, 2**loss, +hits),
        *(sum([loss, hits]), hits / (hits + largest), (h > 0).any().item() + 1, weights[1]),
        *((h.sum() > 0).item(), isinstance(hits, int), isinstance(loss, float)),
        *(max(1, hits), max(hits, 9), min(hits - 4, 2), min(largest, 1e-3), max(hits, 5 - hits)),
        *(max(0.5, loss * math.inf * 0), max(loss * math.inf * 0, 0.5)),
    )


def with_tensors(h, y):
    hits, largest = (y > 0).sum().item(), h.max().item()
    ids = torch.arange(4) * hits
    return (
        *(h * hits, h / largest, hits - h, h.bfloat16() * largest, ids, y >= hits, (y > 0) * hits),
        *(h.clamp(max=largest / 2), h.masked_fill(y[:, None] > 1, largest), 0.9**hits * h),
        *(torch.where(h > largest / 2, largest, h), h.clone().mul_(largest), y + largest),
    )


def written_later(h, y):
    """What was read before a write stays what it was."""
    places, wide = y + 1, h.double().clone()
    first, value, listed = places[0].item(), wide[0, 0].item(), places.tolist()
    places.mul_(3)
    wide.add_(value)
    return first, value, *listed, h * first, y + first, places[0].item(), wide[0, 0].item() - value


@pytest.mark.parametrize("function", [metrics, with_tensors, written_later])
def test_what_is_read_computes(function):
    model, y = nn.Linear(4, 4), torch.tensor([0, 1, 2, 2, 1])

    def step(leaves):
        h = model(leaves[0])
        current_recorder().backward(h.sum() / h.sum().item())
        return function(h, leaves[1])

    leaves = [TensorLeaf((5, 4), torch.float32), TensorLeaf((5,), torch.int64)]
    found = capture_step(ToCapture(step, model, leaves, ModelState(model).canonical_names))
    program, x = torch.fx.GraphModule(nn.Module(), found.graph), torch.randn(5, 4)
    given = dict(model.named_parameters()) | {0: x, 1: y}
    with torch.no_grad():
        _, *results = program(*(given[r.name or r.index] for r in found.inputs))
        expected = function(model(x), y)
    for leaf, value in zip(found.result_leaves, expected, strict=True):
        got = leaf.value if leaf.output is None else results[leaf.output]
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(got, value)
        else:
            got = got.item() if isinstance(got, torch.Tensor) else got
            assert leaf.is_number and type(got) is type(value), (got, value)
            assert got == pytest.approx(value, rel=1e-5, nan_ok=True)


@pytest.mark.parametrize(
    "read",
    [
        lambda h: math.gamma(h.sum().item()),
        lambda h: h * 2 if h.sum().item() > 0 else h,
        lambda h: h.view(h.argmax().item(), -1),
        lambda h: torch.zeros(h.argmax().item()),
        lambda h: 3 // h.argmax().item(),
        lambda h: h * max(h.argmax().item(), 0.5),
        lambda h: {1: h}.get(h.argmax().item()),
        lambda h: complex(h.sum()),
    ],
)
def test_the_value_of_what_is_read_is_not_there(read):
    model = nn.Linear(4, 4)
    leaves, names = [TensorLeaf((3, 4), torch.float32)], ModelState(model).canonical_names
    with pytest.raises(CaptureError, match=r"depends on a tensor's value in Python at .*number.py"):
        capture_step(ToCapture(lambda leaves: read(model(leaves[0])), model, leaves, names))
