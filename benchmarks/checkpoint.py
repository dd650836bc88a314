"""Saving and loading: plain torch, torch.distributed.checkpoint used directly, and mpxla.

    python benchmarks/checkpoint.py                  # three repetitions, prints a Markdown table
    python benchmarks/checkpoint.py --folder /fast --json out.json

Two ranks hold a GPT with AdamW state, one stage each. Every way saves and loads the same tensors,
from and to the device, with files flushed to the disk. Repetitions run all ways one after the
other; ratios are taken within a repetition. Memory is the growth of the resident peak. A second
part compares a model larger than one rank's share, built with and without delayed initialization.
"""

import argparse
import ctypes
import gc
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from launch import run_ranks
from models import GPTCase, language_loss
from timing import heading, in_turns, spread

RANKS = 2
_CASE = '{"width": 1024, "num_blocks": 2, "num_heads": 8, "length": 16, "microbatch_size": 1}'


def peak_mib(reset: bool = False) -> float:
    """Peak of this process's resident memory in MiB, mapped files included; or starts anew."""
    if reset:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what an earlier action freed would serve the next one
        Path("/proc/self/clear_refs").write_text("5")
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) / 1024


def measured(action: Callable[[], Any]) -> dict[str, float]:
    """Seconds that an action took on all ranks, and how much memory it needed on this one."""
    import mpxla as smp

    smp.barrier()
    before = peak_mib(reset=True)
    started = time.perf_counter()
    action()
    smp.barrier()
    return {"s": time.perf_counter() - started, "mib": peak_mib() - before}


