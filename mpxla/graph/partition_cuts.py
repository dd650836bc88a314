"""The optimal cuts of a sequence of pieces: arithmetic only.

Stage s is a run of pieces i to j (j not included) and costs

    cost(s, i, j) = w[s] . (A[j] - A[i] - shared(i, j)) + X[i] + X[j]

where A holds prefix sums of several *layers* (amounts of different kinds) and w[s] says what an
amount of each layer costs in stage s. Whatever several pieces share counts in A at every use;
shared(i, j) is the surplus of that within the run. X is the price of the cuts. `best_cuts`
minimises the largest cost of exactly S stages. Phases:

1. *bound*: without `shared`, the cost separates into a term of i and a term of j, so whether S
   stages below a threshold exist takes one running maximum per stage; bisection. This is the
   optimum if nothing is shared, and an upper bound otherwise.
2. *bottleneck*: if something is shared, an exact dynamic program over runs within that bound.
3. *preference*: a second dynamic program picks, among all cuts that reach the optimum, those with
   the least sum of preferences.

Both programs visit only runs whose own cost stays below the bound, between positions that the
stages before and after can reach below it. The second one needs minima over ranges of positions
only, because the runs that end at one position and are cheap enough form few ranges. If all stages
have the same w, both look at every run once, not once per stage. This module must not know nodes,
bytes or seconds.
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
    """K pieces in a row and what runs of them cost in S stages, in L layers.

    There are K + 1 positions; cuts are at 1 to K - 1.
    """

    upper: NDArray[np.float64]
    """[L, K + 1] prefix sums of the pieces' amounts, shared things counted at every use (A above).
    """
    lower: NDArray[np.float64]
    """[L, K + 1] the same, shared things counted at their first use only."""
    shared: Sequence[Sequence[tuple[int, Sequence[float]]]]
    """[K] for every piece the earlier piece that used a shared thing last, with its L amounts."""
    weights: NDArray[np.float64]
    """[S, L] what an amount costs in each stage (w above), not negative."""
    crossing: NDArray[np.float64]
    """[K + 1] price of cutting at a position, zero at both ends (X above)."""
    preference: Sequence[tuple[int, int]]
    """[K + 1] (major, minor) numbers of which the sum over all cuts should be small."""
    first_start: NDArray[np.int64] | None = None
    """[K + 1, S] earliest start of stage s if it ends at a position; None = no restriction."""

    @property
    def num_pieces(self) -> int:
        """Number of pieces."""
        return self.upper.shape[1] - 1

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.weights)

    @property
    def is_uniform(self) -> bool:
        """Whether a run costs the same in every stage."""
        return bool((self.weights == self.weights[0]).all())


class _Column(NamedTuple):
    """The runs that end at one position, and the stages that may end there."""

    stop: int
    starts: slice
    cost: NDArray[np.float64]
    """[stages, starts] cost of every run; a single row if it is the same in all stages."""
    stages: slice
    """Numbers of stages, of which the last one ends at `stop`."""


def best_cuts(chain: Chain) -> tuple[tuple[int, ...], float] | None:
    """Find the cuts whose most expensive stage is cheapest.

    Returns:
        The positions of the cuts, one less than stages, and the largest cost; None if the chain's
        restriction leaves no way.
    """
    assert 1 <= chain.num_stages <= chain.num_pieces
    if chain.first_start is not None:
        bottleneck = _bottleneck(chain, _most_possible(chain))
    else:
        bottleneck = _separable_bottleneck(chain)
        if any(chain.shared):
            bottleneck = _bottleneck(chain, bottleneck)
    if not np.isfinite(bottleneck):
        return None
    cuts = _preferred_cuts(chain, bottleneck)
    return cuts, _largest_cost(chain, cuts)


def _most_possible(chain: Chain) -> float:
    """No stage can cost more."""
    return float((chain.weights @ chain.upper[:, -1]).max() + 2 * chain.crossing.max())


def _separable_bottleneck(chain: Chain) -> float:
    """Phase 1: smallest threshold (to within the tolerance) if shared things cost every time."""
    prefix = chain.weights @ chain.upper
    ends, starts = prefix + chain.crossing, prefix - chain.crossing

    def is_enough(threshold: float) -> bool:
        is_reached = np.zeros(chain.num_pieces + 1, dtype=bool)
        is_reached[0] = True
        for end, start in zip(ends, starts, strict=True):
            best_start = np.maximum.accumulate(np.where(is_reached, start, -np.inf))
            is_reached[1:] = best_start[:-1] >= end[1:] - threshold
            is_reached[0] = False
        return bool(is_reached[-1])

    low, high = float(prefix[:, -1].min()) / chain.num_stages, _most_possible(chain)
    for _ in range(MAX_BISECTIONS):
        if high - low <= TOLERANCE * high / 4:
            break
        middle = (low + high) / 2
        if is_enough(middle):
            high = middle
        else:
            low = middle
    return high * (1 + TOLERANCE)


def _bottleneck(chain: Chain, limit: float) -> float:
    """Phase 2: the optimum, or infinity if no way stays within the limit."""
    best = np.full((chain.num_stages + 1, chain.num_pieces + 1), np.inf)
    best[0, 0] = 0.0
    for column in _columns(chain, limit):
        before = slice(column.stages.start - 1, column.stages.stop - 1)
        runs = np.maximum(best[before, column.starts], column.cost)
        if chain.first_start is not None:
            first = chain.first_start[column.stop, before]
            runs[np.arange(column.starts.start, column.starts.stop) < first[:, None]] = np.inf
        best[column.stages, column.stop] = runs.min(axis=1)
    return float(best[-1, -1])


def _preferred_cuts(chain: Chain, bottleneck: float) -> tuple[int, ...]:
    """Phase 3: of the ways that stay within the optimum, the one with the least preference."""
    runs = _runs(chain, bottleneck * (1 + TOLERANCE))
    penalty = _packed(chain.preference, chain.num_stages)
    before = np.full(chain.num_pieces + 1, UNREACHABLE, dtype=np.int64)
    before[0] = 0
    layers = [before]
    for stage, own in enumerate(runs):
        values = _range_minima(layers[-1], own.legal_starts(chain, stage), own.stops)
        layer = np.full(chain.num_pieces + 1, UNREACHABLE, dtype=np.int64)
        layer[own.ends] = np.minimum.reduceat(values, own.offsets) + penalty[own.ends]
        layers.append(np.minimum(layer, UNREACHABLE))
    assert layers[-1][-1] < UNREACHABLE, "the optimum must be reachable"
    cuts = [chain.num_pieces]
    for stage in range(chain.num_stages - 1, 0, -1):
        own = runs[stage]
        starts = own.legal_starts(chain, stage)
        candidates = np.concatenate(
            [
                np.arange(starts[place], own.stops[place])
                for place in np.flatnonzero(own.end_of_each == cuts[-1])
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


def _runs(chain: Chain, limit: float) -> list[_Runs]:
    """Per stage, the runs that cost no more than the limit; one object if all are the same."""
    found: list[NDArray[np.int64]] = []
    for column in _columns(chain, limit):
        rows, width = column.cost.shape
        is_within = np.zeros((rows, width + 2), dtype=np.int8)
        is_within[:, 1:-1] = column.cost <= limit
        row, edge = np.nonzero(np.diff(is_within, axis=1))
        starts, stops = edge[0::2], edge[1::2]
        table = np.empty((4, len(starts)), dtype=np.int64)
        table[0] = row[0::2] + column.stages.start - 1
        table[1], table[2] = starts + column.starts.start, stops + column.starts.start
        table[3] = column.stop
        found.append(table)
    stage, starts, stops, ends = np.concatenate(found, axis=1)
    if chain.is_uniform:
        return [_sorted_runs(starts, stops, ends)] * chain.num_stages
    chosen = (np.flatnonzero(stage == own) for own in range(chain.num_stages))
    return [_sorted_runs(starts[own], stops[own], ends[own]) for own in chosen]


def _sorted_runs(
    starts: NDArray[np.int64], stops: NDArray[np.int64], end_of_each: NDArray[np.int64]
) -> _Runs:
    positions, offsets = np.unique(end_of_each, return_index=True)
    return _Runs(starts, stops, end_of_each, positions, offsets)


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
    for weight, (start, stop) in zip(chain.weights, pairwise(edges), strict=True):
        amounts = chain.upper[:, stop] - chain.upper[:, start]
        for piece in range(start, stop):
            for previous, surplus in chain.shared[piece]:
                if previous >= start:
                    amounts = amounts - surplus
        costs.append(float(weight @ amounts + chain.crossing[start] + chain.crossing[stop]))
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


def _columns(chain: Chain, limit: float) -> Iterator[_Column]:
    """Visit every position with the runs ending there that can stay within the limit."""
    within = limit * (1 + TOLERANCE)
    earliest, latest = _stage_ends(chain, within)
    positions = np.arange(chain.num_pieces + 1)
    fewest = np.searchsorted(latest, positions, side="left").tolist()
    most = (np.searchsorted(earliest, positions, side="right") - 1).tolist()
    least = chain.weights.min(axis=0)
    least_upper = (least @ chain.upper).tolist()
    shared = np.zeros_like(chain.upper)
    start = 0
    for stop in range(1, chain.num_pieces + 1):
        for previous, amounts in chain.shared[stop - 1]:
            for layer, amount in enumerate(amounts):
                shared[layer, start : previous + 1] += amount
        while start < stop - 1 and (
            least_upper[stop] - least_upper[start] - least @ shared[:, start] > within
        ):
            start += 1
        stages = slice(max(fewest[stop], 1), most[stop] + 1)
        if stages.start >= stages.stop:
            continue
        starts = slice(
            max(start, earliest[stages.start - 1]), min(stop, latest[stages.stop - 2] + 1)
        )
        if chain.first_start is not None:
            first = int(chain.first_start[stop, stages.start - 1 : stages.stop - 1].min())
            starts = slice(max(starts.start, first), starts.stop)
        if starts.start >= starts.stop:
            continue
        own = slice(0, 1) if chain.is_uniform else slice(stages.start - 1, stages.stop - 1)
        amounts = chain.upper[:, stop, None] - chain.upper[:, starts] - shared[:, starts]
        cost = chain.weights[own] @ amounts + (chain.crossing[starts] + chain.crossing[stop])
        yield _Column(stop, starts, cost, stages)


def _stage_ends(chain: Chain, limit: float) -> tuple[list[int], list[int]]:
    """[S + 1] earliest and latest position at which 0, 1, ... stages may end, by lower bounds."""
    num_stages, num_pieces = chain.num_stages, chain.num_pieces
    lower = chain.weights @ chain.lower
    latest = [0]
    for stage, prefix in enumerate(lower):
        reach = np.searchsorted(prefix, prefix[latest[-1]] + limit, side="right") - 1
        latest.append(min(int(reach), num_pieces - (num_stages - 1 - stage)))
    earliest = [num_pieces]
    for stage, prefix in reversed([*enumerate(lower)]):
        reach = np.searchsorted(prefix, prefix[earliest[-1]] - limit, side="left")
        earliest.append(max(int(reach), stage))
    return earliest[::-1], latest
