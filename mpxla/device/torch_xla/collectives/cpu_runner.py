"""Runs the `xla` transport's programs across CPU processes, by jaxlib's CPU client.

torch_xla's own CPU client knows no other process. jaxlib's does, with gloo inside XLA, and takes
the StableHLO that torch_xla makes of a program: so the very programs that an accelerator would get
are executed by XLA's own collectives. Operands go device -> host -> jaxlib -> host.

A rank may come to a communication long after another (it compiles), but XLA's gloo gives up after
half a minute and cannot be interrupted. So the members first meet on the host transport, where a
wait ends by the news of a failure only, and compare what they came to do.

jax is optional: the extra `cpu-collectives`. This file must not know what programs are for.
"""

import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from mpxla.comm.codec import DATA
from mpxla.comm.host import HostTransport
from mpxla.comm.objects import Objects
from mpxla.comm.packing import as_memory
from mpxla.comm.ports import reserved_port
from mpxla.comm.transport import Group
from mpxla.comm.xla_programs import GraphProgram, Program
from mpxla.device.torch_xla.collectives.programs import trace
from mpxla.device.torch_xla.collectives.relay import Relay
from mpxla.errors import MpxlaError, RankMismatch

__all__ = ["CpuRunner"]

_CHANNEL = "xla"
_START_S = 60
_END_S = 5
# The lifeline watches over the processes; the client's own watch would end them.
_NEVER_S = 10**8
# Torch dtypes that numpy lacks, and the integer of their size.
_FOREIGN = {
    torch.bfloat16: ("bfloat16", torch.int16, np.int16),
    torch.float8_e4m3fn: ("float8_e4m3fn", torch.int8, np.int8),
    torch.float8_e5m2: ("float8_e5m2", torch.int8, np.int8),
}


class _Lowered(NamedTuple):
    """A program that has not been compiled."""

    program: Program | GraphProgram
    artifact: bytes
    sources: list[int | np.ndarray]


class _Loaded(NamedTuple):
    """A program that can be executed."""

    executable: Any
    lowered: _Lowered


