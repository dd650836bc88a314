"""Timing of a peer's steps, all at once or whenever the suite asks for some, and its report.

With `BENCHMARK_SERVE` set, a peer says when it is ready and runs as many steps as each line on its
input asks for. So peers that are all alive take turns, and a ratio compares neighbouring moments.
"""

import json
import os
import platform
import resource
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any


def timed(step: Callable[[], float], warm_up: int, steps: int) -> dict[str, Any]:
    """Runs and times steps; every rank of a peer takes part."""
    started = time.perf_counter()
    step()
    first_s = time.perf_counter() - started
    for _ in range(warm_up - 1):
        step()
    before = resident_bytes()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak from now on, without compilation
    times, loss = [], float("nan")
    for count in _requests(steps):
        burst: list[float] = []
        for _ in range(count):
            _barrier()
            started = time.perf_counter()
            loss = step()
            burst.append(time.perf_counter() - started)
        times += burst
        if "BENCHMARK_SERVE" in os.environ:
            print("TIMES " + json.dumps(burst), flush=True)
    return {
        "first_s": first_s,
        "step_s": statistics.median(times),
        "times_s": times,
        "loss": loss,
        "grown_bytes": resident_bytes() - before,
        "peak_step_bytes": _peak_bytes(),
    }


def spread(values: list[float], digits: int = 3) -> str:
    """`median (min - max)`."""
    low, mid, high = min(values), statistics.median(values), max(values)
    return f"{mid:.{digits}f} ({low:.{digits}f} - {high:.{digits}f})"


def heading(title: str, note: str, launcher: str = "python") -> list[str]:
    """The first lines of a report: title, command, machine, and what its numbers are."""
    command = f"{launcher} benchmarks/{Path(sys.argv[0]).name} {shlex.join(sys.argv[1:])}".strip()
    versions = ", ".join(f"{package} {version(package)}" for package in ("torch", "jax"))
    return [
        f"# {title}, {datetime.now(UTC):%Y-%m-%d}",
        "",
        f"`{command}`",
        "",
        f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores; Python "
        f"{platform.python_version()}, {versions}. {note}",
    ]


def in_turns(repetitions: int) -> str:
    """How numbers are given."""
    return f"Median (min - max) over {repetitions} repetitions in turns."


MEMORY_NOTE = (
    "Memory of training is the peak of the resident memory in the timed steps, less what the "
    "process had before the model was built; compiled programs and the compiler's own memory are "
    "in it."
)


def _requests(steps: int) -> Iterator[int]:
    if "BENCHMARK_SERVE" not in os.environ:
        yield steps
        return
    print("READY", flush=True)
    for line in sys.stdin:
        yield int(line)


def _barrier() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()


def _peak_bytes() -> int:
    with open("/proc/self/status") as file:
        (line,) = [line for line in file if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


def resident_bytes() -> int:
    """Memory of this process now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
