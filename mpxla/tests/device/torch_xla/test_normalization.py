"""Layer norm in place of torch_xla's: values and derivatives of torch's own, with less kept."""

import math

import pytest
import torch
import torch.nn.functional as F

from mpxla.device.torch_xla.operators.normalization import layer_norm
from mpxla.tests.ranks.run import run_ranks
from mpxla.tests.stage.middle import middle_stage

CASES = [
    ((4, 6), (6,), "wb", torch.float32),
    ((2, 3, 5), (3, 5), "wb", torch.float64),
    ((2, 3, 5), (5,), "w", torch.float32),
    ((2, 3, 5), (5,), "b", torch.float32),
    ((7,), (7,), "wb", torch.float32),
    ((2, 3, 4), (4,), "", torch.bfloat16),
    ((3, 8), (8,), "wb", torch.bfloat16),
]


def derived(function, x, shape, weight, bias, grad):
    inputs = [v for v in (x, weight, bias) if v is not None and v.requires_grad]
    result = function(x, shape, weight, bias, 1e-3)
    return [result, *torch.autograd.grad(result, inputs, grad)]


@pytest.mark.unit
@pytest.mark.parametrize(("size", "shape", "affine", "dtype"), CASES)
@pytest.mark.parametrize("is_input_trained", [True, False])
def test_values_and_derivatives_are_those_of_torch(size, shape, affine, dtype, is_input_trained):
    if not (affine or is_input_trained):
        return
    torch.manual_seed(0)
    x = (3 * torch.randn(size) + 1).to(dtype).requires_grad_(is_input_trained)
    weight, bias = (
        torch.randn(shape).to(dtype).requires_grad_() if letter in affine else None
        for letter in "wb"
    )
    grad = torch.randn(size).to(dtype)
    found = derived(layer_norm, x, shape, weight, bias, grad)
    expected = derived(F.layer_norm, x, shape, weight, bias, grad)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 2e-5
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


class Norms(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(16)
        self.up = torch.nn.Linear(16, 16)

    def forward(self, x):
        return self.up(self.norm(x))


def saved_shapes():
    return [spec.shape for spec in middle_stage(Norms(), (32, 4, 16)).saved_specs]


@pytest.mark.ranks
def test_a_norm_before_a_product_keeps_no_normalized_input():
    (shapes,) = run_ranks(saved_shapes, 1)
    large = [shape for shape in shapes if math.prod(shape) == 32 * 4 * 16]
    assert len(large) == 1, "the product's factor; the norm's input is an argument of the stage"
    assert sum(map(math.prod, shapes)) == 32 * 4 * (16 + 2), "and mean and deviation"


class Statistics(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = torch.nn.Linear(4, 8)

    def forward(self, x):
        norms, means, rstds = torch.native_group_norm(
            self.enter(x), None, None, 4, 8, 1, 2, eps=1e-5
        )
        return (norms * torch.arange(8)).square().sum() + (means * rstds).sum()


def statistics_differ():
    from mpxla.tests.stages_by_hand import differences, run_in_stages, run_plainly

    torch.manual_seed(0)
    step = Statistics(), lambda model, batch: model(batch["x"]), {"x": torch.randn(4, 4)}
    return differences(run_plainly(*step), run_in_stages(*step, num_stages=1))


@pytest.mark.ranks
def test_statistics_of_group_norm_have_derivatives():
    assert run_ranks(statistics_differ, 1) == [""]
