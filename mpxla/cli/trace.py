"""`python -m mpxla trace`: where the time of a recorded step went, in words and as a picture."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mpxla.cli.drawing import draw_timelines
from mpxla.errors import MpxlaError
from mpxla.runtime.watching.trace import (
    load_trace,
    measured_costs,
    measured_memory,
    measured_timeline,
    pipelines,
    predicted_memory,
    predicted_timeline,
)
from mpxla.schedule.action import parse_action
from mpxla.tables import table

__all__ = ["add_parser", "where_time_went"]


def add_parser(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "trace",
        help="explain a trace that smp.profile recorded",
        description="Says where each rank's time went in one step, and draws it.",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="what smp.profile wrote")
    parser.add_argument("--step", type=int, help="number of the step, from 0; by default the last")
    parser.add_argument("--output", type=Path, metavar="PNG", help="draw measured and predicted")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Prints one step of a trace."""
    ranks = load_trace(options.file)
    panels, memory = [], []
    for group in pipelines(ranks):
        number = _step_number(options.step, min(len(rank["steps"]) for rank in group))
        steps = [rank["steps"][number] for rank in group]
        measured = measured_timeline(group, number)
        predicted = predicted_timeline(steps[0]["plan"])
        replayed = predicted_timeline(steps[0]["plan"], measured_costs(measured))
        took = max(step["end"] for step in steps) - min(step["begin"] for step in steps)
        print(f"step {number}, {steps[0]['name']}: {1e3 * took:.2f} ms")
        print(f"  {1e3 * predicted.makespan:.2f} ms predicted from operation counts")
        print(
            f"  {1e3 * replayed.makespan:.2f} ms for this schedule with the measured durations of "
            "programs, if messages took no time"
        )
        print(where_time_went(group, number) + "\n")
        title = f"step {number} on ranks {', '.join(str(rank['rank']) for rank in group)}"
        panels += [
            (f"{title}: measured", measured),
            (f"{title}: predicted from operation counts", predicted),
        ]
        memory += [measured_memory(group, number), predicted_memory(group, number, predicted)]
    if options.output is not None:
        if options.output.suffix != ".png":
            raise MpxlaError(f"{options.output}: trace draws PNG files. Use the ending .png.")
        draw_timelines(panels, options.output, memory=memory)
        print(f"wrote {options.output}")


def _step_number(asked: int | None, count: int) -> int:
    number = count - 1 if asked is None else asked
    if not 0 <= number < count:
        raise MpxlaError(f"--step {asked}: the trace has steps 0 to {count - 1}.")
    return number


def where_time_went(group: Sequence[Mapping[str, Any]], number: int) -> str:
    """A table with a row per rank: compute, dispatch, transfer, waiting for whom, and the rest."""
    steps = [rank["steps"][number] for rank in group]
    begin, end = min(s["begin"] for s in steps), max(s["end"] for s in steps)
    placement = steps[0]["plan"]["placement"]
    rows: list[tuple[str, ...]] = [
        ("rank", "compute", "dispatch", "transfer", "waiting", "rest", "waited for")
    ]
    for rank, step in zip(group, steps, strict=True):
        spent = _Spent(step)
        waited: dict[int, float] = {}
        for stage, seconds in spent.waits.items():
            peer = group[placement[stage]]["rank"]
            waited[peer] = waited.get(peer, 0.0) + seconds
        waiting = sum(waited.values())
        rest = end - begin - spent.compute - spent.dispatch - spent.transfer - waiting
        times = (spent.compute, spent.dispatch, spent.transfer, waiting, rest)
        whom = ", ".join(f"rank {peer} {1e3 * s:.2f} ms" for peer, s in sorted(waited.items()))
        shares = (f"{1e3 * s:.2f} ms {100 * s / (end - begin):3.0f} %" for s in times)
        rows.append((str(rank["rank"]), *shares, whom or "nobody"))
    return "\n".join(table(rows))


class _Spent:
    """Seconds of one rank in one step, by what they were spent on."""

    def __init__(self, step: Mapping[str, Any]) -> None:
        self.compute = self.dispatch = self.transfer = 0.0
        self.waits: dict[int, float] = {}
        for action in step["actions"]:
            waited = 0.0
            for wait in action["waits"]:
                stage, start, arrived = wait["peer"], wait["begin"], wait["arrived"]
                self.waits[stage] = self.waits.get(stage, 0.0) + arrived - start
                self.transfer += wait["end"] - arrived
                waited += wait["end"] - start
            op = parse_action(action["action"]).op
            if op.is_compute:
                self.dispatch += action["dispatched"] - action["begin"] - waited
                self.compute += action["end"] - action["dispatched"]
            elif op.is_transfer:
                self.transfer += action["end"] - action["begin"]
