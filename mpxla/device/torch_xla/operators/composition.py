"""Derivatives of operators that torch_xla computes as one, and PyTorch composes of others.

Keys of the XLA device are dispatched below autograd. Where torch_xla has a kernel of its own for an
operator without derivative (`std`, `svd`, `cross`), autograd would pass over its parts and leave
gradients at zero; where it has a derivative of its own (`max_pool3d`, dilated `max_pool2d`), that
one is for real tensors and fails on the fake ones of a trace. So while a stage is traced, such
operators are composed as PyTorch does it, wherever they are called from.

Operators that the device has no code for will run on the host. A few (`_embedding_bag`) save other
values there than elsewhere, so that they are traced as on the host.
"""

import contextlib
from collections.abc import Generator
from typing import Any, cast

import torch
import torch.utils._pytree as pytree
from torch._C import DispatchKey
from torch._ops import OpOverload
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from mpxla.device.torch_xla.operators.decompositions import CALLED_INSIDE
from mpxla.device.torch_xla.trial import has_code

__all__ = ["composed_derivatives", "host_shapes"]

_KEY = DispatchKey.AutogradXLA
# No step differentiates these; torch_xla's own kernels stay.
_KEPT = ("aten::_", "aten::empty", "aten::silu_backward")


@contextlib.contextmanager
def composed_derivatives(is_differentiated: bool = True) -> Generator[None]:
    """Composes what PyTorch composes, under `enable_python_dispatcher`, on tensors of XLA.

    Without differentiation only what fails otherwise is composed.

    Puts kernels into PyTorch's Python table of kernels, which only that dispatcher reads, and takes
    them out again.
    """
    added: list[OpOverload] = []
    kernels = {op: _composition(op) for op in _composed(is_differentiated)}
    if is_differentiated:
        kernels.update(CALLED_INSIDE)
    for op, kernel in kernels.items():
        if _KEY not in op.py_kernels:
            op.py_kernels[_KEY] = kernel
            op._dispatch_cache.clear()  # pyright: ignore[reportPrivateUsage]
            added.append(op)
    try:
        yield
    finally:
        for op in added:
            del op.py_kernels[_KEY]
            op._dispatch_cache.clear()  # pyright: ignore[reportPrivateUsage]


def _composition(op: OpOverload) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        if op is torch.ops.aten.max_pool2d.default and not _is_dilated(*args, **kwargs):
            # torch_xla's derivative needs no indices.
            return op._op_dk(_KEY, *args, **kwargs)  # pyright: ignore[reportPrivateUsage]
        return op.decompose(*args, **kwargs)

    return run


def _is_dilated(
    image: torch.Tensor,
    kernel_size: Any,
    stride: Any = (),
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
) -> bool:
    return any(size != 1 for size in pytree.tree_leaves(dilation))


def _composed(is_differentiated: bool) -> list[OpOverload]:
    """Operators that PyTorch composes and for which torch_xla has a kernel."""
    registered = torch._C._dispatch_get_registrations_for_dispatch_key  # pyright: ignore[reportPrivateUsage]
    own = {*registered("AutogradXLA"), *(registered("XLA") if is_differentiated else ())}
    names = sorted(own & set(registered("CompositeImplicitAutograd")))
    names = [n for n in names if n.startswith("aten::") and not n.startswith(_KEPT)]
    overloads = [name.removeprefix("aten::").partition(".") for name in names]
    found = [getattr(getattr(torch.ops.aten, a), b or "default") for a, _, b in overloads]
    return [cast(OpOverload, op) for op in found if not op._schema.is_mutable]


@contextlib.contextmanager
def host_shapes() -> Generator[None]:
    """Gives fake results of host operators the shapes that they have on the host.

    The rule stands first in PyTorch's list of such rules, and is taken out again.
    """
    rules = fake_impls.op_implementations_checks
    rule = (_runs_on_host, _on_host)
    rules.insert(0, rule)
    try:
        yield
    finally:
        rules.remove(rule)


def _runs_on_host(op: Any) -> bool:
    return isinstance(op, OpOverload) and not op.is_view and not has_code(op)


def _on_host(mode: FakeTensorMode, op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    found = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, FakeTensor)]
    device = next((value.device for value in found if value.device.type == "xla"), None)
    if device is None:
        return NotImplemented
    with mode:
        host = pytree.tree_map_only(
            FakeTensor, lambda v: _like(v, torch.device("cpu")), (args, kwargs)
        )
        results = op(*host[0], **host[1])
        return pytree.tree_map_only(torch.Tensor, lambda v: _like(v, device), results)


def _like(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
