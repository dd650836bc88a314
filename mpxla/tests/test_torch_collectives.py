"""After `smp.init`, torch's collectives take tensors of the device; in a step, replicas have some.

Every function above a test runs on every rank and returns what it saw.
"""

import re
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import nn
from torch.distributed import all_reduce as all_reduce_by_name

from mpxla.errors import CaptureError
from mpxla.graph.capture.collectives import Replicas
from mpxla.tests.backends import on_device
from mpxla.tests.clients import REPLICAS, data, raw_model, refused_in_a_step, start
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks


def collectives_of_torch():
    smp = start(pipeline_parallel_degree=1, ddp=True)
    rank, seen = smp.rank(), {}
    value = on_device(1 + rank)
    dist.all_reduce(value)
    all_reduce_by_name(value)
    seen["all_reduce"] = value.item()
    dist.all_reduce(value, op=dist.ReduceOp.MAX, async_op=True).wait()
    seen["max"] = value.item()
    parts = [on_device(0) for _ in range(2)]
    dist.all_gather(parts, on_device(rank))
    seen["all_gather"] = [p.item() for p in parts]
    whole = on_device(0, 0)
    dist.all_gather_into_tensor(whole, on_device(5 + rank))
    seen["all_gather_into_tensor"] = whole.tolist()
    own = on_device(0)
    dist.reduce_scatter_tensor(own, on_device(1 + rank, 3))
    seen["reduce_scatter_tensor"] = own.item()
    sent = on_device(7 if rank == 0 else 0)
    dist.broadcast(sent, src=0)
    seen["broadcast"] = sent.item()
    received = on_device(0)
    pending = dist.irecv(received, 1 - rank)
    dist.isend(on_device(10 + rank), 1 - rank).wait()
    pending.wait()
    seen["irecv"] = received.item()
    exchanged = on_device(0, 0)
    dist.all_to_all_single(exchanged, on_device(2 * rank, 2 * rank + 1))
    seen["all_to_all_single"] = exchanged.tolist()
    rows = [on_device(0) for _ in range(2)] if rank == 0 else None
    dist.gather(on_device(rank + 3), rows, dst=0)
    seen["gather"] = [r.item() for r in rows] if rows else []
    functional = dist._functional_collectives.all_reduce(on_device(1 + rank), "sum", [0, 1])
    seen["functional"] = functional.item()
    return seen


def test_collectives_of_torch_take_device_tensors():
    for rank, seen in enumerate(run_ranks(collectives_of_torch, 2)):
        assert seen == {
            "all_reduce": 6.0,
            "max": 6.0,
            "all_gather": [0.0, 1.0],
            "all_gather_into_tensor": [5.0, 6.0],
            "reduce_scatter_tensor": [3.0, 6.0][rank],
            "broadcast": 7.0,
            "irecv": [11.0, 10.0][rank],
            "all_to_all_single": [[0.0, 2.0], [1.0, 3.0]][rank],
            "gather": [3.0, 4.0] if rank == 0 else [],
            "functional": 3.0,
        }


class OwnGather(torch.autograd.Function):
    """Gathers in its forward and sums in its backward, as scripts do."""

    @staticmethod
    def forward(ctx, value):
        found = [torch.empty_like(value) for _ in range(dist.get_world_size())]
        dist.all_gather(found, value)
        return tuple(found)

    @staticmethod
    def backward(ctx, *gradients):
        total = torch.stack(gradients)
        dist.all_reduce(total)
        return total[dist.get_rank()]


