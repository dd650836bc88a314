"""Compiled programs on disk, by jax's persistent cache, so that a second start compiles nothing.

Ranks read and write it at once under jax's lock. What was used least recently goes when it grows
beyond `MAX_BYTES`. Programs for processors hold machine code: every kind of processor has a folder
of its own, since XLA loads code for another one and fails in the midst of a step.
"""

import contextlib
import hashlib
import os
import platform
from pathlib import Path

import jax
from filelock import FileLock, Timeout  # comes with torch; jax needs it to bound its cache
from jax.experimental.compilation_cache import compilation_cache

from mpxla.log import get_logger

__all__ = ["MAX_BYTES", "keep_programs"]

MAX_BYTES = 4 * 2**30
"""Of the programs of one platform."""

_LOCK_TIMEOUT_S = 10.0


def keep_programs(folder: str, platform_name: str) -> bool:
    """Makes jax keep compiled programs, quickly compiled ones too.

    Args:
        folder: for the programs of all platforms; made if need be, for this user only. "" keeps
            none.
        platform_name: jax's name of the platform.

    Returns:
        Whether programs are kept; a log line says why they are not.
    """
    place = Path(folder).expanduser() / _kind_of_machine(platform_name) if folder else None
    if place is not None:
        try:
            _prepare(place)
        except (OSError, Timeout) as error:
            get_logger().warning(
                "compiled programs are not kept: %s cannot be used (%s). Set compile_cache to a "
                'folder that can be written, or to "".',
                place,
                error,
            )
            place = None
    settings = {
        "jax_compilation_cache_dir": None if place is None else str(place),
        "jax_compilation_cache_max_size": MAX_BYTES,
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": 0,
    }
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # jax opens its cache once, before the first program
    return place is not None


def _kind_of_machine(platform_name: str) -> str:
    """The folder for a platform; of processors, for those with the same instructions."""
    if platform_name != "cpu":
        return platform_name
    found = {platform.machine(), platform.processor()}
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        found |= {line for line in lines if line.startswith(("flags", "Features", "model name"))}
    return "cpu-" + hashlib.sha256("".join(sorted(found)).encode()).hexdigest()[:12]


def _prepare(place: Path) -> None:
    """Makes the folder, and drops what a process that was killed has left half written."""
    for folder in (place.parent, place):  # the mode is not that of parents
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not os.access(place, os.W_OK):
        raise PermissionError("it is not writable")
    with FileLock(place / ".lockfile", timeout=_LOCK_TIMEOUT_S):  # jax's own lock
        for program in place.glob("*-cache"):
            # jax writes this file last, under the lock, and fails where it is missing.
            if not program.with_name(program.name.removesuffix("-cache") + "-atime").exists():
                program.unlink()
