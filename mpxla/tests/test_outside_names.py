"""State and caches that a forward keeps outside of attributes: they are followed, or an error."""

import contextvars
import functools
import gc

import pytest
import torch
from torch import nn

import mpxla as smp
from mpxla.errors import CaptureError
from mpxla.tests.kept_state import (
    MICROBATCHES,
    batch_of,
    loss_of,
    train_layer,
    train_layer_plainly,
)
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks


class Box:
    """A place for what a forward keeps."""

    value = None
    calls = 0


CACHE, TABLES, BOX = {}, [None] * 3, Box()
MASK = None


def helper():
    """A function with attributes."""


def by_its_table(layer, x):
    table = vars(layer)
    table["mean"] = 0.5 * table.get("mean", 0) + x.detach().mean(0)
    return x - table["mean"]


def begun_by_its_table(layer, x):
    layer.__dict__.setdefault("sum", torch.zeros(3, dtype=torch.float64))
    layer.__dict__["sum"] = layer.sum + 1
    return x * layer.sum


def counted_by_its_table(layer, x):
    layer.__dict__["calls"] = layer.__dict__.get("calls", 0) + 1
    return x * layer.__dict__["calls"]


def begun_alike(layer, x):
    """The first two calls are the same."""
    layer.calls = getattr(layer, "calls", 0) + 1
    return 2 * x if layer.calls % 2 else x * layer.calls


def counted_by_the_class(layer, x):
    type(layer).calls = getattr(type(layer), "calls", 0) + 1
    return 2 * x if type(layer).calls % 2 else x * type(layer).calls


def counted_by_a_function(_, x):
    helper.calls = getattr(helper, "calls", 0) + 1
    return x * helper.calls


def counted_by_a_new_global(_, x):
    global CALLS
    try:
        CALLS = CALLS + 1
    except NameError:
        CALLS = 1
    return x * CALLS


def another_way_once(_, x):
    if not hasattr(Layer, "is_warm"):
        Layer.is_warm = True
        return 2 * x
    return x


def counted_beside_a_cache(layer, x):
    if getattr(layer, "table", None) is None:
        layer.table = positions()
    layer.calls = getattr(layer, "calls", 0) + 1
    return (x + layer.table) * layer.calls


def counted_beside_what_it_begins(layer, x):
    if getattr(layer, "table", None) is None:
        layer.table = positions()
    layer.calls = getattr(layer, "calls", 0) + 1
    layer.table = layer.table / 2
    return (x + layer.table) * layer.calls


def counted_beside_an_objects_cache(_, x):
    if BOX.value is None:
        BOX.value = positions()
    BOX.calls += 1
    return (x + BOX.value) * (2 if BOX.calls % 3 else 1)


def counted_in_what_it_makes(layer, x):
    if not hasattr(layer, "counts"):
        layer.counts = {"calls": 0, "more": [0]}
    layer.counts["calls"] += 1
    layer.counts["more"][0] += 2
    return x * layer.counts["calls"] / layer.counts["more"][0] + layer.counts["calls"]


def counted_beside_tensors_in_what_it_makes(layer, x):
    if not hasattr(layer, "counts"):
        layer.counts = {"calls": 0, "table": positions()}
    layer.counts["calls"] += 1
    return x * layer.counts["calls"] + layer.counts["table"]


def counted_in_a_list_of_a_global(_, x):
    global MASK
    if MASK is None:
        MASK = [0]
    MASK[0] += 1
    return x * MASK[0]


def counted_in_an_object_of_a_global(_, x):
    global MASK
    if MASK is None:
        MASK = Box()
    MASK.calls += 1
    return x * MASK.calls


def comes_to_rest(layer, x):
    layer.last = [*getattr(layer, "last", []), 1][-2:]
    return x * len(layer.last)


def counted_by_globals(_, x):
    globals()["CALLS"] = globals().get("CALLS", 0) + 1
    return x * globals()["CALLS"]


