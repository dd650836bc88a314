"""Parameters and buffers of the wrapped model, and where they live.

Before partitioning they are the user's host tensors. Placing moves the ones of this rank to its
device and frees the others, by exchanging the contents of the user's own `Parameter` objects: who
holds a parameter (an optimizer, a scheduler, a closure) holds the placed one afterwards.
This module must not know about graphs or schedules.
"""

import contextlib
import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from mpxla.delayed import forget, is_delayed, materialize
from mpxla.device.backend import Backend
from mpxla.errors import MpxlaError, StepError
from mpxla.graph.capture.carried import CarriedTensor
from mpxla.graph.capture.held_tensors import held_tensors
from mpxla.graph.capture.hooks import refuse_gradient_hooks
from mpxla.graph.capture.own_parameters import Former
from mpxla.graph.capture.tensor_places import HeldTensor, fix_mask, may_decide, set_by_users
from mpxla.graph.exchanged import exchanged
from mpxla.graph.memory import Memory, memory, sharing
from mpxla.graph.partition.modules import joined_path
from mpxla.runtime.divided import DividedParameter
from mpxla.runtime.shared_memory import warn_of_shared_memory
from mpxla.runtime.valueless import AbsentParameter, without_values
from mpxla.stage.flat import FlatShard

__all__ = ["ModelState", "load_into", "with_versions"]