def flushed_save(value: Any, file: Path) -> None:
    """`torch.save`, on the disk when it returns."""
    torch.save(value, file)
    descriptor = os.open(file, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


class Ways:
    """The three ways to save and load one run's model and optimizer."""

    def __init__(self, model: Any, optimizer: Any, folder: Path):
        import mpxla as smp

        self.model, self.optimizer, self.folder = model, optimizer, folder
        self.rank = smp.rank()

    def _local(self) -> dict[str, dict[str, torch.Tensor]]:
        """This rank's tensors as a nested state dict with names, on the host."""
        state: dict[str, dict[str, torch.Tensor]] = {
            "model": {n: p.detach().cpu() for n, p in self.model.local_named_parameters()},
            "optimizer": {},
        }
        for piece in self.optimizer.state_pieces():
            state["optimizer"][f"{piece.key}/{piece.name}"] = piece.value.detach().cpu()
        return state

    def _use(self, state: dict[str, dict[str, torch.Tensor]]) -> None:
        """Puts loaded values onto the device."""
        import torch_xla

        with torch.no_grad():
            for name, parameter in self.model.local_named_parameters():
                parameter.copy_(state["model"][name])
            for piece in self.optimizer.state_pieces():
                piece.value.copy_(state["optimizer"][f"{piece.key}/{piece.name}"])
        torch_xla.sync()

    def save_torch(self) -> None:
        """A file for every rank."""
        flushed_save(self._local(), self.folder / f"plain_{self.rank}.pt")

    def load_torch(self) -> None:
        """The inverse of `save_torch`."""
        self._use(torch.load(self.folder / f"plain_{self.rank}.pt", weights_only=True))

    def save_dcp(self) -> None:
        """DCP's folder."""
        import torch.distributed.checkpoint as dcp

        writer = dcp.FileSystemWriter(self.folder / "dcp", sync_files=True)
        dcp.save(self._local(), storage_writer=writer)

    def load_dcp(self) -> None:
        """The inverse of `save_dcp`."""
        import torch.distributed.checkpoint as dcp

        state = self._local()  # DCP loads into tensors that are there
        dcp.load(state, storage_reader=dcp.FileSystemReader(self.folder / "dcp"))
        self._use(state)

    def save_mpxla(self, asynchronous: bool = False) -> Any:
        """A partial checkpoint."""
        import mpxla as smp

        return smp.save_checkpoint(
            self.folder,
            "bench",
            model=self.model,
            optimizer=self.optimizer,
            asynchronous=asynchronous,
        )

    def load_mpxla(self) -> None:
        """The inverse of `save_mpxla`; every file is checked."""
        import mpxla as smp

        smp.resume_from_checkpoint(self.folder, "bench")


def train_and_measure(folder: Path, case: GPTCase) -> dict[str, Any]:
    """One repetition on one rank."""
    import torch_xla

    import mpxla as smp

    smp.init({"pipeline_parallel_degree": RANKS, "microbatches": 2})
    model = smp.DistributedModel(case.model())
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-4))

    @smp.step
    def step(model: Any, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = language_loss(model(ids), targets)
        model.backward(loss)
        return loss

    def train(count: int) -> float:
        """Median seconds per step."""
        durations = []
        for _ in range(count):
            started = time.perf_counter()
            optimizer.zero_grad()
            loss = step(model, *case.batch(2)).reduce_mean()
            optimizer.step()
            loss.item()
            torch_xla.sync()
            durations.append(time.perf_counter() - started)
        return statistics.median(durations)

    train(3)
    ways = Ways(model, optimizer, folder)
    tensors = [*model.local_parameters(), *(p.value for p in optimizer.state_pieces())]
    result: dict[str, Any] = {"bytes": sum(t.nbytes for t in tensors)}
    for way in ("torch", "dcp", "mpxla"):
        result[f"save {way}"] = measured(getattr(ways, f"save_{way}"))
        result[f"load {way}"] = measured(getattr(ways, f"load_{way}"))
    result["copy"] = measured(ways._local)
    result["step"] = train(3)
    smp.barrier()
    started = time.perf_counter()
    pending = ways.save_mpxla(asynchronous=True)
    result["stall"] = time.perf_counter() - started
    durations = []
    while any(smp.allgather(not pending.is_done, smp.WORLD)):
        durations.append(train(1))
    pending.wait()
    result["until complete"] = time.perf_counter() - started
    result["step meanwhile"] = statistics.median(durations) if durations else None
    smp.shutdown()
    return result


def build_and_measure(case: GPTCase, delayed: bool) -> dict[str, Any]:
    """Peak memory and seconds from nothing to the first step, on one rank."""
    import mpxla as smp

    smp.init({"pipeline_parallel_degree": RANKS})
    before = peak_mib(reset=True)
    started = time.perf_counter()
    with smp.delay_param_initialization(enabled=delayed):
        module = case.model()
    model = smp.DistributedModel(module)
    built = {"built mib": peak_mib() - before, "built s": time.perf_counter() - started}

    @smp.step
    def evaluate(model: Any, ids: torch.Tensor) -> torch.Tensor:
        return model(ids)[:, -1, :2]

    with torch.no_grad():
        evaluate(model, case.batch(1)[0])
    share = sum(p.nbytes for p in model.local_parameters())
    whole = sum(p.nbytes for p in model.parameters())
    return built | {"placed mib": peak_mib() - before, "share": share, "whole": whole}


def run_mode(mode: str, folder: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs a mode of this file on every rank; returns one result per rank."""
    command = [sys.executable, __file__, "--mode", mode, "--folder", str(folder)]
    command += ["--case", args.case]
    return run_ranks(mode, command, RANKS)


def report(runs: list[list[dict[str, Any]]], built: dict[str, list[dict[str, Any]]]) -> str:
    """A Markdown report."""
    total = sum(r["bytes"] for r in runs[0])

    def seconds(key: str) -> list[float]:
        return [
            max(r[key]["s"] if isinstance(r[key], dict) else r[key] for r in run) for run in runs
        ]

    def ratio(key: str, other: str) -> str:
        return spread([a / b for a, b in zip(seconds(other), seconds(key), strict=True)], 2)

    lines = [
        *heading(
            "Checkpoints",
            f"{RANKS} ranks, {total / 1e6:.0f} MB of model and AdamW state. {in_turns(len(runs))}",
        ),
        "",
        "| | MB/s | speed relative to torch | relative to DCP | memory of a rank, MiB |",
        "|---|---|---|---|---|",
    ]
    for action in ("save", "load"):
        for way in ("torch", "dcp", "mpxla"):
            key = f"{action} {way}"
            speed = spread([total / 1e6 / s for s in seconds(key)], 0)
            memory = spread([max(r[key]["mib"] for r in run) for run in runs], 0)
            lines.append(
                f"| {action}, {way} | {speed} | {ratio(key, f'{action} torch')} | "
                f"{ratio(key, f'{action} dcp')} | {memory} |"
            )
    lines += ["", "| in the background | seconds |", "|---|---|"]
    names = {
        "copy": "copying the values to the host, alone",
        "stall": "training stands still",
        "until complete": "until the checkpoint is complete",
        "step": "one training step, otherwise",
    }
    lines += [f"| {text} | {spread(seconds(key), 3)} |" for key, text in names.items()]
    meanwhile = [max(r["step meanwhile"] or 0.0 for r in run) for run in runs]
    lines.append(f"| one training step, meanwhile | {spread(meanwhile, 3)} |")
    lines += [
        "",
        "| building the model | peak when built, MiB | when placed, MiB | its share, MiB |",
    ]
    lines.append("|---|---|---|---|")
    for name, results in built.items():
        for rank, r in enumerate(results):
            lines.append(
                f"| {name}, rank {rank} | {r['built mib']:.0f} | {r['placed mib']:.0f} | "
                f"{r['share'] / 2**20:.0f} of {r['whole'] / 2**20:.0f} |"
            )
    return "\n".join(lines)


def main() -> None:
    """Measures and reports; with --mode, does one rank's part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--case", default=_CASE, help="fields of GPTCase as JSON")
    parser.add_argument("--folder", type=Path, help="where to save; a temporary one by default")
    parser.add_argument("--json", type=Path, help="also write all results to this file")
    parser.add_argument("--mode", choices=["train", "plain", "delayed"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    case = GPTCase(**json.loads(args.case))
    if args.mode == "train":
        print("RESULT", json.dumps(train_and_measure(args.folder, case)))
        return
    if args.mode is not None:
        print("RESULT", json.dumps(build_and_measure(case, args.mode == "delayed")))
        return
    runs = []
    for repetition in range(args.repetitions):
        folder = Path(tempfile.mkdtemp(dir=args.folder))
        try:
            runs.append(run_mode("train", folder, args))
        finally:
            shutil.rmtree(folder)
        print(f"repetition {repetition + 1}: {runs[-1]}", file=sys.stderr)
    built = {f"{mode} model": run_mode(mode, Path(), args) for mode in ("plain", "delayed")}
    if args.json:
        args.json.write_text(json.dumps({"runs": runs, "built": built}, indent=1))
    print(report(runs, built))


if __name__ == "__main__":
    main()