def positions():
    return torch.arange(3, dtype=torch.float64)


def cached_by_a_dictionary(_, x):
    if x.shape[1] not in CACHE:
        CACHE[x.shape[1]] = positions(), positions() / 2
    return x + CACHE[x.shape[1]][0] * CACHE[x.shape[1]][1]


def cached_inside(_, x):
    return x + CACHE.setdefault("tables", {}).setdefault(x.shape[1], positions())


def cached_if_too_short(_, x):
    table = CACHE.get("table")
    if table is None or len(table) < x.shape[1]:
        CACHE["table"] = table = torch.arange(8, dtype=torch.float64)
    return x + table[: x.shape[1]]


def cached_in_a_list(_, x):
    if TABLES[1] is None:
        TABLES[1] = positions()
    return x + TABLES[1]


def cached_by_a_global(_, x):
    global MASK
    if MASK is None:
        MASK = positions()
    return x + MASK


def cached_by_an_object(_, x):
    if BOX.value is None:
        BOX.value = positions()
    return x + BOX.value


def cached_by_a_new_dictionary(_, x):
    if not hasattr(BOX, "tables"):
        BOX.tables = {}
    if x.shape[1] not in BOX.tables:
        BOX.tables[x.shape[1]] = positions()
    return x + BOX.tables[x.shape[1]]


def cached_by_a_function(_, x):
    helper.tables = getattr(helper, "tables", None) or {}
    if 0 not in helper.tables:
        helper.tables[0] = positions()
    return x + helper.tables[0]


def cached_by_its_size(_, x):
    global MASK
    if MASK is None or BOX.calls != x.shape[1]:
        MASK, BOX.calls = positions(), x.shape[1]
    return x * MASK


def cached_beside_a_flag_of_the_class(_, x):
    if not hasattr(Layer, "is_warm"):
        Layer.table, Layer.is_warm = positions(), True
    return x * Layer.table


def cached_by_the_class(layer, x):
    if not hasattr(layer, "table"):
        type(layer).table = positions()
    return x + layer.table


@functools.lru_cache(typed=True)
def remembered(size, dtype=torch.float64, *, scale=1.0):
    return torch.arange(size, dtype=dtype) * scale


@functools.cache
def noise():
    return torch.rand(3, dtype=torch.float64)


def cached_by_functools(layer, x):
    return x + remembered(3) * remembered(x.shape[1], scale=0.5) + layer.remembered(2)


def drawn_once(_, x):
    return x + noise()


def tensors_of_the_class(layer, x):
    type(layer).sum = getattr(type(layer), "sum", torch.zeros(3, dtype=torch.float64)) + 1
    return x * type(layer).sum


def begun_by_the_class(_, x):
    Layer.sum = Layer.sum + x.detach().mean(0) if hasattr(Layer, "sum") else x.new_zeros(3)
    return x - Layer.sum


def counted_in_an_object_with_tensors(layer, x):
    if not hasattr(layer, "box"):
        layer.box = Box()
        layer.box.value = positions()
    layer.box.calls += 1
    return x * layer.box.calls + layer.box.value


def counted_beside_a_cache_in_a_dictionary(layer, x):
    if "table" not in layer.numbers:
        layer.numbers["table"] = positions()
    layer.numbers["calls"] += 1
    return x * layer.numbers["calls"] + layer.numbers["table"]


def another_way_by_its_dictionary(layer, x):
    if "table" in layer.kept:
        return x * layer.kept["table"]
    layer.kept["table"] = positions()
    return x


def begun_by_its_counter(layer, x):
    layer.calls = getattr(layer, "calls", 0) + 1
    if layer.calls == 1:
        layer.table = positions()
        return x
    return (x + layer.table) * layer.calls


def cached_by_its_counter(layer, x):
    layer.calls = getattr(layer, "calls", 0) + 1
    if layer.calls == 1:
        layer.table = positions()
    return (x + layer.table) * layer.calls


