"""Saving and loading decisions, and every reason to refuse a file."""

import json

import pytest

from mpxla.errors import PartitionError
from mpxla.graph.partition.auto import partition_auto
from mpxla.graph.partition.file import load_partition, save_partition
from mpxla.tests.graph.partition.partition_graphs import Program, chain

pytestmark = pytest.mark.unit


@pytest.fixture
def program():
    program = Program()
    last = program.input(8)
    mask = program.add(output=9)
    for number in range(4):
        last = program.add(
            last,
            mask,
            parameters=(f"p{number}",),
            memory=3,
            gradient=1,
            buffers=("mean",) * (number < 2),
            mutates=("mean",) * (number == 1),
        )
    part = program.add(last, output=0)
    program.add(part, parameters=("p0",))
    return program


@pytest.fixture
def data(program):
    return save_partition(partitioned(program), program.nodes)


def partitioned(program):
    return partition_auto(program.nodes, program.parameter_bytes, 2, 0.5, 0.01)


def test_round_trip_through_json(program, data):
    assert load_partition(json.loads(json.dumps(data)), program.nodes) == partitioned(program)


def test_costs_are_taken_from_the_graph(program, data):
    program.recost(2, compute_s=100.0)
    loads = load_partition(data, program.nodes).loads
    assert loads[0].compute_s > 100


def test_first_different_operation_is_named(program, data):
    with pytest.raises(
        PartitionError, match=r"operation 7 is 'node_7' in this step and missing in the file\. Del"
    ):
        load_partition({**data, "nodes": data["nodes"][:7]}, program.nodes)
    data["nodes"][3]["name"] = "gelu"
    with pytest.raises(PartitionError, match=r"operation 3 is 'node_3' .* and 'gelu' in the file"):
        load_partition(data, program.nodes)


def test_file_of_a_longer_graph(data):
    with pytest.raises(PartitionError, match="operation 4 is missing in this step and 'node_4'"):
        load_partition(data, chain(3).nodes)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda data: data.update(version=9), "version 9, this one reads 1"),
        (lambda data: data.pop("placement"), r"not a saved partition \(no key 'placement'\)"),
        (lambda data: data.update(placement="x"), r"not a saved partition \(invalid literal"),
        (lambda data: data.update(nodes=[3]), "not a saved partition"),
        (lambda data: data.update(placement=[0, 2]), r"placement \[0, 2\] needs ranks outside of"),
        (lambda data: data["parameters"].pop("p1"), "'node_3' reads the parameter 'p1', which"),
        (lambda data: data["parameters"]["p1"].update(ranks=[5]), r"'p1' is on ranks \[5\] of 2"),
        (lambda data: data["parameters"]["p3"].update(ranks=[0]), "on rank 1 reads 'p3', which is"),
        (lambda data: data["nodes"][2].update(stages=[2]), r"'node_2' is on stages \[2\] of 2"),
        (lambda data: data["nodes"][2].update(stages=[0, 1]), "'node_2' is .* not be repeated"),
        (lambda data: data["nodes"][0].update(stages=[1]), "'node_0' is on .* inputs are on stage"),
        (lambda data: data["nodes"][1].update(stages=[1]), "'node_2' is on stage 0, before its in"),
        (lambda data: data["nodes"][7].update(stages=[0]), "'node_7' is on stage 0, before its in"),
        (lambda data: move(data, {2: 0, 3: 1, 4: 1}), "'node_2' and 'node_3' are .* use 'mean'"),
        (lambda data: move(data, dict.fromkeys(range(2, 7), 0)), "input 'node_6' cannot travel"),
    ],
)
def test_damaged_files_are_refused(program, data, change, text):
    change(data)
    with pytest.raises(PartitionError, match=text):
        load_partition(data, program.nodes)


def move(data, stages):
    """Give nodes other stages."""
    for index, stage in stages.items():
        data["nodes"][index]["stages"] = [stage]


def test_a_file_that_is_not_a_dict(program):
    with pytest.raises(PartitionError, match=r"not a saved partition .* Delete the partition"):
        load_partition(["something"], program.nodes)  # pyright: ignore[reportArgumentType]
