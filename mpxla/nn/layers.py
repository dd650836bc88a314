"""Layers that compute with a part of their weights (Megatron-LM, arXiv:1909.08053, section 3).

    style        weight is split by      result on a rank
    column       outputs                 its part of the outputs
    whole column outputs                 all outputs, gathered
    row          inputs                  all outputs, summed over the ranks
    vocabulary   rows of an embedding    all columns, summed over the ranks
    experts      inner sizes of each     all outputs, summed over the ranks
    itself       as it says              the whole result (layers of `smp.nn`)

A layer of the user's becomes one in place: it keeps its parameters, which get smaller, its name,
its hooks and the modules that share its weights. What it is called with is equal on all ranks
(column, vocabulary) or this rank's part (row); gradients of equal values become whole where they
meet varying ones, see `graph/tensor/varying.py`.
"""

import contextlib
import functools
from collections.abc import Generator
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from mpxla.graph.collectives import SHARDS, gather_parts, look_up, sum_over
from mpxla.nn.shards import Shard

__all__ = [
    "DistributedModule",
    "Style",
    "can_split",
    "divide_size",
    "find_shards",
    "make_whole",
    "shards_of",
    "split",
    "whole_layers",
]

_BEFORE = "_mpxla_before_split"


class DistributedModule(nn.Module):
    """Base class of the layers whose tensors can be split: those of `smp.nn`, and your own.

    A layer of your own is built of layers of `smp.nn`, or of submodules in a `_tp_plan`. Until
    `DistributedModel` wraps the model it is an ordinary, whole layer.
    (SMP API reference, "smp.nn.DistributedModule".)
    """


class Style(Enum):
    """How a layer is split."""

    COLUMN = "column"
    WHOLE_COLUMN = "whole column"
    ROW = "row"
    VOCABULARY = "vocabulary"
    EXPERTS = "experts"
    ITSELF = "itself"


def _is_conv1d(module: nn.Module) -> bool:
    """Transformers' linear layer of GPT-2, whose weight is [inputs, outputs]."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def _shard_dims(module: nn.Module, style: Style) -> dict[str, int]:
    """Parameter -> the dim that is split; nothing where the layer cannot be split like that."""
    if "forward" in vars(module):
        return {}
    own = [name for name, _ in module.named_parameters(recurse=False)]
    if style is not Style.EXPERTS and "weight" not in own:
        return {}  # hooks compute it, as of weight_norm and of pruning
    if style is Style.ITSELF:
        return {"weight": 1}  # input channels, or columns
    if style is Style.EXPERTS:
        return _dims_of_experts(module)
    if type(module) is nn.Embedding:
        plain = module.max_norm is None and not module.scale_grad_by_freq and not module.sparse
        return {"weight": 0} if style is Style.VOCABULARY and plain else {}
    if style is Style.VOCABULARY or not (type(module) is nn.Linear or _is_conv1d(module)):
        return {}
    outputs = int(_is_conv1d(module))
    if style is Style.ROW:
        return {"weight": 1 - outputs}
    has_bias = module.bias is not None  # pyright: ignore[reportUnnecessaryComparison]
    return {"weight": outputs} | ({"bias": 0} if has_bias else {})


def _dims_of_experts(experts: Any) -> dict[str, int]:
    """Of stacked weights [experts, ...] of transformers; none where biases or norms are inside."""
    is_plain = getattr(experts, "has_bias", True) is False
    is_plain = is_plain and not getattr(experts, "has_post_expert_norm", False)
    is_plain = is_plain and getattr(experts, "is_concatenated", True)
    if not is_plain:
        return {}
    inner = int(experts.is_transposed)
    enter = "gate_up_proj" if experts.has_gate else "up_proj"
    return {enter: 1 + inner, "down_proj": 2 - inner}


def _blocks_of(style: Style, name: str, blocks: int) -> int:
    """Equal blocks of a parameter along the dim that is split."""
    return 2 if style is Style.EXPERTS and name == "gate_up_proj" else blocks


def can_split(module: nn.Module, style: Style, size: int, blocks: int = 1) -> str | None:
    """Why a layer, or each of the equal blocks of its outputs, cannot be split; None if it can."""
    dims = _shard_dims(module, style)
    if not dims:
        return f"a {type(module).__name__} cannot be split by {style.value}"
    for name, dim in dims.items():
        length = getattr(module, name).shape[dim]
        step = size * _blocks_of(style, name, blocks)
        if length % step:
            return f"its {length} do not divide by {size}; pad to {-(-length // step) * step}"
    return None


def shards_of(module: nn.Module) -> dict[str, Shard]:
    """Names of a layer's own split parameters, with the part that it has."""
    return dict(vars(module).get(SHARDS, {}))


