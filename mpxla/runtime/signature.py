"""What makes two calls of a step function the same program.

A signature is the structure of the arguments, shape and dtype of every tensor for one microbatch,
the values of plain arguments, and the modes that change what the function does. The first pipeline
rank owns the inputs; it announces the signature, and the other ranks put their own objects
(modules, namespaces) in the places that cannot travel. All else travels as data (`comm.codec`).
This module must not know how a step is captured or run.
"""

import itertools
import numbers
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree

from mpxla.comm.codec import can_travel, register
from mpxla.comm.packing import describe
from mpxla.errors import RankMismatch
from mpxla.graph.capture.step import NumberLeaf, TensorLeaf
from mpxla.graph.casts import active_autocast
from mpxla.graph.containers import flatten_opened, open_containers
from mpxla.graph.python.counted import Count
from mpxla.graph.python.draws import Draw
from mpxla.graph.python.number import Number
from mpxla.runtime.identity import Identities
from mpxla.runtime.structure import describe_structure, rebuild_structure

__all__ = [
    "LocalObject",
    "PlainValue",
    "Signature",
    "changed_values",
    "describe_change",
    "fill",
    "local_objects",
    "portable",
    "received",
    "sign",
    "with_constants",
]

_PLAIN = (str, bytes, numbers.Number, type(None), Enum, np.generic, torch.dtype, torch.device)
register(TensorLeaf)
register(NumberLeaf)
register(Draw)


@register
@dataclass(frozen=True, eq=False)
class PlainValue:
    """An argument whose value is part of the program."""

    value: Any

    @property
    def _identity(self) -> tuple[type, str]:
        # 1, 1.0 and True are equal for Python and make different programs.
        return type(self.value), repr(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PlainValue) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    def __str__(self) -> str:
        return repr(self.value)


@register
@dataclass(frozen=True)
class LocalObject:
    """An argument that every rank replaces by its own: a module, a namespace, any other object.

    Attributes:
        path: where it is among the arguments.
        type_name: what it is, for the user.
        number: tells objects of that type apart, as the first pipeline rank numbers them.
    """

    path: str
    type_name: str
    number: int

    def __str__(self) -> str:
        return self.type_name


@register
@dataclass(frozen=True)
class Signature:
    """Everything that decides which program a call needs.

    Attributes:
        function: qualified name of the step function.
        structure: pytree structure of (args, kwargs).
        paths: readable path of every leaf.
        leaves: description of every leaf.
        num_microbatches: how many microbatches the call has.
        modes: digest of the train/eval flags of the model's modules.
        trainable: digest of the `requires_grad` flags of the model's parameters.
        grad_enabled: whether gradients are enabled around the call.
        autocast: (enabled, dtype) of the active autocast regions.
        default_dtype: of tensors that are made of Python's numbers.
        draws: random numbers that Python draws, which are inputs after those of the arguments.
        answers: what Python is told of values that depend on the model; None if it does not ask.
        counts: numbers outside of the arguments that the function changes, which are the last
            inputs.
    """

    function: str
    structure: Any
    paths: tuple[str, ...]
    leaves: tuple[TensorLeaf | PlainValue | LocalObject, ...]
    num_microbatches: int
    modes: str
    trainable: str
    grad_enabled: bool
    autocast: tuple[Any, ...]
    default_dtype: torch.dtype = torch.float32
    draws: tuple[Draw, ...] = ()
    answers: tuple[int, ...] | None = None
    counts: tuple[Count, ...] = ()

    @property
    def key(self) -> "Signature":
        """Hashable identity: structures can be compared by their texts, and decide the paths."""
        return replace(self, structure=str(self.structure), paths=())

    @property
    def use(self) -> Hashable:
        """The function and the objects that it is given: it may count in one model only."""
        return self.function, tuple(leaf for leaf in self.leaves if isinstance(leaf, LocalObject))

    @property
    def of_arguments(self) -> "Signature":
        """The same, whatever Python draws, counts and is told."""
        return replace(self, draws=(), answers=None, counts=())

    @property
    def tensor_paths(self) -> list[str]:
        """Readable path of every tensor leaf."""
        return [*self.argument_paths, *map(str, self.draws), *map(str, self.counts)]

    @property
    def argument_paths(self) -> list[str]:
        """Those of the arguments."""
        pairs = zip(self.paths, self.leaves, strict=True)
        return [path for path, leaf in pairs if isinstance(leaf, TensorLeaf)]

    @property
    def objects(self) -> list[int]:
        """Numbers of the objects that every rank replaces by its own."""
        return [leaf.number for leaf in self.leaves if isinstance(leaf, LocalObject)]

    @property
    def numbers(self) -> tuple[str, ...]:
        """Paths of the Python floats that are inputs of the program."""
        pairs = zip(self.paths, self.leaves, strict=True)
        return tuple(path for path, leaf in pairs if isinstance(leaf, NumberLeaf))

    @property
    def tensor_leaves(self) -> list[TensorLeaf]:
        """The tensor leaves, in order."""
        own = [leaf for leaf in self.leaves if isinstance(leaf, TensorLeaf)]
        own += [TensorLeaf(draw.shape, draw.dtype) for draw in self.draws]
        return [*own, *(TensorLeaf((), count.dtype) for count in self.counts)]


