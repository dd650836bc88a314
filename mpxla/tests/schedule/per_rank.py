"""What tests ask of single ranks of a timeline."""

from itertools import accumulate

from mpxla.schedule.action import Op

__all__ = ["rank_bubbles", "rank_peaks"]


def rank_bubbles(timeline):
    """Per rank, the share of the makespan in which it runs no program."""
    busy = [
        sum(s.end - s.start for s in spans if s.action.op.is_compute) for spans in timeline.spans
    ]
    return tuple(1.0 - time / timeline.makespan for time in busy)


def rank_peaks(timeline):
    """Per rank, the most microbatches in flight at a time, summed over its stages, in training."""
    changes = {Op.FORWARD: 1, Op.BACKWARD: -1, Op.WEIGHT_GRADIENT: -1}
    counts = (accumulate(changes.get(a.op, 0) for a in actions) for actions in timeline.schedule)
    return tuple(max(numbers, default=0) for numbers in counts)
