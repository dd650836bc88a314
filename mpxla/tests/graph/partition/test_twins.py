"""Which modules are copies of others, and where the order of cutting has them."""

import pytest

from mpxla.graph.partition.auto import partition_auto
from mpxla.graph.partition.flow import analyse
from mpxla.graph.partition.twins import find_twins
from mpxla.graph.partition.words import NodeKind
from mpxla.tests.graph.partition.partition_graphs import Program

pytestmark = pytest.mark.unit


def paths(*modules, names=("0.weight", "0.bias", "1.weight")):
    shapes = {"0.weight": (4, 3), "0.bias": (4,), "1.weight": (3, 4)}
    return {
        (*module.split("."), *name.split(".")): shapes[name] for module in modules for name in names
    }


def under(module, tensors):
    prefix = tuple(module.split("."))
    return {path for path in tensors if path[: len(prefix)] == prefix}


def pairs(found, depth=1):
    return {(".".join(a[:depth]), ".".join(b[:depth])) for a, b in found.items()}


def test_a_frozen_copy_has_its_original_also_inside_of_one_model():
    tensors = paths("teacher", "student")
    found = find_twins(tensors, under("student", tensors))
    assert pairs(found) == {("teacher", "student")} and found.keys() == under("teacher", tensors)
    tensors = paths("model.target", "model.online") | {("model", "predictor", "weight"): (4, 4)}
    trained = under("model.online", tensors) | under("model.predictor", tensors)
    assert pairs(find_twins(tensors, trained), 2) == {("model.target", "model.online")}


def test_of_several_originals_each_has_a_copy():
    tensors = paths("q1", "q2", "target1", "target2")
    found = find_twins(tensors, under("q1", tensors) | under("q2", tensors))
    assert pairs(found) == {("target1", "q1"), ("target2", "q2")}


def test_what_is_trained_or_shaped_otherwise_is_no_copy():
    tensors = paths("teacher", "student")
    assert find_twins(tensors, set(tensors)) == find_twins(tensors, set()) == {}
    assert not find_twins(tensors, under("student", tensors) | {("teacher", "1", "weight")})
    tensors["teacher", "0", "weight"] = (4, 5)
    assert ("teacher", "1", "weight") not in find_twins(tensors, under("student", tensors))


def teacher_and_student(layers, teacher_first=True, student_reads_teacher=False):
    """A program, names of the copy's parameters with their originals, and the last nodes."""
    program = Program()
    source = program.add(kind=NodeKind.INPUT)
    last = {}
    for name in ("t", "s") if teacher_first else ("s", "t"):
        node = last["t"] if name == "s" and student_reads_teacher else source
        for layer in range(layers):
            node = program.add(node, parameters=[f"{name}{layer}"], path=f"{name}.{layer}")
            node = program.add(node, path=f"{name}.{layer}")
        last[name] = node
    program.add(last["t"], last["s"])
    return program, {f"t{layer}": f"s{layer}" for layer in range(layers)}


@pytest.mark.parametrize("teacher_first", [True, False])
@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_copies_are_cut_where_their_originals_are(num_stages, teacher_first):
    program, twins = teacher_and_student(5, teacher_first)
    arguments = program.nodes, program.parameter_bytes, num_stages, 0.5, 0.01
    ranks = partition_auto(*arguments, twins=twins).parameter_ranks
    assert all(ranks[copied] == ranks[original] for copied, original in twins.items())
    assert len(set(ranks.values())) == num_stages
    apart = partition_auto(*arguments).parameter_ranks
    assert any(apart[copied] != apart[original] for copied, original in twins.items())


def test_a_copy_whose_results_the_original_reads_comes_before_it():
    program, twins = teacher_and_student(3, student_reads_teacher=True)
    found, plain = analyse(program.nodes, 0.01, twins), analyse(program.nodes, 0.01)
    assert (found.order, found.groups) == (plain.order, plain.groups)


def test_more_stages_than_pairs_of_layers_are_cut_as_if_there_were_no_copy():
    program, twins = teacher_and_student(2)
    partition = partition_auto(program.nodes, program.parameter_bytes, 6, 0.5, 0.01, twins=twins)
    assert partition.num_stages == 6


def test_a_copy_that_is_placed_elsewhere_stays():
    program, twins = teacher_and_student(2)
    fixed = {"t0": (1,), "s0": (0,), "t1": (1,), "s1": (1,)}
    partition = partition_auto(
        program.nodes, program.parameter_bytes, 2, 0.5, 0.01, fixed, twins=twins
    )
    assert dict(partition.parameter_ranks) == fixed
