"""The optimal cuts of a sequence of pieces: arithmetic only.

A stage is a run of pieces i to j (j not included) and costs

    cost(i, j) = A[j] - A[i] - shared(i, j) + X[i] + X[j]

with prefix sums A in which whatever several pieces share counts at every use, shared(i, j) the
surplus of that within the run, and X the price of the cuts. `best_cuts` minimises the largest cost
of exactly S stages. Phases:

1. *bound*: without `shared`, the cost separates into a term of i and a term of j, so whether S
   stages below a threshold exist takes one running maximum per stage; bisection. This is the
   optimum if nothing is shared, and an upper bound otherwise.
2. *bottleneck*: if something is shared, an exact dynamic program over runs within that bound.
3. *preference*: a second dynamic program picks, among all cuts that reach the optimum, those with
   the least sum of preferences.

Both programs visit only runs whose own cost stays below the bound. The second one needs minima over
ranges of positions only, because the runs that end at one position and are cheap enough form few
ranges. This module must not know nodes, bytes or seconds.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Chain", "best_cuts"]

TOLERANCE = 1e-9
"""Relative difference below which two costs are equal."""
MAX_BISECTIONS = 60
UNREACHABLE = np.iinfo(np.int64).max // 4


@dataclass(frozen=True)
class Chain:
    """K pieces in a row and what a run of them costs; K + 1 positions, cuts are 1 to K - 1."""

    upper: NDArray[np.float64]
    """[K + 1] prefix sums of the pieces' costs, shared things counted at every use (A above)."""
    lower: NDArray[np.float64]
    """[K + 1] the same, shared things counted at their first use only."""
    crossing: NDArray[np.float64]
    """[K + 1] price of cutting at a position, zero at both ends (X above)."""
    shared: Sequence[Sequence[tuple[int, float]]]
    """[K] for every piece the earlier piece that used a shared thing last, with its cost."""
    preference: Sequence[tuple[int, int]]
    """[K + 1] (major, minor) numbers of which the sum over all cuts should be small."""
    first_start: NDArray[np.int64] | None = None
    """[K + 1, S] earliest start of stage s if it ends at a position; None = no restriction."""

    @property
    def num_pieces(self) -> int:
        """Number of pieces."""
        return len(self.upper) - 1


class _Column(NamedTuple):
    """The runs that end at one position, and the stages that may end there."""

    stop: int
    start: int
    """Runs start at `start`, ..., `stop - 1`."""
    cost: NDArray[np.float64]
    stages: slice
    """Numbers of stages, of which the last one ends at `stop`."""


def best_cuts(chain: Chain, num_stages: int) -> tuple[tuple[int, ...], float] | None:
    """Find the cuts whose most expensive stage is cheapest.

    Args:
        chain: Pieces and costs.
        num_stages: Exact number of stages, at least 1 and at most the number of pieces.

    Returns:
        The positions of the `num_stages - 1` cuts and the largest cost; None if the chain's
        restriction leaves no way.
    """
    assert 1 <= num_stages <= chain.num_pieces
    if chain.first_start is not None:
        limit = float(chain.upper[-1] + 2 * chain.crossing.max())
        bottleneck = _bottleneck(chain, num_stages, limit)
    else:
        bottleneck = _separable_bottleneck(chain.upper, chain.crossing, num_stages)
        if any(chain.shared):
            bottleneck = _bottleneck(chain, num_stages, bottleneck)
    if not np.isfinite(bottleneck):
        return None
    cuts = _preferred_cuts(chain, num_stages, bottleneck)
    return cuts, _largest_cost(chain, cuts)


