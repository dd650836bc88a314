"""Calls of single operators, recorded while torch's operator samples and derivatives run."""

import contextlib
import itertools
import sys
import types
import unittest
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from mpxla.device.pjrt.graphs import is_known

__all__ = ["Call", "operator_samples", "record"]


@dataclass(frozen=True)
class Call:
    """One call of an operator that programs may have, and what PyTorch gave.

    Attributes:
        operator: the overload.
        source: the sample in which it was called.
        arguments: (arguments, keywords), with tensors as they were before the call.
        expected: its result.
    """

    operator: OpOverload
    source: str
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    expected: Any


class _Recorder(TorchDispatchMode):
    def __init__(self, most: int):
        super().__init__()
        self.most = most
        self.source = ""
        self.calls: dict[OpOverload, list[Call]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        is_functional = is_known(func) and not func._schema.is_mutable
        calls = self.calls.setdefault(func, []) if is_functional else None
        if calls is None or len(calls) >= self.most:
            return func(*args, **kwargs)
        before = _copied((args, kwargs))
        result = func(*args, **kwargs)
        calls.append(Call(func, self.source, before, _copied(result)))
        return result


def _copied(values: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone(), values)


def _operators() -> Iterable[Any]:
    # torch's test helpers derive a class from this package's, which samples do not need.
    stand_in = types.ModuleType("expecttest")
    stand_in.TestCase = unittest.TestCase
    sys.modules.setdefault("expecttest", stand_in)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    return [op for op in op_db if not op.full_name.startswith(("sparse.", "jiterator"))]


def operator_samples(
    dtype: torch.dtype, most: int, names: Iterable[str] = ()
) -> Iterator[tuple[Any, Any, str]]:
    """(description, sample, title) of torch's operators, `most` each."""
    wanted = set(names)
    for op in _operators():
        if dtype in op.dtypes and (not wanted or op.full_name in wanted):
            trained = op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
            torch.manual_seed(0)
            with contextlib.suppress(Exception), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                samples = op.sample_inputs("cpu", dtype, requires_grad=trained)
                for i, sample in enumerate(itertools.islice(samples, most)):
                    yield op, sample, f"{op.full_name} {i}, {dtype}"


def record(
    dtype: torch.dtype, most_samples: int, most_calls: int, names: Iterable[str] = ()
) -> dict[OpOverload, list[Call]]:
    """Runs samples and their derivatives; gives calls by operator."""
    recorder = _Recorder(most_calls)
    for op, sample, title in operator_samples(dtype, most_samples, names):
        recorder.source = title
        # Samples that PyTorch itself refuses, or whose derivative it lacks, say nothing.
        with contextlib.suppress(Exception), warnings.catch_warnings(), recorder:
            warnings.simplefilter("ignore")
            found = op.op(sample.input, *sample.args, **sample.kwargs)
            results = [r for r in pytree.tree_leaves(found) if isinstance(r, torch.Tensor)]
            ends = [r for r in results if r.requires_grad]
            leaves = pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
            trained = [t for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad]
            if ends and trained:
                slopes = [torch.full_like(end, 0.75) for end in ends]
                torch.autograd.grad(ends, trained, slopes, allow_unused=True)
    return recorder.calls
