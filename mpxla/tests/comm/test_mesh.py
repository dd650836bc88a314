"""Replica groups of collectives and of stage transfers."""

from itertools import pairwise

import pytest

from mpxla.comm.mesh import Mesh, Meshes, complete
from mpxla.topology import CommGroup, Topology

pytestmark = pytest.mark.unit


def is_mesh(mesh: Mesh, world_size: int) -> bool:
    """Disjoint groups of one size, sorted, of all ranks that such groups can hold."""
    size = len(mesh.groups[0])
    members = [rank for group in mesh.groups for rank in group]
    return (
        list(mesh.groups) == sorted(mesh.groups)
        and all(len(group) == size and list(group) == sorted(group) for group in mesh.groups)
        and len(set(members)) == len(members) == world_size // size * size
    )


def of_topology(world_size, pp, placement="cluster", tp=1):
    topology = Topology(world_size, pp, tp, placement)
    meshes = Meshes(world_size, topology.groups(CommGroup.PP_GROUP))
    meshes.add([group for kind in CommGroup for group in topology.groups(kind)])
    return topology, meshes


def test_stages_in_a_row_have_two_colours():
    meshes = Meshes(4, [(0, 1, 2, 3)])
    assert str(meshes.of_pair(0, 1)) == str(meshes.of_pair(3, 2)) == "{0,1} {2,3}"
    assert str(meshes.of_pair(1, 2)) == str(meshes.of_pair(3, 0)) == "{0,3} {1,2}"


def test_an_odd_number_of_stages_leaves_one_alone_or_pairs_it_with_another_pipeline():
    alone = Meshes(3, [(0, 1, 2)])
    assert str(alone.of_pair(0, 1)) == "{0,1}"
    assert str(alone.of_pair(1, 2)) == "{1,2}"
    both = Meshes(6, [(0, 1, 2), (3, 4, 5)])
    assert str(both.of_pair(0, 1)) == str(both.of_pair(4, 3)) == "{0,1} {2,5} {3,4}"
    assert str(both.of_pair(1, 2)) == "{0,3} {1,2} {4,5}"


@pytest.mark.parametrize("pp", [3, 5, 7])
def test_an_odd_ring_has_a_third_colour(pp):
    meshes = Meshes(pp, [tuple(range(pp))])
    chain = {meshes.of_pair(a, b) for a, b in pairwise(range(pp))}
    closing = meshes.of_pair(pp - 1, 0)
    assert len(chain) == 2
    assert closing not in chain
    assert (0, pp - 1) in closing.groups


@pytest.mark.parametrize("pp", [2, 4, 6, 8])
def test_an_even_ring_needs_no_third_colour(pp):
    meshes = Meshes(2 * pp, [tuple(range(pp)), tuple(range(pp, 2 * pp))])
    edges = [*pairwise(range(pp)), (pp - 1, 0)]
    assert len({meshes.of_pair(a, b) for a, b in edges}) == min(pp - 1, 2)


GRIDS = [
    (w, p, s)
    for w in range(2, 13)
    for p in range(1, w + 1)
    if w % p == 0
    for s in ("cluster", "spread")
]


@pytest.mark.parametrize(("world_size", "pp", "placement"), GRIDS)
def test_every_mesh_is_full_sorted_and_the_same_on_all_its_ranks(world_size, pp, placement):
    topology, meshes = of_topology(world_size, pp, placement)
    everyone = [of_topology(world_size, pp, placement)[1] for _ in range(2)]
    for pipeline in topology.groups(CommGroup.PP_GROUP):
        for low in pipeline:
            for high in pipeline:
                if low != high:
                    mesh = meshes.of_pair(low, high)
                    assert tuple(sorted((low, high))) in mesh.groups
                    assert is_mesh(mesh, world_size)
                    assert all(other.of_pair(high, low) == mesh for other in everyone)
    for kind in CommGroup:
        for group in topology.groups(kind):
            assert set(meshes.of_group(group).groups) == set(topology.groups(kind))
            assert is_mesh(meshes.of_group(group), world_size)


def test_transfers_of_all_pipelines_share_few_meshes():
    """Neuron allows 12 communicators; programs have one each, but all programs together count."""
    for pp in range(2, 9):
        topology, meshes = of_topology(pp * 4, pp)
        edges = [*pairwise(range(pp)), *((0, stage) for stage in range(2, pp))]
        pairs = [(p[a], p[b]) for p in topology.groups(CommGroup.PP_GROUP) for a, b in edges]
        assert len({meshes.of_pair(*pair) for pair in pairs}) <= max(2, pp)


def test_groups_that_are_no_mesh_are_completed():
    assert str(complete([(1, 4)], 6)) == "{0,2} {1,4} {3,5}"
    assert str(complete([(0, 2)], 3)) == "{0,2}"
    meshes = Meshes(6)
    meshes.add([(0, 2, 4), (1, 5), (0, 1, 2), (3, 4, 5)])
    assert str(meshes.of_group((1, 5))) == "{0,2} {1,5} {3,4}"
    assert str(meshes.of_group((3, 4, 5))) == "{0,1,2} {3,4,5}"
    assert str(meshes.of_group((0, 2, 4))) == "{0,2,4} {1,3,5}"
    assert str(meshes.of_pair(5, 2)) == "{0,1} {2,5} {3,4}"


def test_a_mesh_numbers_its_members():
    mesh = Mesh(((1, 4), (2, 3)))
    assert mesh.members == (1, 2, 3, 4)
    assert mesh.replica_groups() == [[0, 3], [1, 2]]
