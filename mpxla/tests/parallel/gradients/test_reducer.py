"""Gradients over replicas: values, buckets, when they start, what hooks and options change."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import mpxla as smp
from mpxla.errors import MpxlaError
from mpxla.stage.spec import TensorSpec
from mpxla.tests.backends import backend_here
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks


@smp.step
def train(model, x):
    loss = model(x).sum()
    model.backward(loss)
    return loss


class Stack(nn.Module):
    """Every layer reads the input, so gradients are the sums of the input."""

    def __init__(self, count=4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(count))

    def forward(self, x):
        return torch.stack([layer(x) for layer in self.layers])


def gradients_of(model):
    return {name: p.grad.cpu() for name, p in model.local_named_parameters()}


def counted(transport, name):
    """Records the calls of a transport's method."""
    calls, original = [], getattr(transport, name)

    def count(tensor, *rest, **named):
        calls.append(backend_here().spec(tensor))
        return original(tensor, *rest, **named)

    setattr(transport, name, count)
    return calls


def transport():
    from mpxla.session import current

    return current().transport


# Values and buckets.


def reduce_in_small_buckets(bucket_cap_mb, config, options):
    """Gives every rank another batch."""
    smp.init({"ddp": True, **config})
    model = smp.DistributedModel(Stack(), bucket_cap_mb=bucket_cap_mb, **options)
    calls = counted(transport(), "all_reduce")
    train(model, torch.full((2, 8), 1.0 + smp.rank()))
    return calls, gradients_of(model)


@pytest.mark.parametrize(
    ("cap_bytes", "sizes"), [(25 << 20, [256]), (512, [128, 128]), (1, [64] * 4)]
)
def test_gradients_are_averaged_in_buckets(cap_bytes, sizes):
    for calls, gradients in run_ranks(reduce_in_small_buckets, 2, cap_bytes / 2**20, {}, {}):
        assert calls == [TensorSpec((size,), torch.float32) for size in sizes]
        assert len(gradients) == 4
        for gradient in gradients.values():
            assert torch.equal(gradient, torch.full((8, 8), 3.0)), "two samples of 1, of 2: mean 3"


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_gradients_may_travel_in_16_bits(name):
    config = {"reduction_dtype": name}
    for calls, gradients in run_ranks(reduce_in_small_buckets, 2, 25, config, {}):
        assert calls == [TensorSpec((256,), getattr(torch, name))]
        for gradient in gradients.values():
            assert gradient.dtype is torch.float32
            assert torch.equal(gradient, torch.full((8, 8), 3.0))


def accumulate(passes):
    smp.init({"ddp": True})
    model = smp.DistributedModel(Stack(1), backward_passes_per_step=passes)
    calls = counted(transport(), "all_reduce")
    seen = []
    for number in (1.0, 2.0, 3.0, 8.0):
        train(model, torch.full((1, 8), number if smp.rank() == 0 else 0.0))
        seen.append((gradients_of(model)["layers.0.weight"][0, 0].item(), len(calls)))
        if len(seen) == 3:
            model.module.layers[0].weight.grad = None
    return seen


def test_accumulating_replicas_reduce_in_the_last_pass_only():
    first, second = run_ranks(accumulate, 2, 3)
    assert first == [(1, 0), (3, 0), (3, 1), (8, 1)], "the sum 6 is halved by the rank with zeros"
    assert second == [(0, 0), (0, 0), (3, 1), (0, 1)]


def test_without_passes_every_step_is_reduced_and_added():
    first, second = run_ranks(accumulate, 2, 1)
    assert first == second == [(0.5, 1), (1.5, 2), (3, 3), (4, 4)]


def test_one_replica_adds_up():
    assert run_ranks(accumulate, 1, 3) == [[(1, 0), (3, 0), (6, 0), (8, 0)]]


def sum_or_mean(config, is_averaged):
    """Two microbatches of two samples on every rank."""
    smp.init({"ddp": True, "microbatches": 2, **config})
    model = smp.DistributedModel(Stack(2), average_grads_across_microbatches=is_averaged)
    train(model, torch.full((4, 8), 1.0 + smp.rdp_rank()))
    return gradients_of(model)


@pytest.mark.parametrize(
    ("config", "mean"), [({}, 1.5), ({"pipeline_parallel_degree": 2, "pipeline": "simple"}, 1.0)]
)
@pytest.mark.parametrize("is_averaged", [True, False])
def test_gradients_are_means_or_sums_over_microbatches(config, mean, is_averaged):
    for gradients in run_ranks(sum_or_mean, 2, config, is_averaged):
        for gradient in gradients.values():
            expected = mean * 2 * (1 if is_averaged else 2)
            assert torch.equal(gradient, torch.full((8, 8), expected)), "always means over replicas"


# Overlap.


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


