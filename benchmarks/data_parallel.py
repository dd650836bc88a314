"""Data parallelism against torch's DistributedDataParallel over gloo, as ratios of step times.

    python benchmarks/data_parallel.py                 # a Markdown table
    python benchmarks/data_parallel.py --json out.json

The same GPT, the same batches, two replicas, one core each. Every repetition runs all peers one
after the other; ratios are taken within a repetition. Bandwidth is that of one all-reduce of the
model's gradients: bare gloo on host memory, and mpxla's transport from the device. What overlap
hides is seen with two replicas of two stages, which need four cores.
"""

import argparse
import json
import os
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from launch import HERE, run_ranks
from timing import spread

PEERS = [
    ("eager", 1),
    ("mpxla", 1),
    ("ddp", 2),
    ("mpxla_replicas", 2),
    ("mpxla_sharded", 2),
    ("all_reduce", 2),
    ("mpxla_grid", 4),
    ("mpxla_grid_without_overlap", 4),
]

Results = dict[str, list[list[dict[str, Any]]]]


def run_peer(peer: str, ranks: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs one peer; returns one result per rank."""
    command = [sys.executable, str(HERE / "peers.py"), peer]
    command += ["--microbatches", str(args.microbatches), "--steps", str(args.steps)]
    command += ["--case", args.case]
    return run_ranks(peer, command, ranks)


def step_times(results: list[list[dict[str, Any]]]) -> list[float]:
    """Median step time of every repetition; the slowest rank counts."""
    return [max(r["step_s"] for r in ranks) for ranks in results]


def measure(args: argparse.Namespace) -> Results:
    """Results by peer and number of ranks: one list of rank results per repetition."""
    results: Results = {}
    for repetition in range(args.repetitions):
        for peer, ranks in PEERS:
            found = run_peer(peer, ranks, args)
            results.setdefault(f"{peer} x{ranks}", []).append(found)
            step_s = max(r["step_s"] for r in found)
            print(f"repetition {repetition + 1}: {peer} x{ranks} {step_s:.3f} s", file=sys.stderr)
    return results


def report(results: Results, args: argparse.Namespace) -> str:
    """A Markdown report."""
    import torch

    times = {name: step_times(found) for name, found in results.items()}

    def ratio(a: str, b: str) -> str:
        return spread([x / y for x, y in zip(times[a], times[b], strict=True)])

    def of(name: str, key: str, unit: float = 1.0) -> str:
        return spread([max(r[key] for r in ranks) / unit for ranks in results[name]], 1)

    lines = [
        f"# Data parallelism, {datetime.now(UTC):%Y-%m-%d}",
        "",
        f"`python benchmarks/data_parallel.py --microbatches {args.microbatches} --steps "
        f"{args.steps} --repetitions {args.repetitions} --case '{args.case}'`",
        "",
        f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, one per rank as far as they "
        f"go; Python "
        f"{platform.python_version()}, torch {torch.__version__}. Median (min - max) over "
        f"{args.repetitions} repetitions; {args.microbatches} microbatches per replica.",
        "",
        "| run | s/step | loss | optimizer state, MB/rank | peak memory, MB/rank |",
        "|---|---|---|---|---|",
    ]
    for name, found in results.items():
        if name == "all_reduce x2":
            continue
        loss = sum(r["loss"] for r in found[-1]) / len(found[-1])
        memory = f"{of(name, 'state_bytes', 1e6)} | {of(name, 'peak_bytes', 1e6)}"
        lines.append(f"| {name} | {spread(times[name])} | {loss:.6f} | {memory} |")
    lines += [
        "",
        "| ratio of step times | value |",
        "|---|---|",
        f"| mpxla_replicas x2 / ddp x2 | {ratio('mpxla_replicas x2', 'ddp x2')} |",
        f"| mpxla x1 / eager x1 | {ratio('mpxla x1', 'eager x1')} |",
        f"| mpxla_replicas x2 / mpxla x1 | {ratio('mpxla_replicas x2', 'mpxla x1')} |",
        f"| ddp x2 / eager x1 | {ratio('ddp x2', 'eager x1')} |",
        f"| mpxla_sharded x2 / mpxla_replicas x2 | "
        f"{ratio('mpxla_sharded x2', 'mpxla_replicas x2')} |",
    ]
    pair = "mpxla_grid x4", "mpxla_grid_without_overlap x4"
    hidden = [b - a for a, b in zip(*(times[name] for name in pair), strict=True)]
    lines += [
        f"| mpxla_grid x4 / without overlap | {ratio(*pair)} |",
        f"| s/step hidden by overlap, 2 replicas of 2 stages | {spread(hidden)} |",
        "",
        "| all-reduce of the gradients, two ranks | MB/s |",
        "|---|---|",
        f"| bare gloo, host memory | {of('all_reduce x2', 'gloo_mb_per_s')} |",
        f"| mpxla's transport, from the device to the host | {of('all_reduce x2', 'mb_per_s')} |",
    ]
    return "\n".join(lines)


def main() -> None:
    """Measures and reports."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--case", default="{}", help="fields of GPTCase as JSON")
    parser.add_argument("--json", type=Path, help="also write all results to this file")
    args = parser.parse_args()
    results = measure(args)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    print(report(results, args))


if __name__ == "__main__":
    main()
