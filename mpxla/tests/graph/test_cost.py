"""Costs of nodes: operations, bytes, kinds, and what belongs together."""

import pytest
import torch
from torch import nn

from mpxla.graph.capture import TensorLeaf, capture_step, current_recorder
from mpxla.graph.cost import MachineModel, build_problem
from mpxla.graph.partition import NodeKind
from mpxla.runtime.state import ModelState

pytestmark = pytest.mark.unit

MACHINE = MachineModel(flops_per_s=1.0, memory_bytes_per_s=1e12, link_bytes_per_s=1.0, task_s=0.0)


def problem_of(model, is_training=True, machine=MACHINE):
    def step(leaves):
        loss = model(leaves[0]).sum()
        if is_training:
            current_recorder().backward(loss)
        return loss

    leaves = (TensorLeaf((4, 6), torch.float32),)
    captured = capture_step(step, model, leaves, ModelState(model).canonical_names)
    return build_problem(captured, machine)


def node_of(problem, text):
    (node,) = [node for node in problem.nodes if text in node.name]
    return node


def test_product_costs_its_operations_and_twice_that_for_the_derivatives():
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh())
    forward = 2 * 4 * 6 * 5
    for is_training, factor in ((True, 3), (False, 1)):
        problem = problem_of(model, is_training)
        linear = node_of(problem, "linear")
        assert linear.cost.compute_s == pytest.approx(factor * forward)
        assert linear.parameters == ("0.weight", "0.bias")
        assert linear.module_path.endswith("0")
        assert sum(problem.flops) == forward


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


def test_inputs_views_and_random_nodes():
    problem = problem_of(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Unflatten(1, (2, 3))))
    kinds = {node.kind: node for node in problem.nodes}
    assert kinds[NodeKind.INPUT].cost.compute_s == 0
    assert "dropout" in kinds[NodeKind.RANDOM].name or "bernoulli" in kinds[NodeKind.RANDOM].name
    view = node_of(problem, "view")
    assert view.cost.compute_s == view.cost.memory_bytes == 0
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
