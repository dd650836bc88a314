"""Buffers that the first call of a forward makes: they are carried, as in plain PyTorch.

And others that layers go by in ways of their own.
"""

import pytest
import torch
from torch import nn

import mpxla as smp
from mpxla.tests.clients import logged
from mpxla.tests.kept_state import MICROBATCHES, train_layer, train_layer_plainly
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks


def counted(layer, x):
    if not hasattr(layer, "made"):
        layer.register_buffer("made", torch.zeros(3, dtype=torch.float64))
    layer.made = layer.made + 1
    return x * layer.made


def counted_in_place(layer, x):
    if not hasattr(layer, "made"):
        layer.register_buffer("made", torch.zeros(3, dtype=torch.float64))
    layer.made += 1
    return x * layer.made


def by_the_first_batch(layer, x):
    if not hasattr(layer, "made"):
        layer.register_buffer("made", x.detach().std(0), persistent=False)
    return x / layer.made


def averaged(layer, x):
    if not hasattr(layer, "made"):
        layer.register_buffer("made", x.detach().mean(0))
    layer.made.mul_(0.5).add_(x.detach().mean(0))
    return x * layer.made


def two_at_once(layer, x):
    """The one that is a constant says whether the other one is there."""
    if not hasattr(layer, "made"):
        layer.register_buffer("made", torch.tensor(0.0, dtype=torch.float64))
        layer.register_buffer("scale", x.detach().std(0))
    layer.made += 1
    return x * layer.made / layer.scale


def of_none(layer, x):
    if layer.none is None:
        layer.none = x.detach().std(0)
    return x / layer.none


def constant(layer, x):
    if not hasattr(layer, "made"):
        layer.register_buffer("made", torch.full((3,), 2.0, dtype=torch.float64))
    return x * layer.made


def another_way(layer, x):
    """What it finds is a constant, and it computes something else with it than without."""
    if layer.none is None:
        layer.none = torch.full((3,), 0.5, dtype=torch.float64)
        return 2 * x
    return x * layer.none


def begun_anew(layer, x):
    """The script empties it after the first step."""
    if layer.calls == 0:
        layer.mean = x.detach().mean(0)
    else:
        layer.mean = 0.5 * layer.mean + 0.5 * x.detach().mean(0)
    layer.calls += 1
    return x - layer.mean


def asked(layer, x):
    """By a value of the model, which other models of the same step function do not go by."""
    if layer.count.item() == 0:
        layer.start.copy_(x.detach().mean(0))
    layer.count += 1
    return x - layer.start


def leaf(layer, x):
    """A buffer that is to have a gradient, which nobody reads: sums of losses begin so."""
    return x + layer.start.requires_grad_()


def classes(layer, x):
    """Values of the model say how many classes there are."""
    places = x.argmax(1)
    return x * torch.nn.functional.one_hot(places, max(places.max() + 1, 2))[:, :1]


def empty(layer):
    layer.mean, layer.calls = None, 0


FUNCTIONS = (
    *(counted, counted_in_place, by_the_first_batch),
    *(averaged, two_at_once, of_none, constant, another_way, asked, leaf, classes),
)


class Layer(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.mean, self.calls = None, 0
        self.register_buffer("none", None)
        self.register_buffer("start", torch.zeros(3))
        self.register_buffer("count", torch.tensor(0.0))

    def forward(self, x):
        return self.function(self, x)


def expected(function, microbatches=MICROBATCHES):
    def after(model, number):
        if number == 0:
            empty(model[1])
        return []

    return train_layer_plainly(Layer(function), after, microbatches)


def trained(config, functions):
    smp.init({"microbatches": MICROBATCHES, **config})
    results = []
    for function in functions:
        layer = Layer(function)

        def after(_, number, layer=layer):
            if number == 0:
                empty(layer)
            return []

        with logged() as lines:
            losses = train_layer(layer, after)
        told = [line for line in lines if "which no state dict has" in line]
        results.append((losses, told))
    return results


@pytest.mark.parametrize(
    ("stages", "functions"),
    [
        pytest.param(1, FUNCTIONS, marks=pytest.mark.slow),
        (2, (counted, by_the_first_batch, two_at_once, another_way, asked, leaf, classes)),
        pytest.param(2, FUNCTIONS, marks=pytest.mark.slow),
    ],
    ids=["one", "two", "two-all"],
)
def test_buffers_that_the_first_call_makes(stages, functions):
    config = {"pipeline_parallel_degree": stages}
    for results in run_ranks(trained, stages, config, functions, env={"MPXLA_DEVICE": "pjrt"}):
        for function, (losses, _) in zip(functions, results, strict=True):
            assert losses == pytest.approx(expected(function), rel=1e-9), function.__name__


def test_what_a_script_has_emptied_is_there_again_on_all_ranks():
    config = {"pipeline_parallel_degree": 2, "microbatches": 1}
    for ((losses, _),) in run_ranks(trained, 2, config, [begun_anew]):
        assert losses == pytest.approx(expected(begun_anew, 1), rel=1e-9)


def test_that_state_dicts_lack_them_is_said():
    (results,) = run_ranks(trained, 1, {}, (by_the_first_batch, averaged))
    (_, untold), (_, told) = results
    assert not untold  # it was to be in none
    assert any("makes the buffer made of a Layer at" in line for line in told)
