"""A backend without a device: it records what is asked of it, for tests of what stands above.

Programs compute nothing. Their results are zeros of the right shapes and dtypes on the host, found
by running the graph on tensors without memory; so all that is true of plans, orders and lifetimes
can be tested in milliseconds.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from mpxla.comm.transport import Groups
from mpxla.device.alone import Alone
from mpxla.device.backend import Lowering
from mpxla.errors import MpxlaError
from mpxla.stage.spec import TensorSpec

__all__ = ["NullBackend", "NullBuffer", "NullExecutable", "plain_lowering"]


def plain_lowering() -> Lowering:
    """Lowering as PyTorch does it, on the host."""
    return Lowering(torch.device("cpu"))


@dataclass(eq=False)
class NullBuffer:
    """A value that nobody can compute with.

    Attributes:
        spec: its shape and dtype.
        source: which call made it, or None.
        is_donated: whether a program has taken its memory.
    """

    spec: TensorSpec
    source: str | None = None
    is_donated: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes that it would take."""
        return self.spec.num_bytes


class NullExecutable:
    """A program that computes nothing; see `Executable`.

    Args:
        backend: is told about every call.
        name: for messages.
        inputs: specs of its arguments.
        outputs: specs of its results.
        donated: arguments that must not be used after a call.
    """

    is_random = False

    def __init__(
        self,
        backend: "NullBackend",
        name: str,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        donated: Collection[int],
    ):
        self.name = name
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self.donated = frozenset(donated)
        self._backend = backend

    def __call__(
        self, arguments: Sequence[NullBuffer], seed: NullBuffer | None = None
    ) -> list[NullBuffer]:
        """Records the call; gives a buffer for every result.

        Raises:
            MpxlaError: arguments of other shapes or dtypes, or one that was donated.
        """
        found = tuple(argument.spec for argument in arguments)
        if found != self.inputs:
            raise MpxlaError(f"{self.name} takes {self.inputs}, but was called with {found}.")
        if any(argument.is_donated for argument in arguments):
            raise MpxlaError(f"{self.name} was called with a buffer that was donated before.")
        for index in self.donated:
            arguments[index].is_donated = True
        self._backend.calls.append(self.name)
        return [NullBuffer(spec, self.name) for spec in self.outputs]


@dataclass
class NullBackend(Alone):
    """See `Backend`.

    Attributes:
        compiled: the programs, in the order of their compilation.
        calls: names of programs and of `put`, `get`, `view`, `adopt`, `publish` and `assign`, in
            the order of the calls.
    """

    name = "null"
    device = torch.device("cpu")
    is_host = True
    has_doubles = True
    donates = True
    builds_late = False
    lowering: Lowering = field(default_factory=plain_lowering)
    compiled: list[NullExecutable] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)

    @property
    def num_compilations(self) -> int:
        """How many programs there are."""
        return len(self.compiled)

    def compile(
        self,
        name: str,
        graph: fx.GraphModule,
        inputs: Sequence[TensorSpec],
        donated: Collection[int] = (),
        groups: Groups | None = None,
    ) -> NullExecutable:
        """Finds the specs of the results; collectives are part of the program."""
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            given = [torch.empty(s.shape, dtype=s.dtype, device=self.device) for s in inputs]
            outputs = [TensorSpec.of(result) for result in graph(*given)]
        self.compiled.append(NullExecutable(self, name, inputs, outputs, donated))
        return self.compiled[-1]

    def zeros(self, specs: Sequence[TensorSpec]) -> list[NullBuffer]:
        """A new buffer for every spec."""
        self.calls.append("zeros")
        return [NullBuffer(spec, "zeros") for spec in specs]

    def put(self, tensors: Sequence[Any], owned: bool = False) -> list[NullBuffer]:
        """A buffer for every tensor; buffers stay."""
        self.calls.append("put")
        return [self._buffer(tensor, "put") for tensor in tensors]

    def get(self, buffers: Sequence[Any]) -> list[torch.Tensor]:
        """Zeros."""
        self.calls.append("get")
        return [self._zeros(buffer) for buffer in buffers]

    def view(self, buffer: Any) -> torch.Tensor:
        """Zeros, or the tensor itself."""
        self.calls.append("view")
        return buffer.detach() if isinstance(buffer, torch.Tensor) else self._zeros(buffer)

    def is_ready(self, buffer: Any) -> bool:
        """Nothing is computed."""
        return True

    def adopt(self, tensors: Sequence[torch.Tensor], held: Sequence[Any] = ()) -> list[NullBuffer]:
        """A buffer for every tensor."""
        self.calls.append("adopt")
        return [self._buffer(tensor, "adopt") for tensor in tensors]

    def forget(self, tensors: Iterable[torch.Tensor]) -> None:
        """Nothing to do: it refers to none."""

    def publish(self, buffers: Sequence[Any], is_held: bool = False) -> list[torch.Tensor]:
        """Zeros."""
        self.calls.append("publish")
        return [self._zeros(buffer) for buffer in buffers]

    def assign(self, tensors: Sequence[torch.Tensor], buffers: Sequence[Any]) -> None:
        """The tensors become zeros."""
        self.calls.append("assign")
        for tensor, buffer in zip(tensors, buffers, strict=True):
            tensor.data = self._zeros(buffer)

    def has_views(self, tensor: torch.Tensor) -> bool:
        """Nobody has any."""
        return False

    def spec(self, buffer: Any) -> TensorSpec:
        """Shape and dtype of a buffer."""
        return buffer.spec if isinstance(buffer, NullBuffer) else TensorSpec.of(buffer)

    def is_on_device(self, tensor: torch.Tensor) -> bool:
        """True: the host is the device."""
        return True

    def open_runner(self, host: Any, address: str) -> Any:
        """There are no programs between processes."""
        raise MpxlaError("transport: 'xla' needs a device. Set transport: 'host'.")

    def _buffer(self, value: Any, source: str) -> NullBuffer:
        return value if isinstance(value, NullBuffer) else NullBuffer(self.spec(value), source)

    def _zeros(self, buffer: Any) -> torch.Tensor:
        spec = self.spec(buffer)
        return torch.zeros(spec.shape, dtype=spec.dtype)
