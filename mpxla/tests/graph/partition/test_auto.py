"""Automatic partition: every placement rule, and what is refused."""

import pytest

from mpxla.errors import PartitionError
from mpxla.graph.partition.words import NodeKind, SavedTensor, transfers
from mpxla.tests.graph.partition.partition_graphs import (
    PARAMETER_BYTES,
    Program,
    chain,
    partition,
    stage_costs,
)

pytestmark = pytest.mark.unit


def test_chain_is_cut_evenly():
    result = partition(chain(8), 4, memory_weight=0.5)
    assert result.stage == (0, 0, 0, 1, 1, 2, 2, 3, 3)
    assert result.placement == (0, 1, 2, 3)
    assert result.objective == pytest.approx(0.25)
    assert [load.parameters for load in result.loads[:1]] == [("model.0.weight", "model.1.weight")]


def test_memory_weight_moves_the_cut():
    program = Program()
    last = program.input()
    for number, (compute, memory) in enumerate([(1, 90), (1, 0), (1, 0), (1, 10)]):
        last = program.layer(last, f"model.{number}", compute=compute, memory=memory)
        program.parameter_bytes[f"model.{number}.weight"] = 0
    assert partition(program, 2, memory_weight=0.0).stage[1:] == (0, 0, 1, 1)
    assert partition(program, 2, memory_weight=1.0).stage[1] == 0
    assert partition(program, 2, memory_weight=1.0).stage[2] == 1


def test_microbatches_in_flight_move_the_cut():
    program = chain(9, memory=10)
    program.parameter_bytes = dict.fromkeys(program.parameter_bytes, 0)
    assert partition(program, 2, 1.0, in_flight=(3, 3)).stage[1:] == (0,) * 4 + (1,) * 5
    result = partition(program, 2, 1.0, in_flight=(2, 1))
    assert result.stage[1:] == (0,) * 3 + (1,) * 6
    assert result.objective == pytest.approx(60 / (1.5 * 90))
    assert partition(program, 2, 0.0, in_flight=(2, 1)).stage[1:] == (0,) * 4 + (1,) * 5


def test_a_saved_tensor_counts_once_on_every_stage_that_reads_it():
    program = Program()
    last = program.input()
    shared = SavedTensor("shared", 100)
    for number in range(4):
        last = program.layer(
            last, f"model.{number}", memory=10, saved=[shared] * (number in (1, 2))
        )
    program.parameter_bytes = dict.fromkeys(program.parameter_bytes, 0)
    loads = partition(program, 2, 0.0).loads
    assert [load.activation_bytes for load in loads] == [120, 120]
    result = partition(program, 2, 1.0, in_flight=(2, 1))
    assert result.stage[1:] == (0, 1, 1, 1)
    assert result.objective == pytest.approx(130 / (1.5 * 140))


def test_crossing_bytes_move_the_cut():
    program = Program()
    last = program.input()
    for number, output in enumerate([10, 10, 1, 10]):
        last = program.layer(last, f"model.{number}", output=output, gradient=output)
    assert partition(program, 2, link=0.0).stage[1:] == (0, 0, 1, 1)
    assert partition(program, 2, link=1.0).stage[1:] == (0, 0, 0, 1)


def test_cut_goes_inside_a_block_where_it_must():
    """Head and loss weigh as much as a block: 4 + 4 blocks would overload the last stage."""
    program = Program()
    last = program.input()
    for block in range(8):
        for part in "ab":
            last = program.layer(last, f"model.blocks.{block}.{part}", compute=0.5)
    last = program.layer(last, "model.head", compute=1.0)
    result = partition(program, 2)
    assert result.objective == pytest.approx(0.5)
    assert result.loads[0].modules == ("blocks.0-3", "blocks.4.a")


def test_ties_are_cut_at_module_boundaries():
    program = Program()
    last = program.input()
    for path in ["model.x.0", "model.x.1", "model.y.0", "model.y.1"]:
        last = program.layer(last, path, compute=0.0, output=9)
    program.recost(1, compute_s=5.0, output_bytes=1)
    assert partition(program, 2).stage[1:] == (0, 0, 1, 1)
    program.recost(1, compute_s=0.0)
    program.recost(3, compute_s=5.0)
    assert partition(program, 2).stage[1:] == (0, 0, 1, 1)


