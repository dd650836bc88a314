"""A step function that is called inside a region of `torch.autocast`, and has float32 in it."""

import pytest
import torch
from torch import nn

import mpxla as smp
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks


class Island(nn.Module):
    """A layer that autocast makes bfloat16, and one that stays in float32."""

    def __init__(self):
        super().__init__()
        self.narrow, self.wide = nn.Linear(48, 48), nn.Linear(48, 48)

    def forward(self, x):
        y = self.narrow(x)
        with torch.autocast("cpu", enabled=False):
            return y, self.wide(y.float())


def train(stages):
    """Inputs, results of both layers, parameters, the gradient of the second where it is."""
    smp.init({"pipeline_parallel_degree": stages, "microbatches": 2})
    torch.manual_seed(0)
    raw = Island()
    before = {n: p.detach().clone() for n, p in raw.named_parameters()}
    model = smp.DistributedModel(raw)

    @smp.step
    def step(model, x):
        y, z = model(x)
        model.backward(z.sum())
        return y.detach(), z.detach()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, z = step(model, x := torch.randn(8, 48))
    y, z = (torch.cat([part.cpu() for part in v.outputs]) for v in (y, z))
    is_here = raw.wide.weight.device.type != "meta"
    return x, y, z, before, raw.wide.weight.grad.cpu() if is_here else None


@pytest.mark.parametrize(
    ("device", "stages"),
    [
        pytest.param("pjrt", 2, marks=pytest.mark.slow),
        pytest.param("torch_xla", 2, marks=pytest.mark.torch_xla),
        ("eager", 2),
        pytest.param("torch_xla", 1, marks=[pytest.mark.torch_xla, pytest.mark.slow]),
    ],
)
def test_float32_inside_stays_float32(device, stages):
    found = run_ranks(train, stages, stages, env={"MPXLA_DEVICE": device})
    for x, y, z, start, gradient in found:
        assert (y.dtype, z.dtype) == (torch.bfloat16, torch.float32)
        values = y.float()
        if device == "torch_xla" and stages == 1:
            # XLA leaves out the rounding of the sum, which it computes with in float32 next.
            operands = (v.bfloat16().float() for v in (x, start["narrow.weight"]))
            product = nn.functional.linear(*operands).bfloat16().float()
            values = product + start["narrow.bias"].bfloat16().float()
        expected = nn.functional.linear(values, start["wide.weight"], start["wide.bias"])
        torch.testing.assert_close(z, expected, rtol=1e-5, atol=1e-5)
        if gradient is not None:
            of_sums = values.sum(0).expand(48, 48) / 2  # the mean over microbatches
            torch.testing.assert_close(gradient, of_sums, rtol=1e-5, atol=1e-5)
    assert any(gradient is not None for *_, gradient in found)
