"""Floats that are inputs of a step compute as Python floats do."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mpxla.errors import CaptureError
from mpxla.graph.capture import NumberLeaf, TensorLeaf, capture_step, current_recorder
from mpxla.graph.number import Number
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
}
NEED_THE_VALUE = {
    "branch": lambda h, a: h * a if a > 0 else h,
    "truth": lambda h, a: h if a else -h,
    "dropout": lambda h, a: F.dropout(h, a),
    "math": lambda h, a: h * math.exp(a),
    "int": lambda h, a: h[: int(a)],
    "max": lambda h, a: h * max(a, 0.1),
    "text": lambda h, a: (h, f"{a:.2f}")[0],
    "tensor": lambda h, a: h * torch.tensor(a),
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
    return model, capture_step(step, model, leaves, ModelState(model).canonical_names)


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
