"""Compilation of graphs to executables of the XLA device, called by handle.

A graph is traced to XLA once, on real tensors of the device; afterwards a call looks the executable
up by its hash and hands over the argument buffers: no operator is traced again. A graph with
operators that the device has no code for becomes several executables, with those operators on the
host between them (`stage/pieces.py`, `stage/piecewise.py`, `stage/host.py`).

`Traced -> Lowered -> Compiled` here is: an fx graph module, its HLO, and the `Executable`.

XLA's CPU client runs programs that do not depend on each other at the same time, on the one core of
a rank: the value that another rank waits for would be ready only when all of them are. There every
program takes a *ticket*, a scalar that the program before it returns, so that programs run in the
order of their calls, as they do on an accelerator.
"""

import functools
import hashlib
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.utils._pytree as pytree
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as metrics
from torch import fx

from mpxla.comm.transport import Groups
from mpxla.device.fused import FusedExecutable, fuse
from mpxla.device.torch_xla.collectives.programs import COLLECTIVES
from mpxla.device.torch_xla.tensors import host_view, is_host_device, to_device
from mpxla.device.torch_xla.trial import fallbacks, learn, needs_host
from mpxla.errors import LoweringError
from mpxla.graph.casts import without_autocast
from mpxla.graph.collectives import is_collective
from mpxla.graph.stepgraph import place
from mpxla.stage.pieces import Piece, annotate, split_graph
from mpxla.stage.piecewise import PiecewiseExecutable, in_pieces, kinds
from mpxla.stage.spec import TensorSpec

__all__ = ["Executable", "compile_graph", "num_compilations"]

_xla: Any = torch_xla._XLAC  # pyright: ignore[reportPrivateUsage]
_TICKET = TensorSpec((), torch.int32)


