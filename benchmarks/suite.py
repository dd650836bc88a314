"""All benchmarks of training speed, as ratios to peers that run in turns with mpxla.

    python benchmarks/suite.py [--cases gpt tiny] [--repetitions 5] [--json out.json]

Every case starts all its peers, lets them compile, and then lets one after the other run a few
steps, again and again: a drift of the machine's speed meets all of them. A ratio is taken within
such a repetition; its median and range are reported. One core per rank; with more ranks than cores
the ranks of all peers share the cores alike. Runs of one rank change their core with every
repetition, because cores of a shared machine differ. Runs named "free" are bound to no core, as
`python` and `torchrun` start them: one rank has all cores, several share them. Peers with as many
ranks do the same work per step: two replicas of two stages take twice the microbatches of four
replicas.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from launch import HERE, environment, free_port
from timing import heading, in_turns, spread


class Run(NamedTuple):
    """One peer on some ranks."""

    peer: str
    ranks: int
    share: int = 1
    """Microbatches of a replica, as a multiple of the benchmark's."""
    is_free: bool = False
    """Whether it may use all cores of the machine."""

    def __str__(self) -> str:
        return f"{self.peer} x{self.ranks}{', free' * self.is_free}"


PRODUCTS, EAGER, INDUCTOR = Run("products", 1), Run("eager", 1), Run("inductor", 1)
LAZY = Run("lazy_xla", 1)
DEFAULT = {ranks: Run("mpxla_default", ranks) for ranks in (1, 2, 4)}
TORCH_XLA = {ranks: Run("mpxla_default_torch_xla", ranks) for ranks in (1, 2)}
BY_HAND = Run("mpxla", 2)
PEERS = {ranks: Run("torch_pipelining", ranks) for ranks in (2, 4)}
COMPILED = Run("torch_pipelining_compiled", 2)
ONE = [PRODUCTS, EAGER, INDUCTOR, DEFAULT[1], TORCH_XLA[1]]
TWO = [PEERS[2], COMPILED, BY_HAND, DEFAULT[2], TORCH_XLA[2]]
FREE_ONE = [Run(peer, 1, is_free=True) for peer in ("mpxla_default", "eager", "inductor")]
FREE_TWO = [Run(peer, 2, is_free=True) for peer in ("mpxla_default", "torch_pipelining")]
FREE = FREE_ONE + FREE_TWO
REPLICAS = [Run("ddp", 2), Run("mpxla_replicas", 2), Run("ddp", 4), Run("mpxla_grid", 4, 2)]


class Benchmark(NamedTuple):
    """A case with a number of microbatches, its peers, and how many steps make a repetition."""

    case: str
    microbatches: int
    runs: Sequence[Run]
    steps: int

    def __str__(self) -> str:
        return f"{self.case}, {self.microbatches} microbatches"


BENCHMARKS = [
    Benchmark("gpt", 8, [LAZY, *ONE, *TWO, *FREE], 1),
    Benchmark("gpt", 2, TWO, 1),
    Benchmark("half", 32, TWO, 1),
    Benchmark("half", 4, [PEERS[4], DEFAULT[4], *REPLICAS], 1),
    Benchmark("wide", 8, ONE + TWO, 1),
    Benchmark("tiny", 8, [LAZY, *ONE, *TWO, *FREE], 10),
    Benchmark("bert", 8, ONE + TWO + FREE_ONE, 1),
    Benchmark("vit", 8, ONE + TWO + FREE_ONE, 1),
    Benchmark("unet", 8, ONE + TWO + FREE, 2),
]
RATIOS = [
    (PRODUCTS, DEFAULT[1]),
    (PRODUCTS, EAGER),
    (DEFAULT[1], EAGER),
    (DEFAULT[1], INDUCTOR),
    (DEFAULT[1], LAZY),
    (TORCH_XLA[1], EAGER),
    (DEFAULT[2], PEERS[2]),
    (DEFAULT[2], COMPILED),
    (DEFAULT[2], BY_HAND),
    (TORCH_XLA[2], PEERS[2]),
    (TORCH_XLA[2], COMPILED),
    (DEFAULT[4], PEERS[4]),
    *((FREE_ONE[0], peer) for peer in FREE_ONE[1:]),
    tuple(FREE_TWO),
    (FREE_TWO[0], DEFAULT[2]),
    *zip(REPLICAS[1::2], REPLICAS[::2], strict=True),
]
FIRST_STEPS = [(DEFAULT[2], DEFAULT[1]), (DEFAULT[2], LAZY), (DEFAULT[1], LAZY)]


