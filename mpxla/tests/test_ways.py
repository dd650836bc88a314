"""Microbatches of one call that go different ways through a step function: as plain PyTorch."""

import random
import re

import pytest
import torch
from torch import nn

import mpxla as smp
from mpxla.tests.clients import close, host, logged
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks

MICROBATCHES = 4
WAYS = ["abac", "caab", "aaaa", "bacc", "bbbb"]
"""The way of each microbatch, batch after batch."""
KEEP = {"a": [1, 1, 1], "b": [1, 0, 1], "c": [0, 0, 0]}


class Net(nn.Module):
    def __init__(self, has_norm):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4) if has_norm else nn.Tanh()
        self.second, self.extra = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, keep):
        h = self.second(torch.relu(self.norm(self.first(x))))
        if not keep.all():
            h = h + self.extra(h)
        return h


def loss_of(model, x, keep):
    h = model(x, keep)
    if not keep.any():
        return h.abs().mean(), h
    return (h.square().mean(1) * keep).sum() / int(keep.sum()), h


def raw_model(has_norm):
    torch.manual_seed(0)
    return Net(has_norm)


def batch(number, replica=0):
    ways = WAYS[(number + replica) % len(WAYS)]
    generator = torch.Generator().manual_seed(10 * number + replica)
    x = torch.randn(3 * MICROBATCHES, 4, generator=generator)
    return x, torch.tensor([kept for way in ways for kept in KEEP[way]])


def train_step(model, x, keep):
    loss, h = loss_of(model, x, keep)
    model.backward(loss)
    return loss, h, loss.item(), keep.sum().item(), "text"


