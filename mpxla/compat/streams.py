"""Streams, events and ranges of CUDA, for a device that runs its work in one order.

XLA runs what a process gives it in the order of the program. That is one of the orders that
streams allow, so every stream of a script is this one, and waiting for another stream waits for
nothing. An event is recorded when the work before it is done: the time between two events is that
of the work, and the host does not run ahead meanwhile.
"""

import contextlib
import time
from collections.abc import Generator
from typing import Any

from mpxla.compat import CompatError
from mpxla.compat.devices import device_backend
from mpxla.user_lines import at_script_line

__all__ = ["NVTX_FUNCTIONS", "STREAM_FUNCTIONS", "Event", "Stream", "synchronize"]


def synchronize() -> None:
    """Starts pending work of the device, and waits until all is done."""
    backend = device_backend()
    backend.flush()
    backend.wait()


class Event:
    """`torch.cuda.Event`.

    Args:
        enable_timing: whether `elapsed_time` may be asked.
        blocking: no effect.
        interprocess: no effect; handles for other processes cannot be had.
    """

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ):
        self._is_timed = enable_timing
        self._recorded_s: float | None = None

    def record(self, stream: Any = None) -> None:
        """Waits for the work before it, and notes the time."""
        synchronize()
        self._recorded_s = time.perf_counter()

    def elapsed_time(self, end_event: "Event") -> float:
        """Milliseconds from this event to another one.

        Raises:
            CompatError: an event has no time.
        """
        start_s, end_s = self._recorded_s, end_event._recorded_s
        if start_s is None or end_s is None or not (self._is_timed and end_event._is_timed):
            raise CompatError(
                f"{at_script_line()}: elapsed_time() needs two recorded events that were made with "
                f"enable_timing=True."
            )
        return 1e3 * (end_s - start_s)

    def synchronize(self) -> None:
        """Returns at once: recording has waited."""

    def wait(self, stream: Any = None) -> None:
        """Returns at once: work runs in the order of the program."""

    def query(self) -> bool:
        """True: recording has waited."""
        return True


class Stream:
    """`torch.cuda.Stream`: the order of the program, whichever stream it is.

    Args:
        device: no effect.
        priority: no effect.
    """

    def __init__(self, device: Any = None, priority: int = 0):
        self.priority = priority

    def wait_stream(self, stream: Any) -> None:
        """Returns at once: work runs in the order of the program."""

    def wait_event(self, event: Any) -> None:
        """Returns at once: work runs in the order of the program."""

    def record_event(self, event: Event | None = None) -> Event:
        """Records an event, a new one if None."""
        event = event or Event()
        event.record()
        return event

    def synchronize(self) -> None:
        """Waits for all work of the device."""
        synchronize()

    def query(self) -> bool:
        """Waits for all work of the device; True."""
        synchronize()
        return True


_STREAM = Stream()


@contextlib.contextmanager
def _use_stream(stream: Any) -> Generator[None]:
    yield


STREAM_FUNCTIONS: dict[str, Any] = {
    "Stream": Stream,
    "Event": Event,
    "stream": _use_stream,
    "set_stream": lambda stream: None,
    "current_stream": lambda device=None: _STREAM,
    "default_stream": lambda device=None: _STREAM,
}
"""Name in `torch.cuda` -> its replacement."""


@contextlib.contextmanager
def _range(msg: str, *args: Any, **kwargs: Any) -> Generator[None]:
    yield


NVTX_FUNCTIONS: dict[str, Any] = {
    "range": _range,
    "range_push": lambda msg: 0,
    "range_pop": lambda: 0,
    "range_start": lambda msg: 0,
    "range_end": lambda range_id: None,
    "mark": lambda msg: None,
}
"""Name in `torch.cuda.nvtx` -> its replacement."""
