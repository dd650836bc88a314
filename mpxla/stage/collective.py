"""Collectives of a stage program that run between executables, over the session's transport.

For backends whose programs do not reach the other ranks' devices. A piece starts all its
collectives and then waits for them; the wait blocks the dispatching thread, as that of a host piece
does. Reduced and gathered values are those that the operators in a program would give. What one
piece gathers of parameters travels as one message, and so does what it scatters of gradients.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx

from mpxla.comm.handle import Handle
from mpxla.comm.transport import Groups, Members
from mpxla.errors import LoweringError, PeerFailure
from mpxla.graph.stepgraph import describe
from mpxla.graph.typed import arguments_of, input_of
from mpxla.stage.pieces import DEPARTURE, TURN, CollectivePiece

__all__ = ["CollectiveRunner"]

_c10d = torch.ops._c10d_functional
_Started = Callable[[], torch.Tensor]


class CollectiveRunner:
    """A collective piece, ready to run; see `HostRunner`. Every member of its groups has to run it.

    Collectives of a group meet in the order in which each member starts them. That order is the
    same on all members: they lower equal graphs, whose pieces are cut in one way, and run equal
    lists of actions.

    Raises:
        LoweringError: a group that is not in `groups`, or a collective that no transport has.
    """

    is_random = False

    def __init__(
        self,
        title: str,
        piece: CollectivePiece,
        groups: Groups,
        view: Callable[[Any], torch.Tensor],
        put: Callable[[Sequence[torch.Tensor]], list[Any]],
    ):
        self._title = title
        self._piece = piece
        self._groups = groups
        self._view = view
        self._put = put
        for node in piece.module.graph.nodes:
            if node.op == "call_function" and node.target is not _c10d.wait_tensor.default:
                self._check(node)
        self._packs = _packs_of(piece.module.graph)

    def __call__(self, arguments: Sequence[Any], seed: int | None = None) -> list[Any]:
        """Waits for the arguments and for the other members; gives results on the device."""
        given = iter(arguments)
        values: dict[fx.Node, Any] = {}
        for node in self._piece.module.graph.nodes:
            if node.op == "placeholder":
                value = functools.partial(self._view, next(given))
                # What nothing reads is there to be waited for; the rest is once it is needed, so
                # that others are under way by then.
                values[node] = value if node.users else value()
        for pack in self._packs:
            values.update(self._start_pack(pack, values))
        results: list[torch.Tensor] = []
        for node in self._piece.module.graph.nodes:
            if node in values:
                continue
            if node.op == "output":
                results = [_finished(values, n) for n in arguments_of(node)[0]]
            elif node.target is _c10d.wait_tensor.default:
                values[node] = values[input_of(node)]
            else:
                args = pytree.tree_map_only(fx.Node, lambda n: _finished(values, n), node.args)
                values[node] = self._start(node, args)
        return self._put(results)

    def _members(self, node: fx.Node) -> Members:
        return self._groups[str(node.args[-1])]

    def _check(self, node: fx.Node) -> None:
        if node.target not in _STARTS:
            raise LoweringError(
                f"{self._title}: {describe(node)} is a collective that cannot run between "
                f"programs. Write it with all_reduce, all_gather_into_tensor, "
                f"reduce_scatter_tensor or all_to_all_single."
            )
        if node.args[-1] not in self._groups:
            raise LoweringError(
                f"{self._title}: {describe(node)} is over the group {node.args[-1]!r}, which this "
                f"program was compiled without (it knows {sorted(self._groups) or 'none'})."
            )

    def _start(self, node: fx.Node, args: Sequence[Any]) -> _Started:
        """Starts one collective; called, what it returns waits for the result."""
        finish = _STARTS[node.target](self._members(node), *args[:-1])
        return self._noting(node, finish)

    def _start_pack(
        self, pack: Sequence[fx.Node], values: dict[fx.Node, Any]
    ) -> dict[fx.Node, _Started]:
        """Starts several gathers, or several scatters, of flat values as one."""
        (ranks, transport), size = self._members(pack[0]), arguments_of(pack[0])[-2]
        given = [_finished(values, input_of(node)) for node in pack]
        if pack[0].target is _c10d.all_gather_into_tensor.default:
            lengths = [value.shape[0] for value in given]
            handle = transport.all_gather(_together(given, 0), ranks)  # [ranks, elements of all]
        else:
            lengths = [value.shape[0] // size for value in given]
            rows = [value.view(size, -1) for value in given]
            handle = transport.reduce_scatter(_together(rows, 1), ranks)  # [elements of all]
        found: dict[fx.Node, _Started] = {}
        start = 0
        for node, length in zip(pack, lengths, strict=True):
            part = functools.partial(_part_of, handle, start, length)
            found[node] = self._noting(node, part)
            start += length
        return found

    def _noting(self, node: fx.Node, finish: _Started) -> _Started:
        """Errors of a wait say what was waited for."""

        def wait() -> torch.Tensor:
            try:
                return finish()
            except PeerFailure as error:
                error.add_note(f"mpxla: in {self._title}, {describe(node)}.")
                raise

        return wait


def _packs_of(graph: fx.Graph) -> list[list[fx.Node]]:
    """Gathers of parameters and scatters of gradients that may travel together.

    Gathers come first: a scatter waits for what it takes, and they are under way meanwhile.
    """
    packs: dict[tuple[bool, Any, torch.dtype], list[fx.Node]] = {}
    for node in graph.nodes:
        kinds = [key for key in (TURN, DEPARTURE) if key in node.meta]
        if kinds and input_of(node).op == "placeholder":
            key = kinds[0] == DEPARTURE, node.args[-1], input_of(node).meta["val"].dtype
            packs.setdefault(key, []).append(node)
    return [packs[key] for key in sorted(packs, key=str)]


def _together(values: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    return torch.cat(list(values), dim) if len(values) > 1 else values[0].contiguous()


def _part_of(handle: Handle[torch.Tensor], start: int, length: int) -> torch.Tensor:
    """Flat elements of one of several values that were gathered or scattered together."""
    return handle.result()[..., start : start + length].flatten()


def _finished(values: dict[fx.Node, Any], node: fx.Node) -> torch.Tensor:
    """The value of a node, once it is there; it is waited for once."""
    if not isinstance(values[node], torch.Tensor):
        values[node] = values[node]()
    return values[node]


def _all_reduce(members: Members, value: torch.Tensor, operation: str) -> _Started:
    ranks, transport = members
    if operation in ("sum", "avg"):
        handle: Handle[torch.Tensor] = transport.all_reduce(value, ranks)
        count = len(ranks) if operation == "avg" else 1
        return lambda: handle.result() / count if count > 1 else handle.result()
    if operation not in ("max", "min"):
        raise LoweringError(f"all_reduce by {operation!r} is not among sum, avg, max and min.")
    gathered = transport.all_gather(value, ranks)
    reduce = torch.amax if operation == "max" else torch.amin
    return lambda: reduce(gathered.result(), 0)


def _all_gather(members: Members, value: torch.Tensor, size: int) -> _Started:
    handle = members.transport.all_gather(value, members.ranks)
    return lambda: handle.result().flatten(0, 1)


def _reduce_scatter(members: Members, value: torch.Tensor, operation: str, size: int) -> _Started:
    parts = value.unflatten(0, (size, value.shape[0] // size))
    if operation not in ("sum", "avg"):
        raise LoweringError(f"reduce_scatter_tensor by {operation!r} is not among sum and avg.")
    handle = members.transport.reduce_scatter(parts.contiguous(), members.ranks)
    return lambda: handle.result() / size if operation == "avg" else handle.result()


def _all_to_all(
    members: Members, value: torch.Tensor, out_sizes: Sequence[int], in_sizes: Sequence[int]
) -> _Started:
    """Equal parts, as everything here has fixed shapes: an all-gather of which the own is kept."""
    ranks, transport = members
    index = ranks.index(transport.rank)
    if len({*out_sizes, *in_sizes}) > 1:
        raise LoweringError("all_to_all_single with parts of different sizes: make them equal.")
    handle = transport.all_gather(value, ranks)
    start, length = sum(in_sizes[:index]), in_sizes[index]
    return lambda: handle.result().narrow(1, start, length).flatten(0, 1)


_STARTS: Mapping[Any, Callable[..., _Started]] = {
    _c10d.all_reduce.default: _all_reduce,
    _c10d.all_gather_into_tensor.default: _all_gather,
    _c10d.reduce_scatter_tensor.default: _reduce_scatter,
    _c10d.all_to_all_single.default: _all_to_all,
}
