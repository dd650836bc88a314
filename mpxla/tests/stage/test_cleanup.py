"""Equal subexpressions are computed once, random ones as often as they are written."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from mpxla.stage.cleanup import simplify

pytestmark = pytest.mark.unit


def count(function, target):
    module = simplify(make_fx(function)(torch.ones(3)))
    return sum(node.target is target for node in module.graph.nodes)


def test_equal_calls_become_one():
    assert count(lambda x: x.exp() + x.exp() * 2, torch.ops.aten.exp.default) == 1


@pytest.mark.parametrize(
    "target",
    [
        torch.ops.aten.exponential.default,
        torch.ops.aten.uniform.default,
        torch.ops.aten.normal_functional.default,
        torch.ops.aten.bernoulli.p,
    ],
)
def test_random_calls_stay_apart(target):
    def draw(x):
        arguments = (x, 0.5) if target is torch.ops.aten.bernoulli.p else (x,)
        return target(*arguments) - target(*arguments)

    assert count(draw, target) == 2


def test_numbers_that_compare_equal_but_differ_stay_apart():
    mul, add = torch.ops.aten.mul.Tensor, torch.ops.aten.add.Tensor
    assert count(lambda x: mul(x, 0.0) - mul(x, -0.0), mul) == 2
    assert count(lambda x: add(x, 1) - add(x, 1.0), add) == 2


def test_copies_and_double_transposes_go():
    module = simplify(make_fx(lambda x: x[None].t().clone().t().detach() + 1)(torch.ones(3)))
    left = [node.target for node in module.graph.nodes if node.op == "call_function"]
    assert left == [torch.ops.aten.unsqueeze.default, torch.ops.aten.add.Tensor]
