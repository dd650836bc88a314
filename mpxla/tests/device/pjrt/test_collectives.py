"""Programs with collectives inside, as jax makes them; `test_xla` and others run them."""

import re

import jax
import pytest
import torch
from torch import fx

from mpxla.comm.loopback import LoopbackTransport
from mpxla.comm.transport import Members
from mpxla.comm.xla import XlaTransport
from mpxla.device.fused import FusedExecutable
from mpxla.device.pjrt.backend import PjrtBackend
from mpxla.device.pjrt.collectives import _AXES, _traced
from mpxla.stage.piecewise import PiecewiseExecutable
from mpxla.stage.spec import TensorSpec

pytestmark = pytest.mark.unit

c10d = torch.ops._c10d_functional
aten = torch.ops.aten
SPEC = TensorSpec((4, 4), torch.float32)
WAIT = (c10d.wait_tensor.default,)
SUM = (c10d.all_reduce.default, "sum", "group")


def compiled(*targets, transport=None):
    """A program of operators one after the other, over the ranks 1 and 3 of a transport."""
    graph = fx.Graph()
    value = graph.placeholder("x")
    for target, *args in targets:
        value = graph.call_function(target, (value, *args))
    graph.output([value])
    groups = {"group": Members((1, 3), transport or object.__new__(XlaTransport))}
    module = fx.GraphModule(torch.nn.Module(), graph)
    return PjrtBackend("cpu").compile("stage 1 forward", module, [SPEC], groups=groups)


def test_the_text_has_the_collectives_of_the_graph():
    program = compiled(
        (aten.exp.default,),
        *(SUM, WAIT, (aten.sin.default,)),
        *((c10d.all_gather_into_tensor.default, 2, "group"), WAIT),
        *((c10d.reduce_scatter_tensor.default, "sum", 2, "group"), WAIT),
        *((c10d.all_reduce.default, "max", "group"), WAIT),
    )
    assert isinstance(program, FusedExecutable)
    mesh = jax.sharding.AbstractMesh((1, 2), _AXES)
    traced, _ = _traced(program._program, mesh)
    text = traced.lower(lowering_platforms=("cpu",)).as_text()
    assert re.findall(r"stablehlo\.(all_\w+|reduce_scatter|exponential|sine)\b", text) == [
        *("exponential", "all_reduce", "sine", "all_gather", "reduce_scatter", "all_reduce")
    ]
    assert len(re.findall(r"replica_groups = dense<\[\[0, 1\]\]>", text)) == 4


def test_what_cannot_be_one_program_is_left_to_pieces():
    assert isinstance(compiled(SUM, WAIT, transport=LoopbackTransport()), PiecewiseExecutable)
    random = (aten.bernoulli.p, 0.5)
    assert isinstance(compiled(random, SUM, WAIT), PiecewiseExecutable)
