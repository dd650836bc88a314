"""Operators of a stage that run on the processor, between two executables.

A host piece waits for its arguments, runs its operators one by one as PyTorch does, and gives the
results to the device. The wait blocks the dispatching thread, which nothing else in a step does:
that is the price, so a log line names every such operator and what it costs.
"""

import contextlib
import operator
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._ops import OpOverload

from mpxla.errors import MpxlaError
from mpxla.graph.casts import without_autocast
from mpxla.graph.stepgraph import describe, is_random
from mpxla.graph.typed import schema_of, target_of
from mpxla.log import warn_once
from mpxla.stage.pieces import HostPiece
from mpxla.stage.spec import TensorSpec

__all__ = ["HostRunner", "as_traced", "has_kernel"]

_aten = torch.ops.aten
_CPU = torch.device("cpu")


def _ctc_loss(
    log_probs: torch.Tensor, targets: torch.Tensor, *rest: Any, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pads the saved table to the longest target that the shapes allow, see `graph/shapes.py`."""
    loss, table = _aten._ctc_loss.Tensor(log_probs, targets, *rest, **options)
    missing = 2 * targets.shape[-1] + 1 - table.shape[-1]
    return loss, torch.nn.functional.pad(table, (0, missing), value=-torch.inf)


# Values here are not laid out as the lowering thought, so that a view may need a copy.
_CALLS: dict[Any, Callable[..., Any]] = {
    _aten.view.default: _aten.reshape.default,
    _aten._unsafe_view.default: _aten.reshape.default,
    _aten._ctc_loss.Tensor: _ctc_loss,
}


def has_kernel(operator: object) -> bool:
    """Whether PyTorch can run an operator on the processor."""
    known = torch._C._dispatch_has_computed_kernel_for_dispatch_key  # pyright: ignore[reportPrivateUsage]
    return isinstance(operator, OpOverload) and known(operator.name(), "CPU")


class HostRunner:
    """A host piece, ready to run.

    Args:
        title: of the program, for messages.
        piece: what to run.
        view: waits for a value of the device and gives it on the host.
        put: host tensors as values of the device.
    """

    def __init__(
        self,
        title: str,
        piece: HostPiece,
        view: Callable[[Any], torch.Tensor],
        put: Callable[[Sequence[torch.Tensor]], list[Any]],
    ):
        self._title = title
        self._piece = piece
        self._view = view
        self._put = put
        self._nodes = [n for n in piece.module.graph.nodes if isinstance(n.target, OpOverload)]
        self._interpreter = _OnHost(title, piece.module)
        self._is_announced = False
        self.is_random = any(is_random(node) for node in self._nodes)

    @property
    def operators(self) -> tuple[str, ...]:
        """Names of the operators that run here, as PyTorch has them."""
        return tuple(sorted({schema_of(node).name for node in self._nodes}))

    def __call__(self, arguments: Sequence[Any], seed: int | None = None) -> list[Any]:
        """Waits for the arguments; gives results on the device."""
        values = [self._view(argument) for argument in arguments]
        with as_traced(seed if self.is_random else None):
            results = self._interpreter.run(*values)
        if not self._is_announced:
            self._announce()
        own = {value.untyped_storage().data_ptr() for value in values}
        specs = self._piece.output_specs
        return self._put([self._checked(r, s, own) for r, s in zip(results, specs, strict=True)])

    def _checked(self, value: torch.Tensor, spec: TensorSpec, own: set[int]) -> torch.Tensor:
        """A result as the next piece expects it, in memory of its own."""
        if tuple(value.shape) != spec.shape:
            raise MpxlaError(
                f"{self._title}: {', '.join(self.operators)} on the host gave shape "
                f"{list(value.shape)}, where the step was captured with {list(spec.shape)}. Shapes "
                f"have to follow from those of the inputs."
            )
        value = value.to(spec.dtype).resolve_conj().resolve_neg().contiguous()
        shared = value.untyped_storage().data_ptr() in own
        own.add(value.untyped_storage().data_ptr())
        return value.clone() if shared else value

    def _announce(self) -> None:
        """One line per operator and process."""
        self._is_announced = True
        for node in self._nodes:
            moved = _moved_bytes(node)
            if not moved and len(self._nodes) > 1:
                continue  # stands between two others
            warn_once(
                f"host operator {schema_of(node).name}",
                f"{self._title}: {describe(node)} cannot run on the XLA device and runs on the "
                f"host: {moved:,} bytes moved per call, "
                f"{self._interpreter.seconds[node] * 1e3:.3g} ms in the first one. Each call waits "
                f"for the device.",
            )


class _OnHost(fx.Interpreter):
    """Runs nodes on host tensors; errors name the node. Times the first run."""

    def __init__(self, title: str, module: fx.GraphModule):
        super().__init__(module)
        self.extra_traceback = False  # errors name the node
        self._title = title
        self.seconds: dict[fx.Node, float] = {}

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        started = time.perf_counter()
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        args, kwargs = pytree.tree_map_only(torch.device, lambda _: _CPU, (args, kwargs))
        call = _CALLS[n.target] if n.target in _CALLS else target_of(n)
        try:
            result = call(*args, **kwargs)
        except Exception as error:  # as in plain PyTorch: singular matrices, wrong lengths
            raise MpxlaError(
                f"{self._title}: {describe(n)}, which runs on the host, failed: {error}"
            ) from error
        self.seconds.setdefault(n, time.perf_counter() - started)
        return result


@contextlib.contextmanager
def as_traced(seed: int | None) -> Generator[None]:
    """Without derivatives and autocast, which the graph contains already; random as seeded."""
    forked = torch.random.fork_rng(devices=[], enabled=seed is not None)
    with torch.no_grad(), without_autocast(), forked:
        if seed is not None:
            torch.default_generator.manual_seed(seed)
        yield


def _moved_bytes(node: fx.Node) -> int:
    """Bytes that cross between device and host for one node."""
    taken = [n for n in node.all_input_nodes if n.op == "placeholder"]
    made = [node, *(user for user in node.users if user.target is operator.getitem)]
    given = [n for n in made if any(user.op == "output" for user in n.users)]
    values = pytree.tree_leaves([n.meta["val"] for n in (*taken, *given)])
    return sum(TensorSpec.of(v).num_bytes for v in values if isinstance(v, torch.Tensor))
