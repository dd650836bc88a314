"""Compares operators, as programs compute them, with what PyTorch gave in recorded calls."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch
import torch.utils._pytree as pytree
from torch import fx

from mpxla.device.pjrt.arrays import copy_to_device, host_copies
from mpxla.device.pjrt.compiling import compile_lowered
from mpxla.device.pjrt.graphs import as_function
from mpxla.tests.device.pjrt.operator_calls import Call

__all__ = ["differences", "run"]

_aten = torch.ops.aten
_WITHOUT_VALUES = ("aten::empty", "aten::new_empty")

_Results = Sequence[torch.Tensor]


def _picked(call: Call, found: _Results, expected: _Results) -> None:
    """Values are equal; places may be others where values are."""
    torch.testing.assert_close(found[0], expected[0], equal_nan=True)
    tensor = call.arguments[0][0]
    if not tensor.dim():
        return
    names = [argument.name for argument in call.operator._schema.arguments]
    given = {**dict(zip(names, call.arguments[0], strict=False)), **call.arguments[1]}
    dim = given.get("dim", -1)
    dim = -1 if dim is None else dim
    places, values = found[1], found[0]
    if values.dim() < tensor.dim():
        places, values = places.unsqueeze(dim), values.unsqueeze(dim)
    torch.testing.assert_close(tensor.gather(dim, places), values, equal_nan=True)


def _factors(call: Call, found: _Results, expected: _Results) -> None:
    """Singular vectors have any phase: their product and the values count."""
    u, s, v = found
    torch.testing.assert_close(s, expected[1], rtol=1e-4, atol=1e-5)
    if u.numel():
        rank = s.shape[-1]
        product = (u[..., :rank] * s.unsqueeze(-2)) @ v[..., :rank, :]
        torch.testing.assert_close(product, call.arguments[0][0], rtol=1e-3, atol=1e-4)


def _eigenvectors(call: Call, found: _Results, expected: _Results) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-4)
    if found[1].numel():
        shape = found[1] * found[0].unsqueeze(-2) @ found[1].mH
        wanted = expected[1] * expected[0].unsqueeze(-2) @ expected[1].mH
        torch.testing.assert_close(shape, wanted, rtol=1e-3, atol=1e-4)


def _orthogonal(call: Call, found: _Results, expected: _Results) -> None:
    """Columns of Q have any sign."""
    mode = [*call.arguments[0], call.arguments[1].get("mode", "reduced")][1]
    if mode != "r":
        matrix = call.arguments[0][0]
        torch.testing.assert_close(found[0] @ found[1], matrix, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found[1].abs(), expected[1].abs(), rtol=1e-3, atol=1e-4)


_SPECIAL: dict[Any, Callable[[Call, _Results, _Results], None]] = {
    **{
        op: _picked
        for op in (
            *(_aten.sort.default, _aten.sort.stable, _aten.topk.default, _aten.kthvalue.default),
            *(_aten.median.dim, _aten.nanmedian.dim, _aten.mode.default),
        )
    },
    _aten._linalg_svd.default: _factors,
    _aten._linalg_eigh.default: _eigenvectors,
    _aten.linalg_qr.default: _orthogonal,
}


def _compare(call: Call, found: _Results, expected: _Results) -> None:
    if call.operator in _SPECIAL:
        return _SPECIAL[call.operator](call, found, expected)
    for one, other in zip(found, expected, strict=True):
        if call.operator._schema.name.startswith(_WITHOUT_VALUES):
            one = other = torch.empty_like(one)
        tolerances = {"rtol": 0.0, "atol": 0.0}
        if other.is_floating_point() or other.is_complex():
            sizes = other.abs().nan_to_num(posinf=0)
            largest = sizes.max().item() if other.numel() else 0.0
            wide = 20 if other.dtype.itemsize < 4 else 1e-4 / 1e-5
            eps = torch.finfo(other.dtype).eps
            tolerances = {"rtol": 100 * wide * eps, "atol": 10 * wide * eps * max(1.0, largest)}
        torch.testing.assert_close(one, other, equal_nan=True, **tolerances)


def differences(calls: Sequence[Call]) -> list[str]:
    """Runs calls on jax as one program; what differs from PyTorch, or could not run."""
    runs, found = [], []
    for call in calls:
        leaves = pytree.tree_leaves(call.arguments)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        runs.append((call, [copy_to_device(t, jax.devices()[0]) for t in tensors]))
    given = [arrays for _, arrays in runs]
    try:
        program = jax.jit(
            lambda given: [run(call, a) for call, a in zip(calls, given, strict=True)]
        )
        results = compile_lowered(program.lower(given), jax.default_backend())(given)
    except Exception as error:  # one at a time, then
        if len(calls) > 1:
            return [text for call in calls for text in differences([call])]
        return [f"{calls[0].operator} in {calls[0].source}: {type(error).__name__}: {error}"]
    for call, result in zip(calls, results, strict=True):
        expected = [t for t in pytree.tree_leaves(call.expected) if isinstance(t, torch.Tensor)]
        try:
            _compare(call, host_copies(result), expected)
        except (AssertionError, RuntimeError) as error:
            text = " ".join(str(error).split())
            found.append(f"{call.operator} in {call.source}: {text}")
    return found


def run(call: Call, arrays: Sequence[jax.Array], key: jax.Array | None = None) -> list[Any]:
    """What a program of one operator gives for the tensors of a call; a random one takes a key."""
    graph = fx.Graph()

    def placed(tensor: torch.Tensor) -> fx.Node:
        node = graph.placeholder(f"argument_{len(graph.nodes)}")
        node.meta["val"] = tensor
        return node

    args, keywords = pytree.tree_map_only(torch.Tensor, placed, call.arguments)
    node = graph.call_function(call.operator, args, keywords)
    node.meta["val"] = call.expected
    graph.output([node])
    found = as_function(call.source, fx.GraphModule(torch.nn.Module(), graph))(key, arrays)
    pairs = zip(pytree.tree_leaves(found), pytree.tree_leaves(call.expected), strict=True)
    return [value for value, wanted in pairs if isinstance(wanted, torch.Tensor)]
