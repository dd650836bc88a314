"""`python -m mpxla plan`: how a model would be cut and run, without devices or training.

A model is captured from a factory; `paper.py` predicts transformers from their sizes alone.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpxla.cli.drawing import save_timeline
from mpxla.cli.paper import paper_options, parse_devices, run_on_paper
from mpxla.cli.schedule import DEFAULT_STAGES, schedule_keys, schedule_options
from mpxla.config import Config
from mpxla.errors import MpxlaError
from mpxla.graph.partition.report import format_size
from mpxla.schedule.render import render_text
from mpxla.tables import table

if TYPE_CHECKING:
    from mpxla.device.backend import Lowering
    from mpxla.graph.cost import MachineModel
    from mpxla.runtime.plans.forecast import Forecast

__all__ = ["add_parser"]

_COLUMNS = 48
"""Of the timeline."""


def add_parser(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "plan",
        help="partition a model and predict its steps",
        description="Captures, partitions, lowers and simulates a step; runs nothing.",
    )
    parser.add_argument(
        "factory",
        metavar="FACTORY",
        nargs="?",
        help="module:function that returns (model, example inputs of one microbatch, step or loss)",
    )
    schedule_options(parser)
    parser.add_argument(
        "--memory-weight", type=float, metavar="W", help="0 to 1, see docs/schedules.md"
    )
    parser.add_argument(
        "--search",
        action="store_true",
        help="try cuts, schedules, virtual stages and microbatches in flight that are not given",
    )
    parser.add_argument(
        "--memory-limit",
        type=float,
        metavar="GIB",
        help="most memory per rank: searches, and tries what to compute again as well",
    )
    parser.add_argument(
        "--activation-memory",
        default="keep",
        metavar="KEEP",
        help="keep, recompute or bytes per rank: the key activation_memory",
    )
    parser.add_argument(
        "--tp",
        "--tensor",
        type=int,
        metavar="N",
        help="ranks that share the tensors of each stage: the key tensor_parallel_degree",
    )
    parser.add_argument(
        "--sdp",
        type=int,
        default=1,
        metavar="N",
        help="replicas that divide parameters: the key sharded_data_parallel_degree",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write .png or .json")
    paper_options(parser)
    # A search leaves what is given as it is.
    parser.set_defaults(run=run, pipeline=None, stages=None)


def run(options: argparse.Namespace) -> None:
    """Prints the plan."""
    if (options.factory is None) == (options.model is None):
        raise MpxlaError(
            "plan needs either a factory (module:function) or --model with the sizes of a "
            f"transformer, and has {'both' if options.model else 'neither'}. Name one."
        )
    if not (options.search and options.devices):  # else the search divides the devices
        options.stages = DEFAULT_STAGES if options.stages is None else options.stages
        options.tp = 1 if options.tp is None else options.tp
    if options.model is not None:
        run_on_paper(options)
    else:
        _run_captured(options)


def _run_captured(options: argparse.Namespace) -> None:
    """Prints the plan of a factory's model."""
    # These import torch and the backend, which the other commands do without.
    from mpxla.device.choice import open_backend
    from mpxla.env import read_environment
    from mpxla.graph.cost import MachineModel
    from mpxla.parallel.models import cut_report

    machine = MachineModel()
    lowering = open_backend(read_environment()).lowering
    limit = None if options.memory_limit is None else int(options.memory_limit * 2**30)
    layouts = _layouts(options)
    plans: list[_Planned] = []
    problems: list[str] = []
    for layout in layouts:
        try:
            plans.append(_planned(options, layout, machine, lowering, limit))
        except MpxlaError as error:
            if len(layouts) == 1:
                raise
            problems.append(f"{layout}: {error}")
    if len(layouts) > 1:
        print(_describe_layouts(plans, problems) + "\n")
    best = min(plans, key=lambda plan: plan.found.timeline.makespan)
    found, config, size = best.found, best.config, best.layout.tensor
    blocks = [best.rows, cut_report(found.cut), _memory(found), _programs(found)]
    blocks += [_collectives(found, size) if size > 1 else "", _timeline(found)]
    print("\n\n".join(filter(None, blocks)))
    if options.sdp > 1:
        print("\n" + _divided(found, config, options.sdp, limit))
    elif limit is not None and max(found.rank_bytes) > limit:
        raise MpxlaError(
            f"rank {found.rank_bytes.index(max(found.rank_bytes))} needs "
            f"{max(found.rank_bytes) / 2**30:.3g} GiB, more than the {options.memory_limit:g} GiB "
            "of --memory-limit. Try other schedules, more stages, or smaller microbatches."
        )
    if options.output is not None:
        save_timeline(found.timeline, options.output, 1e6, f"{options.factory}: predicted")
        print(f"wrote {options.output}")