def sign(
    function: str,
    microbatches: Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]],
    flags: tuple[str, str],
    identities: Identities,
    inputs: Collection[str] = (),
) -> tuple[Signature, list[list[torch.Tensor]], dict[str, Any]]:
    """Describes a call.

    Args:
        function: name of the step function.
        microbatches: (args, kwargs) of every microbatch.
        flags: digests of the model's modes and of what is trained (`model_flags`).
        identities: numbers of the objects that earlier calls were given.
        inputs: paths of Python floats that are inputs of the program.

    Returns:
        (signature, tensor leaves of every microbatch, local objects by path).

    Raises:
        RankMismatch: microbatches of different structure (from a faulty `smp_slice`).
    """
    first, *others = microbatches
    with_paths, structure = pytree.tree_flatten_with_path(open_containers(tuple(first)))
    flat = [([value for _, value in with_paths], structure)]
    flat += [flatten_opened(tuple(mb)) for mb in others]
    paths = tuple(pytree.keystr(path) for path, _ in with_paths)
    objects: dict[str, Any] = {}
    leaves: list[TensorLeaf | PlainValue | LocalObject] = []
    for path, (_, value) in zip(paths, with_paths, strict=True):
        if isinstance(value, torch.Tensor):
            leaves.append(TensorLeaf(tuple(value.shape), value.dtype))
        elif isinstance(value, float) and path in inputs:
            leaves.append(NumberLeaf((), torch.float64, float(value)))
        elif _is_plain(value):
            leaves.append(PlainValue(value))
        else:
            objects[path] = value
            leaves.append(LocalObject(path, type(value).__name__, identities.number(value)))
    is_input = [isinstance(leaf, TensorLeaf) for leaf in leaves]
    tensors = [
        [_as_tensor(v) for v in itertools.compress(leaves_of_mb, is_input)]
        for leaves_of_mb, _ in flat
    ]
    _check_equal_parts(function, structure, flat, tensors)
    modes, trainable = flags
    signature = Signature(
        function=function,
        structure=structure,
        paths=paths,
        leaves=tuple(leaves),
        num_microbatches=len(microbatches),
        modes=modes,
        trainable=trainable,
        grad_enabled=torch.is_grad_enabled(),
        autocast=active_autocast(),
        default_dtype=torch.get_default_dtype(),
    )
    return signature, tensors, objects


def _as_tensor(value: Any) -> Any:
    """A Python float in the form of an input; all else as it is."""
    return torch.tensor(value, dtype=torch.float64) if isinstance(value, float) else value


def with_constants(
    signature: Signature, tensors: Sequence[Sequence[torch.Tensor]], paths: Collection[str]
) -> tuple[Signature, list[list[torch.Tensor]]]:
    """The same call with some of its floats as constants of the program.

    Args:
        signature: of the call.
        tensors: tensor leaves of every microbatch; none on later pipeline ranks.
        paths: of those floats.

    Returns:
        Signature and tensor leaves of the call.
    """
    leaves = tuple(
        PlainValue(leaf.value) if isinstance(leaf, NumberLeaf) and path in paths else leaf
        for path, leaf in zip(signature.paths, signature.leaves, strict=True)
    )
    is_kept = [path not in paths for path in signature.tensor_paths]
    kept = [list(itertools.compress(leaves_of_mb, is_kept)) for leaves_of_mb in tensors]
    return replace(signature, leaves=leaves), kept


