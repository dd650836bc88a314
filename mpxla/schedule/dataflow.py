"""What every forward and backward reads, and what of it crosses ranks: the meaning of the edges.

One statement of the rules that the passes rely on and the simulator enforces, per microbatch:

    F of stage s   reads the F of every u with (u, s) in forward_edges
    B of stage s   reads its own F, and the B of every t with (t, s) in backward_edges

Where a stage splits its backwards, I stands for B in both lines, and W reads the I of its stage.

A value read on another rank than its own travels as one transfer per edge and microbatch. Edges may
skip stages, and a forward edge may have no gradient. This module must not know orders or times.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mpxla.errors import ScheduleError
from mpxla.schedule.action import Action, Op

__all__ = ["Dataflow", "Edge", "Kind"]

Edge = tuple[int, int]


class Kind(NamedTuple):
    """An action of no particular microbatch."""

    stage: int
    op: Op
    peer: int | None = None


@dataclass(frozen=True)
class Dataflow:
    """Edges between stages that have a place.

    Attributes:
        placement: pipeline rank of every stage.
        forward_edges: (source, destination) of values, source < destination.
        backward_edges: (source, destination) of gradients; reversed forward edges.
        training: whether there are backwards; without them gradients do not travel.
        split: stages whose backwards are split.
    """

    placement: tuple[int, ...]
    forward_edges: frozenset[Edge]
    backward_edges: frozenset[Edge]
    training: bool
    split: frozenset[int] = frozenset()

    @classmethod
    def of(
        cls,
        placement: Sequence[int],
        forward_edges: Iterable[Edge],
        backward_edges: Iterable[Edge],
        training: bool,
        split: Iterable[int] = (),
    ) -> "Dataflow":
        """Checks edges against each other and against the placement.

        Raises:
            ScheduleError: an edge names no stage, points the wrong way, or is a gradient of a value
                that does not travel; the text lists all such edges.
        """
        stages = range(len(placement))
        forward, backward = frozenset(forward_edges), frozenset(backward_edges)
        problems: list[str] = []
        for kind, edges in (("forward", forward), ("backward", backward)):
            for source, target in sorted(edges):
                if source not in stages or target not in stages:
                    problems.append(
                        f"{kind} edge {source} -> {target} names a stage outside "
                        f"0..{len(placement) - 1}"
                    )
                elif kind == "forward" and source >= target:
                    problems.append(f"forward edge {source} -> {target} does not go to a later one")
                elif kind == "backward" and (target, source) not in forward:
                    problems.append(
                        f"backward edge {source} -> {target} has no forward edge "
                        f"{target} -> {source}"
                    )
        if problems:
            raise ScheduleError(
                f"Edges between stages do not fit {len(placement)} stages: {'; '.join(problems)}. "
                "Values travel to later stages, and their gradients back along the same edges."
            )
        return cls(tuple(placement), forward, backward, training, frozenset(split))

    @classmethod
    def of_schedule(
        cls,
        schedule: Sequence[Sequence[Action]],
        placement: Sequence[int],
        forward_edges: Iterable[Edge],
        backward_edges: Iterable[Edge],
    ) -> "Dataflow":
        """The same, as a schedule's actions tell whether it trains and which stages split.

        Raises:
            ScheduleError: as for `of`.
        """
        ops = {(action.stage, action.op) for actions in schedule for action in actions}
        split = [stage for stage, op in ops if op is Op.INPUT_GRADIENT]
        training = any(op.begins_backward for _, op in ops)
        return cls.of(placement, forward_edges, backward_edges, training, split)

    def gradient_op(self, stage: int) -> Op:
        """What gives the gradients of a stage's inputs."""
        return Op.INPUT_GRADIENT if stage in self.split else Op.BACKWARD

    def last_op(self, stage: int) -> Op:
        """What ends the backward of a stage."""
        return Op.WEIGHT_GRADIENT if stage in self.split else Op.BACKWARD

    def producer(self, send: Op, stage: int) -> Op:
        """What computes the values that a stage sends, or the reader needs what arrives."""
        return Op.FORWARD if send is Op.SEND_FORWARD else self.gradient_op(stage)

    def reads(self, op: Op, stage: int) -> list[Kind]:
        """Forwards and backwards, on any rank, whose results a forward or backward reads."""
        if op is Op.FORWARD:
            return [Kind(u, op) for u, target in sorted(self.forward_edges) if target == stage]
        if op is Op.WEIGHT_GRADIENT:
            return [Kind(stage, Op.INPUT_GRADIENT)]
        sources = [t for t, target in sorted(self.backward_edges) if target == stage]
        gradients = [Kind(t, self.gradient_op(t)) for t in sources]
        return [Kind(stage, Op.FORWARD), *gradients]

    def computes(self) -> list[Kind]:
        """Forwards and backwards of one microbatch."""
        found: list[Kind] = []
        for stage in range(len(self.placement)):
            found.append(Kind(stage, Op.FORWARD))
            if self.training:
                ops = dict.fromkeys((self.gradient_op(stage), self.last_op(stage)))
                found += [Kind(stage, op) for op in ops]
        return found

    def sends(self) -> list[tuple[int, Op, int]]:
        """(stage, what it sends, peer) for each microbatch: the edges that cross ranks."""
        backward = self.backward_edges if self.training else frozenset[Edge]()
        edges = [(Op.SEND_FORWARD, edge) for edge in sorted(self.forward_edges)]
        edges += [(Op.SEND_BACKWARD, edge) for edge in sorted(backward)]
        return [
            (source, op, target)
            for op, (source, target) in edges
            if self.placement[source] != self.placement[target]
        ]
