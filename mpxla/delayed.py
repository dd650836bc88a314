"""Models built without memory: what creates their tensors is recorded, and replayed where needed.

While recording, large tensors get no storage (device `meta`), and every operation that makes or
changes one goes on a list. A random one runs once on scratch memory and is dropped, so the
generators are afterwards where they would be anyhow, and the state they had before is kept. To
materialize a tensor, only the operations that lead to it run, each with its own random state: its
values are bitwise those of the model built in the ordinary way, whatever the modules' initializers
do and whichever rank replays which part.

    recording      w = empty(...)   w.uniform_()       b = empty(...)   b.uniform_()   w[0].zero_()
                   |                | state 7          |                | state 8      |
    w is needed    *                *                                                  *

Tensors up to `SMALL` elements are made at once; they cost nothing and may be read while the model
is built. This module must not know which rank needs what.
"""

import contextlib
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from mpxla.errors import MpxlaError

__all__ = [
    "SMALL",
    "accept_changes",
    "build_delayed",
    "convert_delayed",
    "delay_all_models",
    "forget",
    "is_delayed",
    "materialize",
]

SMALL = 2048
"""Most elements of a tensor that is made at once."""

_CPU = torch.device("cpu")
_META = torch.device("meta")
_is_meta = cast(Any, torch.Tensor.is_meta).__get__
aten = torch.ops.aten


@dataclass(frozen=True)
class _Operation:
    """One recorded call of an operator."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[Any, ...]
    reads: frozenset[int]
    writes: frozenset[int]
    random_state: torch.Tensor | None
    versions: tuple[tuple[torch.Tensor, int], ...]
    """Tensors with values among the arguments, and how often they had been changed."""


class _Recording:
    """Everything that was created in one block."""

    def __init__(self) -> None:
        self.operations: list[_Operation] = []
        self.writers: dict[int, list[int]] = {}
        self.parameters: list[tuple[nn.Parameter, int]] = []

    def knows(self, value: Any) -> bool:
        """Whether a value is a tensor whose creation was recorded."""
        return (
            isinstance(value, torch.Tensor)
            and value.device.type == "meta"
            and _storage_of(value) in self.writers
        )

    def add(self, operation: _Operation) -> None:
        for storage in operation.writes:
            self.writers.setdefault(storage, []).append(len(self.operations))
        self.operations.append(operation)

    def value(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor as a host tensor, by replaying what leads to it."""
        needed: set[int] = set()
        open_storages, seen = [_storage_of(tensor)], {_storage_of(tensor)}
        while open_storages:
            for number in self.writers.get(open_storages.pop(), ()):
                needed.add(number)
                more = self.operations[number].reads - seen
                seen |= more
                open_storages += more
        storages: dict[int, torch.UntypedStorage] = {}
        for number in sorted(needed):
            _replay(self.operations[number], storages)
        return _with_storage(tensor, storages)


def _storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]


def _with_storage(tensor: torch.Tensor, storages: dict[int, torch.UntypedStorage]) -> torch.Tensor:
    """The host tensor that a recorded one stands for: same view, real storage."""
    key = _storage_of(tensor)
    if key not in storages:
        storages[key] = torch.UntypedStorage(tensor.untyped_storage().nbytes())
    empty = torch.empty(0, dtype=tensor.dtype)
    with torch.no_grad():
        return empty.set_(storages[key], tensor.storage_offset(), tensor.size(), tensor.stride())


def _replay(operation: _Operation, storages: dict[int, torch.UntypedStorage]) -> None:
    for tensor, version in operation.versions:
        if tensor._version != version:
            raise MpxlaError(
                f"a tensor of shape {list(tensor.shape)} that {operation.function} used while the "
                f"model was built has changed since, so parameters cannot be initialized from it. "
                f"Do not change tensors that initialize others, or build the model without "
                f"smp.delay_param_initialization."
            )
    known = operation.reads | operation.writes

    def real(tensor: torch.Tensor) -> torch.Tensor:
        is_recorded = tensor.device.type == "meta" and _storage_of(tensor) in known
        return _with_storage(tensor, storages) if is_recorded else tensor

    given = operation.args, operation.kwargs
    args, kwargs = pytree.tree_map_only(torch.Tensor, real, given)
    with torch.no_grad():
        results = _run(operation.function, args, kwargs, operation.random_state)
        for recorded, result in zip(operation.outputs, results, strict=True):
            if not isinstance(recorded, torch.Tensor) or _storage_of(recorded) in storages:
                continue
            if (recorded.stride(), recorded.storage_offset()) == (result.stride(), 0):
                storages[_storage_of(recorded)] = result.untyped_storage()
            else:
                _with_storage(recorded, storages).copy_(result)


def _run(
    function: Any, args: Any, kwargs: dict[str, Any], random_state: torch.Tensor | None
) -> list[Any]:
    with torch.random.fork_rng(devices=(), enabled=random_state is not None):
        if random_state is not None:
            torch.set_rng_state(random_state)
            if kwargs.get("generator") is not None:
                kwargs = {**kwargs, "generator": torch.Generator().set_state(random_state)}
        return pytree.tree_leaves(function(*args, **kwargs))


