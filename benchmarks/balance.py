"""How evenly a model is cut: the time for which each rank's programs run, by `smp.profile`.

    PJRT_DEVICE=CPU torchrun --nproc_per_node 2 benchmarks/balance.py trace.json

Trains the GPT of the other benchmarks with one core per rank, cut by time alone. `python -m mpxla
trace trace.json` says more about the same steps.
"""

import statistics
import sys
from pathlib import Path

import torch
from models import GPTCase
from peers import RANK, WORLD, pin_to_core

import mpxla as smp

MICROBATCHES = 8
STEPS = 6


def main() -> None:
    """Trains some steps, and prints the partition and each rank's time per step."""
    pin_to_core()
    path = Path(sys.argv[1])
    torch.set_num_threads(1)
    case = GPTCase()
    smp.init(
        {
            "pipeline_parallel_degree": WORLD,
            "microbatches": MICROBATCHES,
            "optimize": "speed",
            "memory_weight": 0.0,
        }
    )
    model = smp.DistributedModel(case.model())
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))
    ids, targets = case.batch(MICROBATCHES)

    @smp.step
    def train_step(model: smp.DistributedModel, ids: torch.Tensor, targets: torch.Tensor) -> None:
        model.backward(case.loss(model(ids), targets))

    def train() -> None:
        optimizer.zero_grad()
        train_step(model, ids, targets)
        optimizer.step()

    for _ in range(3):
        train()
    with smp.profile(path):
        for _ in range(STEPS):
            train()
    if RANK == 0:
        print(model.partition_report())
        busy_s = [statistics.median(times) for times in _busy(path)]
        print("compute per step, ms:", *(f"{1e3 * seconds:.0f}" for seconds in busy_s))
        print(f"largest / smallest: {max(busy_s) / min(busy_s):.3f}")
    smp.shutdown()


def _busy(path: Path) -> list[list[float]]:
    """Seconds of programs of every rank, by step."""
    from mpxla.runtime.watching.trace import load_trace
    from mpxla.schedule.action import parse_action

    return [
        [
            sum(
                action["end"] - action["dispatched"]
                for action in step["actions"]
                if parse_action(action["action"]).op.is_compute
            )
            for step in rank["steps"]
        ]
        for rank in load_trace(path)
    ]


if __name__ == "__main__":
    main()
