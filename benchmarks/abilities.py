"""What pipelines can train: one small model per ability, two ranks, compared with plain PyTorch.

    python benchmarks/abilities.py                        # a Markdown table
    python benchmarks/abilities.py tied_weights mpxla     # one cell of it

A cell is "yes" if the losses of four SGD steps are those of the plain model; else it says what the
peer answers, or how far its losses are off.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from launch import environment, free_port

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
MICROBATCHES, STEPS, RATE, TOLERANCE = 4, 4, 0.5, 1e-5


class Ability(NamedTuple):
    """A model with its batches; `cut` is the module before which the second stage begins."""

    model: Callable[[], Any]
    batch: Callable[[int], tuple[Any, Any]]
    loss: Callable[[Any, Any], Any]
    cut: str


def abilities() -> dict[str, Ability]:
    """All abilities by name."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    def numbers(step: int) -> tuple[Any, Any]:
        torch.manual_seed(step)
        return torch.randn(8, 16), torch.randn(8, 16)

    def ids(length: int) -> tuple[Any, Any]:
        return torch.randint(0, 32, (8, length)), torch.randint(0, 32, (8, length))

    class Layers(nn.Module):
        """Four layers, named so that all abilities are cut alike."""

        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

        def forward(self, x):
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x

    class Skip(Layers):
        def forward(self, x):
            first = torch.tanh(self.layers[0](x))
            return self.layers[3](self.layers[2](self.layers[1](first))) + first

    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(32, 16)
            self.layers = Layers()
            self.head = nn.Linear(16, 32, bias=False)

        def forward(self, x):
            return self.head(self.layers(self.embed(x)))

    class Tied(Tokens):
        def __init__(self):
            super().__init__()
            self.head.weight = self.embed.weight

    class Integers(nn.Module):
        """The second stage looks token ids up again."""

        def __init__(self):
            super().__init__()
            self.embed, self.layers = nn.Embedding(32, 16), Layers()
            self.again, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)

        def forward(self, x):
            shifted = x * 3 % 32
            return self.head(self.layers(self.embed(shifted)) + self.again(shifted))

    class Twice(nn.Module):
        """The same layers before and after the cut."""

        def __init__(self):
            super().__init__()
            self.shared, self.middle = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x):
            return self.shared(torch.tanh(self.middle(torch.tanh(self.shared(x)))))

    def language(scores: Any, targets: Any) -> Any:
        return F.cross_entropy(scores.flatten(0, 1), targets.flatten())

    def tokens(step: int) -> tuple[Any, Any]:
        torch.manual_seed(step)
        return ids(6)

    def two_lengths(step: int) -> tuple[Any, Any]:
        torch.manual_seed(step)
        return ids(6 if step % 2 == 0 else 10)

    return {
        "chain": Ability(Layers, numbers, F.mse_loss, "layers.2"),
        "skip_connection": Ability(Skip, numbers, F.mse_loss, "layers.2"),
        "tied_weights": Ability(Tied, tokens, language, "layers.layers.2"),
        "integers_between_stages": Ability(Integers, tokens, language, "layers.layers.2"),
        "layer_used_on_both_sides": Ability(Twice, numbers, F.mse_loss, "middle"),
        "second_sequence_length": Ability(Tokens, two_lengths, language, "layers.layers.2"),
    }


def build(ability: Ability) -> Any:
    """The model, the same in every process."""
    import torch

    torch.manual_seed(0)
    return ability.model()


def plain(ability: Ability) -> list[float]:
    """Losses of the plain model."""
    import torch

    model, losses = build(ability), []
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(STEPS):
        optimizer.zero_grad()
        parts = zip(*(t.chunk(MICROBATCHES) for t in ability.batch(step)), strict=True)
        values = [ability.loss(model(x), y) / MICROBATCHES for x, y in parts]
        sum(values).backward()
        optimizer.step()
        losses.append(sum(value.item() for value in values))
    return losses


def mpxla(ability: Ability) -> list[float]:
    """Losses with this library, cut automatically."""
    import torch

    import mpxla as smp

    smp.init({"pipeline_parallel_degree": WORLD, "microbatches": MICROBATCHES})
    model = smp.DistributedModel(build(ability))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=RATE))

    @smp.step
    def train_step(model: Any, x: Any, y: Any) -> Any:
        loss = ability.loss(model(x), y)
        model.backward(loss)
        return loss

    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses.append(train_step(model, *ability.batch(step)).reduce_mean().item())
        optimizer.step()
    smp.shutdown()
    return losses


def torch_pipelining(ability: Ability) -> list[float]:
    """Losses with torch.distributed.pipelining; the last rank has them."""
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import Schedule1F1B, SplitPoint, pipeline

    dist.init_process_group("gloo")
    example = ability.batch(0)[0][: 8 // MICROBATCHES]
    pipe = pipeline(build(ability), (example,), split_spec={ability.cut: SplitPoint.BEGINNING})
    stage = pipe.build_stage(RANK, torch.device("cpu"))
    stage._get_init_p2p_neighbors_ops = lambda: []  # gloo refuses torch 2.9's probe
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=ability.loss)
    optimizer = torch.optim.SGD(stage.submod.parameters(), lr=RATE)
    means = []
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = ability.batch(step)
        losses: list[Any] = []
        schedule.step(x) if RANK == 0 else schedule.step(target=y, losses=losses)
        optimizer.step()
        means.append(float(sum(loss.item() for loss in losses)) / MICROBATCHES)
    return means


PEERS = {"mpxla": mpxla, "torch_pipelining": torch_pipelining}


def cell(name: str, peer: str) -> str:
    """Runs one ability with one peer, in two processes."""
    command = [sys.executable, str(Path(__file__).resolve()), name, peer, "--rank"]
    port = free_port()
    processes = [
        subprocess.Popen(
            command,
            env=environment(rank, 2, port),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = []
    for process in processes:
        try:
            outputs.append(process.communicate(timeout=90))
        except subprocess.TimeoutExpired:
            process.kill()
            outputs.append(process.communicate())
    found = [line for out, _ in outputs for line in out.splitlines() if line.startswith("LOSSES ")]
    if len(found) < 2:
        errors = [line for _, err in outputs for line in err.splitlines() if "Error: " in line]
        # The other rank's lost connection is no cause.
        errors.sort(key=lambda line: "gloo/transport" in line)
        return f"no: `{errors[0].strip()[:160]}`" if errors else "no: it does not end"
    losses = json.loads(found[-1].removeprefix("LOSSES "))
    expected = plain(abilities()[name])
    off = max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
    return "yes" if off < TOLERANCE else f"runs, but losses are off by {off:.1e}"


def main() -> None:
    """One rank, one cell, or the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ability", nargs="?")
    parser.add_argument("peer", nargs="?", choices=PEERS)
    parser.add_argument("--rank", action="store_true", help="this process is one rank")
    args = parser.parse_args()
    if args.rank:
        losses = PEERS[args.peer](abilities()[args.ability])
        print("LOSSES " + json.dumps(losses), flush=True)
        sys.stdout.flush()
        os._exit(0)  # peers leave threads behind that would delay the end
    if args.ability and args.peer:
        print(cell(args.ability, args.peer))
        return
    print(f"| ability | {' | '.join(PEERS)} |\n|---|{'---|' * len(PEERS)}")
    for name in abilities():
        print(f"| {name} | {' | '.join(cell(name, peer) for peer in PEERS)} |", flush=True)


if __name__ == "__main__":
    main()
