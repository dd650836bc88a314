"""Tensors that have a shape on this rank and their values on others.

PyTorch's device `meta` takes part in any operator, without a word: `target.add_(source)` leaves
`target` as it is if `source` is on another rank. So what is computed from such a parameter knows
it: to read its values, or to write it to a tensor with values, is an error. The other way is none:
a rank that copies start values into all parameters sets its own. Buffers are `Valueless` itself.

This module must not know where the values are.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.autograd.graph import increment_version
from torch.fx.experimental import _config

from mpxla.errors import StepError
from mpxla.user_lines import at_script_line

__all__ = ["WHERE", "AbsentParameter", "Valueless", "without_values"]

_EAGER = ("cpu", "cuda", "meta")
_meta_settings: Any = _config
_aten = torch.ops.aten
_READS = {_aten._local_scalar_dense.default: "item", _aten._to_copy.default: "to"}
WHERE = "they are on another pipeline rank, or divided over ranks"
_ADVICE = (
    "Use tensors of one rank only (skip parameters whose device is meta; smp.partition puts "
    "modules that belong together on one partition), make two models of it, each in a "
    "DistributedModel, or have all ranks do it in a block of model.summon_full_params()."
)


class Valueless(torch.Tensor):
    """A parameter or buffer of other ranks, or what is computed from one."""

    # Attributes are read in loops over all parameters: they are as quick as those of any tensor.
    __torch_function__: Any = torch._C._disabled_torch_function_impl  # pyright: ignore[reportPrivateUsage]

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Calls an operator; see the module."""
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            _check_writes(func, args, kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            _draw(func, args, kwargs)
        if func._schema.name.startswith("aten::_foreach_"):
            _check_devices(func, (args, kwargs))
            return _tensor_by_tensor(func, args, kwargs)
        return _without_values(func, args, kwargs)

    # PyTorch refuses these for subclasses, with a text that helps nobody.
    def tolist(self) -> Any:
        """Raises, as there are no values."""
        raise _unreadable(".tolist()")

    def numpy(self, *, force: bool = False) -> Any:
        """Raises, as there are no values."""
        raise _unreadable(".numpy()")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Raises, as there are no values."""
        raise _unreadable(".numpy()")

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises, as a file would have the shape alone."""
        raise _unreadable("torch.save or pickle")


def _unreadable(how: str) -> StepError:
    return StepError(
        f"the values of a parameter or buffer were asked for by {how} or a form of it at "
        f"{at_script_line()}, and it has none here: {WHERE}. {_ADVICE}"
    )


def _draw(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Draws what the tensor gets on its own rank, and leaves it.

    So the generator goes on as in one process, and layers that are initialized anew between steps
    (`layer.reset_parameters()`) get the numbers of plain PyTorch on every rank.
    """
    given = pytree.tree_map_only(
        torch.Tensor, lambda t: torch.ones(t.shape, dtype=t.dtype, device="cpu"), (args, kwargs)
    )
    func(*given[0], **{name: value for name, value in given[1].items() if name != "device"})


def _without_values(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    with torch._C._DisableTorchDispatch():  # pyright: ignore[reportPrivateUsage]
        values = args, kwargs
        try:
            result = func(*args, **kwargs)
        except NotImplementedError as error:
            if func in _READS:
                raise _unreadable(f".{_READS[func]}()") from error
            # The result's shape depends on values: any will do.
            with _meta_settings.patch(meta_nonzero_assume_all_nonzero=True):
                result = func(*args, **kwargs)
        except RuntimeError as error:
            if func in _READS:
                raise _unreadable(f".{_READS[func]}()") from error
            tensors = [t for t in pytree.tree_leaves(values) if isinstance(t, torch.Tensor)]
            if all(t.is_meta or t.dim() == 0 for t in tensors):
                raise
            # What is computed of both has none either: an average that was begun before the first
            # step, when all ranks had all parameters, is one of each rank's own from then on.
            bare = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), values)
            result = func(*bare[0], **bare[1])
        if func is torch.ops.aten.detach.default and type(args[0]) in (AbsentParameter, _Detached):
            return result.as_subclass(_Detached)
        return pytree.tree_map_only(torch.Tensor, _marked, result)


def _tensor_by_tensor(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A `_foreach_` operator on each place of its lists: its kernels take one device only."""
    results: list[Any] = []
    for place in range(len(args[0])):
        own = [[v[place]] if isinstance(v, (list, tuple)) else v for v in (*args, *kwargs.values())]
        named = dict(zip(kwargs, own[len(args) :], strict=True))
        if not _is_valueless(own):
            results += func(*own[: len(args)], **named) or ()
        elif func._schema.is_mutable:  # nothing comes of it, but that it may be noticed
            increment_version(own[0][0])
        else:
            bare = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), own)
            named = dict(zip(kwargs, bare[len(args) :], strict=True))
            results += _without_values(func, bare[: len(args)], named)
    return None if func._schema.is_mutable else results


