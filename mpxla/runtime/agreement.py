"""Whether all ranks of a group describe a thing alike: their model, their step.

Ranks that were started with different scripts would wait for each other for ever, or train
nonsense.
So they compare digests of short descriptions, and show the first line that differs.
This module must not know what is described.
"""

import contextlib
import hashlib
from collections.abc import Sequence
from itertools import zip_longest

from mpxla.comm.objects import Objects
from mpxla.errors import PeerFailure, RankMismatch

__all__ = ["check_agreement"]

_LONGEST = 300
_ADVICE = "Start the same script with the same arguments, model and configuration on all ranks."


def check_agreement(
    objects: Objects,
    group: Sequence[int],
    description: Sequence[str],
    what: str,
    advice: str = _ADVICE,
) -> None:
    """Raises on every rank of the group if the descriptions differ; all of them must call.

    Args:
        objects: the session's object communication.
        group: global ranks.
        description: what this rank has, in lines.
        what: completes "ranks [1] ... than rank 0".
        advice: what to do.

    Raises:
        RankMismatch: with the first line that differs.
    """
    ranks = tuple(group)
    if len(ranks) == 1:  # a failure elsewhere is not to overtake one of its own
        return
    digest = hashlib.blake2b("\n".join(description).encode(), digest_size=16).hexdigest()
    digests = objects.allgather(digest, ranks)
    different = [position for position, text in enumerate(digests) if text != digests[0]]
    if not different:
        return
    described = objects.allgather(list(description), ranks)
    with contextlib.suppress(PeerFailure):
        objects.barrier(ranks)  # nobody ends before all others know as much
    other = different[0]
    line, other_line = _first_difference(described[0], described[other])
    raise RankMismatch(
        f"ranks {[ranks[position] for position in different]} {what} than rank {ranks[0]}:\n"
        f"  {line} on rank {ranks[0]}\n"
        f"  {other_line} on rank {ranks[other]}\n"
        f"{advice}"
    )


def _first_difference(one: Sequence[str], other: Sequence[str]) -> tuple[str, str]:
    for a, b in zip_longest(one, other, fillvalue="nothing more"):
        if a != b:
            return _shortened(a), _shortened(b)
    raise AssertionError("descriptions with different digests are equal")


def _shortened(line: str) -> str:
    return line if len(line) <= _LONGEST else line[: _LONGEST - 3] + "..."


def share_error(
    objects: Objects, group: Sequence[int], error: Exception | None, where: str
) -> None:
    """Raises on every rank of the group if one of them failed; all of them must call.

    A rank that failed raises its own error, also where others found the same by themselves: the
    news of a failure would otherwise overtake some of them.

    Args:
        objects: the session's object communication.
        group: global ranks.
        error: what this rank has to raise, or None.
        where: what the ranks were doing.

    Raises:
        PeerFailure: another rank failed, and this one did not.
    """
    ranks = tuple(group)
    if len(ranks) == 1:
        if error is not None:
            raise error
        return
    own = None if error is None else f"{type(error).__name__} in {where}: {error}"
    texts = objects.allgather(own, ranks)
    failed = [(rank, text) for rank, text in zip(ranks, texts, strict=True) if text is not None]
    if not failed:
        return
    with contextlib.suppress(PeerFailure):
        objects.barrier(ranks)  # nobody ends before all others know as much
    if error is not None:
        raise error
    rank, text = failed[0]
    raise PeerFailure(
        f"rank {rank} raised {text}. Look at the output of rank {rank} for the cause."
    )