class ModelState:
    """Names and storage of a model's parameters and buffers.

    A tensor that is reachable under several names (tied weights) has one canonical name, the first
    in `named_parameters` order. It keeps that name, and stays known, also when scripts move or drop
    its module: optimizers and compiled steps refer to it. No other tensor gets the name.

    Attributes:
        gradient_shards: which elements this rank has of gradients that a sharding group divides, by
            name of the parameter.
        shards: those of them whose parameters are divided likewise, and have no storage themselves
            once they are placed.
        parts: what it holds of them.
        sharing: buffers that have elements in common, or had before they moved.
        is_lent: whether the module has other tensors in the places of its own, see `lent`.
    """

    def __init__(self, module: nn.Module):
        self.module = module
        self.parameters: dict[str, nn.Parameter] = {}
        self._places: dict[str, list[HeldTensor]] = {}
        self._placed: set[str] = set()
        self._dividing: tuple[int, int, int, bool] | None = None
        self.local_names: frozenset[str] | None = None
        self.gradient_shards: dict[str, FlatShard] = {}
        self.shards: dict[str, FlatShard] = {}
        self.parts: dict[str, nn.Parameter] = {}
        self.is_lent = False
        self.sharing: set[tuple[str, str]] = set()
        self._recorded: list[torch.Tensor] = []
        self._former: list[tuple[StorageWeakRef, Memory | None, nn.Parameter | str]] = []
        self._left: dict[str, Callable[[], torch.Tensor | None]] = {}
        self.take_in()

    def take_in(self) -> None:
        """Names the parameters and buffers that the model has now and had not before."""
        self.check_own()
        known = {id(p): name for name, p in self.parameters.items()}
        new: list[str] = []
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            if id(parameter) not in known:
                known[id(parameter)] = own = self._free(name)
                self.parameters[own] = parameter
                new.append(own)
        for name, places in list(self._places.items()):
            self._places[name] = [place for place in places if not place.is_left]
        owned, num_buffers = self._owned(), len(self._places)
        known |= {id(buffer): name for name, buffer in self.buffers.items()}
        for path, owner in self.module.named_modules():
            for held in held_tensors(owner):
                if held.place not in owned:
                    free, tensor = self._free(joined_path(path, held.key)), held.get()
                    own = free if tensor is None else known.setdefault(id(tensor), free)
                    self._places.setdefault(own, []).append(held)
        if len(self._places) > num_buffers:
            self.sharing |= set(sharing(self.buffers))
        if self._dividing is not None:
            self._divide(new)

    def _free(self, name: str) -> str:
        """A name that no tensor has or had."""
        number, free = 1, name
        while free in self.parameters or free in self._places:
            number += 1
            free = f"{name}#{number}"
        return free

    def _owned(self) -> dict[tuple[int, str], str]:
        return {place.place: name for name, places in self._places.items() for place in places}

    @property
    def canonical_names(self) -> dict[str, str]:
        """Any name that a parameter or buffer has now -> its canonical name."""
        self.take_in()
        known = {id(parameter): name for name, parameter in self.parameters.items()}
        named = self.module.named_parameters(remove_duplicate=False)
        names = {name: known[id(parameter)] for name, parameter in named}
        owned = self._owned()
        # A module in several places has names for its buffers in each, as it has for parameters.
        for path, owner in self.module.named_modules(remove_duplicate=False):
            for held in held_tensors(owner):
                names |= {joined_path(path, key): owned[held.place] for key in held.keys}
        return names

    @property
    def names_now(self) -> dict[str, str]:
        """Canonical name -> the first name that the tensor has now; without what has none."""
        found: dict[str, str] = {}
        for name, canonical in self.canonical_names.items():
            found.setdefault(canonical, name)
        return found

    @property
    def is_placed(self) -> bool:
        """Whether parameters have moved to their ranks."""
        return self.local_names is not None

    @property
    def buffer_names(self) -> list[str]:
        """Canonical names of buffers, also of what has no tensor now."""
        return list(self._places)

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """Current buffers by canonical name, without those that scripts have deleted."""
        found = ((name, self.buffer(name)) for name in self._places)
        return {name: buffer for name, buffer in found if buffer is not None}

    def is_carried(self, name: str) -> bool:
        """Whether it is a tensor in an attribute, which replicas have of their own."""
        return any(isinstance(place, CarriedTensor) for place in self._places.get(name, ()))

    def buffer(self, name: str) -> torch.Tensor | None:
        """A current buffer; None of what is none, or was deleted."""
        held = (place.get() for place in self._places.get(name, ()))
        return next((buffer for buffer in held if buffer is not None), None)

    def set_buffer(self, name: str, value: torch.Tensor) -> None:
        """Replaces a buffer in every module that holds it."""
        for place in self._places[name]:
            place.put(value)
        self._left[name] = weakref.ref(value)

    def is_left(self, name: str) -> bool:
        """Whether a buffer is what was set here: no script has put another one in its place."""
        return name in self._left and self.buffer(name) is self._left[name]()

    def fix_masks(self) -> list[torch.Tensor]:
        """Makes masks among the buffers constants that every rank has; returns these."""
        has_all = all(map(self.holds, self.parameters))
        masks: list[torch.Tensor] = []
        for name, buffer in self.buffers.items():
            if (
                may_decide(buffer)
                and not self.is_carried(name)
                and (has_all or name not in self._placed)
            ):
                mask = buffer.cpu()
                fix_mask(mask)
                self.set_buffer(name, mask)
                del self._places[name]
                masks.append(mask)
        return masks

    def adopt_buffer(self, name: str, value: torch.Tensor) -> None:
        """Makes this rank one of the holders of a buffer."""
        self.set_buffer(name, value)
        self.local_names = (self.local_names or frozenset()) | {name}

    def forget_buffer(self, name: str) -> None:
        """Has no values of a buffer that other ranks hold, whatever somebody has put there."""
        if self.buffer(name) is None:  # where a script has put None, the others have some again
            for place in self._places.get(name, ()):
                if isinstance(place, CarriedTensor):
                    place.attribute.start()
        buffer = self.buffer(name)
        if buffer is not None and not buffer.is_meta:
            self.set_buffer(name, without_values(buffer))

    def leave_buffer(self, name: str) -> None:
        """Frees a buffer, which other ranks hold from now on."""
        self.forget_buffer(name)
        self.local_names = (self.local_names or frozenset()) - {name}

    def divide(self, index: int, size: int, threshold: int, gradients_only: bool) -> None:
        """Decides which parameters the ranks of a sharding group divide. Before placing.

        This rank has an index in the group; parameters with fewer elements than the threshold stay
        whole, and all do if only gradients are divided.
        """
        self._dividing = index, size, threshold, gradients_only
        self._divide(self.parameters)

    def _divide(self, names: Iterable[str]) -> None:
        assert self._dividing is not None, "it has been decided"
        index, size, threshold, gradients_only = self._dividing
        for name in names:
            count, shape = self.parameters[name].numel(), tuple(self.parameters[name].shape)
            if size > 1 and count >= threshold and FlatShard.fits(count, size):
                self.gradient_shards[name] = FlatShard(shape, index, size)
        self.shards = {} if gradients_only else dict(self.gradient_shards)

    def whole_on_host(self, name: str) -> torch.Tensor:
        """The value of a parameter that is to be divided, before it is."""
        return materialize(name, self.parameters[name]).detach()

    def take_part(self, name: str, value: torch.Tensor, backend: Backend) -> None:
        """Holds this rank's part of a parameter, of which the value on the host is the whole."""
        (part,) = backend.publish(backend.put([self.shards[name].take(value)]))
        requires_grad = self.parameters[name].requires_grad
        self.set_part(name, nn.Parameter(part, requires_grad=requires_grad))

    def set_part(self, name: str, part: nn.Parameter) -> None:
        """Holds a part of a parameter in the place of all of it."""
        self.parts[name] = part
        _exchange(name, self.parameters[name], torch.device("meta"), DividedParameter)
        self._divided(name).forget_writes()  # otherwise writes before the first look are unseen

    def check_divided(self) -> None:
        """Checks that nobody has written to what is divided, where it would be lost.

        Raises:
            StepError: somebody has, or the module has other tensors.
        """
        self.check_own()
        for name in self.parts:
            self._divided(name).check(name)

    def forget_writes(self) -> None:
        """Takes what was written to divided parameters as known; parts have the values."""
        for name in self.parts:
            self._divided(name).forget_writes()

    def _divided(self, name: str) -> DividedParameter:
        parameter = self.parameters[name]
        assert isinstance(parameter, DividedParameter), "it was made one with its part"
        return parameter

    def end_dividing(self) -> None:
        """Called when all parts are there: nobody needs the model's initializers any more."""
        forget(self._recorded)
        self._recorded = []

    def held(self, name: str) -> nn.Parameter:
        """What this rank has of one of its parameters."""
        return self.parts.get(name, self.parameters[name])

    def holds(self, name: str) -> bool:
        """Whether this rank has a tensor; what is new and not placed, if it has values here."""
        if name in self._placed:
            return name in (self.local_names or ())
        tensor = self.parameters.get(name)
        tensor = self.buffer(name) if tensor is None else tensor
        return tensor is not None and (is_delayed(tensor) or not tensor.is_meta)

    @property
    def waiting(self) -> list[nn.Parameter]:
        """Parameters that are not placed yet."""
        return [p for name, p in self.parameters.items() if name not in self._placed]

    def give(self, name: str, value: torch.Tensor) -> None:
        """Gives a value to a tensor that is not placed and has none here."""
        parameter = self.parameters.get(name)
        if parameter is None:
            self.set_buffer(name, value)
            return
        moved = nn.Parameter(value, requires_grad=parameter.requires_grad)
        _swap(parameter, moved)

    def place(self, local_names: Iterable[str], device: torch.device) -> None:
        """Moves local parameters and buffers to the device, and frees others; placed ones stay.

        Those of this rank are given by their canonical names.

        Raises:
            MpxlaError: a parameter is still part of an autograd graph, or has hooks on its
                gradient.
        """
        refuse_gradient_hooks(self.module)
        if self.waiting:
            warn_of_shared_memory(self.parameters)
        _release_parameters(self.module)
        local = self.local_names = (self.local_names or frozenset()) | frozenset(local_names)
        parameters = {n: p for n, p in self.parameters.items() if n not in self._placed}
        buffers = {n: b for n, b in self.buffers.items() if n not in self._placed}
        self._placed |= parameters.keys() | buffers.keys()
        self._recorded += [t.detach() for t in (*parameters.values(), *buffers.values())]
        for name, parameter in parameters.items():
            self._note_former(parameter, parameter)
            if name in self.shards and name in local:
                continue  # it goes to the device part by part, once replicas have equal values
            if name in local:
                _exchange(name, parameter, device, nn.Parameter)
            else:
                _exchange(name, parameter, torch.device("meta"), AbsentParameter)
        for name, buffer in buffers.items():
            self._note_former(buffer, name)
            if name in local:
                self.set_buffer(name, materialize(name, buffer).to(device))
            else:
                self.set_buffer(name, without_values(buffer))
        if not self.shards:
            self.end_dividing()

    def stand_as(self, other: "ModelState") -> None:
        """Takes the places of a model that this one is a copy of, which is placed."""
        names = other.names_now
        self.local_names = frozenset(names[n] for n in other.local_names or () if n in names)
        self._placed = {*self.parameters, *self.buffers}
        self.divide_as(other)
        for name, part in other.parts.items():
            if name in names:
                copied = nn.Parameter(part.detach().clone(), requires_grad=part.requires_grad)
                self.set_part(names[name], copied)

    def divide_as(self, other: "ModelState") -> None:
        """Has parts of the parameters of which another model, that this is a copy of, has some."""
        names = other.names_now
        self.shards = {names[n]: shard for n, shard in other.shards.items() if n in names}

    def _note_former(self, tensor: torch.Tensor, own: nn.Parameter | str) -> None:
        if tensor.device.type == "cpu" and tensor.layout is torch.strided:
            storage = StorageWeakRef(tensor.untyped_storage())
            self._former.append((storage, memory(tensor), own))

    def former_owner(self, tensor: torch.Tensor) -> nn.Parameter | None:
        """The parameter that a host tensor shared its memory with before parameters moved."""
        if tensor.device.type != "cpu":
            return None
        own = StorageWeakRef(tensor.untyped_storage())
        former = (p for ref, _, p in self._former if ref == own and not isinstance(p, str))
        return next((p for p in former if not isinstance(p, AbsentParameter)), None)

    def former(self) -> Former:
        """Parameters and buffers by their memory before they moved, if something still has it."""
        found: dict[Memory, torch.Tensor] = {}
        for storage, where, own in self._former:
            if where is None or storage.expired():
                continue
            if isinstance(own, nn.Parameter):
                found[where] = own
            elif self.is_left(own) and (buffer := self.buffer(own)) is not None:
                found[where] = buffer
        return found

    def gather_on_host(self, full: Mapping[str, Any]) -> None:
        """Makes all parameters and buffers host tensors with these values, by any name."""
        self.shards, self.gradient_shards, self.parts = {}, {}, {}
        names, buffers = self.names_now, self.buffers
        for name, parameter in self.parameters.items():
            if name not in names:
                continue  # the model has it no more
            value = full[now] if (now := names[name]) in full else parameter.detach().cpu()
            moved = nn.Parameter(value.clone(), requires_grad=parameter.requires_grad)
            _swap(parameter, moved)
        for name in buffers.keys() & names.keys():
            value = full[now].clone() if (now := names[name]) in full else buffers[name].cpu()
            self.set_buffer(name, value)
        self.local_names = frozenset(names)
        self._placed = set(names)

    @contextlib.contextmanager
    def lent(self, others: Mapping[int, torch.Tensor]) -> Generator[None]:
        """While this lasts, the module has other tensors in the places of its own.

        They are given by the ids of the own ones. A script may move them in the module.
        """
        buffers = self.buffers
        lent = {name: others[id(own)] for name, own in buffers.items() if id(own) in others}
        own = {id(others[id(p)]): p for p in self.parameters.values()}
        self._put(others)
        for name, buffer in lent.items():
            self.set_buffer(name, buffer)
        self.is_lent = True
        try:
            yield
        finally:
            self.is_lent = False
            for name, buffer in buffers.items():
                self.set_buffer(name, buffer)
            self._put(own)
            for parameter in own.values():
                parameter.requires_grad_(others[id(parameter)].requires_grad)

    def check_own(self) -> None:
        """Raises where the module has other tensors."""
        if self.is_lent:
            raise StepError(
                "a step function, optimizer.step() or a function that loads or saves was called "
                "in a block of model.summon_full_params(), where the module has copies. Call it "
                "after the block."
            )

    def _put(self, others: Mapping[int, torch.Tensor]) -> None:
        """Exchanges parameters in all modules, by the ids of those that are there."""
        for module in self.module.modules():
            table: dict[str, Any] = module._parameters  # pyright: ignore[reportPrivateUsage]
            table.update({k: others[id(p)] for k, p in table.items() if id(p) in others})
            if isinstance(module, nn.RNNBase):  # which has a list of them, too
                module._init_flat_weights()  # pyright: ignore[reportPrivateUsage]

    def local_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(canonical name, parameter) of what this rank holds."""
        for name, parameter in self.parameters.items():
            if self.local_names is None or name in self.local_names:
                yield name, parameter


def _release_parameters(module: nn.Module) -> None:
    """Lets go of what modules have computed of their parameters, which keeps those from moving.

    `torch.nn.utils.weight_norm` leaves the first weight that way; each forward makes it anew.
    """
    for part in module.modules():
        for name, value in vars(part).items():
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                vars(part)[name] = value.detach()


def load_into(
    module: nn.Module, values: Mapping[str, Any], strict: bool, versions: Any = None
) -> Any:
    """`module.load_state_dict` where parameters of other ranks have no storage.

    Values for those are checked for their shape and dropped. Tied parameters need one value, under
    any of their names. The versions of the modules that gave the values are torch's `_metadata` of
    a state dict; those of this module if none are given.
    """
    targets: Any = module.state_dict(keep_vars=True)
    given = {id(target): values[name] for name, target in targets.items() if name in values}
    tied = {name: given[id(target)] for name, target in targets.items() if id(target) in given}
    values = {**tied, **values}
    absent = {
        name: torch.empty_like(target)
        for name, target in targets.items()
        if isinstance(target, torch.Tensor) and target.is_meta
        if isinstance(value := values.get(name), torch.Tensor) and value.shape == target.shape
    }
    # Values are written into parameters: exchanged for others, absent ones would be of two classes.
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(False)
    try:
        versions = targets._metadata if versions is None else versions
        return module.load_state_dict(with_versions({**values, **absent}, versions), strict)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)


def with_versions(values: Mapping[str, Any], versions: Any) -> dict[str, Any]:
    """A state dict with versions of modules, by which these load what older ones have saved."""
    found: Any = OrderedDict(values)
    found._metadata = versions
    return found


_getweakrefs = weakref.getweakrefs


def _weak_references(tensor: torch.Tensor) -> list[Any]:
    """Those to a tensor because of which it cannot become another one, in which torch counts all.

    Plain ones mean the object, as recurrent layers' to their weights and averages' to parameters;
    what keeps something for a tensor (an array, a value that is known) has a class of its own.
    """
    return [found for found in _getweakrefs(tensor) if type(found) is not weakref.ref]


def _swap(parameter: nn.Parameter, moved: nn.Parameter) -> None:
    """Makes a parameter another tensor, with the attributes that users have given it."""
    vars(moved).update(set_by_users(parameter))
    if _weak_references(parameter):
        gc.collect()  # a capture that has ended early leaves some
    with exchanged(weakref, getweakrefs=_weak_references):
        torch.utils.swap_tensors(parameter, moved)
    for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        hooks = getattr(parameter, kind)
        if hooks:  # autograd calls those of the other tensor otherwise
            setattr(parameter, kind, hooks)


def _exchange(
    name: str,
    parameter: nn.Parameter,
    device: torch.device,
    kind: type[nn.Parameter],
) -> None:
    if parameter.device == device and isinstance(parameter, kind):
        return
    gradient = parameter.grad
    parameter.grad = None
    if device.type == "meta":  # of torch's own class, also where the parameter has no values
        value = torch.empty_strided(
            parameter.shape, parameter.stride(), dtype=parameter.dtype, device=device
        )
    else:
        value = materialize(name, parameter)
    moved = kind(value.to(device), requires_grad=parameter.requires_grad)
    if gradient is not None and device.type != "meta":
        moved.grad = gradient.to(device)
    try:
        _swap(parameter, moved)
    except RuntimeError as error:
        raise MpxlaError(
            f"parameter {name} cannot move to {device}: {error}. Something still refers to it from "
            f"outside Python's view (an autograd graph of an earlier forward, or something that is "
            f"kept for it). Drop losses and outputs of earlier forwards before wrapping the model."
        ) from error
