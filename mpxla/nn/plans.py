"""Which layers of a model are split, and how.

Models of transformers bring a plan of their own (`tp_plan`: path of a layer -> style); for those
that have none there is one here. A plan falls into *units*, the attention or the MLP of a block:
column layers, whose parts a row layer brings together. A unit is split as a whole or not at all.
The embedding and the head are units too, and one unit where they share their weight.

This module must not know ranks.
"""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from mpxla.graph.partition.modules import joined_path
from mpxla.nn.layers import DistributedModule, Style, can_split
from mpxla.nn.modules import DistributedEmbedding, DistributedLinear

__all__ = ["Entry", "Unit", "units_of"]

_STYLES = {
    "colwise": Style.COLUMN,
    "local_colwise": Style.COLUMN,
    "rowwise": Style.ROW,
    "local_rowwise": Style.ROW,
    "colwise_rep": Style.WHOLE_COLUMN,
    "colwise_gather_output": Style.WHOLE_COLUMN,
    "embedding_rowwise": Style.VOCABULARY,
    "moe_tp_experts": Style.EXPERTS,
}
"""Transformers' names of styles (versions 4.5x and 5)."""
_WITHOUT_EFFECT = (
    *("replicated", "replicated_with_grad_allreduce", "sequence_parallel"),
    "local_params",  # of modules whose parameters are in the plan by themselves
)
"""Styles of layers that stay whole: their gradients become whole by themselves."""

_ENDS = {"get_input_embeddings": Style.VOCABULARY, "get_output_embeddings": Style.WHOLE_COLUMN}
"""Methods of transformers' models -> how what they return is split."""

_Layers = Mapping[str, tuple[Style, int]]


def _unit(*columns: str, row: str, blocks: int = 1) -> _Layers:
    return dict.fromkeys(columns, (Style.COLUMN, blocks)) | {row: (Style.ROW, 1)}


_BERT_LAYER: Mapping[str, _Layers] = {
    "attention": _unit("self.query", "self.key", "self.value", row="output.dense"),
    "": _unit("intermediate.dense", row="output.dense"),
}
_PLANS: Mapping[str, Mapping[str, _Layers]] = {
    "GPT2Block": {
        "attn": _unit("c_attn", row="c_proj", blocks=3),
        "mlp": _unit("c_fc", row="c_proj"),
    },
    "DistributedAttentionLayer": {"": _unit("query", "key", "value", row="dense")},
    "DistributedTransformerOutputLayer": {"": _unit("dense1", row="dense2")},
    "BertLayer": _BERT_LAYER,
    "RobertaLayer": _BERT_LAYER,
    "ViTAttention": {"": _unit("q_proj", "k_proj", "v_proj", row="o_proj")},
    "ViTMLP": {"": _unit("fc1", row="fc2")},
}
"""Class of a block -> path of a unit in it -> path of a layer in that -> (style, blocks)."""

_SIZES: Mapping[str, Sequence[str]] = {
    "GPT2Attention": ("split_size",),
    "DistributedAttentionLayer": ("num_heads",),
}
"""Class of a module -> attributes that count its outputs, of which a rank has a part."""


@dataclass(frozen=True)
class Entry:
    """A layer and how it is split."""

    path: str
    module: nn.Module
    style: Style
    blocks: int = 1


@dataclass
class Unit:
    """Layers that are split together.

    Attributes:
        path: of the unit, for messages.
        entries: its layers.
        problem: why it stays whole; None if it is split.
        sizes: (module, attribute) of what counts the outputs that are split.
        is_asked_for: whether the model says so itself, without `smp.set_tensor_parallelism`.
    """

    path: str
    entries: list[Entry] = field(default_factory=list)
    problem: str | None = None
    sizes: list[tuple[nn.Module, str]] = field(default_factory=list)
    is_asked_for: bool = False


def units_of(model: nn.Module, size: int) -> list[Unit]:
    """The units of a model, with the reason for each that has to stay whole on so many ranks."""
    sources = (_by_plan, _by_table, _ends, _by_class)
    units = {unit.path: unit for find in sources for unit in find(model)}
    found = list(units.values())
    for unit in found:
        unit.problem = unit.problem or _problem(model, unit, size)
    _check_tied(model, found)
    return found


def _by_plan(model: nn.Module) -> Iterator[Unit]:
    """Units of plans that the model or modules in it have: layers of one parent."""
    planned: set[str] = set()
    for base_path, base in model.named_modules():
        if not _has(base, "_tp_plan"):
            continue
        patterns: dict[str, str] = dict(getattr(base, "_tp_plan", None) or {})
        units: dict[str, Unit] = {}
        for inner, module in base.named_modules() if patterns else ():
            path = joined_path(base_path, inner)
            style = patterns.get(_pattern(inner))
            if style is None or path in planned:  # outer plans repeat those of inner models
                continue
            planned.add(path)
            known = _STYLES.get(style)
            if style in _WITHOUT_EFFECT or known in (Style.WHOLE_COLUMN, Style.VOCABULARY):
                continue  # for the latter, which are the ends of a model, see `_ends`
            parent = path.rpartition(".")[0]
            unit = units.setdefault(parent, Unit(parent))
            if known is None:
                unit.problem = f"mpxla does not know the style {style!r} of {path}"
            else:
                unit.entries.append(Entry(path, module, known))
        for inner, _ in base.named_parameters() if patterns else ():
            path = joined_path(base_path, inner)
            unit = units.get(path.rpartition(".")[0])
            if unit is not None and _pattern(inner) in patterns:  # a number of every head, say
                unit.problem = f"mpxla does not split {path}, which is no part of a layer"
        yield from units.values()


