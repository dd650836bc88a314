"""Recurrent layers and packed sequences while a step is captured.

PyTorch packs a padded batch into rows without padding, as many as the lengths say. Here these are
the rows that the mask `step < length` chooses of the padded batch, time by time, in PyTorch's order
(`chosen/values.py` says how rows are chosen that values decide). So lengths may be others in every
microbatch. A recurrent layer puts the rows back in their places, and runs with the mask.

    pack     rows [T, B, ...] -> data = rows[mask], batch_sizes = mask.sum(1)[mask.any(1)]
    layers   data -> rows, layer after layer, direction by direction -> data
    pad      data -> rows; of its steps those of the longest sequence, unless all are asked for

This module must not know how a step is traced.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils.weak import WeakTensorKeyDictionary

from mpxla.errors import CaptureError
from mpxla.graph.chosen.values import mark_of
from mpxla.graph.recurrent import KINDS, LAYER, unrolled
from mpxla.graph.user_code import at_user_line

__all__ = ["Recurrences"]

_LAYERS = {getattr(torch, kind): kind for kind in KINDS}
_LARGEST = (torch.max, torch.Tensor.max, torch.amax, torch.Tensor.amax)
_pack: Any = torch._pack_padded_sequence  # pyright: ignore[reportPrivateUsage]
_pad: Any = torch._pad_packed_sequence  # pyright: ignore[reportPrivateUsage]


class _Longest(int):
    """The number of steps of the longest sequence, which is unknown.

    PyTorch asks whether it is larger than the number that the user wants.
    """

    def __gt__(self, other: Any) -> bool:
        return False


class _Packed(NamedTuple):
    """How sequences were packed.

    Attributes:
        mask: bool [T, B], where there are steps.
        steps: bool [T], where the longest sequence has them.
        is_right: bool [], whether the lengths are those of sequences with so many steps; where
            PyTorch raises, values become NaN.
    """

    mask: torch.Tensor
    steps: torch.Tensor
    is_right: torch.Tensor


def _marked(value: torch.Tensor, is_right: torch.Tensor) -> torch.Tensor:
    """A value, unless something is wrong: NaN then, or a place beyond all tables."""
    if value.dtype is torch.bool:
        return value
    return value.masked_fill(~is_right, mark_of(value.dtype))


class Recurrences:
    """Follows the packed sequences of one step."""

    def __init__(self) -> None:
        self._packed: Any = WeakTensorKeyDictionary()
        """By the tensors that PyTorch calls batch sizes."""
        # What says how long sequences are -> their batch sizes, and its number of writes then; how
        # long the longest is -> the same batch sizes; lengths in order -> as the script has them.
        self._lengths: Any = WeakTensorKeyDictionary()
        self._longest: Any = WeakTensorKeyDictionary()
        self._unsorted: Any = WeakTensorKeyDictionary()

    def function(self, func: Any, args: Sequence[Any]) -> Callable[..., Any] | None:
        """What is called in the place of a function of torch with some arguments, if anything."""
        if func in _LAYERS and len(args) > 3:
            return self._packed_layers(func) if _is_packed(args) else _layers(func)
        if func is _pack or func is _pad:
            return self._pack if func is _pack else self._pad
        if func is torch.arange and any(map(self._is_longest, args)):
            return lambda *ends, **named: torch.arange(*map(self._as_number, ends), **named)
        value = args[0] if args else None
        if not isinstance(value, torch.Tensor):
            return None
        if value in self._packed:
            if func is torch.Tensor.__getitem__ and type(args[1]) is int and args[1] == 0:
                return self._all_sequences
            if func is torch.Tensor.size and args[1:] == (0,) and _is_called_by_torch():
                return lambda *_: _Longest()
        if func is torch.sort and _is_called_by_torch():
            return self._sort
        sizes = self._sizes_of(value)
        if sizes is not None:
            if func in _LARGEST and len(args) == 1:
                # A copy is not known to hold lengths.
                return lambda *_: self._is_of_longest(func(value.clone()), sizes)
            if func is torch.Tensor.__getitem__ and _is_called_by_torch():
                return lambda _, order: self._are_lengths(value[order], sizes)
        if func is torch.Tensor.item and self._is_longest(value):
            return self._as_number
        return None

    def _sizes_of(self, lengths: torch.Tensor) -> torch.Tensor | None:
        """The batch sizes of sequences with these lengths; None for what are none."""
        sizes, num_writes = self._lengths.get(lengths, (None, None))
        return sizes if sizes is not None and _num_writes(lengths) == num_writes else None

    def _are_lengths(self, lengths: torch.Tensor, sizes: Any) -> torch.Tensor:
        self._lengths[lengths] = sizes, _num_writes(lengths)
        return lengths

    def _is_of_longest(self, length: torch.Tensor, sizes: Any) -> torch.Tensor:
        self._longest[length] = sizes
        return length

    def _is_longest(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value in self._longest

    def _as_number(self, value: Any) -> Any:
        """The number of steps of the longest sequence; all else as it is."""
        return self._longest[value].shape[0] if self._is_longest(value) else value

    def _sort(self, lengths: torch.Tensor, **named: Any) -> Any:
        values, order = torch.sort(lengths, **named)
        self._unsorted[values] = lengths
        return values, order

    def _how(self, sizes: torch.Tensor) -> _Packed:
        """How the sequences with these batch sizes were packed."""
        if sizes not in self._packed:
            raise CaptureError(
                f"A packed sequence{at_user_line()} was not packed in the step function, or has "
                f"other batch_sizes than it was packed with. Pass the padded batch and its lengths "
                f"to the step function and call pack_padded_sequence there; hand batch_sizes on as "
                f"they are."
            )
        return self._packed[sizes]

    def _all_sequences(self, sizes: torch.Tensor, _: int) -> torch.Tensor:
        """The first of the batch sizes: all sequences have a first step."""
        return torch.full((), self._packed[sizes].mask.shape[1])

    def _pack(
        self, input: torch.Tensor, lengths: torch.Tensor, batch_first: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = input.transpose(0, 1) if batch_first else input
        mask = torch.arange(rows.shape[0])[:, None] < lengths
        # As a tensor: it may be a number that depends on values.
        num_steps = torch.full((), rows.shape[0])
        is_right = ((lengths > 0) & (lengths <= num_steps)).all()
        steps = mask.any(1)
        sizes = mask.sum(1)[steps]
        self._packed[sizes] = _Packed(mask, steps, is_right)
        for known in (lengths, self._unsorted.get(lengths, lengths)):
            self._are_lengths(known, sizes)
        return _marked(rows[mask], is_right), sizes

    def _pad(
        self,
        data: torch.Tensor,
        sizes: torch.Tensor,
        batch_first: bool,
        padding: float,
        num_steps: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        mask, steps, _ = self._how(sizes)
        rows = _rows_of(data, mask, padding)
        if isinstance(num_steps, (_Longest, torch.SymInt)):
            rows = rows[steps]
        elif num_steps > len(mask):
            more = rows.new_full((num_steps - len(mask), *rows.shape[1:]), padding)
            rows = torch.cat([rows, more])
        else:
            rows = _marked(rows[:num_steps], ~mask[num_steps:].any())
        lengths = self._are_lengths(mask.sum(0), sizes)
        return rows.transpose(0, 1) if batch_first else rows, lengths

    def _packed_layers(self, func: Any) -> Callable[..., Any]:
        def run(
            data: torch.Tensor, sizes: torch.Tensor, states: Any, *rest: Any
        ) -> tuple[torch.Tensor, ...]:
            mask, _, is_right = self._how(sizes)
            states = [states] if isinstance(states, torch.Tensor) else states
            states = [_marked(state, is_right) for state in states]
            rows = _rows_of(data, mask, 0)
            output, *last = _run_layers(_LAYERS[func], rows, mask, states, *rest)
            return output[mask], *last

        return run


def _rows_of(data: torch.Tensor, mask: torch.Tensor, padding: float) -> torch.Tensor:
    rows = torch.full((*mask.shape, *data.shape[1:]), padding, dtype=data.dtype)
    return torch.index_put(rows, (mask,), data)


def _num_writes(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _is_packed(args: Sequence[Any]) -> bool:
    """Whether a layer is given batch sizes before states and weights."""
    return not isinstance(args[3], bool)


def _is_called_by_torch() -> bool:
    # `function`, and `_meant` and `__torch_function__` of the mode are between.
    frame = sys._getframe(4)  # pyright: ignore[reportPrivateUsage]
    return frame.f_globals.get("__name__", "") == "torch.nn.utils.rnn"


def _layers(func: Any) -> Callable[..., Any]:
    def run(input: torch.Tensor, states: Any, *args: Any) -> tuple[torch.Tensor, ...]:
        *rest, batch_first = args
        rows = input.transpose(0, 1) if batch_first else input
        output, *last = _run_layers(_LAYERS[func], rows, None, states, *rest)
        return output.transpose(0, 1) if batch_first else output, *last

    return run


def _run_layers(
    kind: str,
    rows: torch.Tensor,
    mask: torch.Tensor | None,
    states: Any,
    weights: Sequence[torch.Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    is_training: bool,
    is_bidirectional: bool,
) -> tuple[torch.Tensor, ...]:
    """Layer after layer, as torch runs them: output [T, B, directions * H], states."""
    states = [states] if isinstance(states, torch.Tensor) else states
    if torch.is_autocast_enabled("cpu"):  # as cuDNN's layers
        dtype = torch.get_autocast_dtype("cpu")
        rows, *states = (value.to(dtype) for value in (rows, *states))
        weights = [weight.to(dtype) for weight in weights]
    directions = (False, True) if is_bidirectional else (False,)
    count = len(weights) // (num_layers * len(directions))
    run = unrolled if is_functorch_wrapped_tensor(rows) else LAYER
    last: list[Sequence[torch.Tensor]] = []
    for layer in range(num_layers):
        outputs: list[torch.Tensor] = []
        for is_reversed in directions:
            place = len(last)
            own = weights[place * count : (place + 1) * count]
            before = [state[place] for state in states]
            output, *after = run(rows, mask, before, own, kind, is_reversed)
            outputs.append(output)
            last.append(after)
        rows = torch.cat(outputs, -1) if is_bidirectional else outputs[0]
        if dropout and is_training and layer < num_layers - 1:
            rows = F.dropout(rows, dropout)
    return rows, *(torch.stack(group) for group in zip(*last, strict=True))
