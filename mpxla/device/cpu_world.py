"""A world of CPU processes whose XLA programs reach each other, by jaxlib's CPU client.

The device of a process knows no other process on CPU. jaxlib can make a second client that does,
with gloo inside XLA. Programs with collectives run there: operands go device -> host -> that client
-> host, on the CPU without copies where memory can be shared.

A rank may come to a communication long after another (it compiles), but XLA's gloo gives up after
half a minute and cannot be interrupted. So the members first meet on the host transport, where a
wait ends by the news of a failure only, and compare what they came to do.

This file must not know what programs are for, nor how they are made.
"""

import importlib
from typing import Any, NamedTuple

from mpxla.comm.addresses import reserved_port
from mpxla.comm.codec import DATA
from mpxla.comm.host import HostTransport
from mpxla.comm.objects import Objects
from mpxla.comm.transport import Group
from mpxla.device.relay import Relay
from mpxla.errors import MpxlaError, RankMismatch

__all__ = ["CpuWorld"]

_START_S = 60
_END_S = 5
# The lifeline watches over the processes; the client's own watch would end them.
_NEVER_S = 10**8


class CpuWorld:
    """The clients of all processes, connected; what both backends' runners have in common.

    Attributes:
        jax: the parts of jax that are used.
        devices: those of the world, by rank.
        device: this process's.
        loads_alone: programs are compiled for this process, and members meet before they run.
    """

    loads_alone = True

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
        self._meetings = Objects(host, DATA._replace(channel="xla"))
        self._service: Any = None
        self.jax, problem = _import_jax()
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
        self._meetings.post(text, others, what)
        for rank in others:
            other = self._meetings.take(rank, what)
            if other != text:
                raise RankMismatch(
                    f"rank {self._host.rank} {purpose}, but rank {rank} came to {other}. Run the "
                    f"same script with the same model and arguments on all ranks."
                )

    def close(self) -> None:
        """Disconnects the clients. After the last execution, on every rank."""
        del self.client, self.device, self.devices
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
        jax, rank = self.jax, self._host.rank
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
        self.client = jax.client.make_cpu_client(
            asynchronous=True,
            distributed_client=self._connection,
            node_id=rank,
            num_nodes=self._host.world_size,
            num_devices=1,
            collectives=jax.xla.make_gloo_tcp_collectives(self._connection, hostname=address),
        )
        self.devices = {device.process_index: device for device in self.client.devices()}
        self.device = self.devices[rank]

    def _meet_at_the_end(self) -> None:
        """Rank 0 serves until all others have disconnected."""
        self._host.barrier(self._world).result(_END_S)


class _Jax(NamedTuple):
    """What is used of jax."""

    xla: Any
    client: Any
    make_ir_context: Any


def _import_jax() -> tuple[Any, str | None]:
    """The parts of jax, or why there are none."""
    try:
        return _Jax(
            importlib.import_module("jaxlib._jax"),
            importlib.import_module("jaxlib.xla_client"),
            importlib.import_module("jax.interpreters.mlir").make_ir_context,
        ), None
    except (ImportError, AttributeError) as error:
        return None, str(error)
