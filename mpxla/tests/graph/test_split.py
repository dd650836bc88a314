"""Cutting a graph: what stages read and give, which gradients travel, equal numbers."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mpxla.graph.capture.recorder import current_recorder
from mpxla.graph.capture.step import TensorLeaf, ToCapture, capture_step
from mpxla.graph.split import backward_transfers, forward_transfers, split_stages
from mpxla.graph.stepgraph import InputKind
from mpxla.runtime.state import ModelState

pytestmark = pytest.mark.unit


class Skip(nn.Module):
    """a -> b -> c, with a skip from a to c; the weight of a is also read by c."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        first = torch.tanh(self.a(x))
        second = torch.tanh(self.b(first))
        return self.c(second) + F.linear(first, self.a.weight), second.detach()


def captured(is_training=True):
    model = Skip()

    def step(leaves):
        out, fixed = model(leaves[0])
        loss = F.cross_entropy(out + fixed, leaves[1])
        if is_training:
            current_recorder().backward(loss)
        return loss

    leaves = (TensorLeaf((2, 4), torch.float32), TensorLeaf((2,), torch.int64))
    return model, capture_step(ToCapture(step, model, leaves, ModelState(model).canonical_names))


def assign(step, cuts, copies=()):
    """Stage of every computing node by module path: `cuts` lists the first letter of each stage."""
    stages, stage = {}, 0
    for node in step.graph.nodes:
        if node.op != "call_function":
            continue
        path = [p for p, _ in (node.meta.get("nn_module_stack") or {}).values() if p]
        letter = path[-1].rpartition(".")[2] if path else ""
        stage = max(stage, cuts.get(letter, stage))
        stages[node] = (stage,)
    return stages


def three_stages(is_training=True):
    model, step = captured(is_training)
    stages = split_stages(step, assign(step, {"a": 0, "b": 1, "c": 2}), 3)
    return model, step, stages


def test_every_stage_holds_its_own_parameters_and_shared_ones():
    _, _, stages = three_stages()
    assert [set(stage.parameters) for stage in stages] == [
        {"a.weight", "a.bias"}, {"b.weight", "b.bias"}, {"c.weight", "c.bias", "a.weight"},
    ]  # fmt: skip
    assert all(set(stage.trained) == set(stage.parameters) for stage in stages)


def test_values_go_straight_to_every_stage_that_reads_them():
    _, _, stages = three_stages()
    forward = {(t.source, t.target): len(t.names) for t in forward_transfers(stages)}
    # (0, 2): the skip, and the labels, which live with stage 0.
    assert forward == {(0, 1): 1, (0, 2): 2, (1, 2): 1}
    backward = {(t.source, t.target): len(t.names) for t in backward_transfers(stages)}
    assert backward == {(1, 0): 1, (2, 0): 1, (2, 1): 1}
    (skip,) = [p for p in stages[0].outputs if 2 in p.consumers]
    assert skip.consumers == (1, 2) and skip.grad_sources == (1, 2)
    labels = [p for p in stages[2].inputs if p.source is None]
    assert [(p.leaf, p.has_grad, p.spec.dtype) for p in labels] == [(1, False, torch.int64)]


def test_evaluation_sends_no_gradients():
    _, _, stages = three_stages(is_training=False)
    assert backward_transfers(stages) == ()
    assert [stage.num_objectives for stage in stages] == [0, 0, 0]
    assert [stage.trained for stage in stages] == [()] * 3


def test_objective_and_result_are_where_they_are_computed():
    _, _, stages = three_stages()
    assert [stage.num_objectives for stage in stages] == [0, 0, 1]
    assert [stage.results for stage in stages] == [(), (), (0,)]
    assert stages[2].result_specs[0].shape == ()


def test_replicated_node_crosses_no_border():
    _, step = captured()
    stages_of = assign(step, {"a": 0, "b": 1, "c": 2})
    copied = next(n for n in stages_of if n.target is torch.ops.aten.tanh.default)
    needed = [n for n in stages_of if stages_of[n] == (0,)]
    stages_of.update({node: (0, 1, 2) for node in needed})
    assert copied in needed
    stages = split_stages(step, stages_of, 3)
    forward = {(t.source, t.target): t.names for t in forward_transfers(stages)}
    assert set(forward) == {(0, 1), (0, 2), (1, 2)}
    assert all(copied.name not in names for names in forward.values())
    assert backward_transfers(stages)[0].target == 1


def test_stages_in_a_row_compute_what_the_whole_does():
    model, step, stages = three_stages()
    x, y = torch.randn(2, 4), torch.tensor([1, 3])
    state = dict(model.named_parameters())
    leaves = [x, y]
    values = {}
    for stage in stages:
        arguments = [state[name] for name in stage.parameters]
        arguments += [step.constants[name] for name in stage.constants]
        arguments += [leaves[p.leaf] if p.source is None else values[p.name] for p in stage.inputs]
        with torch.no_grad():
            outputs = torch.fx.GraphModule(nn.Module(), stage.graph)(*arguments)
        values.update(zip([p.name for p in stage.outputs], outputs, strict=False))
    out, fixed = model(x)
    expected = F.cross_entropy(out + fixed, y)
    assert torch.allclose(outputs[-1], expected)
    assert {r.kind for r in step.inputs} <= {InputKind.PARAMETER, InputKind.STEP_INPUT}
