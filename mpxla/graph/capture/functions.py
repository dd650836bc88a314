"""torch functions that look at values, or compile, written so that a step can be captured.

While a step is captured, each stands for the function of torch that it is named after. The checks
of values that torch makes on the way are left out: there are no values yet.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from mpxla.errors import CaptureError
from mpxla.graph.python.number import holds_objects, is_number
from mpxla.graph.user_code import at_user_line
from mpxla.log import warn_once

__all__ = [
    "CAPTURED_FUNCTIONS",
    "without_generator",
]


def without_generator(function: Callable[..., Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keywords without a `torch.Generator`, whose state a compiled step cannot follow."""
    if not isinstance(kwargs.get("generator"), torch.Generator):
        return kwargs
    name = getattr(function, "__name__", str(function))
    warn_once(
        f"generator of {name}",
        f"{name}(generator=...) in a step function{at_user_line()} draws from the step's own "
        f"random numbers, which torch.manual_seed() decides: a compiled step cannot read or "
        f"advance a torch.Generator. Draw outside of the step and pass the tensor in to keep them.",
    )
    return {key: value for key, value in kwargs.items() if key != "generator"}


def _gaussian_nll_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    var: torch.Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> torch.Tensor:
    """`torch.nn.functional.gaussian_nll_loss`; negative variances count as `eps`."""
    if not isinstance(var, torch.Tensor):
        var = torch.full_like(input, var)
    if var.dim() == input.dim() - 1 and var.shape == input.shape[:-1]:
        var = var.unsqueeze(-1)
    var = var + (var.clamp_min(eps) - var).detach()  # its gradient is not clamped, as in torch
    losses = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    if full:
        losses = losses + 0.5 * math.log(2 * math.pi)
    return {"none": losses.clone, "mean": losses.mean, "sum": losses.sum}[reduction]()


def _quantile(
    input: torch.Tensor,
    q: float | torch.Tensor,
    dim: int | None = None,
    keepdim: bool = False,
    *,
    interpolation: str = "linear",
    ignores_nan: bool = False,
) -> torch.Tensor:
    """`torch.quantile` and `torch.nanquantile`."""
    levels = q if isinstance(q, torch.Tensor) else torch.tensor(q, dtype=input.dtype)
    rows = input.flatten() if dim is None else input.movedim(dim, -1)
    ordered = rows.sort(-1).values  # not-a-numbers at the end
    counts = (~rows.isnan()).sum(-1, keepdim=True)
    last = (counts - 1).clamp_min(0) if ignores_nan else torch.full_like(counts, rows.shape[-1] - 1)
    places = levels.reshape(-1) * last.to(input.dtype)  # [..., levels]
    if not ignores_nan:
        places = torch.where(counts <= last, last.to(input.dtype), places)
    below = {"higher": places.ceil, "nearest": places.round}.get(interpolation, places.floor)()
    values = ordered.gather(-1, below.long())
    if interpolation in ("linear", "midpoint"):
        share = (places - below) if interpolation == "linear" else torch.full_like(places, 0.5)
        above = ordered.gather(-1, places.ceil().long())
        values = torch.lerp(values, above, share)
    values = values.movedim(-1, 0)  # [levels, ...]
    if keepdim and dim is None:
        values = values.unflatten(0, (values.shape[0], *(1,) * input.dim()))
    elif keepdim and dim is not None:
        values = values.unsqueeze(-1).movedim(-1, dim % input.dim() + 1)
    return values if levels.dim() else values.squeeze(0)


def _random_(input: torch.Tensor, *bounds: int | None, **named: int | None) -> torch.Tensor:
    """`Tensor.random_`. With two bounds its operator is named `from`, which no graph can write."""
    if len(bounds) + len(named) < 2 and "from" not in named:
        return input.random_(*bounds, **named)
    low, high = (*bounds, None, None)[:2]
    low, high = named.get("from", low), named.get("to", high)
    assert low is not None, "torch wants a number"
    if high is None:  # the largest integer of the type, or up to which it has all
        kind = input.dtype
        high = int(2 / torch.finfo(kind).eps) if kind.is_floating_point else torch.iinfo(kind).max
        high = min(high + 1, torch.iinfo(torch.int64).max)
    if low >= high:
        raise CaptureError(
            f"random_({low}, {high}){at_user_line()} has no number to draw: the first bound must "
            f"be smaller than the second."
        )
    return input.copy_(torch.randint(low, high, input.shape, device=input.device))


