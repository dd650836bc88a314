"""A backend that runs programs operator by operator on the host, for debugging: `MPXLA_EAGER=1`.

Nothing is compiled. The captured, partitioned and differentiated graphs are the same as on every
other backend, and so are schedules and messages; only PyTorch's own kernels compute, one after the
other. So an operator that fails is named with its module and the user's line, and the first one
that turns ordinary numbers into NaN is named in a warning. Slow, and good for small inputs.
"""

from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx

from mpxla.comm.transport import Groups
from mpxla.device.alone import Alone
from mpxla.device.backend import Lowering
from mpxla.device.views import TensorBuffers
from mpxla.errors import ConfigError, MpxlaError
from mpxla.graph.collectives import is_collective
from mpxla.graph.stepgraph import describe, is_random
from mpxla.log import warn_once
from mpxla.stage.host import as_traced
from mpxla.stage.pieces import Piece, annotate, split_graph
from mpxla.stage.piecewise import PiecewiseExecutable, in_pieces, kinds
from mpxla.stage.replacements import SHARED
from mpxla.stage.spec import TensorSpec

__all__ = ["EagerBackend", "EagerExecutable"]

_aten = torch.ops.aten
_WANT_CONTIGUOUS = (
    _aten.native_group_norm.default,
    _aten.native_group_norm_backward.default,
    _aten.nll_loss2d_backward.default,
)
"""Operators whose kernels on the host take no other layout."""


class EagerExecutable:
    """A functional graph of tensors to a list of tensors that is interpreted; see `Executable`."""

    def __init__(self, name: str, module: fx.GraphModule):
        self.name = name
        self.is_random = any(is_random(node) for node in module.graph.nodes)
        self._module = module

    def __call__(
        self, arguments: Sequence[torch.Tensor], seed: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        """Runs the program; its results share no memory with its arguments, nor with each other.

        Raises:
            MpxlaError: an operator fails; names it, its module and the user's line.
        """
        given = [a.detach() for a in arguments]
        with as_traced(int(seed) if self.is_random and seed is not None else None):
            results = _Operators(self.name, self._module).run(*given)
        return _apart(results, given)


class _Operators(fx.Interpreter):
    """Runs a graph, and says where something goes wrong."""

    def __init__(self, name: str, module: fx.GraphModule):
        super().__init__(module)
        self.extra_traceback = False  # errors name the node
        self._name = name
        self.current: fx.Node = next(iter(module.graph.nodes))

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Values that come from other stages are contiguous, which traced ones may not have been.
        if target in (_aten.view.default, _aten._unsafe_view.default):
            target = _aten.reshape.default
        elif target is _aten.as_strided.default:
            args = (_laid_out(args[0], self.current.args[0]), *args[1:])
        elif target in _WANT_CONTIGUOUS:
            args = tuple(a.contiguous() if isinstance(a, torch.Tensor) else a for a in args)
        return super().call_function(target, args, kwargs)

    def run_node(self, n: fx.Node) -> Any:
        self.current = n
        try:
            result = super().run_node(n)
        except MpxlaError:
            raise
        except Exception as error:  # operators raise anything
            raise MpxlaError(f"{self._name}: {describe(n)} failed: {error}") from error
        if n.op == "call_function" and _has_nan(result):
            inputs = [self.env[node] for node in n.all_input_nodes]
            if not any(map(_has_nan, inputs)):
                where = f"{self._name}: {describe(n)}"
                warn_once(where, f"{where} is the first to give NaN: its inputs have none.")
        return result


def _laid_out(value: torch.Tensor, node: Any) -> torch.Tensor:
    """A value with the strides that it had when the graph was traced, for who reads memory."""
    strides = node.meta["val"].stride()
    if value.stride() == strides and value.storage_offset() == 0:
        return value
    return torch.empty_strided(value.shape, strides, dtype=value.dtype).copy_(value)


def _has_nan(value: Any) -> bool:
    tensors = [t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]
    return any(bool(t.isnan().any()) for t in tensors if t.is_floating_point() or t.is_complex())


def _apart(results: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Results with memory of their own: the user may change one in place (gradients are)."""
    taken = {t.untyped_storage().data_ptr() for t in given}
    found: list[torch.Tensor] = []
    for result in results:
        place = result.untyped_storage().data_ptr()
        found.append(result.clone() if place in taken else result)
        taken.add(place)
    return found


class EagerBackend(TensorBuffers, Alone):
    """See `Backend`. Buffers are ordinary tensors on the host, always computed already."""

    name = "eager"
    device = torch.device("cpu")
    is_host = True
    has_doubles = True
    donates = False

    def __init__(self) -> None:
        self.num_compilations = 0
        self.lowering = Lowering(self.device, replacements=SHARED)

    def compile(
        self,
        name: str,
        graph: fx.GraphModule,
        inputs: Sequence[TensorSpec],
        donated: Collection[int] = (),
        groups: Groups | None = None,
    ) -> EagerExecutable | PiecewiseExecutable:
        """Keeps the graph, to be interpreted, with collectives between pieces; donates nothing."""
        self.num_compilations += 1
        if not any(map(is_collective, graph.graph.nodes)):
            return EagerExecutable(name, graph)
        annotate(graph, inputs)
        plan = split_graph(graph, kinds(name, lambda node: True))

        def compile_piece(title: str, number: int, piece: Piece) -> EagerExecutable:
            return EagerExecutable(name, piece.module)

        return in_pieces(name, plan, compile_piece, groups or {}, self.view, self.put)

    def put(self, tensors: Sequence[torch.Tensor], owned: bool = False) -> list[torch.Tensor]:
        """Copies where the caller may change what it gave."""
        return [tensor.detach().to(self.device, copy=not owned) for tensor in tensors]

    def get(self, buffers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies."""
        return [buffer.detach().cpu().clone() for buffer in buffers]

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """The tensor itself, for reading."""
        return buffer.detach().cpu()

    def is_ready(self, buffer: torch.Tensor) -> bool:
        """Programs are done when they return."""
        return True

    def zeros(self, specs: Sequence[TensorSpec]) -> list[torch.Tensor]:
        """New tensors."""
        return [torch.zeros(spec.shape, dtype=spec.dtype) for spec in specs]

    def adopt(
        self, tensors: Sequence[torch.Tensor], held: Sequence[torch.Tensor | None] = ()
    ) -> list[torch.Tensor]:
        """The tensors themselves."""
        return list(tensors)

    def is_on_device(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies on the host."""
        return tensor.device == self.device

    def open_runner(self, host: Any, address: str) -> Any:
        """There are no programs between processes.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            'transport: "xla" runs collectives inside programs, and with MPXLA_EAGER=1 (or '
            'MPXLA_DEVICE=eager) nothing is compiled. Set transport: "host".'
        )
