"""What the configuration's keys say about schedules: the user's own text, and where stages are.

The only file of schedules that knows configurations.
"""

from mpxla.config import Config
from mpxla.schedule.custom import CustomSchedule
from mpxla.schedule.placement import place_stages

__all__ = ["custom_schedule", "placement_of"]


def custom_schedule(config: Config) -> CustomSchedule | None:
    """The user's own schedule, if the configuration has one; `smp.init` checks it this way.

    Raises:
        ScheduleError: it cannot run.
    """
    if config.schedule is None:
        return None
    return CustomSchedule(
        config.schedule,
        config.pipeline_parallel_degree,
        config.microbatches,
        config.active_microbatches,
    )


def placement_of(config: Config) -> tuple[int, ...]:
    """Pipeline rank of every stage, as the schedule of the configuration wants it."""
    custom = custom_schedule(config)
    if custom is not None:
        return custom.placement
    return place_stages(
        config.pipeline, config.pipeline_parallel_degree, config.virtual_pipeline_degree
    )
