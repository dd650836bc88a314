"""The schedule and cut of a step where the configuration leaves them open: the fastest that fits.

Those of the keys `pipeline`, `virtual_pipeline_degree`, `memory_weight` and `active_microbatches`
that nobody has set are chosen by simulating candidates with the costs of the step; a set key is
obeyed. What needs more programs must promise more: simulated gains are not reached in full.
This module must not know ranks: one rank decides for all.
"""

import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mpxla.config import Config
from mpxla.errors import MpxlaError
from mpxla.graph.cost import MachineModel, PartitionProblem
from mpxla.runtime.plans.cut import CutStep
from mpxla.runtime.plans.scheduling import schedule_step, stage_costs
from mpxla.schedule.action import Op
from mpxla.schedule.analysis import StageBytes
from mpxla.schedule.search import Simulated, StepCosts, simulated
from mpxla.stage.flat import FlatShard
from mpxla.stage.sharded import block_of

__all__ = [
    "WEIGHTS",
    "Choice",
    "bytes_of_divided",
    "choose",
    "device_bytes",
    "free_keys",
    "heaviest_nodes",
    "is_worth_choosing",
    "with_keys",
]

_OPEN: tuple[str, ...] = (
    "pipeline",
    "virtual_pipeline_degree",
    "memory_weight",
    "active_microbatches",
)
_PROGRAMS = (Op.FORWARD, Op.BACKWARD, Op.INPUT_GRADIENT, Op.WEIGHT_GRADIENT)
_DISPATCH_S = 5e-4
"""What starting a program takes a rank, beside the program."""
_WORTH_S = 0.02
"""Steps whose programs take less are mostly dispatch, which no schedule shortens."""
_GAIN = 0.01
"""By how much a candidate must beat those before it, which are simpler."""
_REACHED, _LEAST_GAIN = 0.5, 0.03
"""Share of a simulated gain that counts where backwards are split or ranks have several stages, and
how much it must be then: more programs are compiled and started."""
WEIGHTS = (0.2, 0.8)
"""Of memory, the preferred first; the default for `optimize: "speed"` and `"memory"`."""
_MEMORY_SHARE = 0.8
"""Of the device's memory; the rest is for programs, messages and temporary values."""
_MEASURED_SHARE = 0.9
_MOST_MEASURED = 12
"""Kinds of operators whose time is worth measuring: each is compiled for that."""


@dataclass(frozen=True)
class Choice:
    """A configuration with open keys filled in, and what it is predicted to take.

    Seconds are per step, also with the defaults of all open keys; the bytes, which may not fit, are
    those of the fullest rank.
    """

    keys: Mapping[str, Any]
    step_s: float
    rank_bytes: int
    default_s: float
    fits: bool = True

    def line(self, limit_bytes: int) -> str:
        """For the log."""
        named = ", ".join(f"{name} = {value!r}" for name, value in self.keys.items())
        gib = 2**30
        text = (
            f"chosen, as nobody has set them: {named}; predicted step {self.step_s:.3g} s (by the "
            f"defaults {self.default_s:.3g} s), {self.rank_bytes / gib:.2g} of "
            f"{limit_bytes / gib:.3g} GiB on the fullest rank"
        )
        return text if self.fits else f"{text}: more than there is, and the least of all candidates"


def free_keys(config: Config) -> tuple[str, ...]:
    """The open keys that may be chosen; none without a pipeline.

    Who sets `optimize` has chosen `memory_weight` with it. Stages that are placed by hand, by a
    file or by a text are where they are.
    """
    if config.pipeline_parallel_degree == 1 or config.pipeline == "custom":
        return ()
    free = {name for name in _OPEN if config.source(name) == "default"}
    if config.source("optimize") != "default":
        free -= {"memory_weight"}
    if not config.auto_partition or config.load_partition:
        free -= {"memory_weight", "virtual_pipeline_degree"}
    return tuple(name for name in _OPEN if name in free)


def with_keys(config: Config, keys: Mapping[str, Any]) -> Config:
    """The configuration with other values of the open keys."""
    open_keys = dict.fromkeys(free_keys(config))
    return replace(config, **{**open_keys, **keys}, set_by=dict(config.sources))


def is_worth_choosing(cut: CutStep, config: Config, machine: MachineModel) -> bool:
    """Whether the step is long enough for its schedule to matter, by estimated costs."""
    return _simulated(cut, config, machine, dispatch_s=0.0).timeline.makespan >= _WORTH_S


def heaviest_nodes(problem: PartitionProblem) -> set[str]:
    """The nodes that take nine tenths of a step by estimate, of a dozen different costs at most."""
    by_cost: dict[float, list[str]] = {}
    for unit, node in enumerate(problem.nodes):
        by_cost.setdefault(node.cost.compute_s, []).append(problem.members[unit][0].name)
    total = sum(cost * len(names) for cost, names in by_cost.items())
    found: set[str] = set()
    covered = 0.0
    ranked = sorted(by_cost.items(), key=lambda entry: -entry[0] * len(entry[1]))
    for cost, names in ranked[:_MOST_MEASURED]:
        if covered >= _MEASURED_SHARE * total:
            break
        found.update(names)
        covered += cost * len(names)
    return found


