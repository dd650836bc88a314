"""Automatic partition: optimality against brute force on random graphs, and a large graph."""

import time
from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpxla.errors import PartitionError
from mpxla.graph.partition.auto import partition_auto
from mpxla.graph.partition.words import NodeKind, SavedTensor
from mpxla.tests.graph.partition.partition_graphs import (
    Program,
    brute_force,
    completed,
    cut_bytes,
    partition,
    stage_costs,
)

pytestmark = pytest.mark.unit


@st.composite
def programs(draw):
    """(program, its spine): layers with skips, tied parameters, constants, labels and glue."""
    program = Program()
    sizes = st.integers(0, 8)
    tensors = [SavedTensor(name, draw(sizes)) for name in "xyz"]
    image, labels = program.input(draw(sizes)), program.input(draw(sizes))
    constant = program.add(compute=draw(st.integers(0, 3)), memory=draw(sizes))
    mask = program.add(constant, compute=draw(st.integers(0, 3)), memory=draw(sizes))
    view = program.add(labels, compute=0.0, output=program.nodes[labels].cost.output_bytes)
    spine = []
    for _ in range(draw(st.integers(4, 9))):
        data = [spine[-1] if spine else image]
        if spine and draw(st.booleans()):
            data.append(draw(st.sampled_from(spine)))
        data += draw(st.lists(st.sampled_from([constant, mask, labels, view]), max_size=2))
        spine.append(
            program.add(
                *dict.fromkeys(data),
                parameters=draw(st.lists(st.sampled_from("pqrs"), max_size=2, unique=True))
                or ("own",) * (not spine),
                path=draw(st.sampled_from(["", "model.a", "model.a.x", "model.b"])),
                kind=draw(st.sampled_from([NodeKind.COMPUTE, NodeKind.COMPUTE, NodeKind.RANDOM])),
                compute=draw(sizes),
                memory=draw(sizes),
                output=draw(st.integers(0, 20).map(lambda size: max(0, size - 2))),
                gradient=draw(sizes),
                buffers=("mean",) * draw(st.booleans()),
                mutates=("mean",) * (draw(st.integers(0, 9)) == 0),
                saved=draw(st.lists(st.sampled_from(tensors), max_size=1)),
            )
        )
    for name in program.parameter_bytes:
        program.parameter_bytes[name] = draw(st.integers(0, 30))
    return program, spine


def keeps_groups(program):
    """A predicate that says whether stages keep updated buffers and stuck values together."""
    updated = {name for node in program.nodes for name in node.mutates}
    together = []
    users = defaultdict(list)
    for index, node in enumerate(program.nodes):
        for name in updated.intersection((*node.buffers, *node.mutates)):
            users[name].append(index)
        for source in node.inputs:
            together.append((source, index))
    pairs = [
        (source, reader)
        for source, reader in together
        if program.nodes[source].cost.output_bytes == 0
    ]

    def is_kept(stage):
        return all(len({stage[i] for i in members}) == 1 for members in users.values()) and all(
            stage[source] == stage[reader] for source, reader in pairs if source in stage
        )

    return is_kept


def in_flight(data, num_stages):
    """Microbatches in flight per stage: none given, as 1F1B has them, or any."""
    return data.draw(
        st.none()
        | st.just(list(range(num_stages, 0, -1)))
        | st.lists(st.integers(0, 5), min_size=num_stages, max_size=num_stages)
    )


def drawn_paces(data, num_stages):
    """How much compute counts in each stage: the same everywhere by default, or any."""
    return data.draw(
        st.none() | st.lists(st.floats(0.25, 2.0), min_size=num_stages, max_size=num_stages)
    )


def preference(program, spine, stage, result):
    """(sum of depths, sum of crossing bytes) of the cuts."""
    depth = 0
    for left, right in pairwise(spine):
        if stage[left] != stage[right]:
            one = program.nodes[left].module_path.split(".")
            other = program.nodes[right].module_path.split(".")
            while one and other and one[0] and one.pop(0) == other.pop(0):
                depth += 1
    return depth, sum(cut_bytes(program.nodes, result))


