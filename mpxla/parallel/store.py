"""Parameters of one model on one rank: where they live, what is computed with, what is updated.

The only writer of their contents. The model's `nn.Parameter`s, gradients and the param groups of
optimizers are views of it:

    name -> ranks          pipeline ranks that hold the parameter
            compute copy   the model's `nn.Parameter`, which stage programs read
            update copy    what optimizers hold: the same, or a master and/or a piece of it
            gradient       on the update copy, of its type; a plain parameter's own otherwise
            state          the optimizer's, for the update copy

Where there is an update copy, the model's parameter has no gradient after a step: torch ties a
gradient's type to its tensor's, and the gradient is wider or a part. `param.grad` shows that of a
master, or gathers the pieces of all replicas. This module must not know how gradients
are reduced, nor optimizers.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from mpxla.comm.transport import Group, Transport
from mpxla.device.backend import Backend, Buffer
from mpxla.log import warn_once
from mpxla.parallel.gradients.buckets import Bucket, fill_buckets, sum_gradients
from mpxla.parallel.gradients.in_scripts import (
    lend_gradient,
    own_gradient,
    set_own_gradient,
)
from mpxla.parallel.gradients.lent import LentGradients
from mpxla.parallel.programs import Programs
from mpxla.parallel.state_dicts import to_host
from mpxla.parallel.updates.copy import Masters, UpdateCopy
from mpxla.parallel.updates.zero import Parts, Pieces, Shard
from mpxla.runtime.divided import check_no_gradient
from mpxla.runtime.state import ModelState
from mpxla.stage.accumulation import accumulator_spec
from mpxla.stage.spec import TensorSpec

__all__ = ["ParameterStore", "exchange_gradients", "release", "set_gradients", "set_values"]


def set_values(tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Exchanges memory and type of parameters; they stay the same objects."""
    for tensor, value in zip(tensors, values, strict=True):
        tensor.data = value


