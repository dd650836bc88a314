"""Derivatives of operators that torch_xla computes as one, and PyTorch composes of others.

Keys of the XLA device are dispatched below autograd. Where torch_xla has a kernel of its own for an
operator without derivative (`std`, `svd`, `cross`), autograd would pass over its parts and leave
gradients at zero; where it has a derivative of its own (`max_pool2d`, `max_pool3d`), that is for
real tensors and fails on the fake ones of a trace. So while a stage is traced, such operators are
composed as PyTorch does it, wherever they are called from.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch._C import DispatchKey
from torch._ops import OpOverload

__all__ = ["composed_derivatives"]

_KEY = DispatchKey.AutogradXLA
# No step differentiates these; torch_xla's own kernels stay.
_KEPT = ("aten::_", "aten::empty", "aten::silu_backward")


@contextlib.contextmanager
def composed_derivatives() -> Iterator[None]:
    """Composes what PyTorch composes, under `enable_python_dispatcher`, on tensors of XLA.

    Puts kernels into PyTorch's Python table of kernels, which only that dispatcher reads, and takes
    them out again.
    """
    added: list[OpOverload] = []
    for op in _composed():
        if _KEY not in op.py_kernels:
            op.py_kernels[_KEY] = _composition(op)
            op._dispatch_cache.clear()
            added.append(op)
    try:
        yield
    finally:
        for op in added:
            del op.py_kernels[_KEY]
            op._dispatch_cache.clear()


def _composition(op: OpOverload) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        return op.decompose(*args, **kwargs)

    return run


def _composed() -> list[OpOverload]:
    """Operators that PyTorch composes and for which torch_xla has a kernel."""
    registered = torch._C._dispatch_get_registrations_for_dispatch_key
    own = {*registered("XLA"), *registered("AutogradXLA")}
    names = sorted(own & set(registered("CompositeImplicitAutograd")))
    names = [n for n in names if n.startswith("aten::") and not n.startswith(_KEPT)]
    overloads = [name.removeprefix("aten::").partition(".") for name in names]
    found = [getattr(getattr(torch.ops.aten, a), b or "default") for a, _, b in overloads]
    return [cast(OpOverload, op) for op in found if not op._schema.is_mutable]
