"""Copies of the distributed model, as `copy.deepcopy` makes them: for averages of its weights.

A copy holds the same parameters and buffers on the same ranks, with values of its own. It computes
on the programs of its model: while a step function is called with the copy, model and copy exchange
their values.

    averaged = torch.optim.swa_utils.AveragedModel(model)      # makes a copy
    averaged.update_parameters(model)                          # local values only
    evaluate(averaged, x)                                      # a step function without backward
"""

import contextlib
import copy
import functools
import weakref
from collections.abc import Generator, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from mpxla.comm.transport import Group
from mpxla.delayed import is_delayed
from mpxla.errors import MpxlaError, StepError
from mpxla.graph.capture.recorder import current_recorder
from mpxla.graph.user_code import at_user_line
from mpxla.nn.distribute import check_wholes, without_shards
from mpxla.parallel.contents import PartitionedModule
from mpxla.runtime.state import load_into, with_versions

if TYPE_CHECKING:
    from mpxla.parallel.model import DistributedModel

__all__ = ["DistributedCopy", "lending"]

_MARK = "passes_over_absent"
_SETTINGS = ("n_averaged", "use_buffers", "avg_fn", "multi_avg_fn")
"""What `AveragedModel.update_parameters` reads beside parameters and buffers (torch 2.9)."""


