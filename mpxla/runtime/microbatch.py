"""Splitting the arguments of a step call into microbatches.

Containers are walked, tensors are cut along their batch axis, objects with `smp_slice` are asked;
all else is passed whole, tensors without dims too. Source of the rules: SMP API reference,
`smp.step` and "smp_slice"; also `client_behaviours` such as dictionaries that only behave like one.
This module must not know about stages or ranks.
"""

import functools
import inspect
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.utils._pytree as pytree
from torch import nn

from mpxla.errors import StepError
from mpxla.graph.capture.sparse import Sparse, with_sparse_opened
from mpxla.graph.containers import open_object
from mpxla.log import warn_once

__all__ = ["SplitRule", "split_arguments"]

_PLAIN = (str, bytes, bool, int, float, complex, type(None), nn.Module, Namespace, torch.dtype)


@dataclass(frozen=True)
class SplitRule:
    """How the arguments of one step function are split; options refer to its parameters by name.

    The batch axis of those that are not named is 0.
    """

    function: Callable[..., Any]
    non_split_inputs: frozenset[str]
    input_split_axes: Mapping[str, int]

    @functools.cached_property
    def signature(self) -> inspect.Signature:
        """Of the function; finding it takes long for a call that comes with every step."""
        return inspect.signature(self.function)

    @classmethod
    def of(
        cls,
        function: Callable[..., Any],
        non_split_inputs: Sequence[str] | None,
        input_split_axes: Mapping[str, int] | None,
    ) -> "SplitRule":
        """Checks the options against the function's signature.

        Raises:
            StepError: an option names something that is not a parameter of the function.
        """
        whole, axes = frozenset(non_split_inputs or ()), dict(input_split_axes or {})
        parameters = inspect.signature(function).parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        unknown = sorted((whole | set(axes)) - set(parameters))
        if unknown and not takes_any:
            raise StepError(
                f"smp.step: {', '.join(unknown)} in non_split_inputs or input_split_axes is not a "
                f"parameter of {function.__qualname__}; its parameters are "
                f"{', '.join(parameters)}."
            )
        return cls(function, whole, axes)


def split_arguments(
    rule: SplitRule, args: Sequence[Any], kwargs: Mapping[str, Any], num_microbatches: int
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Cuts one call's arguments into the arguments of each microbatch.

    Raises:
        StepError: a tensor's batch axis is missing or does not divide, or the arguments do not fit
            the function.
    """
    positional, named = with_sparse_opened(_name_arguments(rule, args, kwargs))
    parts = [_Splitter(rule, num_microbatches, index) for index in range(num_microbatches)]
    return [
        (
            tuple(part.argument(name, value) for name, value in positional),
            {key: part.argument(key, value) for key, value in named.items()},
        )
        for part in parts
    ]


def num_samples(rule: SplitRule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    """Samples of a call's batch: the batch axis of its first tensor; None without one."""
    positional, named = _name_arguments(rule, args, kwargs)
    for name, value in (*positional, *named.items()):
        leaves = pytree.tree_leaves(value)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()]
        if tensors and name not in rule.non_split_inputs:
            return tensors[0].shape[rule.input_split_axes.get(name, 0)]
    return None


def _name_arguments(
    rule: SplitRule, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[tuple[str, Any]], dict[str, Any]]:
    """The parameter name of every positional argument, and the keyword arguments."""
    try:
        rule.signature.bind(*args, **kwargs)
    except TypeError as error:
        raise StepError(f"{rule.function.__qualname__}: {error}.") from error
    names: list[str] = []
    for parameter in rule.signature.parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            names += [parameter.name] * (len(args) - len(names))
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
    return list(zip(names, args, strict=False)), dict(kwargs)


