"""Errors of full device memory, as texts that say what holds it."""

import collections
import contextlib
from collections.abc import Generator
from typing import Any

import jax

from mpxla.device.pjrt.arrays import Device
from mpxla.env import read_environment
from mpxla.errors import MpxlaError
from mpxla.graph.partition.report import format_size

__all__ = ["counters", "explained"]

_NUM_KINDS = 8
"""How many shapes of arrays an error lists."""


@contextlib.contextmanager
def explained(doing: str, device: Device, program: Any = None) -> Generator[None]:
    """Makes the runtime's errors of full memory say what needs memory and what holds it.

    Programs run asynchronously: the error of one may show up where its results are waited for.

    Args:
        doing: completes "while".
        device: whose memory it is.
        program: compiled by jax, if one runs.

    Raises:
        MpxlaError: the memory is full.
    """
    try:
        yield
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise MpxlaError(_text(doing, device, program, str(error))) from error


def counters(device: Device) -> dict[str, int] | None:
    """Bytes that the device counts (`bytes_used`, `bytes_limit`, ...); None if it does not."""
    found: dict[str, int] | None = device.memory_stats()
    if not found:
        return None
    names: dict[str, str] = {"bytes_in_use": "bytes_used", "peak_bytes_in_use": "peak_bytes_used"}
    return {names.get(key, key): int(value) for key, value in found.items()}


def _text(doing: str, device: Device, program: Any, cause: str) -> str:
    rank, lines = read_environment().rank, []
    lines.append(f"rank {rank}: the memory of its device ({device}) is full, while {doing}.")
    if program is not None:
        sizes = program.memory_analysis()
        if sizes is not None:
            own_bytes = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
            lines.append(
                f"  The program needs {format_size(sizes.temp_size_in_bytes)} while it runs and "
                f"{format_size(own_bytes)} for its results, beside "
                f"{format_size(sizes.argument_size_in_bytes)} of arguments."
            )
    counted = counters(device)
    if counted is not None:
        used, limit = counted.get("bytes_used", 0), counted.get("bytes_limit", 0)
        lines.append(f"  In use: {format_size(used)} of {format_size(limit)}.")
    lines.append("  Arrays (parameters, gradients, optimizer state, activations), by shape:")
    lines += [f"    {line}" for line in _arrays(device)]
    lines.append(
        "  Use smaller or more microbatches, fewer active_microbatches, more pipeline stages, or "
        "shard_optimizer_state; `python -m mpxla plan` predicts the memory of each rank."
    )
    lines.append(f"  The runtime says: {cause.splitlines()[0] if cause else 'nothing'}")
    return "\n".join(lines)


def _arrays(device: Device) -> list[str]:
    counts: collections.Counter[str] = collections.Counter()
    total: collections.Counter[str] = collections.Counter()
    for array in jax.live_arrays():
        if array.is_deleted() or array.device != device:
            continue
        kind = f"{array.dtype}{list(array.shape)}"
        counts[kind] += 1
        total[kind] += array.nbytes
    lines = [f"{format_size(n)} in {counts[k]} x {k}" for k, n in total.most_common(_NUM_KINDS)]
    rest = len(total) - len(lines)
    shown = sum(n for _, n in total.most_common(_NUM_KINDS))
    if rest > 0:
        lines.append(f"{format_size(total.total() - shown)} in {rest} other shapes")
    return lines or ["none"]
