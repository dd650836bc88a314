"""Tensor parallelism against torch.distributed.tensor.parallel, as ratios of step times.

    python benchmarks/tensor.py                        # a Llama of 12 M, a Markdown table
    python benchmarks/tensor.py --ranks 4 --json out.json

All ranks share one batch, one core each as far as there are cores: `parallelize_module` over gloo,
and mpxla by default, with `optimize: "speed"`, and on jax. Processes of all peers are alive at the
same time and take turns; a ratio is taken within a repetition.
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

THEIRS = "torch_tensor"
OURS = ("mpxla_tensor", "mpxla_tensor_speed", "mpxla_tensor_torch_xla", "mpxla_tensor_fused")


def report(found: dict[str, Any], args: argparse.Namespace) -> str:
    """A Markdown report."""
    import jax
    import torch

    lines = [
        f"# Tensor parallelism, {datetime.now(UTC):%Y-%m-%d}",
        "",
        f"`python benchmarks/tensor.py --case {args.case} --ranks {args.ranks} --microbatches "
        f"{args.microbatches} --repetitions {args.repetitions}`",
        "",
        f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores; Python "
        f"{platform.python_version()}, torch {torch.__version__}, jax {jax.__version__}. Median "
        f"(min - max) over {args.repetitions} repetitions in turns.",
        "",
        "| run | s/step | / torch | loss | parameters, MiB/rank | of training, MiB/rank |",
        "|---|---|---|---|---|---|",
    ]
    theirs = found[f"{THEIRS} x{args.ranks}"]["times_s"]
    for name, result in found.items():
        if result["error"]:
            lines.append(f"| {name} | does not run | `{result['error']}` | | | |")
            continue
        ranks, times = result["ranks"], result["times_s"]
        ratio = spread([a / b for a, b in zip(times, theirs, strict=True)]) if theirs else ""
        held = max(rank["parameter_bytes"] for rank in ranks) / 2**20
        peak = max(rank["peak_step_bytes"] - rank["before_bytes"] for rank in ranks) / 2**20
        lines.append(
            f"| {name} | {spread(times)} | {ratio} | {ranks[0]['loss']:.6f} | {held:.1f} | "
            f"{peak:.0f} |"
        )
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
    parser.add_argument("--case", default="llama", help="a model of cases.py that is a Llama")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=1, help="of one turn")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--json", type=Path, help="also write all results to this file")
    args = parser.parse_args()
    runs = [Run(peer, args.ranks) for peer in (THEIRS, *OURS)]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        found = measure(Benchmark(args.case, args.microbatches, runs, args.steps), args.repetitions)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    print(report(found, args))
    sys.exit(any(result["error"] for result in found.values()))


if __name__ == "__main__":
    main()
