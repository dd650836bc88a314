"""Costs of nodes: operations, bytes, kinds, and what belongs together."""

import pytest
import torch
from torch import nn

from mpxla.graph import cost
from mpxla.graph.capture.recorder import current_recorder
from mpxla.graph.capture.step import TensorLeaf, ToCapture, capture_step
from mpxla.graph.cost import MachineModel, build_problem
from mpxla.graph.partition.words import NodeKind
from mpxla.runtime.state import ModelState

pytestmark = pytest.mark.unit

MACHINE = MachineModel(flops_per_s=1.0, memory_bytes_per_s=1e12, link_bytes_per_s=1.0, task_s=0.0)


def captured_step(model, is_training, dtype=torch.float32):
    def step(leaves):
        loss = model(leaves[0]).sum()
        if is_training:
            current_recorder().backward(loss)
        return loss

    leaves = (TensorLeaf((4, 6), dtype),)
    return capture_step(ToCapture(step, model, leaves, ModelState(model).canonical_names))


def problem_of(model, is_training=True, machine=MACHINE):
    return build_problem(captured_step(model, is_training), machine)


def node_of(problem, text):
    (node,) = [node for node in problem.nodes if text in node.name]
    return node


def test_product_costs_its_operations_again_for_every_derivative():
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    forward = {"0": 2 * 4 * 6 * 5, "2": 2 * 4 * 5 * 3}
    # The step's input needs no gradient, so the first product has one derivative.
    for is_training, factors in ((True, {"0": 2, "2": 3}), (False, {"0": 1, "2": 1})):
        problem = problem_of(model, is_training)
        for path, factor in factors.items():
            (linear,) = [n for n in problem.nodes if n.parameters[:1] == (f"{path}.weight",)]
            assert linear.cost.compute_s == pytest.approx(factor * forward[path])
            assert linear.parameters == (f"{path}.weight", f"{path}.bias")
            assert linear.module_path.endswith(path)
            index = problem.nodes.index(linear)
            assert problem.forward_s[index] == pytest.approx(forward[path])
            assert problem.flops[index] == forward[path]
            if is_training:
                assert problem.total_flops[index] == factor * forward[path]
        assert sum(problem.flops) == sum(forward.values())


class Attention(nn.Module):
    """Four query heads, and fewer of keys and values."""

    def __init__(self, heads):
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(6, 12, bias=False)

    def forward(self, rows):
        query = self.query(rows).view(1, 4, 4, 3).transpose(1, 2)
        keys = torch.ones(1, self.heads, 5, 3) * rows.sum()
        values = torch.ones(1, self.heads, 5, 2) * rows.sum()
        is_grouped = self.heads != 4
        return nn.functional.scaled_dot_product_attention(
            query, keys, values, enable_gqa=is_grouped
        )


@pytest.mark.parametrize("heads", [4, 2])
def test_attention_costs_its_two_products(heads):
    problem = problem_of(Attention(heads))
    attention = node_of(problem, "attention")
    count = 4 * 4 * 5 * 2 * (3 + 2)
    assert problem.flops[problem.nodes.index(attention)] == count
    assert attention.cost.compute_s == pytest.approx((1 + 2.5) * count)


def test_measured_times_take_the_place_of_estimates():
    captured = captured_step(nn.Sequential(nn.Linear(6, 6), nn.Tanh()), True)
    times = {"linear": 7.0, "tanh": 0.5, "no_such_node": 9.0}
    problem = build_problem(captured, MACHINE, measured_s=times)
    assert node_of(problem, "linear").cost.compute_s == pytest.approx(2 * 7.0)
    assert node_of(problem, "tanh").cost.compute_s == pytest.approx(3 * 0.5)


def test_frozen_layer_costs_its_forward_only():
    frozen = problem_of(nn.Sequential(nn.Linear(6, 5).requires_grad_(False), nn.Linear(5, 1)))
    first, second = [node for node in frozen.nodes if "linear" in node.name]
    assert first.cost.compute_s == pytest.approx(2 * 4 * 6 * 5)
    assert first.cost.gradient_bytes == 0
    assert second.cost.gradient_bytes == 4 * 1 * 4
    assert first.cost.output_bytes == 4 * 5 * 4


