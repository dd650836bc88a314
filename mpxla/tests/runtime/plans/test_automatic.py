"""Open keys of the configuration are chosen by simulation: what is free, fits and is fast."""

from functools import cache

import pytest
import torch
from torch import nn

from mpxla.cli.factory import capture_factory
from mpxla.config import Config
from mpxla.graph.cost import MachineModel
from mpxla.runtime.plans.automatic import (
    bytes_of_divided,
    choose,
    device_bytes,
    free_keys,
    heaviest_nodes,
    is_worth_choosing,
    with_keys,
)
from mpxla.runtime.plans.cut import cut_step
from mpxla.runtime.plans.scheduling import schedule_step, stage_costs
from mpxla.runtime.saved import saved_tensors
from mpxla.schedule.simulate import simulate
from mpxla.stage.flat import FlatShard
from mpxla.tests.device.null import plain_lowering

pytestmark = pytest.mark.unit

WIDTH, ROWS = 256, 64
PLENTY = 1 << 40


@cache
def captured(width=WIDTH):
    layers = [module for _ in range(6) for module in (nn.Linear(width, width), nn.Tanh())]
    with torch.device("meta"):
        model = nn.Sequential(*layers)

    def step(model, x):
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    step = capture_factory(model, (torch.zeros(ROWS, width),), step)
    return step, saved_tensors(step, plain_lowering())


def cut(config):
    step, saved = captured()
    return cut_step(step, config, plain_lowering(), {}, None, saved=saved)


def chosen(limit=PLENTY, **keys):
    config = Config(**{"pipeline_parallel_degree": 4, "microbatches": 8, **keys})
    return config, choose(config, cut, limit, MachineModel())


def step_s(config):
    found = cut(config)
    edges = [{(t.source, t.target) for t in side} for side in (found.forward, found.backward)]
    costs, schedule = stage_costs(found, MachineModel()), schedule_step(found, config)
    return simulate(schedule, found.placement, *edges, costs, rendezvous=False).makespan


def test_bytes_of_divided_parameters():
    config = Config(activation_memory="recompute")  # nothing but parameters is counted
    found = cut(config)
    weights = {n: size for n, size in found.problem.weight_bytes.items() if size > 4 * WIDTH}
    shards = {name: FlatShard((WIDTH, WIDTH), 0, 4) for name in weights}
    assert len(weights) == 6
    held = found.partition.parameter_bytes
    biases = sum(size for name, size in held.items() if name not in weights)
    parts = sum(held[name] for name in weights) // 4
    assert parts == sum(weights.values())  # with gradient and two averages: four times the weight
    sizes = [bytes_of_divided(found, config, shards, once) for once in (False, True)]
    whole = WIDTH * WIDTH * 4
    assert sizes == [biases + parts + 2 * whole, biases + parts + 6 * whole]


ALL = ("pipeline", "virtual_pipeline_degree", "memory_weight", "active_microbatches")


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, ALL),
        ({"pipeline_parallel_degree": 1}, ()),
        ({"pipeline": "simple"}, ALL[1:]),
        ({"memory_weight": 0.5, "active_microbatches": 2}, ALL[:2]),
        ({"optimize": "speed"}, ("pipeline", "virtual_pipeline_degree", "active_microbatches")),
        ({"auto_partition": False, "default_partition": 0}, ("pipeline", "active_microbatches")),
        (
            {"partition_file": "decision.json", "load_partition": True},
            ("pipeline", "active_microbatches"),
        ),
    ],
)
def test_what_nobody_has_set_is_free(keys, expected):
    assert (
        free_keys(Config(**{"pipeline_parallel_degree": 2, "microbatches": 4, **keys})) == expected
    )


def test_a_key_set_to_its_default_is_set():
    keys = {"pipeline_parallel_degree": 2, "pipeline": "interleaved"}
    config = Config(**keys, set_by=dict.fromkeys(keys, "init"))
    assert "pipeline" not in free_keys(config)
    again = with_keys(config, {"virtual_pipeline_degree": 2})
    assert again.pipeline == "interleaved" and again.virtual_pipeline_degree == 2
    assert again.source("pipeline") == "init", "who set what is still known"


def test_the_chosen_plan_is_the_fastest_of_its_kind_and_faster_than_the_defaults():
    config, found = chosen(virtual_pipeline_degree=1)
    assert set(found.keys) <= set(free_keys(config))
    assert found.fits and found.step_s < found.default_s
    ours = step_s(with_keys(config, found.keys))
    for name in ("interleaved", "eager_1f1b"):
        for weight in (0.2, 0.8):
            other = {"pipeline": name, "memory_weight": weight}
            assert ours <= 1.01 * step_s(with_keys(config, other)), other


def test_a_set_key_is_obeyed():
    config, found = chosen(pipeline="simple", memory_weight=0.7)
    assert "pipeline" not in found.keys and "memory_weight" not in found.keys
    final = with_keys(config, found.keys)
    assert (final.pipeline, final.memory_weight) == ("simple", 0.7)


def test_what_does_not_fit_is_not_chosen():
    _, free = chosen()
    config, found = chosen(limit=free.rank_bytes - 1)
    assert found.fits and found.rank_bytes < free.rank_bytes and found.step_s >= free.step_s
    assert with_keys(config, found.keys) != with_keys(config, free.keys)


def test_if_nothing_fits_the_least_is_taken_and_said_to_be_too_much():
    _, found = chosen(limit=1)
    assert not found.fits and found.rank_bytes < chosen()[1].rank_bytes
    assert found.line(1).endswith("more than there is, and the least of all candidates")


def test_activations_count_as_far_as_they_are_kept():
    sizes = [
        chosen(activation_memory=memory)[1].rank_bytes for memory in ("recompute", 1000, "keep")
    ]
    assert sizes[1] == sizes[0] + 1000 and sizes[2] > sizes[1]


def test_the_line_names_keys_and_prediction():
    _, found = chosen()
    text = found.line(2**30)
    assert text.startswith("chosen, as nobody has set them: pipeline = ")
    assert f"predicted step {found.step_s:.3g} s (by the defaults {found.default_s:.3g} s)" in text
    assert text.endswith(" of 1 GiB on the fullest rank")


def test_short_steps_keep_the_defaults():
    config = Config(pipeline_parallel_degree=2, microbatches=2)
    step, saved = captured(8)
    tiny = cut_step(step, config, plain_lowering(), {}, None, saved=saved)
    assert not is_worth_choosing(tiny, config, MachineModel())
    long = Config(pipeline_parallel_degree=2, microbatches=64)
    assert is_worth_choosing(cut(long), long, MachineModel())


def test_the_heaviest_nodes_are_most_of_the_step():
    problem = cut(Config(pipeline_parallel_degree=2)).problem
    names = heaviest_nodes(problem)
    costs = {
        group[0].name: node.cost.compute_s
        for group, node in zip(problem.members, problem.nodes, strict=True)
    }
    assert sum(costs[name] for name in names) >= 0.9 * sum(costs.values())
    assert len(names) < len(costs)


def test_memory_is_the_devices_or_a_share_of_the_hosts():
    assert device_bytes({"bytes_used": 1, "bytes_limit": 1000}, 4) == 800
    assert device_bytes(None, 1) == pytest.approx(4 * device_bytes(None, 4), rel=1e-6)
    assert device_bytes(None, 1) > 2**28
