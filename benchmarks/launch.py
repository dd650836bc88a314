"""Starting the ranks of a benchmark, on this machine."""

import json
import os
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def free_port() -> int:
    """A port for the rendezvous of one run."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def environment(rank: int, ranks: int, port: int, is_free: bool = False) -> dict[str, str]:
    """What a launcher tells one rank; one thread each, but a single free one has the machine's."""
    kept = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    threads = {} if is_free and ranks == 1 else {"OMP_NUM_THREADS": "1"}
    return {
        **kept,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        **threads,
    }


def run_ranks(name: str, command: Sequence[str], ranks: int) -> list[dict[str, Any]]:
    """Runs a command on every rank; the last line with RESULT of each holds what it found."""
    port = free_port()
    processes = [
        subprocess.Popen(
            command,
            env=environment(rank, ranks, port),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    results = []
    for rank, process in enumerate(processes):
        out, err = process.communicate(timeout=900)
        lines = [line for line in out.splitlines() if line.startswith("RESULT ")]
        if not lines:
            raise SystemExit(f"{name} rank {rank} failed:\n{out[-2000:]}\n{err[-4000:]}")
        results.append(json.loads(lines[-1].removeprefix("RESULT ")))
    return results
