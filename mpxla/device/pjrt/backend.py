"""The backend on any PJRT plugin of jax's: CPU, CUDA, TPU, Neuron.

Users see ordinary tensors of PyTorch, on the processor or on a CUDA device of the same memory;
programs take and give jax's arrays.
"""

import collections
import functools
import itertools
import re
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import torch
from torch import fx

from mpxla.comm.host import HostTransport
from mpxla.comm.transport import Groups
from mpxla.comm.xla_queue import Runner
from mpxla.device.alone import Alone
from mpxla.device.backend import Lowering
from mpxla.device.fused import FusedExecutable, fuse
from mpxla.device.pjrt.arrays import (
    Device,
    ImportCache,
    copy_to_device,
    host_copies,
    host_view,
    is_array_of,
    shared_tensors,
)
from mpxla.device.pjrt.cache import program_key, read_program, write_program
from mpxla.device.pjrt.collectives import COLLECTIVES, WorldRunner
from mpxla.device.pjrt.donation import SparingExecutable
from mpxla.device.pjrt.dtypes import jax_dtype, torch_dtype
from mpxla.device.pjrt.executable import PjrtExecutable, compile_flat
from mpxla.device.pjrt.graphs import is_known, unknown_nodes
from mpxla.device.pjrt.lowering import make_lowering
from mpxla.device.pjrt.memory import counters, explained
from mpxla.device.views import assign, num_holders
from mpxla.env import read_environment, set_variables
from mpxla.errors import ConfigError, MpxlaError
from mpxla.graph.collectives import is_collective
from mpxla.graph.fingerprint import described
from mpxla.kept import Kept, kind_of_processor
from mpxla.log import get_logger
from mpxla.stage.pieces import Piece, annotate, split_graph
from mpxla.stage.piecewise import PiecewiseExecutable, in_pieces, kinds
from mpxla.stage.spec import TensorSpec

__all__ = ["PjrtBackend"]

_KEY_KINDS = {"neuron": "rbg", "axon": "rbg"}
"""Generators that plugins want in place of threefry."""

_NUM_WATCHED = 64
"""How many calls `wait` looks back. Programs of one device end in order, give or take a few."""


_WAITED = "the results of a program that had been started were waited for"

_NUM_ZEROS = 64
"""Programs that make zeros for the gradients of a stage, of which there are few."""


