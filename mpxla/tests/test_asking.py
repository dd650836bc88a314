"""Step functions that branch on values which depend on the model: as plain PyTorch."""

import math
import re

import pytest
import torch
from torch import nn

import mpxla as smp
from mpxla.graph.python import answers
from mpxla.runtime import asking
from mpxla.tests.clients import close, host, logged
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks

MICROBATCHES = 4
NUM_STEPS = 3
LARGE = 0.4


class Net(nn.Module):
    """Goes on until its values are small; a part of its layers is for large losses."""

    def __init__(self, has_norm=False, dropout=0.0, is_split=False):
        super().__init__()
        kind = smp.nn.DistributedLinear if is_split else nn.Linear
        self.first, self.again, self.last = (kind(4, 4) for _ in range(3))
        self.norm = nn.BatchNorm1d(4) if has_norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.num_turns = 0  # only counts

    def forward(self, x):
        h = torch.tanh(self.norm(self.first(self.dropout(x))))
        turns = 0
        while h.abs().max() > 0.65 and turns < 3:
            h = torch.tanh(self.again(self.dropout(h))) * 0.9
            turns += 1
            self.num_turns += 1
        return self.last(self.dropout(h)), turns


def loss_of(model, x, is_wide):
    h, turns = model(x)
    if is_wide.any():  # a decision on inputs
        h = 1.1 * h
    loss = (h - 0.5).square().mean()
    value = loss.detach()
    if loss.item() > LARGE:
        return loss.sqrt(), value, turns, 1
    return loss, value, turns, 0


def train_step(model, x, is_wide):
    loss, *others = loss_of(model, x, is_wide)
    model.backward(loss)
    return loss, *others


def raw_model(*options):
    torch.manual_seed(0)
    return Net(*options)


def batch(number, replica=0):
    generator = torch.Generator().manual_seed(10 * number + replica)
    x = 2 * torch.randn(3 * MICROBATCHES, 4, generator=generator)
    return x, torch.tensor([1, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0])


def train_plainly(options, num_replicas=1):
    model = raw_model(*options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for number in range(NUM_STEPS):
        optimizer.zero_grad()
        for replica in range(num_replicas):
            x, is_wide = batch(number, replica)
            for own in zip(x.split(3), is_wide.split(3), strict=True):
                loss, _, turns, way = loss_of(model, *own)
                (loss / MICROBATCHES / num_replicas).backward()
                found.append([loss.item(), turns, way])
        optimizer.step()
    return torch.tensor(found), host(model.state_dict().items())


def train(keys, options=(), num_steps=NUM_STEPS, counts=False):
    """What training found; at the end, how often a step asks whose microbatches go one way."""
    smp.init({"microbatches": MICROBATCHES, **keys})
    raw = raw_model(*options)
    model = smp.DistributedModel(raw)
    own = torch.optim.SGD(raw.parameters(), lr=0.1)
    optimizer = smp.DistributedOptimizer(own)
    step = smp.step(train_step)
    runner, asked = model._engine._runner, []
    ask = runner.ask
    runner.ask = lambda question, seed: asked.append(1) or ask(question, seed)
    found, values = [], []
    with logged() as lines:
        for number in range(num_steps):
            optimizer.zero_grad()
            x, is_wide = batch(number, smp.rdp_rank())
            if smp.pp_rank() > 0:  # only pp_rank 0's inputs count
                x, is_wide = torch.zeros_like(x), torch.zeros_like(is_wide)
            loss, value, *others = step(model, x, is_wide)
            losses = [one.item() for one in loss.outputs]
            found += [list(row) for row in zip(losses, *others, strict=True)]
            values += [one.item() for one in value.outputs]
            optimizer.step()
        state = {name: value.cpu().clone() for name, value in model.state_dict().items()}
        if counts:
            one = x[:3].repeat(MICROBATCHES, 1), torch.zeros_like(is_wide)
            step(model, *one)
            asked.clear()
            step(model, *one)
    return torch.tensor(found), state, values, len(asked), lines


@pytest.mark.parametrize(
    ("stages", "has_norm"),
    [(2, False), *(pytest.param(n, n == 2, marks=pytest.mark.slow) for n in (1, 2))],
)
def test_branches_on_values_of_the_model(stages, has_norm):
    expected, parameters = train_plainly([has_norm])
    keys = {"pipeline_parallel_degree": stages}
    results = run_ranks(train, stages, keys, [has_norm], NUM_STEPS, True)
    assert len(expected[:, 1:].unique(dim=0)) > 2
    for found, state, _, num_asked, _ in results:
        close(found, expected)
        close(state, parameters)
        assert num_asked == 1, "one way is known"
    warnings = [line for line in results[0][4] if line.startswith("WARNING")]
    for line in (r"while h\.abs\(\)\.max\(\) > 0\.65", r"if loss\.item\(\) > LARGE:"):
        pattern = rf"train_step branches at .*test_asking\.py:\d+: {line}"
        assert sum(bool(re.search(pattern, one)) for one in warnings) == 1, warnings
    assert not any("reads and changes" in one for one in warnings), warnings


@pytest.mark.slow
class Limited(nn.Module):
    """Limits its values where some are large, which few microbatches have.

    It may choose those, and ask for their number.
    """

    def __init__(self, chooses_rows):
        super().__init__()
        self.chooses_rows = chooses_rows
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        h = self.first(x)
        if len(h[h > 2.0]) if self.chooses_rows else torch.any(h > 2.0):
            h = h.clamp(max=1.5) * 0.9
        if self.chooses_rows and (len(h[h < 0]) == 6 or h.mean() > 0.3):
            h = h * 1.1
        if not (h < -50.0).any():
            h = torch.tanh(h)
        return self.last(h)


def limit_plainly(chooses_rows):
    model = Limited(chooses_rows)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    ways = []
    for number in range(NUM_STEPS):
        optimizer.zero_grad()
        for x in batch(number)[0].split(3):
            ways.append(bool((model.first(x) > 2.0).any()))
            (model(x).square().mean() / MICROBATCHES).backward()
        optimizer.step()
    assert 0 < sum(ways) < len(ways)
    return host(model.state_dict().items())


def limit(stages, chooses_rows):
    smp.init({"microbatches": MICROBATCHES, "pipeline_parallel_degree": stages})
    model = smp.DistributedModel(Limited(chooses_rows))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3))

    @smp.step
    def step(model, x):
        model.backward(model(x).square().mean())

    for number in range(NUM_STEPS):
        optimizer.zero_grad()
        step(model, batch(number)[0])
        optimizer.step()
    return {name: value.cpu().clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    ("stages", "chooses_rows"),
    [(1, True), *(pytest.param(*case, marks=pytest.mark.slow) for case in [(1, False), (2, True)])],
)
def test_masks_decide_by_whether_they_are_true_anywhere(stages, chooses_rows):
    expected = limit_plainly(chooses_rows)
    for state in run_ranks(limit, stages, stages, chooses_rows):
        close(state, expected)


