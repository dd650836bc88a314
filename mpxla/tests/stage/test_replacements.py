"""What stands for an operator gives what that gives."""

import pytest
import torch

from mpxla.errors import LoweringError
from mpxla.stage.replacements import SHARED

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_a_weight_has_one_length_for_each_place_of_a_dimension_or_for_all(dim):
    direction = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    length = torch.norm_except_dim(direction, 2, dim) * 2
    written = SHARED[torch.ops.aten._weight_norm.default](direction, length, dim)
    torch.testing.assert_close(written, torch._weight_norm(direction, length, dim))


def test_a_write_to_a_diagonal_has_the_derivative_of_what_stays():
    tensor = torch.randn(3, 3, generator=torch.Generator().manual_seed(0), requires_grad=True)
    (expected,) = torch.autograd.grad((tensor * 1).fill_diagonal_(2.0).square().sum(), tensor)
    scatter = SHARED[torch.ops.aten.as_strided_scatter.default]
    source = torch.full((3,), 2.0, requires_grad=True)
    written = scatter(tensor, source, [3], [4], 0)
    found = torch.autograd.grad(written.square().sum(), (tensor, source))
    torch.testing.assert_close(found, (expected, torch.full((3,), 4.0)))
    own = torch.as_strided_scatter(tensor, source, [3], [4], 0)
    (wrong,) = torch.autograd.grad(own.square().sum(), tensor)
    assert not torch.allclose(wrong, expected), "PyTorch's own is right now: use it"


def test_a_mask_may_come_after_whole_dimensions():
    tensor = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    rows = torch.tensor([True, False, True])
    for where in ([None, rows], [tensor[:, :, 0] > 0], [None, None, tensor[0, 0] > 0]):
        written = SHARED[torch.ops.aten.index_put.default](tensor, where, torch.tensor(5.0))
        expected = tensor.detach().clone()
        expected[tuple(slice(None) if w is None else w for w in where)] = 5.0
        torch.testing.assert_close(written.detach(), expected)
        assert type(written.grad_fn).__name__ == "WhereBackward0", "no places are looked for"


@pytest.mark.parametrize("shape, dims", [((2, 3, 6), None), ((2, 6, 3), (1,)), ((6, 3, 2), (0,))])
def test_equations_of_tensors(shape, dims):
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(shape, generator=generator, requires_grad=True)
    right = torch.randn([size for size in shape if size != 6], generator=generator).requires_grad_()
    solved = SHARED[torch.ops.aten.linalg_tensorsolve.default](matrix, right, dims)
    expected = torch.linalg.tensorsolve(matrix, right, dims)
    torch.testing.assert_close(solved, expected, rtol=1e-4, atol=1e-5)
    found, wanted = (
        torch.autograd.grad(x.square().sum(), (matrix, right)) for x in (solved, expected)
    )
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


put = SHARED[torch.ops.aten.index_put.default]
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


def test_ranges_with_their_end():
    aten = torch.ops.aten
    for operator, args, named in (
        (aten.range.default, (1, 4), {}),
        (aten.range.step, (0.5, 4.2, 0.7), {"device": torch.device("cpu")}),
        (aten.range.step, (5, -2, -3), {"dtype": torch.int64}),
    ):
        found, expected = SHARED[operator](*args, **named), operator(*args, **named)
        torch.testing.assert_close(found, expected)


def test_views_by_strides_are_of_tensors_without_gaps():
    """Devices lay tensors out otherwise: torch_xla read a transposed one in another order."""
    tensor, operator = random(4, 3), torch.ops.aten.as_strided.default
    view = [2, 4], [3, 2], 1
    torch.testing.assert_close(SHARED[operator](tensor, *view), tensor.as_strided(*view))
    with pytest.raises(LoweringError, match=r"as_strided of .* call contiguous\(\) before it"):
        SHARED[operator](tensor.T, *view)
