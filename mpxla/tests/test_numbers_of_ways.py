"""Numbers that step functions leave in Python on some ways, and go by on others: as PyTorch."""

import copy

import pytest
import torch
from torch import nn

import mpxla as smp
from mpxla.runtime import asking
from mpxla.tests.clients import close, logged, train_step, trained, trained_plainly
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks

MICROBATCHES, NUM_STEPS, LEVEL = 4, 3, 1.7
BEGIN = {"best": 1e9, "bad": 0, "is_high": False, "phase": "low", "first": None, "calls": 0}
state, places = {}, [0, 1e9]
fails = 0


class Net(nn.Module):
    """Layers around what `kind` names."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.least, self.waited = kind, 1e9, 0
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x):
        h = torch.tanh(self.first(x))
        return self.last(getattr(self, self.kind)(h, h.norm().item()))

    def best_so_far(self, h, norm):
        if norm < state["best"]:
            state["best"] = norm
            return 2 * h
        return h

    def reset(self, h, norm):
        if norm > LEVEL:
            state["bad"] += 1
        else:
            state["bad"] = 0
        return h

    def reset_attribute(self, h, norm):
        if norm < self.least:
            self.least, self.waited = norm, 0
        else:
            self.waited += 1
        return h

    def counted_and_used(self, h, norm):
        if norm > LEVEL:
            state["bad"] += 1
            if state["bad"] > 1:
                h = h / 2
        else:
            state["bad"] = 0
        return h

    def used_elsewhere(self, h, norm):
        global fails
        if norm > LEVEL:
            fails += 1
        elif fails > 1:
            h = h / 2
        return h

    def in_a_list(self, h, norm):
        if norm < places[1]:
            places[:] = [0, norm]
        else:
            places[0] += 1
        return h * (1 + places[0])

    def begun_with_none(self, h, norm):
        if state["first"] is None or norm < state["first"]:
            state["first"] = norm
        return h

    def begun_with_nothing(self, h, norm):
        if norm < state.get("lowest", 1e9):
            state["lowest"] = norm
            h = 2 * h
        return h

    def flags(self, h, norm):
        if norm > LEVEL:
            state["is_high"], state["phase"] = True, "high"
        else:
            state["is_high"], state["phase"] = False, "low"
        h = 3 * h if state["is_high"] else h
        return 2 * h if state["phase"] == "high" else h

    def cooled(self, h, norm):
        self.waited += 1
        h = h / (1 + self.waited)
        return 2 * h if norm > LEVEL else h

    def only_left(self, h, norm):
        state["norm"] = norm
        state["calls"] += 1
        return 2 * h if norm > LEVEL else h


KINDS = [
    k for k in vars(Net) if not k.startswith("_") and callable(vars(Net)[k]) and k != "forward"
]


def batch(number):
    generator = torch.Generator().manual_seed(number)
    scales = torch.rand(MICROBATCHES, generator=generator).repeat_interleave(4)[:, None]
    x = scales * torch.randn(4 * MICROBATCHES, 6, generator=generator)
    return x, torch.randint(4, (4 * MICROBATCHES,), generator=generator)


def raw_model(kind):
    global fails
    fails = 0
    state.clear()
    state.update(BEGIN)
    places[:] = [0, 1e9]
    torch.manual_seed(3)
    return Net(kind)


def values_of(model):
    numbers = [places, fails, model.least, model.waited]
    return copy.deepcopy((state, [float(number) for number in flat(numbers)]))


def flat(numbers):
    return torch.utils._pytree.tree_leaves(numbers)


def train(keys, kinds):
    found = {}
    for kind in kinds:
        with logged() as lines:
            trains = trained(keys, raw_model(kind), map(batch, range(NUM_STEPS)), values_of)
        found[kind] = *trains, any("one after the other where they do" in line for line in lines)
    return found


def assert_same_values(seen, expected):
    for (own, numbers), (wanted, other) in zip(seen, expected, strict=True):
        assert own.keys() == wanted.keys()
        for key, value in wanted.items():
            assert type(own[key]) is type(value)
            assert own[key] == (pytest.approx(value, rel=1e-4) if type(value) is float else value)
        assert numbers == pytest.approx(other, rel=1e-4)


@pytest.mark.parametrize(
    ("kinds", "stages"),
    [
        (["best_so_far", "reset", "only_left"], 2),
        *(pytest.param(KINDS, stages, marks=pytest.mark.slow) for stages in (1, 2)),
    ],
)
def test_what_one_way_leaves_decides_for_the_next_microbatch(kinds, stages):
    keys = {"pipeline_parallel_degree": stages, "microbatches": MICROBATCHES}
    for rank, found in enumerate(run_ranks(train, stages, keys, kinds)):
        for kind, (losses, parameters, seen, is_in_turn) in found.items():
            wanted = trained_plainly(
                raw_model(kind), map(batch, range(NUM_STEPS)), MICROBATCHES, values_of
            )
            close(losses, wanted[0])
            close(parameters, wanted[1])
            assert_same_values(seen, wanted[2])
            assert rank or is_in_turn == (kind not in ("reset", "flags", "only_left"))


def train_with_few_ways(keys, kinds):
    asking.MOST_WAYS = 3
    return train(keys, kinds)


@pytest.mark.slow
def test_each_value_has_its_own_ways():
    (found,) = run_ranks(train_with_few_ways, 1, {"microbatches": MICROBATCHES}, ["cooled"])
    batches = map(batch, range(NUM_STEPS))
    expected, *_ = trained_plainly(raw_model("cooled"), batches, MICROBATCHES, values_of)
    close(found["cooled"][0], expected)


def refused():
    with pytest.raises(smp.errors.StepError) as caught:
        smp.init({"ddp": True, "microbatches": 2})
        smp.step(train_step)(smp.DistributedModel(raw_model("best_so_far")), *batch(0))
    return str(caught.value)


def test_replicas_do_not_run_one_after_the_other_by_numbers_in_python():
    for text in run_ranks(refused, 2):
        assert "depends on state['best'], which earlier microbatches write to" in text
        assert "not possible with several replicas" in text
