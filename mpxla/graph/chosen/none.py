"""Whether a step that supposes that a mask is true somewhere is right where it is true nowhere.

    if mask.any():                          captured as if the mask were true somewhere
        out[mask] += expert(h[mask])        out = where(mask, out + expert(h), out)

With a mask that is false, this graph becomes `out`, which is the other way through the function. So
it is in mixtures of experts, and where sums over the rows are added to a loss. Where it is not
(what the branch does is counted, say), the mask has to be looked at when the step has run.

This module must not know how a step is traced.
"""

import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import fx

from mpxla.graph.stepgraph import CASTS, VIEWS, Check, OutputKind, StepGraph, with_ends
from mpxla.graph.typed import arguments_of, input_of, named_arguments, target_of

__all__ = ["needs_no_rows", "without_checks"]

_aten = torch.ops.aten


def needs_no_rows(step: StepGraph, line: str, other: StepGraph) -> bool:
    """Whether a step computes the same as another one, where masks are true nowhere.

    Args:
        step: supposes that masks are true somewhere, of which it asks at a line of the user's.
        line: that line.
        other: the same, captured with the other answer at this line.
    """
    results = {p.result for p in step.prints if p.label == line and p.check is Check.ROWS}
    masks = {input_of(node) for node, role in step.ends if role.is_among(results)}
    terms = _Terms()
    terms.add(step, masks)
    terms.add(other, ())
    leaves = step.result_leaves == other.result_leaves and step.result_spec == other.result_spec
    return leaves and _outputs(step, terms, results) == _outputs(other, terms, ())


def _outputs(step: StepGraph, terms: "_Terms", left_out: Collection[int]) -> Any:
    """What the outputs of a step are, in order; without some results, which come last."""
    shown = {p.result: (p.label, p.check) for p in step.prints}
    return [
        (role.kind, role.name, shown.get(role.index) or role.index, terms.of(node))
        if role.kind is OutputKind.RESULT
        else (role, terms.of(node))
        for node, role in step.ends
        if not role.is_among(left_out)
    ]


def without_checks(step: StepGraph, lines: Collection[str]) -> StepGraph:
    """A step that does not look whether masks are true anywhere of which it asks at some lines."""
    dropped = {p.result for p in step.prints if p.check is Check.ROWS and p.label in lines}
    if not dropped:
        return step

    def moved(index: int) -> int:
        return index - sum(other < index for other in dropped)

    ends = [
        (n, replace(role, index=moved(role.index)) if role.kind is OutputKind.RESULT else role)
        for n, role in step.ends
        if not role.is_among(dropped)
    ]
    left = (print for print in step.prints if print.result not in dropped)
    return with_ends(step, ends, prints=tuple(replace(p, result=moved(p.result)) for p in left))


class _Number(NamedTuple):
    """The term of a value all of whose elements are one number."""

    value: float


class _Terms:
    """What the nodes of steps compute from their inputs, where some masks are true nowhere."""

    def __init__(self) -> None:
        self._terms: dict[fx.Node, Any] = {}
        self._by_parts: dict[Any, str] = {}
        self._empty: set[Any] = set()

    def add(self, step: StepGraph, masks: Collection[fx.Node]) -> None:
        """The nodes of a step, of which some are true nowhere."""
        for node, role in step.roles.items():
            constant = step.constants.get(role.name)
            # Constants of a step are named by their number.
            known = role if constant is None else (id(constant), tuple(constant.shape))
            self._terms[node] = self._interned("input", known)
        for node in step.graph.nodes:
            if node.op == "call_function":
                term = self._found(node)
                if node in masks:
                    self._empty.add(term)
                self._terms[node] = _Number(0) if term in self._empty else term

    def of(self, node: Any) -> Any:
        """The term of a node, equal for equal computations; all else as it is."""
        return self._terms[node] if isinstance(node, fx.Node) else node

    def _found(self, node: fx.Node) -> Any:
        simpler = _SIMPLER.get(target_of(node))
        found = None if simpler is None else simpler(self, node)
        if found is None:
            arguments = fx.map_arg((node.args, node.kwargs), self.of)
            found = self._interned(str(node.target), repr(arguments))
        return found

    def _interned(self, *parts: Any) -> str:
        return self._by_parts.setdefault(parts, f"term {len(self._by_parts)}")

    def kept(self, node: fx.Node, source: Any) -> Any:
        """The term of an operand that a node hands on, if it has its shape."""
        term = self.of(source)
        is_like = isinstance(source, fx.Node) and _shape(source) == _shape(node)
        return term if isinstance(term, _Number) or is_like else None