def _check_equal_parts(function: str, structure: Any, flat: Any, tensors: Any) -> None:
    for index, (_, other) in enumerate(flat):
        shapes = [(t.shape, t.dtype) for t in tensors[index]]
        if other != structure or shapes != [(t.shape, t.dtype) for t in tensors[0]]:
            raise RankMismatch(
                f"{function}: microbatch {index} differs from microbatch 0 in structure, shape or "
                f"dtype. smp_slice has to return equally shaped parts for every microbatch."
            )


def local_objects(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Objects among a rank's own arguments, by path, for the places of `LocalObject` leaves."""
    tree = open_containers((tuple(args), dict(kwargs)))
    with_paths, _ = pytree.tree_flatten_with_path(tree)
    return {
        pytree.keystr(path): value
        for path, value in with_paths
        if not (isinstance(value, torch.Tensor) or _is_plain(value))
    }


def _is_plain(value: Any) -> bool:
    """Whether a value is part of the program, and can be told to the other ranks."""
    return isinstance(value, _PLAIN) and can_travel(value)


def portable(signature: Signature) -> Signature:
    """The signature as it travels: its structure is data."""
    return replace(signature, structure=describe_structure(signature.structure))


def received(signature: Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Signature:
    """The inverse of `portable`, on a rank that was called with its own arguments.

    Raises:
        RankMismatch: the arguments have a container that this rank does not know.
    """
    own = pytree.tree_structure(open_containers((tuple(args), dict(kwargs))))
    return replace(signature, structure=rebuild_structure(signature.structure, own))


def fill(
    signature: Signature, tensors: Sequence[torch.Tensor], objects: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of the function, with these tensors in the places of the tensor leaves.

    Raises:
        RankMismatch: this rank's call has no object where the first pipeline rank's has one.
    """
    remaining = iter(tensors)
    values: list[Any] = []
    for leaf in signature.leaves:
        if isinstance(leaf, NumberLeaf):
            values.append(Number(next(remaining)))
        elif isinstance(leaf, TensorLeaf):
            values.append(next(remaining))
        elif isinstance(leaf, PlainValue):
            values.append(leaf.value)
        elif leaf.path in objects:
            values.append(objects[leaf.path])
        else:
            raise RankMismatch(
                f"{signature.function}: pp_rank 0 passes a {leaf.type_name} at {leaf.path}, and "
                f"this rank passes none there. Call the step function with the same arguments on "
                f"all ranks (tensors may be dummies on pipeline ranks above 0)."
            )
    args, kwargs = pytree.tree_unflatten(values, signature.structure)
    return tuple(args), dict(kwargs)


def describe_change(new: Signature, known: Sequence[Signature]) -> str:
    """Why a call needs a new program: what differs from the most similar known signature."""
    same = [old for old in known if old.function == new.function]
    if not same:
        return "first call"
    return min((_differences(new, old) for old in same), key=len)[0]


def _differences(new: Signature, old: Signature) -> list[str]:
    changes: list[str] = []
    if str(new.structure) != str(old.structure):
        changes.append("the structure of the arguments changed")
    else:
        for path, a, b in zip(new.paths, old.leaves, new.leaves, strict=True):
            if a != b:
                changes.append(f"argument {path} changed from {_text(a)} to {_text(b)}")
    for name in ("num_microbatches", "grad_enabled", "autocast", "default_dtype"):
        a, b = getattr(old, name), getattr(new, name)
        if a != b:
            changes.append(f"{name} changed from {a} to {b}")
    if new.answers != old.answers:
        changes.append("values that depend on the model decide in Python")
    if new.modes != old.modes:
        changes.append("the train/eval mode of the model changed")
    if new.trainable != old.trainable:
        changes.append("requires_grad of the model's parameters changed")
    return [" and ".join(changes), *changes]


def changed_values(new: Signature, old: Signature) -> list[tuple[str, Any, Any]]:
    """(path, old leaf, new leaf) of arguments without tensors that differ, of one function.

    Empty where the structure of the arguments differs too.
    """
    if new.function != old.function or str(new.structure) != str(old.structure):
        return []
    return [
        (path, a, b)
        for path, a, b in zip(new.paths, old.leaves, new.leaves, strict=True)
        if a != b and type(a) is not TensorLeaf and type(b) is not TensorLeaf
    ]


def _text(leaf: TensorLeaf | PlainValue | LocalObject) -> str:
    if isinstance(leaf, NumberLeaf):
        return "a float that is an input"
    if isinstance(leaf, TensorLeaf):
        return describe([leaf])
    return str(leaf)