def _is_rounded(saved: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Where a value is that of a saved master in its type, or in the 16 bits it was saved in."""
    types = (value.dtype, torch.bfloat16, torch.float16)
    return torch.stack([saved.to(t).to(value.dtype) == value for t in types]).any(0)


def release(tensors: Iterable[torch.Tensor]) -> None:
    """Takes the memory from parameters whose buffers are donated, until others are assigned."""
    nothing: dict[Any, torch.Tensor] = {}
    for tensor in tensors:
        kind = tensor.dtype, tensor.device
        if kind not in nothing:
            nothing[kind] = torch.empty(0, dtype=kind[0], device=kind[1])
        tensor.data = nothing[kind]


def set_gradients(
    tensors: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
) -> None:
    """Exchanges gradients; None takes one away."""
    for tensor, gradient in zip(tensors, gradients, strict=True):
        set_own_gradient(tensor, gradient)


def exchange_gradients(
    owners: Sequence[torch.Tensor],
    backend: Backend,
    compute: Callable[[Sequence[Buffer]], Sequence[Buffer]],
) -> None:
    """Exchanges gradients for what is computed from them, which may take their memory.

    The owners have a gradient each; what `compute` takes is donated.
    """
    # By `map`: a name for each gradient would outlive this line, and the last one would be copied.
    held = backend.adopt([g for g in map(own_gradient, owners) if g is not None])
    set_gradients(owners, [None] * len(owners))  # what somebody sees is not donated
    try:
        values = compute(held)
    except BaseException:  # it did not start
        set_gradients(owners, backend.publish(held))
        raise
    set_gradients(owners, backend.publish(values))


class ParameterStore:
    """See the head of this file.

    Args:
        state: names, `Parameter` objects and buffers of the model.
        backend: of this rank's device.
        master_dtype: 16-bit parameters that are trained get update copies of this type; None: every
            parameter is updated in its own. (Gradients are summed in float32 anyway.)
        lends_gradients: whether parameters show the gradients of their masters and pieces.

    Attributes:
        ranks: pipeline ranks that hold each parameter and buffer; empty before they are placed.
        trained: parameters that some step has trained; the same on all ranks.
        is_divided: whether replicas share the updates.
        shards: buckets of parameters that they share the updates of, here.
        programs: on parameters and gradients of this model.
        lent: what scripts see as gradients of divided parameters.
    """

    def __init__(
        self,
        state: ModelState,
        backend: Backend,
        master_dtype: torch.dtype | None = None,
        lends_gradients: bool = True,
    ):
        self.state = state
        self.backend = backend
        self.master_dtype = master_dtype
        self.lends_gradients = lends_gradients
        self.ranks: Mapping[str, tuple[int, ...]] = {}
        self.trained: set[str] = set()
        self.is_divided = False
        self.shards: dict[Bucket, Shard] = {}
        self.programs = Programs(backend)
        self._parts: list[Shard | Masters | Parts | Pieces] = []
        self._part_of: dict[str, Shard | Masters | Parts | Pieces] = {}
        self._waiting: dict[str, Buffer] = {}
        self.lent = LentGradients(self.copy_of, self._waiting, backend)
        self._spent: set[str] = set()
        self._saved_masters: dict[str, torch.Tensor] = {}

    # --- entries --------------------------------------------------------------------------------

    def local_tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers that are whole on this rank, by name."""
        local = self.state.local_names or frozenset()
        buffers = {n: b for n, b in self.state.buffers.items() if n in local}
        whole = {n: p for n, p in self.state.local_parameters() if n not in self.state.shards}
        return {**whole, **buffers}

    def gradient_spec(self, name: str) -> TensorSpec:
        """What a parameter's gradient is summed and reduced in; that of its part, if it has one."""
        spec, shard = TensorSpec.of(self.state.held(name)), self.state.gradient_shards.get(name)
        return accumulator_spec(spec if shard is None else shard.spec(spec.dtype))

    def _update_dtype(self, name: str) -> torch.dtype:
        """What a parameter is updated in."""
        own = self.state.parameters[name].dtype
        is_widened = self.gradient_spec(name).dtype != own
        return self.master_dtype if is_widened and self.master_dtype is not None else own

    @property
    def has_copies(self) -> bool:
        """Whether optimizers hold something else than some of the parameters, on some rank.

        The same on all ranks: they know the types of parameters that they do not hold.
        """
        parameters = self.state.parameters.items()
        return self.is_divided or any(
            (p.requires_grad or name in self.trained) and self._update_dtype(name) != p.dtype
            for name, p in parameters
        )

    @property
    def num_parts(self) -> int:
        """Grows when there are new update copies."""
        return len(self._parts)

    def has_copy(self, name: str) -> bool:
        """Whether optimizers hold something else than the parameter, here or on other replicas."""
        return name in self._part_of

    def copy_of(self, name: str) -> UpdateCopy | None:
        """The update copy of a parameter on this rank, if there is one."""
        part = self._part_of.get(name)
        return None if part is None else part.copies.get(name)

    def copies(self) -> Iterator[UpdateCopy]:
        """All update copies of this rank."""
        return (copy for part in self._parts for copy in part.copies.values())

    def owner(self, name: str) -> nn.Parameter | None:
        """What has the gradient of a parameter here; None where another replica has all of it."""
        if name not in self._part_of:
            return self.state.parameters[name]
        copy = self.copy_of(name)
        return None if copy is None else copy.parameter

    # --- update copies --------------------------------------------------------------------------

    def _without_copy(self, names: Iterable[str]) -> dict[str, nn.Parameter]:
        """Those of some parameters that are here and have no update copy yet."""
        wanted = set(names)
        return {
            name: parameter
            for name, parameter in self.state.local_parameters()
            if name in wanted
            if name not in self._part_of and name not in self.state.shards
        }

    def divide(
        self, names: Iterable[str], capacity_bytes: int, transport: Transport, group: Group
    ) -> None:
        """Divides parameters over replicas; all ranks of the group call it, with equal values.

        Names of parameters that are elsewhere are left out; the group holds the same parameters, by
        dp_rank.
        """
        self.is_divided = True
        groups: dict[tuple[int, ...], dict[str, TensorSpec]] = {}
        for name, parameter in self._without_copy(names).items():
            groups.setdefault(self.ranks[name], {})[name] = TensorSpec.of(parameter)
        for holders, specs in sorted(groups.items()):
            for narrow in fill_buckets(specs, holders, capacity_bytes, len(group)):
                bucket = replace(narrow, specs=tuple(map(self.gradient_spec, narrow.names)))
                parameters = self.state.parameters
                dtype = self._update_dtype(narrow.names[0])
                shard = Shard(bucket, parameters, dtype, transport, group, self.programs)
                self.shards[bucket] = shard
                self._add(shard)

    def divide_gradients(
        self, names: Iterable[str], capacity_bytes: int, transport: Transport, group: Group
    ) -> None:
        """Divides updates as gradients are; all ranks of the group call it, with equal values.

        Names of parameters that are elsewhere are left out; at most `capacity_bytes` are gathered
        at a time.
        """
        self.is_divided = True
        groups: dict[tuple[tuple[int, ...], torch.dtype], dict[str, TensorSpec]] = {}
        for name, parameter in self._without_copy(names).items():
            if name in self.state.gradient_shards:
                key = self.ranks[name], self._update_dtype(name)
                groups.setdefault(key, {})[name] = TensorSpec.of(parameter)
        for (holders, dtype), specs in groups.items():
            for bucket in fill_buckets(specs, holders, capacity_bytes):
                shards = {name: self.state.gradient_shards[name] for name in bucket.names}
                held, programs = self.state.parameters, self.programs
                self._add(Pieces(shards, held, dtype, transport, group, programs))

    def widen(self, names: Iterable[str]) -> None:
        """Gives 16-bit parameters masters, if the store has a type for those.

        Names of those that are elsewhere or have one are left out.
        """
        narrow = {
            name: parameter
            for name, parameter in self._without_copy(names).items()
            if self._update_dtype(name) != parameter.dtype
        }
        if narrow:
            assert self.master_dtype is not None, "only masters are wider"
            masters = Masters(narrow, self.master_dtype, self.programs)
            self._add(masters)
            for name, copy in masters.copies.items() if self.lends_gradients else ():
                lend_gradient(narrow[name], copy.parameter)

    def set_part(self, name: str, value: torch.Tensor) -> None:
        """Holds this rank's part of a parameter, of which the value on the host is the whole."""
        self.state.take_part(name, value, self.backend)

    def update_parts(self) -> None:
        """Lets optimizers update the parts of parameters that are new here."""
        names = [name for name in self.state.parts if name not in self._part_of]
        if self.state.shards:
            self.is_divided = True
        if names:
            self._add(Parts(self.state, names, self._update_dtype, self.programs))

    def _add(self, part: "Shard | Masters | Parts | Pieces") -> None:
        self._parts.append(part)
        self._part_of.update(dict.fromkeys(part.names, part))
        if not isinstance(part, Masters) and self.lends_gradients:
            self.lent.lend({name: self.state.parameters[name] for name in part.names})

    def _concerned(self, names: Iterable[str]) -> list[Shard | Masters | Parts | Pieces]:
        found = {id(self._part_of[name]) for name in names if name in self._part_of}
        return [part for part in self._parts if id(part) in found]

    def renew(self, names: Iterable[str]) -> None:
        """Update copies take what was written to the parameters named since the last update."""
        self._take_saved_masters()
        for part in self._concerned(names):
            if isinstance(part, Parts):
                continue  # nobody but the store writes to them
            self.backend.assign([copy.parameter for copy in part.copies.values()], part.renew())

    def publish(self, names: Iterable[str]) -> None:
        """The parameters named take the values of their update copies. Collective if divided."""
        names = list(names)
        self._spent.update(names)
        started = [(part, part.publish()) for part in self._concerned(names)]
        for part, values in started:
            if isinstance(part, Parts):
                parts = [self.state.parts[name] for name in part.wide_names]
                self.backend.assign(parts, values())
            else:
                self.write(part.names, values())

    # --- contents -------------------------------------------------------------------------------

    def write(self, names: Sequence[str], values: Sequence[Buffer]) -> None:
        """Replaces parameters and buffers of this rank, by tensors on the host or on the device.

        Those of which it has a part take that of a whole value.
        """
        parts = self.state.parts
        cut = [
            self.state.shards[name].take(value) if name in parts else value
            for name, value in zip(names, values, strict=True)
        ]
        buffers = dict(zip(names, self.backend.put(cut), strict=True))
        held = {**self.state.parameters, **parts}
        parameters = [name for name in names if name in held]
        self.backend.assign(
            [held[name] for name in parameters], [buffers.pop(name) for name in parameters]
        )
        for name, value in zip(buffers, self.backend.publish(list(buffers.values())), strict=True):
            self.state.set_buffer(name, value)

    def load(self, values: Mapping[str, torch.Tensor]) -> None:
        """Parameters take values that may be wider than they: update copies do not round them.

        Values are whole parameters of this rank on the host, by name. Of those that are as narrow
        as the parameter, elements that it has already leave those of a wider copy as they are.
        """
        before = {
            name: to_host(self.state.parts[name], self.backend)
            for name, value in values.items()
            if name in self.state.parts and value.dtype == self.state.parts[name].dtype
        }
        kept = [value.to(self.state.parameters[name].dtype) for name, value in values.items()]
        self.write(list(values), kept)
        copies = [copy for name in values if (copy := self.copy_of(name)) is not None]
        exact = [
            (v if c.extent is None else v.reshape(-1)[slice(*c.extent)]).to(c.parameter.dtype)
            for c in copies
            for v in [values[c.name]]
        ]
        for i, copy in enumerate(copies):
            held = before.get(copy.name)
            if held is not None and held.dtype != copy.parameter.dtype:
                is_new = held != exact[i].to(held.dtype)
                exact[i] = torch.where(is_new, exact[i], to_host(copy.parameter, self.backend))
        self.backend.assign([copy.parameter for copy in copies], self.backend.put(exact))

    def load_masters(self, values: Mapping[str, torch.Tensor]) -> None:
        """Masters take values that were saved, where parameters have the rounding of those.

        A script may load an optimizer's state before the model's, so parameters may get that later:
        it counts what they have before the next update. Where they have other values, they keep
        them, as in plain PyTorch, and their masters do.

        Args:
            values: whole masters on the host, by name of the parameter.
        """
        self._saved_masters.update(values)
        self._take_saved_masters()

    def _take_saved_masters(self) -> None:
        """Does so with parameters as they are now; others go on waiting."""
        for name, saved in list(self._saved_masters.items()):
            is_part, copy = name in self.state.parts, self.copy_of(name)
            held = self.state.parts[name] if is_part else self.state.parameters[name]
            saved = self.state.shards[name].take(saved) if is_part else saved
            own = to_host(held, self.backend)
            is_rounded = _is_rounded(saved, own)
            chosen = {held: torch.where(is_rounded, saved.to(own.dtype), own)}
            if copy is not None and copy.parameter is not held:
                if copy.extent is not None and not is_part:
                    extent = slice(*copy.extent)
                    is_rounded, saved = is_rounded.reshape(-1)[extent], saved.reshape(-1)[extent]
                before = to_host(copy.parameter, self.backend)
                chosen[copy.parameter] = torch.where(is_rounded, saved.to(before.dtype), before)
            self.backend.assign(list(chosen), self.backend.put(list(chosen.values())))
            if bool(is_rounded.all()):
                del self._saved_masters[name]

    def load_beside(self, values: Mapping[str, Any]) -> None:
        """What is not the parameter itself takes values: parts, and masters before rounding.

        The values are what a module has loaded, by any of its names.
        """
        state, exact, names = self.state, {}, self.state.canonical_names
        for alias, value in values.items():
            copy = self.copy_of(name := names.get(alias, ""))
            is_exact = copy is not None and getattr(value, "dtype", None) == copy.parameter.dtype
            if is_exact:
                self._saved_masters.pop(name, None)  # what is loaded later counts
            if name in state.parts or (is_exact and value.dtype != state.parameters[name].dtype):
                exact[name] = value
        if exact:
            self.load(exact)

    # --- gradients ------------------------------------------------------------------------------

    def _is_whole(self, name: str) -> bool:
        """Whether all elements that this rank has gradients of are updated here."""
        copy = self.copy_of(name)
        if name not in self._part_of or name in self.state.gradient_shards:
            return True
        return copy is not None and copy.extent is None

    def add_gradients(self, names: Sequence[str], values: Sequence[Buffer]) -> None:
        """Adds to the gradients of parameters; of divided ones they wait for their reduction."""
        self.lent.settle()
        whole = [(n, v) for n, v in zip(names, values, strict=True) if self._is_whole(n)]
        self._notice_spent(names)
        owners = [owner for n, _ in whole if (owner := self.owner(n)) is not None]
        self._add_to(owners, [value for _, value in whole])
        for name, value in zip(names, values, strict=True):
            if not self._is_whole(name):
                before, dtype = self._waiting.get(name), self.gradient_spec(name).dtype
                terms = [value] if before is None else [before, value]
                (self._waiting[name],) = sum_gradients(self.programs, [terms], [dtype])

    def collect_gradients(self) -> None:
        """Masters take gradients that autograd or the user has put on their parameters.

        Raises:
            StepError: there are some that belong to pieces.
        """
        self.lent.settle()
        self._take_saved_masters()
        self._saved_masters.clear()
        parameters = self.state.parameters
        divided = [part for part in self._parts if not isinstance(part, Masters)]
        for name in (name for part in divided for name in part.names):
            check_no_gradient(name, parameters[name])
        names = [
            name
            for part in self._parts
            for name, copy in part.copies.items()
            if copy.extent is None and own_gradient(parameters[name]) is not None
        ]
        given = [g for name in names if (g := own_gradient(parameters[name])) is not None]
        set_gradients([parameters[name] for name in names], [None] * len(names))
        self.add_gradients(names, self.backend.adopt(given))

    def receive(self, bucket: Bucket, flat: torch.Tensor, trained: frozenset[str]) -> None:
        """Adds this replica's part of a reduced bucket of `shards` to the gradients of its pieces.

        See `Shard.parts_of`.
        """
        self.lent.settle()
        self._notice_spent(bucket.names)
        self._add_to(*self.shards[bucket].parts_of(flat, trained))

    def _notice_spent(self, names: Iterable[str]) -> None:
        """Says so where an update copy still has a gradient that it was updated by."""
        for name in names:
            copy = self.copy_of(name) if name in self._spent else None
            if copy is not None and copy.parameter.grad is not None:
                warn_once(
                    "spent gradients",
                    f"a step adds to gradients that an optimizer step has used, as that of {name}: "
                    f"nothing has cleared them since. Call optimizer.zero_grad() or "
                    f"model.zero_grad(): with fp16, optimizers hold masters in the place of the "
                    f"model's parameters, and param.grad = None on those clears nothing.",
                )
                return

    def _add_to(self, owners: Sequence[nn.Parameter], values: Sequence[Buffer]) -> None:
        held = iter(self.backend.adopt([p.grad for p in owners if p.grad is not None]))
        groups = [
            [value] if owner.grad is None else [next(held), value]
            for owner, value in zip(owners, values, strict=True)
        ]
        totals = sum_gradients(self.programs, groups, [owner.dtype for owner in owners])
        set_gradients(owners, self.backend.publish(totals))

    def take_gradients(self, names: Sequence[str]) -> list[Buffer | None]:
        """Gradients of earlier passes on this rank, which the parameters have no more then."""
        self.lent.settle()
        found: list[Buffer | None] = []
        for name in names:
            owner = self.owner(name) if self._is_whole(name) else None
            if owner is None:
                found.append(self._waiting.pop(name, None))
            elif owner.grad is None:
                found.append(None)
            else:
                found += self.backend.adopt([owner.grad])
                set_gradients([owner], [None])
        return found

    def clear_gradients(self, set_to_none: bool) -> None:
        """Forgets the gradients of all update copies, or makes them zeros, and those that wait."""
        self.lent.forget()
        for copy in self.copies():
            gradient = copy.parameter.grad
            if gradient is not None:
                zeros = None if set_to_none else torch.zeros_like(gradient)
                set_gradients([copy.parameter], [zeros])
        self._waiting.clear()
        self._spent.clear()

    def has_gradient(self, name: str) -> bool:
        """Whether this rank holds a gradient of a parameter from earlier passes."""
        self.lent.settle()
        owner = self.owner(name)
        return name in self._waiting or (owner is not None and owner.grad is not None)

    def clear_waiting(self, names: Iterable[str]) -> None:
        """Forgets gradients of earlier passes that wait for their reduction."""
        names = list(names)
        self.lent.forget(names)
        for name in names:
            self._waiting.pop(name, None)
            self._spent.discard(name)
