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
from typing import NamedTuple

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


class _Entry(NamedTuple):
    """What a rank says of itself."""

    version: str
    home: str


class _Roll:
    """One roll call in the store of a session."""

    def __init__(self, store: Store, world_size: int) -> None:
        self._store = store
        self._missing = list(range(world_size))

    def write(self, rank: int, entry: _Entry) -> None:
        self._store.set(self._key(rank), json.dumps(entry))

    def read(self, rank: int) -> _Entry:
        version, home, *_ = json.loads(self._store.get(self._key(rank)))
        return _Entry(str(version), str(home))

    def missing(self) -> list[int]:
        """Ranks of which some have not come; asks for few at a time, since all ranks ask."""
        while some := self._missing[:_KEYS_AT_ONCE]:
            if not self._store.check([self._key(rank) for rank in some]):
                break
            del self._missing[: len(some)]
        return self._missing

    def absent(self) -> list[int]:
        """Exactly the ranks that have not come."""
        return [rank for rank in self.missing() if not self._store.check([self._key(rank)])]

    def give_up(self, text: str) -> None:
        self._store.set(_GIVEN_UP, text)

    def given_up(self) -> str | None:
        """Why another rank waits no longer."""
        return self._store.get(_GIVEN_UP).decode() if self._store.check([_GIVEN_UP]) else None

    def _key(self, rank: int) -> str:
        return f"{_PREFIX}/{rank}"


def call_roll(store: Store, rank: int, world_size: int, version: str, timeout_s: float) -> None:
    """Waits until all ranks have come; every rank calls it, before all other communication.

    Raises:
        PeerFailure: a rank did not come in time; names the ranks that are there and those that are
            missing. A rank that comes later gets the same error at once.
        RankMismatch: ranks have different versions of mpxla.
    """
    roll = _Roll(store, world_size)
    roll.write(rank, _Entry(version, f"pid {os.getpid()} on {socket.gethostname()}"))
    start = time.monotonic()
    warn_at, pause_s = start + _WARN_AFTER_S, _FIRST_PAUSE_S
    while roll.missing():
        now = time.monotonic()
        if (text := roll.given_up()) is not None:
            raise PeerFailure(f"rank {rank} came too late: {text}")
        if now - start >= timeout_s and (absent := roll.absent()):
            text = _describe(roll, absent, rank, world_size, timeout_s)
            roll.give_up(text)
            raise PeerFailure(text)
        if now >= warn_at:
            get_logger().warning("waiting for %s to call smp.init", _named(roll.absent()))
            warn_at = now + (now - start)
        time.sleep(min(pause_s, max(start + timeout_s - now, 0.0)))
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    _check_versions([roll.read(other) for other in range(world_size)])


def _describe(
    roll: _Roll, missing: Sequence[int], rank: int, world_size: int, timeout_s: float
) -> str:
    there = [other for other in range(world_size) if other not in missing]
    homes = "; ".join(f"rank {other}: {roll.read(other).home}" for other in there[:_MOST_NAMED])
    return (
        f"rank {rank} waited {timeout_s:g} s (init_timeout_s) for {_named(missing)} to call "
        f"smp.init; {_named(there)} of {world_size} came ({homes}). Look at the output of "
        f"{_named(missing)}: a process that ended before smp.init, hangs before it or never "
        f"started. Start the same script on all ranks, or raise init_timeout_s if one takes longer."
    )


def _named(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else ""
    return f"rank {', '.join(map(str, ranks[:_MOST_NAMED]))}{more}"


def _check_versions(entries: Sequence[_Entry]) -> None:
    by_version: dict[str, list[int]] = {}
    for rank, entry in enumerate(entries):
        by_version.setdefault(entry.version, []).append(rank)
    if len(by_version) > 1:
        found = ", ".join(f"{version} on {_named(ranks)}" for version, ranks in by_version.items())
        raise RankMismatch(
            f"the ranks run different versions of mpxla: {found}. Install the same version in the "
            f"Python environment of every host."
        )
