"""Numbers of the model that a step leaves in Python: what plain PyTorch leaves there."""

import math
import re
import time
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
import torch.utils._pytree as pytree
from torch import nn

import mpxla as smp
from mpxla.errors import CaptureError
from mpxla.tests.clients import close, logged, train_step, trained, trained_plainly
from mpxla.tests.ranks.run import run_ranks
from mpxla.tests.test_python_state import batch

pytestmark = pytest.mark.ranks

NUM_STEPS = 3
log, losses, windows = {}, [], {"last": deque(maxlen=3)}
sums = {"norm": 0.0, "count": 0, "nested": [0.0]}
history, tally, state = defaultdict(list), Counter(), {}
total = 0.0


class Meter:
    """Averages, as scripts keep them."""

    def __init__(self):
        self.val = self.sum = self.avg = 0.0
        self.count = 0

    def update(self, value, count=1):
        self.val = value
        self.sum += value * count
        self.count += count
        self.avg = self.sum / self.count


meters = defaultdict(Meter)


class Net(nn.Module):
    """Layers around what `kind` names."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)
        self.latest, self.norm, self.total, self.ema, self.num_calls = None, 0.0, 0, 0.5, 0
        self.history, self.window, self.stats = [], deque(maxlen=3), {"norm": 0.0, "calls": 0}
        self.nested, self.meter, self.by_name = {"a": {"b": []}}, Meter(), defaultdict(list)
        self.slow, self.space = None, SimpleNamespace(calls=0, norm=None, means=[])

    def forward(self, x):
        h = torch.tanh(self.first(x))
        getattr(self, self.kind)(h, h.norm().item())
        return self.last(h)

    def only_written(self, h, norm):
        self.norm, self.latest, self.is_large = norm, round(norm, 2), norm > 3.0
        self.fresh = {"norm": norm, "half": (norm / 2, "text")}

    def added(self, h, norm):
        self.total += norm
        self.norm = max(1, len(h)) * norm + self.ema

    def averaged(self, h, norm):
        self.ema = 0.9 * self.ema + 0.1 * norm
        self.slow = norm if self.slow is None else 0.5 * self.slow + 0.5 * norm

    def in_containers(self, h, norm):
        self.stats["norm"] = norm
        self.stats["new"] = -(abs(norm - 4) ** 2)
        self.stats["sum"] = self.stats.get("sum", 0) + norm
        self.nested["a"]["b"].append(math.sqrt(norm))
        self.by_name["norm"] = [norm]

    def appended(self, h, norm):
        self.history.append(norm)
        self.history.append({"norm": norm, "mean": h.mean().item(), "name": "h"})
        self.window.append(norm)

    def in_globals(self, h, norm):
        global total
        total += norm
        log["norm"] = norm
        losses.append(norm)
        windows["last"].append(norm)

    def counted_in_globals(self, h, norm):
        sums["norm"] += float(h.detach().norm()) * len(h)
        sums["count"] += len(h)
        sums["nested"][0] += norm

    def in_new_entries(self, h, norm):
        history["norms"].append(norm)
        meters["norm"].update(norm, len(h))
        tally["calls"] += 1
        state.setdefault("means", []).append(h.mean().item())
        state["last"] = {"norm": norm, "calls": tally["calls"]}
        state["pair"] = (norm, "text")

    def plain_data_appended(self, h, norm):
        self.num_calls += 1
        self.history.append({"calls": self.num_calls, "name": "h"})
        self.window.append("text")
        history["rates"].append(0.5)
        losses.append((len(losses), norm))
        state.setdefault("log", []).append({"norm": norm})

    def begun_beside_a_number(self, h, norm):
        log["calls"] = log.get("calls", 0) + 1
        log["norm"] = norm

    def tensors_left(self, h, norm):
        log["h"] = h.detach()
        losses.append(h.detach().mean())
        state.setdefault("means", []).append({"mean": h.detach().mean(), "norm": norm})

    def constants_appended(self, h, norm):
        losses.append(torch.arange(3))
        losses.append([torch.ones(2), h.detach().sum(), "text"])
        state.setdefault("means", []).append({"sum": torch.zeros(1)})

    def in_a_namespace(self, h, norm):
        self.space.calls += 1
        self.space.norm = norm * self.space.calls
        self.space.means.append(h.detach().mean())

    def beside_a_counter(self, h, norm):
        self.num_calls += 1
        self.norm = norm / self.num_calls
        self.total = self.total + norm * self.num_calls

    def metered(self, h, norm):
        self.meter.update(norm, h.shape[0])

    def every_second(self, h, norm):
        self.num_calls += 1
        if self.num_calls % 2 == 0:
            self.history.append(norm)

    def in_integers(self, h, norm):
        largest = int(h.shape[1]) * h.argmax().item()
        self.total = largest // 3 - self.total
        self.norm = largest % 5

    def counted_beside_questions(self, h, norm):
        self.num_calls += 1
        sums["count"] += len(h)
        tally["large"] += int((h > 0.5).any(1).sum())
        if h.mean() > 0:
            self.total += 1
            self.stats["calls"] += 1

    def in_what_is_replaced(self, h, norm):
        old = state["last"]["norm"] if "last" in state else 0.0
        state["last"] = {"norm": 0.5 * old + norm}

    def asked(self, h, norm):
        if h.mean() > 0:
            self.history.append(norm)
        else:
            self.norm = norm


KINDS = [k for k in vars(Net) if not k.startswith("_") and k not in ("forward", "dump_patches")]
KINDS = [kind for kind in KINDS if callable(vars(Net)[kind])]


def raw_model(kind):
    global total
    log.clear()
    losses.clear()
    windows["last"].clear()
    total = 0.0
    sums.update(norm=0.0, count=0, nested=[0.0])
    for container in (history, tally, state, meters):
        container.clear()
    torch.manual_seed(3)
    return Net(kind)


def values_of(model):
    names = (
        "latest norm total ema num_calls history window stats nested by_name slow is_large fresh"
    )
    values = [getattr(model, name, None) for name in names.split()]
    tensors_in = log, losses, state, vars(model.space)  # of any device
    numbers = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.tolist(), tensors_in)
    values = repr([values, vars(model.meter), numbers, windows, total, sums, history, tally])
    return values + repr([vars(meter) for meter in meters.values()])


def train_plainly(kind):
    return trained_plainly(raw_model(kind), map(batch, range(NUM_STEPS)), 2, values_of)


def train(keys, kinds):
    found = {}
    for kind in kinds:
        with logged() as lines:
            trains = trained(keys, raw_model(kind), map(batch, range(NUM_STEPS)), values_of)
        known = "run first", "go 2 ways", "run one after the other", "was compiled again"
        warnings = [line for line in lines if "warning" in line]
        assert not [line for line in warnings if not any(text in line for text in known)], lines
        found[kind] = *trains, sum("compiled step function" in line for line in lines)
    return found


@pytest.mark.parametrize(
    ("kinds", "stages"),
    [
        (["beside_a_counter", "counted_in_globals", "in_new_entries"], 2),
        (["plain_data_appended", "begun_beside_a_number", "tensors_left"], 1),
        (["constants_appended", "in_a_namespace"], 1),
        (["in_what_is_replaced"], 1),
        *(pytest.param(KINDS, stages, marks=pytest.mark.slow) for stages in (1, 2)),
    ],
)
def test_what_a_step_leaves_of_the_model_is_there(kinds, stages):
    keys = {"pipeline_parallel_degree": stages, "microbatches": 2}
    for found in run_ranks(train, stages, keys, kinds):
        for kind, (returned, state, values, count) in found.items():
            expected, parameters, wanted = train_plainly(kind)
            close(returned, expected)
            close(state, parameters)
            assert [rounded(text) for text in values] == [rounded(text) for text in wanted], kind
            assert count == NUM_PROGRAMS.get(kind, 1), kind


NUM_PROGRAMS = {"every_second": 2, "asked": 3, "counted_beside_questions": 6}
NUM_PROGRAMS |= {"begun_beside_a_number": 2, "in_what_is_replaced": 6}


def rounded(text):
    return re.sub(r"-?\d+\.\d+(e-\d+)?", lambda found: f"{float(found[0]):.4f}", text)


class Deciding(nn.Module):
    """Goes by what it has left."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.layer, self.ema, self.norms = kind, nn.Linear(6, 4), 1.0, []

    def forward(self, x):
        h = self.layer(x)
        norm = h.norm().item()
        if self.kind == "divided":
            h = h / self.ema
        elif self.kind == "summed":
            h = h / (1 + sum(self.norms))
        elif self.kind == "compared" and self.ema > 1.5:
            h = 2 * h
        if self.kind == "shortened":
            self.norms.append(norm)
            if len(self.norms) > 3:
                del self.norms[0]
            return h
        self.ema = 0.9 * self.ema + norm
        self.norms.append(norm)
        return h


