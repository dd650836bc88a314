"""Tracing with the derivative gives what torch's own export of joint graphs gives."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch._functorch.aot_autograd import aot_export_joint_simple

from mpxla.device.torch_xla.lowering import make_lowering
from mpxla.device.torch_xla.operators.decompositions import DECOMPOSITIONS
from mpxla.stage import joint
from mpxla.stage.joint import trace_alone, trace_joint
from mpxla.stage.spec import TensorSpec

CPU = dataclasses.replace(make_lowering(True), device=torch.device("cpu"))
SQUARE = TensorSpec((4, 4), torch.float32)

pytestmark = pytest.mark.unit


def attention(x, w):
    heads = (x @ w).view(4, 2, 2).transpose(0, 1)
    return [F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).clone()]


FUNCTIONS = {
    "linear": lambda x, w: [F.gelu(F.linear(x, w))],
    "norm": lambda x, w: [F.layer_norm(x, (4,), w[0], w[1])],
    "attention": attention,
    "parts": lambda x, w: [x[1:3] * w[1:3], torch.cat([x, w]).softmax(0)],
    "used_twice": lambda x, w: [x * w + x.exp(), (x - w).square().mean()],
    "batch_norm": lambda x, w: [F.batch_norm(x, None, None, w[0], w[1], training=True)],
}


def values(module, *arguments):
    return [v for v in torch.utils._pytree.tree_leaves(module(*arguments)) if v is not None]


def operators(module):
    module.graph.eliminate_dead_code()
    targets = [n.target for n in module.graph.nodes if n.op == "call_function"]
    ignored = (torch.ops.aten.detach.default, torch.ops.aten._assert_tensor_metadata.default)
    return [t for t in targets if t not in ignored]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_graphs_are_those_of_torch(name):
    function = FUNCTIONS[name]
    generator = torch.Generator().manual_seed(0)
    arguments = [torch.randn(4, 4, generator=generator, requires_grad=True) for _ in range(2)]
    results = function(*arguments)
    seeds = [torch.randn(r.shape, generator=generator) for r in results]
    expected = torch.autograd.grad(results, arguments, seeds)
    traced = trace_joint(function, [SQUARE] * 2, (0, 1), [TensorSpec.of(r) for r in results], CPU)
    known = aot_export_joint_simple(
        function, arguments, trace_joint=True, decompositions=DECOMPOSITIONS
    )
    assert operators(traced) == operators(known)
    found = values(traced, arguments, seeds)
    torch.testing.assert_close(found, [*results, *expected])


def test_nodes_of_the_derivative_know_that_they_are():
    traced = trace_joint(lambda x: [x.exp() * 2], [SQUARE], (0,), [SQUARE], CPU)
    tags = {str(n.target): n.meta.get("partitioner_tag") for n in traced.graph.nodes}
    assert tags["aten.exp.default"] is None
    multiplications = [n for n in traced.graph.nodes if n.target is torch.ops.aten.mul.Tensor]
    assert [n.meta.get("partitioner_tag") for n in multiplications] == [None, *["is_backward"] * 2]


def test_results_and_arguments_without_gradient_get_none():
    def function(x, w):
        return [x.detach() * 2, x * w.detach()]

    traced = trace_joint(function, [SQUARE] * 2, (0,), [None, SQUARE], CPU)
    x, w, seed = (torch.randn(4, 4) for _ in range(3))
    results, gradients = traced([x, w], [seed])
    torch.testing.assert_close(results, [x * 2, x * w])
    assert gradients[1] is None
    torch.testing.assert_close(gradients[0], seed * w)


def test_result_that_does_not_depend_on_an_argument_keeps_the_places_of_the_others():
    traced = trace_joint(lambda x, w: [w + 1, x * w], [SQUARE] * 2, (0,), [SQUARE, SQUARE], CPU)
    x, w, unused, seed = (torch.randn(4, 4) for _ in range(4))
    _, gradients = traced([x, w], [unused, seed])
    torch.testing.assert_close(gradients[0], seed * w)


def half_in_place(x):
    changed = x * 3
    changed[:2].sub_(1)  # through a view
    return [changed.square().sum()]


@pytest.mark.parametrize(
    "function, is_traced_twice",
    [
        pytest.param(lambda x: [x.norm()], False, id="norm"),
        pytest.param(lambda x: [F.silu(x).sum()], False, id="silu"),
        pytest.param(lambda x: [x.max(1).values.sum()], False, id="max"),
        pytest.param(half_in_place, True, id="view"),
    ],
)
def test_derivative_with_mutations_is_made_functional(function, is_traced_twice, monkeypatch):
    calls = []
    known = joint._trace_functional
    monkeypatch.setattr(joint, "_trace_functional", lambda *a: calls.append(a) or known(*a))
    scalar = TensorSpec((), torch.float32)
    traced = trace_joint(function, [SQUARE], (0,), [scalar], CPU)
    assert bool(calls) == is_traced_twice
    schemas = [t._schema for t in operators(traced) if isinstance(t, torch._ops.OpOverload)]
    assert not any(schema.is_mutable for schema in schemas)
    x = torch.randn(4, 4, requires_grad=True)
    (expected,) = torch.autograd.grad(function(x)[0], x)
    torch.testing.assert_close(values(traced, [x.detach()], [torch.ones(())])[1], expected)


def test_without_derivative():
    traced = trace_alone(lambda x, w: [(x @ w).relu()], [SQUARE] * 2, CPU)
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    torch.testing.assert_close(traced(x, w), [(x @ w).relu()])
    assert operators(traced) == [torch.ops.aten.mm.default, torch.ops.aten.relu.default]