def _separable_bottleneck(
    prefix: NDArray[np.float64], crossing: NDArray[np.float64], num_stages: int
) -> float:
    """Phase 1: smallest threshold (to within the tolerance) if shared things cost every time."""
    ends, starts = prefix + crossing, prefix - crossing

    def is_enough(threshold: float) -> bool:
        reached = np.full(len(prefix), -np.inf)
        reached[0] = starts[0]
        for _ in range(num_stages):
            best_start = np.maximum.accumulate(reached)[:-1]
            reached[1:] = np.where(best_start >= ends[1:] - threshold, starts[1:], -np.inf)
            reached[0] = -np.inf
        return bool(np.isfinite(reached[-1]))

    low, high = float(prefix[-1]) / num_stages, float(prefix[-1] + 2 * crossing.max())
    for _ in range(MAX_BISECTIONS):
        if high - low <= TOLERANCE * high / 4:
            break
        middle = (low + high) / 2
        if is_enough(middle):
            high = middle
        else:
            low = middle
    return high * (1 + TOLERANCE)


def _bottleneck(chain: Chain, num_stages: int, limit: float) -> float:
    """Phase 2: the optimum, or infinity if no way stays within the limit."""
    best = np.full((num_stages + 1, chain.num_pieces + 1), np.inf)
    best[0, 0] = 0.0
    for column in _columns(chain, num_stages, limit):
        before = slice(column.stages.start - 1, column.stages.stop - 1)
        runs = np.maximum(best[before, column.start : column.stop], column.cost)
        if chain.first_start is not None:
            first = chain.first_start[column.stop, before]
            runs[np.arange(column.start, column.stop) < first[:, None]] = np.inf
        best[column.stages, column.stop] = runs.min(axis=1)
    return float(best[-1, -1])


def _preferred_cuts(chain: Chain, num_stages: int, bottleneck: float) -> tuple[int, ...]:
    """Phase 3: of the ways that stay within the optimum, the one with the least preference."""
    runs = _runs(chain, num_stages, bottleneck * (1 + TOLERANCE))
    penalty = _packed(chain.preference, num_stages)
    before = np.full(chain.num_pieces + 1, UNREACHABLE, dtype=np.int64)
    before[0] = 0
    layers = [before]
    for stage in range(num_stages):
        values = _range_minima(layers[-1], runs.legal_starts(chain, stage), runs.stops)
        layer = np.full(chain.num_pieces + 1, UNREACHABLE, dtype=np.int64)
        layer[runs.ends] = np.minimum.reduceat(values, runs.offsets) + penalty[runs.ends]
        layers.append(np.minimum(layer, UNREACHABLE))
    assert layers[-1][-1] < UNREACHABLE, "the optimum must be reachable"
    cuts = [chain.num_pieces]
    for stage in range(num_stages - 1, 0, -1):
        starts = runs.legal_starts(chain, stage)
        candidates = np.concatenate(
            [
                np.arange(starts[place], runs.stops[place])
                for place in np.flatnonzero(runs.end_of_each == cuts[-1])
            ]
        )
        cuts.append(int(candidates[layers[stage][candidates].argmin()]))
    return tuple(reversed(cuts[1:]))


@dataclass(frozen=True)
class _Runs:
    """The possible starts of a stage for each of its ends, as ranges of positions."""

    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    end_of_each: NDArray[np.int64]
    ends: NDArray[np.int64]
    """Positions that have any range, ascending, and where their ranges begin in the arrays above.
    """
    offsets: NDArray[np.int64]

    def legal_starts(self, chain: Chain, stage: int) -> NDArray[np.int64]:
        """Starts of the ranges after the chain's restriction; a range may become empty."""
        if chain.first_start is None:
            return self.starts
        return np.maximum(self.starts, chain.first_start[self.end_of_each, stage])


