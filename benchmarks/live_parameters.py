"""What is whole of divided parameters while a step runs: a picture in text, piece by piece.

    PJRT_DEVICE=CPU torchrun --nproc_per_node 2 benchmarks/live_parameters.py [tiny]

Trains the GPT of the other benchmarks (or a smaller one) with `sharded_data_parallel_degree: 2` and
one microbatch. A row is a moment after a piece of a stage's program was started: the bytes of
gathered parameters that are held then, of the bytes of all. (Programs end later than they start, so
a piece's own gathers wait for those before; see `mpxla/stage/pieces.py`.)
"""

import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from cases import CASES
from peers import RANK, WORLD, pin_to_core

import mpxla as smp
from mpxla.session import current
from mpxla.stage.pieces import TURN, PieceList
from mpxla.stage.piecewise import PiecewiseExecutable

THRESHOLD = 1000
WIDTH = 60


def live_bytes(plan: PieceList) -> list[int]:
    """Bytes of gathered parameters that are held after each piece of a program was started."""
    last = {number: i for i, done in enumerate(plan.last_uses()) for number in done}
    found = [0] * len(plan.pieces)
    for start, piece in enumerate(plan.pieces):
        if not any(TURN in node.meta for node in piece.module.graph.nodes):
            continue
        gathers = [TURN in node.all_input_nodes[0].meta for node in _results(piece)]
        for number, spec, is_gathered in zip(
            piece.outputs, piece.output_specs, gathers, strict=True
        ):
            for i in range(start, last[number] + 1 if is_gathered else start):
                found[i] += spec.num_bytes
    return found


def _results(piece: Any) -> Sequence[torch.fx.Node]:
    (output,) = [node for node in piece.module.graph.nodes if node.op == "output"]
    return output.args[0]


def main() -> None:
    """Trains some steps, and draws the last one."""
    pin_to_core()
    torch.set_num_threads(1)
    case = CASES[sys.argv[1] if len(sys.argv) > 1 else "gpt"]()
    smp.init(
        {
            "ddp": True,
            "sharded_data_parallel_degree": WORLD,
            "sdp_param_persistence_threshold": THRESHOLD,
        }
    )
    model = smp.DistributedModel(case.model())
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))
    ids, targets = (t.chunk(WORLD)[RANK] for t in case.batch(WORLD))

    @smp.step
    def train_step(model: smp.DistributedModel, ids: torch.Tensor, targets: torch.Tensor) -> None:
        model.backward(case.loss(model(ids), targets))

    def train() -> None:
        optimizer.zero_grad()
        train_step(model, ids, targets)
        optimizer.step()
        current().backend.wait()

    for _ in range(2):
        train()
    moments: list[tuple[float, str, int]] = []
    (plan,) = current().models.engine.calls.plans
    for stage in plan.runner.plan.programs.values():
        for program in stage.programs:
            if isinstance(program, PiecewiseExecutable):
                _watch(program, moments)
    started = time.perf_counter()
    train()
    if RANK == 0:
        total = sum(p.nbytes for p in model.parameters() if p.numel() >= THRESHOLD)
        blocks = [sum(p.nbytes for p in block.parameters()) for block in model.module.blocks]
        print(f"all: {total / 2**20:.2f} MiB, a block: {max(blocks) / 2**20:.2f} MiB\n")
        for when, name, size in moments:
            bar = "#" * round(WIDTH * size / total)
            ms = 1e3 * (when - started)
            print(f"{ms:7.1f} ms  {name:<17} {size / 2**20:6.2f} MiB  |{bar:<{WIDTH}}|")
        most = max(size for _, _, size in moments)
        print(f"\nat most {most / total:.2f} of all, {most / max(blocks):.2f} blocks")
    smp.shutdown()


def _watch(program: PiecewiseExecutable, moments: list[tuple[float, str, int]]) -> None:
    sizes = live_bytes(program.plan)
    program.on_piece = lambda i: moments.append((time.perf_counter(), program.name, sizes[i]))


if __name__ == "__main__":
    main()
