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
stages before and after can reach below it. This module must not know nodes, bytes or seconds.
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
    """[stages, starts] cost of every run, infinite for one that is not allowed; a single row if it
    is the same in all stages."""
    stages: slice
    """Numbers of stages, of which the last one ends at `stop`."""

    @property
    def before(self) -> slice:
        """Numbers of stages that may end where a run starts; also indices of the runs' stages."""
        return slice(self.stages.start - 1, self.stages.stop - 1)


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
        runs = np.maximum(best[column.before, column.starts], column.cost)
        best[column.stages, column.stop] = runs.min(axis=1)
    return float(best[-1, -1])


def _preferred_cuts(chain: Chain, bottleneck: float) -> tuple[int, ...]:
    """Phase 3: of the ways that stay within the optimum, the one with the least preference."""
    limit = bottleneck * (1 + TOLERANCE)
    penalty = _packed(chain.preference, chain.num_stages)
    least = np.full((chain.num_stages + 1, chain.num_pieces + 1), UNREACHABLE, dtype=np.int64)
    least[0, 0] = 0
    starts = np.zeros_like(least)
    for column in _columns(chain, limit):
        sums = np.where(column.cost <= limit, least[column.before, column.starts], UNREACHABLE)
        chosen = sums.argmin(axis=1)
        own = np.minimum(sums[np.arange(len(sums)), chosen] + penalty[column.stop], UNREACHABLE)
        least[column.stages, column.stop] = own
        starts[column.stages, column.stop] = column.starts.start + chosen
    assert least[-1, -1] < UNREACHABLE, "the optimum must be reachable"
    cuts = [chain.num_pieces]
    for stage in range(chain.num_stages, 1, -1):
        cuts.append(int(starts[stage, cuts[-1]]))
    return tuple(reversed(cuts[1:]))


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
        if chain.first_start is not None:
            first = chain.first_start[stop, stages.start - 1 : stages.stop - 1, None]
            cost = np.where(positions[starts] < first, np.inf, cost)
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
