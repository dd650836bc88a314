"""Rank arithmetic, against SMP's documented tables and by properties."""

from itertools import permutations, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpxla.errors import TopologyError
from mpxla.topology import CommGroup, RankType, Topology

pytestmark = pytest.mark.unit

# Eight ranks, pp = tp = rdp = 2; each list is indexed by global rank.
EIGHT_RANKS = {
    "DPT": {
        "rdp_rank": [0, 0, 0, 0, 1, 1, 1, 1],
        "pp_rank": [0, 0, 1, 1, 0, 0, 1, 1],
        "tp_rank": [0, 1, 0, 1, 0, 1, 0, 1],
        "dp_rank": [0, 1, 0, 1, 2, 3, 2, 3],
        "mp_rank": [0, 1, 2, 3, 0, 1, 2, 3],
    },
    "PTD": {
        "rdp_rank": [0, 1, 0, 1, 0, 1, 0, 1],
        "pp_rank": [0, 0, 0, 0, 1, 1, 1, 1],
        "tp_rank": [0, 0, 1, 1, 0, 0, 1, 1],
        "dp_rank": [0, 1, 2, 3, 0, 1, 2, 3],
        "mp_rank": [0, 0, 1, 1, 2, 2, 3, 3],
    },
    "DTP": {
        "rdp_rank": [0, 0, 0, 0, 1, 1, 1, 1],
        "pp_rank": [0, 1, 0, 1, 0, 1, 0, 1],
        "tp_rank": [0, 0, 1, 1, 0, 0, 1, 1],
        "dp_rank": [0, 0, 1, 1, 2, 2, 3, 3],
        "mp_rank": [0, 1, 2, 3, 0, 1, 2, 3],
    },
    "PDT": {
        "rdp_rank": [0, 0, 1, 1, 0, 0, 1, 1],
        "pp_rank": [0, 0, 0, 0, 1, 1, 1, 1],
        "tp_rank": [0, 1, 0, 1, 0, 1, 0, 1],
        "dp_rank": [0, 1, 2, 3, 0, 1, 2, 3],
        "mp_rank": [0, 1, 0, 1, 2, 3, 2, 3],
    },
    "TDP": {
        "rdp_rank": [0, 0, 1, 1, 0, 0, 1, 1],
        "pp_rank": [0, 1, 0, 1, 0, 1, 0, 1],
        "tp_rank": [0, 0, 0, 0, 1, 1, 1, 1],
        "dp_rank": [0, 0, 1, 1, 2, 2, 3, 3],
        "mp_rank": [0, 1, 0, 1, 2, 3, 2, 3],
    },
    "TPD": {
        "rdp_rank": [0, 1, 0, 1, 0, 1, 0, 1],
        "pp_rank": [0, 0, 1, 1, 0, 0, 1, 1],
        "tp_rank": [0, 0, 0, 0, 1, 1, 1, 1],
        "dp_rank": [0, 1, 0, 1, 2, 3, 2, 3],
        "mp_rank": [0, 0, 1, 1, 2, 2, 3, 3],
    },
}
STRATEGIES = ["cluster", "spread", *map("".join, permutations("DPT"))]
PAIRS = {
    RankType.WORLD_RANK: CommGroup.WORLD,
    RankType.MP_RANK: CommGroup.MP_GROUP,
    RankType.DP_RANK: CommGroup.DP_GROUP,
    RankType.PP_RANK: CommGroup.PP_GROUP,
    RankType.TP_RANK: CommGroup.TP_GROUP,
    RankType.RDP_RANK: CommGroup.RDP_GROUP,
}


# A slow machine is no failure, hence no deadline.
quick = settings(max_examples=50, deadline=None)


@st.composite
def topologies(draw):
    degree = st.integers(1, 4)
    rdp, pp, tp = draw(degree), draw(degree), draw(degree)
    return Topology(rdp * pp * tp, pp, tp, draw(st.sampled_from(STRATEGIES)))


@pytest.mark.parametrize("strategy", EIGHT_RANKS)
@pytest.mark.parametrize("name", ["rdp_rank", "pp_rank", "tp_rank", "dp_rank", "mp_rank"])
def test_documented_ranks(strategy, name):
    topology = Topology(8, 2, 2, strategy)
    actual = [getattr(topology, name)(rank) for rank in range(8)]
    assert actual == EIGHT_RANKS[strategy][name]


