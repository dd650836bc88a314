"""Records of ranks as plain data, merged into one trace, and read from it again.

Layout of the file, beside `traceEvents`, which is for viewers:

    "mpxla": {"version": 3, "ranks": [{"rank", "host", "steps": [...]}]}

A step is the fields of a `StepRecord`, and of the records in it.
Times are seconds since the first recorded step began anywhere. Ranks of one host share a clock;
another host's is taken to agree at the end of its first step, which all its ranks end together.
This module must not know devices; it is all that `python -m mpxla trace` needs.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mpxla.errors import MpxlaError
from mpxla.schedule.action import Op, parse_action, parse_schedule
from mpxla.schedule.render import chrome_trace
from mpxla.schedule.simulate import Costs, simulate
from mpxla.schedule.timeline import Timeline

__all__ = [
    "Curve",
    "load_trace",
    "measured_costs",
    "measured_memory",
    "measured_timeline",
    "merge_ranks",
    "pipelines",
    "predicted_memory",
    "predicted_timeline",
]

VERSION = 3
_TIMES = ("begin", "dispatched", "arrived", "end")
_COPIES, _MEASURED, _PREDICTED = 2, 1, 0
_PROCESSES = {
    _PREDICTED: "predicted",
    _MEASURED: "measured",
    _COPIES: "copies to and from the host",
}


def merge_ranks(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All ranks' records, in their order, as one trace; their times become those of one clock."""
    reference = next(rank for rank in ranks if rank["steps"])
    for rank in ranks:
        offset = 0.0
        if rank["host"] != reference["host"] and rank["steps"]:
            offset = reference["steps"][0]["end"] - rank["steps"][0]["end"]
        _shift(rank, offset)
    zero = min(step["begin"] for rank in ranks for step in rank["steps"])
    for rank in ranks:
        _shift(rank, -zero)
    return {
        "traceEvents": _events(ranks),
        "displayTimeUnit": "ms",
        "mpxla": {"version": VERSION, "ranks": list(ranks)},
    }


def _shift(rank: dict[str, Any], offset: float) -> None:
    for step in rank["steps"]:
        waits = [wait for action in step["actions"] for wait in action["waits"]]
        for span in (step, *step["actions"], *waits, *step["copies"]):
            span.update({name: span[name] + offset for name in _TIMES if name in span})


def load_trace(path: Path) -> list[dict[str, Any]]:
    """Reads the records of all ranks.

    Raises:
        MpxlaError: the file is not a trace of `smp.profile`.
    """
    try:
        data = json.loads(path.read_text())
        ranks = data["mpxla"]["ranks"]
        version = data["mpxla"]["version"]
    except OSError as error:
        raise MpxlaError(f"the trace {path} cannot be read: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise MpxlaError(
            f"{path} is not a trace that smp.profile wrote. Record one: with smp.profile(path): ..."
        ) from error
    if version != VERSION:
        raise MpxlaError(
            f"{path} has version {version} of mpxla's traces, and this mpxla reads {VERSION}. "
            "Record it again."
        )
    return ranks


def measured_timeline(ranks: Sequence[Mapping[str, Any]], step: int) -> Timeline:
    """What the ranks of one pipeline did in a step, from the step's begin on, in seconds.

    A program's span is from its dispatch to its end, without the wait for messages before it.
    """
    steps = [rank["steps"][step] for rank in ranks]
    zero = min(s["begin"] for s in steps)
    schedule = tuple(tuple(parse_action(a["action"]) for a in s["actions"]) for s in steps)
    starts = tuple(tuple(_started(a) - zero for a in s["actions"]) for s in steps)
    ends = tuple(tuple(a["end"] - zero for a in s["actions"]) for s in steps)
    return Timeline(tuple(steps[0]["plan"]["placement"]), schedule, starts, ends)


def _started(action: Mapping[str, Any]) -> float:
    """When an action began, without the wait for messages before it."""
    return max([action["begin"], *(wait["end"] for wait in action["waits"])])


def measured_costs(timeline: Timeline) -> Costs:
    """Mean durations of every stage's programs, with messages that take no time.

    The first microbatch of a kind counts like the others: profiles are taken after a warm-up.
    """
    num_stages = len(timeline.placement)
    seconds: dict[tuple[Op, int], list[float]] = {}
    for spans in timeline.spans:
        for action, start, end in spans:
            if action.op.is_compute:
                seconds.setdefault((action.op, action.stage), []).append(end - start)

    def mean(op: Op) -> list[float]:
        found = (seconds.get((op, stage)) or [0.0] for stage in range(num_stages))
        return [sum(times) / len(times) for times in found]

    return Costs(
        forward=mean(Op.FORWARD),
        backward=mean(Op.BACKWARD),
        input_gradient=mean(Op.INPUT_GRADIENT),
        weight_gradient=mean(Op.WEIGHT_GRADIENT),
    )


