"""Which operators of a graph the device has no code for.

Most are known from PyTorch's table of kernels: what neither XLA has nor PyTorch composes of other
operators would be taken to the host by torch_xla behind the program's back. Others are taken there
for some arguments only, or fail while they are lowered; those are found by trying them one by one,
when the graph as a whole has failed. What was found is remembered for the process.
"""

from collections.abc import Iterable
from typing import Any, cast

import torch
import torch.utils._pytree as pytree
import torch_xla
import torch_xla.debug.metrics as metrics
from torch import fx
from torch._ops import OpOverload

from mpxla.device.torch_xla.tensors import to_device
from mpxla.stage.spec import TensorSpec, key_of_call

__all__ = ["fallbacks", "has_code", "learn", "needs_host"]

_xla: Any = torch_xla._XLAC  # pyright: ignore[reportPrivateUsage]
_COMPOSED = ("XLA", "CompositeImplicitAutograd")
_EXPLICIT = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
_TORCHS = ("aten::", "prims::", "xla::")

# Results of earlier trials, by operator and specs of its arguments: why the device cannot run it
# (empty where it can), and whether that was found by compiling too.
_tried: dict[Any, tuple[str, bool]] = {}


def needs_host(node: fx.Node) -> bool:
    """Whether a node is known to have no code for the device."""
    if not _is_operator(node):
        return False
    if not has_code(cast(OpOverload, node.target)):
        return True
    return bool(_tried.get(key_of_call(node), ("", False))[0])


_NEVER_TRACED = frozenset({"aten::linalg_ldl_solve"})
"""torch_xla runs it on the zeros that a trace has for values, where LAPACK ends the process."""


def has_code(op: OpOverload) -> bool:
    """Whether the device can run an operator, for some arguments at least.

    What others have registered for all devices alike is a box that nobody can look into: it may
    read values, which a lazy trace would take for constants.
    """
    if op.name() in _NEVER_TRACED:
        return False
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key  # pyright: ignore[reportPrivateUsage]
    keys = (*_COMPOSED, *_EXPLICIT) if op.name().startswith(_TORCHS) else _COMPOSED
    return any(has_kernel(op.name(), key) for key in keys)


def learn(nodes: Iterable[fx.Node], device: torch.device, by_compiling: bool) -> list[fx.Node]:
    """Tries every operator by itself, on zeros, and perhaps compiles it (which takes a while).

    Returns:
        Nodes that turned out to need the host; `needs_host` knows them from now on.
    """
    found: list[fx.Node] = []
    for node in nodes:
        if not _is_operator(node) or needs_host(node):
            continue
        key = key_of_call(node)
        reason, was_compiled = _tried.get(key, ("", None))
        if was_compiled is None or by_compiling > was_compiled:
            reason = _try(node, device, by_compiling)
            _tried[key] = (reason, by_compiling)
        if reason:
            found.append(node)
    return found


def fallbacks() -> dict[str, int]:
    """How often each operator was taken to the host by torch_xla so far."""
    return {
        counter: cast(int, metrics.counter_value(counter))
        for counter in metrics.counter_names()
        if counter.startswith("aten::")
    }


def _is_operator(node: fx.Node) -> bool:
    return node.op == "call_function" and isinstance(node.target, OpOverload)


def _try(node: fx.Node, device: torch.device, by_compiling: bool) -> str:
    """Runs one operator lazily; returns why it needs the host, or nothing."""
    _xla._clear_pending_irs(str(device))
    flat, structure = pytree.tree_flatten((node.args, node.kwargs))
    nodes = [value for value in flat if isinstance(value, fx.Node)]
    if not all(isinstance(n.meta.get("val"), torch.Tensor) for n in nodes):
        return ""  # an operator on something else than tensors
    specs = [TensorSpec.of(n.meta["val"]) for n in nodes]
    zeros = to_device([torch.zeros(s.shape, dtype=s.dtype) for s in specs], device)
    uploaded = iter(zeros)
    filled = [next(uploaded) if isinstance(value, fx.Node) else value for value in flat]
    args, kwargs = pytree.tree_unflatten(filled, structure)
    before = fallbacks()
    try:
        with torch.no_grad():
            results = cast(OpOverload, node.target)(*args, **kwargs)
        fallen = [k for k, v in fallbacks().items() if v != before.get(k, 0)]
        if fallen:
            return f"no XLA lowering of {fallen[0]}"
        if not _same_specs(results, node.meta.get("val")):
            return "results of other shapes or dtypes than PyTorch's"
        if by_compiling:
            tensors = [v for v in pytree.tree_leaves(results) if isinstance(v, torch.Tensor)]
            _xla._xla_warm_up_cache(tensors, [])
    except Exception as error:  # torch_xla raises anything here
        return f"{type(error).__name__}: {error}"
    finally:
        _xla._clear_pending_irs(str(device))
    return ""


def _same_specs(results: Any, expected: Any) -> bool:
    """Whether there is a tensor of the right kind for each that PyTorch gives."""
    pairs = zip(pytree.tree_leaves(results), pytree.tree_leaves(expected), strict=True)
    return all(
        isinstance(found, torch.Tensor) and TensorSpec.of(found) == TensorSpec.of(tensor)
        for found, tensor in pairs
        if isinstance(tensor, torch.Tensor)
    )