@pytest.mark.parametrize(("word", "order"), [("cluster", "DPT"), ("spread", "TPD")])
def test_words_stand_for_orders(word, order):
    by_word, by_order = Topology(24, 2, 3, word), Topology(24, 2, 3, order)
    assert [by_word.coordinates(rank) for rank in range(24)] == [
        by_order.coordinates(rank) for rank in range(24)
    ]


def test_cluster_is_the_default():
    assert Topology(8, 2).mp_group(0) == (0, 1)


def test_spread_without_tensor_parallelism():
    topology = Topology(8, 2, 1, "spread")
    assert topology.groups(CommGroup.MP_GROUP) == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert topology.groups(CommGroup.DP_GROUP) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert topology.dp_rank(6) == 2


def test_cluster_without_tensor_parallelism():
    topology = Topology(8, 2, 1, "cluster")
    assert topology.groups(CommGroup.MP_GROUP) == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert topology.groups(CommGroup.DP_GROUP) == ((0, 2, 4, 6), (1, 3, 5, 7))


def test_tensor_parallelism_over_32_ranks():
    topology = Topology(32, 1, 4, "cluster")
    assert topology.groups(CommGroup.TP_GROUP)[:2] == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert topology.rdp_group(0) == (0, 4, 8, 12, 16, 20, 24, 28)


def test_named_groups():
    topology = Topology(8, 2, 2)
    assert topology.world_group() == (0, 1, 2, 3, 4, 5, 6, 7)
    assert topology.mp_group(5) == (4, 5, 6, 7)
    assert topology.dp_group(5) == (0, 1, 4, 5)
    assert topology.pp_group(5) == (5, 7)
    assert topology.tp_group(5) == (4, 5)
    assert topology.rdp_group(5) == (1, 5)


def test_sizes():
    topology = Topology(24, 2, 3)
    sizes = (topology.pp_size, topology.tp_size, topology.rdp_size)
    assert sizes == (2, 3, 4)
    assert (topology.mp_size, topology.dp_size, topology.size) == (6, 12, 24)


@quick
@given(topologies())
def test_groups_partition_the_world(topology):
    for kind in CommGroup:
        groups = topology.groups(kind)
        assert sorted(rank for group in groups for rank in group) == list(range(topology.size))
        for group in groups:
            assert list(group) == sorted(group)
            assert all(topology.group(kind, rank) == group for rank in group)


@quick
@given(topologies())
def test_sizes_of_groups(topology):
    expected = {
        CommGroup.WORLD: topology.size,
        CommGroup.MP_GROUP: topology.mp_size,
        CommGroup.DP_GROUP: topology.dp_size,
        CommGroup.PP_GROUP: topology.pp_size,
        CommGroup.TP_GROUP: topology.tp_size,
        CommGroup.RDP_GROUP: topology.rdp_size,
    }
    for kind, size in expected.items():
        assert {len(group) for group in topology.groups(kind)} == {size}
    assert topology.mp_size * topology.rdp_size == topology.size
    assert topology.pp_size * topology.dp_size == topology.size
    assert topology.pp_size * topology.tp_size * topology.rdp_size == topology.size


@quick
@given(topologies())
def test_every_place_of_the_grid_has_one_rank(topology):
    places = [topology.coordinates(rank) for rank in range(topology.size)]
    sizes = topology.rdp_size, topology.pp_size, topology.tp_size
    assert sorted(places) == list(product(*map(range, sizes)))


@quick
@given(topologies())
def test_members_of_groups_agree_on_coordinates(topology):
    for rank in range(topology.size):
        here = topology.coordinates(rank)
        there = [topology.coordinates(other) for other in range(topology.size)]
        assert topology.pp_group(rank) == tuple(
            r for r, c in enumerate(there) if (c.rdp, c.tp) == (here.rdp, here.tp)
        )
        assert topology.dp_group(rank) == tuple(r for r, c in enumerate(there) if c.pp == here.pp)
        assert topology.mp_group(rank) == tuple(r for r, c in enumerate(there) if c.rdp == here.rdp)
        assert set(topology.tp_group(rank)) == set(topology.dp_group(rank)) & set(
            topology.mp_group(rank)
        )
        assert set(topology.rdp_group(rank)) <= set(topology.dp_group(rank))