def test_equal_boundaries_are_cut_where_least_crosses():
    program = chain(4, compute=0.0, output=9)
    program.recost(1, compute_s=5.0)
    program.recost(3, output_bytes=1)
    assert partition(program, 2).stage[1:] == (0, 0, 0, 1)


def test_skip_connection_counts_at_every_cut_it_passes():
    program = chain(6, output=1)
    program.recost(1, output_bytes=50)
    last = program.add(1, 6, compute=1.0)
    result = partition(program, 3, link=0.001)
    assert result.stage[last] == 2
    assert (1, 0, 2) in transfers(program.nodes, result)
    assert stage_costs(program, result, 0.0, 0.001)[1] > 2 / 7 + 0.1 / 7


def test_u_shape_sends_skips_straight_to_their_readers():
    program = Program()
    last = program.input()
    downs = []
    for level in range(4):
        last = program.layer(last, f"model.down.{level}")
        downs.append(last)
    for level in reversed(range(4)):
        last = program.add(last, downs[level], parameters=(f"up.{level}",))
    result = partition(program, 4)
    assert result.stage[1:] == (0, 0, 1, 1, 2, 2, 3, 3)
    pairs = {(source, destination) for _, source, destination in transfers(program.nodes, result)}
    assert pairs == {(0, 1), (1, 2), (2, 3), (0, 3)}


def test_tied_embedding_is_held_by_first_and_last_stage():
    program = Program()
    last = program.add(program.input(), parameters=("tok.weight",), path="model.tok")
    for number in range(4):
        last = program.layer(last, f"model.blocks.{number}")
    program.add(last, parameters=("tok.weight",), path="model.head")
    program.parameter_bytes["tok.weight"] = 1000
    result = partition(program, 2, memory_weight=0.9)
    assert result.parameter_ranks["tok.weight"] == (0, 1)
    assert [load.parameter_bytes for load in result.loads] == [1200, 1200]
    assert result.objective == pytest.approx(0.9 * 1200 / 1400 + 0.1 * 0.5)


def test_parameter_used_in_three_stages():
    program = Program()
    last = program.input()
    for number in range(3):
        last = program.add(last, parameters=("shared", f"own.{number}"))
    assert partition(program, 3).parameter_ranks["shared"] == (0, 1, 2)


def test_stage_without_parameters():
    program = Program()
    first = program.layer(program.input(), "model.0")
    middle = program.add(first, path="model.act")
    program.layer(middle, "model.1")
    result = partition(program, 3)
    assert result.stage == (0, 0, 1, 2)
    assert result.loads[1].parameters == ()


def test_constants_are_repeated_where_they_are_read():
    program = Program()
    last = program.input()
    positions = program.add(output=1000)
    mask = program.add(positions, output=1000)
    for number in range(4):
        last = program.add(last, mask, parameters=(f"p{number}",))
    result = partition(program, 2, link=1.0)
    assert result.replicas == {positions: (0, 1), mask: (0, 1)}
    assert {node for node, _, _ in transfers(program.nodes, result)} == {4}


def test_random_nodes_and_what_depends_on_them_are_not_repeated():
    program = Program()
    last = program.input()
    noise = program.add(kind=NodeKind.RANDOM, output=1000)
    scaled = program.add(noise, output=1000)
    for number in range(4):
        last = program.add(last, scaled, parameters=(f"p{number}",))
    result = partition(program, 2, link=0.0)
    assert result.replicas == {}
    assert (scaled, 0, 1) in transfers(program.nodes, result)


def test_labels_travel_raw_to_the_stage_of_the_loss():
    program = Program()
    image, labels = program.input(8), program.input(4)
    shifted = program.add(labels, compute=0.0, output=3)
    flat = program.add(shifted, compute=0.0, output=3)
    last = image
    for number in range(4):
        last = program.layer(last, f"model.{number}")
    program.add(last, flat)
    result = partition(program, 3, link=0.01)
    assert (result.stage[shifted], result.stage[flat]) == (2, 2)
    assert (labels, 0, 2) in transfers(program.nodes, result)


