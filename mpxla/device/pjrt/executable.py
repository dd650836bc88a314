"""Programs of XLA: an ATen graph compiled ahead of time by jax, and called with arrays.

A call costs the host some 3 us per buffer; results are arrays that are still being computed. What
the graph hands on as it came is not part of the program: as a result of it, it would be a copy.
"""

import collections
import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import jax
import numpy as np
import torch
from torch import fx

from mpxla.device.pjrt.arrays import Device
from mpxla.device.pjrt.blas import prefers_blas, use_blas
from mpxla.device.pjrt.cache import program_key, read_program, write_program
from mpxla.device.pjrt.compiling import compile_lowered, told
from mpxla.device.pjrt.dtypes import jax_dtype
from mpxla.device.pjrt.graphs import as_function, is_random_graph
from mpxla.device.pjrt.memory import explained
from mpxla.errors import LoweringError, MpxlaError
from mpxla.graph.fingerprint import UnknownValueError, fingerprint
from mpxla.graph.typed import computed_results, outputs_of
from mpxla.kept import Kept
from mpxla.stage.spec import TensorSpec

Started = collections.deque[weakref.ref[jax.Array]]

__all__ = ["PjrtExecutable", "compile_flat"]


class PjrtExecutable:
    """A compiled program.

    Args:
        name: for messages.
        call: the program, or None where there is nothing to compute.
        results: see `computed_results`.
        is_random: whether it takes a seed as well.
        device: where it runs.
        started: takes a weak reference to one result of every call, for `PjrtBackend.wait`.
    """

    num_compilations: ClassVar[int] = 0

    def __init__(
        self,
        name: str,
        call: Callable[..., Sequence[jax.Array]] | None,
        results: Sequence[int | tuple[int]],
        is_random: bool,
        device: Device,
        started: Started,
    ):
        self._device = device
        self._started = started
        self.name = name
        self.is_random = is_random
        self._call = call
        self._results = tuple(results)
        self._is_plain = self._results == tuple(range(len(self._results)))

    def __call__(
        self, arguments: Sequence[jax.Array], seed: jax.Array | None = None
    ) -> list[jax.Array]:
        """Starts the program; returns its results at once, as arrays still being computed."""
        computed: Sequence[jax.Array] = ()
        if self._call is not None:
            given = (seed, *arguments) if self.is_random else arguments
            try:
                computed = self._call(*given)
            except jax.errors.JaxRuntimeError:
                with explained(f"{self.name} was started", self._device, self._call):
                    raise
        if computed:
            self._started.append(weakref.ref(computed[-1]))
        if self._is_plain:
            return list(computed)
        return [computed[r] if isinstance(r, int) else arguments[r[0]] for r in self._results]


def compile_flat(
    name: str,
    module: fx.GraphModule,
    inputs: Sequence[TensorSpec],
    donated: Collection[int],
    key_kind: str,
    device: Device,
    started: Started,
    kept: Kept,
) -> PjrtExecutable:
    """Compiles a flat graph, or finds its program on disk.

    Args:
        name: for messages.
        module: every node knows its value (`meta["val"]`).
        inputs: specs of its arguments.
        donated: arguments whose memory the results may take.
        key_kind: jax's name of the random generator, `threefry2x32` or `rbg`.
        device: where it runs.
        started: see `PjrtExecutable`.
        kept: programs of earlier starts.

    Raises:
        LoweringError: an operator has no jax function, or XLA refuses the program.
        MpxlaError: the device's memory is full.
    """
    nodes, results = computed_results(module.graph)
    place = {node: i for i, node in enumerate(outputs_of(module.graph))}
    wanted = [place[node] for node in nodes]
    is_random = is_random_graph(module.graph)
    if not wanted:
        return PjrtExecutable(name, None, results, False, device, started)
    if device.platform == "cpu" and prefers_blas():
        use_blas(module)
    kinds = [(s.shape, jax_dtype(s.dtype)) for s in inputs]
    if is_random:
        kinds.insert(0, ((), np.dtype(np.int64)))
    passed_on = {i for r in results if not isinstance(r, int) for i in r}
    donors = tuple(i + is_random for i in sorted(donated) if i not in passed_on)

    def compile_() -> jax.stages.Compiled:
        program = _program(name, module, wanted, key_kind if is_random else None)
        there = jax.sharding.SingleDeviceSharding(device)
        specs = [jax.ShapeDtypeStruct(shape, dtype, sharding=there) for shape, dtype in kinds]
        try:
            lowered = jax.jit(program, donate_argnums=donors, keep_unused=True).lower(*specs)
            with explained(f"{name} was compiled", device):
                return compile_lowered(lowered, device.platform)
        except MpxlaError:
            raise
        except Exception as error:  # XLA raises anything
            raise LoweringError(
                f"{name} cannot be compiled by XLA: {type(error).__name__}: {error}"
            ) from error

    with _products_as_torch(device.platform):
        settings = repr((kinds, donors, wanted, key_kind))
        key = _key(module, settings, device) if kept else None
        compiled = kept.recall(key, compile_, write_program, lambda v: read_program(v, device))
    PjrtExecutable.num_compilations += 1
    return PjrtExecutable(name, compiled, results, is_random, device, started)


def _key(module: fx.GraphModule, settings: str, device: Device) -> str | None:
    """What the program is kept by; None if the graph computes with something unknown."""
    try:
        graph = fingerprint(module.graph, module)
        return program_key(device, graph, settings, told(device.platform))
    except UnknownValueError:
        return None


def _program(
    name: str, module: fx.GraphModule, wanted: Sequence[int], key_kind: str | None
) -> Callable[..., list[Any]]:
    """The wanted results as a function of arrays; a random one takes a seed first."""
    function = as_function(name, module)

    def program(*arrays: Any) -> list[Any]:
        if key_kind is None:
            found = function(None, arrays)
        else:
            found = function(jax.random.key(arrays[0], impl=key_kind), arrays[1:])
        return [found[i] for i in wanted]

    return program


def _products_as_torch(platform: str) -> AbstractContextManager[Any]:
    """Products of float32 as exact as `torch.set_float32_matmul_precision` says.

    By default accelerators round the operands, to TF32 or bfloat16, and PyTorch does not.
    """
    if platform == "cpu":
        return nullcontext()
    precision = {"highest": "highest", "high": "high", "medium": "default"}
    return jax.default_matmul_precision(precision[torch.get_float32_matmul_precision()])
