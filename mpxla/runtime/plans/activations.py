"""How much a rank keeps for its backwards: the key `activation_memory`.

Which values a stage computes again is decided when it is lowered. With a number of bytes per rank,
stages are lowered with smaller and smaller shares of what they would like to keep, until the peak
of the rank's schedule fits. All stages of a rank keep the same share. The peak counts what the
executor counts: saved values of all microbatches in flight, and what waits between the two parts of
a split backward.
"""

import logging
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass

from torch import fx
from torch._functorch.partitioners import get_default_op_list
from torch._ops import OpOverload

from mpxla.device.backend import Lowering
from mpxla.errors import ConfigError
from mpxla.log import get_logger
from mpxla.runtime.saved import held_bytes
from mpxla.schedule.action import Action, Op
from mpxla.schedule.analysis import StageBytes, peak_bytes
from mpxla.stage.lower import LoweredStage, TracedStage
from mpxla.stage.spec import StageSpec
from mpxla.stage.split_backward import SplitBackward, split_backward

__all__ = ["PlannedStage", "plan_stages", "recomputed_nodes", "stage_bytes"]

_SHARES = tuple(part / 8 for part in range(8, -1, -1))
"""What is tried, from everything to nothing; the first that fits is then refined."""
_REFINEMENTS = 3


@dataclass(frozen=True)
class PlannedStage:
    """A lowered stage, and its backward in two parts if the schedule splits it."""

    lowered: LoweredStage
    split: SplitBackward | None = None


def plan_stages(
    stages: Sequence[StageSpec],
    actions: Sequence[Action],
    pp_rank: int,
    lowering: Lowering,
    activation_memory: str | int,
    is_training: bool = True,
    for_speed: bool = False,
    divided: Container[str] = (),
    divide: Callable[[LoweredStage], LoweredStage] = lambda lowered: lowered,
    tells: bool = True,
) -> dict[int, PlannedStage]:
    """Lowers the stages of one rank; gives them by index.

    `divide` makes a lowered stage take parts of the parameters that are `divided`; `for_speed` is
    that of `TracedStage`. How much of a number of bytes is used is logged if the function `tells`.

    Raises:
        ConfigError: the rank cannot do with so many bytes.
    """
    split = {a.stage for a in actions if a.op is Op.INPUT_GRADIENT}
    traced = {s.index: TracedStage(s, is_training, lowering, for_speed, divided) for s in stages}

    def planned(share: float) -> dict[int, PlannedStage]:
        found: dict[int, PlannedStage] = {}
        for index, stage in traced.items():
            lowered = divide(stage.lowered(share))
            is_split = index in split and lowered.backward is not None
            parts = split_backward(lowered, lowering.device) if is_split else None
            found[index] = PlannedStage(lowered, parts)
        return found

    if activation_memory == "keep" or not is_training:
        return planned(1.0)
    if activation_memory == "recompute":
        return planned(0.0)
    assert isinstance(activation_memory, int), "the configuration has checked it"
    return _within(activation_memory, planned, actions, pp_rank, tells)


def _within(
    limit: int,
    planned: Callable[[float], dict[int, PlannedStage]],
    actions: Sequence[Action],
    pp_rank: int,
    tells: bool,
) -> dict[int, PlannedStage]:
    """The stages with the largest share that fits."""
    tried: list[tuple[int, dict[int, PlannedStage]]] = []
    for share in _SHARES:
        stages = planned(share)
        tried.append((_peak(stages, actions), stages))
        if tried[-1][0] <= limit:
            break
    else:
        raise _too_little(limit, *min(tried, key=lambda one: one[0]), actions, pp_rank)
    peak, best = tried[-1]
    low, high = share, _SHARES[max(len(tried) - 2, 0)]
    for _ in range(_REFINEMENTS if low < high else 0):
        middle = (low + high) / 2
        stages = planned(middle)
        found = _peak(stages, actions)
        if found > limit:
            high = middle
            continue
        low = middle
        if found > peak:
            peak, best = found, stages
    get_logger().log(
        logging.INFO if tells else logging.DEBUG,
        "activation_memory: pipeline rank %d keeps up to %d bytes of activations (limit %d; %d if "
        "all were kept)",
        pp_rank,
        peak,
        limit,
        tried[0][0],
    )
    return best


def _peak(stages: Mapping[int, PlannedStage], actions: Sequence[Action]) -> int:
    return peak_bytes([actions], stage_bytes(stages))[0]


def stage_bytes(stages: Mapping[int, PlannedStage]) -> list[StageBytes]:
    """What the stages of a rank hold of one microbatch, by index; nothing for those of others."""
    held = [StageBytes()] * (max(stages, default=-1) + 1)
    for index, stage in stages.items():
        held[index] = held_bytes(stage.lowered, stage.split, 0 in stages)
    return held


def _too_little(
    limit: int,
    least: int,
    stages: dict[int, PlannedStage],
    actions: Sequence[Action],
    pp_rank: int,
) -> ConfigError:
    """The error for a rank that needs more; names the stage that keeps most."""
    alone = {
        index: _peak({index: stage}, [a for a in actions if a.stage == index])
        for index, stage in stages.items()
    }
    index = max(alone, key=lambda stage: alone[stage])
    one = stage_bytes(stages)[index]
    between = f" and {one.kept} between the parts of a backward" if stages[index].split else ""
    return ConfigError(
        f"activation_memory: {limit} bytes are too few for pipeline rank {pp_rank}, which keeps at "
        f"least {least} with this schedule. Stage {index} takes most of them, {alone[index]}: "
        f"{one.saved} for every microbatch in flight{between}. Give activation_memory at "
        f"least {least}, smaller microbatches (a larger `microbatches`), or a schedule with fewer "
        f"of them in flight (`active_microbatches`)."
    )


def recomputed_nodes(lowered: LoweredStage) -> set[str]:
    """Names of the stage's nodes whose products or convolutions its backward computes again.

    The rest of what is computed again costs next to nothing, and is part of estimates of backwards.
    """
    if lowered.backward is None:
        return set()
    names = {node.name for node in lowered.spec.graph.nodes}
    is_dear: Callable[[fx.Node], bool] = get_default_op_list().is_compute_intensive
    found: set[str] = set()
    for node in lowered.backward.derivative.graph.nodes:
        sources = node.meta.get("from_node")
        is_operator = isinstance(node.target, OpOverload)
        if sources and sources[0].name in names and is_operator and is_dear(node):
            found.add(sources[0].name)
    return found
