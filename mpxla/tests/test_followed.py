"""What a step changes in Python and goes on by: flags, texts, and numbers in all places."""

import dataclasses
import re
from collections import Counter, defaultdict

import pytest
import torch
from torch import nn

import mpxla as smp
from mpxla.errors import CaptureError
from mpxla.tests.clients import close, train_step, trained, trained_plainly
from mpxla.tests.ranks.run import run_ranks
from mpxla.tests.test_python_state import batch

pytestmark = pytest.mark.ranks

NUM_STEPS = 5


@dataclasses.dataclass
class Progress:
    """Attributes with values of the class."""

    step: int = 0
    weight: float = 1.0


class Doubling(nn.Module):
    """Doubles while it trains."""

    def forward(self, h):
        return 2 * h if self.training else h


class Net(nn.Module):
    """Layers around what `kind` names."""

    num_made = 0

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)
        self.is_on, self.mode, self.started, self.num_calls = False, "warm", None, 0
        self.decay, self.best, self.note, self.progress = 0.0, 0, "", Progress()
        self.counts, self.nested = [0, 5], {"a": {"calls": 0, "rates": [1.0]}}
        self.by_default, self.by_counter = defaultdict(int), Counter(calls=0)
        self.switches, self.scale = {"on": False}, scaled_by_calls()
        self.part, self.is_hot = Doubling(), True
        if kind == "hooked":
            self.first.register_forward_hook(counting_hook())

    def forward(self, x):
        h = torch.tanh(self.first(x))
        return self.last(getattr(self, self.kind)(h))

    # --- flags and texts -------------------------------------------------------------------------

    def toggled(self, h):
        self.is_on = not self.is_on
        return h if self.is_on else -h

    def toggled_in_a_dictionary(self, h):
        self.switches["on"] = not self.switches["on"]
        return h if self.switches["on"] else -h

    def mode_by_count(self, h):
        h = h if self.mode == "warm" else -h
        self.num_calls += 1
        if self.num_calls >= 4:
            self.mode = "hot"
        return h

    def only_written(self, h):
        self.num_calls += 1
        self.is_on = self.num_calls % 3 == 0
        self.decay = min(0.9, self.num_calls / (3 + self.num_calls))
        self.note = "early" if self.num_calls % 4 < 2 else "late"
        return h * self.num_calls

    def flag_by_calls(self, h):
        self.num_calls += 1
        h = -h if self.is_hot else h
        self.is_hot = self.num_calls % 3 == 1
        return h

    def mode_after_use(self, h):
        h = self.part(h)
        self.part.train(not self.part.training)
        return h

    def mode_by_calls(self, h):
        self.num_calls += 1
        h = self.part(h)
        self.part.train(self.num_calls % 3 == 1)
        return h

    def frozen_by_calls(self, h):
        self.num_calls += 1
        if self.num_calls > 5:
            self.part.eval()
        return self.part(h)

    # --- what is not there first -----------------------------------------------------------------

    def not_there(self, h):
        self.rounds = getattr(self, "rounds", 0) + 1
        return h * self.rounds

    def none_first(self, h):
        self.started = 1.0 if self.started is None else 0.9 * self.started
        return h * self.started

    def none_beside_a_counter(self, h):
        self.num_calls += 1
        self.started = self.num_calls if self.started is None else self.started
        self.switches["scale"] = 0.5 ** (self.num_calls // 4)
        return h * (self.started + self.switches["scale"])

    def new_keys(self, h):
        self.by_default["calls"] += 1
        return h * self.by_default["calls"]

    # --- places of numbers -----------------------------------------------------------------------

    def highest(self, h):
        self.num_calls += 1
        self.best = max(self.best, 4 - self.num_calls)
        return h * (1 + self.best)

    def in_containers(self, h):
        self.counts[0] += 1
        self.nested["a"]["calls"] += 1
        self.nested["a"]["rates"][0] *= 0.9
        self.by_counter["calls"] += 1
        calls = self.counts[0] + self.nested["a"]["calls"] + self.by_counter["calls"]
        return h * calls * self.nested["a"]["rates"][0]

    def of_the_class(self, h):
        type(self).num_made += 1
        return h * (1 + self.num_made / 10)

    def of_a_dataclass(self, h):
        self.progress.step += 1
        self.progress.weight *= 0.9
        return h * (self.progress.weight + self.progress.step)

    def of_a_function(self, h):
        return self.scale(h)

    def hooked(self, h):
        return h

    def powers(self, h):
        self.num_calls += 1
        return h * (0.5**self.num_calls + 2**-self.num_calls + 2**self.num_calls % 3)


KINDS = (
    "toggled toggled_in_a_dictionary mode_by_count only_written not_there none_first "
    "none_beside_a_counter new_keys highest in_containers of_the_class of_a_dataclass "
    "of_a_function hooked powers mode_after_use mode_by_calls flag_by_calls "
    "frozen_by_calls"
).split()


def scaled_by_calls():
    num_calls = 0

    def scale(h):
        nonlocal num_calls
        num_calls += 1
        return h * num_calls

    return scale


def counting_hook():
    state = {"calls": 0}

    def hook(module, inputs, output):
        state["calls"] += 1
        return output * state["calls"]

    return hook


def raw_model(kind):
    Net.num_made = 0
    torch.manual_seed(3)
    return Net(kind)


def values_of(model):
    named = (
        "is_on mode started num_calls decay best note counts nested by_default by_counter switches "
        "rounds num_made is_hot"
    ).split()
    values = [getattr(model, name, None) for name in named]
    text = repr([*values, model.progress, model.part.training])
    return re.sub(r"\d+\.\d+", lambda found: f"{float(found[0]):.9f}", text)


def train_plainly(kind, microbatches):
    batches = map(batch, range(NUM_STEPS))
    return trained_plainly(raw_model(kind), batches, microbatches, values_of)


def train(keys, kinds):
    batches = [batch(number) for number in range(NUM_STEPS)]
    return {kind: trained(keys, raw_model(kind), batches, values_of) for kind in kinds}


@pytest.mark.parametrize(
    ("kinds", "stages"),
    [
        (["mode_by_count", "in_containers"], 2),
        *(pytest.param(KINDS, stages, marks=pytest.mark.slow) for stages in (1, 2)),
    ],
)
def test_every_microbatch_goes_on_by_what_the_one_before_has_left(kinds, stages):
    keys = {"pipeline_parallel_degree": stages, "microbatches": 2}
    for found in run_ranks(train, stages, keys, kinds):
        for kind, (losses, state, values) in found.items():
            expected, parameters, wanted = train_plainly(kind, 2)
            close(losses, expected)
            close(state, parameters)
            assert values == wanted, kind


class Growing(nn.Module):
    """Computes with the length of a list."""

    def __init__(self, computes):
        super().__init__()
        self.layer, self.calls, self.computes = nn.Linear(6, 4), [], computes

    def forward(self, x):
        self.calls.append(1)
        return self.layer(x) * (len(self.calls) if self.computes else 1)


def grow():
    found = []
    for computes in (False, True):
        smp.init({"microbatches": 2})
        raw = Growing(computes)
        model = smp.DistributedModel(raw)
        try:
            smp.step(train_step)(model, *batch(0))
            found.append("")
        except CaptureError as error:
            found.append(str(error))
        smp.shutdown()
    return found


def test_a_list_that_grows_and_is_computed_with_is_refused():
    ((harmless, text),) = run_ranks(grow, 1)
    assert not harmless
    assert "computes with model.calls, and changes it" in text and "register_buffer" in text
