"""A text that two graphs share only if they compute the same: what keys of kept values are made of.

Everything that a graph computes with is written out: operators, plain arguments, shapes, constants
by their bytes, and the code of functions by name. Only code of PyTorch's and of this library may
be named, since that of users can change under its name; a graph with such code has no text.
"""

import enum
import hashlib
import types
from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor

__all__ = ["UnknownValueError", "bytes_of", "described", "fingerprint", "layouts", "torch_settings"]

_PLAIN = frozenset({bool, int, str, bytes, complex, type(None), type(...)})
_TORCHS = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
_OPERATORS = ("aten", "prims", "prim", "higher_order", "mpxla")
"""Of torch's operators, the namespaces that users do not add to."""
_MODULES = ("mpxla", "torch", "operator", "_operator", "math", "builtins")


def torch_settings() -> str:
    """What PyTorch's settings add to a graph while it is lowered."""
    kinds = torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()
    return f"{kinds} {torch.get_float32_matmul_precision()}"


def layouts(value: Any) -> list[Any]:
    """Of the tensors of a value: what functions of graphs go by, beside shapes and dtypes."""
    tensors = (v for v in pytree.tree_leaves(value) if isinstance(v, torch.Tensor))
    return [(t.stride(), str(t.device), t.requires_grad) for t in tensors]


class UnknownValueError(Exception):
    """A value that may mean something else in another process."""


def fingerprint(
    graph: fx.Graph, root: torch.nn.Module | None = None, metas: Collection[str] = ("val",)
) -> str:
    """A graph as a text. Strides and devices of values do not count.

    Args:
        graph: names of its nodes do not count.
        root: holds the constants that it reads, if it reads any.
        metas: which of its nodes' metadata counts.

    Raises:
        UnknownValueError: it computes with something that has no text.
    """
    numbers: dict[Any, int] = {}
    lines: list[str] = []
    for node in graph.nodes:
        arguments = described((node.args, node.kwargs), numbers)
        numbers[node] = len(numbers)
        target = ""
        if node.op == "get_attr":
            value: Any = root
            for part in str(node.target).split("."):
                value = getattr(value, part, None)
            target = described(value)
        elif node.op == "call_function":
            target = described(node.target)
        elif node.op not in ("placeholder", "output"):
            raise UnknownValueError(node.op)
        held = {name: node.meta[name] for name in metas if name in node.meta}
        lines.append(f"{node.op} {target} {arguments} {described(held, numbers)}")
    return "\n".join(lines)


def described(value: Any, numbers: dict[Any, int] | None = None) -> str:
    """A value as a text.

    Args:
        value: arguments, metadata, plain data, dataclasses of this library, functions.
        numbers: of the nodes among them, and of what is equal to itself only; the latter get theirs
            here.

    Raises:
        UnknownValueError: it has no text.
    """
    numbers = {} if numbers is None else numbers
    if type(value) in _PLAIN:  # what most values are comes first
        return repr(value)
    if isinstance(value, fx.Node) and value in numbers:
        return f"%{numbers[value]}"
    if type(value) is float:
        return value.hex()
    if isinstance(value, enum.Enum):
        return f"{_name(type(value))}.{value.name}"
    if isinstance(value, _TORCHS):
        return str(value)
    if isinstance(value, (tuple, list, set, frozenset)):
        items = [described(item, numbers) for item in value]
        ordered = sorted(items) if isinstance(value, (set, frozenset)) else items
        return f"{type(value).__name__}({','.join(ordered)})"
    if isinstance(value, Mapping):
        items = [f"{described(k, numbers)}:{described(v, numbers)}" for k, v in value.items()]
        return f"{{{','.join(items)}}}"
    if isinstance(value, slice):
        return f"slice{described((value.start, value.stop, value.step), numbers)}"
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if isinstance(value, OpOverload):
        if value.namespace not in _OPERATORS:
            raise UnknownValueError(str(value))
        return str(value)
    if isinstance(value, HigherOrderOperator) and "._higher_order_ops." in type(value).__module__:
        return f"{_name(type(value))} {value.name()}"
    if isinstance(value, fx.GraphModule):
        return f"graph<{fingerprint(value.graph, value)}>"
    if is_dataclass(value) and not isinstance(value, type):
        held = [(f.name, described(getattr(value, f.name), numbers)) for f in fields(value)]
        is_own = type(value).__eq__ is object.__eq__
        return (
            f"{_name(type(value))}{held}{numbers.setdefault(value, len(numbers)) if is_own else ''}"
        )
    return _code(value)


def _tensor(value: torch.Tensor) -> str:
    """Shape and dtype, and the numbers of a tensor that has some."""
    if type(value) not in (torch.Tensor, torch.nn.Parameter, FakeTensor) or value.is_sparse:
        raise UnknownValueError(type(value).__name__)
    if is_functorch_wrapped_tensor(value):
        raise UnknownValueError("a value inside torch.vmap")
    if not all(type(size) is int for size in value.shape):
        raise UnknownValueError("a size that is no number")
    kind = f"{[*value.shape]} {value.dtype}"
    if isinstance(value, FakeTensor) or value.device.type == "meta":
        return f"fake[{kind}]"
    if value.device.type != "cpu":
        raise UnknownValueError(f"a constant on {value.device}")
    return f"tensor[{kind} {hashlib.sha256(bytes_of(value)).hexdigest()}]"


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The elements of a host tensor."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # A single element may have any stride (that of `expand`), which a flat view would keep.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy().tobytes()


def _code(value: Any) -> str:
    """A function or a type by its name, with what a function has from where it was made."""
    if isinstance(value, partial):
        return f"partial{described((value.func, value.args, value.keywords))}"
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        made = described((cells, value.__defaults__, value.__kwdefaults__))
        return f"{_name(value)}{made}"
    if isinstance(value, (type, types.BuiltinFunctionType)):
        return _name(value)
    raise UnknownValueError(f"{type(value).__module__}.{type(value).__qualname__}")


def _name(value: Any) -> str:
    module = value.__module__ or ""
    if module.partition(".")[0] not in _MODULES or module.startswith("mpxla.tests"):
        raise UnknownValueError(f"{module}.{value.__qualname__}")
    return f"{module}.{value.__qualname__}"
