"""`python -m mpxla schedule`: a schedule as actions, as a grid, or as a drawing."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpxla.cli.drawing import save_timeline
from mpxla.config import Config
from mpxla.config_keys import PIPELINES
from mpxla.schedule.action import Action, format_schedule
from mpxla.schedule.choice import custom_schedule, placement_of
from mpxla.schedule.copies import add_copies, has_copies
from mpxla.schedule.generate import generate
from mpxla.schedule.lower import add_communication
from mpxla.schedule.render import render_text
from mpxla.schedule.simulate import Costs, simulate
from mpxla.schedule.timeline import Timeline

__all__ = ["DEFAULT_STAGES", "add_parser", "schedule_keys", "schedule_options"]

DEFAULT_STAGES = 4


def add_parser(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "schedule",
        help="print or draw a schedule of equal stages",
        description="Prints a schedule of equal stages in a chain as a grid of units of time.",
    )
    schedule_options(parser)
    parser.add_argument("--forward", type=float, default=1.0, help="units of a forward")
    parser.add_argument("--backward", type=float, default=2.0, help="units of a whole backward")
    parser.add_argument("--transfer", type=float, default=0.0, help="units of a message")
    parser.add_argument(
        "--rendezvous", action="store_true", help="messages hold both ranks until they are done"
    )
    parser.add_argument("--actions", action="store_true", help="print the list of every rank")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write .png or .json instead")
    parser.set_defaults(run=run)


def schedule_options(parser: argparse.ArgumentParser) -> None:
    """Options that say which schedule; shared by commands."""
    parser.add_argument(
        "--stages", type=int, default=DEFAULT_STAGES, metavar="P", help="pipeline ranks"
    )
    parser.add_argument("--microbatches", type=int, default=8, metavar="M")
    parser.add_argument("--pipeline", choices=PIPELINES, default="interleaved")
    parser.add_argument(
        "--virtual", type=int, metavar="V", help="stages per rank (virtual_pipeline_degree)"
    )
    parser.add_argument("--active", type=int, metavar="A", help="active_microbatches")
    parser.add_argument(
        "--schedule-file", type=Path, metavar="FILE", help="text of a schedule of your own"
    )
    parser.add_argument(
        "--offload",
        type=int,
        metavar="H",
        help="offload_activations with this activation_loading_horizon",
    )


def schedule_keys(options: argparse.Namespace) -> dict[str, Any]:
    """The configuration keys that these options stand for."""
    keys: dict[str, Any] = {
        "pipeline_parallel_degree": options.stages,
        "microbatches": options.microbatches,
        "pipeline": options.pipeline or "interleaved",
        "virtual_pipeline_degree": options.virtual,
        "active_microbatches": options.active,
    }
    if options.offload is not None:
        keys |= {"offload_activations": True, "activation_loading_horizon": options.offload}
    if options.schedule_file is not None:
        keys |= {"pipeline": "custom", "schedule": options.schedule_file.read_text()}
    return keys


def run(options: argparse.Namespace) -> None:
    """Prints or writes the schedule."""
    config = Config(**schedule_keys(options))
    costs = Costs(options.forward, options.backward, options.transfer)
    lists, timeline = timeline_of(config, costs, options.rendezvous)
    title = (
        f"{config.pipeline}, {config.pipeline_parallel_degree} ranks, {config.microbatches} "
        "microbatches"
    )
    if options.output is not None:
        save_timeline(timeline, options.output, 1000.0, title)
        print(f"{options.output}: {title}, bubble {100 * timeline.bubble:.1f} %")
    elif options.actions:
        print(format_schedule(lists))
    else:
        print(render_text(timeline))


def timeline_of(
    config: Config, costs: Costs, rendezvous: bool
) -> tuple[Sequence[Sequence[Action]], Timeline]:
    """The schedule of a configuration for stages in a chain, and when it runs."""
    placement = placement_of(config)
    edges = {(s, s + 1) for s in range(len(placement) - 1)}
    back = {(t, s) for s, t in edges}
    custom = custom_schedule(config)
    if custom is not None:
        lists = custom.lower(edges, back)
    else:
        active = config.active_microbatches
        lists = generate(config.pipeline, config.microbatches, placement, active, True)
        lists = add_communication(lists, placement, edges, back)
    if config.offload_activations and not has_copies(lists):
        lists = add_copies(lists, config.activation_loading_horizon)
    return lists, simulate(lists, placement, edges, back, costs, rendezvous)
