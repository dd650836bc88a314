"""Parts of torch that are exchanged for others for as long as a step is captured.

They cannot be captured: they compile, read numbers in Python, or torch's modes do not see them.
`functions.py` has what is called in the place of functions that the modes see.
"""

import contextlib
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._export import non_strict_utils
from torch._higher_order_ops.flex_attention import math_attention
from torch.nn.attention import flex_attention

from mpxla.errors import CaptureError
from mpxla.graph.exchanged import exchanged
from mpxla.graph.python.number import extreme_number, is_number
from mpxla.graph.user_code import at_user_line

__all__ = [
    "checks_decide",
    "extremes_captured",
    "flexible_attention_by_scores",
    "functions_exchanged",
    "torchs_recurrences",
]


def _cumulative_batch_norms() -> AbstractContextManager[None]:
    """`BatchNorm(momentum=None)`: torch reads the number of batches so far as a Python number."""
    kind: Any = nn.modules.batchnorm._BatchNorm  # pyright: ignore[reportPrivateUsage]
    original = kind.forward

    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        is_cumulative = self.momentum is None and self.training and self.track_running_stats
        if not is_cumulative or self.num_batches_tracked is None:
            return original(self, input)
        self._check_input_dim(input)
        self.num_batches_tracked.add_(1)
        dims = [d for d in range(input.dim()) if d != 1]
        batch = input.detach()
        found = (batch.mean(dims), batch.var(dims))
        for running, new in zip((self.running_mean, self.running_var), found, strict=True):
            running.copy_(running + (new - running) / self.num_batches_tracked)
        return F.batch_norm(input, None, None, self.weight, self.bias, True, 0.0, self.eps)

    return exchanged(kind, forward=forward)


def extremes_captured(number_of: Callable[[Any], Any]) -> AbstractContextManager[None]:
    """`max(lengths)` and `max(count.item(), 1)`, of Python: export's own knows other cases.

    `number_of` gives numbers that are read in the place of symbols.
    """
    of_export = non_strict_utils._tensor_min_max  # pyright: ignore[reportPrivateUsage]

    def extreme(*args: Any, real_callable: Any, tensor_callable: Any, **named: Any) -> Any:
        is_max = tensor_callable is torch.maximum
        if len(args) == 1 and isinstance(args[0], torch.Tensor):
            (values,) = args
            if values.dim() == 1 and not named:
                return values.max() if is_max else values.min()
            args = (values.unbind(),)
        if named:  # not by export's, so that torch's code does not ask in the name of the user's
            return real_callable(*args, **named)
        if len(args) > 2:
            args = (args,)
        is_float = any(isinstance(value, torch.SymFloat) for value in args)
        if len(args) == 2 and (is_float or any(map(is_number, args))):
            args = tuple(map(number_of, args))
            found = extreme_number(real_callable, is_max, *args)
            return real_callable(*args) if found is NotImplemented else found
        return of_export(*args, real_callable=real_callable, tensor_callable=tensor_callable)

    return exchanged(non_strict_utils, _tensor_min_max=extreme)


def _nested_tensors_refused() -> AbstractContextManager[None]:
    """Makes nested tensors an error.

    Raises:
        CaptureError: one was made.
    """

    def refusing() -> Callable[..., Any]:
        def refuse(*_: Any, **__: Any) -> Any:
            raise CaptureError(
                f"A nested tensor is made in a step function{at_user_line()}, and a step is "
                f"compiled for tensors of one shape. Pad the rows by "
                f"torch.nn.utils.rnn.pad_sequence, and give attention a mask; or make one long row "
                f"of all by torch.cat."
            )

        return refuse

    # Functions of their own: torch has rules by function, of which each has one name.
    return exchanged(torch.nested, **{name: refusing() for name in _MAKE_NESTED})


_MAKE_NESTED = ("as_nested_tensor", "narrow", "nested_tensor", "nested_tensor_from_jagged")


@contextlib.contextmanager
def checks_decide() -> Generator[None]:
    """Makes `torch._check` and its kin of a number that was read an `assert` of it.

    transformers compares numbers of tokens and of features by them, in models of images and texts.
    `torch.distributions` does not look at the values of its arguments, by which it would branch,
    unless the user gives `validate_args=True`.
    """
    original = torch._check_with  # pyright: ignore[reportPrivateUsage]

    def check_with(error_type: Any, cond: Any, message: Any) -> None:
        original(error_type, bool(cond) if is_number(cond) else cond, message)

    unchecked = exchanged(torch.distributions.Distribution, _validate_args=False)
    with unchecked, exchanged(torch, _check_with=check_with):
        yield


def _tensors_set() -> AbstractContextManager[None]:
    """`tensor.set_(source)` is `tensor.data = source`, which torch's modes see.

    They do not see it itself. `torch.nn.utils.parametrize` sets a parameter to itself with it.
    """
    kind: Any = torch.Tensor
    original = torch.Tensor.set_

    def set_(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs or len(args) != 1 or not isinstance(args[0], torch.Tensor):
            return original(tensor, *args, **kwargs)
        (tensor.data,) = args
        return tensor

    return exchanged(kind, set_=set_)


_COMPILING = (
    "_temp_remove_metadata_torch_function_mode",
    "_temp_remove_pre_dispatch_torch_function_mode",
    "setup_compilation_env",
)
"""What `flex_attention` compiles in, in torch 2.9 and in 2.13."""


def flexible_attention_by_scores() -> AbstractContextManager[None]:
    """`flex_attention` computes all scores by plain operators, as it does when it is not compiled.

    Else it compiles its own operator, whose functions cannot be captured, and takes export's modes
    away for that; `torch.vmap` would leave its values in the graph.
    """
    kept = {name: contextlib.nullcontext for name in _COMPILING if hasattr(flex_attention, name)}
    return exchanged(
        flex_attention,
        _FLEX_ATTENTION_DISABLE_COMPILE_DEBUG=True,
        flex_attention_hop=math_attention,
        _validate_device=lambda *_: None,  # torch 2.13 has no derivative on the host
        **kept,
    )


def torchs_recurrences() -> AbstractContextManager[None]:
    """`nn.GRU` runs torch's own code.

    torch_xla exchanges that class when it is imported (2.9) for one whose loop is its own operator,
    which cannot be captured.
    """
    original = getattr(nn.GRU, "_orig", nn.GRU)
    return exchanged(nn.GRU, forward=original.forward)


@contextlib.contextmanager
def functions_exchanged() -> Generator[None]:
    """Functions and layers of torch that a capture cannot follow are others for a while."""
    with (
        torchs_recurrences(),
        flexible_attention_by_scores(),
        _cumulative_batch_norms(),
        _nested_tensors_refused(),
        _tensors_set(),
    ):
        yield
