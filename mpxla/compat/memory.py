"""Memory counters of `torch.cuda`, from what the device's runtime counts.

XLA's CPU client counts nothing: there the device's memory is the memory of the process, whose
resident bytes Linux counts.
"""

import os
from pathlib import Path
from typing import Any

from mpxla.compat import CompatError
from mpxla.compat.devices import device_backend
from mpxla.user_lines import at_script_line

__all__ = ["MEMORY_FUNCTIONS", "ResidentPeak", "total_bytes"]

_RESET_PEAK = "5"
"""Written to `clear_refs`, it sets the peak of resident memory to its present value (proc(5))."""


class ResidentPeak:
    """The highest resident memory of the process, in bytes.

    Linux counts pages per processor and adds the counts up roughly, so that its own peak (VmHWM)
    may be some pages lower when it is read again. A script that reads CUDA's peak twice expects it
    to have grown, or stayed.
    """

    def __init__(self):
        self._highest = 0

    def read(self, counted: int) -> int:
        """The highest peak that Linux has counted, this time included."""
        self._highest = max(self._highest, counted)
        return self._highest

    def reset(self) -> None:
        """Starts anew with what is resident now."""
        Path("/proc/self/clear_refs").write_text(_RESET_PEAK, encoding="ascii")
        self._highest = 0


_resident_peak = ResidentPeak()


def _counters() -> tuple[int, int, int]:
    """Bytes in use, their peak, and how many there are."""
    counted = device_backend().memory_counters()
    if counted is not None:
        used = counted["bytes_used"]
        return used, counted.get("peak_bytes_used", used), counted["bytes_limit"]
    lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    fields = dict(line.split(":", 1) for line in lines if line.startswith("Vm"))
    used, peak = (1024 * int(fields[name].split()[0]) for name in ("VmRSS", "VmHWM"))
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return used, _resident_peak.read(peak), total


def _used(device: Any = None) -> int:
    return _counters()[0]


def _peak(device: Any = None) -> int:
    return _counters()[1]


def total_bytes(device: Any = None) -> int:
    """Memory of the device."""
    return _counters()[2]


def _free_and_total(device: Any = None) -> tuple[int, int]:
    used, _, total = _counters()
    return total - used, total


class _Statistics(dict[str, int]):
    """Counters by CUDA's names; reading one that XLA does not keep is an error with a reason."""

    def __missing__(self, name: str) -> int:
        raise CompatError(
            f"{at_script_line()}: memory_stats()[{name!r}] cannot be mapped onto an XLA device: "
            f"it counts {', '.join(sorted(self))} only."
        )


def _statistics(device: Any = None) -> dict[str, int]:
    used, peak, _ = _counters()
    return _Statistics(
        (f"{kind}_bytes.all.{what}", value)
        for kind in ("allocated", "reserved", "active")
        for what, value in (("current", used), ("peak", peak))
    )


def _summary(device: Any = None, abbreviated: bool = False) -> str:
    used, peak, total = (value / 2**20 for value in _counters())
    return f"XLA device: {used:.0f} MiB in use, {peak:.0f} MiB at most, {total:.0f} MiB in total"


def _reset_peak(device: Any = None) -> None:
    """Starts the peak anew where the system can; XLA's own peaks cannot be reset."""
    if device_backend().memory_counters() is None:
        _resident_peak.reset()


MEMORY_FUNCTIONS = {
    **dict.fromkeys(("memory_allocated", "memory_reserved", "memory_cached"), _used),
    **dict.fromkeys(("max_memory_allocated", "max_memory_reserved", "max_memory_cached"), _peak),
    "mem_get_info": _free_and_total,
    "memory_stats": _statistics,
    "memory_summary": _summary,
    **dict.fromkeys(
        ("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached"),
        _reset_peak,
    ),
}
"""Name in `torch.cuda` -> its replacement."""