class DistributedCopy(PartitionedModule):
    """What `copy.deepcopy(model)` gives: the model with values of its own, without training."""

    def __init__(self, source: "DistributedModel | DistributedCopy", memo: dict[int, Any]):
        if any(is_delayed(tensor) for tensor in source.module.state_dict(keep_vars=True).values()):
            raise MpxlaError(
                f"the model was copied{at_user_line()} before it had values "
                f"(smp.delay_param_initialization): copy it after the first step."
            )
        module = copy.deepcopy(source.module, memo)
        super().__init__(module, source._session, source.shards_of_tensors)
        self.training = source.training
        original = source.original if isinstance(source, DistributedCopy) else source
        # A reference that is no submodule.
        self.__dict__["_original"] = weakref.ref(original)
        if original.partitioned:
            self.tensors.stand_as(source.tensors)
        original.copies.append(weakref.ref(self))
        self._register_load_state_dict_pre_hook(self._adapt)
        self.register_load_state_dict_post_hook(lambda *_: self.tensors.forget_writes())
        # What `state_dict` has given of values on a device, with the versions that they had.
        self._shown: dict[str, tuple[torch.Tensor, int]] = {}
        _average_what_is_here()
        self.settle()

    def __deepcopy__(self, memo: dict[int, Any]) -> "DistributedCopy":
        return DistributedCopy(self, memo)

    @property
    def original(self) -> "DistributedModel":
        """The model that this is a copy of."""
        original = self.__dict__["_original"]()
        if original is None:
            raise MpxlaError("the distributed model that this is a copy of does not exist any more")
        return original

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the copied module, outside of step functions and with one stage only.

        Raises:
            StepError: called in a step function that did not get the copy as an argument, or with
                several stages outside of one.
        """
        if current_recorder() is not None:
            raise StepError(
                f"a copy of the distributed model was called in a step function{at_user_line()} "
                f"that did not get it as an argument of its own. Pass the copy (or the "
                f"AveragedModel) in the place of the model: evaluate(averaged, x)."
            )
        is_whole = self.tensors.is_lent
        if not is_whole and (self.original.num_stages > 1 or self.tensors.shards):
            raise StepError(
                f"a copy of the distributed model was called outside a step function"
                f"{at_user_line()}, and its parts live on different ranks: pass it to a function "
                f"decorated with @smp.step, or call it on all ranks in a block of its "
                f"summon_full_params(). (torch.optim.swa_utils.update_bn calls models by "
                f"itself; use AveragedModel(model, use_buffers=True), which averages statistics.)"
            )
        return self.module(*args, **kwargs)

    def together(self, what: str, ranks: Group) -> contextlib.AbstractContextManager[None]:
        """As that of the model."""
        return self.original.together(what, ranks)

    def settle(self) -> None:
        """Takes what scripts have written to values of `state_dict`.

        And starts pending computation of values, which would become more with every update.
        """
        shown = self._shown.items()
        written = {name: value for name, (value, version) in shown if value._version != version}
        if written:
            self._load(written, strict=False)
            self._shown |= {name: (value, value._version) for name, value in written.items()}
        tensors = (*self.parameters(), *self.buffers(), *self.tensors.parts.values())
        self._backend.adopt([tensor for tensor in tensors if not tensor.is_meta])

    def follow(self, device: torch.device) -> None:
        """Called when the model is placed, or something of it that it got later."""
        self._backend.forget(self.parameters())
        state, other = self.tensors, self.original.tensors
        names, local = other.names_now, other.local_names or ()
        state.divide_as(other)
        state.place((names[n] for n in local if n in names), device)
        for name in state.shards:
            if state.holds(name) and name not in state.parts:
                state.take_part(name, state.whole_on_host(name), self._backend)
        state.end_dividing()

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """As that of the model; also as part of the state dict of a module around the copy.

        What is written to values that this rank has is written to the copy: at once, if they are on
        the host (jax); otherwise when a step function runs, or this is called again.
        """
        self.settle()
        destination = kwargs.pop("destination", None)
        prefix, _ = kwargs.pop("prefix", ""), kwargs.pop("keep_vars", None)
        full: Any = super().state_dict(*args, **kwargs)
        # As in torch, averages may be written to what a state dict holds: `value.lerp_(other, w)`.
        self._shown = {}
        state = self.tensors
        canonical = state.canonical_names
        for name, value in self.module.state_dict().items():
            is_part = canonical.get(name) in state.parts
            if not is_part and (value.is_meta or value.shape != full[name].shape):
                continue
            if not is_part and value.device.type == "cpu":
                full[name] = value
            else:
                self._shown[name] = full[name], full[name]._version
        named = {prefix + name: value for name, value in full.items()}
        versions = {(prefix + name).strip("."): v for name, v in full._metadata.items()}
        if destination is None:
            return with_versions(named, versions)
        destination.update(named)
        destination._metadata.update(versions)
        return destination

    def load_state_dict(  # type: ignore[override]
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Loads a full state dict of the plain model."""
        check_wholes(state_dict, self.shards_of_tensors, self.canonical_names)
        parts = without_shards(state_dict, self.shards_of_tensors, self.canonical_names)
        self._backend.forget(self.parameters())  # torch may swap them
        self._shown = {}
        versions = getattr(state_dict, "_metadata", {})
        result = self._load(parts, strict, versions)
        self.settle()
        return result

    def _load(self, values: Mapping[str, Any], strict: bool, versions: Any = None) -> Any:
        result = load_into(self.module, values, strict, versions)
        self.tensors.forget_writes()
        self._take_parts(values)
        return result

    def _take_parts(self, values: Mapping[str, Any]) -> None:
        """Takes parts of whole values, by any name, of parameters that are divided."""
        state, names = self.tensors, self.tensors.canonical_names
        given = {names[n]: value for n, value in values.items() if names.get(n) in state.parts}
        for name, value in given.items():
            part = state.parts[name]
            part.detach().copy_(state.shards[name].take(value.detach().to("cpu", part.dtype)))

    def _adapt(self, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        """Lets a module around the copy load it by the names of the plain model."""
        own = self.module.state_dict(keep_vars=True)
        for name, target in own.items():
            if prefix + name in state_dict:
                given = {name: state_dict.pop(prefix + name)}
                value = without_shards(given, self.shards_of_tensors, self.canonical_names)[name]
                absent = target.is_meta and value.shape == target.shape
                state_dict[f"{prefix}module.{name}"] = torch.empty_like(target) if absent else value
                self._take_parts({name: value})

    @contextlib.contextmanager
    def lent(self) -> Generator[None]:
        """While this lasts, the model has the values and modes of this copy, and the other way."""
        original = self.original
        self.tensors.check_divided()
        modes = [(module, module.training) for module in original.module.modules()]
        self.settle()
        self._exchange()
        for (module, _), own in zip(modes, self.module.modules(), strict=True):
            module.training = own.training
        try:
            yield
        finally:
            for module, is_training in modes:
                module.training = is_training
            self._exchange()

    def parts_with(self, model: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """This rank's parts of divided parameters, with those of the model."""
        theirs, own = model.tensors, self.tensors
        held, names = {now: n for n, now in own.names_now.items()}, theirs.names_now
        return [(own.parts[held[names[n]]], p) for n, p in theirs.parts.items() if n in names]

    def _exchange(self) -> None:
        theirs, own = self.original.tensors, self.tensors
        names, held = theirs.names_now, {now: n for n, now in own.names_now.items()}
        if set(names.values()) != held.keys():
            differing = sorted(set(names.values()) ^ held.keys())
            raise StepError(
                f"a copy of the distributed model was used{at_user_line()} that has other "
                f"parameters or buffers than the model has now: {', '.join(differing[:5])}. Copy "
                f"the model anew (copy.deepcopy, AveragedModel) after a change of its modules."
            )
        mine, buffers = own.buffers, theirs.buffers
        for name, now in names.items():
            other = held[now]
            if name in theirs.parts:
                part, copied = theirs.parts[name], own.parts[other]
                part.data, copied.data = copied.data, part.data
            elif name in theirs.parameters:
                parameter, copied = theirs.parameters[name], own.parameters[other]
                parameter.data, copied.data = copied.data, parameter.data
            elif buffers[name].is_meta == mine[other].is_meta:
                theirs.set_buffer(name, mine[other])
                own.set_buffer(other, buffers[name])


def lending(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[DistributedCopy], list[Any], dict[str, Any]]:
    """The copies that a step function is called with, and arguments with models in their places.

    Raises:
        StepError: it is called with several copies of one model, or with that model as well.
    """
    values = [*args, *kwargs.values()]
    copies = list({id(c): c for c in map(_copy_in, values) if c is not None}.values())
    originals = [id(copy.original) for copy in copies]
    if len(set(originals)) < len(copies) or not set(originals).isdisjoint(map(id, values)):
        raise StepError(
            f"a step function was called{at_user_line()} with a copy of the distributed model "
            f"and with another one, or with the model itself. It runs the programs of the model on "
            f"the values of one of them: call it once for each."
        )

    def exchanged(value: Any) -> Any:
        found = _copy_in(value)
        return value if found is None else found.original

    return (
        copies,
        [exchanged(value) for value in args],
        {name: exchanged(value) for name, value in kwargs.items()},
    )


def _copy_in(value: Any) -> DistributedCopy | None:
    inner: nn.Module | Any = value.module if isinstance(value, AveragedModel) else value
    return inner if isinstance(inner, DistributedCopy) else None


# --- torch's averages ---------------------------------------------------------------------------


def _average_what_is_here() -> None:
    """Lets `AveragedModel` pass over parameters of other ranks. Once in a process.

    They have no values, which functions that average (`get_swa_multi_avg_fn`, torch 2.9) read.
    """
    original = AveragedModel.update_parameters
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def update_parameters(self: AveragedModel, model: nn.Module) -> None:
        if not isinstance(self.module, DistributedCopy):
            return original(self, model)
        parameters = _here(self.module.parameters(), model.parameters())
        parameters += self.module.parts_with(model)
        buffers = _here(self.module.buffers(), model.buffers())
        own, others = (
            SimpleNamespace(
                parameters=functools.partial(list, [pair[side] for pair in parameters]),
                buffers=functools.partial(list, [pair[side] for pair in buffers]),
            )
            for side in (0, 1)
        )
        settings = {name: getattr(self, name) for name in _SETTINGS}
        # `n_averaged` is counted in place.
        view = SimpleNamespace(module=own, parameters=own.parameters, **settings)
        original(cast(Any, view), cast(Any, others))
        self.module.settle()

    setattr(update_parameters, _MARK, True)
    AveragedModel.update_parameters = update_parameters


def _here(
    own: Iterable[torch.Tensor], others: Iterable[torch.Tensor]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(a, b) for a, b in zip(own, others, strict=True) if not a.is_meta]