@settings(max_examples=120, deadline=None)
@given(
    programs(),
    st.integers(1, 5),
    st.sampled_from([0.0, 0.2, 0.8, 1.0]),
    st.sampled_from([0.0, 0.1, 1.0]),
    st.data(),
)
def test_optimal_against_brute_force(case, num_stages, memory_weight, link, data):
    program, spine = case
    counts, paces = in_flight(data, num_stages), drawn_paces(data, num_stages)
    ways = brute_force(
        program, spine, num_stages, memory_weight, link, keeps_groups(program), counts, paces
    )
    per_stage = {"in_flight": counts, "paces": paces}
    if not ways:
        with pytest.raises(PartitionError, match="at most"):
            partition(program, num_stages, memory_weight, link, **per_stage)
        return
    result = partition(program, num_stages, memory_weight, link, **per_stage)
    assert {result.stage[index] for index in spine} == set(range(num_stages))
    best = min(cost for cost, _ in ways)
    if best > 0:
        assert result.objective == pytest.approx(best, rel=1e-8)
        costs = stage_costs(program, result, memory_weight, link, counts, paces)
        assert max(costs) == pytest.approx(result.objective, rel=1e-8)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(programs(), st.integers(2, 4), st.sampled_from([0.0, 0.5]), st.data())
def test_ties_prefer_shallow_boundaries_then_few_bytes(case, num_stages, memory_weight, data):
    program, spine = case
    counts = in_flight(data, num_stages)
    if not any(node.cost.compute_s for node in program.nodes):
        return
    ways = brute_force(
        program, spine, num_stages, memory_weight, 0.0, keeps_groups(program), counts
    )
    if not ways:
        return
    best = min(cost for cost, _ in ways)
    result = partition(program, num_stages, memory_weight, in_flight=counts)
    chosen = {index: result.stage[index] for index in spine}
    expected = min(
        preference(program, spine, stage, completed(program, stage, num_stages))
        for cost, stage in ways
        if cost <= best * (1 + 1e-10)
    )
    assert preference(program, spine, chosen, result) == expected


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(programs(), st.integers(2, 3), st.data())
def test_fixed_parameters_stay_and_the_rest_is_optimal(case, num_stages, data):
    program, spine = case
    ranks = st.sets(st.integers(0, num_stages - 1), min_size=1).map(lambda own: tuple(sorted(own)))
    names = st.sampled_from(sorted(program.parameter_bytes))
    fixed = data.draw(st.dictionaries(names, ranks, max_size=2))
    keeps = keeps_groups(program)

    def is_allowed(stage):
        return keeps(stage) and all(
            stage[index] in fixed.get(name, range(num_stages))
            for index in spine
            for name in program.nodes[index].parameters
        )

    counts = in_flight(data, num_stages)
    ways = brute_force(program, spine, num_stages, 0.5, 0.1, is_allowed, counts)
    try:
        result = partition(program, num_stages, 0.5, 0.1, fixed=fixed, in_flight=counts)
    except PartitionError:
        assert not ways
        return
    for name, own in fixed.items():
        assert result.parameter_ranks[name] == own
    if ways:
        assert result.placement == tuple(range(num_stages))
        best = min(cost for cost, _ in ways)
        costs = stage_costs(program, result, 0.5, 0.1, counts)
        assert max(costs) == pytest.approx(best, rel=1e-8)


def large_program(num_nodes):
    """Uneven costs, skips, a shared mask and a tied embedding."""
    rng = np.random.default_rng(0)
    program = Program()
    last = program.input(100)
    mask = program.add(compute=1e-6, output=100)
    for number in range(num_nodes):
        inputs = [last, mask] if number % 50 == 0 else [last]
        if number % 7 == 0 and number > 20:
            inputs.append(last - int(rng.integers(2, 15)))
        last = program.add(
            *inputs,
            parameters=(f"p{number}",) if number % 5 == 0 else (),
            path=f"model.blocks.{number // 100}.{number % 100 // 10}",
            compute=float(rng.lognormal()) if number % 3 else 0.0,
            memory=int(rng.integers(0, 1000)),
            output=int(rng.integers(1, 1000)),
            gradient=int(rng.integers(1, 1000)),
        )
    program.add(last, parameters=("p0",))
    program.parameter_bytes["p0"] = 100_000
    return program


@pytest.mark.timeout(90)
@pytest.mark.slow
@pytest.mark.parametrize("counts", [None, range(64, 0, -1)])
def test_ten_thousand_nodes_and_sixty_four_stages(counts):
    program = large_program(10_000)
    arguments = (program.nodes, program.parameter_bytes, 64, 0.2, 1e-6)
    per_stage = {"in_flight": counts, "paces": counts and np.linspace(0.9, 1.1, 64).tolist()}
    started = time.process_time()
    result = partition_auto(*arguments, **per_stage)
    assert time.process_time() - started < 5
    assert set(result.stage) == set(range(64))
    assert result == partition_auto(*arguments, **per_stage), "not deterministic"
    assert result.objective < 1.5 / 64
    again = partition_auto(*arguments, result.parameter_ranks, **per_stage)
    assert again.objective == pytest.approx(result.objective)
