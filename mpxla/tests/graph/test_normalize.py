"""What is taken out of a traced program before it becomes functional."""

from types import SimpleNamespace

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from mpxla.graph.normalize import drop_replayed_views

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("is_used", [False, True])
def test_views_that_nothing_uses_are_dropped_in_a_deep_program(is_used):
    graph = fx.Graph()
    base, x = graph.placeholder("base"), graph.placeholder("x")
    value = base
    for _ in range(50):  # there are 2^50 ways through it
        value = graph.call_function(torch.add, (value, graph.call_function(torch.sin, (value,))))
    graph.output(graph.call_function(torch.add, (value, x)) if is_used else x)
    with FakeTensorMode():
        lost = torch.empty(2)
    spec = SimpleNamespace(arg=SimpleNamespace(name="base"), target="lost")
    program = SimpleNamespace(
        graph=graph,
        graph_module=fx.GraphModule(nn.Module(), graph),
        graph_signature=SimpleNamespace(input_specs=[spec]),
        constants={"lost": lost},
    )
    drop_replayed_views(program)
    assert len(graph.nodes) == (104 if is_used else 2)
    assert ("lost" in program.constants) is is_used