def _cov(
    input: torch.Tensor,
    *,
    correction: int = 1,
    fweights: torch.Tensor | None = None,
    aweights: torch.Tensor | None = None,
) -> torch.Tensor:
    """`torch.cov`; a norm that is not positive counts as zero."""
    rows = input.reshape(1, -1) if input.dim() < 2 else input
    given = [weights for weights in (fweights, aweights) if weights is not None]
    weights = given[0] if len(given) == 1 else given[0] * given[1] if given else None
    weighted = rows if weights is None else rows * weights
    total = torch.tensor(rows.shape[1]) if weights is None else weights.sum()
    centered = rows - (weighted.sum(1) / total).unsqueeze(1)
    norm = total - correction
    if aweights is not None and weights is not None and correction:
        norm = total - correction * (weights * aweights).sum() / total
    second = centered if weights is None else centered * weights
    return (centered @ second.mT.conj() / norm.clamp_min(0)).squeeze()


def _corrcoef(input: torch.Tensor) -> torch.Tensor:
    """`torch.corrcoef`."""
    found = _cov(input)
    if not found.dim():
        return found / found
    deviations = found.diag().real.sqrt() if found.is_complex() else found.diag().sqrt()
    found = found / deviations[:, None] / deviations
    if found.is_complex():
        return torch.complex(found.real.clamp(-1, 1), found.imag.clamp(-1, 1))
    return found.clamp(-1, 1)


