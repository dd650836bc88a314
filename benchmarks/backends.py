"""Both backends on one case: step time in turns, dispatch, memory, first and second start.

    python benchmarks/backends.py                       # the GPT of 17 M, a Markdown table
    python benchmarks/backends.py --case tiny --json out.json

Processes of both are alive at the same time and take turns, step by step; a ratio is taken within a
repetition. Second starts find their programs in a folder that the first ones have filled.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from launch import HERE, run_ranks
from suite import Benchmark, Run, measure
from timing import MEMORY_NOTE, heading, in_turns, spread

PEERS = ("mpxla_torch_xla", "mpxla")
RANKS = (1, 2)


def first_seconds(peer: str, ranks: int, case: str, microbatches: int, repetitions: int) -> Any:
    """Seconds of the first step of a first start and of a second one, by repetition."""
    command = [sys.executable, str(HERE / "peers.py"), peer, "--name", case, "--steps", "1"]
    command += ["--microbatches", str(microbatches), "--warm-up", "1"]
    found = []
    for _ in range(repetitions):
        with tempfile.TemporaryDirectory() as folder:
            os.environ["XDG_CACHE_HOME"] = folder
            starts = [run_ranks(peer, command, ranks) for _ in range(2)]
        found.append([max(r["first_s"] for r in rank) for rank in starts])
    return found


def report(found: dict[str, Any], starts: dict[str, Any], args: argparse.Namespace) -> str:
    """A Markdown report."""
    lines = [
        *heading("Backends", in_turns(args.repetitions)),
        "",
        "| step time, pjrt / torch_xla | value |",
        "|---|---|",
    ]
    for ranks in RANKS:
        ours, theirs = (found[f"{peer} x{ranks}"]["times_s"] for peer in reversed(PEERS))
        lines.append(f"| x{ranks} | {spread([a / b for a, b in zip(ours, theirs, strict=True)])} |")
    lines += [
        "",
        "| run, rank | buffers of parameters | dispatch, CPU ms/task | update, CPU ms | "
        "memory of training, MiB | parameters, gradients, optimizer state, MiB |",
        "|---|---|---|---|---|---|",
    ]
    for name, result in found.items():
        for rank in result["ranks"]:
            held = 2 * rank["parameter_bytes"] + rank["state_bytes"]
            lines.append(
                f"| {name}, {rank['rank']} | {rank['num_parameters']} | {rank['dispatch_ms']:.2f} "
                f"| {rank['update_ms']:.2f} | {rank['step_bytes'] / 2**20:.0f} | "
                f"{held / 2**20:.0f} |"
            )
    lines += [
        "",
        MEMORY_NOTE,
        "",
        f"| first step, s (median of {args.starts}) | first start | second start |",
        "|---|---|---|",
    ]
    for name, pairs in starts.items():
        cells = [f"{statistics.median(column):.1f}" for column in zip(*pairs, strict=True)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measures and reports."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", default="gpt", help="a model of cases.py")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=1, help="of one turn")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--starts", type=int, default=1, help="repetitions of the starts")
    parser.add_argument("--json", type=Path, help="also write all results to this file")
    args = parser.parse_args()
    runs = [Run(peer, ranks) for ranks in RANKS for peer in PEERS]
    found = measure(Benchmark(args.case, args.microbatches, runs, args.steps), args.repetitions)
    starts = {
        f"{peer} x2": first_seconds(peer, 2, args.case, args.microbatches, args.starts)
        for peer in PEERS
    }
    if args.json:
        args.json.write_text(json.dumps({"steps": found, "starts": starts}, indent=1))
    print(report(found, starts, args))


if __name__ == "__main__":
    main()
