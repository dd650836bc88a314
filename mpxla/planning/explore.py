"""The best layouts for a number of devices.

    phase 1, list:   all layouts that divide the model, with their costs.
    phase 2, bound:  the least time that each can take, without its messages; the least memory.
    phase 3, try:    simulate the most promising first, until the bound of the next is longer than
                     what was found.

A bound is never longer than the simulated step, so what is left out is slower: the result is that
of trying everything.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from mpxla.errors import ConfigError
from mpxla.planning.device import DeviceModel
from mpxla.planning.layout import RECOMPUTATIONS, Layout, problems
from mpxla.planning.memory import fixed_bytes, saved_bytes
from mpxla.planning.predict import Prediction, memory_of, predict, shortest_s
from mpxla.planning.transformer import Transformer
from mpxla.planning.work import Work, step_costs
from mpxla.schedule.search import StepCosts

__all__ = ["Explored", "Space", "explore", "layouts", "least_bytes"]

_NUM_BEST = 3
"""So many layouts are shown."""


@dataclass(frozen=True)
class Space:
    """What is tried.

    Attributes:
        pipelines: (schedule, stages per rank).
        max_stages: most pipeline ranks; the simulation of more takes long.
        max_tensor: most devices that share a layer.
        microbatch_sizes: sequences of a microbatch.
        recompute: see `RECOMPUTATIONS`.
        shard_optimizer_state: whether replicas divide the optimizer state.
        sequence_parallel: whether tensor parallelism comes with it.
        precision: of all layouts.
    """

    pipelines: tuple[tuple[str, int], ...] = (
        ("interleaved", 1),
        ("interleaved", 2),
        ("interleaved", 4),
        ("eager_1f1b", 1),
        ("zero_bubble", 1),
        ("zero_bubble_v", 2),
    )
    max_stages: int = 64
    max_tensor: int = 64
    microbatch_sizes: tuple[int, ...] = (1, 2, 4, 8)
    recompute: tuple[str, ...] = RECOMPUTATIONS
    shard_optimizer_state: tuple[bool, ...] = (False, True)
    sequence_parallel: bool = False
    precision: str = "mixed"


@dataclass(frozen=True)
class Explored:
    """The layouts that fit, the fastest first; how many there are, and had to be simulated."""

    best: tuple[Prediction, ...]
    num_layouts: int
    num_simulated: int


def layouts(model: Transformer, num_devices: int, space: Space) -> Iterator[Layout]:
    """All layouts that use every device and divide the model."""
    for stages in _divisors(num_devices, space.max_stages):
        for tensor in _divisors(num_devices // stages, space.max_tensor):
            data = num_devices // stages // tensor
            for size, pipeline, recompute, shards in product(
                space.microbatch_sizes,
                space.pipelines if stages > 1 else (("interleaved", 1),),
                space.recompute,
                space.shard_optimizer_state if data > 1 else (False,),
            ):
                layout = Layout(
                    *(stages, tensor, data, size, *pipeline, recompute, shards),
                    sequence_parallel=space.sequence_parallel,
                    precision=space.precision,
                )
                is_same = layout.recompute == "selective" and model.flash_attention
                if not is_same and not problems(layout, model):
                    yield layout


def explore(model: Transformer, device: DeviceModel, num_devices: int, space: Space) -> Explored:
    """Finds the fastest layouts that fit.

    Raises:
        ConfigError: the devices cannot divide the model, or nothing fits; the text then says which
            layout needs least and what for.
    """
    works = [Work(model, layout, device) for layout in layouts(model, num_devices, space)]
    if not works:
        raise ConfigError(_impossible(model, num_devices, space))
    limit = device.usable_bytes
    promising: list[tuple[float, int, Work, StepCosts]] = []
    for number, work in enumerate(works):
        if least_bytes(work) <= limit:
            costs = step_costs(work)
            bound_s = shortest_s(work.layout, work.layout.num_microbatches(model), costs)
            promising.append((bound_s, number, work, costs))
    found: list[Prediction] = []
    num_simulated = 0
    for bound_s, _, work, costs in sorted(promising, key=lambda entry: entry[:2]):
        if len(found) == _NUM_BEST and bound_s > found[-1].step_s:
            break
        if max(memory_of(work.layout, work.layout.num_microbatches(model), costs)) > limit:
            continue
        num_simulated += 1
        found.append(predict(work, costs))
        found.sort(key=lambda one: (one.step_s, max(one.rank_bytes), str(one.layout)))
        del found[_NUM_BEST:]
    if not found:
        raise ConfigError(_does_not_fit(works, device))
    return Explored(tuple(found), len(works), num_simulated)


def least_bytes(work: Work) -> float:
    """What the fullest rank holds at least: microbatches at one of its stages."""
    model, layout = work.model, work.layout
    fixed = fixed_bytes(model, layout)
    count = layout.num_microbatches(model)
    saved = saved_bytes(model, layout)
    return max(
        fixed[rank] + saved[rank] * _least_in_flight(layout, count, rank)
        for rank in range(layout.stages)
    )


def _least_in_flight(layout: Layout, num_microbatches: int, rank: int) -> int:
    """Microbatches that a rank's first stage holds at some time, whatever else it does.

    One stage per rank fills the pipeline before its first backward comes back, a V twice that; of
    other orders nothing is promised.
    """
    ranks = layout.stages
    if layout.stages_per_rank == 1:
        return min(num_microbatches, ranks - rank)
    if layout.pipeline == "zero_bubble_v" and num_microbatches >= 2 * ranks:
        return 2 * (ranks - rank) - 1
    return 1


def _does_not_fit(works: Sequence[Work], device: DeviceModel) -> str:
    """Says which layout needs least memory, and what it needs that for."""
    least: tuple[tuple[int, ...], Work, StepCosts] | None = None
    for work in sorted(works, key=least_bytes):
        if least is not None and least_bytes(work) >= max(least[0]):
            break
        costs = step_costs(work)
        sizes = memory_of(work.layout, work.layout.num_microbatches(work.model), costs)
        if least is None or max(sizes) < max(least[0]):
            least = sizes, work, costs
    assert least is not None, "there are layouts"
    sizes, work, costs = least
    size = max(sizes)
    rank = sizes.index(size)
    fixed = costs.fixed_bytes[rank]
    kind = "parameters and their state" if fixed > size - fixed else "activations"
    return (
        f"{work.model.name} fits on no layout of {work.layout.devices} devices with "
        f"{device.usable_bytes / 1e9:.3g} GB each ({device.name}). The least possible is "
        f"{size / 1e9:.3g} GB, by {work.layout}: {fixed / 1e9:.3g} GB of parameters, optimizer "
        f"state and working memory, {(size - fixed) / 1e9:.3g} GB of activations, on pipeline rank "
        f"{rank}; {kind} set it. Use more devices, or devices with more memory."
    )


def _impossible(model: Transformer, num_devices: int, space: Space) -> str:
    simplest = Layout(data=num_devices, precision=space.precision)
    why = problems(simplest, model)
    return (
        f"{model.name} cannot be spread over {num_devices} devices: no stages x tensor x data "
        f"divides its {model.layers} layers, {model.heads} heads and global batch of "
        f"{model.global_batch}; for instance as replicas alone: {'; '.join(why)}. Use another "
        "number of devices or another --global-batch."
    )


def _divisors(number: int, most: int) -> list[int]:
    return [d for d in range(1, min(number, most) + 1) if number % d == 0]
