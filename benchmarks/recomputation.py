"""Step time against memory for activations: everything kept, checkpointed blocks, and budgets.

    python benchmarks/recomputation.py                        # a Markdown table
    python benchmarks/recomputation.py --picture sweep.svg    # also drawn
    python benchmarks/recomputation.py --modes keep,each --results sweep.json   # in parts

The GPT of the other benchmarks on one rank. Every row runs in a process of its own, in turns with
the others. Times are CPU seconds of the process, which other work on the machine changes little;
they are compared with those of `keep` in the same turn.

`keep` holds what is dear to compute again, `each` checkpoints every block, `half way` limits what
is held to the mean of these two, a percentage to that share of `keep`, and `recompute` holds what
the stage takes in.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from launch import run_ranks
from models import GPTCase
from timing import heading, spread

MODES = ("keep", "each", "half way", "75%", "50%", "25%", "recompute")


def train(mode: str, args: argparse.Namespace) -> dict[str, Any]:
    """Times steps of one mode; prints nothing."""
    import torch

    import mpxla as smp
    from mpxla.session import current

    memory: Any = "recompute" if mode == "recompute" else "keep"
    if mode.endswith("%"):
        memory = args.kept * int(mode[:-1]) // 100
    if mode == "half way":
        memory = (args.kept + args.checkpointed) // 2
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
    """What every mode took, over all repetitions, with what a file holds of earlier runs.

    Of the modes, `keep` comes first: it is what the others of a turn are compared with.
    """
    found: dict[str, dict[str, Any]] = {}
    if args.results and args.results.exists():
        found = json.loads(args.results.read_text())
    for repetition in range(args.repetitions):
        base = statistics.median(found["keep"]["times_s"]) if "keep" in found else 0.0
        for mode in args.modes.split(","):
            sizes = [str(found.get(one, {}).get("bytes", 0)) for one in ("keep", "each")]
            command = [sys.executable, __file__, *sys.argv[1:], "--mode", mode]
            command += ["--kept", sizes[0], "--checkpointed", sizes[1]]
            (result,) = run_ranks(mode, command, 1)
            times = result["times_s"]
            base = statistics.median(times) if mode == "keep" else base
            result["ratios"] = [time / base for time in times]
            for many in ("times_s", "ratios"):
                result[many] = [*found.get(mode, {}).get(many, ()), *result[many]]
            found[mode] = result
            if args.results:
                args.results.write_text(json.dumps(found))
            median = statistics.median(times)
            print(f"repetition {repetition + 1}: {mode} {median:.3f} s", file=sys.stderr)
    return found


def report(found: dict[str, dict[str, Any]]) -> str:
    """A Markdown report."""
    kept = found["keep"]
    lines = [
        *heading("Recomputation", "Medians of CPU seconds, and of the ratio the range."),
        "",
        "| activations | live bytes, MB | of `keep` | s/step | of `keep` | same loss |",
        "|---|---|---|---|---|---|",
    ]
    for mode, one in found.items():
        lines.append(
            f"| {mode} | {one['bytes'] / 1e6:.2f} | {one['bytes'] / kept['bytes']:.3f} | "
            f"{statistics.median(one['times_s']):.3f} | {spread(one['ratios'], 2)} | "
            f"{one['loss'] == kept['loss']} |"
        )
    return "\n".join(lines)


def draw(found: dict[str, dict[str, Any]], path: Path, pyplot: Any) -> None:
    """Draws live bytes to the right and step time upwards, both relative to `keep`."""
    kept = found["keep"]
    points = sorted(
        (one["bytes"] / kept["bytes"], mode, one["ratios"]) for mode, one in found.items()
    )
    figure, axis = pyplot.subplots(figsize=(7.5, 4.2))
    budgets = [one for one in points if one[1] != "each"]
    axis.plot(
        [100 * share for share, _, _ in budgets],
        [statistics.median(times) for _, _, times in budgets],
        color="#8fb5dd",
        zorder=1,
    )
    for share, mode, times in points:
        middle = statistics.median(times)
        ends = [[middle - min(times)], [max(times) - middle]]
        colour = "#3a8a4d" if mode == "each" else "#3b75af"
        axis.errorbar(100 * share, middle, yerr=ends, fmt="o", color=colour, capsize=3)
        text = f"{mode} {middle:.2f}"
        axis.annotate(text, (100 * share, middle), (6, 6), textcoords="offset points", fontsize=8)
    axis.set_xlabel("live bytes of activations, % of keep")
    axis.set_ylabel("CPU seconds of a step / those of keep")
    axis.set_xlim(0, 112)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def main() -> None:
    """Measures and reports."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--case", default="{}", help="fields of GPTCase as JSON")
    parser.add_argument("--picture", type=Path, help="also draw it, as SVG")
    parser.add_argument("--modes", default=",".join(MODES), help="some of: %(default)s")
    parser.add_argument("--results", type=Path, metavar="JSON", help="kept, and gone on from")
    parser.add_argument("--mode", help=argparse.SUPPRESS)
    parser.add_argument("--kept", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--checkpointed", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.mode:
        print("RESULT " + json.dumps(train(args.mode, args)))
        return
    from mpxla.cli.drawing import import_pyplot

    pyplot = import_pyplot() if args.picture else None  # if it is missing, say so at once
    found = measure(args)
    if args.picture:
        draw(found, args.picture, pyplot)
    print(report(found))


if __name__ == "__main__":
    main()