class _Recorder(TorchDispatchMode):
    """Records instead of computing, for large tensors and what is made of them."""

    def __init__(self, recording: _Recording) -> None:
        super().__init__()
        self._recording = recording
        self._scratch = _Scratch()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        leaves = pytree.tree_leaves((args, kwargs))
        knows = self._recording.knows
        if not any(knows(leaf) for leaf in leaves):
            if not _is_large_factory(func, args, kwargs):
                return func(*args, **kwargs)
        elif self._needs_values(func, args, kwargs):
            args, kwargs = pytree.tree_map(
                lambda leaf: self._recording.value(leaf) if knows(leaf) else leaf, (args, kwargs)
            )
            return func(*args, **kwargs)
        return self._record(func, args, kwargs, leaves)

    def _needs_values(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether a result leaves the recording: a Python number, or a change of a real tensor."""
        returns = [str(r.type) for r in func._schema.returns]
        if returns and not any("Tensor" in kind for kind in returns):
            return True
        if func is aten._local_scalar_dense.default:
            return True
        written = _written(func, args, kwargs)
        return any(not self._recording.knows(t) for t in written)

    def _record(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], leaves: Sequence[Any]
    ) -> Any:
        knows = self._recording.knows
        _check_device(func, kwargs)
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        state = self._advance(func, args, kwargs) if is_random else None
        on_meta = pytree.tree_map(_as_meta, (tuple(args), kwargs))
        if "device" in kwargs or _is_factory(func):
            on_meta[1]["device"] = _META
        result = func(*on_meta[0], **on_meta[1])
        outputs = tuple(pytree.tree_leaves(result))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        reads = frozenset(_storage_of(t) for t in tensors if knows(t))
        writes = {_storage_of(t) for t in _written(func, args, kwargs)}
        is_view = not writes and any(
            isinstance(o, torch.Tensor) and _storage_of(o) in reads for o in outputs
        )
        if is_view:
            return result
        writes |= {_storage_of(o) for o in outputs if isinstance(o, torch.Tensor)}
        versions = tuple((t, t._version) for t in tensors if not knows(t))
        # Tensors of their own: a parameter may get other memory, `p.data = p.data.to(dtype)`.
        given_args, given_kwargs = pytree.tree_map(
            lambda leaf: leaf.detach() if knows(leaf) else leaf, (tuple(args), kwargs)
        )
        made = tuple(o.detach() if isinstance(o, torch.Tensor) else o for o in outputs)
        self._recording.add(
            _Operation(
                func, given_args, given_kwargs, made, reads, frozenset(writes), state, versions
            )
        )
        return result

    def _advance(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
        """Draws what a random operator draws, into scratch memory; returns the state before."""
        generator = kwargs.get("generator")
        state = torch.get_rng_state() if generator is None else generator.get_state()
        leaves, structure = pytree.tree_flatten((tuple(args), kwargs))
        for place, leaf in enumerate(leaves):
            if self._recording.knows(leaf):
                leaves[place] = self._scratch.zeros_like(leaf, place)
        real_args, real_kwargs = pytree.tree_unflatten(leaves, structure)
        func(*real_args, **real_kwargs)
        return state


class _LikeOrdinary(TorchFunctionMode):
    """Recorded tensors say that they are not on `meta`.

    `nn.init.trunc_normal_`, `orthogonal_`, `dirac_` and `sparse_` leave such tensors alone (torch
    2.13), so nothing would be recorded, and parameters would keep the values from before.
    """

    def __init__(self, recording: _Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _is_meta and self._recording.knows(args[0]):
            return False
        return func(*args, **(kwargs or {}))


class _Scratch:
    """Memory for draws that nobody reads: one piece per argument, used again.

    Pieces that are freed one after the other may stay with the process: malloc puts something small
    into each gap, and the next piece does not fit (seen with glibc: as much as the model).
    """

    def __init__(self) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}

    def zeros_like(self, tensor: torch.Tensor, place: int) -> torch.Tensor:
        """Zeros of the shape and strides of a tensor, valid until the place is used again."""
        shape, stride, dtype = tensor.shape, tensor.stride(), tensor.dtype
        on_meta = torch.empty_strided(shape, stride, dtype=dtype, device=_META)
        num_bytes = on_meta.untyped_storage().nbytes()
        storage = self._storages.pop(place, None)
        if storage is None or storage.nbytes() < num_bytes:
            storage = None  # freed before the next one is made
            storage = torch.UntypedStorage(num_bytes)
        self._storages[place] = storage
        return torch.empty(0, dtype=dtype).set_(storage, 0, shape, stride).zero_()


def _as_meta(value: Any) -> Any:
    is_host = isinstance(value, torch.Tensor) and value.device.type == "cpu"
    return value.to(_META) if is_host and value.dim() > 0 else value


def _is_factory(func: Any) -> bool:
    return any(argument.name == "device" for argument in func._schema.arguments)


def _is_large_factory(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call makes a large host tensor out of no tensor."""
    device = kwargs.get("device")
    if not _is_factory(func) or (device is not None and torch.device(device).type != "cpu"):
        return False
    if any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves((args, kwargs))):
        return False
    made = func(*args, **{**kwargs, "device": _META, "pin_memory": False})
    return isinstance(made, torch.Tensor) and made.numel() > SMALL