def predicted_timeline(plan: Mapping[str, Any], costs: Costs | None = None) -> Timeline:
    """The simulated timeline of a step's plan, in seconds, with its own or with other costs."""
    if costs is None:
        transfer = {(a, b): seconds for a, b, seconds in plan["transfer"]}
        costs = Costs(
            plan["forward"],
            plan["backward"],
            transfer,
            input_gradient=plan["input_gradient"],
            copy=plan["copy"],
        )
    forward = {(a, b) for a, b in plan["forward_edges"]}
    backward = {(a, b) for a, b in plan["backward_edges"]}
    schedule = parse_schedule(plan["schedule"])
    return simulate(schedule, plan["placement"], forward, backward, costs, rendezvous=False)


Curve = list[tuple[float, int]]
"""(seconds, bytes from then on) of one rank."""


def measured_memory(ranks: Sequence[Mapping[str, Any]], step: int) -> list[Curve]:
    """Saved activations of the ranks of one pipeline over a step, from its begin on."""
    steps = [rank["steps"][step] for rank in ranks]
    zero = min(s["begin"] for s in steps)
    return [[(0.0, 0), *((a["end"] - zero, a["held_bytes"]) for a in s["actions"])] for s in steps]


def predicted_memory(
    ranks: Sequence[Mapping[str, Any]], step: int, timeline: Timeline
) -> list[Curve]:
    """The same by the forecast, at the times of a predicted timeline."""
    held = (rank["steps"][step]["plan"]["held_bytes"] for rank in ranks)
    return [
        [(0.0, 0), *zip(ends, sizes, strict=True)]
        for ends, sizes in zip(timeline.ends, held, strict=True)
    ]


def _events(ranks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    has_copies = any(step["copies"] for rank in ranks for step in rank["steps"])
    for pid, name in _PROCESSES.items():
        if pid == _COPIES and not has_copies:
            continue
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}})
    for rank in ranks:
        thread = {"ph": "M", "pid": _MEASURED, "tid": rank["rank"]}
        events.append(thread | {"name": "thread_name", "args": {"name": f"rank {rank['rank']}"}})
        for step in rank["steps"]:
            for action in step["actions"]:
                events += _action_events(rank["rank"], action)
            for copied in step["copies"]:
                copy = _slice(copied["action"], "copy", copied["begin"], copied["end"])
                events.append({"ph": "X", "pid": _COPIES, "tid": rank["rank"]} | copy)
    for group in pipelines(ranks):
        for index in range(min(len(rank["steps"]) for rank in group)):
            events += _prediction_events(group, index)
    return events


def pipelines(ranks: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Ranks by pipeline, each in the order of pipeline ranks."""
    groups: dict[tuple[int, ...], list[Mapping[str, Any]]] = {}
    by_rank = {rank["rank"]: rank for rank in ranks if rank["steps"]}
    for rank in by_rank.values():
        members = tuple(rank["steps"][0]["plan"]["ranks"])
        groups[members] = [by_rank[member] for member in members if member in by_rank]
    return list(groups.values())


def _action_events(rank: int, action: Mapping[str, Any]) -> list[dict[str, Any]]:
    text, end, started = action["action"], action["end"], _started(action)
    place = {"ph": "X", "pid": _MEASURED, "tid": rank}
    found = [
        place | _slice(f"wait for stage {w['peer']}", "wait", w["begin"], w["arrived"])
        for w in action["waits"]
    ]
    details = {"dispatch_us": round((action["dispatched"] - started) * 1e6)}
    span = _slice(text, parse_action(text).op.name.lower(), started, end)
    counter = _counter(_MEASURED, rank, end, action["held_bytes"])
    return [*found, place | span | {"args": details}, counter]


def _counter(pid: int, rank: int, time: float, held_bytes: int) -> dict[str, Any]:
    """Saved activations of a rank from a time on; a viewer draws them as a curve."""
    name = {"ph": "C", "name": f"activations of rank {rank}", "pid": pid, "tid": rank}
    return name | {"ts": time * 1e6, "args": {"bytes": held_bytes}}


def _slice(name: str, category: str, begin: float, end: float) -> dict[str, Any]:
    return {"name": name, "cat": category, "ts": begin * 1e6, "dur": (end - begin) * 1e6}


def _prediction_events(group: Sequence[Mapping[str, Any]], index: int) -> list[dict[str, Any]]:
    """The prediction of a step, from when it really began."""
    steps = [rank["steps"][index] for rank in group]
    zero = min(step["begin"] for step in steps)
    timeline = predicted_timeline(steps[0]["plan"])
    trace = chrome_trace(timeline, us_per_unit=1e6)
    found = [
        _counter(_PREDICTED, rank["rank"], zero + time, held)
        for rank, curve in zip(group, predicted_memory(group, index, timeline), strict=True)
        for time, held in curve
    ]
    for event in trace["traceEvents"]:
        if event["name"] == "process_name":
            continue
        event["pid"] = _PREDICTED
        if event.get("tid", 0) < len(group):
            event["tid"] = group[event["tid"]]["rank"]
        if event["ph"] == "M" and event["name"] == "thread_name":
            event["args"] = {"name": f"rank {event['tid']}"}
        if "ts" in event:
            event["ts"] += zero * 1e6
        if "id" in event:
            event["id"] = f"{group[0]['rank']}.{index}.{event['name']}"
        found.append(event)
    return found