@quick
@given(topologies())
def test_indices_translate_both_ways(topology):
    for rank_type, kind in PAIRS.items():
        for rank in range(topology.size):
            index = topology.index(rank_type, rank)
            assert topology.group(kind, rank)[index] == rank
            assert topology.to_global(index, rank_type, rank) == rank


@quick
@given(topologies())
def test_named_ranks_are_indices(topology):
    for rank in range(topology.size):
        assert topology.pp_rank(rank) == topology.index(RankType.PP_RANK, rank)
        assert topology.tp_rank(rank) == topology.index(RankType.TP_RANK, rank)
        assert topology.rdp_rank(rank) == topology.index(RankType.RDP_RANK, rank)
        assert topology.index(RankType.WORLD_RANK, rank) == rank


def test_index_of_a_peer():
    assert Topology(8, 2, 2).to_global(0, RankType.PP_RANK, 7) == 5
    assert Topology(8, 2, 2).to_global(3, RankType.DP_RANK, 0) == 5


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            (3, 2),
            "3 processes cannot be divided into replicas of 2 (pipeline_parallel_degree 2 x "
            "tensor_parallel_degree 1): start 2 or 4 processes, or change the degrees",
        ),
        ((2, 2, 2), "2 processes cannot be divided into replicas of 4"),
        ((2, 2, 2), "start 4 processes, or change the degrees"),
        ((0, 1), "number of processes: 0 must be at least 1"),
        ((4, 0), "pipeline_parallel_degree: 0 must be at least 1"),
        ((4, 1, -2), "tensor_parallel_degree: -2 must be at least 1"),
        ((4, 1, 1, "PPT"), "placement_strategy: 'PPT' must be one of cluster, spread, DPT"),
    ],
)
def test_refused_topologies(arguments, text):
    with pytest.raises(TopologyError) as caught:
        Topology(*arguments)
    assert text in str(caught.value)


def test_refused_ranks():
    topology: Any = Topology(4, 2)
    with pytest.raises(TopologyError, match="global rank 4 does not exist: there are 4 processes"):
        topology.coordinates(4)
    with pytest.raises(TopologyError, match="global rank -1 does not exist"):
        topology.pp_group(-1)
    with pytest.raises(
        TopologyError,
        match="PP_RANK 2 does not exist: there are 2 ranks in PP_GROUP of rank 3, so it must be "
        "from 0 to 1",
    ):
        topology.to_global(2, RankType.PP_RANK, 3)
    with pytest.raises(TopologyError, match=r"DP_RANK must be an integer, got 1\.0"):
        topology.to_global(1.0, RankType.DP_RANK, 0)


def test_refused_selectors():
    topology: Any = Topology(4, 2)
    with pytest.raises(TopologyError, match=r"member of smp.CommGroup .* got \[0, 1\]"):
        topology.group([0, 1], 0)
    with pytest.raises(TopologyError, match=r"member of smp.RankType .* got 'PP_RANK'"):
        topology.to_global(0, "PP_RANK", 0)
    with pytest.raises(TopologyError, match=r"member of smp.RankType .* got None"):
        topology.index(None, 0)


def test_enums_have_the_six_names_of_smp():
    groups = ["WORLD", "MP_GROUP", "DP_GROUP", "PP_GROUP", "TP_GROUP", "RDP_GROUP"]
    ranks = ["WORLD_RANK", "MP_RANK", "DP_RANK", "PP_RANK", "TP_RANK", "RDP_RANK"]
    assert [member.name for member in CommGroup] == groups
    assert [member.name for member in RankType] == ranks


def test_sharding_groups_are_consecutive_chunks_of_replicas():
    # The table of SMP's documents for 32 processes.
    topology = Topology(32, tp=4, sdp=4)
    assert topology.rdp_group(0) == (0, 4, 8, 12, 16, 20, 24, 28)
    assert topology.sdp_group(8) == (0, 4, 8, 12)
    assert topology.sdp_group(28) == (16, 20, 24, 28)
    assert topology.sdp_replicas(8) == (8, 24)
    groups = topology.sdp_groups()
    assert len(groups) == 4 * 2 + 4 * 4
    for rank in range(32):
        assert topology.sdp_group(rank) in groups and topology.sdp_replicas(rank) in groups
        assert rank in topology.sdp_group(rank) and rank in topology.sdp_replicas(rank)
    with pytest.raises(TopologyError, match="sharded_data_parallel_degree: 3 must divide"):
        Topology(8, sdp=3)
