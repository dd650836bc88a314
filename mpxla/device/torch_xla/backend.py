"""The backend on torch_xla: CPU, and accelerators that have a plugin for it (Neuron)."""

import functools
from collections.abc import Callable, Collection, Sequence
from typing import cast

import torch
import torch_xla
import torch_xla.core.xla_model as xm
from torch import fx
from torch_xla import runtime

from mpxla.comm.host import HostTransport
from mpxla.comm.transport import Groups, Transport
from mpxla.comm.xla_queue import Runner
from mpxla.device.backend import Lowering
from mpxla.device.fused import FusedExecutable
from mpxla.device.torch_xla import tensors
from mpxla.device.torch_xla.collectives.cpu_runner import CpuRunner
from mpxla.device.torch_xla.collectives.device_runner import DeviceRunner, is_device_world
from mpxla.device.torch_xla.collectives.process_groups import DeviceCollectives
from mpxla.device.torch_xla.collectives.world import XlaWorld
from mpxla.device.torch_xla.compile import Executable, compile_graph, num_compilations
from mpxla.device.torch_xla.lowering import make_lowering
from mpxla.device.views import TensorBuffers
from mpxla.kept import Kept, kind_of_processor
from mpxla.stage.piecewise import PiecewiseExecutable
from mpxla.stage.spec import TensorSpec

__all__ = ["TorchXlaBackend"]


class TorchXlaBackend(TensorBuffers):
    """Compiles and runs programs by torch_xla; see `Backend`. Buffers are tensors of its device."""

    name = "torch_xla"
    donates = False

    @property
    def is_host(self) -> bool:
        """Whether the device is the processor itself."""
        return tensors.is_host_device()

    has_doubles = is_host  # accelerators compute in float32 at most

    @functools.cached_property
    def device(self) -> torch.device:
        """The XLA device of this process, with its index."""
        device = tensors.current_device()
        # Autograd starts a thread for every device that is there at the first backward of the
        # process. If that was before this device, a backward on it fails in the engine; in this
        # thread, where the script runs, it needs no other one.
        torch.autograd.set_multithreading_enabled(False)
        return device

    @functools.cached_property
    def lowering(self) -> Lowering:
        """How stages are lowered for the device."""
        return make_lowering(self.is_host)

    @property
    def num_compilations(self) -> int:
        """Programs that XLA has compiled in this process so far."""
        return num_compilations()

    def compile(
        self,
        name: str,
        graph: fx.GraphModule,
        inputs: Sequence[TensorSpec],
        donated: Collection[int] = (),
        groups: Groups | None = None,
    ) -> Executable | PiecewiseExecutable | FusedExecutable:
        """See `Backend.compile`; nothing is donated.

        torch_xla 2.9 donates arguments of programs that are called by handle (marked by
        `_set_buffer_donation`, compiled under `alias_with_buffer_donor_config`) only where
        XLA_ENABLE_PARAM_ALIASING is on. That also lets lazily traced programs overwrite what other
        pending values need, so it is off (`env.prepare_xla`); then a program that is compiled with
        donors is not found by its hash. With the variable on, donation was seen to work on the CPU.
        """
        return compile_graph(name, graph, inputs, self.device, groups or {})

    @property
    def machine(self) -> str:
        """The kind of processor, or torch_xla's name of the device."""
        return kind_of_processor() if self.is_host else str(xm.xla_device_hw(self.device)).lower()

    def keep_programs(self, kept: Kept) -> bool:
        """Nothing is kept.

        On the CPU torch_xla 2.9 writes programs and cannot read them again (its counter
        `PersistentCacheDeserializeFailure`); Neuron's compiler keeps its own, unasked.
        """
        return False

    def zeros(self, specs: Sequence[TensorSpec]) -> list[torch.Tensor]:
        """By way of the host."""
        return self.put([torch.zeros(spec.shape, dtype=spec.dtype) for spec in specs])

    def put(self, tensors_: Sequence[torch.Tensor], owned: bool = False) -> list[torch.Tensor]:
        """Host tensors on the device; those that are there stay, and are started."""
        tensors.make_ready(tensors_)
        return tensors.to_device(tensors_, self.device)

    def get(self, buffers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies on the host."""
        return tensors.to_host(buffers)

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """Waits; on the host, for reading only."""
        return tensors.host_view(buffer)

    def is_ready(self, buffer: torch.Tensor) -> bool:
        """Whether it is on the host; torch_xla does not tell what it has computed."""
        return buffer.device.type == "cpu"

    def adopt(
        self, tensors_: Sequence[torch.Tensor], held: Sequence[torch.Tensor | None] = ()
    ) -> list[torch.Tensor]:
        """Starts what is pending of these tensors."""
        tensors.make_ready(tensors_)
        return list(tensors_)

    def is_on_device(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is one of XLA's."""
        return tensor.device.type == "xla"

    def flush(self) -> None:
        """Starts all pending lazy computation of the process."""
        torch_xla.sync()

    def wait(self) -> None:
        """Waits until the device has finished everything that was started."""
        xm.wait_device_ops()

    def random_state(self) -> int:
        """State of XLA's generator, from which eager random operators draw."""
        return int(xm.get_rng_state())

    def set_random_state(self, state: int) -> None:
        """Puts it into an earlier state."""
        xm.set_rng_state(state)

    def memory_counters(self) -> dict[str, int] | None:
        """What the runtime counts, in bytes; None on the CPU, where it lives on the process's."""
        if self.is_host:
            return None
        counters = xm.get_memory_info(cast(torch.device, str(self.device)))  # it takes names
        return dict(cast(dict[str, int], counters))

    def reaches(self, world_size: int) -> bool:
        """Whether the devices of all processes form one PJRT world, which CPU processes do not."""
        return is_device_world(world_size)

    def open_runner(self, host: HostTransport, address: str) -> Runner:
        """Executes programs on the device's world, or by jaxlib between CPU processes."""
        if is_device_world(host.world_size):
            return DeviceRunner(host.rank, host.world_size)
        return CpuRunner(host, address)

    def tell_rank(self, rank: int, is_joined: Callable[[], bool]) -> Callable[[], None]:
        """The CPU client knows one process, of rank 0; other clients know better."""
        original = runtime.global_ordinal

        @functools.wraps(original)
        def read() -> int:
            return original() if is_joined() else rank

        # Not the number of processes: `join_world` asks the client for that.
        if self.is_host:
            runtime.global_ordinal = read

        def undo() -> None:
            runtime.global_ordinal = original

        return undo

    def join_world(
        self,
        transport: Transport,
        local_rank: int,
        local_size: int,
        has_reduced: Callable[[torch.optim.Optimizer], bool],
    ) -> Callable[[], None]:
        """Collectives of torch and of torch_xla mean the processes of the job."""
        has_world = is_device_world(transport.world_size)
        collectives = DeviceCollectives(has_world)
        if has_world:
            return collectives.close
        world = XlaWorld(transport, local_rank, local_size, has_reduced)

        def undo() -> None:
            world.close()
            collectives.close()

        return undo
