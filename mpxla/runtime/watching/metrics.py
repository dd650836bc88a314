"""What steps cost on this rank, as numbers: `smp.metrics()`, a log line, TensorBoard, files.

The engine tells a `Meter` of every call and every compilation; reading it costs some microseconds
and waits for nothing. This module must not know how steps are run.
"""

import contextlib
import itertools
import json
import os
import socket
import statistics
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpxla.device.backend import Backend
from mpxla.errors import MpxlaError
from mpxla.log import get_logger
from mpxla.session import current

__all__ = ["Meter", "MetricsFile", "metrics", "write_metrics"]

_NUM_CALLS = 20
_PERIOD_S = 1.0
"""Of writing files."""


@dataclass
class _Calls:
    """The last calls of one step function."""

    is_training: bool
    samples: int | None
    spans: deque[tuple[float, float, float]] = field(
        default_factory=lambda: deque(maxlen=_NUM_CALLS + 1)
    )
    """Begin, end and seconds of waiting of each call, in order."""

    def periods(self) -> list[float]:
        """Seconds from the begin of each call to that of the next one."""
        begins = [begin for begin, _, _ in self.spans]
        if len(begins) == 1:
            return [self.spans[0][1] - begins[0]]
        return [after - before for before, after in itertools.pairwise(begins)]

    def waiting(self) -> float:
        """Share of the time of these calls that the host waited for messages."""
        periods = self.periods()
        waited = [seconds for _, _, seconds in self.spans][: len(periods)]
        return min(1.0, sum(waited) / max(sum(periods), 1e-9))


class Meter:
    """Counts what happens on one rank.

    Each replica of the model has a batch of its own.

    Attributes:
        num_steps: calls of step functions that train.
    """

    def __init__(self, backend: Backend, transport: Any, num_replicas: int):
        self._backend = backend
        self._transport = transport
        self._num_replicas = num_replicas
        self._functions: dict[str, _Calls] = {}
        self._compile_s = 0.0
        self._shown = ""
        self.num_steps = 0

    def note_compilation(self, seconds: float) -> None:
        """A step function was captured and compiled."""
        self._compile_s += seconds

    def note_call(
        self,
        function: str,
        is_training: bool,
        span: tuple[float, float],
        waited_s: float,
        samples: int | None,
    ) -> None:
        """A step function has run, from begin to end in seconds of one clock.

        Samples are those of this replica's batch; None where they are not known.
        """
        calls = self._functions.setdefault(function, _Calls(is_training, samples))
        calls.samples = samples
        calls.spans.append((*span, waited_s))
        self.num_steps += is_training
        shown = self._functions.get(self._shown)
        if shown is None or is_training or not shown.is_training:
            self._shown = function

    def read(self) -> dict[str, Any]:
        """All numbers; see `metrics`."""
        calls = self._functions.get(self._shown)
        step_s = samples_per_s = waiting = None
        if calls is not None:
            step_s, waiting = statistics.median(calls.periods()), calls.waiting()
            if calls.samples is not None:
                samples_per_s = calls.samples * self._num_replicas / step_s
        return {
            "function": self._shown,
            "steps": self.num_steps,
            "step_s": step_s,
            "samples_per_s": samples_per_s,
            "waiting": waiting,
            "compilations": self._backend.num_compilations,
            "compile_s": self._compile_s,
            "bytes_sent": self._transport.bytes_sent,
            "memory_bytes": self._memory(),
        }

    def line(self) -> str:
        """The numbers as one line for the log."""
        found = self.read()
        parts = [f"step {found['steps']} of {found['function']}: {found['step_s']:.3g} s"]
        if found["samples_per_s"] is not None:
            parts.append(f"{found['samples_per_s']:.4g} samples/s")
        parts.append(f"waiting {100 * found['waiting']:.0f} %")
        parts.append(f"memory {found['memory_bytes'] / 2**20:.0f} MiB")
        parts.append(f"sent {found['bytes_sent'] / 2**20:.1f} MiB")
        parts.append(f"{found['compilations']} compilations in {found['compile_s']:.1f} s")
        return ", ".join(parts)

    def _memory(self) -> int:
        counters = self._backend.memory_counters()
        if counters is not None:
            return counters["bytes_used"]
        # The device is the processor: what this process has in memory.
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


class MetricsFile:
    """Writes one rank's file for `python -m mpxla top` until it is closed (the key `metrics_dir`).

    A thread replaces the file once per second by what `read` gives, plain data; so a reader always
    finds a whole one, and one that is not replaced any more shows that the rank is gone. On several
    hosts, the folder is shared.
    """

    def __init__(self, folder: Path, rank: int, world_size: int, read: Callable[[], Any]):
        self._path = folder / f"rank-{rank:05d}.json"
        self._fixed = {
            "rank": rank,
            "world_size": world_size,
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        self._read = read
        self._stopped = threading.Event()
        folder.mkdir(parents=True, exist_ok=True)
        self._thread = threading.Thread(target=self._run, name="mpxla-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Writes for the last time, that the rank has ended in order."""
        self._stopped.set()
        self._thread.join()
        with contextlib.suppress(OSError):
            self._write({**self._read(), "state": "ended"})

    def _run(self) -> None:
        try:
            while True:
                self._write(self._read())
                if self._stopped.wait(_PERIOD_S):
                    return
        except OSError as error:  # a full disk must not end a training job
            get_logger().warning("metrics are not written any more: %s", error)

    def _write(self, values: dict[str, Any]) -> None:
        part = self._path.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps({**self._fixed, **values}))
        part.replace(self._path)


def metrics() -> dict[str, Any]:
    """What steps cost on this rank, of the step function that trained last. (Extension.)

    Waits for nothing, and may be called on any rank at any time. Keys:

    - `function`: name of the step function;
    - `steps`: calls of step functions that train, since `smp.init`;
    - `step_s`: seconds from the begin of one call to that of the next one, median of the last 20;
    - `samples_per_s`: samples of the batches of all replicas per second; None on ranks that do not
      see the batch (all but the first of a pipeline);
    - `waiting`: share of that time in which this rank's host waited for messages, 0 to 1;
    - `compilations`, `compile_s`: programs compiled by this process; seconds for step functions;
    - `bytes_sent`: bytes that this rank gave to the transport: messages, and operands of
      collectives;
    - `memory_bytes`: in use on the device; on the CPU by this process.

    Values that are not known yet are None.

    Raises:
        MpxlaError: there is no `DistributedModel` yet.
    """
    models = current().models
    if models is None:
        raise MpxlaError("smp.metrics() was called before smp.DistributedModel; wrap the model.")
    return models.engine.meter.read()


def write_metrics(writer: Any, step: int, prefix: str = "mpxla/") -> None:
    """Writes `metrics()` as scalars for TensorBoard. (Extension.)

    Args:
        writer: has `add_scalar(name, value, step)`, as `SummaryWriter` of
            torch.utils.tensorboard.
        step: position on the horizontal axis.
        prefix: stands before the names of the keys.
    """
    for name, value in metrics().items():
        if isinstance(value, (int, float)):
            writer.add_scalar(f"{prefix}{name}", value, step)
