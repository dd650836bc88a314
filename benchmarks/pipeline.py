"""Pipeline training against what else runs on the same machine, as ratios of step times.

    python benchmarks/pipeline.py                 # a Markdown table
    python benchmarks/pipeline.py --json out.json

Every repetition runs all peers one after the other, so that a drift of the machine's speed meets
all of them; a ratio is taken within a repetition, and its median and range over repetitions are
reported. One core per rank.
"""

import argparse
import json
import os
import platform
import statistics
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from launch import run_ranks

HERE = Path(__file__).resolve().parent


def run_peer(peer: str, ranks: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs one peer; returns one result per rank."""
    command = [sys.executable, str(HERE / "peers.py"), peer]
    command += ["--microbatches", str(args.microbatches), "--steps", str(args.steps)]
    command += ["--case", args.case]
    return run_ranks(peer, command, ranks)


def measure(args: argparse.Namespace) -> dict[str, list[list[dict[str, Any]]]]:
    """Results by peer and number of ranks: one list of rank results per repetition."""
    runs = [("eager", 1), ("lazy_xla", 1), ("mpxla", 1)]
    runs += [("torch_pipelining", 2), ("mpxla", 2)]
    results: dict[str, list[list[dict[str, Any]]]] = {}
    for repetition in range(args.repetitions):
        for peer, ranks in runs:
            found = run_peer(peer, ranks, args)
            results.setdefault(f"{peer} x{ranks}", []).append(found)
            step_s = max(r["step_s"] for r in found)
            print(f"repetition {repetition + 1}: {peer} x{ranks} {step_s:.3f} s", file=sys.stderr)
    return results


def step_times(results: list[list[dict[str, Any]]]) -> list[float]:
    """Median step time of every repetition; the slowest rank counts."""
    return [max(r["step_s"] for r in ranks) for ranks in results]


def spread(values: list[float], digits: int = 3) -> str:
    """`median (min - max)`."""
    low, mid, high = min(values), statistics.median(values), max(values)
    return f"{mid:.{digits}f} ({low:.{digits}f} - {high:.{digits}f})"


def report(results: dict[str, list[list[dict[str, Any]]]], args: argparse.Namespace) -> str:
    """A Markdown report."""
    import torch

    times = {name: step_times(found) for name, found in results.items()}
    m = args.microbatches

    def ratio(a: str, b: str) -> str:
        return spread([x / y for x, y in zip(times[a], times[b], strict=True)])

    def ideal(ranks: int) -> str:
        bubble = (m + ranks - 1) / (m * ranks)
        pairs = zip(times["mpxla x1"], times[f"mpxla x{ranks}"], strict=True)
        return spread([one * bubble / many for one, many in pairs])

    lines = [
        f"# Pipeline training, {datetime.now(UTC):%Y-%m-%d}",
        "",
        f"`python benchmarks/pipeline.py --microbatches {m} --steps {args.steps} "
        f"--repetitions {args.repetitions} --case '{args.case}'`",
        "",
        f"{platform.machine()}, {os.cpu_count()} cores, one per rank; Python "
        f"{platform.python_version()}, torch {torch.__version__}. Median (min - max) over "
        f"{args.repetitions} repetitions.",
        "",
        "| run | s/step | first step, s | loss |",
        "|---|---|---|---|",
    ]
    for name, found in results.items():
        first = [max(r["first_s"] for r in ranks) for ranks in found]
        loss = max(r["loss"] for r in found[-1])
        lines.append(f"| {name} | {spread(times[name])} | {spread(first, 1)} | {loss:.6f} |")
    lines += [
        "",
        "| ratio of step times | value |",
        "|---|---|",
        f"| mpxla x2 / torch_pipelining x2 | {ratio('mpxla x2', 'torch_pipelining x2')} |",
        f"| mpxla x1 / eager x1 | {ratio('mpxla x1', 'eager x1')} |",
        f"| mpxla x1 / lazy_xla x1 | {ratio('mpxla x1', 'lazy_xla x1')} |",
        f"| ideal of 2 ranks (bubble only) / mpxla x2 | {ideal(2)} |",
        "",
        "| rank of mpxla | parameters | dispatch, CPU ms/task | share of time waiting |",
        "|---|---|---|---|",
    ]
    for name in ("mpxla x1", "mpxla x2"):
        for rank in range(len(results[name][0])):
            mine = [ranks[rank] for ranks in results[name]]
            lines.append(
                f"| {name}, rank {rank} | {mine[0]['num_parameters']} | "
                f"{spread([r['dispatch_ms'] for r in mine], 2)} | "
                f"{spread([r['wait_share'] for r in mine])} |"
            )
    lines += ["", "```", results["mpxla x2"][0][0]["partition"], "```"]
    return "\n".join(lines)


def main() -> None:
    """Measures and reports."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--microbatches", type=int, default=8)
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
