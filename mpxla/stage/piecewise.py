"""Programs of several pieces, for backends that cannot run all operators on the device.

That is where PyTorch alone has code for an operator, or where programs do not reach other ranks.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from mpxla.comm.transport import Groups
from mpxla.errors import LoweringError
from mpxla.graph.collectives import is_collective
from mpxla.graph.stepgraph import describe
from mpxla.stage.collective import CollectiveRunner
from mpxla.stage.host import HostRunner, has_kernel
from mpxla.stage.pieces import CollectivePiece, ComputePiece, HostPiece, Piece, PieceList

__all__ = ["PiecewiseExecutable", "in_pieces", "kinds"]


def kinds(
    name: str, is_on_device: Callable[[fx.Node], bool], lacking: str = ""
) -> Callable[[fx.Node], type[Piece]]:
    """What runs each node of a program, for `split_graph`; what the device cannot, the host does.

    It raises LoweringError of what nothing runs, with what is `lacking` on the device.
    """

    def kind_of(node: fx.Node) -> type[Piece]:
        if is_collective(node):
            return CollectivePiece
        if is_on_device(node):
            return ComputePiece
        if not has_kernel(node.target):
            raise LoweringError(
                f"{name}: {describe(node)} can run neither on the device nor on the host: "
                f"{lacking}PyTorch has no kernel of it for the CPU. Write it with other operators, "
                f"or register a kernel."
            )
        return HostPiece

    return kind_of


class PiecewiseExecutable:
    """A program of several pieces; called like any other, see `Executable`.

    Compute pieces are started as ever. Host and collective pieces wait for their arguments, so that
    a call returns only when the last of them has run. Runners are executables, host runners and
    collective runners; for `view` and `put` see the latter.

    Attributes:
        plan: what the pieces take and give.
        on_piece: called after every piece has been started, with its number; does nothing.
    """

    def __init__(
        self,
        name: str,
        plan: PieceList,
        runners: Sequence[Any],
        view: Callable[[Any], torch.Tensor],
        put: Callable[[Sequence[torch.Tensor]], list[Any]],
    ):
        self.name = name
        self.is_random = any(runner.is_random for runner in runners)
        self.plan = plan
        self.on_piece: Callable[[int], object] = lambda number: None
        self._runners = tuple(runners)
        self._last_uses = plan.last_uses()
        self._view, self._put = view, put

    def __call__(self, arguments: Sequence[Any], seed: Any = None) -> list[Any]:
        """Runs the pieces; returns results that may still be computed."""
        missing = self.plan.num_values - self.plan.num_arguments
        values: list[Any] = [*arguments, *[None] * missing]
        seeds = _seeds(seed, self._view)
        steps = zip(self.plan.pieces, self._runners, self._last_uses, strict=True)
        for index, (piece, runner, done) in enumerate(steps):
            taken = [values[number] for number in piece.inputs]
            given = runner(taken, self._seed_of(runner, seeds) if runner.is_random else None)
            for number, value in zip(piece.outputs, given, strict=True):
                values[number] = value
            self.on_piece(index)
            for number in done:
                values[number] = None
        return [values[number] for number in self.plan.results]

    def _seed_of(self, runner: Any, seeds: Iterator[int]) -> Any:
        number = next(seeds)
        if isinstance(runner, HostRunner):
            return number
        return self._put([torch.tensor(number, dtype=torch.int64)])[0]


def in_pieces(
    name: str,
    plan: PieceList,
    compile_piece: Callable[[str, int, Piece], Any],
    groups: Groups,
    view: Callable[[Any], torch.Tensor],
    put: Callable[[Sequence[torch.Tensor]], list[Any]],
    put_own: Callable[[Sequence[torch.Tensor]], list[Any]] | None = None,
) -> PiecewiseExecutable:
    """A program whose pieces all have what runs them.

    Args:
        name: for messages.
        plan: the pieces.
        compile_piece: title, number of a compute piece and the piece -> its executable.
        groups: those that collectives name.
        view: see `HostRunner`.
        put: likewise.
        put_own: the same of tensors that nobody else has; None: `put`.
    """
    runners: list[Any] = []
    for number, piece in enumerate(plan.pieces):
        title = f"{name}, piece {number + 1} of {len(plan.pieces)}"
        if isinstance(piece, CollectivePiece):
            runners.append(CollectiveRunner(title, piece, groups, view, put_own or put))
        elif isinstance(piece, HostPiece):
            runners.append(HostRunner(title, piece, view, put))
        else:
            runners.append(compile_piece(title, number, piece))
    return PiecewiseExecutable(name, plan, runners, view, put)


def _seeds(first: Any, view: Callable[[Any], torch.Tensor]) -> Iterator[int]:
    """Seeds of the random pieces of one call: two with one seed would draw the same numbers."""
    assert first is not None, "random programs are called with a seed"
    for number in itertools.count(int(view(first)), 0x9E3779B97F4A7C15):
        yield number & 0x7FFFFFFFFFFFFFFF
