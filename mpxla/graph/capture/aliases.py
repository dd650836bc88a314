"""Buffers that scripts have a second time: `self.mean = self.norm.running_mean`.

Such a tensor is a constant of steps, of which Python may read the values, until a step writes to
one of the two in place. From there on what stands for the buffer takes its place.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from mpxla.errors import CaptureError
from mpxla.graph.memory import Memory, extent, memory
from mpxla.graph.python.plain import Read
from mpxla.graph.stepgraph import OutputKind, StepGraph
from mpxla.graph.user_code import AgainError

__all__ = ["Aliases", "SecondNames"]


@dataclass
class Aliases:
    """What captures have found of a session's buffers, by canonical name.

    Attributes:
        written: buffers that steps write to in place.
        seen: tensors of scripts that are one, by their memory.
        parts: what else shares memory with one, as a text.
        tied: buffers that stand for those tensors.
    """

    written: set[str] = field(default_factory=set)
    seen: dict[str, dict[Memory | None, torch.Tensor]] = field(default_factory=dict)
    parts: dict[str, str] = field(default_factory=dict)
    tied: set[str] = field(default_factory=set)

    def of(self, name: str) -> Iterable[torch.Tensor]:
        """Tensors of scripts that are to have the values of a buffer."""
        return self.seen.get(name, {}).values() if name in self.tied else ()

    def reads(self, constants: Iterable[torch.Tensor]) -> list[Read]:
        """Reads of a step for which some tensors that are buffers are constants, as yet."""
        found = set(map(memory, constants))
        return [
            Read(f"a step writes to the buffer {name}", False, lambda name=name: name in self.tied)
            for name in self.seen
            if not found.isdisjoint(self.seen[name])
        ]


class SecondNames:
    """Buffers that one capture sees by other names.

    Args:
        model: has the stand-ins, now.
        real: the model's own buffers, by any name.
        names: any name of a buffer -> its canonical one.
        former: memory of the model's tensors from before they moved.
        aliases: what was found before; gets more.
    """

    def __init__(
        self,
        model: nn.Module,
        real: Mapping[str, torch.Tensor],
        names: Mapping[str, str],
        former: Mapping[Memory, torch.Tensor],
        aliases: Aliases,
    ):
        self._aliases = aliases
        # Buffers in whose places the step leaves other tensors; and whether it has written to the
        # old ones before.
        self._assigned: dict[str, bool] = {}
        self._parts: set[str] = set()
        self._found: dict[Memory, list[str]] = {}
        stand_ins = dict(model.named_buffers(remove_duplicate=False))
        known = [name for name in real if name in stand_ins and name in names]
        self._own = {id(real[name]): (names[name], stand_ins[name]) for name in known}
        self._names = {id(stand_in): name for name, stand_in in self._own.values()}
        owns = {**former, **{memory(real[name]): real[name] for name in known}}
        self._extents = [
            (*extent(where), self._own[id(own)][0])
            for where, own in owns.items()
            if where is not None and id(own) in self._own
        ]

    def seen(self, value: torch.Tensor, own: torch.Tensor | None) -> torch.Tensor:
        """What stands for a tensor of the script that has all memory of a buffer, or of none."""
        name, stand_in = self._own.get(id(own), (None, value))
        if name is not None:
            self._aliases.seen.setdefault(name, {})[memory(value)] = value
            return stand_in if name in self._aliases.tied else value
        where = memory(value) if own is None else None
        for name in () if where is None else self._overlapping(where):
            text = f"a tensor of shape {list(value.shape)} that the step function uses"
            self._aliases.parts.setdefault(name, text)
            self._parts.add(name)
        return value

    def _overlapping(self, where: Memory) -> list[str]:
        if where not in self._found:
            start, end = extent(where)
            shared = [n for first, last, n in self._extents if first < end and start < last]
            self._found[where] = shared
        return self._found[where]

    def note_assigned(self, old: torch.Tensor) -> None:
        """Notes a stand-in in whose place the step leaves another tensor."""
        if (name := self._names.get(id(old))) is not None:
            self._assigned[name] = old._version > 0

    def check(self, step: StepGraph) -> None:
        """Takes in what a captured step writes to.

        Raises:
            AgainError: tensors of the script are buffers, from the next capture on.
            CaptureError: they share memory with buffers in another way; or one of these gets
                another tensor.
        """
        aliases, assigned = self._aliases, self._assigned
        changed = {role.name for role in step.outputs if role.kind is OutputKind.BUFFER}
        written = {name for name in changed if assigned.get(name, True)}
        aliases.written |= written
        self.tie(aliases.written & aliases.seen.keys())
        for name in sorted(aliases.tied & assigned.keys()):
            raise CaptureError(
                f"The step function assigns another tensor to the buffer {name}, which the script "
                f"has a second time and which steps write to in place. Write self.buffer.copy_(new)"
                f" in the place of self.buffer = new, or drop the second name."
            )
        for name in sorted(aliases.parts.keys() & (written | aliases.written & self._parts)):
            raise CaptureError(
                f"The step function writes in place to the buffer {name}, which shares memory with "
                f"{aliases.parts[name]}: in a distributed model each has memory of its own, as "
                f"after module.to(device). Make the view in the forward (self.buffer[:n]), where "
                f"it is one of the buffer as it is then."
            )

    def tie(self, names: Collection[str]) -> None:
        """Has buffers stand for other tensors that are the same.

        Raises:
            AgainError: some did not; the step is to be captured again.
        """
        if new := set(names) - self._aliases.tied:
            raise AgainError(new, lambda: self._aliases.tied.update(new))

    def named(self, written: Iterable[torch.Tensor | None]) -> set[str]:
        """Buffers that are among some tensors of the script."""
        return {self._own[id(own)][0] for own in written if id(own) in self._own}