class PjrtBackend(Alone):
    """Compiles and runs programs by jax.

    Args:
        platform: jax's name of the platform, `cpu` or `cuda` for instance; None: jax's choice. Of
            accelerators it is the one of the process's local rank, or the only one that it sees.
        key_kind: jax's name of the random generator; None: what the plugin wants.

    Raises:
        MpxlaError: jax has no such platform here, or not as many devices.
    """

    name = "pjrt"
    has_doubles = True
    donates = True

    def __init__(self, platform: str | None = None, key_kind: str | None = None):
        self._device = _find_device(platform)
        self.is_host = self._device.platform == "cpu"
        # The libraries that multiply there, YNN and oneDNN, write their kernels at the first call.
        self.builds_late = self.is_host
        is_cuda = self._device.platform in ("gpu", "cuda") and torch.cuda.is_available()
        index = self._device.local_hardware_id or 0
        self.device = torch.device("cuda", index) if is_cuda else torch.device("cpu")
        _warn_of_the_processor(self._device)
        self._key_kind = key_kind or _KEY_KINDS.get(self._device.platform, "threefry2x32")
        memory = {"cpu": "cpu", "gpu": "cuda", "cuda": "cuda"}.get(self._device.platform)
        self._shares_memory = self.device.type == memory
        self._imports = ImportCache(self._device, self._shares_memory)
        self._started: collections.deque[weakref.ref[jax.Array]] = collections.deque(
            maxlen=_NUM_WATCHED
        )
        self._kept = Kept()
        self._zeros_program = functools.lru_cache(_NUM_ZEROS)(self._compile_zeros)

    @property
    def _spares(self) -> bool:
        """Whether donated programs get copies of what tensors share memory with, see `donation`."""
        return self._shares_memory and not self.is_host

    @functools.cached_property
    def lowering(self) -> Lowering:
        """How stages are lowered for jax."""
        return make_lowering(self.is_host)

    @property
    def num_compilations(self) -> int:
        """Programs that this process has compiled, or found on disk, so far."""
        return PjrtExecutable.num_compilations

    @property
    def machine(self) -> str:
        """The kind of processor, or jax's names of the platform and of the device's model."""
        device = self._device
        if device.platform == "cpu":
            return kind_of_processor()
        return re.sub(r"\W+", "-", f"{device.platform} {device.device_kind}").lower()

    def keep_programs(self, kept: Kept) -> bool:
        """Keeps compiled programs on disk, see `cache.py`."""
        self._kept = kept
        return True

    def compile(
        self,
        name: str,
        graph: fx.GraphModule,
        inputs: Sequence[TensorSpec],
        donated: Collection[int] = (),
        groups: Groups | None = None,
    ) -> PjrtExecutable | SparingExecutable | PiecewiseExecutable | FusedExecutable:
        """Compiles a graph; see `Backend.compile`.

        Operators that jax has no function for, and PyTorch does not write with others, run on the
        host if PyTorch has a kernel there. Collectives run between pieces, or as part of a program
        where the transport runs programs.
        """
        annotate(graph, inputs)
        unknown = unknown_nodes(graph.graph)
        if not unknown:
            return self._compile(name, graph, inputs, donated)
        if all(map(is_collective, unknown)):
            fused = fuse(name, graph, inputs, groups or {}, COLLECTIVES, self.put)
            if fused is not None:
                return fused
        lacking = "it has no jax function, PyTorch does not write it with other operators, and "
        plan = split_graph(graph, kinds(name, lambda node: is_known(node.target), lacking))
        taken = plan.donated(donated)

        def compile_piece(title: str, number: int, piece: Piece) -> Any:
            return self._compile(title, piece.module, piece.input_specs, taken[number])

        put_own = functools.partial(self.put, owned=True)
        return in_pieces(name, plan, compile_piece, groups or {}, self.view, self.put, put_own)

    def _compile(
        self,
        name: str,
        module: fx.GraphModule,
        inputs: Sequence[TensorSpec],
        donated: Collection[int],
    ) -> PjrtExecutable | SparingExecutable:
        where = (self._key_kind, self._device, self._started, self._kept)
        program = compile_flat(name, module, inputs, donated, *where)
        if not donated or not self._spares:
            return program
        return SparingExecutable(program, donated, self._imports, self._device)

    def _compile_zeros(self, specs: tuple[TensorSpec, ...]) -> Callable[[], Sequence[jax.Array]]:
        there = jax.sharding.SingleDeviceSharding(self._device)

        def program() -> list[jax.Array]:
            return [jnp.zeros(spec.shape, jax_dtype(spec.dtype)) for spec in specs]

        def compile_() -> jax.stages.Compiled:
            return jax.jit(program, out_shardings=there).lower().compile()

        PjrtExecutable.num_compilations += 1
        device = self._device
        key = program_key(device, "zeros", described(specs)) if self._kept else None
        return self._kept.recall(key, compile_, write_program, lambda v: read_program(v, device))

    def put(self, tensors: Sequence[Any], owned: bool = False) -> list[jax.Array]:
        """Host tensors as arrays, with memory of their own if others have them; arrays stay."""
        with explained("tensors were copied to it", self._device):
            return [
                v if isinstance(v, jax.Array) else copy_to_device(v, self._device, owned)
                for v in tensors
            ]

    def zeros(self, specs: Sequence[TensorSpec]) -> list[jax.Array]:
        """New arrays, by one program; tensors of PyTorch would not be donated."""
        return list(self._zeros_program(tuple(specs))()) if specs else []

    def get(self, buffers: Sequence[Any]) -> list[torch.Tensor]:
        """Waits; copies on the host, of arrays and of users' tensors."""
        with explained(_WAITED, self._device):
            copies = iter(host_copies([b for b in buffers if isinstance(b, jax.Array)]))
        return [
            next(copies) if isinstance(b, jax.Array) else b.detach().cpu().clone() for b in buffers
        ]

    def view(self, buffer: Any) -> torch.Tensor:
        """Waits; a host tensor for reading only, which may share memory."""
        if not isinstance(buffer, jax.Array):
            return buffer.detach().cpu()
        with explained(_WAITED, self._device):
            return host_view(buffer)

    def is_ready(self, buffer: Any) -> bool:
        """Whether an array is computed; a tensor of the host's is."""
        if not isinstance(buffer, jax.Array):
            return buffer.device.type == "cpu"
        array: Any = buffer  # `is_ready` is missing in jax's type of arrays
        return array.is_ready()

    def adopt(
        self, tensors: Sequence[Any], held: Sequence[jax.Array | None] = ()
    ) -> list[jax.Array]:
        """The user's tensors as arguments, sharing memory where that is possible."""
        array_of = self._imports.array_of
        found: list[jax.Array] = []
        for value, array in itertools.zip_longest(tensors, held if self._shares_memory else ()):
            if array is None or not is_array_of(array, value):
                array = array_of(value) if isinstance(value, torch.Tensor) else value
            found.append(array)
        return found

    def forget(self, tensors: Iterable[torch.Tensor]) -> None:
        """Refers to tensors no longer: weak references forbid to swap them."""
        self._imports.forget(tensors)

    def publish(self, buffers: Sequence[jax.Array], is_held: bool = False) -> list[torch.Tensor]:
        """Waits; buffers as tensors that users see, sharing memory where that is possible."""
        found = self._shared(buffers)
        if is_held and self.is_host:  # elsewhere, programs ask what tensors share memory with
            return found
        for tensor, buffer in zip(found, buffers, strict=True):
            if tensor is not buffer:
                self._imports.remember(tensor, buffer)
        return found

    def assign(self, tensors: Sequence[torch.Tensor], buffers: Sequence[jax.Array]) -> None:
        """Waits; what `adopt` gives for tensors without views are these buffers then."""
        seen = [self.has_views(tensor) for tensor in tensors]
        if any(seen):
            self.wait()  # programs may read the memory that is written to
        values = self._shared(buffers)
        for tensor, buffer, value, is_seen in zip(tensors, buffers, values, seen, strict=True):
            if assign(tensor, value, is_seen) and value is not buffer:
                self._imports.remember(tensor, buffer)

    def has_views(self, tensor: torch.Tensor) -> bool:
        """Whether something beside the tensor, and an array of it, refers to its memory."""
        count = num_holders(tensor)
        return count > 1 and count > 1 + self._imports.is_lent(tensor)

    def _shared(self, buffers: Sequence[Any]) -> list[torch.Tensor]:
        """Waits; arrays as tensors, and tensors as they are."""
        arrays = [buffer for buffer in buffers if not isinstance(buffer, torch.Tensor)]
        with explained(_WAITED, self._device):
            made = iter(shared_tensors(arrays, self.device, self._device.platform))
        found = [b if isinstance(b, torch.Tensor) else next(made) for b in buffers]
        if self._spares:
            for tensor, buffer in zip(found, buffers, strict=True):
                if tensor is not buffer:
                    self._imports.show(buffer, tensor)
        return found

    def spec(self, buffer: Any) -> TensorSpec:
        """Shape and dtype of a buffer."""
        if isinstance(buffer, torch.Tensor):
            return TensorSpec.of(buffer)
        return TensorSpec(tuple(buffer.shape), torch_dtype(buffer.dtype))

    def is_on_device(self, tensor: Any) -> bool:
        """Whether a value is an array, or a tensor of the device's own memory."""
        return isinstance(tensor, jax.Array) or tensor.device == self.device

    def wait(self) -> None:
        """Waits until everything that was started has ended."""
        while self._started:
            array = self._started.popleft()()
            if array is not None and not array.is_deleted():
                with explained(_WAITED, self._device):
                    array.block_until_ready()

    def memory_counters(self) -> dict[str, int] | None:
        """Bytes that the device counts (`bytes_used`, `bytes_limit`, ...); None if it does not."""
        return counters(self._device)

    def open_runner(self, host: HostTransport, address: str) -> Runner:
        """Executes programs between CPU processes, on devices beside this one."""
        if self._device.platform != "cpu":
            raise ConfigError(
                f'transport: "xla" runs on CPU processes with the backend "pjrt", and its device '
                f'is {self._device}. Set transport: "host".'
            )
        return WorldRunner(host, address)

    def tell_rank(self, *_: Any) -> Callable[[], None]:
        """Libraries take the rank from the launcher's variables then."""
        return _without_torch_xla()

    def join_world(self, *_: Any) -> Callable[[], None]:
        """Nothing to do for torch.distributed, which knows the users' tensors."""
        return _without_torch_xla()