def _runs(chain: Chain, num_stages: int, limit: float) -> _Runs:
    starts, stops, ends = [], [], []
    for column in _columns(chain, num_stages, limit):
        is_within = np.zeros(len(column.cost) + 2, dtype=np.int8)
        is_within[1:-1] = column.cost <= limit
        edges = np.flatnonzero(np.diff(is_within)) + column.start
        starts.append(edges[0::2])
        stops.append(edges[1::2])
        ends.append(np.full(len(edges) // 2, column.stop))
    end_of_each = np.concatenate(ends)
    positions, offsets = np.unique(end_of_each, return_index=True)
    return _Runs(np.concatenate(starts), np.concatenate(stops), end_of_each, positions, offsets)


def _range_minima(
    values: NDArray[np.int64], starts: NDArray[np.int64], stops: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Minimum of values[start:stop] for every range, by minima of lengths 1, 2, 4, ..."""
    table = [values]
    while 2 ** len(table) <= len(values):
        half = 2 ** (len(table) - 1)
        row = table[-1].copy()
        row[:-half] = np.minimum(row[:-half], table[-1][half:])
        table.append(row)
    length = stops - starts
    level = np.frexp(np.maximum(length, 1))[1] - 1
    minima = np.stack(table)
    pair = minima[level, np.minimum(starts, len(values) - 1)], minima[level, stops - 2**level]
    return np.where(length > 0, np.minimum(*pair), UNREACHABLE)


def _largest_cost(chain: Chain, cuts: Sequence[int]) -> float:
    """The cost of the most expensive stage."""
    edges = (0, *cuts, chain.num_pieces)
    costs = []
    for start, stop in pairwise(edges):
        cost = chain.upper[stop] - chain.upper[start]
        cost += chain.crossing[start] + chain.crossing[stop]
        for piece in range(start, stop):
            cost -= sum(surplus for previous, surplus in chain.shared[piece] if previous >= start)
        costs.append(float(cost))
    return max(costs)


def _packed(preference: Sequence[tuple[int, int]], num_stages: int) -> NDArray[np.int64]:
    """Pairs as single numbers that add and compare like the pairs, as far as 64 bits allow."""
    largest_major = max(major for major, _ in preference)
    largest_minor = max(minor for _, minor in preference)
    room = UNREACHABLE // (num_stages * (largest_major + 1)) - 1
    coarseness = 1 + num_stages * largest_minor // room
    unit = 1 + num_stages * (largest_minor // coarseness)
    packed = [major * unit + minor // coarseness for major, minor in preference]
    return np.array(packed, dtype=np.int64)


def _columns(chain: Chain, num_stages: int, limit: float) -> Iterator[_Column]:
    """Visit every position with the runs ending there that can stay within the limit."""
    num_pieces = chain.num_pieces
    upper = chain.upper.tolist()
    fewest, most = _stage_ranges(chain, num_stages, limit * (1 + TOLERANCE))
    shared = np.zeros(num_pieces + 1)
    start = 0
    for stop in range(1, num_pieces + 1):
        for previous, cost in chain.shared[stop - 1]:
            shared[start : previous + 1] += cost
        within = limit * (1 + TOLERANCE)
        while start < stop - 1 and upper[stop] - upper[start] - shared[start] > within:
            start += 1
        if chain.first_start is not None:
            start = max(start, int(chain.first_start[stop].min()))
        if fewest[stop] > most[stop] or start >= stop:
            continue
        runs = slice(start, stop)
        cost = upper[stop] - chain.upper[runs] - shared[runs]
        cost += chain.crossing[runs] + chain.crossing[stop]
        yield _Column(stop, start, cost, slice(fewest[stop], most[stop] + 1))


def _stage_ranges(chain: Chain, num_stages: int, limit: float) -> tuple[list[int], list[int]]:
    """Smallest and largest number of stages before each position."""
    num_pieces = chain.num_pieces
    position = np.arange(num_pieces + 1)
    fewest = np.maximum(1, num_stages - (num_pieces - position))
    most = np.minimum(position, num_stages - 1)
    if limit > 0:
        before, after = chain.lower / limit, (chain.lower[-1] - chain.lower) / limit
        fewest = np.maximum(fewest, np.ceil(before - TOLERANCE * num_stages).astype(np.int64))
        most = np.minimum(
            most, num_stages - np.ceil(after - TOLERANCE * num_stages).astype(np.int64)
        )
    fewest[-1] = most[-1] = num_stages
    return fewest.tolist(), most.tolist()
