"""Replicas, divided parameters and split tensors against what PyTorch has, as ratios of step times.

    python benchmarks/divided.py replicas             # Markdown tables, of the GPT of 17 M
    python benchmarks/divided.py parts --case wide --json out.json
    python benchmarks/divided.py tensor --ranks 4     # of a Llama of 12 M

`replicas`: DistributedDataParallel over gloo, and mpxla, its optimizer state whole and divided.
`parts`: `fully_shard` of every block and of the model, and mpxla with
`sharded_data_parallel_degree: 2`; both gather in every forward and backward, and scatter gradients
in every backward. Beside them DDP, and mpxla with gradients alone divided. `tensor`:
`parallelize_module`, and mpxla by default, with `optimize: "speed"` and with fused collectives; all
ranks share one batch. One core per rank as far as there are cores. Processes of all peers are alive
at the same time and take turns; a ratio is taken within a repetition.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from suite import Benchmark, Run, measure, times
from timing import MEMORY_NOTE, heading, in_turns, spread

AGAINST: dict[str, dict[str, str | None]] = {
    "replicas": {"ddp": None, "mpxla_replicas": "ddp", "mpxla_sharded": "mpxla_replicas"},
    "parts": {
        "ddp": None,
        "fsdp": "ddp",
        "mpxla_parts": "fsdp",
        "mpxla_parts_torch_xla": "fsdp",
        "mpxla_gradients": "ddp",
        "mpxla_gradients_torch_xla": "ddp",
    },
    "tensor": {
        "torch_tensor": None,
        "mpxla_tensor": "torch_tensor",
        "mpxla_tensor_speed": "torch_tensor",
        "mpxla_tensor_torch_xla": "torch_tensor",
        "mpxla_tensor_fused": "torch_tensor",
    },
}
"""The peers of a subject, each with the one that it is compared with."""


def report(found: dict[str, Any], args: argparse.Namespace) -> str:
    """A Markdown report."""
    lines = [
        *heading(f"{args.subject.capitalize()} against PyTorch", in_turns(args.repetitions)),
        "",
        "| run | s/step | ratio | loss | parameters, MiB/rank | with gradients and state | "
        "of training |",
        "|---|---|---|---|---|---|---|",
    ]
    for peer, other in AGAINST[args.subject].items():
        run = Run(peer, args.ranks)
        result = found.get(str(run))
        if result is None or result["error"]:
            lines += [f"| {run} | does not run | `{result['error']}` | | | | |"] if result else []
            continue
        ranks, ratio = result["ranks"], ""
        theirs = times(found, Run(other, args.ranks)) if other else []
        if theirs:
            values = [a / b for a, b in zip(result["times_s"], theirs, strict=True)]
            ratio = f"{spread(values)} of {other}"
        loss = sum(rank["loss"] for rank in ranks) / len(ranks)
        sizes = [max(rank[key] for rank in ranks) for key in ("parameter_bytes", "held_bytes")]
        sizes.append(max(rank["peak_step_bytes"] - rank["before_bytes"] for rank in ranks))
        cells = [str(run), spread(result["times_s"]), ratio, f"{loss:.6f}"]
        lines.append("| " + " | ".join([*cells, *(f"{n / 2**20:.1f}" for n in sizes)]) + " |")
    return "\n".join([*lines, "", MEMORY_NOTE])


def main() -> None:
    """Measures and reports."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("subject", choices=AGAINST)
    parser.add_argument("--case", help="a model of cases.py")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=4, help="of every replica")
    parser.add_argument("--steps", type=int, default=1, help="of one turn")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--peers", nargs="+", help="names of peers; all by default")
    parser.add_argument("--json", type=Path, help="also write all results to this file")
    args = parser.parse_args()
    case = args.case or ("llama" if args.subject == "tensor" else "gpt")
    runs = [Run(p, args.ranks) for p in AGAINST[args.subject] if p in (args.peers or [p])]
    found = measure(Benchmark(case, args.microbatches, runs, args.steps), args.repetitions)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    print(report(found, args))
    sys.exit(any(result["error"] for result in found.values()))


if __name__ == "__main__":
    main()