def _without_torch_xla() -> Callable[[], None]:
    """Keeps transformers and accelerate from using torch_xla where it is installed too.

    Else transformers' `is_main_process` asks torch_xla for the rank, which is 0 everywhere.

    Returns:
        A function that undoes it.
    """
    before = set_variables({"USE_TORCH_XLA": "0"})

    def undo() -> None:
        set_variables(before)

    return undo


def _named_platforms() -> str | None:
    """What JAX_PLATFORMS says, or the script has told jax."""
    return cast(Any, jax.config).jax_platforms


def _warn_of_the_processor(device: Device) -> None:
    """Training on it by mistake would be slow, and right."""
    is_chosen = device.platform != "cpu" or bool(_named_platforms())
    if not is_chosen and read_environment().asks_for_cuda:
        get_logger().warning(
            "a CUDA device is asked for (PJRT_DEVICE, or an installed plugin of jax's), and jax "
            "finds none: this process runs on the CPU. Install mpxla with the extra `cuda13` or "
            "`cuda12`, or set JAX_PLATFORMS=cpu."
        )


def _find_device(platform: str | None) -> Device:
    if platform is not None:
        jax.config.update("jax_platforms", platform)
    try:
        devices = jax.local_devices()
    except (RuntimeError, AssertionError) as error:  # without a plugin jax fails an assertion
        wanted = platform or _named_platforms() or "at all"
        remedies = {
            "cuda": "Install mpxla with the extra `cuda13` or `cuda12`",
            "neuron": "Install mpxla with the extra `neuron`",
            "tpu": "Install jax[tpu]",
        }
        reason = f": {error}" if str(error) else ""
        remedy = remedies.get(wanted, "Name a platform that jax has a plugin for")
        raise MpxlaError(
            f"device: jax has no platform {wanted!r} on this machine{reason}. {remedy}, or choose "
            f"another device (JAX_PLATFORMS)."
        ) from error
    # Launchers may show each process one device, its own or one that several share.
    is_only = devices[0].platform == "cpu" or len(devices) == 1
    index = 0 if is_only else read_environment().local_rank
    if index >= len(devices):
        raise MpxlaError(
            f"device: this process would use {devices[0].platform} device {index} of its machine, "
            f"which has {len(devices)}. Start as many processes per machine as it has devices."
        )
    return devices[index]