def train_plainly(has_norm, numbers, num_replicas=1):
    model = raw_model(has_norm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses, outputs = [], []
    for number in numbers:
        optimizer.zero_grad()
        for replica in range(num_replicas):
            x, keep = batch(number, replica)
            for own in zip(x.split(3), keep.split(3), strict=True):
                loss, h = loss_of(model, *own)
                (loss / MICROBATCHES / num_replicas).backward()
                losses.append(loss.item())
                outputs.append(h.detach())
        optimizer.step()
    return losses, torch.cat(outputs), host(model.state_dict().items())


def train(keys, has_norm, numbers, options=None):
    smp.init({"microbatches": MICROBATCHES, **keys})
    raw = raw_model(has_norm)
    model = smp.DistributedModel(raw)
    own = torch.optim.SGD(raw.parameters(), lr=0.5, momentum=0.9)
    optimizer = smp.DistributedOptimizer(own, **(options or {}))
    step = smp.step(train_step)
    losses, outputs = [], []
    with logged() as lines:
        for number in numbers:
            optimizer.zero_grad()
            x, keep = batch(number, smp.rdp_rank())
            if smp.pp_rank() > 0:  # only pp_rank 0's inputs count
                x, keep = torch.zeros_like(x), torch.zeros_like(keep)
            loss, h, reads, counts, text = step(model, x, keep)
            assert text == "text"
            losses += [value.item() for value in loss.outputs]
            assert reads == losses[-MICROBATCHES:] and len(counts) == MICROBATCHES
            outputs.append(h.concat().cpu())
            optimizer.step()
        state = {name: value.cpu() for name, value in model.state_dict().items()}
    return losses, torch.cat(outputs), state, lines


@pytest.mark.parametrize("has_norm", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("stages", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_ways_of_microbatches(stages, has_norm):
    keys = {"pipeline_parallel_degree": stages}
    expected = train_plainly(has_norm, range(4))
    results = run_ranks(train, stages, keys, has_norm, range(4))
    for losses, outputs, state, _ in results:
        close(torch.tensor(losses), torch.tensor(expected[0]))
        close(outputs, expected[1])
        close(state, expected[2])
    lines = results[0][3]
    assert sum("compiled step" in line for line in lines) == 3, "one for each way"
    (warning,) = (line for line in lines if line.startswith("WARNING"))
    where = r"at .*test_ways\.py:\d+: if not keep\.all\(\): changed from True to False"
    assert re.search(rf"go 3 ways \(what is read of the inputs {where}, from microbatch 0 to "
                     r"microbatch 1\)", warning)  # fmt: skip
    assert f"in {4 if has_norm else 3} passes" in warning


REPLICAS = {"ddp": True}
ZERO = {"shard_optimizer_state": True}


STAGES = {"pipeline_parallel_degree": 2}
HALF = {"fp16": True}


@pytest.mark.parametrize(
    ("stages", "keys", "options", "tolerance"),
    [
        pytest.param(1, REPLICAS, {}, 2e-5, marks=pytest.mark.slow),
        (1, REPLICAS | ZERO, {}, 2e-5),
        pytest.param(
            1, REPLICAS | HALF, {"static_loss_scale": 256.0}, 2e-2, marks=pytest.mark.slow
        ),
        pytest.param(2, REPLICAS | STAGES, {}, 2e-5, marks=pytest.mark.slow),
    ],
)
def test_replicas_with_different_ways(stages, keys, options, tolerance):
    """Replicas run 1 to 3 passes, and reduce once; in two steps, one alone trains a layer."""
    losses, _, expected = train_plainly(False, range(4), num_replicas=2)
    results = run_ranks(train, 2 * stages, keys, False, range(4), options)
    lines = [line for *_, own in results for line in own]
    assert any("replicas train different parameters" in line for line in lines)
    for rank, (found, _, state, _) in enumerate(results):
        own = torch.tensor(losses).view(-1, 2, MICROBATCHES)[:, rank // stages]
        near = {"rtol": tolerance, "atol": tolerance}
        torch.testing.assert_close(torch.tensor(found), own.flatten(), **near)
        torch.testing.assert_close(state, expected, check_dtype=False, **near)


def other_form(model, x, keep):
    loss, h = loss_of(model, x, keep)
    return (loss, h) if keep.all() else (loss, None)


def other_draws(model, x, keep):
    loss, _ = loss_of(model, x, keep)
    return loss if keep.all() else loss * random.random()


def refused(keys, functions):
    smp.init({"microbatches": MICROBATCHES, **keys})
    model = smp.DistributedModel(raw_model(False))
    found = []
    for function in functions:
        for _ in range(2):
            with pytest.raises(smp.errors.MpxlaError) as caught:
                smp.step(function)(model, *batch(0))
            found.append(str(caught.value))
    x, keep = batch(2)
    return found, [value.item() for value in smp.step(other_form)(model, x, keep)[0].outputs]


@pytest.mark.slow
def test_ways_that_do_not_go_together():
    x, keep = batch(2)
    model = raw_model(False)
    parts = zip(x.split(3), keep.split(3), strict=True)
    expected = [other_form(model, *part)[0].item() for part in parts]
    for texts, losses in run_ranks(refused, 2, {"pipeline_parallel_degree": 2},
                                   [other_form, other_draws]):  # fmt: skip
        forms = r"returns a tensor one way and None the other\. Use torch\.where"
        draws = r"the ways draw other random numbers in Python\. Use torch\.where"
        for text, reason in zip(texts, [forms, forms, draws, draws], strict=True):
            assert re.search(rf"from microbatch 0 to microbatch 1\. .* {reason}", text), text
        close(torch.tensor(losses), torch.tensor(expected))


def gather(keys):
    smp.init({"microbatches": MICROBATCHES, **keys})
    model = smp.DistributedModel(raw_model(False))
    with pytest.raises(smp.errors.MpxlaError) as caught:
        smp.step(train_step)(model, *batch(0))
    return str(caught.value)


def test_divided_parameters_are_gathered_one_way():
    keys = {"ddp": True, "sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 0}
    for text in run_ranks(gather, 2, keys):
        assert "ranks exchange values while they run (sharded_data_parallel_degree" in text