class Peer:
    """The processes of one run, alive between repetitions."""

    def __init__(self, run: Run, benchmark: Benchmark):
        self.run = run
        self.times: list[float] = []
        self.error: str | None = None
        command = [sys.executable, str(HERE / "peers.py"), run.peer, "--name", benchmark.case]
        command += ["--microbatches", str(run.share * benchmark.microbatches), "--warm-up"]
        # Plain torch_xla compiles in the first two steps, and once more with the optimizer's state.
        command.append("3" if run.peer == "lazy_xla" else "2")
        port = free_port()
        self._processes = [
            subprocess.Popen(
                command,
                env={
                    **environment(rank, run.ranks, port, run.is_free),
                    "BENCHMARK_SERVE": "1",
                    "BENCHMARK_FREE": str(int(run.is_free)),
                },
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(run.ranks)
        ]

    def await_loaded(self) -> None:
        """Waits until all ranks have loaded their libraries."""
        self._await("LOADED")

    def begin(self) -> None:
        """Lets all ranks compile and warm up, and waits until they have."""
        self._tell("begin")
        self._await("READY")

    def repeat(self, steps: int, repetition: int) -> None:
        """Runs some steps; the median of the slowest rank is one time."""
        if self.error is not None:
            return
        if self.run.ranks == 1 and not self.run.is_free:
            cores = sorted(os.sched_getaffinity(0))
            for thread in os.listdir(f"/proc/{self._processes[0].pid}/task"):
                os.sched_setaffinity(int(thread), {cores[repetition % len(cores)]})
        self._tell(str(steps))
        medians = []
        for process in self._processes:
            line = self._next(process, "TIMES ")
            if line is None:
                self._fail(process)
                return
            medians.append(statistics.median(json.loads(line)))
        self.times.append(max(medians))

    def finish(self) -> list[dict[str, Any]]:
        """Ends the processes; what each rank reports."""
        results = []
        for process in self._processes:
            assert process.stdin is not None
            if process.poll() is None:
                process.stdin.close()
        for process in self._processes:
            line = None if self.error else self._next(process, "RESULT ")
            if line is not None:
                results.append(json.loads(line))
            process.kill()
            process.wait()
        return results

    def _tell(self, line: str) -> None:
        for process in self._processes if self.error is None else ():
            assert process.stdin is not None
            process.stdin.write(f"{line}\n")
            process.stdin.flush()

    def _await(self, word: str) -> None:
        for process in self._processes:
            if self.error is None and self._next(process, word) is None:
                self._fail(process)

    def _next(self, process: subprocess.Popen[str], start: str) -> str | None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(start):
                return line.removeprefix(start)
        return None

    def _fail(self, failed: subprocess.Popen[str]) -> None:
        """Keeps the last line of the failed rank; the others are ended."""
        for process in self._processes:
            if process is not failed:
                process.kill()
        assert failed.stderr is not None
        lines = [line.strip() for line in failed.stderr.read().splitlines() if line.strip()]
        errors = [line for line in lines if "Error" in line]
        self.error = (errors or lines or ["ended without a word"])[-1][:300]


def measure(benchmark: Benchmark, repetitions: int) -> dict[str, Any]:
    """Runs one benchmark, with nothing compiled before; times, reports and errors by run."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        return _measure(benchmark, repetitions)


def _measure(benchmark: Benchmark, repetitions: int) -> dict[str, Any]:
    peers = [Peer(run, benchmark) for run in benchmark.runs]
    for peer in peers:
        peer.await_loaded()
    for peer in peers:  # one after the other, so that compiling is timed alone
        peer.begin()
    for repetition in range(repetitions):
        for peer in peers:
            peer.repeat(benchmark.steps, repetition)
    found = {
        str(peer.run): {"times_s": peer.times, "ranks": peer.finish(), "error": peer.error}
        for peer in peers
    }
    for name, result in found.items():
        text = result["error"] or f"{statistics.median(result['times_s']):.3f} s/step"
        print(f"{benchmark}: {name}: {text}", file=sys.stderr, flush=True)
    return found


def rows_of(benchmark: Benchmark, found: dict[str, Any]) -> list[str]:
    """Lines of the report's tables."""
    lines = [
        "",
        f"## {benchmark}",
        "",
        "| run | s/step | first step, s | loss |",
        "|---|---|---|---|",
    ]
    for name, result in found.items():
        if result["error"]:
            lines.append(f"| {name} | does not run | | `{result['error']}` |")
            continue
        first = first_step(result)
        loss = max(rank["loss"] for rank in result["ranks"])
        lines.append(f"| {name} | {spread(result['times_s'])} | {first:.1f} | {loss:.6f} |")
    ratios = [
        (f"{a} / {b}", [x / y for x, y in zip(times(found, a), times(found, b), strict=True)])
        for a, b in RATIOS
        if times(found, a) and times(found, b)
    ]
    m, one, two = (benchmark.microbatches, *(times(found, DEFAULT[ranks]) for ranks in (1, 2)))
    if one and two:
        bubble = (m + 1) / (2 * m)
        values = [a * bubble / b for a, b in zip(one, two, strict=True)]
        ratios.append((f"ideal of 2 ranks (1F1B's bubble only) / {DEFAULT[2]}", values))
    lines += ["", "| ratio of step times | median (min - max) |", "|---|---|"]
    lines += [f"| {name} | {spread(values)} |" for name, values in ratios]
    lines += [
        f"| first steps: {a} / {b} | {first_step(found[str(a)]) / first_step(found[str(b)]):.3f} |"
        for a, b in FIRST_STEPS
        if times(found, a) and times(found, b)
    ]
    lines += details(found)
    return lines


def details(found: dict[str, Any]) -> list[str]:
    """What mpxla's ranks say about themselves."""
    lines = [
        "",
        "| rank | parameters | dispatch, CPU ms/task | receiving, CPU ms/task | update, CPU ms "
        "| share waiting | memory grown, MB |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, result in found.items():
        for rank in result["ranks"]:
            if "dispatch_ms" in rank:
                lines.append(
                    f"| {name}, rank {rank['rank']} | {rank['num_parameters']} | "
                    f"{rank['dispatch_ms']:.2f} | {rank['receive_ms']:.2f} | "
                    f"{rank['update_ms']:.1f} | "
                    f"{rank['wait_share']:.2f} | {rank['grown_bytes'] / 1e6:.0f} |"
                )
    return lines


def first_step(result: dict[str, Any]) -> float:
    """Seconds of a run's first step, with compilation, on its slowest rank; taken once."""
    return max(rank["first_s"] for rank in result["ranks"])


def times(found: dict[str, Any], run: Run) -> list[float]:
    """Times of a run; none if it failed or did not take part."""
    result = found.get(str(run))
    return result["times_s"] if result and not result["error"] else []


def main() -> None:
    """Measures and reports."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = sorted({benchmark.case for benchmark in BENCHMARKS})
    parser.add_argument("--cases", nargs="+", choices=names, default=names)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write all results to this file")
    args = parser.parse_args()
    print("\n".join(heading("Training speed", in_turns(args.repetitions))), flush=True)
    results = {}
    for benchmark in BENCHMARKS:
        if benchmark.case not in args.cases:
            continue
        found = measure(benchmark, args.repetitions)
        results[str(benchmark)] = found
        print("\n".join(rows_of(benchmark, found)), flush=True)
        if args.json:  # after each, for one that is ended early
            args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
