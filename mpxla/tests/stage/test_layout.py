"""Layouts for speed: what is transposed, and that values stay."""

import pytest
import torch
from torch import fx

from mpxla.stage.layout import transpose, transpose_gradients, transpose_weights, transposed
from mpxla.stage.spec import TensorSpec

pytestmark = pytest.mark.unit

aten = torch.ops.aten


def graph_of(build, *values):
    """A graph module whose arguments have the shapes of the values; `build` gives its results."""
    graph = fx.Graph()
    holders = []
    for number, value in enumerate(values):
        holders.append(graph.placeholder(f"argument_{number}"))
        holders[-1].meta["val"] = value

    def call(target, *arguments):
        node = graph.call_function(target, arguments)
        node.meta["val"] = target(*fx.node.map_arg(arguments, lambda n: n.meta["val"]))
        return node

    graph.output(tuple(build(call, *holders)))
    return fx.GraphModule(torch.nn.Module(), graph)


def linear_layers(call, first, bias, second, x):
    """One weight that two products read, one that is also read as it is."""
    turned = call(aten.t.default, first)
    hidden = call(aten.addmm.default, bias, x, turned)
    again = call(aten.mm.default, x, turned)
    view = call(aten.t.default, second)
    return [call(aten.mm.default, hidden, view), again, call(aten.sum.default, view), hidden]


def test_weights_of_products_become_arguments():
    values = [torch.randn(5, 3), torch.randn(5), torch.randn(2, 5), torch.randn(4, 3)]
    module = graph_of(linear_layers, *values)
    expected = module(*values)
    assert transpose_weights(module, weights=range(3)) == (0, 2)
    turned = transpose(values[0], values[2])
    assert all(value.is_contiguous() for value in turned)
    for a, b in zip(module(*values, *turned), expected, strict=True):
        torch.testing.assert_close(a, b)
    # The products read the new arguments, and nothing else does.
    changed = module(*values, *(2 * value for value in turned))
    torch.testing.assert_close(changed[1], 2 * expected[1])
    assert torch.equal(changed[2], expected[2])


def test_only_parameters_are_prepared():
    values = [torch.randn(5, 3), torch.randn(5), torch.randn(2, 5), torch.randn(4, 3)]
    assert transpose_weights(graph_of(linear_layers, *values), weights=range(2)) == (0,)
    assert transpose_weights(graph_of(lambda call, x: [x], values[0]), weights=range(1)) == ()


def gradients(call, dy, x):
    tall = call(aten.mm.default, call(aten.t.default, dy), x)
    wide = call(aten.mm.default, call(aten.t.default, x), dy)
    used = call(aten.mm.default, call(aten.t.default, dy), x)
    return [tall, None, wide, used, call(aten.neg.default, used)]


def test_tall_gradients_come_transposed():
    dy, x = torch.randn(4, 6), torch.randn(4, 2)
    module = graph_of(gradients, dy, x)
    tall, _, wide, used, negative = module(dy, x)
    assert transpose_gradients(module, [0, 1, 2, 3]) == (0,)
    results = module(dy, x)
    torch.testing.assert_close(results[0], tall.t())
    assert results[1] is None
    for a, b in zip(results[2:], (wide, used, negative), strict=True):
        assert torch.equal(a, b)


def test_spec_of_a_transpose():
    spec = TensorSpec((3, 5), torch.float32)
    assert transposed(spec) == TensorSpec((5, 3), torch.float32)
