"""The words of partitioning: copies, transfers, malformed graphs, and no heavy imports."""

import subprocess
import sys

import pytest

from mpxla.graph.partition.words import (
    GraphNode,
    NodeCost,
    Partition,
    SavedTensor,
    Transfer,
    check_graph,
    transfers,
)

pytestmark = pytest.mark.unit


def make_partition(stage, replicas=None, placement=(0, 1, 2), num_ranks=4):
    return Partition(
        stage=stage,
        placement=placement,
        num_ranks=num_ranks,
        replicas=replicas or {},
        parameter_ranks={},
        parameter_bytes={},
        loads=(),
        objective=0.0,
    )


def test_copies_and_ranks():
    partition = make_partition((0, 1), {1: (1, 2)}, placement=(0, 3, 0))
    assert (partition.stages_of(0), partition.stages_of(1)) == ((0,), (1, 2))
    assert partition.num_stages == 3
    assert partition.idle_ranks == (1, 2)


def test_transfers_go_once_to_every_stage_that_lacks_the_value():
    nodes = [
        GraphNode("value"),
        GraphNode("copied"),
        GraphNode("near", (0, 1)),
        GraphNode("far", (0, 2, 1)),
        GraphNode("again", (0, 3)),
    ]
    partition = make_partition((0, 0, 1, 2, 2), {1: (0, 2)})
    assert transfers(nodes, partition) == (
        Transfer(0, 0, 1),
        Transfer(0, 0, 2),
        Transfer(1, 0, 1),
        Transfer(2, 1, 2),
    )


def test_described_names_the_module_or_the_step_function():
    assert GraphNode("add", module_path="model.head").described() == "'add' (module 'model.head')"
    assert GraphNode("add").described() == "'add' (the step function)"


@pytest.mark.parametrize(
    ("nodes", "text"),
    [
        ([GraphNode("a"), GraphNode("a")], "names are not unique"),
        ([GraphNode("a", (0,))], "not topological"),
        ([GraphNode("a", parameters=("w",))], "parameters of unknown size"),
        ([GraphNode("a", cost=NodeCost(compute_s=float("nan")))], "a: NodeCost"),
        ([GraphNode("a", cost=NodeCost(output_bytes=-1))], "a"),
        ([GraphNode("a", saved=(SavedTensor("x", -1),))], "negative size"),
        (
            [
                GraphNode("a", saved=(SavedTensor("x", 1),)),
                GraphNode("b", saved=(SavedTensor("x", 2),)),
            ],
            "two sizes",
        ),
    ],
)
def test_malformed_graphs_stop_the_producer(nodes, text):
    with pytest.raises(AssertionError, match=text):
        check_graph(nodes, {})


def test_partitioners_need_no_torch():
    modules = ["auto", "manual", "report", "file"]
    imports = "; ".join(f"import mpxla.graph.partition.{name}" for name in modules)
    code = f"import sys; {imports}; print([m for m in ('torch', 'torch_xla') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
