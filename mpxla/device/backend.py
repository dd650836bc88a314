"""What the rest of mpxla knows of a device: the protocols of a backend and of its programs.

This file must not know any backend. A backend may import errors, log, env, comm and the pure parts
of graph and stage; it must not know ranks' schedules, models or the session.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import fx

from mpxla.comm.host import HostTransport
from mpxla.comm.transport import Groups, Transport
from mpxla.comm.xla_queue import Runner
from mpxla.kept import Kept
from mpxla.stage.spec import TensorSpec

__all__ = ["Backend", "Buffer", "Executable", "Lowering"]

Buffer = Any
"""A value on the device that may still be computed. It goes into executables; to look at it, ask
the backend. Its one attribute is `nbytes`."""


class Executable(Protocol):
    """A compiled program with fixed shapes.

    Attributes:
        name: for messages, for instance "stage 1 forward".
        is_random: whether it draws random numbers, from the seed given with each call.
    """

    name: str
    is_random: bool

    def __call__(self, arguments: Sequence[Buffer], seed: Buffer | None = None) -> list[Buffer]:
        """Starts the program; returns its results at once, as buffers still being computed.

        Args:
            arguments: one buffer per spec. Donated ones must not be used afterwards.
            seed: an int64 scalar on the device, for a random program.
        """
        ...


@dataclass(frozen=True)
class Lowering:
    """How stages are lowered for a backend.

    Attributes:
        device: device of the fake tensors on which stages are traced, with its index.
        decompositions: gives operator -> function that writes it with others, while it is traced;
            asked for only then, since PyTorch takes 0.2 s to list them.
        replacements: operator -> operator or function that stands in for it, before tracing.
        dispatched: whether derivatives are traced -> a context in which operators find the kernels
            that this backend wants; entered around tracing.
        expand: rewrites a lowered graph in place, as the backend's compiler likes it.
        lays_out_weights: whether transposed weights and gradients make products faster.
        disguises_sums: whether an addition to an accumulator should not be one of its own, see
            `stage/accumulation.py`.
    """

    device: torch.device
    decompositions: Callable[[], Mapping[Any, Callable[..., Any]]] = dict
    replacements: Mapping[Any, Any] = field(default_factory=dict[Any, Any])
    dispatched: Callable[[bool], AbstractContextManager[Any]] = nullcontext
    expand: Callable[[fx.GraphModule], None] = lambda module: None
    lays_out_weights: bool = False
    disguises_sums: bool = False


class Backend(Protocol):
    """Runs programs on this process's device.

    Attributes:
        name: "torch_xla", "pjrt", "eager" or "null".
        device: where users see parameters, gradients and results. First use claims the device.
        lowering: what it wants of graphs; does not touch the device.
        is_host: whether the device's memory is the host's.
        has_doubles: whether programs may compute in float64.
        donates: whether programs take the memory of donated arguments.
        builds_late: whether programs build a part of their code when they run first.
        num_compilations: programs that this process has compiled or found on disk so far.
        machine: a name for devices that run the same programs, for the folder of what is kept.
    """

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def device(self) -> torch.device: ...  # noqa: D102
    @property
    def lowering(self) -> Lowering: ...  # noqa: D102
    @property
    def is_host(self) -> bool: ...  # noqa: D102
    @property
    def has_doubles(self) -> bool: ...  # noqa: D102
    @property
    def donates(self) -> bool: ...  # noqa: D102
    @property
    def builds_late(self) -> bool: ...  # noqa: D102
    @property
    def num_compilations(self) -> int: ...  # noqa: D102
    @property
    def machine(self) -> str: ...  # noqa: D102

    def compile(
        self,
        name: str,
        graph: fx.GraphModule,
        inputs: Sequence[TensorSpec],
        donated: Collection[int] = (),
        groups: Groups | None = None,
    ) -> Executable:
        """Compiles a graph for the device.

        Args:
            name: for messages.
            graph: functional, in operators of ATen, on tensors of the lowering's device; takes
                one tensor per spec and returns a list of tensors. The backend may change it.
            inputs: specs of its arguments.
            donated: arguments whose memory results may take; a backend may leave it.
            groups: those that collectives in the graph name. Where programs of the device do not
                reach the others, their collectives run over the transport between pieces.

        Raises:
            LoweringError: an operator can run neither on the device nor on the host, or a
                collective is over another group.
        """
        ...

    def keep_programs(self, kept: Kept) -> bool:
        """Keeps compiled programs from now on, for the next start of the job.

        Returns:
            Whether this backend can do that.
        """
        ...

    def put(self, tensors: Sequence[torch.Tensor], owned: bool = False) -> list[Buffer]:
        """Host tensors as buffers, in one batch; what is on the device already stays.

        What users left pending of the latter is started.

        Args:
            tensors: may change afterwards, unless they are owned.
            owned: whether nobody else has them, so that buffers may share their memory.
        """
        ...

    def get(self, buffers: Sequence[Buffer]) -> list[torch.Tensor]:
        """Copies on the host, of one point in time; nothing shares memory with the originals."""
        ...

    def view(self, buffer: Buffer) -> torch.Tensor:
        """Waits for a buffer and gives it on the host; for reading only, it may share memory.

        Tensors of users are taken as well, on the device or on the host.
        """
        ...

    def is_ready(self, buffer: Buffer) -> bool:
        """Whether `view` would give a buffer, or a tensor of users, without waiting."""
        ...

    def zeros(self, specs: Sequence[TensorSpec]) -> list[Buffer]:
        """New buffers of zeros, one per spec."""
        ...

    def adopt(
        self, tensors: Sequence[torch.Tensor], held: Sequence[Buffer | None] = ()
    ) -> list[Buffer]:
        """The user's tensors (parameters, gradients, state) as arguments of programs.

        Starts what is pending of them.

        Args:
            tensors: the tensors.
            held: buffers that they were made of, or were given, as far as the caller has kept them.
                They save a search wherever they still share the tensor's memory.
        """
        ...

    def forget(self, tensors: Iterable[torch.Tensor]) -> None:
        """Refers to tensors no longer, so that `torch.utils.swap_tensors` takes them."""
        ...

    def publish(self, buffers: Sequence[Buffer], is_held: bool = False) -> list[torch.Tensor]:
        """Buffers as the tensors that users see, on `device`.

        Args:
            buffers: the buffers.
            is_held: whether the caller keeps them, to give them to `adopt` with the tensors.
        """
        ...

    def assign(self, tensors: Sequence[torch.Tensor], buffers: Sequence[Buffer]) -> None:
        """Gives the user's tensors (parameters) the memory of buffers; they stay the same objects.

        Where somebody holds a view of such a tensor, its memory is written to instead. Waits where
        `publish` does.
        """
        ...

    def has_views(self, tensor: torch.Tensor) -> bool:
        """Whether somebody holds a view of a tensor of the user's, such as `p.detach()`."""
        ...

    def spec(self, buffer: Buffer) -> TensorSpec:
        """Shape and dtype of a buffer."""
        ...

    def is_on_device(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies on the device; host tensors have to be `put` there."""
        ...

    def flush(self) -> None:
        """Starts everything that users left pending."""
        ...

    def wait(self) -> None:
        """Waits until the device has finished everything that was started."""
        ...

    def random_state(self) -> int:
        """State of the device's own random generator."""
        ...

    def set_random_state(self, state: int) -> None:
        """Puts that generator into an earlier state."""
        ...

    def memory_counters(self) -> dict[str, int] | None:
        """Bytes that the device counts: `bytes_used`, `bytes_limit`, perhaps more; None if none."""
        ...

    def reaches(self, world_size: int) -> bool:
        """Whether programs of this process's device reach the devices of all processes."""
        ...

    def open_runner(self, host: HostTransport, address: str) -> Runner:
        """What executes the programs of the `xla` transport. Every rank calls it.

        Args:
            host: for meetings; outlives the runner.
            address: this process's network address.
        """
        ...

    def tell_rank(self, rank: int, is_joined: Callable[[], bool]) -> Callable[[], None]:
        """Lets libraries that ask the device's runtime for this process's rank get the job's.

        Args:
            rank: of this process.
            is_joined: whether `join_world` answers by now.

        Returns:
            A function that undoes it.
        """
        ...

    def join_world(
        self,
        transport: Transport,
        local_rank: int,
        local_size: int,
        has_reduced: Callable[[torch.optim.Optimizer], bool],
    ) -> Callable[[], None]:
        """Makes collectives on tensors of the device mean the processes of the job.

        Args:
            transport: reaches the other processes, on the host.
            local_rank: this process among those of its host.
            local_size: processes of this host.
            has_reduced: whether mpxla reduces the gradients of an optimizer's parameters.

        Returns:
            A function that undoes it.
        """
        ...
