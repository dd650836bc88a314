"""Factorizations of matrices that torch_xla 2.9 gets wrong.

The singular value decomposition is right for one matrix; of several, its last factor and the shape
of the values are not those that PyTorch gives.
"""

from typing import Any

import torch
from torch import fx

from mpxla.stage.cleanup import replace_call

__all__ = ["correct_factorizations"]

_aten = torch.ops.aten


def correct_factorizations(module: fx.GraphModule) -> None:
    """Replaces factorizations that the device computes wrongly by functions that put them right.

    Args:
        module: a graph on tensors of the XLA device; changed in place. (Not while it is traced:
            fake tensors have the shapes that the device should give.)
    """
    for node in list(module.graph.nodes):
        if node.target is _aten._linalg_svd.default and node.args[0].meta["val"].dim() > 2:
            replace_call(node, _batched_svd, node.args, node.kwargs)
    module.graph.lint()
    module.recompile()


def _batched_svd(
    matrices: torch.Tensor, full_matrices: bool = False, compute_uv: bool = True, **_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """U, S, V^T of [..., M, N]; without `compute_uv` the first and the last mean nothing.

    The device exchanges the first two dimensions of V, and takes S for that of one matrix, so that
    operators after it go wrong. U and V give the same: S is the diagonal of U^T A V.
    """
    left, _, right = _aten._linalg_svd.default(matrices, full_matrices, True)
    right = right.transpose(0, 1)
    count = min(matrices.shape[-2:])
    values = (left[..., :count] * (matrices @ right[..., :count])).sum(-2).abs()
    return left, values, right.mT
