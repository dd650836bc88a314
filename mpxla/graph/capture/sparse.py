"""Sparse matrices in a step function, as what they are made of: places and numbers.

    adj @ x         zeros.index_add(0, rows, values * x[columns])

Compilers know no sparse tensors. While a step is captured, an object stands for each, whose places
and numbers are ordinary tensors, and which knows what graph networks do with such matrices. How
many elements it has is fixed by the call, as shapes are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch._C import DisableTorchFunction
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]

from mpxla.errors import CaptureError
from mpxla.graph.user_code import at_user_line
from mpxla.log import warn_once

__all__ = ["Sparse", "has_sparse", "is_sparse", "refuse_sparse", "run_sparse", "with_sparse_opened"]


def _of_numbers(name: str) -> Any:
    """A method that makes the same sparse tensor of what that of its numbers gives."""

    def method(self: "Sparse", *args: Any, **kwargs: Any) -> "Sparse":
        return self._with(getattr(self.numbers, name)(*args, **kwargs))  # pyright: ignore[reportPrivateUsage]

    return method


@dataclass(eq=False)
class Sparse:
    """Stands for a sparse tensor.

    Attributes:
        places: int64 [dims, elements].
        numbers: [elements].
        shape: of the tensor.
    """

    places: torch.Tensor
    numbers: torch.Tensor
    shape: torch.Size
    is_ordered: bool = False
    """Whether every place is there once, in order."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Sparse":
        """For a tensor that has values."""
        with _disable_current_modes(), DisableTorchFunction(), torch.no_grad():
            tensor = tensor.detach()
            if tensor.layout is torch.sparse_coo:
                places, numbers = tensor._indices(), tensor._values()
            elif tensor.layout is torch.sparse_csr:
                places, numbers = tensor.to_sparse_coo().indices(), tensor.values()
            else:
                raise _unknown(f"The layout {tensor.layout}")
            is_ordered = tensor.layout is torch.sparse_csr or tensor.is_coalesced()
            places, numbers = map(_apart, (places, numbers))
        if numbers.dim() > 1:
            raise _unknown("A dense dim")
        return cls(places, numbers, tensor.shape, is_ordered)

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        """`isinstance(x, torch.Tensor)` goes on as before."""
        return torch.Tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Outside of a captured step nobody has such an object."""
        return run_sparse(func, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _unknown(name)

    # --- facts --------------------------------------------------------------------------------

    is_sparse, layout, requires_grad, is_cuda = True, torch.sparse_coo, False, False

    device, dtype = (property(attrgetter(f"numbers.{name}")) for name in ("device", "dtype"))

    def size(self, dim: int | None = None) -> Any:
        """As for any tensor."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """As for any tensor."""
        return len(self.shape)

    def numel(self) -> int:
        """As for any tensor."""
        return self.shape.numel()

    def is_coalesced(self) -> bool:
        """As for any sparse tensor."""
        return self.is_ordered

    def coalesce(self) -> "Sparse":
        """The same, which is known to have every place once, in order."""
        if self.is_ordered:
            return self
        rows = self.shape[1:].numel() if len(self.shape) > 1 else 1
        flat = self.places[0] * rows + (self.places[1] if len(self.shape) > 1 else 0)
        found, number = torch.unique(flat, return_inverse=True)
        numbers = torch.zeros_like(found, dtype=self.dtype).index_add(0, number, self.numbers)
        places = torch.stack([found // rows, found % rows]) if rows > 1 else found[None]
        return Sparse(places, numbers, self.shape, True)

    def indices(self) -> torch.Tensor:
        """The places."""
        return self.coalesce().places

    def values(self) -> torch.Tensor:
        """The numbers."""
        return self.coalesce().numbers

    def _indices(self) -> torch.Tensor:
        return self.places

    def _values(self) -> torch.Tensor:
        return self.numbers

    def _nnz(self) -> int:
        return self.numbers.shape[0]

    # --- the same in another form -------------------------------------------------------------

    def _with(self, numbers: torch.Tensor) -> "Sparse":
        return Sparse(self.places, numbers, self.shape, self.is_ordered)

    def t(self) -> "Sparse":
        """The transposed matrix."""
        if len(self.shape) != 2:
            raise _unknown("A transpose of more dims than two")
        return Sparse(self.places.flip(0), self.numbers, self.shape[::-1])

    T = property(t)
    mT = property(t)  # noqa: N815

    def transpose(self, one: int, other: int) -> "Sparse":
        """As for any matrix."""
        return self if one % len(self.shape) == other % len(self.shape) else self.t()

    def to_dense(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """With zeros."""
        flat = self.places[0]
        for size, place in zip(self.shape[1:], self.places[1:], strict=True):
            flat = flat * size + place
        zeros = self.numbers.new_zeros(self.shape.numel())
        dense = zeros.index_add(0, flat, self.numbers).view(self.shape)
        return dense if dtype is None else dense.to(dtype)

    # --- what it computes ---------------------------------------------------------------------

    def matmul(self, other: Any) -> Any:
        """The product with a vector or matrix; with a sparse one it is sparse."""
        if len(self.shape) != 2 or other.dim() > 2 or (is_sparse(other) and other.dim() < 2):
            raise _unknown("A product with anything but a dense vector or a matrix")
        if other.shape[0] != self.shape[1]:
            raise CaptureError(
                f"A sparse tensor of shape {list(self.shape)} is multiplied by one of shape "
                f"{list(other.shape)}{at_user_line()}: the shapes do not fit."
            )
        if is_sparse(other):
            return self._times(other)
        _tell(self)
        numbers = self.numbers if other.dim() == 1 else self.numbers[:, None]
        terms = numbers * other[self.places[1]]
        zeros = terms.new_zeros((self.shape[0], *other.shape[1:]))
        return zeros.index_add(0, self.places[0], terms)

    def _times(self, other: "Sparse") -> "Sparse":
        """Has an element wherever two meet, though their sum may be zero."""
        meet = (
            self._with(torch.ones_like(self.numbers)).to_dense()
            @ other._with(torch.ones_like(other.numbers)).to_dense()
        )
        places = torch.nonzero(meet > 0, as_tuple=True)
        dense = self.to_dense() @ other.to_dense()
        line = at_user_line()
        warn_once(
            f"sparse product{line}",
            f"sparse tensors of shapes {list(self.shape)} and {list(other.shape)} are multiplied"
            f"{line}: as dense ones.",
        )
        return Sparse(torch.stack(places), dense[places], dense.shape, True)

    def __rmatmul__(self, other: torch.Tensor) -> torch.Tensor:
        if other.dim() == 1:
            return self.t().matmul(other)
        rows = self.t().matmul(other.reshape(-1, self.shape[0]).t()).t()
        return rows.reshape(*other.shape[:-1], self.shape[1])

    def mul(self, other: Any) -> "Sparse":
        """Times a number, or a dense tensor of its shape."""
        if isinstance(other, torch.Tensor) and not is_sparse(other) and other.dim():
            return self._with(self.numbers * other.expand(self.shape)[self.places.unbind(0)])
        return self._with(self.numbers * _number(other))

    def div(self, other: Any) -> "Sparse":
        """Divided by a number."""
        return self._with(self.numbers / _number(other))

    def add(self, other: Any, alpha: float = 1) -> torch.Tensor:
        """Plus a dense tensor."""
        if is_sparse(other) or not isinstance(other, torch.Tensor):
            raise _unknown("A sum with anything but a dense tensor")
        return self.to_dense() + alpha * other

    def sum(self, dim: Any = None) -> Any:
        """Of all elements, or along one of two dims, which is sparse then."""
        if dim is None:
            return self.numbers.sum()
        (dim,) = dim if isinstance(dim, (list, tuple)) else (dim,)
        if len(self.shape) != 2:
            raise _unknown("A sum along a dim of more than two, or of one")
        place = self.places[1 - dim % 2]
        size = self.shape[1 - dim % 2]
        numbers = self.numbers.new_zeros(size).index_add(0, place, self.numbers)
        return Sparse(torch.arange(size)[None], numbers, torch.Size([size]), True)

    def cuda(self, *_: Any, **__: Any) -> "Sparse":
        """The device is decided later."""
        return self

    to, detach, clone, float = map(_of_numbers, ("to", "detach", "clone", "float"))
    cpu = contiguous = to_sparse = to_sparse_coo = to_sparse_csr = cuda
    mm = mv = spmm = _sparse_mm = smm = __matmul__ = matmul
    __mul__ = __rmul__ = multiply = mul
    __truediv__ = divide = div
    __add__ = __radd__ = add
    transpose_ = swapaxes = transpose
    ndim = property(dim)


def _apart(part: torch.Tensor) -> torch.Tensor:
    """A tensor with the memory of a part of a sparse one, which is no view of it for autograd."""
    empty = torch.empty(0, dtype=part.dtype)
    return empty.set_(part.untyped_storage(), part.storage_offset(), part.shape, part.stride())


def _number(other: Any) -> Any:
    if is_sparse(other) or (isinstance(other, torch.Tensor) and other.dim()):
        raise _unknown("Arithmetic with another sparse tensor, or a division by a tensor,")
    return other


def _unknown(what: str) -> CaptureError:
    return CaptureError(
        f"{what} is not known for sparse tensors in a step function{at_user_line()}. A step is "
        f"compiled, and compilers know no sparse tensors: products with vectors and matrices "
        f"(also of the transposed matrix), with numbers and with dense tensors, sums, indices(), "
        f"values() and to_dense() are computed of its elements. Write it with those, or make the "
        f"tensor dense by to_dense(), which needs memory for the zeros too."
    )


def _tell(sparse: Sparse) -> None:
    line = at_user_line()
    warn_once(
        f"sparse{line}",
        f"a sparse tensor of shape {list(sparse.shape)} is multiplied{line}: as sums over its "
        f"elements, with memory for one row of the other tensor for each of them.",
    )


def _known(sparse: Any) -> Any:
    return tuple(sparse.shape), sparse.is_ordered


def _with_keys(sparse: Any) -> tuple[list[tuple[Any, Any]], Any]:
    keys = pytree.GetAttrKey("indices"), pytree.GetAttrKey("values")
    return list(zip(keys, (sparse.places, sparse.numbers), strict=True)), _known(sparse)


def _rebuilt(parts: Any, known: Any) -> Any:
    places, numbers = parts
    return Sparse(places, numbers, torch.Size(known[0]), known[1])


pytree.register_pytree_node(
    Sparse,
    lambda sparse: ([sparse.places, sparse.numbers], _known(sparse)),
    _rebuilt,
    serialized_type_name="mpxla.graph.capture.sparse.Sparse",
    flatten_with_keys_fn=_with_keys,
)


# --- functions of torch ---------------------------------------------------------------------------


def is_sparse(value: Any) -> bool:
    """Whether it is a sparse tensor with values, or stands for one."""
    if type(value) is Sparse:
        return True
    if type(value) not in (torch.Tensor, nn.Parameter):
        return False
    with DisableTorchFunction():
        return value.layout in _LAYOUTS


def _is_object(value: Any) -> bool:
    return type(value) is Sparse


def has_sparse(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call of torch takes a sparse tensor, or makes one."""
    name = getattr(func, "__name__", "")
    if name in _MAKERS:
        return True
    return any(map(is_sparse, pytree.tree_leaves((args, kwargs), is_leaf=_is_object)))


