"""Sums of which every rank has a part only, because it has a part of the terms.

    row layer:  [N, S, w / 2] @ [w / 2, H] -> a part of [N, S, H] -> sum over the ranks

What comes between the product and the sum over the ranks has to be linear: scaling by equal values,
views, sums of several parts. A softmax of parts would be wrong without an error, and so would what
every rank adds to its part. Where an operator is not known here, parts are not followed any more.

This module must not know modules or ranks of the job.
"""

from collections.abc import Collection

import torch
from torch import fx

from mpxla.errors import CaptureError
from mpxla.graph.operand_dims import MOVING, combined, is_elementwise
from mpxla.graph.stepgraph import VIEWS, describe
from mpxla.graph.typed import arguments_of, named_arguments, target_of

__all__ = ["CURVED_ALONG_DIMS", "PartialSums"]

_aten = torch.ops.aten
_KEEPING = frozenset(
    (
        *(*MOVING, *VIEWS),
        *(_aten.type_as.default, _aten.expand.default, _aten.slice.Tensor, _aten.select.int),
        _aten.neg.default,
        *(_aten.sum.default, _aten.sum.dim_IntList, _aten.mean.default, _aten.mean.dim),
    )
)
_ADDING = frozenset((_aten.add.Tensor, _aten.sub.Tensor))
_SCALING = frozenset((_aten.mul.Tensor, _aten.div.Tensor))
_CHOOSING = frozenset(
    (
        *(_aten.where.self, _aten.where.ScalarOther, _aten.where.ScalarSelf),
        *(_aten.masked_fill.Scalar, _aten.masked_fill.Tensor, _aten.dropout.default),
    )
)
"""Linear with zeros in the other places, which is not followed."""
CURVED_ALONG_DIMS = (
    *(_aten.softmax.int, _aten._softmax.default, _aten.log_softmax.int, _aten._log_softmax.default),
    *(_aten.layer_norm.default, _aten.rms_norm.default, _aten.glu.default, _aten.topk.default),
    *(_aten.sort.default, _aten.sort.stable, _aten.argsort.default, _aten.logcumsumexp.default),
)
"""Operators along dims that are not linear."""
_CURVED = frozenset(
    (
        *(*CURVED_ALONG_DIMS, _aten.argmax.default, _aten.amax.default, _aten.max.dim),
        _aten.linalg_vector_norm.default,
    )
)
"""Not linear, and not elementwise."""


class PartialSums:
    """Follows them through a step.

    Args:
        varying: values that differ between the ranks, as far as the step has been seen.
        split: those of which it is known how.
    """

    def __init__(self, varying: Collection[fx.Node], split: Collection[fx.Node]):
        self._varying, self._split = varying, split
        self._partial: set[fx.Node] = set()

    def add(self, node: fx.Node) -> None:
        """Says that an operator gives a part of a sum.

        Raises:
            CaptureError: it adds something to it.
        """
        target = target_of(node)
        has_bias = target is _aten.linear.default and named_arguments(node)["bias"] is not None
        if has_bias or target in (_aten.addmm.default, _aten.baddbmm.default):
            self._refuse(node, node)
        if target is _aten.scaled_dot_product_attention.default:
            self._refuse(node, node)
        self._partial.add(node)

    def visit(self, node: fx.Node) -> None:
        """Finds out about the result of an operator whose operands have been seen.

        Raises:
            CaptureError: it is not linear in a part of a sum.
        """
        target = target_of(node)
        sources = [n for n in node.all_input_nodes if n in self._partial]
        if not sources or target in _CHOOSING:
            return
        if target in _KEEPING or self._is_linear(node, sources):
            self._partial.add(node)

    def _is_linear(self, node: fx.Node, sources: list[fx.Node]) -> bool:
        """Whether it is, of operators that combine values; False too where that is unknown."""
        target = target_of(node)
        others = [n for n in node.all_input_nodes if n not in sources]
        arguments = named_arguments(node)
        is_known = all(n in self._split or n not in self._varying for n in others)
        if target in _ADDING:
            if others == [] and isinstance(arguments["other"], fx.Node):
                return True
        elif target in _SCALING or (combined(node) is not None and not is_elementwise(node)):
            is_divisor = target is _aten.div.Tensor and arguments["other"] in sources
            count = sum(arguments_of(node).count(n) for n in sources)
            is_bilinear = count > 1 or any(n in self._split for n in others)
            if not is_divisor and not is_bilinear:
                return is_known
        elif not is_elementwise(node) and target not in _CURVED:
            return False
        if is_known:
            self._refuse(node, sources[0])
        return False

    def _refuse(self, node: fx.Node, source: fx.Node) -> None:
        raise CaptureError(
            f"{describe(node)} works on a sum over positions of which every rank of a "
            f"tensor-parallel group has a part ({describe(source)}), so that it would not see the "
            f"whole sum. Leave the module whole (smp.set_tensor_parallelism(module, False))."
        )
