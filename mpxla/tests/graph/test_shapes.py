"""Shapes that PyTorch's fake tensors get wrong are those of its kernels while a step is traced."""

import pytest
import torch
from torch import nn
from torch._decomp import decomposition_table
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensorMode

from mpxla.graph.capture.step import TensorLeaf, ToCapture, capture_step
from mpxla.graph.shapes import static_shapes, vector_norm
from mpxla.runtime.state import ModelState
from mpxla.tests.graph.capture.test_capture import run

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("shape", [(), (1,), (3,), (3, 1), (1, 3), (2, 1, 1)])
def test_norms_along_dims_of_one_element(shape):
    x = torch.randn(shape)
    dims = range(-max(1, x.dim()), max(1, x.dim()))
    for chosen in [[d] for d in dims] + [[-1, -2]] * (x.dim() > 1):
        for order, keepdim in ((2, False), (1, False), (torch.inf, False), (3.0, True)):
            expected = torch.linalg.vector_norm(x, order, chosen, keepdim)
            torch.testing.assert_close(vector_norm(x, order, chosen, keepdim), expected)
            with static_shapes(), FakeTensorMode() as mode:
                fake = torch.linalg.vector_norm(mode.from_tensor(x), order, chosen, keepdim)
            assert fake.shape == expected.shape


def test_a_norm_of_one_column_meets_a_vector():
    """The kernel gives [4]; with [4, 1] there would be 16 differences in silence."""
    model = nn.Linear(2, 1)
    leaves = TensorLeaf((4, 2), torch.float32), TensorLeaf((4,), torch.float32)

    def loss(h, y):
        return (h.norm(dim=-1) - y).square().mean()

    step = capture_step(
        ToCapture(
            lambda v: loss(model(v[0]), v[1]), model, leaves, ModelState(model).canonical_names
        )
    )
    x, y = torch.randn(4, 2), torch.rand(4)
    (found,) = run(step, model, [x, y])
    torch.testing.assert_close(found, loss(model(x), y).detach())
    norms = step.graph.find_nodes(
        op="call_function", target=torch.ops.aten.linalg_vector_norm.default
    )
    assert [n.meta["val"].shape for n in norms] == [(4,)]


def test_rules_are_taken_out_again():
    tables = fake_impls.op_implementations_dict, decomposition_table
    before = [dict(table) for table in tables]
    with static_shapes():
        assert [dict(table) for table in tables] != before
    assert [dict(table) for table in tables] == before
