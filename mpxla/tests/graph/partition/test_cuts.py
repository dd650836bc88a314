"""Optimal cuts of plain chains of numbers."""

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpxla.graph.partition.cuts import Chain, best_cuts

pytestmark = pytest.mark.unit


def make_chain(
    costs, num_stages, crossing=None, shared=(), preference=None, first_start=None, scaled=None
):
    """A chain of one or two layers.

    `shared` lists (pieces, cost, layer): what all these pieces use and a stage pays once. `scaled`
    is (amounts of the second layer, weight of every stage).
    """
    num_pieces = len(costs)
    amounts, weights = scaled or ([0] * num_pieces, [0] * num_stages)
    upper = np.array([costs, amounts], dtype=float)
    surplus = [[] for _ in costs]
    for pieces, cost, layer in shared:
        upper[layer, list(pieces)] += cost
        for previous, piece in pairwise(pieces):
            surplus[piece].append((previous, (cost, 0) if layer == 0 else (0, cost)))
    prices = np.zeros(num_pieces + 1)
    prices[1:-1] = 0 if crossing is None else crossing
    return Chain(
        upper=np.pad(upper.cumsum(axis=1), [(0, 0), (1, 0)]),
        crossing=prices,
        shared=surplus,
        weights=np.array([(1.0, weight) for weight in weights]),
        preference=preference or [(0, 0)] * (num_pieces + 1),
        first_start=first_start,
    )


def cut(costs, num_stages, **options):
    """Cuts and cost of a chain that can be cut."""
    found = best_cuts(make_chain(costs, num_stages, **options))
    assert found is not None
    return found


def largest_cost(costs, crossing, shared, scaled, cuts):
    edges = (0, *cuts, len(costs))
    prices = [0, *crossing, 0]
    amounts, weights = scaled
    return max(
        sum(costs[start:stop])
        + weight * sum(amounts[start:stop])
        + sum(
            cost * (weight if layer else 1)
            for pieces, cost, layer in shared
            if any(start <= p < stop for p in pieces)
        )
        + prices[start]
        + prices[stop]
        for weight, (start, stop) in zip(weights, pairwise(edges), strict=True)
    )


@st.composite
def cases(draw):
    num_pieces = draw(st.integers(2, 9))
    numbers = st.integers(0, 9)
    costs = draw(st.lists(numbers, min_size=num_pieces, max_size=num_pieces))
    crossing = draw(st.lists(numbers, min_size=num_pieces - 1, max_size=num_pieces - 1))
    pieces = st.sets(st.integers(0, num_pieces - 1), min_size=2).map(lambda own: tuple(sorted(own)))
    shared = draw(st.lists(st.tuples(pieces, numbers, st.integers(0, 1)), max_size=3))
    num_stages = draw(st.integers(1, num_pieces))
    amounts = draw(st.lists(numbers, min_size=num_pieces, max_size=num_pieces))
    weights = draw(
        st.integers(0, 4).map(lambda weight: [weight] * num_stages)
        | st.lists(st.integers(0, 4), min_size=num_stages, max_size=num_stages)
    )
    preference = draw(
        st.lists(
            st.tuples(st.integers(0, 3), numbers), min_size=num_pieces - 1, max_size=num_pieces - 1
        )
    )
    return costs, crossing, shared, (amounts, weights), preference, num_stages