class Contrast(nn.Module):
    """Every sample against those of all replicas, and numbers of all samples that are tracked."""

    center: torch.Tensor
    count: torch.Tensor

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.layer, self.norm = nn.Linear(5, 6), nn.BatchNorm1d(6)
        self.register_buffer("center", torch.zeros(6))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        h = self.norm(torch.tanh(self.layer(x)))
        with torch.no_grad():
            mean, largest, number = h.mean(0), h.amax(0), (x[:, 0] > 0).sum()
            dist.all_reduce(mean, op=dist.ReduceOp.AVG if self.is_captured else dist.ReduceOp.SUM)
            self.center.lerp_(mean if self.is_captured else mean / 2, 0.1)
            dist.all_reduce(largest, dist.ReduceOp.MAX, async_op=True).wait()
            dist.all_reduce(number)
            self.count += number
            everything = h.new_zeros(2 * len(h), 6)
            dist.all_gather_into_tensor(everything, h.detach())
        own, torchs = torch.cat(OwnGather.apply(h)), torch.cat(torch.distributed.nn.all_gather(h))
        loss = (h @ own.T + 0.5 * h @ torchs.T.square()).logsumexp(1).mean()
        total = torch.distributed.nn.all_reduce(h.clone()) + everything.sum(0)
        doubled = h * 2
        dist.all_reduce(doubled)  # has the gradient that it had before
        return loss + (h - self.center - largest).square().mean() + (total * doubled).mean()


def samples(index, rank):
    generator = torch.Generator().manual_seed(2 * index + rank)
    return torch.randn(4, 5, generator=generator, dtype=torch.float64)


def trained_with_others():
    smp = start(**REPLICAS)
    rank, plain = smp.rank(), Contrast().double()
    plain.is_captured = False  # gloo has no averages
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    model = Contrast().double()
    model.is_captured = True
    model = smp.DistributedModel(model)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def step(model, x):
        loss = model(x)
        model.backward(loss)
        return loss

    losses, expected = [], []
    for index in range(3):
        x = samples(index, rank)
        optimizer.zero_grad()
        losses.append(step(model, x).reduce_mean().item())
        optimizer.step()
        plain_optimizer.zero_grad()
        expected.append(0.0)
        for half in x.chunk(2):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # it would rather not be differentiated in place
                loss = plain(half)
            (loss / 2).backward()
            expected[-1] += loss.item() / 2
        for parameter in plain.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= 2
        plain_optimizer.step()
        for buffer in plain.buffers():  # batch norm has the statistics of its own samples
            dist.broadcast(buffer, 0)
    return losses, expected, dict(model.state_dict()), dict(plain.state_dict())


def test_replicas_exchange_in_a_step_what_they_would_in_processes_of_torch():
    for losses, expected, state, plain in run_ranks(trained_with_others, 2):
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(state, plain, rtol=1e-5, atol=1e-5)


def collective_in_a_step():
    def reduce(loss):
        whole = torch.stack([loss, loss])
        dist.reduce_scatter_tensor(loss, whole)
        return loss

    return refused_in_a_step(reduce)


def test_another_collective_inside_a_step_is_refused():
    text = r"reduce_scatter_tensor is a collective inside a step .*test_torch_collectives.py:\d+: "
    for found in run_ranks(collective_in_a_step, 2):
        assert re.search(f"{text}dist.", found) and "alone may be there: all_reduce" in found


@pytest.mark.unit
def test_a_collective_with_other_members_than_the_replicas_is_refused(monkeypatch):
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: [0, 1, 2, 3])
    with pytest.raises(
        CaptureError, match=r"between the ranks \[0, 1, 2, 3\].* ranks \[0, 2\]: pass"
    ):
        Replicas([0, 2]).call(dist.all_reduce, (torch.ones(1),), {})


def collective_of_one_rank():
    smp = start(pipeline_parallel_degree=1)
    model = smp.DistributedModel(raw_model())

    @smp.step
    def step(model, x):
        total = model(x).detach().sum()
        if dist.is_initialized():
            dist.all_reduce(total)
        return total

    found = sum(total.item() for total in step(model, data()[0]).outputs)
    return dist.is_initialized(), found, raw_model()(data()[0]).sum().item()


@pytest.mark.slow
def test_a_collective_of_one_rank_changes_nothing():
    ((is_initialized, found, expected),) = run_ranks(collective_of_one_rank, 1)
    assert is_initialized and found == pytest.approx(expected, rel=1e-5)
