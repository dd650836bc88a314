"""A model, as the engine knows it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from mpxla.runtime.state import ModelState

__all__ = ["Member"]


@dataclass(frozen=True)
class Member:
    """One of the models that step functions may use.

    Attributes:
        state: its parameters and buffers.
        pins: given where its module is, module path -> pipeline rank at the time of partitioning.
        on_placed: called once its parameters are on their ranks.
        measures_times: whether operators are timed before a step that uses it is partitioned.
        before_new: called before parameters and buffers are taken in that it has got later.
        split: parameters and buffers of which each rank of a tensor-parallel group has a part,
            by name, with the place of the part (see `Shard.place`).
    """

    state: ModelState
    pins: Callable[[str], Mapping[str, int]]
    on_placed: Callable[[], None]
    measures_times: bool = False
    before_new: Callable[[], None] = lambda: None
    split: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
