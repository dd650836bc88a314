"""Zero-bubble schedules against 1F1B on the clock, beside what the simulator says.

    torchrun --nproc_per_node 4 benchmarks/zero_bubble.py
    torchrun --nproc_per_node 4 benchmarks/zero_bubble.py --unit-ms 0     # nothing is paced
    MPXLA_DEVICE=torch_xla torchrun --nproc_per_node 4 benchmarks/zero_bubble.py

Ranks are processes that train a small GPT of equal stages by the real engine, schedules and
messages. Where ranks share cores, a rank that waits leaves its core to the others, and no schedule
can gain. So programs run on a device of a given speed (`paced.py`): they compute their numbers, and
their results are ready when their floating-point operations would be done, without a core being
used for it. The rate is such that a forward of a microbatch takes `--unit-ms` on every rank. The
simulator is told the same durations. The schedules take turns in the same processes; ratios are
taken within a repetition.
"""

import argparse
import json
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from models import GPTCase
from paced import PacedBackend, pace
from timing import heading, in_turns, spread
from torch.utils.flop_counter import FlopCounterMode

import mpxla as smp
from mpxla.config import Config
from mpxla.device.choice import open_backend
from mpxla.env import read_environment
from mpxla.schedule.choice import compute_actions, placement_of
from mpxla.schedule.lower import add_communication, add_reduce
from mpxla.schedule.simulate import Costs, simulate
from mpxla.session import current

SCHEDULES = ("interleaved", "zero_bubble", "zero_bubble_v")
CASE = GPTCase(vocabulary=64, width=64, num_blocks=8, num_heads=2, length=32)
"""Two equal blocks for each of four ranks, and a head of no weight."""


@dataclass
class Found:
    """What a schedule took.

    Attributes:
        times_s: the median step of the slowest rank, by repetition.
        seconds: of every program of all ranks, by name; empty where nothing is paced.
        loss: of the last step.
    """

    times_s: list[float] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    loss: float = float("nan")


def rate_of(ranks: int, unit_s: float) -> float:
    """Operations per second at which a forward of a microbatch takes a time on every rank."""
    ids, targets = CASE.batch(1)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        CASE.loss(CASE.model()(ids), targets)
    return counter.get_total_flops() / ranks / unit_s