class CpuRunner:
    """Compiles and executes programs in a world of CPU processes."""

    def __init__(self, host: HostTransport, address: str) -> None:
        """Connects the processes' clients. Every rank constructs it, at the same point.

        Args:
            host: For meetings; outlives the runner.
            address: This process's network address, which the others can reach.

        Raises:
            MpxlaError: jax is not installed on some rank.
        """
        self._host = host
        self._world: Group = tuple(range(host.world_size))
        self._objects = Objects(host, DATA)
        self._service: Any = None
        self._jax, problem = _import_jax()
        problems = self._objects.allgather(problem, self._world)
        for rank, text in enumerate(problems):
            if text is not None:
                raise MpxlaError(
                    f"transport: 'xla' on CPU needs jax, which rank {rank} cannot import ({text}). "
                    f"Install it on all ranks with pip install 'mpxla[cpu-collectives]', or set "
                    f"transport: 'host'."
                )
        self._connect(address)

    def meet(self, ranks: Group, what: str, purpose: str, text: str) -> None:
        """Waits until all ranks have come to the same communication.

        Args:
            ranks: Who has to come.
            what: The communication, for errors of waiting.
            purpose: What this rank came to, for its own error.
            text: What it came to, in words that are equal on all ranks.

        Raises:
            RankMismatch: Another rank came to something else.
            PeerFailure: A rank failed or left.
        """
        others = [rank for rank in ranks if rank != self._host.rank]
        waits = [self._host.recv(None, rank, _CHANNEL) for rank in others]
        for rank, wait in zip(others, waits, strict=True):
            wait.what = what
            sealed = self._host.seal.wrap(text.encode(), _CHANNEL, (rank,))
            message = torch.frombuffer(bytearray(sealed), dtype=torch.uint8)
            self._host.send(message, rank, _CHANNEL)
        arrived = [wait.result() for wait in waits]
        for rank, sealed in zip(others, arrived, strict=True):
            here = (self._host.rank,)
            data = self._host.seal.unwrap(bytes(as_memory(sealed)), _CHANNEL, rank, here)
            other = data.decode()
            if other != text:
                raise RankMismatch(
                    f"rank {self._host.rank} {purpose}, but rank {rank} came to {other}. Run the "
                    f"same script with the same model and arguments on all ranks."
                )

    def lower(self, program: Program | GraphProgram) -> _Lowered:
        """Makes the program's StableHLO; as bytes, since its text loses constants of booleans."""
        traced = trace(program)
        sources = [s if isinstance(s, int) else s.cpu().numpy() for s in traced.sources()]
        return _Lowered(program, traced.stablehlo_bytes(), sources)

    def fetch(self, operand: torch.Tensor) -> torch.Tensor:
        """Copies an operand to the host once it is computed."""
        return operand.detach().cpu().contiguous()

    def load(self, lowered: _Lowered) -> _Loaded:
        """Compiles a program for the members of its mesh, one replica each."""
        members = lowered.program.mesh.members
        options = self._jax.client.CompileOptions()
        options.num_replicas, options.num_partitions = len(members), 1
        options.device_assignment = self._jax.client.DeviceAssignment.create(
            np.array([[self._devices[member].id] for member in members])
        )
        with self._jax.make_ir_context():
            module = self._jax.xla.mlir.deserialize_portable_artifact(lowered.artifact)
            executable = self._client.compile_and_load(
                self._jax.ir.Module.parse(module) if isinstance(module, (str, bytes)) else module,
                self._jax.client.DeviceList((self._device,)),
                options,
            )
        return _Loaded(executable, lowered)

    def execute(
        self, loaded: _Loaded, operands: Sequence[torch.Tensor | None], to_host: bool
    ) -> list[torch.Tensor]:
        """Runs a program and waits for it.

        Args:
            loaded: The program.
            operands: One tensor per operand; None stands for zeros.
            to_host: Not looked at, because results are on the host here.
        """
        sources, kinds = loaded.lowered.sources, loaded.lowered.program.operands
        arrays = [
            _to_numpy(torch.zeros(k.shape, dtype=k.dtype) if t is None else t.view(k.shape))
            for t, k in zip(operands, kinds, strict=True)
        ]
        buffers = [self._upload(arrays[s] if isinstance(s, int) else s) for s in sources]
        results = loaded.executable.execute_sharded(buffers)
        return [
            _to_torch(np.asarray(shards[0]))
            for shards in results.disassemble_into_single_device_arrays()
        ]

    def close(self) -> None:
        """Disconnects the clients. After the last execution, on every rank."""
        del self._client, self._device, self._devices
        if self._host.watch.failure is None and self._host.rank == 0:
            self._meet_at_the_end()
        if self._host.watch.failure is None:
            self._connection.shutdown()
        if self._host.watch.failure is None and self._host.rank != 0:
            self._meet_at_the_end()
        if self._service is not None:
            self._service.shutdown()
        self._relay.close()

    def _connect(self, address: str) -> None:
        """Starts the service by which the clients find each other, and the client."""
        jax, rank = self._jax, self._host.rank
        port = None
        if rank == 0:
            port = reserved_port(address)
            self._service = jax.xla.get_distributed_runtime_service(
                f"[{address}]:{port}" if ":" in address else f"{address}:{port}",
                self._host.world_size,
                heartbeat_timeout=_NEVER_S,
                recoverable=True,
            )
        self._relay = Relay(*self._objects.allgather((address, port), self._world)[0])
        self._connection = jax.xla.get_distributed_runtime_client(
            self._relay.address,
            rank,
            init_timeout=_START_S,
            shutdown_timeout=_END_S,
            heartbeat_timeout=_NEVER_S,
            shutdown_on_destruction=False,
        )
        self._connection.connect()
        self._client = jax.client.make_cpu_client(
            asynchronous=True,
            distributed_client=self._connection,
            node_id=rank,
            num_nodes=self._host.world_size,
            num_devices=1,
            collectives=jax.xla.make_gloo_tcp_collectives(self._connection, hostname=address),
        )
        self._devices = {device.process_index: device for device in self._client.devices()}
        self._device = self._devices[rank]

    def _upload(self, array: np.ndarray) -> Any:
        jax = self._jax
        return jax.xla.batched_device_put(
            jax.ShapedArray(array.shape, array.dtype),
            jax.SingleDeviceSharding(self._device),
            [array],
            [self._device],
            enable_x64=True,
        )

    def _meet_at_the_end(self) -> None:
        """Rank 0 serves until all others have disconnected."""
        self._host.barrier(self._world).result(_END_S)


class _Jax(NamedTuple):
    """What is used of jax."""

    xla: Any
    client: Any
    ir: Any
    make_ir_context: Any
    ShapedArray: Any
    SingleDeviceSharding: Any


def _import_jax() -> tuple[Any, str | None]:
    """The parts of jax, or why there are none."""
    try:
        return _Jax(
            importlib.import_module("jaxlib._jax"),
            importlib.import_module("jaxlib.xla_client"),
            importlib.import_module("jaxlib.mlir.ir"),
            importlib.import_module("jax.interpreters.mlir").make_ir_context,
            importlib.import_module("jax.core").ShapedArray,
            importlib.import_module("jax.sharding").SingleDeviceSharding,
        ), None
    except (ImportError, AttributeError) as error:
        return None, str(error)


def _to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A host tensor as a numpy array; ml_dtypes, a dependency of jax, has what numpy lacks."""
    if tensor.dtype not in _FOREIGN:
        return tensor.numpy()
    name, integer, _ = _FOREIGN[tensor.dtype]
    return tensor.view(integer).numpy().view(getattr(importlib.import_module("ml_dtypes"), name))


def _to_torch(array: np.ndarray) -> torch.Tensor:
    """A copy, because the array belongs to the client."""
    for dtype, (name, _, integer) in _FOREIGN.items():
        if array.dtype.name == name:
            return torch.from_numpy(array.view(integer).copy()).view(dtype)
    return torch.from_numpy(array.copy())