def tensors_of_a_function(_, x):
    helper.sum = getattr(helper, "sum", torch.zeros(3, dtype=torch.float64)) + 1
    return x * helper.sum


def another_way_by_a_dictionary(_, x):
    if "sum" not in CACHE:
        CACHE["sum"] = positions()
        return x
    return x * CACHE["sum"]


def another_way_by_a_global(_, x):
    global MASK
    if MASK is None:
        MASK = positions()
        return 2 * x
    return x * MASK


def another_way_by_its_flag(layer, x):
    """What it leaves the first time it reads only later."""
    if not getattr(layer, "is_begun", False):
        layer.is_begun, layer.table = True, positions()
        return 2 * x
    return x * layer.table


def another_way_by_a_flag(_, x):
    global MASK
    if not BOX.calls:
        BOX.calls, MASK = 1, positions()
        return 2 * x
    return x * MASK


def summed_in_a_dictionary(_, x):
    CACHE["sum"] = CACHE.get("sum", positions()) + 1
    return x * CACHE["sum"]


def lists_of_a_global(_, x):
    global MASK
    MASK = [*(MASK or []), 1]
    return x * len(MASK)


def lists_of_the_class(_, x):
    Layer.seen = [*getattr(Layer, "seen", []), 1]
    return x * len(Layer.seen)


def averaged_beside_a_text(layer, x):
    if not layer.kept:
        layer.kept = {"kind": "mean", "mean": torch.zeros(3, dtype=torch.float64)}
    layer.kept["mean"] = 0.9 * layer.kept["mean"] + 0.1 * x.detach().mean(0)
    return x - layer.kept["mean"]


def counted_in_what_it_makes_with_a_cache(layer, x):
    if not layer.kept:
        layer.kept = {"calls": 0, "table": positions()}
    layer.kept["calls"] += 1
    return x * layer.kept["calls"] + layer.kept["table"]


def counted_in_a_pair_with_a_cache(layer, x):
    table, calls = layer.kept or (positions(), 0)
    layer.kept = table, calls + 1
    return x * layer.kept[1] + table


TIMES = contextvars.ContextVar("times", default=0)


def counted_by_a_context_variable(_, x):
    TIMES.set(TIMES.get() + 1)
    return x * TIMES.get()


def counted_by_a_set(layer, x):
    layer.seen.add(len(layer.seen))
    return x * len(layer.seen)


def buffer_by_its_table(layer, x):
    layer._buffers["made"] = layer._buffers.get("made", 0) + x.detach().mean(0)
    return x - layer.made


STATE = (
    *(by_its_table, begun_by_its_table, counted_by_its_table, begun_alike),
    *(counted_beside_a_cache, counted_beside_an_objects_cache, counted_in_what_it_makes),
    *(counted_beside_tensors_in_what_it_makes, counted_in_a_list_of_a_global),
    *(counted_beside_a_cache_in_a_dictionary, another_way_by_its_dictionary),
    *(another_way_by_its_flag, counted_beside_what_it_begins, begun_by_its_counter),
    *(counted_in_an_object_of_a_global, counted_by_globals, comes_to_rest),
    *(counted_by_the_class, counted_by_a_function, counted_by_a_new_global, another_way_once),
)
CACHES = (
    *(cached_by_a_dictionary, cached_inside, cached_if_too_short, cached_in_a_list),
    *(cached_by_a_global, cached_by_an_object, cached_by_a_new_dictionary),
    *(cached_by_a_function, cached_by_the_class, cached_by_functools, drawn_once),
    *(cached_by_its_size, cached_beside_a_flag_of_the_class, cached_by_its_counter),
)
FEW = (
    *(begun_by_its_table, counted_by_the_class, counted_beside_a_cache, counted_in_what_it_makes),
    *(cached_inside, cached_by_functools, drawn_once, another_way_by_its_dictionary),
    *(cached_by_its_size, another_way_by_its_flag, counted_beside_what_it_begins),
)
REFUSED = {
    tensors_of_the_class: "reads Layer.sum, and gives it a tensor",
    begun_by_the_class: "reads Layer.sum, and gives it a tensor",
    tensors_of_a_function: "reads helper.sum, and gives it a tensor",
    another_way_by_a_dictionary: "reads CACHE, and gives it a tensor",
    another_way_by_a_global: "reads MASK, and gives it a tensor",
    another_way_by_a_flag: "reads MASK, and gives it a tensor",
    summed_in_a_dictionary: "reads CACHE, and gives it a tensor",
    counted_in_an_object_with_tensors: ".box.calls, and changes it",
    lists_of_a_global: "computes with MASK, and changes it",
    lists_of_the_class: "computes with Layer.seen, and changes it",
    averaged_beside_a_text: ".kept, and gives it a tensor",
    counted_in_what_it_makes_with_a_cache: ".kept, and changes it",
    counted_in_a_pair_with_a_cache: ".kept, and gives it a tensor",
    counted_by_a_context_variable: "computes with TIMES, and changes it",
    counted_by_a_set: ".seen, and changes it",
    buffer_by_its_table: "makes the buffer made of a Layer by its table",
}