def refuse_sparse(returned: Any) -> None:
    """Raises CaptureError where a step function returns a sparse tensor."""
    if has_sparse(None, returned, None):
        raise CaptureError(
            "The step function returns a sparse tensor, of which a step cannot make outputs. "
            "Return tensor.to_dense(), or its indices() and values()."
        )


def run_sparse(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Calls what `has_sparse` has found.

    Raises:
        CaptureError: there is no such function for sparse tensors here.
    """
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__") and type(args[0]) is not Sparse:
        with DisableTorchFunction():
            return func(*args, **kwargs)
    if name in _MAKERS:
        return _MAKERS[name](*args, **kwargs)
    args, kwargs = pytree.tree_map(
        lambda value: Sparse.of(value) if is_sparse(value) and not _is_object(value) else value,
        (tuple(args), kwargs),
        is_leaf=_is_object,
    )
    if name in _PRODUCTS and not _is_object(args[0]):
        return args[1].__rmatmul__(args[0])
    if name in ("addmm", "sspaddmm", "_sparse_addmm"):
        return _added(*args, **kwargs)
    if name in _TURNED and not _is_object(args[0]):
        args = (args[1], args[0], *args[2:])
    if name in ("add_", "__iadd__") and not _is_object(args[0]):
        return args[0].add_(args[1].to_dense(), **kwargs)
    method = getattr(Sparse, _NAMES.get(name, name), None)
    if method is None or not _is_object(args[0]):
        raise _unknown(f"{name}()")
    return method(*args, **kwargs)


def _added(
    input: torch.Tensor, one: Any, other: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    return beta * input + alpha * one.matmul(other)


def _from_places(
    indices: Any, values: Any, size: Sequence[int] | None = None, **keys: Any
) -> Sparse:
    """`torch.sparse_coo_tensor`."""
    if size is None:
        raise CaptureError(
            f"torch.sparse_coo_tensor without a size was called in a step function"
            f"{at_user_line()}, where the greatest index has no value yet: give it size=."
        )
    places, numbers = torch.as_tensor(indices), torch.as_tensor(values, dtype=keys.get("dtype"))
    return Sparse(places, numbers, torch.Size(size), bool(keys.get("is_coalesced")))


def _from_rows(
    crow_indices: Any,
    col_indices: Any,
    values: Any,
    size: Sequence[int] | None = None,
    **keys: Any,
) -> Sparse:
    """`torch.sparse_csr_tensor`."""
    ends, columns = torch.as_tensor(crow_indices)[1:], torch.as_tensor(col_indices)
    rows = torch.searchsorted(ends.long(), torch.arange(columns.shape[0]), right=True)
    return _from_places(torch.stack([rows, columns.long()]), values, size, **keys)


def _from_columns(
    ccol_indices: Any,
    row_indices: Any,
    values: Any,
    size: Sequence[int] | None = None,
    **keys: Any,
) -> Sparse:
    """`torch.sparse_csc_tensor`."""
    turned = None if size is None else (size[1], size[0])
    return _from_rows(ccol_indices, row_indices, values, turned, **keys).t()


def _from_dense(dense: Any, *_: Any, **__: Any) -> Sparse:
    """`to_sparse`."""
    if is_sparse(dense):
        return dense if _is_object(dense) else Sparse.of(dense)
    places = torch.nonzero(dense, as_tuple=True)
    return Sparse(torch.stack(places), dense[places], dense.shape, True)


_MAKERS: dict[str, Callable[..., Sparse]] = {
    "sparse_coo_tensor": _from_places,
    "sparse_csr_tensor": _from_rows,
    "sparse_csc_tensor": _from_columns,
    **dict.fromkeys(("to_sparse", "to_sparse_coo", "to_sparse_csr"), _from_dense),
}
_LAYOUTS = torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc
_PRODUCTS = frozenset(("mm", "mv", "matmul", "__matmul__", "__rmatmul__", "spmm", "_sparse_mm"))
_TURNED = frozenset(("mul", "multiply", "__mul__", "__rmul__", "add", "__add__", "__radd__"))
_NAMES = {"_sparse_sum": "sum", "dsmm": "matmul"}


# --- arguments of a step --------------------------------------------------------------------------


def with_sparse_opened(tree: Any) -> Any:
    """Arguments of a step with objects in the place of sparse tensors, which have a place once."""

    def opened(value: Any) -> Any:
        return Sparse.of(value.coalesce() if value.layout is torch.sparse_coo else value)

    if not any(map(is_sparse, pytree.tree_leaves(tree))):
        return tree
    return pytree.tree_map(lambda v: opened(v) if is_sparse(v) else v, tree)
