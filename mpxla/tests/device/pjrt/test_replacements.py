"""What stands for an operator on jax gives what that gives, and has its derivative."""

import pytest
import torch

from mpxla.device.pjrt.replacements import REPLACEMENTS

pytestmark = pytest.mark.unit

put = REPLACEMENTS[torch.ops.aten.index_put.default]
rows = torch.tensor([True, False, True, True])


def random(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).requires_grad_()


def by_torch(tensor, where, values, accumulate):
    return torch.ops.aten.index_put.default(tensor, where, values, accumulate)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(
    "where, shape",
    [
        ([rows], (3, 3)),
        ([rows], (1, 3)),
        ([rows], (3,)),
        ([None, rows[:3]], (4, 2)),
        ([None, rows[:3]], (2,)),
        ([torch.arange(12).reshape(4, 3) % 5 > 1], (6,)),
        ([torch.arange(12).reshape(4, 3) % 5 > 1], ()),
        ([torch.tensor([2, 0])], (2, 3)),
    ],
    ids=str,
)
def test_values_for_the_places_of_a_mask(where, shape, accumulate):
    tensor, values = random(4, 3), random(*shape)
    written, expected = (f(tensor, where, values, accumulate) for f in (put, by_torch))
    torch.testing.assert_close(written, expected)
    slopes = torch.arange(12.0).reshape(4, 3)
    found, wanted = (
        torch.autograd.grad(result, (tensor, values), slopes) for result in (written, expected)
    )
    torch.testing.assert_close(found, wanted)
    if where[-1].dtype is torch.bool:
        assert "IndexPut" not in type(written.grad_fn).__name__, "it would look for places"


def test_more_or_fewer_values_than_places_are_no_number():
    for count in (2, 4):
        assert put(random(4, 3), [rows], random(count, 3))[rows].isnan().all()
