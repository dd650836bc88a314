"""Names of the tensors of several models."""

import pytest
import torch
from torch import nn

from mpxla.runtime.state import ModelState
from mpxla.runtime.states import ModelStates

pytestmark = pytest.mark.unit


class Head(nn.Module):
    def __init__(self, encoder):
        super().__init__()
        self.encoder, self.last = encoder, nn.Linear(2, 1, bias=False)


def made(*modules):
    states = ModelStates()
    return states, [states.add(ModelState(module)) for module in modules]


def test_one_model_keeps_its_names_and_is_all_there_is():
    module = nn.BatchNorm1d(2)
    states, labels = made(module)
    assert labels == [""]
    assert states.module is module
    assert states.current_names() == ModelState(module).canonical_names
    assert states.describe(["weight", "num_batches_tracked"]) == [
        "weight: float32[2]",
        "num_batches_tracked: int64[]",
    ]


def test_further_models_have_labels():
    states, labels = made(nn.Linear(2, 2), nn.Linear(2, 1, bias=False))
    assert labels == ["", "model_2"]
    assert states.current_names() == {
        "model_1.weight": "weight",
        "model_1.bias": "bias",
        "model_2.weight": "model_2.weight",
    }
    assert {name for name, _ in states.module.named_parameters()} == set(states.current_names())
    assert states.names_of("model_2") == {"model_2.weight": "weight"}
    assert states.owners(["bias", "model_2.weight"]) == {"", "model_2"}


def test_a_label_is_no_name_of_the_first_model():
    _, labels = made(nn.ModuleDict({"model_2": nn.Linear(1, 1)}), nn.Linear(1, 1))
    assert labels == ["", "model_2_"]


def test_what_is_shared_belongs_to_the_first_that_has_it():
    encoder = nn.BatchNorm1d(2)
    states, (first, second) = made(Head(encoder), Head(encoder))
    shared = {f"encoder.{n}" for n in ("weight", "bias", "running_mean", "running_var")}
    assert shared < set(states.names_of(first))
    assert states.names_of(second) == {"model_2.last.weight": "last.weight"}
    assert states.current_names()["model_2.encoder.weight"] == "encoder.weight"
    assert states.closure([second]) == [first, second]
    assert states.closure([first]) == [first]
    ranks = {"encoder.weight": (1,), "model_2.last.weight": (0,)}
    own = {"encoder.weight": (1,), "last.weight": (0,)}
    assert states.to_own_names(second, ranks) == own
    assert states.from_own_names(second, own) == ranks


def test_a_shared_buffer_is_replaced_everywhere():
    table = torch.zeros(2)
    modules = [nn.Module(), nn.Module()]
    for module, name in zip(modules, ("table", "list"), strict=True):
        module.register_buffer(name, table)
    states, _ = made(*modules)
    states.set_buffer("table", torch.ones(2))
    assert modules[0].table.sum() == modules[1].list.sum() == 2