def device_bytes(counters: Mapping[str, int] | None, num_local_ranks: int) -> int:
    """Memory that a rank may fill.

    Without counters of a device, it is the host's memory, of which every rank of the host gets an
    equal part.
    """
    if counters is not None and "bytes_limit" in counters:
        return int(_MEMORY_SHARE * counters["bytes_limit"])
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        limit = "max"
    total = min(total, int(limit)) if limit.isdecimal() else total
    return int(_MEMORY_SHARE * total / max(num_local_ranks, 1))


def choose(
    config: Config,
    cut: Callable[[Config], CutStep],
    limit_bytes: int,
    machine: MachineModel,
) -> Choice:
    """Simulates the candidates for the keys that are open.

    `cut` cuts the step for a configuration.

    Returns:
        The fastest that fits, of nearly equal ones the simplest; if none fits, the smallest.
    """
    default_s = _simulated(cut(config), config, machine).timeline.makespan
    smallest: Choice | None = None
    for kinds in _rounds(config):
        best: tuple[float, Choice] | None = None
        for keys in kinds:
            candidate = with_keys(config, keys)
            try:
                found = _simulated(cut(candidate), candidate, machine)
            except MpxlaError:  # the step cannot be cut into so many stages
                continue
            step_s, size = found.timeline.makespan, max(found.rank_bytes)
            choice = Choice(keys, step_s, size, default_s, size <= limit_bytes)
            if smallest is None or size < smallest.rank_bytes:
                smallest = choice
            counted, gain = _counted(candidate, step_s, default_s)
            if choice.fits and (best is None or counted < (1 - gain) * best[0]):
                best = counted, choice
        if best is not None:
            return best[1]
    assert smallest is not None, "the defaults can be cut"
    return smallest


def _rounds(config: Config) -> Iterator[list[dict[str, Any]]]:
    """Values of the free keys, the simplest schedules first; every round needs less memory."""
    free, degree = free_keys(config), config.pipeline_parallel_degree
    kinds = [(config.pipeline, config.virtual_pipeline_degree)]
    if "pipeline" in free:
        per_rank = config.virtual_pipeline_degree
        kinds = [(name, per_rank) for name in ("interleaved", "eager_1f1b", "zero_bubble")]
    if "virtual_pipeline_degree" in free:
        kinds += [("interleaved", 2)] * (kinds[0][0] == "interleaved")
        kinds += [("zero_bubble_v", 2)] * ("pipeline" in free)
    weights = WEIGHTS if "memory_weight" in free else (config.memory_weight,)
    limits: tuple[int | None, ...] = (None,)  # the default of the schedule
    if "active_microbatches" in free:
        fewer = (n for n in (degree, degree // 2, 1) if 0 < n < config.microbatches)
        limits = (None, *dict.fromkeys(fewer))
    for limit in limits:
        for weight in weights:
            values = ((name, per_rank, weight, limit) for name, per_rank in kinds)
            named = (dict(zip(_OPEN, row, strict=True)) for row in values)
            yield [{key: row[key] for key in free if row[key] is not None} for row in named]


def _counted(config: Config, step_s: float, default_s: float) -> tuple[float, float]:
    """The prediction that is compared, and by which share it must beat the others."""
    if config.virtual_pipeline_degree == 1 and "zero_bubble" not in config.pipeline:
        return step_s, _GAIN
    return default_s - _REACHED * (default_s - step_s), _LEAST_GAIN


def _simulated(
    cut: CutStep, config: Config, machine: MachineModel, dispatch_s: float = _DISPATCH_S
) -> Simulated:
    """By estimates: a stage keeps what the partition weighs."""
    # Every program, also each part of a split backward, has to be started.
    costs = stage_costs(cut, machine).plus(dict.fromkeys(_PROGRAMS, [dispatch_s] * len(cut.stages)))
    saved = [load.activation_bytes for load in cut.partition.loads]
    held = [StageBytes(size, size, 0, size) for size in saved]
    fixed = cut.partition.rank_bytes(cut.partition.parameter_bytes)
    memory = config.activation_memory
    most = memory if isinstance(memory, int) else math.inf if memory == "keep" else 0
    step = StepCosts(costs, *cut.edges, held, fixed)
    return simulated(schedule_step(cut, config), cut.placement, step, most)


def bytes_of_divided(
    cut: CutStep, config: Config, shards: Mapping[str, FlatShard], gathers_once: bool
) -> int:
    """Bytes of the fullest rank where parameters are divided over replicas, by these shards.

    They are whole for as long as a step runs if it gathers once; else two blocks are.
    """
    held, weights = dict(cut.partition.parameter_bytes), cut.problem.weight_bytes
    blocks: Counter[str] = Counter()
    for name, shard in shards.items():
        if name in held:
            held[name] = -(-held[name] // shard.size) + gathers_once * weights[name]
            blocks[block_of(name)] += weights[name]
    largest = 0 if gathers_once else sum(size for _, size in blocks.most_common(2))
    fixed = cut.partition.rank_bytes(held)
    saved = _simulated(cut, config, MachineModel()).activation_bytes  # on any machine
    return max(a + b for a, b in zip(fixed, saved, strict=True)) + largest