def decide(kinds):
    found = {}
    for kind in kinds:
        smp.init({"microbatches": 2})
        raw = Deciding(kind)
        model = smp.DistributedModel(raw)
        try:
            smp.step(train_step)(model, *batch(0))
        except CaptureError as error:
            found[kind] = str(error), raw.ema, raw.norms
        smp.shutdown()
    return found


@pytest.mark.parametrize(
    "kinds",
    [["divided", "shortened"], pytest.param(["summed", "compared"], marks=pytest.mark.slow)],
)
def test_a_step_that_goes_by_what_it_has_left_is_refused_and_leaves_nothing(kinds):
    (found,) = run_ranks(decide, 1, kinds)
    assert [*found] == kinds
    for kind, (text, ema, norms) in found.items():
        places = "model.norms" if kind == "shortened" else "model.ema or model.norms"
        assert f"computes with {places}, and gives it a number that" in text
        assert ("test_recorded.py" in text) == (kind != "shortened")
        assert "register_buffer" in text and "deque with a maxlen" in text
        assert ema == 1.0 and norms == []


names, tables = set(), []


class Slotted:
    __slots__ = ("count", "mean")

    def __init__(self):
        self.count, self.mean = 0, 0.0


slotted = Slotted()


@dataclass(frozen=True)
class Progress:
    count: int = 0


