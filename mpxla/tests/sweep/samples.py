"""Inputs of torch's own operator tests, a few for each operator."""

import sys
import types
import unittest
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree

__all__ = ["Case", "cases_of", "operator_names"]

UNDEFINED = ("empty", "new_empty", "resize_")
"""Operators whose values are whatever memory holds."""

WITHOUT_DERIVATIVE = ("as_strided_scatter",)
"""PyTorch's derivative is that of something else: `mpxla/tests/stage/test_replacements.py`."""

NOT_FOR_THIS = ("jiterator", "sparse.", "to_sparse", "hash_tensor")
"""For CUDA only, about sparse tensors, or no function of values."""


@dataclass(frozen=True)
class Case:
    """One call of an operator.

    Attributes:
        operator: name in torch's list.
        number: which of the operator's samples it is.
        function: called with the sample's input, arguments and keywords.
        arguments: (input, arguments, keywords); tensors in them may require gradients.
        process: picks what is unique of a result (singular vectors, say, have any sign).
        is_defined: whether values can be compared at all.
    """

    operator: str
    number: int
    function: Callable[..., Any]
    arguments: tuple[Any, tuple[Any, ...], dict[str, Any]]
    process: Callable[[Any], Any]
    is_defined: bool


def _operators() -> dict[str, Any]:
    """torch's operator descriptions for float32, by name."""
    # torch's test helpers derive a class from this package's, which samples do not need.
    stand_in = types.ModuleType("expecttest")
    stand_in.TestCase = unittest.TestCase
    sys.modules.setdefault("expecttest", stand_in)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    return {
        op.full_name: op
        for op in op_db
        if torch.float32 in op.dtypes and not op.full_name.startswith(NOT_FOR_THIS)
    }


def operator_names() -> list[str]:
    """Names of the operators that take float32 on the host."""
    return sorted(_operators())


def cases_of(name: str, most: int) -> list[Case]:
    """Samples of one operator, the first ones and some from all over the list.

    Args:
        name: as `operator_names` gives it.
        most: how many.
    """
    operator = _operators()[name]
    is_trained = operator.supports_autograd and name not in WITHOUT_DERIVATIVE
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        samples = list(operator.sample_inputs("cpu", torch.float32, requires_grad=is_trained))
    samples = [sample for sample in samples if not _is_empty(sample)]
    steps = range(0, len(samples), max(1, len(samples) // most))
    return [
        Case(
            operator=name,
            number=number,
            function=operator.op,
            arguments=(samples[number].input, samples[number].args, samples[number].kwargs),
            process=samples[number].output_process_fn_grad,
            is_defined=not name.startswith(UNDEFINED),
        )
        for number in list(steps)[:most]
    ]


def _is_empty(sample: Any) -> bool:
    """Whether some tensor has no elements: such a thing is in no model, and crosses no border."""
    leaves = pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
    return any(isinstance(leaf, torch.Tensor) and not leaf.numel() for leaf in leaves)
