"""Autocast regions in captured steps: dtypes are those of plain PyTorch on the region's device."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mpxla.errors import CaptureError
from mpxla.graph.capture.step import TensorLeaf, ToCapture, capture_step

pytestmark = pytest.mark.unit

X = TensorLeaf((4, 8), torch.float32)


class Scaled(torch.autograd.Function):
    """Computes in float32 wherever it is called, as users write it for CUDA."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
    def forward(ctx, x):
        return x.exp() @ torch.ones(8, 8, device=x.device)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx, grad):
        return grad


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)


def mixed(kind, around):
    """Types of what a step computes, one after the other."""

    def run(model, x):
        with torch.autocast(kind, dtype=torch.float16) if not around else contextlib.nullcontext():
            y = model.linear(x)
            values = [y, F.softmax(y, -1), model.norm(y), y.sum(), F.relu(y), y + x, y.exp()]
            values += [torch.cat([y, x]), F.mse_loss(y, x), F.gelu(y), torch.atan2(y, x)]
            with torch.autocast(kind, enabled=False):
                values += [F.linear(x, model.linear.weight), F.softmax(y, -1)]
                with torch.autocast(kind, dtype=torch.bfloat16):
                    values += [x @ x.T, F.softmax(y, -1, dtype=torch.float16)]
            values += [F.scaled_dot_product_attention(y[None, None], y[None, None], y[None, None])]
            if kind == "cuda":
                values += [Scaled.apply(y)]
            return values

    return run


def set_autocast(kind, is_enabled, dtype):
    torch.set_autocast_enabled(kind, is_enabled)
    torch.set_autocast_dtype(kind, dtype)


def captured(function, kind=None):
    model, seen = Net(), []

    def step(leaves):
        values = function(model, leaves[0])
        seen[:] = [value.dtype for value in values]
        return values

    names = {name: name for name, _ in model.named_parameters()}
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    try:
        if kind:
            set_autocast(kind, True, torch.float16)
        graph = capture_step(ToCapture(step, model, [X], names))
    finally:
        set_autocast("cuda", *before)
    (output,) = [node for node in graph.graph.nodes if node.op == "output"]
    in_graph = [node.meta["val"].dtype for node in output.args[0]]
    return seen, in_graph


HALF, WIDE = torch.float16, torch.float32
ON_CUDA = [
    *(HALF, WIDE, WIDE, WIDE, HALF, WIDE, WIDE, WIDE, WIDE, HALF, WIDE),
    *(WIDE, HALF, torch.bfloat16, HALF, HALF, WIDE),
]
"""By the lists in PyTorch's documentation, which another test compares with its kernels."""


@pytest.mark.parametrize("around", [False, True], ids=["inside", "around"])
def test_types_are_those_of_cuda(around):
    found = captured(mixed("cuda", around), "cuda" if around else None)
    assert found == (ON_CUDA, ON_CUDA)


def test_types_are_those_of_cpu():
    expected = [value.dtype for value in mixed("cpu", False)(Net(), torch.zeros(4, 8))]
    assert captured(mixed("cpu", False)) == (expected, expected)
    assert expected != ON_CUDA[:-1]  # the lists differ: none can stand for the other


def test_a_region_within_a_region_of_another_kind_follows_its_own_list():
    def run(model, x):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            y = model.linear(x)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                inner = F.softmax(y, -1)
            return [inner, F.softmax(y, -1)]

    expected = [torch.bfloat16, torch.float32]
    assert captured(run) == (expected, expected)


def test_what_torch_refuses_is_refused():
    def run(model, x):
        with torch.autocast("cuda", dtype=torch.float16):
            return [F.binary_cross_entropy(model.linear(x).sigmoid(), x)]

    with pytest.raises(CaptureError, match=r"binary_cross_entropy is called under torch\.autocast"):
        captured(run)


def test_everything_is_undone():
    before = torch.autocast.__init__, torch.autocast.__enter__, torch.autocast.__exit__
    captured(mixed("cuda", False))
    assert before == (torch.autocast.__init__, torch.autocast.__enter__, torch.autocast.__exit__)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = F.linear(torch.zeros(2, 2), torch.zeros(2, 2))
        assert (y.dtype, F.softmax(y, -1).dtype) == (torch.bfloat16, torch.bfloat16)
    assert not torch.is_autocast_enabled("cpu")