class Growing(nn.Module):
    """Goes by how much there is of what it adds to."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.layer, self.seen, self.progress = kind, nn.Linear(6, 4), [], Progress()

    def forward(self, x):
        return getattr(self, self.kind)(self.layer(x))

    def every_second(self, h):
        losses.append(h.detach().mean())
        return 2 * h if len(losses) % 2 else h

    def after_three(self, h):
        losses.append(h.detach().mean())
        return 2 * h if len(losses) > 3 else h

    def by_constants(self, h):
        losses.append(torch.ones(2))
        return h / len(losses)

    def of_plain_data(self, h):
        losses.append("text")
        return 2 * h if len(losses) > 3 else h

    def of_a_module(self, h):
        self.seen.append(h.detach().mean())
        return 2 * h if len(self.seen) > 3 else h

    def of_a_set(self, h):
        names.add(len(names))
        return 2 * h if len(names) > 3 else h

    def of_slots(self, h):
        slotted.mean = slotted.mean + h.detach().mean()
        return h

    def in_what_is_replaced(self, h):
        self.progress = replace(self.progress, count=self.progress.count + 1)
        return h / self.progress.count

    def filled_once(self, h):
        while len(tables) < 3:
            tables.append(len(tables) * torch.ones(4))
        return h * tables[2]


def grow(kinds):
    found = {}
    for kind in kinds:
        losses.clear()
        smp.init({"microbatches": 2})
        try:
            smp.step(train_step)(smp.DistributedModel(Growing(kind)), *batch(0))
        except CaptureError as error:
            found[kind] = str(error)
        smp.shutdown()
    return found, tables


REFUSED = {"every_second": "reads losses, and gives it a tensor"}
REFUSED |= dict.fromkeys(["after_three", "by_constants"], REFUSED["every_second"])
REFUSED |= {"of_plain_data": "computes with losses, and changes it"}
REFUSED |= {"of_a_module": "reads model.seen, and gives it a tensor"}
REFUSED |= {"of_a_set": "computes with names, and changes it"}
REFUSED |= {"of_slots": "reads slotted, and gives it a tensor"}
REFUSED |= {"in_what_is_replaced": "computes with model.progress.count, and changes it"}


def test_a_step_that_goes_by_how_much_it_has_left_is_refused():
    ((found, left),) = run_ranks(grow, 1, [*REFUSED, "filled_once"])
    assert found.keys() == REFUSED.keys()
    assert all(REFUSED[kind] in text for kind, text in found.items()), found
    assert left == []  # every capture fills it


class Timed(nn.Module):
    """Keeps a time beside a number."""

    def __init__(self):
        super().__init__()
        self.layer, self.seen = nn.Linear(6, 4), []

    def forward(self, x):
        h = self.layer(x)
        self.seen.append((h.norm().item(), time.perf_counter()))
        return h


def keep_times():
    smp.init({"microbatches": 2})
    raw = Timed()
    with logged() as lines:
        smp.step(train_step)(smp.DistributedModel(raw), *batch(0))
    return raw.seen, [line for line in lines if "reads and changes" in line]


def test_what_python_makes_beside_the_numbers_is_of_the_capture_and_a_warning_says_so():
    ((seen, warnings),) = run_ranks(keep_times, 1)
    assert len(seen) == 2 and seen[0][0] != seen[1][0] and seen[0][1] == seen[1][1]
    (line,) = warnings
    assert "reads and changes model.seen. It is captured once" in line
