"""Stage programs with collectives inside, as torch_xla makes them; `test_parity_tensor` runs them.

One process suffices to read a program.
"""

import re

import pytest
import torch
from torch import fx

from mpxla.comm.loopback import LoopbackTransport
from mpxla.comm.transport import Members
from mpxla.comm.xla import XlaTransport
from mpxla.device.fused import fuse
from mpxla.device.torch_xla.collectives.programs import COLLECTIVES
from mpxla.stage.pieces import annotate
from mpxla.stage.spec import TensorSpec
from mpxla.tests.programs import traced_text

pytestmark = pytest.mark.unit

c10d = torch.ops._c10d_functional
aten = torch.ops.aten
SPEC = TensorSpec((4, 4), torch.float32)


def graph_of(*targets, results=1):
    """One after the other on the first of two arguments; the second is handed on."""
    graph = fx.Graph()
    value, other = graph.placeholder("x"), graph.placeholder("y")
    for target, *args in targets:
        value = graph.call_function(target, (value, *args))
    graph.output((value,) * results + (other,))
    module = fx.GraphModule(torch.nn.Module(), graph)
    annotate(module, [SPEC, SPEC])
    return module


def fused(graph, transport=None):
    transport = transport or object.__new__(XlaTransport)
    groups = {"group": Members((1, 3), transport)}
    specs = [SPEC, SPEC]
    return fuse("stage 1 forward", graph, specs, groups, COLLECTIVES, list)


SUM = (c10d.all_reduce.default, "sum", "group")
WAIT = (c10d.wait_tensor.default,)


def test_the_text_has_the_collectives_of_the_graph():
    graph = graph_of(
        (aten.exp.default,),
        *(SUM, WAIT, (aten.sin.default,)),
        *((c10d.all_gather_into_tensor.default, 2, "group"), WAIT),
        *((c10d.reduce_scatter_tensor.default, "sum", 2, "group"), WAIT),
        *((c10d.all_reduce.default, "max", "group"), WAIT),
    )
    text = traced_text(fused(graph))
    assert re.findall(r"stablehlo\.(all_\w+|reduce_scatter|exponential|sine)\b", text) == [
        *("exponential", "all_reduce", "sine", "all_gather", "reduce_scatter", "all_reduce")
    ]
    # The members of the group are the program's replicas, whatever ranks they are.
    assert len(re.findall(r"replica_groups = dense<\[\[0, 1\]\]>", text)) == 4


def test_results_that_are_arguments_or_twice_the_same():
    program = fused(graph_of(SUM, WAIT, results=2))
    assert program._results == (0, 0, (1,))
    assert len(program._program.results) == 1


def test_what_cannot_be_one_program_is_left_to_pieces():
    assert fused(graph_of(SUM, WAIT), LoopbackTransport()) is None
    assert fused(graph_of((aten.bernoulli.p, 0.5), SUM, WAIT)) is None
    swap = (c10d.all_to_all_single.default, [2, 2], [2, 2], "group")
    assert fused(graph_of(swap, WAIT)) is None