def test_memory_traffic_counts_where_it_takes_longer():
    machine = MachineModel(flops_per_s=1e12, memory_bytes_per_s=1.0, link_bytes_per_s=1, task_s=0)
    tanh = node_of(problem_of(nn.Tanh(), is_training=False, machine=machine), "tanh")
    assert tanh.cost.compute_s == pytest.approx(2 * 4 * 6 * 4)


def test_products_of_16_bits_have_a_rate_of_their_own():
    machine = MachineModel(1.0, narrow_flops_per_s=8.0, memory_bytes_per_s=1e12, task_s=0.0)
    for dtype, factor in ((torch.float32, 1), (torch.bfloat16, 8), (torch.float16, 8)):
        step = captured_step(nn.Linear(6, 5, bias=False).to(dtype), False, dtype)
        seconds = sum(build_problem(step, machine).forward_s)
        assert seconds == pytest.approx(2 * 4 * 6 * 5 / factor)
    assert MachineModel().flops_of(torch.bfloat16) == MachineModel().flops_per_s


def test_inputs_views_and_random_nodes():
    problem = problem_of(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Unflatten(1, (2, 3))))
    kinds = {node.kind: node for node in problem.nodes}
    assert kinds[NodeKind.INPUT].cost.compute_s == 0
    assert "dropout" in kinds[NodeKind.RANDOM].name or "bernoulli" in kinds[NodeKind.RANDOM].name
    view = node_of(problem, "view")
    assert view.cost.compute_s == 0
    assert view.cost.output_bytes == 4 * 6 * 4


def test_operator_with_several_results_is_one_unit_that_changes_its_buffers():
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    problem = problem_of(model)
    changing = [node for node in problem.nodes if node.mutates]
    changed = sorted(name for node in changing for name in node.mutates)
    assert changed == ["1.num_batches_tracked", "1.running_mean", "1.running_var"]
    (norm,) = [n for n in changing if "1.running_mean" in n.mutates]
    assert set(norm.mutates) == {"1.running_mean", "1.running_var"}
    members = problem.members[problem.nodes.index(norm)]
    assert len(members) >= 4
    flat = [node for group in problem.members for node in group]
    assert len(flat) == len(set(flat))


def test_parameters_weigh_as_much_as_training_them_does():
    problem = problem_of(nn.Linear(6, 5))
    assert problem.parameter_bytes == {"weight": 4 * 30 * 4, "bias": 4 * 5 * 4}


def test_masters_count_where_there_are_some():
    """Bytes per parameter: 2 + 4 + 4 + 8 with a master, 2 + 4 + 4 without, 16 in float32."""
    step = captured_step(nn.Linear(6, 5).to(torch.bfloat16), True, torch.bfloat16)
    for has_masters, each in ((True, 18), (False, 10)):
        problem = build_problem(step, MACHINE, has_masters=has_masters)
        assert problem.parameter_bytes == {"weight": 30 * each, "bias": 5 * each}
        assert problem.weight_bytes == {"weight": 30 * 2, "bias": 5 * 2}
    plain = build_problem(captured_step(nn.Linear(6, 5), True), MACHINE, has_masters=False)
    assert plain.parameter_bytes == {"weight": 30 * 16, "bias": 5 * 16}


def test_operations_are_counted_once_for_a_graph(monkeypatch):
    counts = []
    count = cost._count_flops
    monkeypatch.setattr(cost, "_count_flops", lambda step: counts.append(1) or count(step))
    step = captured_step(nn.Linear(6, 4), is_training=True)
    first, second = (build_problem(step, MachineModel()) for _ in range(2))
    assert counts == [1] and first.flops == second.flops and sum(first.flops) > 0
    with step.graph.inserting_before():
        step.graph.placeholder("another").meta["val"] = torch.empty(1)
    assert cost._counted[step.graph][0] == len(step.graph.nodes) - 1, "it would be counted again"