def _is_valueless(values: Any) -> bool:
    return any(isinstance(leaf, Valueless) for leaf in pytree.tree_leaves(values))


def _check_devices(func: Any, values: Any) -> None:
    """Raises where PyTorch makes operators functional before it asks here, and would crash then."""
    tensors = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    if any(tensor.device.type not in _EAGER for tensor in tensors):  # torch_xla 2.9
        raise StepError(
            f"torch.{_name(func)} was called at {at_script_line()} with a list of tensors of this "
            f"rank and of parameters that have no values here: {WHERE}. PyTorch/XLA cannot take "
            f"them together: leave out those whose device is meta."
        )


class AbsentParameter(Valueless, nn.Parameter):
    """Stands in a module for a parameter of another pipeline rank."""

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        """Without values. Of what is assigned, the rank that has the parameter takes the values.

        As with writes in place, all ranks run `parameter.data = value`.
        """
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        # The shape and dtype are new here, too. PyTorch refuses tensors of another device.
        bare = value if isinstance(value, Valueless) else without_values(value.detach())
        torch.Tensor.data.__set__(self, bare)  # type: ignore[attr-defined]


class _Detached(Valueless):
    """An absent parameter detached, of which `nn.Parameter(absent)` makes one again."""

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        # PyTorch's own wants a clone of the same class.
        return memo.setdefault(id(self), self.clone())

    def requires_grad_(self, requires_grad: bool = True) -> torch.Tensor:  # type: ignore[override]
        """The parameter; `nn.Parameter` wants the class of what it was given."""
        super().requires_grad_(requires_grad)
        bare = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device="meta")
        return AbsentParameter(bare, requires_grad)


def without_values(tensor: torch.Tensor) -> torch.Tensor:
    """The shape of a buffer that other ranks hold."""
    return _marked(tensor.to("meta"))


def _marked(result: torch.Tensor) -> torch.Tensor:
    if type(result) is not torch.Tensor or result.device.type != "meta":
        return result
    return result.as_subclass(Valueless)


def _check_writes(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raises where a tensor with values would be written from one without."""
    written: list[Any] = []
    sources: list[Any] = []
    for place, argument in enumerate(func._schema.arguments):
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        (written if argument.is_write else sources).append(value)
    for target in written:
        if isinstance(target, (list, tuple)):
            # `torch._foreach_add_(targets, others)` writes to each from its own.
            for i, one in enumerate(target):
                own = [s[i] if isinstance(s, (list, tuple)) else s for s in sources]
                _check_write(func, one, own)
        else:
            _check_write(func, target, sources)


def _check_write(func: Any, target: torch.Tensor, sources: Sequence[Any]) -> None:
    if target.device.type != "meta" and _is_valueless(sources):
        raise StepError(
            f"{_name(func)} writes to a tensor of this rank from a parameter or buffer that "
            f"has no values here at {at_script_line()}: {WHERE}, and nothing would come of it. "
            f"{_ADVICE}"
        )


def _name(func: Any) -> str:
    return func._schema.name.removeprefix("aten::")
