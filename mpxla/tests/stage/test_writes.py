"""Writes into new tensors become results of their own."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from mpxla.stage.writes import replace_writes

pytestmark = pytest.mark.unit

aten = torch.ops.aten


def traced(function, x):
    return make_fx(function, tracing_mode="fake")(x)


def targets(module):
    return [n.target for n in module.graph.nodes if n.op == "call_function"]


def read_before_and_after(x):
    y = x * 2
    before = y + 1
    y.fill_(3).sub_(x)
    between = y * 5
    y.mul_(x)
    return before, between, y


def test_readers_see_the_value_of_their_time():
    x = torch.randn(4)
    module = traced(read_before_and_after, x)
    assert replace_writes(module, ())
    assert not any(target._schema.is_mutable for target in targets(module))
    for found, expected in zip(module(x), read_before_and_after(x), strict=True):
        torch.testing.assert_close(found, expected)


def power(x):
    y = x.abs() + 1
    y.pow_(0.5).pow_(x)  # operators whose overloads have other names than those that do not write
    return y


def test_an_overload_of_another_name():
    x = torch.randn(4)
    module = traced(power, x)
    assert replace_writes(module, ())
    assert aten.pow.Tensor_Scalar in targets(module)
    torch.testing.assert_close(module(x), power(x))


def copied(x):
    y = torch.empty_like(x)
    y.copy_(x + 1)
    return y.exp()


def through_a_view(x):
    y = x * 2
    y[0].fill_(1)
    return y


def seen_through_a_view(x):
    y = x * 2
    row = y[0]
    y.mul_(3)
    return row + 1


def of_an_argument(x):
    return x.mul_(2) + 1


def of_another_dtype(x):
    y = (x > 0).to(torch.float16)
    y.mul_(x)  # stays in 16 bits
    return y


def with_a_result(x):
    y = x * 2
    torch.add(x, 1, out=y)
    return y


@pytest.mark.parametrize(
    "function",
    [through_a_view, seen_through_a_view, of_an_argument, of_another_dtype, with_a_result],
)
def test_what_others_may_see_is_left_alone(function):
    assert not replace_writes(traced(function, torch.randn(4, 4)), ())


def test_operators_that_are_to_be_decomposed_do_not_come_in():
    x = torch.randn(4)
    assert not replace_writes(traced(copied, x), {aten.copy.default})
    module = traced(copied, x)
    assert replace_writes(module, ())
    torch.testing.assert_close(module(x), copied(x))
