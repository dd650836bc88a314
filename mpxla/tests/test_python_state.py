"""What step functions leave in Python for the next microbatch: as in PyTorch, or refused."""

import re
from collections import deque

import pytest
import torch
from torch import nn

import mpxla as smp
from mpxla.errors import CaptureError
from mpxla.tests.clients import close, host, logged, train_step
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks

NUM_STEPS = 3
functional = nn.functional
features = {}


class Backend:
    """Of a library that has several."""

    def halved(self, h):
        return h / 2


class Slotted:
    """Counts, and has no dictionary."""

    __slots__ = ("calls",)

    def __init__(self):
        self.calls = 0


class Made:
    """Has tensors, and is made when the model runs first."""

    def __init__(self, model):
        self.model, self.num_calls = model, 0
        self.parts = {"steps": [torch.arange(8.0) / 8]}

    def __call__(self, h):
        self.num_calls += 1
        return h * self.parts["steps"][0] * self.num_calls + self.model.scale


class Net(nn.Module):
    """Layers around what `kind` names."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.ones(8))
        self.is_set, self.num_calls = False, 0
        self.length, self.table, self.key = 0, None, None
        self.short, self.short_table = 2, torch.arange(2.0)
        self.states, self.by_name = [torch.zeros(8), torch.zeros(8)], {"a": None}
        self.past, self.pair, self.collected = deque(maxlen=3), None, []
        self.backends, self.made = {}, None
        self.numbers, self.is_hot, self.slotted = (0, 1.0), True, Slotted()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("rates", torch.arange(8) / 8)

    def forward(self, x):
        h = torch.tanh(self.first(x))
        return self.last(getattr(self, self.kind)(h))

    # --- flags, caches and counts ----------------------------------------------------------------

    def started_by_a_flag(self, h):
        if not self.is_set:
            with torch.no_grad():
                self.scale.data.copy_(1 / (h.std(0) + 0.1))
            self.is_set = True
        return h * self.scale

    def mean_by_a_flag(self, h):
        with torch.no_grad():
            if self.is_set:
                self.mean.lerp_(h.mean(0), 0.5)
            else:
                self.mean.copy_(h.mean(0))
                self.is_set = True
        self.num_calls += 1
        return h - self.mean

    def cache(self, h):
        if self.length != h.shape[1]:
            self.length = h.shape[1]
            self.table = self.rates.cos() * torch.arange(self.length)
        if self.short < h.shape[1]:
            self.short = h.shape[1]
            self.short_table = torch.arange(float(self.short)).sin()
        return h * self.table + self.short_table

    def cache_by_key(self, h):
        key = h.shape[1:], h.dtype
        if self.key != key:
            self.key, self.table = key, self.rates.cos()
        return h * self.table

    def looked_up(self, h):
        if type(h) not in self.backends:
            self.backends[type(h)] = Backend()
        return self.backends[type(h)].halved(h)

    def looked_up_by_a_branch(self, h):
        h = self.looked_up(h)
        return 2 * h if h.sum() > 0 else h

    def made_once(self, h):
        if self.made is None:
            self.made = Made(self)
        return self.made(h)

    def counted(self, h):
        self.num_calls += 1
        return h

    def hooked(self, h):
        features["h"] = h
        self.by_name["a"] = h
        self.collected.append(h)
        return h + features["h"].mean() + self.by_name["a"].mean()

    # --- what would have to be kept --------------------------------------------------------------

    def flag_of_the_model(self, h):
        h = -h if self.is_hot else h
        self.is_hot = (h.mean() > 1).item()
        return h

    def counted_in_a_slot(self, h):
        self.slotted.calls += 1
        return h * self.slotted.calls

    def list_of_states(self, h):
        h = h + self.states[0].to(h.device)
        self.states[0] = h.detach().mean(0)
        return h

    def states_by_name(self, h):
        if self.by_name["a"] is not None:
            h = h + self.by_name["a"]
        self.by_name["a"] = h.detach()
        return h

    def last_ones(self, h):
        self.past.append(h.detach())
        return h + torch.stack(list(self.past)).mean(0)

    def pair_of_numbers(self, h):
        self.numbers = self.numbers[0] + 1, 0.9 * self.numbers[1]
        return h * self.numbers[0]

    def pair_of_states(self, h):
        if self.pair is not None:
            h = h + self.pair[0]
        self.pair = h.detach(), 2 * h.detach()
        return h


REFUSED = {
    "counted_in_a_slot": r"computes with model\.slotted, and changes it",
    "flag_of_the_model": r"computes with model\.is_hot, and gives it a number that the model has",
    "pair_of_numbers": r"computes with model\.numbers, and changes it at .*: self\.numbers = ",
    "last_ones": r"reads model\.past, and gives it a tensor",
}


FAST = ["pair_of_numbers", "flag_of_the_model", "counted_in_a_slot"]


def batch(number):
    generator = torch.Generator().manual_seed(number)
    x = 2 * torch.randn(8, 6, generator=generator)
    return x, torch.randint(4, (8,), generator=generator)


def raw_model(kind):
    torch.manual_seed(3)
    return Net(kind)


def train_plainly(kind, microbatches):
    model = raw_model(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    losses = []
    for number in range(NUM_STEPS):
        optimizer.zero_grad()
        for x, y in zip(*(v.chunk(microbatches) for v in batch(number)), strict=True):
            loss = functional.cross_entropy(model(x), y)
            (loss / microbatches).backward()
            losses.append(loss.item())
        optimizer.step()
        model.eval()
        losses.append(sum(model(x).sum().item() for x in batch(number)[0].chunk(microbatches)))
        model.train()
    return torch.tensor(losses), host(model.state_dict().items())


def train(keys, kind, num_steps=NUM_STEPS):
    smp.init(keys)
    model = smp.DistributedModel(raw_model(kind))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3))
    step, evaluate = smp.step(train_step), smp.step(lambda model, x: model(x).sum())
    losses = []
    with logged() as lines:
        for number in range(num_steps):
            model.train()
            optimizer.zero_grad()
            losses += [loss.item() for loss in step(model, *batch(number)).outputs]
            optimizer.step()
            model.eval()
            losses.append(evaluate(model, batch(number)[0]).reduce_sum().item())
    state = {name: value.cpu().clone() for name, value in model.state_dict().items()}
    return torch.tensor(losses), state, lines


def slow_but(kinds, *fast):
    return [
        pytest.param(kind, stages, count, marks=() if (kind, count) in fast else pytest.mark.slow)
        for kind in kinds.split()
        for stages, count in ((2, 1), (1, 2))
    ]


@pytest.mark.parametrize(
    ("kind", "stages", "count"),
    slow_but(
        "started_by_a_flag mean_by_a_flag cache looked_up looked_up_by_a_branch counted made_once "
        "cache_by_key",
        *(("mean_by_a_flag", 2), ("looked_up_by_a_branch", 2), ("made_once", 1)),
        ("cache_by_key", 2),
    ),
)
def test_flags_and_caches_are_what_they_are_in_pytorch(kind, stages, count):
    expected, parameters = train_plainly(kind, count)
    keys = {"pipeline_parallel_degree": stages, "microbatches": count}
    for losses, state, lines in run_ranks(train, stages, keys, kind):
        close(losses, expected)
        close(state, parameters)
        assert not [line for line in lines if "reads and changes" in line]
        programs = sum("compiled" in line for line in lines)
        if kind.endswith("branch"):  # which way it goes, and ways, of two functions
            assert programs <= 6
        else:
            assert programs == (3 if kind.endswith("flag") else 2)


@pytest.mark.slow
def test_tensors_for_others_are_no_state():
    expected, parameters = train_plainly("hooked", 2)
    for losses, state, _ in run_ranks(train, 1, {"microbatches": 2}, "hooked"):
        close(losses, expected)
        close(state, parameters)


def train_each(kinds):
    found = {}
    for kind in kinds:
        features.clear()  # of other tests in the same process
        try:
            train({"microbatches": 2}, kind, 1)
        except CaptureError as error:
            found[kind] = str(error)
        smp.shutdown()
    return found


def refused(kinds):
    for found in run_ranks(train_each, 1, kinds):
        assert found.keys() == set(kinds)
        for kind, text in found.items():
            assert re.search(REFUSED[kind], text), text


def test_numbers_of_the_model_or_in_pairs_are_refused():
    refused(FAST)


@pytest.mark.slow
def test_other_state_for_the_next_microbatch_is_refused():
    refused([kind for kind in REFUSED if kind not in FAST])


def save_buffers():
    smp.init({"microbatches": 2})
    model = smp.DistributedModel(nn.Linear(4, 4))
    loss = smp.DistributedModel(Center())
    step = smp.step(lambda model, loss, x: loss(model(x)))
    step(model, loss, torch.ones(4, 4))
    return list(loss.state_dict()), list(loss.module.state_dict())


class Center(nn.Module):
    """Has no parameters."""

    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(4))

    def forward(self, x):
        self.center = 0.9 * self.center + 0.1 * x.detach().mean(0)
        return (x - self.center).pow(2).mean()


def test_a_model_without_parameters_has_a_state_dict():
    assert run_ranks(save_buffers, 1) == [(["center"], ["center"])]
