import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpxla.comm.packing import ALIGNMENT_BYTES, as_bytes, describe, layout, pack, unpack

pytestmark = pytest.mark.unit

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int64,
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.float8_e4m3fn,
]


def random_tensor(shape, dtype):
    return torch.randint(0, 2, shape).to(dtype)


@st.composite
def tensors(draw):
    dtypes = draw(st.lists(st.sampled_from(DTYPES), min_size=1, max_size=5))
    shapes = [tuple(draw(st.lists(st.integers(0, 5), max_size=3))) for _ in dtypes]
    return [random_tensor(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]


@settings(deadline=None)
@given(tensors())
def test_tensors_survive(originals):
    buffer = pack(originals)
    assert buffer.dtype == torch.uint8
    assert buffer.numel() == layout(originals).num_bytes
    restored = unpack(buffer, originals)
    for original, copy in zip(originals, restored, strict=True):
        assert copy.dtype == original.dtype
        assert copy.shape == original.shape
        assert torch.equal(as_bytes(copy), as_bytes(original))
        assert copy.numel() == 0 or copy.data_ptr() % ALIGNMENT_BYTES == 0


def test_layout_is_aligned_and_dense():
    specs = [torch.empty(3), torch.empty((), dtype=torch.bool), torch.empty(0), torch.empty(20)]
    assert layout(specs).offsets == (0, 64, 128, 128)
    assert layout(specs).num_bytes == 128 + 80


def test_no_tensors_are_no_bytes():
    assert pack([]).numel() == 0
    assert unpack(pack([]), []) == []


def test_unpacked_tensors_share_the_buffer():
    buffer = pack([torch.zeros(2), torch.zeros(2)])
    first, second = unpack(buffer, [torch.zeros(2), torch.zeros(2)])
    buffer[64] = 255
    assert torch.equal(first, torch.zeros(2))
    assert not torch.equal(second, torch.zeros(2))


def test_single_contiguous_tensor_is_not_copied():
    tensor = torch.arange(6.0)
    assert pack([tensor]).data_ptr() == tensor.data_ptr()
    assert torch.equal(
        unpack(pack([tensor.view(2, 3).T]), [torch.empty(3, 2)])[0], tensor.view(2, 3).T
    )


def test_padding_is_zero_so_that_equal_tensors_give_equal_bytes():
    torch.empty(1 << 16).fill_(7)
    packed = pack([torch.ones(1), torch.ones(1)])
    assert packed[4:64].count_nonzero() == 0


def test_gradients_and_conjugates_are_resolved():
    weight = torch.nn.Parameter(torch.ones(2))
    assert not pack([weight, weight]).requires_grad
    conjugate = torch.tensor([1 + 2j]).conj()
    assert unpack(pack([conjugate]), [conjugate])[0].item() == 1 - 2j


def test_a_single_element_has_any_stride():
    one = torch.tensor(3.0).expand(1, 1)
    assert one.is_contiguous() and one.stride() == (0, 0)
    assert torch.equal(as_bytes(one).view(torch.float32), torch.tensor([3.0]))


def test_specs_in_words():
    specs = [torch.empty(4, 16), torch.empty((), dtype=torch.int64)]
    assert describe(specs) == "float32[4, 16], int64[]"
    assert layout(specs).digest != layout(specs[:1]).digest
    assert layout([torch.empty(2, 3)]).digest != layout([torch.empty(3, 2)]).digest


def test_buffer_of_another_size_is_a_bug():
    with pytest.raises(AssertionError, match=r"8 bytes for float32\[3\], 12 bytes"):
        unpack(torch.empty(8, dtype=torch.uint8), [torch.empty(3)])
