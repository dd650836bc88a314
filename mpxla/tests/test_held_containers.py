"""Lists and dictionaries of modules that a script holds, too: a step changes those, not others."""

import pytest
import torch
from torch import nn

import mpxla as smp
from mpxla.tests.kept_state import MICROBATCHES, train_layer, train_layer_plainly
from mpxla.tests.ranks.run import run_ranks


def beside_a_cache(layer, x):
    if "table" not in layer.kept:
        layer.kept["table"] = torch.arange(3, dtype=torch.float64)
    layer.kept["sum"] += 1
    return x * layer.kept["sum"] + layer.kept["table"]


def summed(layer, x):
    layer.kept["sum"] = layer.kept["sum"] + x.detach().sum()
    return x - layer.kept["sum"]


def beside_a_cache_in_a_list(layer, x):
    if layer.kept[1] is None:
        layer.kept[1] = torch.arange(3, dtype=torch.float64)
    layer.kept[0] += 1
    return x * layer.kept[0] + layer.kept[1]


def summed_in_a_list(layer, x):
    layer.kept[0] = layer.kept[0] + x.detach().sum()
    return x - layer.kept[0]


def begun_in_a_list(layer, x):
    if not layer.kept:
        layer.kept.append(zero())
    return summed_in_a_list(layer, x)


def begun_beside_another(layer, x):
    layer.kept["sum"] = layer.kept.get("sum", zero()) + layer.kept["one"]
    return x - layer.kept["sum"]


def another_list_each_time(layer, x):
    layer.kept = [layer.kept[0] + x.detach().sum()]
    return x - layer.kept[0]


def zero():
    return torch.zeros((), dtype=torch.float64)


CASES = {
    beside_a_cache: lambda: {"sum": 0},
    summed: lambda: {"sum": zero()},
    beside_a_cache_in_a_list: lambda: [0, None],
    summed_in_a_list: lambda: [zero()],
    begun_in_a_list: list,
    begun_beside_another: lambda: {"one": zero() + 1},
    another_list_each_time: lambda: [zero()],
}


class Layer(nn.Module):
    def __init__(self, function, kept):
        super().__init__()
        self.function, self.kept = function, kept

    def forward(self, x):
        return self.function(self, x)


def losses_of(train, function):
    """Losses and what the script reads in its container, which it sets back once."""
    held = CASES[function]()
    layer, key = Layer(function, held), "sum" if isinstance(held, dict) else 0

    def after(_, number):
        read = float(held[key])
        if number == 1:
            held[key] = type(held[key])(0) if isinstance(held[key], int) else zero()
        return [read]

    return train(layer, after)


def all_losses():
    smp.init({"microbatches": MICROBATCHES})
    return [losses_of(train_layer, function) for function in CASES]


@pytest.mark.parametrize("device", ["pjrt", "torch_xla"])
def test_a_script_sees_and_changes_what_steps_go_on_with(device):
    (found,) = run_ranks(all_losses, 1, env={"MPXLA_DEVICE": device})
    for function, losses in zip(CASES, found, strict=True):
        expected = losses_of(train_layer_plainly, function)
        assert losses == pytest.approx(expected, rel=1e-9), function.__name__