def find_shards(module: nn.Module, ids: dict[int, str]) -> dict[str, Shard]:
    """Split parameters, by their names in `ids`, with the part that this rank has."""
    found: dict[str, Shard] = {}
    for part in module.modules():
        for name, shard in shards_of(part).items():
            parameter = getattr(part, name)
            if id(parameter) in ids:
                found[ids[id(parameter)]] = shard
    return found


def split(
    module: nn.Module, style: Style, index: int, size: int, blocks: int, known: dict[int, Shard]
) -> None:
    """Makes a layer that passes `can_split` one that has a part of its weights, in place.

    Its parameters are equal on all ranks. `known` are the identities of those that are split
    already, with layers that share them; it gets those of this one.
    """
    shards: dict[str, Shard] = {}
    for name, dim in _shard_dims(module, style).items():
        parameter = getattr(module, name)
        if id(parameter) not in known:
            own = _blocks_of(style, name, blocks)
            known[id(parameter)] = Shard(tuple(parameter.shape), dim, index, size, own)
            parameter.data = known[id(parameter)].take(parameter.data)
        shards[name] = known[id(parameter)]
    setattr(module, SHARDS, shards)
    if style is Style.ITSELF:
        return
    _before(module)["__class__"] = type(module)
    module.__class__ = _kind(type(module), style)
    _tell_sizes(module, style, size)


def _before(module: nn.Module) -> dict[str, Any]:
    """What `make_whole` gives back: attributes as they were."""
    return vars(module).setdefault(_BEFORE, {})


def divide_size(module: nn.Module, name: str, size: int) -> None:
    """Lets an attribute of a module count what one of `size` ranks has."""
    _before(module).setdefault(name, getattr(module, name))
    setattr(module, name, getattr(module, name) // size)


def make_whole(model: nn.Module) -> None:
    """Undoes `split` and `divide_size` in a model whose parameters are whole again, in place."""
    for module in model.modules():
        for name, value in vars(module).pop(_BEFORE, {}).items():
            setattr(module, name, value)
        vars(module).pop(SHARDS, None)


@contextlib.contextmanager
def whole_layers(model: nn.Module) -> Generator[None]:
    """While this lasts, split layers are what they were before; for a model with whole parameters.

    The caller exchanges those.
    """
    changed = [
        (module, name, getattr(module, name))
        for module in model.modules()
        for name in (*vars(module).get(_BEFORE, ()), _BEFORE, SHARDS)
        if hasattr(module, name)
    ]
    make_whole(model)
    try:
        yield
    finally:
        for module, name, value in changed:
            setattr(module, name, value)


def _tell_sizes(module: Any, style: Style, size: int) -> None:
    """What the layer says of itself, for those who print it or ask."""
    if style in (Style.VOCABULARY, Style.EXPERTS):
        return  # the number of words stays what the rest of the model means by it
    names = ("in_features", "nx") if style is Style.ROW else ("out_features", "nf")
    if style is Style.WHOLE_COLUMN:
        names = names[1:]  # it gives all outputs, and scripts reshape scores by `out_features`
    for name in names:
        if name in vars(module):
            divide_size(module, name, size)


@functools.cache
def _kind(base: type[nn.Module], style: Style) -> type[nn.Module]:
    """The class of a split layer: that of the whole one with another `forward`."""
    words = "".join(word.capitalize() for word in style.value.split())
    return type(f"{words}{base.__name__}", (_FORWARDS[style], base), {"__module__": __name__})


class _Column:
    """Its product is the same on fewer outputs."""


class _WholeColumn:
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        part = super().forward(value)  # type: ignore[misc]
        shard = shards_of(self)["weight"]  # type: ignore[arg-type]
        return gather_parts(part, -1, shard.size, shard.index)


class _Row:
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        layer: Any = self
        weight = layer.weight if isinstance(layer, nn.Linear) else layer.weight.t()
        total = sum_over(functional.linear(value, weight))
        return total if layer.bias is None else total + layer.bias


class _Experts:
    """Each rank has a part of every expert, and so computes a part of every sum."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return sum_over(super().forward(*args, **kwargs))  # type: ignore[misc]


class _Vocabulary:
    def forward(self, words: torch.Tensor) -> torch.Tensor:
        layer: Any = self
        shard = shards_of(layer)["weight"]
        rows = look_up(layer.weight, words, shard.size, shard.index, layer.padding_idx)
        return sum_over(rows)


_FORWARDS: dict[Style, type] = {
    Style.COLUMN: _Column,
    Style.WHOLE_COLUMN: _WholeColumn,
    Style.ROW: _Row,
    Style.VOCABULARY: _Vocabulary,
    Style.EXPERTS: _Experts,
}