def _check_device(func: Any, kwargs: Mapping[str, Any]) -> None:
    device = kwargs.get("device")
    if device is not None and torch.device(device).type not in ("cpu", "meta"):
        raise MpxlaError(
            f"{func} would move a parameter to {device} while the model is built under "
            f"smp.delay_param_initialization. Build it on the host; smp moves it in the first step."
        )


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Tensors among the arguments that an operator changes."""
    found: list[Any] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            found += pytree.tree_leaves(value)
    return [value for value in found if isinstance(value, torch.Tensor)]


_recordings: list[_Recording] = []
_active: list[_Recording] = []
_is_everywhere = False


@contextlib.contextmanager
def build_delayed() -> Generator[None]:
    """Records the creation of large host tensors in the block; nested blocks are one."""
    if _active:
        yield
        return
    recording = _Recording()
    registered: list[nn.Parameter] = []

    def note(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and recording.knows(parameter):
            registered.append(parameter)

    noting = register_module_parameter_registration_hook(note)
    _active.append(recording)
    try:
        with noting, _Recorder(recording), _LikeOrdinary(recording):
            yield
    except MpxlaError:
        raise
    except (RuntimeError, TypeError) as error:
        if not any(word in str(error) for word in ("meta", "unallocated storage")):
            raise
        raise MpxlaError(
            f"values of a large tensor were read while the model was built under "
            f"smp.delay_param_initialization, where they are not there yet ({error}). Compute with "
            f"tensors, not with NumPy or lists, or build the model without the block."
        ) from error
    finally:
        _active.pop()
    recording.parameters = [(parameter, parameter._version) for parameter in registered]
    _recordings.append(recording)


def is_delayed(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one whose creation was recorded."""
    return any(recording.knows(tensor) for recording in _recordings)


def convert_delayed(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor without values in another type, which it gets with its values.

    Args:
        tensor: of the device `meta`; if its creation was not recorded, so is the result's not.
        dtype: of the result.
    """
    for recording in _recordings:
        if recording.knows(tensor):
            with _Recorder(recording):
                return tensor.detach().to(dtype)
    return tensor.detach().to(dtype)


def materialize(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The values of a tensor, on the host; what was not recorded is returned as it is.

    Args:
        name: of the parameter or buffer, for the texts.
        tensor: the parameter or buffer.

    Raises:
        MpxlaError: its values cannot be known.
    """
    if tensor.device.type != "meta":
        return tensor.detach()
    for recording in _recordings:
        if recording.knows(tensor):
            _check_unchanged(name, tensor, recording)
            value = recording.value(tensor)
            return value.clone() if value.untyped_storage().nbytes() > value.nbytes else value
    raise MpxlaError(
        f"{name} has no values: it was created on the device 'meta' outside "
        f"smp.delay_param_initialization. Build the model inside that block, or on the host."
    )


def _check_unchanged(name: str, tensor: torch.Tensor, recording: _Recording) -> None:
    for parameter, version in recording.parameters:
        if parameter is tensor and tensor._version != version:
            raise MpxlaError(
                f"{name} was changed after the block of smp.delay_param_initialization, where it "
                f"has no values yet, so the change is lost. Initialize the model inside the block, "
                f"or load a state dict into the smp.DistributedModel."
            )


def accept_changes() -> None:
    """Changes of recorded parameters until now are no error: their values come from elsewhere."""
    for recording in _recordings:
        recording.parameters = [(p, p._version) for p, _ in recording.parameters]


def forget(tensors: Iterable[torch.Tensor]) -> None:
    """Drops the recordings of these tensors."""
    listed = list(tensors)
    _recordings[:] = [r for r in _recordings if not any(r.knows(t) for t in listed)]


# --- the configuration key ------------------------------------------------------------------------


def delay_all_models(enabled: bool) -> None:
    """Whether every model that is built from now on is recorded, without a block.

    A module's constructor then runs in a block of its own, if it is the outermost one.
    """
    global _is_everywhere
    _is_everywhere = enabled
    if enabled:  # for good: Python does not forget that a class once had a `__new__`
        nn.Module.__new__ = _new_module  # type: ignore[method-assign, assignment]


def _new_module(cls: type[nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
    """Makes the constructor that Python calls next run in a block."""
    if _is_everywhere and not _active:
        original, is_own = cls.__init__, "__init__" in cls.__dict__

        def construct(self: nn.Module, *args: Any, **kwargs: Any) -> None:
            if is_own:
                cls.__init__ = original  # type: ignore[method-assign]
            else:
                del cls.__init__
            with build_delayed():
                original(self, *args, **kwargs)

        cls.__init__ = construct  # type: ignore[method-assign]
    return object.__new__(cls)
