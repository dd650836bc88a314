"""Convolutions of jax's programs for the processor are products, with PyTorch's numbers."""

from types import FunctionType

import pytest
import torch
import torch.nn.functional as F

from mpxla.device.pjrt.backend import PjrtBackend
from mpxla.device.pjrt.lowering import make_lowering
from mpxla.stage.program import trace_program
from mpxla.stage.spec import TensorSpec
from mpxla.tests.programs import texts_of_programs

pytestmark = pytest.mark.unit

aten = torch.ops.aten


def derivative(gradient, image, weight):
    options = ([8], [2, 2], [1, 1], [1, 1], False, [0, 0], 1, [True, True, True])
    return list(aten.convolution_backward.default(gradient, image, weight, *options))


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (lambda x, w, b: [F.conv2d(x, w, b, 2, 1)], [(2, 3, 9, 8), (8, 3, 3, 3), (8,)]),
        (lambda x, w: [F.conv_transpose2d(x, w, stride=2)], [(2, 8, 5, 4), (8, 3, 2, 2)]),
        (derivative, [(2, 8, 5, 4), (2, 3, 9, 8), (8, 3, 3, 3)]),
    ],
    ids=["forward", "transposed", "backward"],
)
def test_products_in_the_place_of_convolutions(function, shapes):
    torch.manual_seed(0)
    given = [torch.randn(shape) for shape in shapes]
    backend, specs = PjrtBackend("cpu"), [TensorSpec.of(value) for value in given]
    graph = trace_program("layer", function, specs, backend.lowering)
    names = {node.target for node in graph.graph.nodes if node.op == "call_function"}
    assert not any(isinstance(name, FunctionType) for name in names), "ATen's operators only"
    with texts_of_programs() as texts:
        program = backend.compile("layer", graph, specs)
    assert "stablehlo." in texts[0] and "stablehlo.convolution" not in texts[0]
    found = backend.get(program(backend.put(given)))
    for value, expected in zip(found, function(*given), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-4)


def test_other_devices_keep_their_convolutions():
    specs = [TensorSpec((2, 3, 9, 8), torch.float32), TensorSpec((8, 3, 3, 3), torch.float32)]
    graph = trace_program("layer", lambda x, w: [F.conv2d(x, w)], specs, make_lowering(False))
    assert graph.graph.find_nodes(op="call_function", target=aten.convolution.default)
