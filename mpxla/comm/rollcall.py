"""Which ranks have come: the first thing that the processes of a job tell each other.

Every rank writes its name into the store by which the launcher lets processes find each other, and
waits until all have. Nothing else is needed for it, so a rank that never starts is named, and ranks
with different versions of mpxla are refused before they exchange anything that a version may
change.

This file knows the store only.
"""

import json
import os
import socket
import time
from collections.abc import Sequence

from torch.distributed import Store

from mpxla.errors import PeerFailure, RankMismatch
from mpxla.log import get_logger

__all__ = ["call_roll"]

_PREFIX = "mpxla_roll"
_GIVEN_UP = f"{_PREFIX}/given-up"
_FIRST_PAUSE_S = 0.005
_LONGEST_PAUSE_S = 0.5
_WARN_AFTER_S = 15.0
_KEYS_AT_ONCE = 64
_MOST_NAMED = 16


def call_roll(store: Store, rank: int, world_size: int, version: str, timeout_s: float) -> None:
    """Waits until all ranks have come; every rank calls it, before all other communication.

    Raises:
        PeerFailure: a rank did not come in time; names the ranks that are there and those that are
            missing. A rank that comes later gets the same error at once.
        RankMismatch: ranks have different versions of mpxla.
    """
    home = f"pid {os.getpid()} on {socket.gethostname()}"
    store.set(_key(rank), json.dumps([version, home]))
    missing, start = list(range(world_size)), time.monotonic()
    warn_at, pause_s = start + _WARN_AFTER_S, _FIRST_PAUSE_S
    while _are_missing(store, missing):
        now = time.monotonic()
        if store.check([_GIVEN_UP]):
            text = store.get(_GIVEN_UP).decode()
            raise PeerFailure(f"rank {rank} came too late: {text}")
        if now - start >= timeout_s and (absent := _absent(store, missing)):
            text = _describe(store, absent, rank, world_size, timeout_s)
            store.set(_GIVEN_UP, text)
            raise PeerFailure(text)
        if now >= warn_at:
            waits_for = _named(_absent(store, missing))
            get_logger().warning("waiting for %s to call smp.init", waits_for)
            warn_at = now + (now - start)
        time.sleep(min(pause_s, max(start + timeout_s - now, 0.0)))
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    _check_versions([_read(store, other)[0] for other in range(world_size)])


def _key(rank: int) -> str:
    return f"{_PREFIX}/{rank}"


def _read(store: Store, rank: int) -> tuple[str, str]:
    """(version, where it runs) of a rank that has come."""
    version, home, *_ = json.loads(store.get(_key(rank)))
    return str(version), str(home)


def _are_missing(store: Store, ranks: list[int]) -> bool:
    """Takes ranks that have come from the list; few are asked for at a time, since all ranks ask.

    Where some of a few have come only, all of them stay.
    """
    while (some := ranks[:_KEYS_AT_ONCE]) and store.check([_key(rank) for rank in some]):
        del ranks[: len(some)]
    return bool(ranks)


def _absent(store: Store, ranks: Sequence[int]) -> list[int]:
    """Exactly those of some ranks that have not come."""
    return [rank for rank in ranks if not store.check([_key(rank)])]


def _describe(
    store: Store, missing: Sequence[int], rank: int, world_size: int, timeout_s: float
) -> str:
    there = [other for other in range(world_size) if other not in missing]
    homes = "; ".join(f"rank {other}: {_read(store, other)[1]}" for other in there[:_MOST_NAMED])
    return (
        f"rank {rank} waited {timeout_s:g} s (init_timeout_s) for {_named(missing)} to call "
        f"smp.init; {_named(there)} of {world_size} came ({homes}). Look at the output of "
        f"{_named(missing)}: a process that ended before smp.init, hangs before it or never "
        f"started. Start the same script on all ranks, or raise init_timeout_s if one takes longer."
    )


def _named(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else ""
    return f"rank {', '.join(map(str, ranks[:_MOST_NAMED]))}{more}"


def _check_versions(versions: Sequence[str]) -> None:
    by_version: dict[str, list[int]] = {}
    for rank, version in enumerate(versions):
        by_version.setdefault(version, []).append(rank)
    if len(by_version) > 1:
        found = ", ".join(f"{version} on {_named(ranks)}" for version, ranks in by_version.items())
        raise RankMismatch(
            f"the ranks run different versions of mpxla: {found}. Install the same version in the "
            f"Python environment of every host."
        )
