"""The optimal cuts of a sequence of pieces: arithmetic only.

Stage s is a run of pieces i to j (j not included) and costs

    cost(s, i, j) = w[s] . (A[j] - A[i] - shared(i, j)) + X[i] + X[j]

where A holds prefix sums of several *layers* (amounts of different kinds) and w[s] says what an
amount of each layer costs in stage s. Whatever several pieces share counts in A at every use;
shared(i, j) is the surplus of that within the run. X is the price of the cuts. `best_cuts`
minimises the largest cost of exactly S stages. Phases:

1. *bound*: what stages of nearly equal amounts cost.
2. *bottleneck*: the optimum, by an exact dynamic program over runs within that bound.
3. *preference*: a second dynamic program picks, among all cuts that reach the optimum, those with
   the least sum of preferences.

Both programs visit only runs whose own cost stays below the bound. This module must not know nodes,
bytes or seconds.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

__all__ = ["Chain", "best_cuts"]

TOLERANCE = 1e-9
"""Relative difference below which two costs are equal."""
UNREACHABLE = np.iinfo(np.int64).max // 4


@dataclass(frozen=True)
class Chain:
    """K pieces in a row and what runs of them cost in S stages, in L layers.

    There are K + 1 positions; cuts are at 1 to K - 1.
    """

    upper: NDArray[np.float64]
    """[L, K + 1] prefix sums of the pieces' amounts, shared things counted at every use (A above).
    """
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


def best_cuts(chain: Chain) -> tuple[tuple[int, ...], float] | None:
    """Find the cuts whose most expensive stage is cheapest.

    Returns:
        The positions of the cuts, one less than stages, and the largest cost; None if the chain's
        restriction leaves no way.
    """
    assert 1 <= chain.num_stages <= chain.num_pieces
    bottleneck = _bottleneck(chain, _bound(chain))
    if not np.isfinite(bottleneck):
        return None
    cuts = _preferred_cuts(chain, bottleneck)
    return cuts, _largest_cost(chain, cuts)


def _bound(chain: Chain) -> float:
    """Phase 1: what the optimum does not exceed."""
    num_pieces, steps = chain.num_pieces, np.arange(1, chain.num_stages)
    if chain.first_start is not None:  # even cuts may not be allowed
        return float((chain.weights @ chain.upper[:, -1]).max() + 2 * chain.crossing.max())
    amounts = chain.weights.mean(axis=0) @ chain.upper
    even = np.searchsorted(amounts, amounts[-1] * steps / chain.num_stages)
    ordered = np.maximum.accumulate(np.maximum(even - steps, 0)) + steps  # no stage is empty
    return _largest_cost(chain, np.minimum(ordered, num_pieces - steps[::-1]).tolist())


def _bottleneck(chain: Chain, limit: float) -> float:
    """Phase 2: the optimum, or infinity if no way stays within the limit."""
    best = np.full((chain.num_stages + 1, chain.num_pieces + 1), np.inf)
    best[0, 0] = 0.0
    for stages, start, stop, cost in _runs(chain, limit * (1 + TOLERANCE)):
        best[1:][stages, stop] = np.maximum(best[stages, start:stop], cost).min(axis=1)
    return float(best[-1, -1])


def _preferred_cuts(chain: Chain, bottleneck: float) -> tuple[int, ...]:
    """Phase 3: of the ways that stay within the optimum, the one with the least preference."""
    limit = bottleneck * (1 + TOLERANCE)
    penalty = _packed(chain.preference, chain.num_stages)
    least = np.full((chain.num_stages + 1, chain.num_pieces + 1), UNREACHABLE)
    least[0, 0] = 0
    start_of = np.zeros_like(least)
    for stages, start, stop, cost in _runs(chain, limit):
        ways = np.where(cost <= limit, least[stages, start:stop], UNREACHABLE)
        start_of[1:][stages, stop] = start + ways.argmin(axis=1)
        least[1:][stages, stop] = np.minimum(ways.min(axis=1) + penalty[stop], UNREACHABLE)
    assert least[-1, -1] < UNREACHABLE, "the optimum must be reachable"
    cuts = [chain.num_pieces]
    for starts in start_of[:1:-1]:
        cuts.append(int(starts[cuts[-1]]))
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


def _runs(chain: Chain, limit: float) -> Iterator[tuple[slice, int, int, NDArray[np.float64]]]:
    """Visits every position with the runs that end there and may stay within the limit.

    Yields:
        The stages that may end there, the first start of such runs, their end, and
        [stages, starts] what they cost in each stage, where those that are not allowed cost
        infinitely much; [1, starts] if all stages are alike.
    """
    is_uniform = bool((chain.weights == chain.weights[0]).all())
    least = chain.weights.min(axis=0)
    least_upper = (least @ chain.upper).tolist()
    shared = np.zeros_like(chain.upper)
    cheapest = 0
    for stop in range(1, chain.num_pieces + 1):
        for previous, amounts in chain.shared[stop - 1]:
            for layer, amount in enumerate(amounts):
                shared[layer, cheapest : previous + 1] += amount
        while cheapest < stop - 1 and (
            least_upper[stop] - least_upper[cheapest] - least @ shared[:, cheapest] > limit
        ):
            cheapest += 1
        start, stages = cheapest, slice(0, chain.num_stages)
        if chain.first_start is not None:
            allowed = np.flatnonzero(chain.first_start[stop] < stop)
            if not len(allowed):
                continue
            stages = slice(int(allowed[0]), int(allowed[-1]) + 1)
            start = max(start, int(chain.first_start[stop, stages].min()))
        amounts = chain.upper[:, stop, None] - chain.upper[:, start:stop] - shared[:, start:stop]
        weights = chain.weights[:1] if is_uniform else chain.weights[stages]
        cost = weights @ amounts + (chain.crossing[start:stop] + chain.crossing[stop])
        if chain.first_start is not None:
            is_early = np.arange(start, stop) < chain.first_start[stop, stages][:, None]
            cost = np.where(is_early, np.inf, cost)
        yield stages, start, stop, cost
