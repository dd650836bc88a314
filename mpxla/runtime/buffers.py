"""Live values of a step on one rank, and how long each one stays.

Three kinds: values that a stage reads (activations from earlier stages, step inputs), saved values
between a stage's forward and backward, and gradients on their way back. Every entry is taken out by
its last reader. The peak number of microbatches with saved values is recorded per stage, and their
bytes for the whole rank, because the schedule and the forecast promise bounds for them. In between,
saved values may be on the host (`host_copies.py`).
"""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mpxla.device.backend import Backend, Buffer
from mpxla.stage.spec import TensorSpec

__all__ = ["LiveValues"]

Arrival = Callable[[], list[torch.Tensor]]


class LiveValues:
    """Values of the running step, by stage and microbatch.

    A message's values may still be on their way: `expect` stores a function that waits for them,
    which runs when the first of them is read.

    Attributes:
        peak_in_flight: most microbatches with saved values at a time, by stage.
        saved_bytes: bytes of the saved values of all microbatches, each tensor once; parameters,
            buffers and constants, which are there anyway, are left out.
        peak_saved_bytes: most of them at a time.
        host_bytes: bytes of saved values that are on the host instead.
        peak_host_bytes: most of them at a time.
        wait_s: seconds spent waiting for messages.
    """

    def __init__(self) -> None:
        self._values: dict[tuple[str, int, int], torch.Tensor] = {}
        self._arrivals: dict[tuple[str, int, int], tuple[Arrival, tuple[str, ...], TensorSpec]] = {}
        self._saved: dict[tuple[int, int], Sequence[Buffer]] = {}
        self._in_flight: defaultdict[int, int] = defaultdict(int)
        self.peak_in_flight: defaultdict[int, int] = defaultdict(int)
        self._own: dict[tuple[int, int], dict[int, tuple[Any, int]]] = {}
        self._holders: dict[int, int] = {}
        self.saved_bytes = 0
        self.peak_saved_bytes = 0
        self._away: dict[tuple[int, int], _Away] = {}
        self.host_bytes = 0
        self.peak_host_bytes = 0
        self.wait_s = 0.0

    def put(self, name: str, stage: int, microbatch: int, value: torch.Tensor) -> None:
        """Stores a value for a stage that will read it."""
        self._values[name, stage, microbatch] = value

    def expect(
        self,
        names: tuple[str, ...],
        specs: Sequence[TensorSpec],
        stage: int,
        microbatch: int,
        arrival: Arrival,
    ) -> None:
        """Registers a message whose values, of these specs, `stage` will read."""
        for name, spec in zip(names, specs, strict=True):
            self._arrivals[name, stage, microbatch] = (arrival, names, spec)

    def rehearsal(self, stage: int, microbatch: int, backend: Backend) -> "LiveValues | None":
        """What (stage, microbatch) reads, with zeros for what it awaits; None if it awaits nothing.

        Whatever happens to them, these values here stay.
        """
        place = stage, microbatch
        specs = {key: spec for key, (*_, spec) in self._arrivals.items() if key[1:] == place}
        if not specs:
            return None
        found = LiveValues()
        given = backend.put([torch.zeros(s.shape, dtype=s.dtype) for s in specs.values()])
        found._values = {**self._values, **dict(zip(specs, given, strict=True))}
        found._saved = dict(self._saved)
        return found

    def take(self, name: str, stage: int, microbatch: int) -> torch.Tensor:
        """Removes and returns a value, waiting for its message if needed."""
        key = (name, stage, microbatch)
        if key in self._arrivals:
            arrival, names, _ = self._arrivals[key]
            started = time.perf_counter()
            values = arrival()
            self.wait_s += time.perf_counter() - started
            for other, value in zip(names, values, strict=True):
                del self._arrivals[other, stage, microbatch]
                self._values[other, stage, microbatch] = value
        return self._values.pop(key)

    def save(
        self,
        stage: int,
        microbatch: int,
        saved: Sequence[Buffer],
        sizes: Sequence[int] = (),
    ) -> None:
        """Keeps what the backward of (stage, microbatch) needs, or the second part of it.

        Sizes are bytes, 0 for values that do not exist once per microbatch.
        """
        self._saved[stage, microbatch] = saved
        # The sizes come from the compiled stage: to ask a buffer costs more than to keep it.
        pairs = zip(saved, sizes, strict=False)
        self._count((stage, microbatch), {id(v): (v, size) for v, size in pairs if size})
        self._in_flight[stage] += 1
        self.peak_in_flight[stage] = max(self.peak_in_flight[stage], self._in_flight[stage])

    def restore(self, stage: int, microbatch: int) -> Sequence[Buffer]:
        """Hands out the saved values of (stage, microbatch) and forgets them.

        Their bytes count until `release`: they exist while the program that reads them runs.
        """
        key = stage, microbatch
        self._in_flight[stage] -= 1
        saved = self._saved.pop(key)
        if key not in self._away:
            return saved
        away = self._away.pop(key)
        self.host_bytes -= away.num_bytes
        assert away.arrival is not None, "it was loaded before"
        loaded = away.arrival()
        for value in loaded:
            self._own[key][id(value)] = value, value.nbytes
            self._holders[id(value)] = 1
        return [
            value if place is None else loaded[place]
            for value, place in zip(saved, away.places, strict=True)
        ]

    def own(self, stage: int, microbatch: int) -> list[torch.Tensor]:
        """The saved values of (stage, microbatch) that exist once per microbatch, each once."""
        return [value for value, _ in self._own[stage, microbatch].values()]

    def move_out(
        self, stage: int, microbatch: int, names: Sequence[int], copies: Sequence[torch.Tensor]
    ) -> None:
        """Lets go of saved values, by their identities, that were copied to the host."""
        key = stage, microbatch
        number = {name: place for place, name in enumerate(names)}
        places = [number.get(id(value)) for value in self._saved[key]]
        pairs = zip(self._saved[key], places, strict=True)
        self._saved[key] = [value if place is None else None for value, place in pairs]
        for name in names:
            self._drop(name, self._own[key].pop(name)[1])
        self._away[key] = away = _Away(places, list(copies))
        self.host_bytes += away.num_bytes
        self.peak_host_bytes = max(self.peak_host_bytes, self.host_bytes)

    def on_host(self, stage: int, microbatch: int) -> list[torch.Tensor]:
        """What was moved out."""
        return self._away[stage, microbatch].copies

    def move_in(
        self, stage: int, microbatch: int, arrival: Callable[[], list[torch.Tensor]]
    ) -> None:
        """What was moved out is on its way back: its memory on the device is taken."""
        away = self._away[stage, microbatch]
        away.arrival = arrival
        self.saved_bytes += away.num_bytes
        self.peak_saved_bytes = max(self.peak_saved_bytes, self.saved_bytes)

    def release(self, stage: int, microbatch: int) -> None:
        """The program that reads the saved values of (stage, microbatch) was started."""
        for name, (_, size) in self._own.pop((stage, microbatch), {}).items():
            self._drop(name, size)

    def _drop(self, name: int, size: int) -> None:
        """One of those that hold a value lets go of it."""
        if self._holders[name] > 1:
            self._holders[name] -= 1
        else:
            del self._holders[name]
            self.saved_bytes -= size

    def _count(self, key: tuple[int, int], own: dict[int, tuple[Any, int]]) -> None:
        """Adds to the bytes; what (stage, microbatch) had saved before goes after that."""
        holders = self._holders
        for identity, (_, size) in own.items():
            before = holders.get(identity, 0)
            self.saved_bytes += 0 if before else size
            holders[identity] = before + 1
        self.peak_saved_bytes = max(self.peak_saved_bytes, self.saved_bytes)
        self.release(*key)
        self._own[key] = own

    def is_empty(self) -> bool:
        """Whether everything stored was read."""
        return not (self._values or self._arrivals or self._saved or self._away)


@dataclass
class _Away:
    """Saved values of one microbatch on the host.

    Attributes:
        places: for every saved value its number among the copies, or None for those that stayed.
        copies: on the host.
        arrival: waits for them on the device, once they are on their way back.
    """

    places: list[int | None]
    copies: list[torch.Tensor]
    arrival: Callable[[], list[torch.Tensor]] | None = None

    @property
    def num_bytes(self) -> int:
        """Of all copies."""
        return sum(copy.nbytes for copy in self.copies)