def test_small_digest_of_inputs_is_computed_on_stage_zero():
    program = Program()
    image, weights = program.input(8), program.input(1000)
    digest = program.add(weights, output=1)
    last = image
    for number in range(4):
        last = program.layer(last, f"model.{number}")
    program.add(last, digest)
    result = partition(program, 2, link=0.01)
    assert result.stage[digest] == 0
    assert (digest, 0, 1) in transfers(program.nodes, result)


@pytest.mark.parametrize(("compute", "is_repeated"), [(0.1, True), (50.0, False)])
def test_expanded_mask_is_repeated_if_that_is_cheaper_than_sending(compute, is_repeated):
    program = Program()
    image, mask = program.input(8), program.input(10)
    expanded = program.add(mask, compute=compute, output=1000)
    last = image
    for number in range(4):
        last = program.add(last, expanded, parameters=(f"p{number}",), compute=100.0)
    result = partition(program, 2, link=0.01)
    assert result.stages_of(expanded) == ((0, 1) if is_repeated else (0,))
    moved = mask if is_repeated else expanded
    assert (moved, 0, 1) in transfers(program.nodes, result)


def test_work_on_parameters_sits_with_its_reader():
    program = Program()
    image = program.input()
    weight = program.add(parameters=("late",), compute=0.0, output=1000)
    scaled = program.add(weight, compute=0.0, output=1000)
    last = image
    for number in range(4):
        last = program.layer(last, f"model.{number}")
    program.add(last, scaled)
    result = partition(program, 2, link=0.01)
    assert (result.stage[weight], result.stage[scaled]) == (1, 1)
    assert result.parameter_ranks["late"] == (1,)


def test_a_number_of_a_parameter_sits_with_what_else_uses_the_parameter():
    """As a penalty on weights, which is added to the loss."""
    program = Program()
    last, penalties = program.input(), []
    for number in range(4):
        last = program.layer(last, f"model.{number}", output=100)
    for number in range(4):
        square = program.add(parameters=(f"model.{number}.weight",), output=1000)
        penalties.append(program.add(square, output=4))
    program.add(last, *penalties)
    result = partition(program, 2, link=0.01)
    assert [result.stage[node] for node in penalties] == [0, 0, 1, 1]
    ranks = [result.parameter_ranks[f"model.{number}.weight"] for number in range(4)]
    assert ranks == [(0,), (0,), (1,), (1,)]


def test_parts_of_a_split_parameter_do_not_glue_their_readers():
    program = Program()
    image = program.input()
    both = program.add(parameters=("both",), output=0)
    parts = [program.add(both), program.add(both)]
    last = program.add(image, parts[0])
    for number in range(4):
        last = program.layer(last, f"model.{number}")
    program.add(last, parts[1])
    assert partition(program, 4).num_stages == 4


def test_readers_of_an_updated_buffer_share_a_stage():
    program = Program()
    last = program.input()
    users = []
    for number in range(6):
        is_user = number in (1, 4)
        last = program.layer(
            last,
            f"model.{number}",
            buffers=("mean",) * is_user,
            mutates=("mean",) * (number == 4),
        )
        users += [last] * is_user
    result = partition(program, 2)
    assert len({result.stage[index] for index in users}) == 1
    with pytest.raises(
        PartitionError,
        match=r"into 4 stages: at most 3 are possible.* 4 cannot be separated, from 'node_2' "
        r"\(module 'model.1'\) to 'node_5' \(module 'model.4'\): they use 'mean'",
    ):
        partition(program, 4)


def test_plain_buffers_do_not_tie_their_readers():
    program = Program()
    last = program.input()
    for number in range(2):
        last = program.add(last, parameters=(f"p{number}",), buffers=("table",))
    assert partition(program, 2).stage == (0, 0, 1)


def test_a_value_that_cannot_travel_keeps_its_readers():
    program = Program()
    parts = program.layer(program.input(), "model.split", output=0)
    first = program.add(parts, path="model.split")
    second = program.add(parts, path="model.split")
    program.add(first, second, parameters=("q",))
    result = partition(program, 2)
    assert result.stage == (0, 0, 0, 0, 1)
    with pytest.raises(PartitionError, match=r"at most 2 .*value of 'node_1' cannot travel"):
        partition(program, 3)


def test_empty_inputs_may_travel():
    program = Program()
    empty = program.input(0)
    last = program.layer(program.input(), "model.0")
    program.add(last, empty, parameters=("q",))
    assert partition(program, 2).stage == (0, 0, 0, 1)


