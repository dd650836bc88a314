"""Sharded data parallelism against torch's FSDP2, as ratios of step times and of memory.

    python benchmarks/sharded.py                      # the GPT of 17 M, a Markdown table
    python benchmarks/sharded.py --case wide --json out.json

Two replicas that hold the parameters together, one core each: `fully_shard` of every block and of
the model over gloo, and mpxla with `sharded_data_parallel_degree: 2` on both backends. Both gather
in every forward and backward, and scatter gradients in every backward. Processes of all peers are
alive at the same time and take turns; a ratio is taken within a repetition. Beside them DDP, and
mpxla with gradients alone divided.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from suite import Benchmark, Run, measure
from timing import spread

RUNS = [
    Run("fsdp", 2),
    Run("mpxla_parts", 2),
    Run("mpxla_parts_torch_xla", 2),
    Run("ddp", 2),
    Run("mpxla_gradients", 2),
    Run("mpxla_gradients_torch_xla", 2),
]
RATIOS = [
    ("mpxla_parts x2", "fsdp x2"),
    ("mpxla_parts_torch_xla x2", "fsdp x2"),
    ("mpxla_gradients x2", "ddp x2"),
    ("mpxla_gradients_torch_xla x2", "ddp x2"),
    ("fsdp x2", "ddp x2"),
]


def report(found: dict[str, Any], args: argparse.Namespace) -> str:
    """A Markdown report."""
    import jax
    import torch

    lines = [
        f"# Parameters divided over replicas, {datetime.now(UTC):%Y-%m-%d}",
        "",
        f"`python benchmarks/sharded.py --case {args.case} --microbatches {args.microbatches} "
        f"--repetitions {args.repetitions} --steps {args.steps}`",
        "",
        f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, one per rank; Python "
        f"{platform.python_version()}, torch {torch.__version__}, jax {jax.__version__}. Median "
        f"(min - max) over {args.repetitions} repetitions in turns; {args.microbatches} "
        f"microbatches per replica.",
        "",
        "| run | s/step | loss | parameters, gradients, state, MiB/rank | of training, MiB/rank |",
        "|---|---|---|---|---|",
    ]
    for name, result in found.items():
        if result["error"]:
            lines.append(f"| {name} | does not run | `{result['error']}` | | |")
            continue
        ranks = result["ranks"]
        loss = sum(rank["loss"] for rank in ranks) / len(ranks)
        held = max(rank["held_bytes"] for rank in ranks) / 2**20
        peak = max(rank["peak_step_bytes"] - rank["before_bytes"] for rank in ranks) / 2**20
        lines.append(
            f"| {name} | {spread(result['times_s'])} | {loss:.6f} | {held:.1f} | {peak:.0f} |"
        )
    lines += ["", "| ratio of step times | median (min - max) |", "|---|---|"]
    for ours, theirs in RATIOS:
        pair = [found.get(name) for name in (ours, theirs)]
        if all(one and not one["error"] for one in pair):
            a, b = (one["times_s"] for one in pair)
            values = [x / y for x, y in zip(a, b, strict=True)]
            lines.append(f"| {ours} / {theirs} | {spread(values)} |")
    lines += [
        "",
        "Memory of training is the peak of the resident memory in the timed steps, less what the "
        "process had before the model was built; compiled programs and the compiler's own memory "
        "are in it.",
    ]
    return "\n".join(lines)


def main() -> None:
    """Measures and reports."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", default="gpt", help="a model of cases.py")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=1, help="of one turn")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--runs", nargs="+", help="names of runs; all by default")
    parser.add_argument("--json", type=Path, help="also write all results to this file")
    args = parser.parse_args()
    runs = [run for run in RUNS if not args.runs or run.peer in args.runs]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        found = measure(Benchmark(args.case, args.microbatches, runs, args.steps), args.repetitions)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    print(report(found, args))
    sys.exit(any(result["error"] for result in found.values()))


if __name__ == "__main__":
    main()