def order_of_events(is_overlapping):
    """Rank 0 owns stages 0 and 2: what it does after stage 2 is complete."""
    from mpxla.runtime.executor import Executor

    smp.init({"ddp": True, "pipeline_parallel_degree": 2, "microbatches": 2, **MANUAL})
    model = smp.DistributedModel(Sandwich(), overlapping_allreduce=is_overlapping)
    for index, layer in enumerate(model.module):
        smp.set_partition(layer, index % 2)
    events, original = [], Executor._run_backward

    def run_backward(self, action, step):
        events.append(f"B{action.stage}.{action.microbatch}")
        original(self, action, step)

    Executor._run_backward = run_backward
    reduce, link = transport().all_reduce, transport()
    link.all_reduce = lambda *terms, **named: events.append("reduce") or reduce(*terms, **named)
    train(model, torch.ones(4, 8))
    Executor._run_backward = original
    return events


MANUAL = {"auto_partition": False, "default_partition": 0, "pipeline": "simple"}


class Sandwich(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))


def test_a_stage_is_reduced_while_others_still_compute():
    results = run_ranks(order_of_events, 4, True)
    assert results[0] == results[2]
    assert results[0].index("reduce") < results[0].index("B0.1"), results[0]
    assert results[0].count("reduce") == 2
    assert results[1].count("reduce") == 1


def test_without_overlap_reductions_come_last():
    for events in run_ranks(order_of_events, 4, False):
        assert events.index("reduce") > max(i for i, e in enumerate(events) if e[0] == "B")


# Tied parameters.


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.enter, self.leave = nn.Linear(8, 8), nn.Linear(8, 8)
        self.leave.weight = self.enter.weight

    def forward(self, x):
        return self.leave(torch.tanh(self.enter(x)))


def square(model, x):
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


def square_of_a_part(model, x):
    """Reads the tied weight in its first place only."""
    loss = model.module.enter(x).square().mean()
    model.backward(loss)
    return loss


def train_whole_then_part():
    smp.init({"pipeline_parallel_degree": 2, **MANUAL})
    raw = Tied()
    model = smp.DistributedModel(raw)
    smp.set_partition(raw.leave, 1)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    for function in (square, square_of_a_part):
        optimizer.zero_grad()
        smp.step(function)(model, torch.ones(2, 8))
        optimizer.step()
    return {n: v.detach().cpu() for n, v in model.local_named_parameters()}


def test_copies_stay_equal_when_a_step_reads_only_one_of_them():
    first, second = run_ranks(train_whole_then_part, 2)
    model = Tied()
    for step in (lambda x: model(x), lambda x: model.enter(x)):
        model.zero_grad()
        step(torch.ones(2, 8)).square().mean().backward()
        torch.optim.SGD(model.parameters(), lr=0.5).step()
    torch.testing.assert_close(first["enter.weight"], model.enter.weight.detach())
    assert torch.equal(first["enter.weight"], second["enter.weight"])


# Buffers.


class Normed(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8, 8), nn.BatchNorm1d(8))


def buffers_after(broadcast_buffers):
    smp.init({"ddp": True})
    model = smp.DistributedModel(Normed(), broadcast_buffers=broadcast_buffers)
    torch.manual_seed(smp.rank())
    train(model, torch.randn(4, 8))
    return {name: b.cpu() for name, b in model.local_named_buffers()}


@pytest.mark.parametrize("is_on", [True, False])
def test_buffers_follow_the_first_replica(is_on):
    first, second = run_ranks(buffers_after, 2, is_on)
    assert first["1.num_batches_tracked"] == second["1.num_batches_tracked"] == 1
    assert first["1.running_mean"].any()
    assert torch.equal(first["1.running_mean"], second["1.running_mean"]) == is_on


def statistics_of_passes():
    """Running means after each of two passes, of which the second one, which reduces, has none."""
    smp.init({"ddp": True})
    model = smp.DistributedModel(Normed(), backward_passes_per_step=2)
    torch.manual_seed(smp.rank())
    found = []
    for _ in range(2):
        for mode in (True, False):
            train(model.train(mode), torch.randn(4, 8))
            found.append(dict(model.local_named_buffers())["1.running_mean"].cpu().clone())
    return found


def test_what_passes_without_a_reduction_write_follows_the_first_replica_with_the_next_one():
    first, second = run_ranks(statistics_of_passes, 2)
    for turn in (0, 2):
        assert not torch.equal(first[turn], second[turn])
        assert torch.equal(first[turn], first[turn + 1])
        assert torch.equal(first[turn], second[turn + 1])


@smp.step
def look(model, x):
    return model(x).sum()


train_squares = smp.step(square)