@pytest.mark.parametrize("stages", [1, 2])
def test_questions_draw_what_the_step_draws(stages):
    results = run_ranks(train, stages, {"pipeline_parallel_degree": stages}, [False, 0.5], 1)
    for found, _, values, _, _ in results:
        assert [value > LARGE for value in values] == [row[2] == 1 for row in found.tolist()]


@pytest.mark.parametrize("stages", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_ranks_that_share_tensors_ask_together(stages):
    expected, parameters = train_plainly([])
    keys = {"ddp": True, "tensor_parallel_degree": 2, "prescaled_batch": True}
    keys["pipeline_parallel_degree"] = stages
    for found, state, _, num_asked, _ in run_ranks(
        train, 2 * stages, keys, [False, 0.0, True], NUM_STEPS, True
    ):
        close(found, expected)
        close(state, parameters)
        assert num_asked == 1, "one way is known"


@pytest.mark.slow
def test_replicas_ask_for_themselves():
    expected, parameters = train_plainly([], num_replicas=2)
    for replica, (found, state, *_) in enumerate(run_ranks(train, 2, {"ddp": True})):
        close(found, expected.view(NUM_STEPS, 2, MICROBATCHES, 3)[:, replica].reshape(-1, 3))
        close(state, parameters)


def run_for_ever(model, x):
    h = model(x)
    while h.sum() > -1e6:
        h = h + 1
    return h


def take_two_ways(model, x):
    h = model(x)
    return h if h[0, 0] > 0 else 2 * h


def take_the_value(model, x):
    return model(x) * math.gamma(model(x).sum())


def refused(keys, cases, limits=()):
    for module, name, value in limits:
        setattr(module, name, value)
    smp.init({"microbatches": MICROBATCHES, **keys})
    texts = []
    for make, function in cases:
        with pytest.raises(smp.errors.MpxlaError) as caught:
            smp.step(function)(smp.DistributedModel(make()), torch.randn(12, 4))
        texts.append(str(caught.value))
    return texts


def small_limits():
    return [(answers, "MOST_ANSWERS", 3), (asking, "MOST_WAYS", 1)]


def refused_with_small_limits(cases):
    before = [(module, name, getattr(module, name)) for module, name, _ in small_limits()]
    try:
        return refused({}, cases, small_limits())
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def linear():
    torch.manual_seed(0)
    return nn.Linear(4, 4)


@pytest.mark.slow
def test_what_no_question_can_tell():
    cases = [(linear, run_for_ever), (linear, take_two_ways), (linear, take_the_value)]
    (texts,) = run_ranks(refused_with_small_limits, 1, cases)
    patterns = [
        r"more than 3 times, at last at .*test_asking\.py:\d+: while h\.sum\(\) > -1e6",
        r"take_two_ways branches at .*: return h if h\[0, 0\] > 0 .* in more than 1 ways",
        r"depends on a tensor's value in Python at .*math\.gamma\(model\(x\)\.sum\(\)\)",
    ]
    for text, pattern in zip(texts, patterns, strict=True):
        assert re.search(pattern, text), text


def test_ranks_that_gather_parameters_do_not_ask():
    keys = {"ddp": True, "sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 0}
    for (text,) in run_ranks(refused, 2, keys, [(linear, take_two_ways)]):
        assert re.search(r"depends on a tensor's value in Python at .*return h if h\[0, 0\]", text)
        assert "with sharded_data_parallel_degree" in text


def evaluate():
    smp.init({"microbatches": MICROBATCHES})
    model = smp.DistributedModel(raw_model().eval())
    model.eval()
    with torch.no_grad():
        loss, _, turns, way = smp.step(loss_of)(model, *batch(0))
    return [list(row) for row in zip([v.item() for v in loss.outputs], turns, way, strict=True)]


@pytest.mark.slow
def test_evaluation_steps_ask_too():
    model = raw_model().eval()
    parts = zip(*(value.split(3) for value in batch(0)), strict=True)
    expected = []
    for part in parts:
        loss, _, turns, way = loss_of(model, *part)
        expected.append([loss.item(), turns, way])
    (found,) = run_ranks(evaluate, 1)
    close(torch.tensor(found), torch.tensor(expected))
