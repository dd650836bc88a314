"""Types of results where scalars of the device, which have a shape of (), meet tensors."""

from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

__all__ = ["keep_types"]


def keep_types(module: fx.GraphModule) -> None:
    """Gives scalars the type of the result before they meet tensors, in place.

    In PyTorch a float64 scalar and a float32 tensor give float32, in torch_xla 2.9 float64: a rate
    would turn the parameters that it updates into float64.
    """
    for node in list(module.graph.nodes):
        if not _is_pointwise(node):
            continue
        result = node.meta["val"]
        for scalar in node.all_input_nodes:
            value = scalar.meta.get("val")
            if isinstance(value, torch.Tensor) and _is_wider(value, result):
                with module.graph.inserting_before(node):
                    options = {"dtype": result.dtype}
                    to_copy: Any = torch.ops.aten._to_copy.default
                    cast = module.graph.call_function(to_copy, (scalar,), options)
                cast.meta["val"] = value.to(result.dtype)
                node.replace_input_with(scalar, cast)
    module.graph.lint()
    module.recompile()


def _is_pointwise(node: fx.Node) -> bool:
    target = node.target
    is_known = isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags
    return is_known and isinstance(node.meta.get("val"), torch.Tensor)


def _is_wider(scalar: torch.Tensor, result: torch.Tensor) -> bool:
    is_scalar = scalar.dim() == 0 < result.dim()
    both_floating = scalar.is_floating_point() and result.is_floating_point()
    return is_scalar and both_floating and scalar.dtype.itemsize > result.dtype.itemsize