def train_after_evaluations():
    """Statistics by evaluations, of all replicas or of one, which a step then reads.

    Returns statistics before and after a step, and its loss on a batch that replicas have in
    common, each time.
    """
    smp.init({"ddp": True})
    model = smp.DistributedModel(Normed())
    train_squares(model, torch.ones(4, 8))
    norm, found = model.get_module()[1], []
    for step, seeing in enumerate([(0, 1), (0,), (1,)]):
        model.train()
        torch.manual_seed(10 * step + smp.rank())
        if smp.rank() in seeing:
            with torch.no_grad():
                look(model, torch.randn(4, 8))
        before = norm.running_mean.cpu().clone()
        norm.eval()
        loss = train_squares(model, torch.ones(4, 8)).reduce_mean().item()
        found.append((before, norm.running_mean.cpu().clone(), loss))
    return found


def test_what_evaluations_write_follows_the_first_replica_in_the_next_training_step():
    both, one, other = zip(*run_ranks(train_after_evaluations, 2), strict=True)
    for first, second in (both, one, other):
        assert not torch.equal(first[0], second[0])
        for after in (first[1], second[1]):
            assert torch.equal(after, first[0])
    # All have written: the step reads what the first replica has.
    assert both[0][2] == both[1][2]


# Hooks.


def average(group, bucket):
    """What mpxla does, for two microbatches, with torch's own means."""
    flat = bucket.buffer().div_(2 * dist.get_world_size(group))
    work = dist.all_reduce(flat, group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def hooked(name):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    smp.init({"ddp": True, "microbatches": 2})
    model = smp.DistributedModel(Stack(), bucket_cap_mb=512 / 2**20)
    calls, seen = counted(transport(), "all_reduce"), []
    hook = average if name == "own" else getattr(default_hooks, name)

    def spy(state, bucket):
        shapes = [tuple(g.shape) for g in bucket.gradients()]
        parameters = [type(p).__name__ for p in bucket.parameters()]
        seen.append((bucket.index(), bucket.is_last(), shapes, parameters))
        return hook(state, bucket)

    model.register_comm_hook(smp.get_dp_process_group(), spy)
    train(model, torch.full((2, 8), 1.0 + smp.rank()))
    return calls, seen, gradients_of(model)


@pytest.mark.parametrize(
    ("name", "mean"),
    [
        ("own", 1.5),
        ("fp16_compress_hook", 3.0),
        pytest.param("allreduce_hook", 3.0, marks=pytest.mark.slow),
    ],
)
def test_hooks_communicate_instead_of_mpxla(name, mean):
    for calls, seen, gradients in run_ranks(hooked, 2, name):
        assert calls == []
        expected = [(8, 8), (8, 8)], ["Parameter"] * 2
        assert seen == [(0, False, *expected), (1, True, *expected)]
        for gradient in gradients.values():
            assert torch.equal(gradient, torch.full((8, 8), mean))


def fail_in_hook(kind):
    smp.init({"ddp": True})
    model = smp.DistributedModel(Stack())

    def hook(state, bucket):
        if kind == "raise":
            raise LookupError("no such group")
        if kind == "tensor":
            return bucket.buffer()
        future = torch.futures.Future()
        future.set_result(bucket.buffer()[:3])
        return future

    model.register_comm_hook(None, hook)
    try:
        train(model, torch.ones(1, 8))
    except (LookupError, MpxlaError) as error:
        return str(error)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("raise", "no such group"),
        ("tensor", "returned a Tensor; it has to return a torch.futures.Future of the reduced"),
        ("short", "holds a tensor of shape [3] on cpu; it has to hold a host tensor of 256"),
    ],
)
def test_errors_of_hooks_reach_the_step(kind, text):
    (found,) = run_ranks(fail_in_hook, 1, kind)
    assert text in found


def register_wrongly():
    texts = []

    def attempt(config, options, times=1, trained=False):
        smp.init(config)
        model = smp.DistributedModel(Stack(1), **options)
        if trained:
            train(model, torch.ones(1, 8))
        try:
            for _ in range(times):
                model.register_comm_hook(None, average)
        except smp.ConfigError as error:
            texts.append(str(error))
        smp.shutdown()

    attempt({}, {})
    attempt({"ddp": True}, {"overlapping_allreduce": False})
    attempt({"ddp": True, "reduction_dtype": "bfloat16"}, {})
    attempt({"ddp": True}, {}, times=2)
    attempt({"ddp": True}, {}, trained=True)
    return texts


def test_hooks_that_cannot_be_registered():
    patterns = ["needs ddp: True", "needs DistributedModel(overlapping_allreduce=True)"]
    patterns += ["remove the key reduction_dtype", "called a second time; a model has one hook"]
    patterns += ["called after the first training step; register the hook before"]
    (texts,) = run_ranks(register_wrongly, 1)
    assert len(texts) == len(patterns)
    for text, pattern in zip(texts, patterns, strict=True):
        assert f"model.register_comm_hook {pattern}." in text or pattern in text