def _with_lengths(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A CTC loss that takes lengths as numbers too, with which its operator tells no shape."""
    names = "input_lengths", "target_lengths"

    def tensor(lengths: torch.Tensor | Sequence[int]) -> torch.Tensor:
        return lengths if isinstance(lengths, torch.Tensor) else torch.tensor(list(lengths))

    def call(*args: Any, **named: Any) -> torch.Tensor:
        places = (tensor(v) if i in (2, 3) else v for i, v in enumerate(args))
        named = {name: tensor(v) if name in names else v for name, v in named.items()}
        return function(*places, **named)

    return call


def _of_rows(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A loss of classes. Of rows that a mask chooses, each one's loss loses its shape when torch
    traces it again (2.9 - 2.13); not so with a dim more.
    """

    def call(input: torch.Tensor, target: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
        is_each = "none" in (named.get("reduction"), *args[4:5])
        if is_each and input.dim() == 2 and isinstance(input.shape[0], torch.SymInt):
            return function(input[..., None], target[..., None], *args, **named)[..., 0]
        return function(input, target, *args, **named)

    return call


def _of_data(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`torch.tensor` or `torch.as_tensor`; a list may hold values that nobody knows yet. A number
    is filled in, so that the graph shows it, and not a constant tensor.
    """

    def call(data: Any, dtype: torch.dtype | None = None, *args: Any, **named: Any) -> torch.Tensor:
        if type(data) in (bool, int, float) and not args and named.keys() <= {"device"}:
            return torch.full((), data, dtype=dtype, **named)
        if holds_objects(data):
            data = data.tolist()
        if isinstance(data, torch.Tensor) or not any(map(_has_no_value, tree_leaves(data))):
            return function(data, *args, dtype=dtype, **named)
        stacked = _stacked(data)
        return stacked if dtype is None else stacked.to(dtype)

    return call


def _new_tensor(
    tensor: torch.Tensor, data: Any, dtype: torch.dtype | None = None, **named: Any
) -> torch.Tensor:
    if holds_objects(data):
        data = data.tolist()
    if not any(map(_has_no_value, tree_leaves(data))):
        return tensor.new_tensor(data, dtype=dtype, **named)
    return _stacked(data).to(dtype or tensor.dtype)


def _istft(
    input: torch.Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: torch.Tensor | None = None,
    center: bool = True,
    normalized: bool = False,
    onesided: bool | None = None,
    length: int | None = None,
    return_complex: bool = False,
) -> torch.Tensor:
    """`torch.istft`, without its check that windows overlap everywhere."""
    width = win_length or n_fft
    hop = hop_length or n_fft // 4
    kind = input.dtype if return_complex else input.real.dtype
    window = torch.ones(width, dtype=kind) if window is None else window.to(kind)
    before = (n_fft - width) // 2
    window = F.pad(window, (before, n_fft - width - before))
    *batch, bins, count = input.shape
    frames = input.reshape(-1, bins, count).mT  # [B, frames, bins]
    norm = "ortho" if normalized else None
    if return_complex:
        waves = torch.fft.ifft(frames, n_fft, norm=norm)
    elif bins == n_fft and onesided is not True and bins != n_fft // 2 + 1:
        waves = torch.fft.irfft(frames[..., : n_fft // 2 + 1], n_fft, norm=norm)
    else:
        waves = torch.fft.irfft(frames, n_fft, norm=norm)
    total = n_fft + hop * (count - 1)
    places = (torch.arange(count)[:, None] * hop + torch.arange(n_fft)).flatten()

    def added(values: torch.Tensor) -> torch.Tensor:
        values = values.reshape(-1, count * n_fft)
        return values.new_zeros((values.shape[0], total)).index_add(1, places, values)

    start = n_fft // 2 if center else 0
    end = start + length if length is not None else total - start if center else total
    weight = added((window * window).expand(count, n_fft))
    found = added(waves * window)[:, start:end] / weight[:, start:end]
    return F.pad(found, (0, max(0, end - total))).reshape(*batch, -1)


def _has_no_value(value: Any) -> bool:
    return is_number(value) or isinstance(value, FakeTensor)


def _stacked(data: Any) -> torch.Tensor:
    if isinstance(data, (list, tuple)):
        parts = [_stacked(value) for value in data]
        dtype = functools.reduce(torch.promote_types, (part.dtype for part in parts))
        return torch.stack([part.to(dtype) for part in parts])
    if is_number(data):  # in 64 bits
        value = data.tensor
        return value.to(torch.get_default_dtype()) if value.is_floating_point() else value
    return torch.as_tensor(data).detach()


def _pooled(
    function: Callable[..., Any], reduced: Callable[..., Any], is_adaptive: bool
) -> Callable[..., Any]:
    """A layer that pools windows of the last dim. Torch knows none of unknown size."""

    def call(input: torch.Tensor, *args: Any, **named: Any) -> Any:
        size = args[0] if args else named.get("kernel_size", named.get("output_size"))
        (size,) = size if isinstance(size, (list, tuple)) else (size,)
        last = input.shape[-1]
        is_whole = size == 1 if is_adaptive else _expr(size) == _expr(last)
        others = [*args[1:], *map(named.get, ("padding", "return_indices"))]
        if not isinstance(last, torch.SymInt) or any(others) or not is_whole:
            return function(input, *args, **named)
        return reduced(input, -1, True)

    return call


def _largest(*args: Any) -> torch.Tensor:
    return torch.max(*args)[0]


def _expr(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


def _where(condition: torch.Tensor, *others: Any, **kwargs: Any) -> Any:
    """With a mask alone its places, which torch's exporter cannot have of rows that are chosen."""
    if others or kwargs or not condition.dim():
        return torch.where(condition, *others, **kwargs)
    return condition.nonzero().unbind(1)


_where.__name__ = "where"  # by which its results are known where the mask is


def _full(full: Callable[..., Any], empty: Callable[..., Any], place: int) -> Callable[..., Any]:
    """A function that fills tensors, also with numbers that were read, or that tensors hold."""

    def filled(*args: Any, **kwargs: Any) -> Any:
        value: Any = kwargs["fill_value"] if "fill_value" in kwargs else [*args, 0, 0][place]
        if is_number(value):
            value = value.tensor
        elif not isinstance(value, torch.Tensor) or value.dim() or value.requires_grad:
            return full(*args, **kwargs)  # which refuses other tensors
        others = {key: other for key, other in kwargs.items() if key != "fill_value"}
        if full is torch.full and others.get("dtype") is None:
            is_float, is_other = value.is_floating_point(), value.is_complex()
            whole = value.dtype if is_other or value.dtype == torch.bool else torch.int64
            others["dtype"] = torch.get_default_dtype() if is_float else whole
        return empty(*args[:place], **others).fill_(value)

    return filled


def _as_column(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:, None] if tensor.dim() == 1 else tensor


def _stack(
    function: Callable[..., torch.Tensor], at_least: Callable[[torch.Tensor], Any], dim: int
) -> Callable[..., torch.Tensor]:
    """A function such as `torch.hstack`, by `torch.cat`."""

    def stack(tensors: Sequence[torch.Tensor], **out: torch.Tensor) -> torch.Tensor:
        if out:
            return function(tensors, **out)
        parts = [at_least(tensor) for tensor in tensors]
        return torch.cat(parts, min(dim, parts[0].dim() - 1))

    return stack


def _broadcast_tensors(*tensors: Any) -> tuple[torch.Tensor, ...]:
    """`torch.broadcast_tensors`, of which export makes one operator of all tensors: not views,
    and with gradients (zeros) to those whose results nobody uses.
    """
    given = tensors[0] if isinstance(tensors[0], (list, tuple)) else tensors
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in given))
    return tuple(tensor.expand(shape) for tensor in given)


CAPTURED_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    # Of rows that masks choose, only `cat` is known.
    **dict.fromkeys((torch.concat, torch.concatenate), torch.cat),
    **{f: _stack(f, torch.atleast_2d, 0) for f in (torch.vstack, torch.row_stack)},
    torch.hstack: _stack(torch.hstack, torch.atleast_1d, 1),
    torch.dstack: _stack(torch.dstack, torch.atleast_3d, 2),
    torch.column_stack: _stack(torch.column_stack, _as_column, 1),
    torch.broadcast_tensors: _broadcast_tensors,
    torch.scalar_tensor: _of_data(torch.scalar_tensor),
    torch.full: _full(torch.full, torch.empty, 1),
    torch.full_like: _full(torch.full_like, torch.empty_like, 1),
    torch.Tensor.new_full: _full(torch.Tensor.new_full, torch.Tensor.new_empty, 2),
    torch.tensor: _of_data(torch.tensor),
    torch.as_tensor: _of_data(torch.as_tensor),
    torch.Tensor.new_tensor: _new_tensor,
    torch.cov: _cov,
    torch.Tensor.cov: _cov,
    torch.corrcoef: _corrcoef,
    torch.Tensor.corrcoef: _corrcoef,
    torch.ctc_loss: _with_lengths(torch.ctc_loss),
    F.ctc_loss: _with_lengths(F.ctc_loss),
    F.cross_entropy: _of_rows(F.cross_entropy),
    F.nll_loss: _of_rows(F.nll_loss),
    torch.istft: _istft,
    torch.Tensor.istft: _istft,
    F.adaptive_avg_pool1d: _pooled(F.adaptive_avg_pool1d, torch.mean, True),
    F.avg_pool1d: _pooled(F.avg_pool1d, torch.mean, False),
    F.adaptive_max_pool1d: _pooled(F.adaptive_max_pool1d, _largest, True),
    F.max_pool1d: _pooled(F.max_pool1d, _largest, False),
    torch.Tensor.random_: _random_,
    F.gaussian_nll_loss: _gaussian_nll_loss,
    torch.where: _where,
    torch.quantile: _quantile,
    torch.Tensor.quantile: _quantile,
    torch.nanquantile: functools.partial(_quantile, ignores_nan=True),
    torch.Tensor.nanquantile: functools.partial(_quantile, ignores_nan=True),
}
"""What is called in the place of a function while a step is captured."""