@pytest.mark.parametrize("num_layers", [0, 3])
def test_more_stages_than_nodes(num_layers):
    possible = "at most 1 is possible" if num_layers == 0 else "at most 3 are possible"
    with pytest.raises(PartitionError, match=possible + r".* It has \d operations .* Lower"):
        partition(chain(num_layers), 4)


def test_one_stage_takes_everything_even_without_parameters():
    program = Program()
    program.add(program.input(), compute=1.0)
    result = partition(program, 1)
    assert (result.stage, result.placement) == ((0, 0), (0,))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_stages": 0}, "number of stages is 0"),
        ({"memory_weight": 1.5}, r"memory_weight is 1.5; use a value from 0 to 1"),
        ({"link": -1.0}, "cost of a byte is -1.0 seconds"),
        ({"placement": (0, 1, 0)}, r"place 2 stages by \(0, 1, 0\)"),
        ({"placement": (1, 0)}, "rank 0 for stage 0, because rank 0 owns the inputs"),
    ],
)
def test_arguments_out_of_range(options, text):
    with pytest.raises(PartitionError, match=text):
        partition(chain(4), **{"num_stages": 2, **options})


def test_placement_of_several_stages_per_rank():
    result = partition(chain(8), 4, placement=(0, 1, 0, 1))
    assert result.placement == (0, 1, 0, 1)
    assert result.parameter_ranks["model.4.weight"] == (0,)
    again = partition(chain(8), 4, placement=(0, 1, 0, 1), fixed=result.parameter_ranks)
    assert again == result


def test_result_of_one_signature_fixes_the_next():
    first = partition(chain(8), 3)
    longer = chain(8)
    for index in range(1, 4):
        longer.recost(index, compute_s=50.0)
    second = partition(longer, 3, fixed=first.parameter_ranks)
    assert second.parameter_ranks == first.parameter_ranks


def test_fixed_parameters_without_a_linear_cut_make_data_flow_back():
    fixed = {"model.0.weight": (1,), "model.1.weight": (0,), "model.2.weight": (1,)}
    result = partition(chain(3), 2, fixed=fixed)
    assert result.placement == (0, 1, 0, 1)
    assert result.stage == (0, 1, 2, 3)
    assert result.parameter_ranks == fixed


def test_later_signature_that_is_too_small_leaves_ranks_idle():
    result = partition(chain(1), 3, fixed={"model.0.weight": (1,), "unread": (2,)})
    assert result.placement == (0, 1)
    assert result.idle_ranks == (2,)


def test_unread_parameters_stay_with_their_siblings():
    program = chain(4)
    program.parameter_bytes |= {"model.3.bias": 7, "other.weight": 7}
    result = partition(program, 2)
    assert result.parameter_ranks["model.3.bias"] == (1,)
    assert result.parameter_ranks["other.weight"] == (0,)
    assert "model.3.bias" in result.loads[1].parameters


def test_costs_of_zero_still_give_an_even_cut():
    program = chain(6, compute=0.0)
    program.parameter_bytes = dict.fromkeys(program.parameter_bytes, 0)
    assert partition(program, 3).stage == (0, 0, 0, 1, 1, 2, 2)


def test_loads_add_up():
    program = chain(4, memory=10, output=3, gradient=2)
    loads = partition(program, 2).loads
    assert partition(program, 2).stage == (0, 0, 0, 1, 1)  # the input, and four layers
    assert [load.parameter_bytes for load in loads] == [2 * PARAMETER_BYTES] * 2
    assert [load.activation_bytes for load in loads] == [20, 20]
    assert [(load.received_bytes, load.sent_bytes) for load in loads] == [(2, 3), (3, 2)]
    assert [load.cut_bytes for load in loads] == [5, 5]


def test_casts_of_parameters_stay_with_their_reader():
    program = Program()
    first = program.layer(program.input(), "model.0", compute=1.0)
    casts = [program.add(parameters=(f"model.1.{n}",), compute=1.0) for n in ("bias", "weight")]
    last = program.add(first, *casts, path="model.1", compute=1.0)
    stage = partition(program, 2, memory_weight=0.0).stage  # equal halves would part the casts
    assert [stage[i] for i in (first, *casts, last)] == [0, 1, 1, 1]
