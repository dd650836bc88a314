"""What travels together, and how it is packed."""

import pytest
import torch

from mpxla.parallel.gradients.buckets import Bucket, fill_buckets
from mpxla.stage.spec import TensorSpec
from mpxla.tests.backends import backend_here
from mpxla.tests.ranks.run import run_ranks

F32, F64 = torch.float32, torch.float64


def names_of(specs, capacity_bytes):
    buckets = fill_buckets(specs, (0,), capacity_bytes)
    assert all({spec.dtype for spec in b.specs} == {b.dtype} for b in buckets)
    assert [[specs[name] for name in b.names] for b in buckets] == [list(b.specs) for b in buckets]
    return [list(bucket.names) for bucket in buckets]


def floats(**sizes):
    return {name: TensorSpec((size,), F32) for name, size in sizes.items()}


@pytest.mark.unit
def test_buckets_hold_up_to_their_capacity():
    specs = floats(a=1, b=1, c=1, d=1)
    assert names_of(specs, 8) == [["a", "b"], ["c", "d"]]
    assert names_of(specs, 11) == [["a", "b"], ["c", "d"]]
    assert names_of(specs, 100) == [["a", "b", "c", "d"]]
    assert names_of({}, 8) == []


@pytest.mark.unit
def test_a_tensor_above_the_capacity_has_its_own_bucket():
    specs = floats(a=1, big=12, c=1, d=1)
    assert names_of(specs, 8) == [["a"], ["big"], ["c", "d"]]
    assert names_of(specs, 0) == [["a"], ["big"], ["c"], ["d"]]


@pytest.mark.unit
def test_buckets_hold_one_dtype():
    specs = {
        n: TensorSpec((4 // t.itemsize * 2,), t)
        for n, t in zip("aibjc", (F32, F64) * 2 + (F32,), strict=True)
    }
    assert names_of(specs, 16) == [["a", "b"], ["i", "j"], ["c"]]


@pytest.mark.unit
def test_a_bucket_is_split_into_views():
    bucket = Bucket(("a", "b"), (TensorSpec((2, 2), F32), TensorSpec((), F32)), (0,), parts=4)
    assert bucket.sizes == (4, 1)
    assert bucket.num_elements == 8, "padded to a multiple of 4"
    flat = torch.arange(8.0)
    views = bucket.split(flat)
    assert views["a"].tolist() == [[0, 1], [2, 3]]
    assert views["b"].item() == 4
    flat[4] = 9
    assert views["b"].item() == 9


def pack_on_the_device():
    from mpxla.parallel.gradients.buckets import Packer

    backend = backend_here()
    specs = (TensorSpec((2,), F32), TensorSpec((1, 3), F32), TensorSpec((2,), F32))
    bucket = Bucket(("a", "b", "c"), specs, (0,), parts=4)
    b = backend.put([torch.tensor([[1.0, 2.0, 3.0]])])
    found = [Packer(bucket, ["b"], F32, backend)(b, 0.5)]
    packer = Packer(bucket, ["a", "b", "c"], torch.bfloat16, backend)
    tensors = backend.put([torch.ones(2), torch.ones(1, 3), torch.full((2,), 3.0)])
    before = backend.num_compilations
    found += [packer(tensors, scale) for scale in (1.0, 0.5)]
    return backend.get(found), backend.num_compilations - before


@pytest.mark.ranks
def test_packing_scales_pads_and_fills_with_zeros():
    ((alone, full, half), num_compiled) = run_ranks(pack_on_the_device, 1)[0]
    assert alone.tolist() == [0, 0, 0.5, 1, 1.5, 0, 0, 0]
    assert full.dtype is torch.bfloat16
    assert full.tolist() == [1, 1, 1, 1, 1, 3, 3, 0]
    assert half.tolist() == [0.5, 0.5, 0.5, 0.5, 0.5, 1.5, 1.5, 0]
    assert num_compiled == 0, "the scale is an argument"
