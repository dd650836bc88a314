"""Step time against memory for activations: everything kept, checkpointed blocks, and budgets.

    python benchmarks/recomputation.py                        # a Markdown table
    python benchmarks/recomputation.py --picture sweep.svg    # also drawn

The GPT of the other benchmarks on one rank. Every row runs in a process of its own, in turns with
the others; times are CPU seconds of the process, which other work on the machine changes little.
`keep` holds what is dear to compute again, `each` checkpoints every block, a percentage limits what
is held to that share of `keep`, and `recompute` holds what the stage takes in.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from launch import run_ranks
from models import GPTCase

MODES = ("keep", "75%", "50%", "each", "25%", "10%", "recompute")


def train(mode: str, args: argparse.Namespace, kept_bytes: int) -> dict[str, Any]:
    """Times steps of one mode; prints nothing."""
    import torch

    import mpxla as smp
    from mpxla.session import current

    memory: Any = "recompute" if mode == "recompute" else "keep"
    if mode.endswith("%"):
        memory = kept_bytes * int(mode[:-1]) // 100
    smp.init({"microbatches": args.microbatches, "activation_memory": memory})
    case = GPTCase(**json.loads(args.case))
    model = smp.DistributedModel(case.model())
    if mode == "each":
        for block in model.get_module().blocks:
            smp.set_activation_checkpointing(block)
    ids, targets = case.batch(args.microbatches)

    @smp.step
    def step(model: Any, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = case.loss(model(ids), targets)
        model.backward(loss)
        return loss

    def timed() -> float:
        model.zero_grad()
        started = time.process_time()
        losses.append(step(model, ids, targets).reduce_mean().item())
        current().backend.wait()
        return time.process_time() - started

    losses: list[float] = []
    for _ in range(2):
        timed()
    return {
        "times_s": [timed() for _ in range(args.steps)],
        "bytes": model.last_run.values.peak_saved_bytes,
        "loss": losses[-1],
    }


def measure(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """What every mode took, over all repetitions."""
    found: dict[str, dict[str, Any]] = {}
    for repetition in range(args.repetitions):
        for mode in MODES:
            kept = found.get("keep", {}).get("bytes", 0)
            command = [sys.executable, __file__, *sys.argv[1:], "--mode", mode, "--kept", str(kept)]
            (result,) = run_ranks(mode, command, 1)
            times = found.get(mode, {}).get("times_s", [])
            found[mode] = {**result, "times_s": times + result["times_s"]}
            median = statistics.median(result["times_s"])
            print(f"repetition {repetition + 1}: {mode} {median:.3f} s", file=sys.stderr)
    return found


def report(found: dict[str, dict[str, Any]], args: argparse.Namespace) -> str:
    """A Markdown report."""
    import torch

    kept = found["keep"]
    lines = [
        f"`python benchmarks/recomputation.py --microbatches {args.microbatches} --steps "
        f"{args.steps} --repetitions {args.repetitions} --case '{args.case}'`",
        "",
        f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores; Python "
        f"{platform.python_version()}, torch {torch.__version__}. Medians of CPU seconds, and of "
        f"the ratio the range.",
        "",
        "| activations | live bytes, MB | of `keep` | s/step | of `keep` | same loss |",
        "|---|---|---|---|---|---|",
    ]
    base = statistics.median(kept["times_s"])
    for mode, one in found.items():
        times = [t / base for t in one["times_s"]]
        ratio = f"{statistics.median(times):.2f} ({min(times):.2f} - {max(times):.2f})"
        lines.append(
            f"| {mode} | {one['bytes'] / 1e6:.2f} | {one['bytes'] / kept['bytes']:.3f} | "
            f"{statistics.median(one['times_s']):.3f} | {ratio} | {one['loss'] == kept['loss']} |"
        )
    return "\n".join(lines)


def picture(found: dict[str, dict[str, Any]]) -> str:
    """The table as SVG: live bytes to the right, step time upwards, both relative to `keep`."""
    kept = found["keep"]
    base = statistics.median(kept["times_s"])
    points = {
        mode: (one["bytes"] / kept["bytes"], statistics.median(one["times_s"]) / base)
        for mode, one in found.items()
    }
    height = max(y for _, y in points.values()) - 1.0 or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        return 60 + 460 * x, 280 - 220 * (y - 1.0) / height

    marks = ["<line x1='60' y1='290' x2='540' y2='290' stroke='gray'/>"]
    for mode, point in sorted(points.items(), key=lambda one: one[1]):
        x, y = place(*point)
        marks.append(f"<circle cx='{x:.0f}' cy='{y:.0f}' r='4'/>")
        marks.append(f"<text x='{x + 6:.0f}' y='{y - 6:.0f}'>{mode} {point[1]:.2f}</text>")
    for tenth in (0, 25, 50, 75, 100):
        marks.append(f"<text x='{place(tenth / 100, 1)[0]:.0f}' y='308'>{tenth}%</text>")
    title = "<text x='60' y='24'>step time against live activation bytes, relative to keep</text>"
    head = "<svg xmlns='http://www.w3.org/2000/svg' width='620' height='320' font-size='12'>"
    return "\n".join([head, title, *marks, "</svg>\n"])


def main() -> None:
    """Measures and reports."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--case", default="{}", help="fields of GPTCase as JSON")
    parser.add_argument("--picture", type=Path, help="also draw it, as SVG")
    parser.add_argument("--mode", help=argparse.SUPPRESS)
    parser.add_argument("--kept", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.mode:
        print("RESULT " + json.dumps(train(args.mode, args, args.kept)))
        return
    found = measure(args)
    if args.picture:
        args.picture.write_text(picture(found))
    print(report(found, args))


if __name__ == "__main__":
    main()