def _pattern(path: str) -> str:
    """A path as plans write it, with a star for the number of a block."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", path)


def _has(module: nn.Module, name: str) -> bool:
    """Whether a module has an attribute itself, and does not forward it from one in it."""
    return hasattr(type(module), name) or name in vars(module)


def _by_table(model: nn.Module) -> Iterator[Unit]:
    for path, module in model.named_modules():
        for inner, layers in _plans_of(type(module)).items():
            unit = Unit(joined_path(path, inner) if inner else f"{path} (MLP)")
            unit.is_asked_for = isinstance(module, DistributedModule)
            for name, (style, blocks) in layers.items():
                layer = joined_path(joined_path(path, inner), name)
                unit.entries.append(Entry(layer, model.get_submodule(layer), style, blocks))
            yield unit


def _plans_of(kind: type) -> Mapping[str, _Layers]:
    """Plans for a class, unless somebody else's has its name only."""
    name = kind.__name__
    homes = [base.__module__ for base in kind.__mro__ if base.__name__ == name]
    is_known = any(home.startswith(("transformers.", "mpxla.nn.")) for home in homes)
    return _PLANS.get(name, {}) if is_known else {}


def _ends(model: nn.Module) -> Iterator[Unit]:
    """The embedding and the head of models of transformers."""
    names = {id(module): path for path, module in model.named_modules()}
    for base, (getter, style) in itertools.product(_with_ends(model), _ENDS.items()):
        find = getattr(base, getter, None)
        try:
            module = None if find is None else find()
        except (NotImplementedError, AttributeError):  # models of images have none
            continue
        if isinstance(module, nn.Module) and id(module) in names:
            path = names[id(module)]
            if style is not Style.VOCABULARY or isinstance(module, nn.Embedding):
                own = isinstance(base, DistributedModule)
                yield Unit(path, [Entry(path, module, style)], is_asked_for=own)


def _with_ends(model: nn.Module) -> Iterator[nn.Module]:
    """The outermost models that know their ends; the whole one may be a wrapper."""
    inside: tuple[str, ...] = ()
    for path, module in model.named_modules():
        if any(_has(module, name) for name in _ENDS) and not path.startswith(inside):
            inside += (f"{path}." if path else "",)
            yield module


def _by_class(model: nn.Module) -> Iterator[Unit]:
    """Layers of `smp.nn`, which the user's own model has."""
    for path, module in model.named_modules():
        if isinstance(module, (DistributedEmbedding, DistributedLinear)):
            yield Unit(path, [Entry(path, module, Style.ITSELF)], is_asked_for=True)


def _problem(model: nn.Module, unit: Unit, size: int) -> str | None:
    """Why a unit cannot be split."""
    styles = {entry.style for entry in unit.entries}
    if styles & {Style.COLUMN, Style.ROW} and styles != {Style.COLUMN, Style.ROW}:
        return "it does not have both column and row layers"
    for entry in unit.entries:
        problem = can_split(entry.module, entry.style, size, entry.blocks)
        if problem is not None:
            return f"{entry.path}: {problem}"
        problem = _problem_of_heads(model, entry, size)
        if problem is not None:
            return problem
    for module in {id(m): m for m in _inside(model, unit)}.values():
        for name in _SIZES.get(type(module).__name__, ()):
            unit.sizes.append((module, name))
    return None


def _inside(model: nn.Module, unit: Unit) -> Iterator[nn.Module]:
    """The modules that call the unit's layers."""
    for entry in unit.entries:
        yield model.get_submodule(entry.path.rpartition(".")[0])


def _problem_of_heads(model: nn.Module, entry: Entry, size: int) -> str | None:
    """Attention is split by heads, of which each rank has some."""
    if entry.style is not Style.COLUMN:
        return None
    parent: Any = model.get_submodule(entry.path.rpartition(".")[0])
    length = getattr(parent, "head_dim", None) or getattr(parent, "attention_head_size", None)
    if not isinstance(length, int):
        return None
    outputs = entry.module.weight.shape[int(type(entry.module).__name__ == "Conv1D")]  # type: ignore[union-attr,index]
    heads = outputs // entry.blocks // length
    if heads % size:
        return (
            f"the {heads} heads of {entry.path} do not divide by {size}; use a multiple of {size}"
        )
    return None


def _check_tied(model: nn.Module, units: list[Unit]) -> None:
    """Layers that share a weight are split alike, or stay whole."""
    users: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        users.setdefault(id(parameter), []).append(name)
    entries = {e.path: (u, e) for u in units if u.problem is None for e in u.entries}
    is_settled = False
    while not is_settled:
        is_settled = True
        for names in users.values():
            paths = [name.rpartition(".")[0] for name in names]
            found = [entries[p] for p in paths if p in entries and entries[p][0].problem is None]
            if not found or len(paths) == 1:
                continue
            dims = {(int(e.style in (Style.ROW, Style.ITSELF)), e.blocks) for _, e in found}
            if len(found) < len(paths) or len(dims) > 1:
                for unit, entry in found:
                    unit.problem = f"{entry.path} shares its weight with {', '.join(paths)}"
                is_settled = False
