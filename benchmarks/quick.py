"""One small case beside its peers: is anything slower than it was?

    python benchmarks/quick.py [--repetitions 5] [--history benchmarks/results/history.jsonl]
                               [--picture docs/pictures/history.svg]

Runs the small GPT beside its peers, prints what changed since the last run on this kind of
machine, adds a line to the history, and draws it if it is told where. Times on a shared machine
mean nothing by themselves, so the history keeps ratios that were taken in turns, and counts. No
number makes it fail: people read them.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from launch import HERE
from suite import (
    COMPILED,
    DEFAULT,
    EAGER,
    FREE_ONE,
    FREE_TWO,
    INDUCTOR,
    PEERS,
    Benchmark,
    first_step,
    measure,
    times,
)

ONE, TWO, PEER = DEFAULT[1], DEFAULT[2], PEERS[2]
RUNS = [EAGER, INDUCTOR, ONE, PEER, COMPILED, TWO, *FREE_ONE[:2], *FREE_TWO]
QUICK = Benchmark("tiny", 8, RUNS, 10)
RATIOS = {
    "one rank / eager": (ONE, EAGER),
    "one rank / torch.compile": (ONE, INDUCTOR),
    "two ranks / pipelining": (TWO, PEER),
    "two ranks / pipelining, compiled": (TWO, COMPILED),
    "one rank with all cores / eager": tuple(FREE_ONE[:2]),
    "two free ranks / pipelining": tuple(FREE_TWO),
}
NOTABLE = 0.1
"""Share by which a number must differ to be marked."""


def machine_kind() -> str:
    """Such as `x86_64, 2 cores, Xeon(R) Platinum 8488C`."""
    model = platform.processor()
    cpus = Path("/proc/cpuinfo")
    if cpus.exists():
        names = [s.partition(": ")[2] for s in cpus.read_text().splitlines() if "model name" in s]
        model = names[0].replace("Intel(R) ", "") if names else model
    return f"{platform.machine()}, {os.cpu_count()} cores, {model}"


def commit() -> str:
    """The commit that runs; with a mark if files were changed."""
    command = ["git", "-C", str(HERE), "describe", "--always", "--dirty", "--abbrev=12"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def record(found: dict[str, Any]) -> dict[str, Any]:
    """One line of the history: medians of ratios, and what mpxla's ranks count."""
    numbers: dict[str, float] = {}
    for name, (ours, theirs) in RATIOS.items():
        pairs = list(zip(times(found, ours), times(found, theirs), strict=False))
        if pairs:
            numbers[name] = statistics.median(a / b for a, b in pairs)
    for run in (ONE, TWO):
        ranks = found[str(run)]["ranks"]
        if found[str(run)]["error"] or not ranks:
            continue
        numbers[f"{run}: compilations"] = max(rank["compilations"] for rank in ranks)
        numbers[f"{run}: dispatch, CPU ms per task"] = max(rank["dispatch_ms"] for rank in ranks)
        numbers[f"{run}: update, CPU ms"] = max(rank["update_ms"] for rank in ranks)
        numbers[f"{run}: memory of a step, MB"] = max(r["step_bytes"] for r in ranks) / 1e6
        numbers[f"{run}: first step / a step"] = first_step(found[str(run)]) / statistics.median(
            times(found, run)
        )
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M}",
        "commit": commit(),
        "machine": machine_kind(),
        "numbers": {name: round(value, 4) for name, value in numbers.items()},
        "errors": {name: run["error"] for name, run in found.items() if run["error"]},
    }


def last_of(history: Path, machine: str) -> dict[str, Any] | None:
    """The newest line of the same kind of machine."""
    lines = history.read_text().splitlines() if history.exists() else []
    found = [entry for entry in map(json.loads, lines) if entry["machine"] == machine]
    return found[-1] if found else None


def table(new: dict[str, Any], old: dict[str, Any] | None) -> list[str]:
    """Lines of Markdown: now, before, and a mark at what differs notably."""
    before = old["numbers"] if old else {}
    lines = ["| | now | before | |", "|---|---|---|---|"]
    for name, value in new["numbers"].items():
        earlier = before.get(name)
        change = (value - earlier) / earlier if earlier else 0.0
        mark = f"{100 * change:+.0f} %" if abs(change) >= NOTABLE else ""
        shown = "-" if earlier is None else f"{earlier:.3g}"
        lines.append(f"| {name} | {value:.3g} | {shown} | {mark} |")
    return lines + [f"\n{name} does not run: {text}" for name, text in new["errors"].items()]


def draw(history: Path, picture: Path) -> None:
    """The ratios over time, a panel for each and a line for every kind of machine."""
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "mpxla"  # the same lines give the same file
    entries = [json.loads(line) for line in history.read_text().splitlines()]
    figure, panels = plt.subplots(1, len(RATIOS), figsize=(18, 3), sharey=True)
    for panel, name in zip(panels, RATIOS, strict=True):
        for machine in dict.fromkeys(entry["machine"] for entry in entries):
            points = [
                (datetime.strptime(entry["date"], "%Y-%m-%d %H:%M"), entry["numbers"][name])
                for entry in entries
                if entry["machine"] == machine and name in entry["numbers"]
            ]
            panel.plot(*zip(*points, strict=True), marker="o", label=machine)
        panel.axhline(1.0, color="grey", linewidth=0.5)
        panel.set_title(name)
        panel.tick_params(axis="x", labelrotation=45)
    panels[0].set_ylabel("step time, ratio")
    panels[0].legend(fontsize="x-small")
    figure.savefig(picture, bbox_inches="tight", metadata={"Date": None})


def main() -> None:
    """Measures, compares with the newest line and adds one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--history", type=Path, default=HERE / "results" / "history.jsonl")
    parser.add_argument("--picture", type=Path, help="draw the history into this file")
    args = parser.parse_args()
    started = time.monotonic()
    new = record(measure(QUICK, args.repetitions))
    old = last_of(args.history, new["machine"])
    print("\n".join(table(new, old)))
    print(f"\n{new['machine']}; {time.monotonic() - started:.0f} s")
    args.history.parent.mkdir(parents=True, exist_ok=True)
    with args.history.open("a") as file:
        file.write(json.dumps(new) + "\n")
    if args.picture:
        draw(args.history, args.picture)


if __name__ == "__main__":
    main()