class Executable:
    """A compiled program with fixed shapes.

    Calling it with tensors of the device returns tensors of the device; execution is asynchronous.

    Attributes:
        name: for messages, for instance "stage 1 forward".
        is_random: whether it draws random numbers, from the seed given with each call (an int64
            scalar on the device).
    """

    # The ticket that the next program takes; None before the first one and after a failure.
    next_ticket: ClassVar[torch.Tensor | None] = None

    def __init__(
        self,
        name: str,
        graph_hash: bytes,
        sources: Sequence[int | torch.Tensor | None],
        results: Sequence[int | tuple[int]],
        is_ordered: bool = False,
    ):
        self.name = name
        self._is_ordered = is_ordered
        self.is_random = any(source is None for source in sources)
        self._hash = graph_hash
        self._sources = tuple(sources)
        self._results = tuple(results)

    def __call__(
        self, arguments: Sequence[torch.Tensor], seed: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        """Starts the program; returns its results at once, as tensors still being computed."""
        if not self._hash:
            computed: list[torch.Tensor] = []
        elif self._is_ordered:
            computed = self._run_in_order(arguments, seed)
        else:
            computed = _xla._run_cached_graph(self._hash, self._buffers(arguments, seed))
        return [computed[r] if isinstance(r, int) else arguments[r[0]] for r in self._results]

    def _buffers(
        self, arguments: Sequence[torch.Tensor], seed: torch.Tensor | None
    ) -> list[torch.Tensor | None]:
        return [
            arguments[s] if isinstance(s, int) else (seed if s is None else s)
            for s in self._sources
        ]

    def _run_in_order(
        self, arguments: Sequence[torch.Tensor], seed: torch.Tensor | None
    ) -> list[torch.Tensor]:
        """Takes a ticket and leaves one."""
        ticket = Executable.next_ticket
        if ticket is None:
            ticket = _new_ticket()
        try:
            computed = self._run(arguments, seed, ticket)
        except RuntimeError:
            # A program that failed on its way has left a ticket that never becomes ready.
            computed = self._run(arguments, seed, _new_ticket())
        Executable.next_ticket = computed.pop()
        return computed

    def _run(
        self, arguments: Sequence[torch.Tensor], seed: torch.Tensor | None, ticket: torch.Tensor
    ) -> list[torch.Tensor]:
        Executable.next_ticket = None
        return _xla._run_cached_graph(self._hash, self._buffers([*arguments, ticket], seed))


def _new_ticket() -> torch.Tensor:
    (ticket,) = to_device([torch.zeros((), dtype=_TICKET.dtype)], torch_xla.device())
    return ticket


class _Ticketed(torch.nn.Module):
    """A graph with a ticket as its last argument and its last result; the salt changes its hash."""

    def __init__(self, module: torch.nn.Module, salt: int):
        super().__init__()
        self.module = module
        self._step = 1 + salt

    def forward(self, *arguments: torch.Tensor) -> list[torch.Tensor]:
        *rest, ticket = arguments
        return [*self.module(*rest), ticket + self._step]


_digests: dict[bytes, bytes] = {}
"""Hash of a graph -> digest of its program; of the process, as torch_xla's own cache is."""


def _is_another(graph_hash: bytes, text: str) -> bool:
    """Whether another program has this hash already, which torch_xla 2.9 would run instead.

    Its hash does not say which of several equal arguments stands where: those of `(a - b) + a` and
    `(a - b) + b` are equal.
    """
    digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
    return _digests.setdefault(graph_hash, digest) != digest


def num_compilations() -> int:
    """Programs that XLA has compiled in this process so far."""
    data = metrics.metric_data("CompileTime")
    return data[0] if data else 0


def _recover() -> None:
    """Forgets what a failed trace or compilation has left behind, so that others can follow.

    torch_xla keeps what was traced and not run, and would compile it with the next program. What
    else was pending has been started before the trace.
    """
    _xla._clear_pending_irs(str(torch_xla.device()))


def compile_graph(
    name: str,
    module: fx.GraphModule,
    inputs: Sequence[TensorSpec],
    device: torch.device,
    groups: Groups | None = None,
) -> Executable | PiecewiseExecutable | FusedExecutable:
    """Compiles a graph module for the device; it returns a list of tensors.

    Operators that the device has no code for run on the host, and collectives over the transport.

    Raises:
        LoweringError: an operator can run neither on the device nor on the host.
    """
    try:
        if not any(needs_host(n) or is_collective(n) for n in module.graph.nodes):
            try:
                return _compile_whole(name, module, inputs, device)
            except Exception as error:  # torch_xla raises anything
                _recover()
                annotate(module, inputs)  # before, what is known may not be found
                known = any(map(needs_host, module.graph.nodes))
                if not known and not _learn(module.graph, device):
                    raise _as_lowering_error(name, error) from error
        return _compile_in_pieces(name, module, inputs, device, groups or {})
    except BaseException:
        _recover()
        raise


def _compile_in_pieces(
    name: str,
    module: fx.GraphModule,
    inputs: Sequence[TensorSpec],
    device: torch.device,
    groups: Groups,
) -> Executable | PiecewiseExecutable | FusedExecutable:
    """Cuts a graph at collectives and operators of the host, until what is left compiles.

    Where the transport runs programs with collectives, the graph is one of those.
    """
    annotate(module, inputs)
    put = functools.partial(to_device, device=device)
    # torch_xla has no kernel for the wait of a collective; as a part of the program it needs none.
    computing = [node for node in module.graph.nodes if not is_collective(node)]
    if is_host_device() and not any(map(needs_host, computing)):
        fused = fuse(name, module, inputs, groups, COLLECTIVES, put)
        if fused is not None:
            return fused

    def compile_piece(title: str, number: int, piece: Piece) -> Executable:
        checked = _Checked(piece.module, piece.output_specs)
        return _compile_whole(title, checked, piece.input_specs, device)

    while True:
        try:
            plan = split_graph(module, kinds(name, _runs))
            return in_pieces(name, plan, compile_piece, groups, host_view, put)
        except Exception as error:  # torch_xla raises anything
            _recover()
            if not _learn(module.graph, device):
                raise _as_lowering_error(name, error) from error


def _runs(node: fx.Node) -> bool:
    return not needs_host(node) and not _is_complex(node)


def _is_complex(node: fx.Node) -> bool:
    """Complex numbers stay where they were made: torch_xla 2.9 gives `abs` of them as complex."""
    values = pytree.tree_leaves([n.meta.get("val") for n in (node, *node.all_input_nodes)])
    return any(isinstance(value, torch.Tensor) and value.is_complex() for value in values)


class _Checked(torch.nn.Module):
    """A piece whose results must be what the next one expects."""

    def __init__(self, module: fx.GraphModule, specs: Sequence[TensorSpec]):
        super().__init__()
        self.module = module
        self._specs = specs

    def forward(self, *arguments: torch.Tensor) -> list[torch.Tensor]:
        results = self.module(*arguments)
        found = tuple(TensorSpec.of(result) for result in results)
        if found != tuple(self._specs):
            raise LoweringError(f"results are {found} in place of {self._specs}")
        return results


def _learn(graph: fx.Graph, device: torch.device) -> bool:
    """Looks for operators that make a graph fail; whether there are any."""
    nodes = list(graph.nodes)
    return any(learn(nodes, device, by_compiling) for by_compiling in (False, True))


def _as_lowering_error(name: str, error: Exception) -> LoweringError:
    if isinstance(error, LoweringError):
        text = str(error)
        return error if text.startswith(name) else LoweringError(f"{name}: {text}")
    return LoweringError(
        f"{name} cannot be compiled, though each of its operators can: "
        f"{type(error).__name__}: {error}"
    )


def _compile_whole(
    name: str,
    module: torch.nn.Module,
    inputs: Sequence[TensorSpec],
    device: torch.device,
    salt: int = 0,
) -> Executable:
    """One executable. Another salt gives another hash, by the ticket."""
    is_ordered, plain = is_host_device() or salt > 0, (module, inputs)
    if is_ordered:
        module, inputs = _Ticketed(module, salt), [*inputs, _TICKET]
    torch_xla.sync()
    xm.wait_device_ops()
    # With memory: an operator without a lowering shows by its kernel of the host, which reads its
    # arguments, and torch_xla 2.9 ends the process where those are placeholders without any.
    arguments = to_device([torch.zeros(spec.shape, dtype=spec.dtype) for spec in inputs], device)
    if is_ordered and Executable.next_ticket is None:
        Executable.next_ticket = arguments[-1]
    argument_of_id = {_xla._xla_get_tensor_id(a): i for i, a in enumerate(arguments)}
    torch_xla.sync()
    xm.wait_device_ops()
    outputs = _trace(name, module, arguments)
    results: list[int | tuple[int]] = []
    roots: list[torch.Tensor] = []
    index_of: dict[int, int] = {}
    for value in outputs:
        # Python objects for one tensor of torch_xla, such as `t()` of a vector, are one result.
        tensor_id = _xla._xla_get_tensor_id(value)
        passed_on = argument_of_id.get(tensor_id)
        if passed_on is None and _is_data(value):
            (passed_on,) = _program_inputs([value], argument_of_id)
        if isinstance(passed_on, int):
            results.append((passed_on,))
            continue
        if tensor_id not in index_of:
            index_of[tensor_id] = len(roots)
            roots.append(_as_named(value))
        results.append(index_of[tensor_id])
    if is_ordered:
        results.pop()
    if len(roots) == is_ordered:  # nothing to compute but the ticket
        return Executable(name, b"", (), results)
    sources = _program_inputs(roots, argument_of_id)
    text = _xla._get_xla_tensors_hlo(roots)
    graph_hash = _xla._get_graph_hash(roots)
    if _is_another(graph_hash, text):
        _recover()
        return _compile_whole(name, *plain, device, salt + 1)
    _xla._xla_warm_up_cache(roots, [])
    _xla._clear_pending_irs(str(device))
    return Executable(name, graph_hash, sources, results, is_ordered)


def _is_data(value: torch.Tensor) -> bool:
    """Whether nothing computes a tensor: copies of arguments are others, which no program gives."""
    return "xla::device_data" in _xla._get_xla_tensor_debug_info(value)


def _as_named(value: torch.Tensor) -> torch.Tensor:
    """A result with the bytes of the dtype that PyTorch knows it by.

    torch_xla 2.9 gives some indices as 32-bit integers and calls them int64 (`cummax`, `max_pool2d`
    with indices); another program that takes them would expect twice as many bytes.
    """
    is_index = value.dtype is torch.int64 and _xla._get_xla_tensor_shape_type(value) != "s64"
    return value + torch.zeros((), dtype=value.dtype, device=value.device) if is_index else value


def _program_inputs(
    roots: Sequence[torch.Tensor], argument_of_id: dict[int, int]
) -> list[int | torch.Tensor | None]:
    """For each buffer of the program: an argument's index, None (the seed), or a constant."""
    seed_id = _xla._get_seed_info_id()
    ids, values = _xla._get_tensors_xla_device_data_node(list(roots))
    sources: list[int | torch.Tensor | None] = []
    for tensor_id, value in zip(ids, values, strict=True):
        if tensor_id in argument_of_id:
            sources.append(argument_of_id[tensor_id])
        else:
            sources.append(None if tensor_id == seed_id else value)
    return sources


def _trace(
    name: str, module: torch.nn.Module, arguments: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Runs the module lazily; every operator must have an XLA lowering."""
    before = fallbacks()
    with torch.no_grad(), without_autocast():
        outputs = list(module(*arguments))
    fallen = sorted(k for k, v in fallbacks().items() if v != before.get(k, 0))
    if fallen:
        raise LoweringError(_fallback_text(name, module, fallen))
    return outputs


def _fallback_text(name: str, module: torch.nn.Module, operators: Sequence[str]) -> str:
    lines = [f"{name}: operators without an XLA lowering:"]
    graphs = [m.graph for m in module.modules() if isinstance(m, fx.GraphModule)]
    nodes = [node for graph in graphs for node in graph.nodes]
    for fallen in operators:
        # A view of a functional graph runs as its `_copy`.
        names = (fallen, fallen.removesuffix("_copy"))
        places = sorted({place(n) for n in nodes if _operator_name(n) in names})
        lines.append(f"  {fallen} in {', '.join(places) or 'the derivative of the stage'}")
    lines.append(
        "They would run on the host and break the compiled step. Replace them in the model, or "
        "move that computation out of the step function."
    )
    return "\n".join(lines)


def _operator_name(node: fx.Node) -> str:
    schema = getattr(node.target, "_schema", None)
    return schema.name if schema is not None else ""