def take_turn(pipeline: str, microbatches: int, steps: int, backend: PacedBackend | None) -> Found:
    """Trains some steps by a schedule, in a session of its own; what this rank found."""
    if backend is not None:
        backend.seconds.clear()
    degree = dist.get_world_size()
    keys = {"pipeline_parallel_degree": degree, "microbatches": microbatches}
    smp.init({**keys, "pipeline": pipeline, "memory_weight": 0.0})
    model = smp.DistributedModel(CASE.model())
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))
    ids, targets = CASE.batch(microbatches)

    @smp.step
    def train_step(model: Any, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = CASE.loss(model(ids), targets)
        model.backward(loss)
        return loss

    found = Found()
    for _ in range(2 + steps):
        dist.barrier()
        began = time.perf_counter()
        optimizer.zero_grad()
        loss = train_step(model, ids, targets)
        optimizer.step()
        current().backend.wait()
        found.times_s.append(time.perf_counter() - began)
        found.loss = loss.reduce_mean().item()
    del found.times_s[:2]  # they compile
    found.seconds = dict(backend.seconds) if backend is not None else {}
    smp.shutdown()
    return found


def of_all_ranks(found: Found) -> Found:
    """A turn as all ranks saw it; every rank calls it."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    slowest = map(max, zip(*(rank.times_s for rank in everyone), strict=True))
    seconds = {name: s for rank in everyone for name, s in rank.seconds.items()}
    return Found([statistics.median(slowest)], seconds, found.loss)


def simulated_s(
    pipeline: str, microbatches: int, ranks: int, seconds: Mapping[str, float]
) -> float:
    """The step of a schedule whose programs take these seconds, by name, if messages take none."""
    config = Config(pipeline_parallel_degree=ranks, microbatches=microbatches, pipeline=pipeline)
    placement = placement_of(config)
    stages = range(len(placement))
    forward = [(stage, stage + 1) for stage in stages[:-1]]
    backward = [(after, before) for before, after in forward]

    def of_every_stage(program: str) -> list[float]:
        return [seconds.get(f"stage {stage} {program}", 0.0) for stage in stages]

    computes = compute_actions(config, placement, training=True)
    schedule = add_communication(computes, placement, forward, backward)
    costs = Costs(
        forward=of_every_stage("forward"),
        backward=of_every_stage("backward"),
        input_gradient=of_every_stage("input gradients"),
        weight_gradient=of_every_stage("weight gradients"),
    )
    edges, schedule = (forward, backward), add_reduce(schedule)
    return simulate(schedule, placement, *edges, costs, rendezvous=False).makespan


def rows_of(found: Mapping[str, Found], microbatches: int, ranks: int) -> list[str]:
    """Lines of the report's table of one number of microbatches."""
    lines = [
        "",
        f"## {ranks} ranks, {microbatches} microbatches",
        "",
        "| schedule | s/step | / 1F1B | simulated s/step | / 1F1B | share of the gain | loss |",
        "|---|---|---|---|---|---|---|",
    ]
    first = found[SCHEDULES[0]]
    first_s = simulated_s(SCHEDULES[0], microbatches, ranks, first.seconds)
    for pipeline, one in found.items():
        ratios = [a / b for a, b in zip(one.times_s, first.times_s, strict=True)]
        cells = [f"`{pipeline}`", spread(one.times_s), spread(ratios), "", "", ""]
        if first_s:
            step_s = simulated_s(pipeline, microbatches, ranks, one.seconds)
            predicted = step_s / first_s
            cells[3:5] = f"{step_s:.3f}", f"{predicted:.3f}"
            if predicted < 1:
                cells[5] = spread([(1 - ratio) / (1 - predicted) for ratio in ratios], 2)
        lines.append("| " + " | ".join([*cells, f"{one.loss:.6f}"]) + " |")
    return lines


def head_of(args: argparse.Namespace, device: str) -> list[str]:
    """The first lines of the report."""
    speed = (
        "Programs compute on the processor, and their results are ready after the time that they "
        f"would take where a rank's forward of a microbatch takes {args.unit_ms:g} ms."
        if args.unit_ms
        else "Programs take what they take, on cores that ranks share."
    )
    note = f"Device: {device}. {speed} {in_turns(args.repetitions)}"
    launcher = f"torchrun --nproc_per_node {dist.get_world_size()}"
    return heading("Zero-bubble schedules", note, launcher)


def main() -> None:
    """Measures and reports; every rank runs it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--unit-ms", type=float, default=20.0, help="0: no device is paced")
    parser.add_argument("--steps", type=int, default=5, help="of one turn")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write all results to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks, is_first = dist.get_world_size(), dist.get_rank() == 0
    device = open_backend(read_environment())
    backend = pace(rate_of(ranks, args.unit_ms / 1e3)) if args.unit_ms else None
    if is_first:
        print("\n".join(head_of(args, device.name)), flush=True)
    results: dict[int, dict[str, Found]] = {}
    for microbatches in args.microbatches:
        found = results[microbatches] = {pipeline: Found() for pipeline in SCHEDULES}
        for _ in range(args.repetitions):
            for pipeline in SCHEDULES:
                turn = of_all_ranks(take_turn(pipeline, microbatches, args.steps, backend))
                found[pipeline].times_s += turn.times_s
                found[pipeline].seconds, found[pipeline].loss = turn.seconds, turn.loss
        if is_first:
            print("\n".join(rows_of(found, microbatches, ranks)), flush=True)
    if args.json and is_first:
        plain = {m: {name: asdict(one) for name, one in f.items()} for m, f in results.items()}
        args.json.write_text(json.dumps(plain, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
