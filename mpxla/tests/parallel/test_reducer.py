"""Gradients and start values over replicas."""

import pytest
import torch
from torch import nn

import mpxla as smp
from mpxla.comm.loopback import LoopbackTransport
from mpxla.parallel import reducer as reducer_module
from mpxla.parallel.reducer import GradientReducer, fill_buckets
from mpxla.parallel.state import ModelState
from mpxla.testing import run_ranks

F32, I64 = torch.float32, torch.int64


@pytest.mark.unit
def test_buckets_hold_up_to_their_capacity():
    sizes = {"a": (F32, 4), "b": (F32, 4), "c": (F32, 4), "d": (F32, 4)}
    assert fill_buckets(sizes, 8) == [["a", "b"], ["c", "d"]]
    assert fill_buckets(sizes, 11) == [["a", "b"], ["c", "d"]]
    assert fill_buckets(sizes, 100) == [["a", "b", "c", "d"]]
    assert fill_buckets({}, 8) == []


@pytest.mark.unit
def test_a_tensor_above_the_capacity_has_its_own_bucket():
    sizes = {"a": (F32, 4), "big": (F32, 50), "c": (F32, 4), "d": (F32, 4)}
    assert fill_buckets(sizes, 8) == [["a"], ["big"], ["c", "d"]]
    assert fill_buckets(sizes, 0) == [["a"], ["big"], ["c"], ["d"]]


@pytest.mark.unit
def test_buckets_hold_one_dtype():
    sizes = {"a": (F32, 4), "i": (I64, 4), "b": (F32, 4), "j": (I64, 4), "c": (F32, 4)}
    assert fill_buckets(sizes, 8) == [["a", "b"], ["i", "j"], ["c"]]


def alone(passes):
    return GradientReducer(LoopbackTransport(), (0,), torch.device("cpu"), 25, passes)


@pytest.mark.unit
@pytest.mark.parametrize("passes", [1, 2, 3])
def test_one_replica_sums_until_gradients_are_cleared(passes):
    model = nn.Linear(2, 1, bias=False)
    state, reducer = ModelState(model), alone(passes)
    for number in (1.0, 2.0, 3.0):
        reducer.finish(state, {"weight": torch.full((1, 2), number)})
    assert model.weight.grad.tolist() == [[6, 6]]
    model.weight.grad = None
    reducer.finish(state, {"weight": torch.full((1, 2), 4.0)})
    assert model.weight.grad.tolist() == [[4, 4]]


@pytest.mark.unit
def test_parameters_without_gradient_are_left_alone():
    model = nn.Linear(2, 1)
    alone(1).finish(ModelState(model), {"bias": torch.ones(1)})
    assert model.weight.grad is None
    assert model.bias.grad.tolist() == [1]


class Buffered(nn.Module):
    """Initialized differently on every rank."""

    def __init__(self, rank):
        super().__init__()
        torch.manual_seed(rank)
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.norm = nn.BatchNorm1d(3)
        self.norm.running_mean += rank
        self.norm.num_batches_tracked += rank

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


@smp.step
def forward(model, x):
    return model(x)


@smp.step
def train(model, x):
    loss = model(x).sum()
    model.backward(loss)
    return loss


def start_values(degree):
    smp.init({"pipeline_parallel_degree": degree, "ddp": True})
    model = smp.DistributedModel(Buffered(smp.rank()))
    if degree == 2:
        model.eval()
        forward(model, torch.ones(2, 3))
    return model.state_dict()


@pytest.mark.ranks
def test_replicas_start_with_the_values_of_the_first():
    first, second = run_ranks(start_values, 2, 1)
    expected = Buffered(0).state_dict()
    assert list(first) == list(second) == list(expected)
    for name, value in expected.items():
        assert torch.equal(first[name], value), name
        assert torch.equal(second[name], value), name


@pytest.mark.ranks
def test_replicas_of_a_pipeline_start_alike():
    results = run_ranks(start_values, 4, 2)
    origins = (Buffered(0).state_dict(), Buffered(1).state_dict())
    for name, value in results[0].items():
        assert any(torch.equal(value, origin[name]) for origin in origins), name
        assert all(torch.equal(value, other[name]) for other in results[1:]), name


def reduce_in_small_buckets(bucket_cap_mb):
    """Counts messages, and gives every rank another batch."""
    smp.init({"ddp": True})
    raw = nn.ModuleList([nn.Linear(8, 8, bias=False) for _ in range(4)])
    torch.manual_seed(0)
    model = smp.DistributedModel(Stack(raw), bucket_cap_mb=bucket_cap_mb)
    transport = model._engine._session.transport
    counted, original = [], transport.all_reduce

    def all_reduce(tensor, ranks):
        counted.append(tensor.numel())
        return original(tensor, ranks)

    transport.all_reduce = all_reduce
    train(model, torch.full((2, 8), 1.0 + smp.rank()))
    transport.all_reduce = original
    return counted, {name: p.grad.cpu() for name, p in model.module.named_parameters()}


class Stack(nn.Module):
    """Every layer reads the input, so gradients are the sums of the input."""

    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        return torch.stack([layer(x) for layer in self.layers])


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("cap_bytes", "sizes"), [(25 << 20, [256]), (512, [128, 128]), (1, [64] * 4)]
)
def test_gradients_are_averaged_in_buckets(cap_bytes, sizes):
    for counted, gradients in run_ranks(reduce_in_small_buckets, 2, cap_bytes / 2**20):
        assert counted == sizes
        assert len(gradients) == 4
        for gradient in gradients.values():
            assert torch.equal(gradient, torch.full((8, 8), 3.0)), "two samples of 1, of 2: mean 3"


class Counting(LoopbackTransport):
    """A group of two whose other rank always has zeros."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def all_reduce(self, tensor, ranks):
        self.count += 1
        return super().all_reduce(tensor, (0,))


@pytest.mark.unit
def test_accumulating_replicas_reduce_in_the_last_pass_only(monkeypatch):
    monkeypatch.setattr(reducer_module, "to_device", lambda tensors, device: list(tensors))
    transport, model = Counting(), nn.Linear(2, 1, bias=False)
    reducer = GradientReducer(transport, (0, 1), torch.device("cpu"), 25, 3)
    state, seen = ModelState(model), []
    for number in (1.0, 2.0, 3.0, 8.0):
        reducer.finish(state, {"weight": torch.full((1, 2), number)})
        seen.append((model.weight.grad[0, 0].item(), transport.count))
        if len(seen) == 3:
            model.weight.grad = None
    assert seen == [(1, 0), (3, 0), (3, 1), (8, 1)], "the sum 6 is halved by the rank without any"