def _shape(node: fx.Node) -> Any:
    value = node.meta["val"]
    return tuple(value.shape), value.dtype


def _moved(terms: _Terms, node: fx.Node) -> Any:
    term = terms.of(input_of(node))
    return term if isinstance(term, _Number) else None


def _turned(terms: _Terms, node: fx.Node) -> Any:
    term = terms.of(input_of(node))
    return _Number(not term.value) if isinstance(term, _Number) else None


def _chosen(terms: _Terms, node: fx.Node) -> Any:
    """`where`."""
    mask, one, other = arguments_of(node)
    term = terms.of(mask)
    return terms.kept(node, one if term.value else other) if isinstance(term, _Number) else None


def _filled(terms: _Terms, node: fx.Node) -> Any:
    """`masked_fill`."""
    value, mask, number = arguments_of(node)
    term = terms.of(mask)
    if not isinstance(term, _Number):
        return None
    return _Number(number) if term.value else terms.kept(node, value)


def _added(terms: _Terms, node: fx.Node) -> Any:
    one, other = arguments_of(node)[:2]
    if terms.of(other) == _Number(0):
        return terms.kept(node, one)
    is_plain = node.target is _aten.add.Tensor and named_arguments(node)["alpha"] == 1
    return terms.kept(node, other) if is_plain and terms.of(one) == _Number(0) else None


def _multiplied(terms: _Terms, node: fx.Node) -> Any:
    return _Number(0) if _Number(0) in map(terms.of, arguments_of(node)[:2]) else None


def _divided(terms: _Terms, node: fx.Node) -> Any:
    one, other = map(terms.of, arguments_of(node)[:2])
    is_zero = one == _Number(0) and other not in (0, _Number(0))
    return _Number(0) if is_zero else None


def _with_number(compute: Callable[[float, float], float]) -> Callable[[_Terms, fx.Node], Any]:
    """What an operator computes of a value and a number."""

    def term(terms: _Terms, node: fx.Node) -> Any:
        own, other = map(terms.of, arguments_of(node))
        is_known = isinstance(own, _Number) and isinstance(other, (int, float))
        return _Number(compute(own.value, other)) if is_known else None

    return term


def _summed(terms: _Terms, node: fx.Node) -> Any:
    return _Number(0) if terms.of(input_of(node)) == _Number(0) else None


def _written(place: int) -> Callable[[_Terms, fx.Node], Any]:
    """Adding zeros to a value changes nothing."""

    def term(terms: _Terms, node: fx.Node) -> Any:
        adds = named_arguments(node).get("accumulate", True)
        is_zero = terms.of(arguments_of(node)[place]) == _Number(0)
        return terms.kept(node, input_of(node)) if adds and is_zero else None

    return term


_ZEROS = _aten.zeros.default, _aten.zeros_like.default, _aten.new_zeros.default
_SIMPLER: Mapping[Any, Callable[[_Terms, fx.Node], Any]] = {
    **dict.fromkeys((*VIEWS, *CASTS, _aten.detach.default, _aten.expand.default), _moved),
    **dict.fromkeys((_aten.add.Tensor, _aten.sub.Tensor), _added),
    **dict.fromkeys((_aten.sum.default, _aten.sum.dim_IntList, _aten.any.default), _summed),
    _aten.cumsum.default: _summed,
    **dict.fromkeys(_ZEROS, lambda terms, node: _Number(0)),
    _aten.full.default: lambda terms, node: _Number(arguments_of(node)[1]),
    **dict.fromkeys((_aten.index_add.default, _aten.scatter_add.default), _written(3)),
    _aten.index_put.default: _written(2),
    _aten.logical_not.default: _turned,
    _aten.clamp_min.default: _with_number(max),
    _aten.ne.Scalar: _with_number(operator.ne),
    _aten.where.self: _chosen,
    _aten.masked_fill.Scalar: _filled,
    _aten.mul.Tensor: _multiplied,
    _aten.div.Tensor: _divided,
}
"""Gives simpler terms where values are one number; None where there is none."""