@dataclass(frozen=True)
class _Splitter:
    """Takes microbatch `index` of `count` out of any argument."""

    rule: SplitRule
    count: int
    index: int

    def argument(self, name: str, value: Any) -> Any:
        if name in self.rule.non_split_inputs:
            return value
        return self._part(value, self.rule.input_split_axes.get(name, 0), name)

    def _part(self, value: Any, axis: int, path: str) -> Any:
        if type(value) is Sparse:
            return self._sparse(value, path)
        if isinstance(value, torch.Tensor):
            _warn_about_gradient(value, path)
            return self._tensor(value, axis, path)
        if hasattr(value, "smp_slice"):
            return open_object(value.smp_slice(self.count, self.index, axis))
        if isinstance(value, Mapping):
            items = {k: self._part(v, axis, f"{path}[{k!r}]") for k, v in value.items()}
            return items if isinstance(value, dict) and type(value) is dict else _same(value, items)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            fields = cast(Any, value)._fields
            return type(value)(
                *(self._part(v, axis, f"{path}.{fields[i]}") for i, v in enumerate(value))
            )
        if isinstance(value, (list, tuple)):
            return type(value)(self._part(v, axis, f"{path}[{i}]") for i, v in enumerate(value))
        if isinstance(value, (set, frozenset)):
            return type(value)(self._part(v, axis, f"{path}[...]") for v in value)
        _warn_about(value, path)
        return value

    def _tensor(self, value: torch.Tensor, axis: int, path: str) -> torch.Tensor:
        if value.dim() == 0:
            return value.detach()  # a weight or a temperature: there is nothing to split
        if value.is_nested:
            raise StepError(
                f"{path}: a nested tensor; a step is compiled for tensors of one shape. Pass "
                f"{path}.to_padded_tensor(0.0), and a mask or the lengths of its rows."
            )
        if not -value.dim() <= axis < value.dim():
            raise StepError(
                f"{path}: a tensor of shape {list(value.shape)} has no axis {axis} to split into "
                f"{self.count} microbatches. Name it in non_split_inputs of smp.step, or give its "
                f"batch axis in input_split_axes."
            )
        size = value.shape[axis]
        if size % self.count:
            raise StepError(
                f"{path}: a batch of {size} samples (axis {axis} of shape {list(value.shape)}) "
                f"does not divide into {self.count} microbatches. Use a batch size that is a "
                f"multiple of {self.count} and drop_last=True in the loader, or name the tensor in "
                f"non_split_inputs of smp.step."
            )
        step = size // self.count
        return value.detach().narrow(axis, self.index * step, step)

    def _sparse(self, value: Sparse, path: str) -> Sparse:
        if self.count == 1:
            return value
        raise StepError(
            f"{path}: a sparse tensor of shape {list(value.shape)} does not divide into "
            f"{self.count} microbatches, which would have other numbers of elements. Name it in "
            f"non_split_inputs of smp.step, or set microbatches to 1."
        )


def _same(value: Any, items: dict[Any, Any]) -> Any:
    """`items` in a mapping of the type of `value` (a tokenizer's output, an ordered dict)."""
    try:
        return type(value)(items)
    except TypeError:
        return items


def _warn_about_gradient(value: torch.Tensor, path: str) -> None:
    if value.requires_grad and torch.is_grad_enabled():
        warn_once(
            f"gradient of {path}",
            f"{path} requires a gradient, which a step does not compute: nothing flows back to "
            f"what made it. Put that into the model, or pass {path}.detach().",
        )


def _warn_about(value: Any, path: str) -> None:
    """Warns of an object that may hold a part of the batch, which nobody splits.

    Optimizers, scalers and settings are handed to step functions by every example of SMP.
    """
    if isinstance(value, _PLAIN) or callable(value) or isinstance(value, torch.optim.Optimizer):
        return
    if _holds_batches(vars(value) if hasattr(value, "__dict__") else ()):
        warn_once(
            f"unsplit argument {path} {type(value).__name__}",
            f"{path} of type {type(value).__name__} is passed whole to every microbatch. Give the "
            f"class a method smp_slice(num_mb, mb, axis) if it has to be split.",
        )


def _holds_batches(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_batches, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_holds_batches, value))
    return isinstance(value, torch.Tensor) and value.dim() > 0