@settings(max_examples=300, deadline=None)
@given(cases())
def test_cost_and_preference_against_brute_force(case):
    costs, crossing, shared, scaled, preference, num_stages = case
    ways = [
        (
            largest_cost(costs, crossing, shared, scaled, cuts),
            sum(preference[place - 1][0] for place in cuts),
            sum(preference[place - 1][1] for place in cuts),
        )
        for cuts in combinations(range(1, len(costs)), num_stages - 1)
    ]
    options = {"crossing": crossing, "shared": shared, "scaled": scaled}
    cuts, cost = cut(costs, num_stages, preference=[(0, 0), *preference, (0, 0)], **options)
    assert len(cuts) == num_stages - 1
    expected = min(ways)
    assert cost == pytest.approx(expected[0])
    assert cost == pytest.approx(largest_cost(costs, crossing, shared, scaled, cuts))
    assert sum(preference[place - 1][0] for place in cuts) == expected[1]
    assert sum(preference[place - 1][1] for place in cuts) == expected[2]


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(cases(), st.data())
def test_restriction_against_brute_force(case, data):
    """Every piece forbids some stages."""
    costs, crossing, shared, scaled, preference, num_stages = case
    stages = st.sets(st.integers(0, num_stages - 1), max_size=num_stages // 2)
    forbidden = [data.draw(stages) for _ in costs]
    first_start = np.zeros((len(costs) + 1, num_stages), dtype=np.int64)
    for piece, wrong in enumerate(forbidden):
        first_start[piece + 1 :, sorted(wrong)] = piece + 1
    ways = [
        (
            largest_cost(costs, crossing, shared, scaled, cuts),
            sum(preference[p - 1][0] for p in cuts),
        )
        for cuts in combinations(range(1, len(costs)), num_stages - 1)
        if all(
            stage not in forbidden[piece]
            for stage, (start, stop) in enumerate(pairwise((0, *cuts, len(costs))))
            for piece in range(start, stop)
        )
    ]
    padded = [(0, 0), *preference, (0, 0)]
    found = best_cuts(make_chain(costs, num_stages, crossing, shared, padded, first_start, scaled))
    if found is None:
        assert not ways
    else:
        cuts, cost = found
        assert (cost, sum(preference[p - 1][0] for p in cuts)) == pytest.approx(min(ways))


def test_every_stage_gets_a_piece_even_if_cutting_costs():
    assert cut([1, 1, 1], 3, crossing=[5, 7]) == ((1, 2), 13.0)


def test_free_chain():
    cuts, cost = cut([0, 0, 0, 0], 3)
    assert (len(set(cuts)), cost) == (2, 0.0)


def test_what_is_shared_pulls_its_users_together():
    assert cut([5, 11, 11, 5], 3)[1] == 16.0
    assert cut([5, 1, 1, 5], 3, shared=[((1, 2), 10, 0)]) == ((1, 3), 12.0)


def test_stages_whose_amounts_cost_more_get_fewer_pieces():
    assert cut([0] * 11, 3, scaled=([1] * 11, [3, 2, 1])) == ((2, 5), 6.0)
    assert cut([0] * 6, 3, scaled=([1] * 6, [2, 2, 2])) == ((2, 4), 4.0)
    options = {"scaled": ([1] * 4, [2, 1]), "shared": [((1, 2), 3, 1)]}
    assert cut([0] * 4, 2, **options) == ((1,), 6.0)


def test_restriction_is_kept():
    first_start = np.zeros((5, 2), dtype=np.int64)
    first_start[1:, 1] = 1  # piece 0 must not be in stage 1 ...
    first_start[2:, 0] = 2  # ... nor piece 1 in stage 0
    assert cut([1, 1, 1, 1], 2, first_start=first_start) == ((1,), 3.0)


def test_restriction_without_a_way():
    first_start = np.full((4, 2), 3, dtype=np.int64)
    assert best_cuts(make_chain([1, 1, 1], 2, first_start=first_start)) is None


def test_preference_of_many_huge_numbers_does_not_overflow():
    num_pieces = 200
    preference = [(0, 0), *[(30, 2**55 + k) for k in range(num_pieces - 1)], (0, 0)]
    preference[50] = (29, 2**56)
    cuts, _ = cut([0.0] * num_pieces, 100, preference=preference)
    assert 50 in cuts
    assert len(cuts) == 99


def test_wide_runs_are_searched_completely():
    """One dominant piece leaves all cuts but those around it free, so preferences decide."""
    costs = [1.0] * 500
    costs[250] = 1e6
    preference = [(0, 0), *[(1, 0)] * 499, (0, 0)]
    for place in (7, 499):
        preference[place] = (0, 5)
    assert cut(costs, 5, preference=preference) == ((7, 250, 251, 499), 1e6)
