"""Parameters that share memory without being one parameter."""

import pytest
import torch
from torch import nn

import mpxla as smp
from mpxla.graph.memory import sharing
from mpxla.runtime.shared_memory import warn_of_shared_memory
from mpxla.tests.clients import logged
from mpxla.tests.ranks.run import run_ranks


def parameters(*tensors):
    return {f"p{number}": nn.Parameter(tensor) for number, tensor in enumerate(tensors)}


def warned(*tensors):
    with logged() as lines:
        warn_of_shared_memory(parameters(*tensors))
    return lines


@pytest.mark.parametrize("number", range(3))
def test_what_shares_memory_is_named(number):
    whole = torch.randn(4, 4)
    other = (whole, whole.t(), whole[2])[number]
    with logged() as lines:
        warn_of_shared_memory(
            {f"one{number}": nn.Parameter(whole), f"two{number}": nn.Parameter(other)}
        )
    (line,) = lines
    assert f"the parameters one{number} and two{number} share memory" in line


def test_every_part_of_a_whole_is_named():
    whole = torch.randn(8)
    tensors = {"first": whole[:3], "whole": whole, "last": whole[5:], "other": torch.randn(8)}
    assert set(map(frozenset, sharing(tensors))) == {
        frozenset({"first", "whole"}),
        frozenset({"last", "whole"}),
    }


def test_parts_of_one_storage_share_nothing():
    flat, matrix = torch.randn(8), torch.randn(4, 4)
    assert warned(flat[:3], flat[3:], *matrix.split(2, 1), torch.randn(0), torch.randn(())) == []


def tied_by_data():
    smp.init({"microbatches": 1})
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    net[2].weight.data = net[0].weight.data

    @smp.step
    def step(model, x):
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    with logged() as lines:
        model = smp.DistributedModel(net)
        step(model, torch.ones(2, 4))
        step(model, torch.ones(2, 4))
    return [line for line in lines if "share memory" in line]


@pytest.mark.ranks
@pytest.mark.slow
def test_the_first_step_tells():
    ((line,),) = run_ranks(tied_by_data, 1)
    assert "To tie them, let both be one parameter: 2.weight = 0.weight" in line