@dataclass(frozen=True)
class _Layout:
    """How the ranks of a replica are divided: pipeline ranks, and ranks that share tensors."""

    stages: int
    tensor: int

    def __str__(self) -> str:
        return f"{self.stages} x {self.tensor}"


@dataclass(frozen=True)
class _Planned:
    """The plan of a layout, and the table of what was searched for it."""

    layout: _Layout
    found: "Forecast"
    config: Config
    rows: str = ""


def _layouts(options: argparse.Namespace) -> list[_Layout]:
    """The one that is given, or with `--devices` all that use so many and fit what is given."""
    if options.devices is None:
        return [_Layout(options.stages, options.tp)]
    if not options.search:
        raise MpxlaError(
            "--devices with a factory needs --search, which divides them between stages and "
            "tensors. Without it, name --stages and --tp."
        )
    counts = parse_devices(options.devices)
    if len(counts) > 1:
        raise MpxlaError(f"--devices {options.devices}: one number, with a factory.")
    stages, tensor = options.stages, options.tp
    layouts = [
        _Layout(counts[0] // size, size)
        for size in range(1, counts[0] + 1)
        if counts[0] % size == 0 and tensor in (None, size) and stages in (None, counts[0] // size)
    ]
    if not layouts:
        named = (("stages", stages), ("tp", tensor))
        given = [f"--{name} {n}" for name, n in named if n is not None]
        raise MpxlaError(
            f"--devices {counts[0]} cannot be divided so with {' and '.join(given)}: stages x "
            "tensor is the number of devices. Leave one of them out."
        )
    return layouts


def _planned(
    options: argparse.Namespace,
    layout: _Layout,
    machine: "MachineModel",
    lowering: "Lowering",
    limit: int | None,
) -> _Planned:
    """Plans a factory's model in one layout; its microbatches are those of the factory in each.

    Raises:
        MpxlaError: the model cannot be divided so, or nothing fits.
    """
    from mpxla.cli.factory import capture_factory, capture_part, load_factory
    from mpxla.cli.plan_search import PlanSearch, describe_rows, schedules_to_try
    from mpxla.runtime.plans.cut import cut_step
    from mpxla.runtime.plans.forecast import forecast

    memory = options.activation_memory
    keys = schedule_keys(options) | {"memory_weight": options.memory_weight}
    keys |= {"pipeline_parallel_degree": layout.stages}
    keys["activation_memory"] = int(memory) if memory.isdecimal() else memory
    config = Config(**keys)
    model, inputs, function = load_factory(options.factory)
    if layout.tensor > 1:
        step = capture_part(model, inputs, function, layout.tensor)
    else:
        step = capture_factory(model, inputs, function)
    # Divided parameters are subtracted later: the search's own sizes would be over the limit.
    limit_of_search = limit if options.sdp == 1 else None
    is_fixed = options.schedule_file is not None
    if (options.search or limit_of_search is not None) and not is_fixed:
        tried = schedules_to_try(config, options.pipeline, options.virtual, options.active)
        has_weight = options.memory_weight is not None
        search = PlanSearch(config, step, machine, lowering, limit_of_search)
        rows = search.best(tried, has_weight)
        return _Planned(layout, rows[0].found, rows[0].config, describe_rows(rows, len(tried)))
    cut = cut_step(step, config, lowering, {}, None, machine=machine)
    return _Planned(layout, forecast(cut, config, machine, lowering), config)


def _describe_layouts(plans: Sequence[_Planned], problems: Sequence[str]) -> str:
    """A table of layouts, the fastest first, and why others cannot be.

    Raises:
        MpxlaError: none can be.
    """
    if not plans:
        raise MpxlaError("\n".join(["The model cannot be divided so:", *problems]))
    rows = [("step, ms", "fullest rank", "stages x tensor")]
    for plan in sorted(plans, key=lambda plan: plan.found.timeline.makespan):
        step_s, size = plan.found.timeline.makespan, max(plan.found.rank_bytes)
        rows.append((f"{1e3 * step_s:.3g}", format_size(size), str(plan.layout)))
    return "\n".join(["Layouts, each with its best schedule:", *table(rows), *problems])


def _memory(found: "Forecast") -> str:
    rows = [("rank", "parameters", "activations", "together")]
    for rank, (fixed, saved) in enumerate(
        zip(found.costs.fixed_bytes, found.activation_bytes, strict=True)
    ):
        rows.append((str(rank), format_size(fixed), format_size(saved), format_size(fixed + saved)))
    lines = ["Memory per rank (parameters with gradients and optimizer state):", *table(rows)]
    lines += [
        f"link {a} -> {b}: {format_size(size)} per step" for (a, b), size in found.links.items()
    ]
    return "\n".join(lines)


def _divided(found: "Forecast", config: Config, size: int, limit: int | None) -> str:
    """What ranks take if parameters are divided over replicas as well.

    Raises:
        MpxlaError: more than the limit in any case.
    """
    from mpxla.graph.stepgraph import InputKind
    from mpxla.runtime.plans.automatic import bytes_of_divided
    from mpxla.stage.flat import FlatShard

    step, least = found.cut.step, config.sdp_param_persistence_threshold
    values = [n.meta["val"] for n in step.graph.nodes if n.op == "placeholder"]
    shards = {
        role.name: FlatShard(tuple(value.shape), 0, size)
        for role, value in zip(step.inputs, values, strict=True)
        if role.kind is InputKind.PARAMETER and value.numel() >= least
    }
    sizes = {
        how: bytes_of_divided(found.cut, config, shards, how == "step")
        for how in ("microbatch", "step")
    }
    lines = [f"Divided over {size} replicas (sharded_data_parallel_degree), on the fullest rank:"]
    lines += [f"  sdp_gather: {how:<12}{format_size(held)}" for how, held in sizes.items()]
    fitting = [how for how, held in sizes.items() if limit is None or held <= limit]
    if limit is not None and not fitting:
        raise MpxlaError(
            f"divided over {size} replicas, a rank needs {min(sizes.values()) / 2**30:.3g} GiB, "
            f"more than the {limit / 2**30:.3g} GiB of --memory-limit. Try more replicas or "
            "more stages."
        )
    if limit is not None:
        lines.append(
            f"Within {limit / 2**30:.3g} GiB per rank, parameters are gathered once a "
            f"{fitting[-1]}."
        )
    return "\n".join(lines)


def _programs(found: "Forecast") -> str:
    rows = [("rank", "program", "operations", "arguments")]
    for program in sorted(found.programs, key=lambda p: p.rank):
        size = format_size(program.argument_bytes)
        rows.append((str(program.rank), program.name, str(program.num_operations), size))
    return "\n".join([f"{len(found.programs)} programs:", *table(rows)])


def _collectives(found: "Forecast", size: int) -> str:
    """What tensor parallelism sends for every microbatch; it is part of the predicted step."""
    rows = [("rank", "program", "collectives", "sent")]
    for program in sorted(found.programs, key=lambda p: p.rank):
        sent = format_size(program.collective_bytes)
        rows.append((str(program.rank), program.name, str(program.num_collectives), sent))
    title = f"Messages per microbatch among {size} ranks that share tensors:"
    return "\n".join([title, *table(rows)])


def _timeline(found: "Forecast") -> str:
    timeline = found.timeline
    text = render_text(timeline, max_columns=_COLUMNS)
    grid, _, _ = text.rpartition("\n")
    peaks = " ".join(map(str, timeline.stage_peaks))
    return "\n".join(
        [
            f"Predicted step: {1e3 * timeline.makespan:.3g} ms, bubble "
            f"{100 * timeline.bubble:.1f} %, microbatches in flight per stage: {peaks}",
            grid,
        ]
    )
