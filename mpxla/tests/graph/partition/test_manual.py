"""Manual partition: stages from pinned modules, data that flows back, and what is refused."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpxla.errors import PartitionError
from mpxla.graph.partition.flow import analyse
from mpxla.graph.partition.manual import partition_manual, place_by_rank
from mpxla.graph.partition.words import NodeKind, transfers
from mpxla.tests.graph.partition.partition_graphs import Program, assert_valid, chain

pytestmark = pytest.mark.unit


def partition(program, num_ranks, pins, default_rank=0, **options):
    """Partition and check what must always hold."""
    result = partition_manual(
        program.nodes, program.parameter_bytes, num_ranks, pins, default_rank, **options
    )
    assert_valid(program, result)
    assert all(rank in range(num_ranks) for rank in result.placement)
    return result


def chain_on(*ranks, num_ranks, **options):
    """A chain of layers with a rank each."""
    program = chain(len(ranks))
    pins = {place + 1: rank for place, rank in enumerate(ranks) if rank is not None}
    return partition(program, num_ranks, pins, **options)


@pytest.mark.parametrize(
    ("ranks", "num_ranks", "placement", "stages"),
    [
        ((0, 0, 1, 1), 2, (0, 1), (0, 0, 1, 1)),
        ((0, 1, 0), 2, (0, 1, 0), (0, 1, 2)),
        ((0, 1, 0), 4, (0, 1, 0), (0, 1, 2)),
        ((0, 3, 1, 2), 4, (0, 3, 1, 2), (0, 1, 2, 3)),
        ((1, 0), 2, (0, 1, 0), (1, 2)),
        ((1, 1), 2, (0, 1), (1, 1)),
        ((2, 2), 3, (0, 2), (1, 1)),
        ((0, 0), 1, (0,), (0, 0)),
    ],
)
def test_stages_of_a_chain(ranks, num_ranks, placement, stages):
    result = chain_on(*ranks, num_ranks=num_ranks)
    assert result.placement == placement
    assert result.stage == (0, *stages)
    for place, rank in enumerate(ranks):
        assert result.parameter_ranks[f"model.{place}.weight"] == (rank,)


def test_untagged_parameters_go_to_the_default_rank_and_the_rest_floats():
    program = chain(2)
    activation = program.add(2)
    program.layer(activation, "model.2")
    result = partition(program, 3, {1: 0, 2: 1}, default_rank=2)
    assert result.placement == (0, 1, 2)
    assert result.stage == (0, 0, 1, 1, 2)


def test_idle_ranks_are_reported():
    result = chain_on(0, 0, 2, num_ranks=4)
    assert result.placement == (0, 2)
    assert result.idle_ranks == (1, 3)
    assert result.num_ranks == 4


def test_pinned_module_without_parameters_runs_on_its_rank():
    program = chain(1)
    pooled = program.add(1, path="model.pool")
    result = partition(program, 2, {pooled: 1})
    assert result.placement[result.stage[pooled]] == 1


def test_branches_share_levels():
    """Two branches with one module per rank each need two stages, not four."""
    program = Program()
    image = program.input()
    pins, ends = {}, []
    for branch in "ab":
        first = program.layer(image, f"model.{branch}.0")
        ends.append(program.layer(first, f"model.{branch}.1"))
        pins |= {first: 0, ends[-1]: 1}
    program.add(*ends)
    assert partition(program, 2, pins).placement == (0, 1)


def test_early_side_branch_waits_for_the_next_stage_of_its_rank():
    program = Program()
    image = program.input()
    side = program.layer(image, "model.side")
    first = program.layer(image, "model.first")
    second = program.layer(first, "model.second")
    last = program.add(side, second, parameters=("last",))
    result = partition(program, 3, {first: 0, second: 2, side: 1, last: 1})
    assert result.placement == (0, 2, 1)
    assert result.stage[side] == result.stage[last] == 2


def test_work_on_parameters_sits_with_its_reader():
    program = Program()
    image = program.input()
    transposed = program.add(parameters=("head",), output=1000)
    first = program.layer(image, "model.0")
    second = program.layer(first, "model.1")
    head = program.add(second, transposed)
    result = partition(program, 2, {first: 1, second: 0, head: 1, transposed: 1})
    assert result.placement == (0, 1, 0, 1)
    assert result.stage[transposed] == result.stage[head] == 3


def test_a_number_of_a_parameter_is_computed_where_its_module_is():
    program = chain(2)
    square = program.add(parameters=("model.1.weight",), output=1000)
    penalty = program.add(square, output=4)
    program.add(2, penalty)
    result = partition(program, 2, {1: 0, 2: 1})
    assert result.stage[square] == result.stage[penalty] == 1
    assert result.parameter_ranks["model.1.weight"] == (1,)


def test_tied_parameter_pinned_to_two_ranks_is_held_by_both():
    program = Program()
    first = program.add(program.input(), parameters=("tok",))
    last = program.add(first, parameters=("tok",))
    assert partition(program, 2, {first: 0, last: 1}).parameter_ranks["tok"] == (0, 1)


def test_constants_and_masks_follow_their_readers():
    program = Program()
    image, mask = program.input(8), program.input(10)
    positions = program.add(output=100)
    expanded = program.add(mask, compute=0.0, output=100)
    first = program.add(image, positions, expanded, parameters=("a",))
    second = program.add(first, positions, expanded, parameters=("b",))
    result = partition(program, 2, {positions: 0, expanded: 0, first: 0, second: 1})
    assert result.replicas == {positions: (0, 1), expanded: (0, 1)}
    assert (mask, 0, 1) in transfers(program.nodes, result)


def test_random_source_sits_with_its_reader():
    program = chain(2)
    noise = program.add(kind=NodeKind.RANDOM)
    last = program.add(2, noise, parameters=("c",))
    result = partition(program, 2, {1: 0, 2: 1, last: 1})
    assert result.stages_of(noise) == (1,)


def test_stage_zero_is_on_rank_zero_only_if_there_are_inputs():
    program = Program()
    program.add(parameters=("a",))
    result = partition(program, 2, {0: 1})
    assert (result.placement, result.stage) == ((1,), (0,))


def test_step_without_parameters():
    program = Program()
    program.add(program.input())
    result = partition(program, 2, {})
    assert (result.placement, result.stage) == ((0,), (0, 0))


def batch_norm(program, source, name):
    """A batch norm with its running mean and its counter of batches."""
    norm = program.add(source, parameters=(f"{name}.weight",), buffers=(f"{name}.mean",), path=name)
    update = program.add(norm, buffers=(f"{name}.mean",), mutates=(f"{name}.mean",), path=name)
    counter = program.add(buffers=(f"{name}.count",), mutates=(f"{name}.count",), path=name)
    return norm, update, counter


def test_updated_buffers_stay_with_their_module():
    program = Program()
    first = program.layer(program.input(), "model.0")
    nodes = batch_norm(program, first, "model.norm")
    pinned = partition(program, 2, {first: 0} | dict.fromkeys(nodes, 1))
    assert [pinned.stage[index] for index in nodes] == [1, 1, 1]
    untagged = partition(program, 2, {first: 0}, default_rank=1)
    assert [untagged.stage[index] for index in nodes] == [1, 1, 1]


def test_users_of_an_updated_buffer_are_raised_to_one_stage():
    """The norm is called twice; its first call has to wait for the stage of the second one."""
    program = Program()
    image = program.input()
    early = program.add(image, buffers=("mean",))
    first = program.layer(image, "model.0")
    late = program.add(first, buffers=("mean",), mutates=("mean",))
    result = partition(program, 2, {first: 1})
    assert result.stage[early] == result.stage[late] == 1


def test_updated_buffer_on_two_ranks_is_refused():
    program = chain(2)
    one = program.add(2, path="model.a.norm", buffers=("mean",), mutates=("mean",))
    other = program.add(one, path="model.b.norm", buffers=("mean",))
    with pytest.raises(
        PartitionError,
        match=r"'node_3' \(module 'model.a.norm'\) is on partition 0 and 'node_4' "
        r"\(module 'model.b.norm'\) on partition 1, .*use 'mean', which the step updates. Put",
    ):
        partition(program, 2, {1: 0, 2: 0, one: 0, other: 1})


def test_those_that_may_not_be_together_are_named_whatever_comes_first():
    program = chain(1)
    nodes = [1]
    for name in ("a", "b", "c"):
        update = {"buffers": ("mean",), "mutates": ("mean",)}
        nodes.append(program.add(nodes[-1], path=f"model.{name}", **update))
    allowed = dict(zip(nodes[1:], map(frozenset, ({0, 1}, {0}, {1})), strict=True))
    with pytest.raises(PartitionError, match=r"model.b'\) is on partition 0 and .*model.c'\) on"):
        place_by_rank(analyse(program.nodes, 0.0), program.parameter_bytes, 2, allowed, {})


def test_updated_buffer_used_before_and_after_another_rank_is_refused():
    program = Program()
    first = program.add(program.input(), path="model.norm", buffers=("mean",), mutates=("mean",))
    middle = program.layer(first, "model.0")
    again = program.add(middle, path="model.norm", buffers=("mean",), mutates=("mean",))
    text = r"must share a stage, because .*'mean'.* passes through another .* same partition\.$"
    with pytest.raises(PartitionError, match=text):
        partition(program, 2, {first: 0, middle: 1, again: 0})
    allowed = {first: frozenset([0]), middle: frozenset([1])}
    fixed = dict.fromkeys(program.parameter_bytes, (1,))
    with pytest.raises(PartitionError, match=r"no state yet then .* begin with one of zeros"):
        place_by_rank(analyse(program.nodes, 0.0), program.parameter_bytes, 2, allowed, fixed)


def test_all_ranks_out_of_range_are_named_with_the_valid_range():
    with pytest.raises(
        PartitionError,
        match=r"Partitions are 0 to 1, but 'model.1' is on partition 2, 'model.2' is on partition "
        r"-1, default_partition is 5\. Use an index below pipeline_parallel_degree",
    ):
        chain_on(0, 2, -1, num_ranks=2, default_rank=5)
    with pytest.raises(PartitionError, match=r"Partitions are 0, but 'model\.0' is on partition"):
        chain_on(1, num_ranks=1)


def test_fixed_parameters_go_before_pins():
    result = chain_on(0, 0, num_ranks=2, fixed={"model.1.weight": (1,)})
    assert result.parameter_ranks == {"model.0.weight": (0,), "model.1.weight": (1,)}


def test_pin_decides_among_the_ranks_of_a_fixed_tied_parameter():
    fixed = {"model.1.weight": (0, 1)}
    assert chain_on(0, 1, num_ranks=2, fixed=fixed).placement == (0, 1)
    assert chain_on(0, 0, num_ranks=2, fixed=fixed).placement == (0,)
    assert chain_on(0, 0, num_ranks=2, fixed=fixed).parameter_ranks["model.1.weight"] == (0, 1)


def test_fixed_rank_out_of_range():
    with pytest.raises(
        PartitionError, match=r"'model.0.weight' was placed on partition 3, but partitions are 0 to"
    ):
        chain_on(0, num_ranks=2, fixed={"model.0.weight": (3,)})


def test_node_that_reads_parameters_fixed_on_different_ranks():
    program = Program()
    program.add(program.input(), parameters=("a", "b"), path="model.mix")
    with pytest.raises(
        PartitionError,
        match=r"'node_1' \(module 'model.mix'\) reads parameters .* \('a' on 0, 'b' on 1\). Call",
    ):
        partition(program, 2, {}, fixed={"a": (0,), "b": (1,)})


def test_unread_parameter_without_siblings_goes_to_the_default_rank():
    program = chain(2)
    program.parameter_bytes["loose"] = 1
    result = partition(program, 2, {1: 0, 2: 0}, default_rank=1)
    assert result.parameter_ranks["loose"] == (1,)
    assert result.idle_ranks == (1,)


@settings(max_examples=100, deadline=None)
@given(st.data(), st.integers(1, 4))
def test_any_placement_works(data, num_ranks):
    """Random graphs: valid, pins are kept, and no stage could join its neighbour."""
    program = Program()
    program.input()
    pins = {}
    for index in range(1, data.draw(st.integers(2, 14))):
        inputs = data.draw(st.sets(st.integers(0, index - 1), max_size=3))
        is_layer = data.draw(st.booleans())
        program.add(
            *sorted(inputs),
            parameters=(f"p{index}",) if is_layer else (),
            kind=data.draw(st.sampled_from([NodeKind.COMPUTE, NodeKind.RANDOM])),
        )
        if is_layer:
            pins[index] = data.draw(st.integers(0, num_ranks - 1))
    result = partition(program, num_ranks, pins)
    for index, rank in pins.items():
        assert {result.placement[stage] for stage in result.stages_of(index)} == {rank}
    assert all(one != other for one, other in pairwise(result.placement))
    again = partition(program, num_ranks, {}, fixed=result.parameter_ranks)
    assert again.parameter_ranks == result.parameter_ranks
