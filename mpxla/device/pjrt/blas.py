"""Products of matrices by the BLAS that PyTorch brings, in XLA's programs for the CPU.

XLA's own products of float32 run at 0.6 to 0.9 of that library's rate (benchmarks/products.py), and
they are three quarters of a transformer's step. A program calls the library by `sgemm.py`'s
function. Without llvmlite, with a PyTorch that exports no `sgemm_`, and where the library is slower
(`prefers_blas`), programs multiply as XLA does.
"""

import functools
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import torch
from torch import fx

from mpxla.device.pjrt import sgemm
from mpxla.env import xla_threads
from mpxla.graph.typed import arguments_of, input_of
from mpxla.stage.cleanup import replace_call

__all__ = ["has_blas", "prefers_blas", "use_blas"]

_aten = torch.ops.aten
_SMALLEST = 2**20
"""Multiplications of a matrix from which on the library is faster than what XLA fuses."""


@functools.cache
def has_blas() -> bool:
    """Whether programs can call the library; registers the function with XLA."""
    return sgemm.register()


@functools.cache
def prefers_blas() -> bool:
    """Whether programs shall call the library: where it can be called, and is faster than XLA.

    Intel's library keeps to AVX2 on processors of others. Where those have AVX-512, XLA is faster:
    140 to 190 GFLOP/s to 100, on a core of an AMD EPYC. To time both would be no rule: runs on one
    machine have to give the same numbers.
    """
    has_wide = torch.backends.mkl.is_available() and _capability() == "AVX512"
    return not (has_wide and "GenuineIntel" not in _processor()) and has_blas()


def _capability() -> str:
    return torch.backends.cpu.get_cpu_capability()


def _processor() -> str:
    """What Linux says of the processors; empty where there is no such file."""
    file = Path("/proc/cpuinfo")
    return file.read_text() if file.exists() else ""


def use_blas(module: fx.GraphModule) -> None:
    """Lets products of large matrices be the library's, transposed operands with them; in place."""
    graph = module.graph
    for node in list(graph.nodes):
        bias, operands = _operands(node)
        if len(operands) != 2 or not _is_large(*operands):
            continue
        total = None if bias is not None else _sum_with(node)
        last = node if total is None else total
        with graph.inserting_before(last):
            (left, is_left), (right, is_right) = (_before_transposition(graph, n) for n in operands)
            start = (
                None
                if total is None
                else next(n for n in arguments_of(total) if n.op == "placeholder")
            )
            arguments = (left, right, is_left, is_right, start)
        if bias is None:
            replace_call(last, _product, arguments)
            continue
        with graph.inserting_before(node):
            product = graph.call_function(_product, arguments)
        product.meta = dict(node.meta)
        replace_call(node, _aten.add.Tensor, (product, bias))
    graph.eliminate_dead_code()


def _operands(node: fx.Node) -> tuple[fx.Node | None, tuple[fx.Node, ...]]:
    """What is added to a product, if anything, and its factors; none if it is no product."""
    if node.target in (_aten.mm.default, _aten.bmm.default):
        return None, arguments_of(node)
    if node.target in (_aten.addmm.default, _aten.baddbmm.default) and not node.kwargs:
        return input_of(node), arguments_of(node)[1:3]
    return None, ()


def _sum_with(node: fx.Node) -> fx.Node | None:
    """The sum of a product and an argument of the program, if nothing else reads the product.

    So gradients are added up where they lie. Other summands would have to be copied first.
    """
    users = list(node.users)
    if len(users) == 1 and users[0].target == _aten._to_copy.default:  # to float32, from that
        node, users = users[0], list(users[0].users)
    if len(users) != 1 or users[0].target != _aten.add.Tensor or users[0].kwargs:
        return None
    others = [n for n in users[0].args if n is not node]
    if len(others) != 1 or not isinstance(others[0], fx.Node) or others[0].op != "placeholder":
        return None
    values = others[0].meta["val"], node.meta["val"]
    is_same = values[0].shape == values[1].shape
    return users[0] if is_same and all(v.dtype == torch.float32 for v in values) else None


def _is_large(left: fx.Node, right: fx.Node) -> bool:
    values = left.meta["val"], right.meta["val"]
    size = math.prod(values[0].shape[-2:]) * values[1].shape[-1]
    has_any = all(v.numel() for v in values)  # a batch may be empty
    return has_any and size >= _SMALLEST and all(v.dtype == torch.float32 for v in values)


def _before_transposition(graph: fx.Graph, node: fx.Node) -> tuple[fx.Node, bool]:
    """A matrix, or the matrix that it is the transpose of; of batches likewise."""
    value, found = node.meta["val"], node
    # Batches with several dimensions are expanded by nothing and then made one dimension.
    while found.target in _BATCHING and _has_matrices(input_of(found), value):
        found = input_of(found)
    if not _is_transposition(found):
        return node, False
    source = input_of(found)
    if found is node:
        return source, True
    shape = [*value.shape[:-2], value.shape[-1], value.shape[-2]]
    view = graph.call_function(_aten.view.default, (source, shape))
    view.meta["val"] = value.mT
    return view, True


_BATCHING = (
    *(_aten.expand.default, _aten.clone.default, _aten.reshape.default),
    *(_aten.view.default, _aten._unsafe_view.default),
)


def _has_matrices(node: fx.Node, value: torch.Tensor) -> bool:
    """Whether the matrices of a value are these, whatever its batches are."""
    of = node.meta["val"]
    return of.ndim >= 2 and of.shape[-2:] == value.shape[-2:] and of.numel() == value.numel()


def _is_transposition(node: fx.Node) -> bool:
    if node.target == _aten.t.default:
        return True
    rank = node.meta["val"].ndim
    if node.target == _aten.transpose.int:
        return {dim % rank for dim in arguments_of(node)[1:]} == {rank - 2, rank - 1}
    if node.target == _aten.permute.default:
        swapped = [*range(rank - 2), rank - 1, rank - 2]
        return rank >= 2 and [dim % rank for dim in arguments_of(node)[1]] == swapped
    return False


def _product(
    left: jax.Array, right: jax.Array, is_left: bool, is_right: bool, start: jax.Array | None
) -> jax.Array:
    """The product of two matrices or of their transposes, added to `start` if there is one."""
    shape = (*left.shape[:-2], left.shape[-1 if is_left else -2])
    shape += (right.shape[-2 if is_right else -1],)
    threads = xla_threads() if sgemm.has_part_calls() else 1
    description = sgemm.description(
        left.shape, right.shape, is_left, is_right, start is not None, threads
    )
    arguments = (left, right, jnp.asarray(description))
    call = functools.partial(
        jax.ffi.ffi_call, sgemm.TARGET, jax.ShapeDtypeStruct(shape, jnp.float32)
    )
    if start is None:
        return call()(*arguments)
    return call(input_output_aliases={3: 0})(*arguments, start)