class Layer(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.kept, self.numbers, self.seen = {}, {"calls": 0}, set()

    @functools.lru_cache  # noqa: B019
    def remembered(self, count):
        return positions() + count

    def forward(self, x):
        return self.function(self, x)


def forget():
    """Everything is what it was when this file was imported."""
    global MASK
    MASK, TABLES[1] = None, None
    globals().pop("CALLS", None)
    for memo in (remembered, noise, Layer.remembered):
        memo.cache_clear()
    CACHE.clear()
    vars(BOX).clear()
    vars(helper).clear()
    for name in {"calls", "is_warm", "table", "sum", "seen"} & vars(Layer).keys():
        delattr(Layer, name)


def expected(function):
    def evaluated(model, number):
        with torch.no_grad():
            parts = batch_of(number).chunk(MICROBATCHES)
            return [sum(loss_of(model, part).item() for part in parts) / MICROBATCHES]

    forget()
    return train_layer_plainly(Layer(function), evaluated)


@smp.step
def evaluate(model, x):
    return loss_of(model, x)


def trained(function):
    def evaluated(model, number):
        with torch.no_grad():
            return [evaluate(model, batch_of(number)).reduce_mean().item()]

    forget()
    return train_layer(Layer(function), evaluated)


def losses_of(config, functions):
    smp.init({"microbatches": MICROBATCHES, **config})
    if config["pipeline_parallel_degree"] > 1:
        gc.freeze()  # as some scripts do: what is frozen is harder to find
    return [trained(function) for function in functions]


def errors_of(functions):
    smp.init({"microbatches": MICROBATCHES})
    found = []
    for function in functions:
        with pytest.raises(CaptureError) as caught:
            trained(function)
        found.append(str(caught.value))
    return found


@pytest.mark.parametrize(
    ("stages", "functions"),
    [
        pytest.param(1, (*STATE, *CACHES), marks=pytest.mark.slow),
        (2, FEW),
        pytest.param(2, STATE, marks=pytest.mark.slow),
        pytest.param(2, CACHES, marks=pytest.mark.slow),
    ],
    ids=["one", "two", "two-state", "two-caches"],
)
def test_state_and_caches(stages, functions):
    config = {"pipeline_parallel_degree": stages}
    for results in run_ranks(losses_of, stages, config, functions, env={"MPXLA_DEVICE": "pjrt"}):
        for function, losses in zip(functions, results, strict=True):
            assert losses == pytest.approx(expected(function), rel=1e-9), function.__name__


def test_what_nothing_carries_is_refused():
    (errors,) = run_ranks(errors_of, 1, [*REFUSED])
    for text, error in zip(REFUSED.values(), errors, strict=True):
        assert text in error
