"""What the configuration's keys say about schedules: the user's own text, where stages are, how
many microbatches each has in flight, and how much its compute matters.

The only file of schedules that knows configurations.
"""

import functools
from collections.abc import Sequence

from mpxla.config import Config
from mpxla.errors import ScheduleError
from mpxla.schedule.action import Action
from mpxla.schedule.custom import CustomSchedule
from mpxla.schedule.generate import generate
from mpxla.schedule.placement import place_stages
from mpxla.schedule.timeline import stage_peaks

__all__ = ["compute_actions", "custom_schedule", "in_flight", "paces", "placement_of"]


def custom_schedule(config: Config) -> CustomSchedule | None:
    """The user's own schedule, if the configuration has one; `smp.init` checks it this way.

    Raises:
        ScheduleError: it cannot run.
    """
    if config.schedule is None:
        return None
    return _read_schedule(
        config.schedule,
        config.pipeline_parallel_degree,
        config.microbatches,
        config.active_microbatches,
    )


# Every cut asks where stages are and how many microbatches they have in flight.
_read_schedule = functools.lru_cache(maxsize=8)(CustomSchedule)


def placement_of(config: Config) -> tuple[int, ...]:
    """Pipeline rank of every stage, as the schedule of the configuration wants it."""
    custom = custom_schedule(config)
    if custom is not None:
        return custom.placement
    return place_stages(
        config.pipeline, config.pipeline_parallel_degree, config.virtual_pipeline_degree
    )


def compute_actions(
    config: Config, placement: tuple[int, ...], training: bool
) -> Sequence[Sequence[Action]]:
    """Every rank's actions as the configuration's generator or the user's text gives them.

    The user's text is for steps that train; others run forwards in the order of `simple`.

    Returns:
        Without transfers and reductions, unless they are in the user's text.

    Raises:
        ScheduleError: the user's text has its stages elsewhere, or it cannot run.
    """
    custom = custom_schedule(config) if training else None
    if custom is None:
        name = "simple" if config.pipeline == "custom" else config.pipeline
        active = config.active_microbatches
        return generate(name, config.microbatches, placement, active, training)
    if custom.placement != placement:
        raise ScheduleError(
            f"schedule: the text has stages on ranks {list(custom.placement)}, but the step is cut "
            f"into stages on ranks {list(placement)}, because of where modules or parameters were "
            f"placed. Write the text for these stages, or set auto_partition: True."
        )
    return custom.lists


def in_flight(config: Config, placement: tuple[int, ...], training: bool) -> tuple[int, ...]:
    """Per stage, the most microbatches of which it holds activations; without backwards none.

    Raises:
        ScheduleError: see `compute_actions`.
    """
    if not training:
        return (0,) * len(placement)
    return stage_peaks(compute_actions(config, placement, training), len(placement))


def paces(
    config: Config, counts: Sequence[int], training: bool, forward_share: float
) -> tuple[float, ...]:
    """By how much a second of compute lengthens a step, per stage; 1 on average.

    A stage under 1F1B is busy for all m microbatches and waits once for the round trip of the first
    one through the stages after it. While it waits, it runs the forwards of the others that it may
    have in flight, so that

        step = compute of one microbatch on all stages
               + (m - 1) * compute of one microbatch on this stage
               - (in flight - 1) * its forward

    Early stages with many microbatches in flight can therefore be given more work. Only
    `eager_1f1b` has enough forwards in advance to keep that up: under plain 1F1B every forward
    waits for a backward of the next stage, and equal stages are fastest (both by simulation, see
    the tests). `forward_share` is the share of forwards in the compute of the step, and `counts`
    the result of `in_flight`.
    """
    if config.pipeline != "eager_1f1b" or not training:
        return (1.0,) * len(counts)
    lengths = [config.microbatches - 1 - (count - 1) * forward_share for count in counts]
    mean = sum(lengths) / len(lengths)
    if min(lengths) <= 0:  # one microbatch, or backwards that take nothing: any cut is as good
        return (1.0,) * len(counts)
    return tuple(length / mean for length in lengths)
