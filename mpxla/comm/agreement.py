"""Whether all ranks of a group have the same: their configuration, their model, their step.

Ranks that were started with different scripts would wait for each other for ever, or train
nonsense. So they gather what has to be equal, and all of them raise where it is not; of what is
long, they gather digests, and then show the first line that differs.
This module must not know what is compared.
"""

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import TypeVar

from mpxla.comm.objects import Objects
from mpxla.errors import PeerFailure, RankMismatch

__all__ = ["agreed", "check_agreement", "share_error"]

_LONGEST = 300
_ADVICE = "Start the same script with the same arguments, model and configuration on all ranks."
_T = TypeVar("_T")


def agreed(
    objects: Objects,
    group: Sequence[int],
    own: _T,
    text: Callable[[list[int], _T, _T], str],
    key: Callable[[_T], object] = lambda value: value,
) -> list[_T]:
    """What every rank of the group has; all of them must call.

    `text` makes the error's of (ranks that have something else than the first rank of the group,
    what that one has, what the first of them has); what has to be equal of it is its key.

    Raises:
        RankMismatch: ranks have something else; on all of them.
    """
    ranks = tuple(group)
    if len(ranks) == 1:  # a failure elsewhere is not to overtake one of its own
        return [own]
    everyone = objects.allgather(own, ranks)
    keys = [key(value) for value in everyone]
    others = [place for place, other in enumerate(keys) if other != keys[0]]
    if others:
        problem = text([ranks[place] for place in others], everyone[0], everyone[others[0]])
        _wait_for_all(objects, ranks)
        raise RankMismatch(problem)
    return everyone


def _wait_for_all(objects: Objects, ranks: tuple[int, ...]) -> None:
    """Before an error: nobody ends before all others know as much."""
    with contextlib.suppress(PeerFailure):
        objects.barrier(ranks)


def check_agreement(
    objects: Objects,
    group: Sequence[int],
    description: Sequence[str],
    what: str,
    advice: str = _ADVICE,
) -> None:
    """Raises on every rank of the group if the descriptions differ; all of them must call.

    `what` completes "ranks [1] ... than rank 0"; descriptions are lines.

    Raises:
        RankMismatch: with the first line that differs.
    """

    def text(others: list[int], *_: str) -> str:
        described = dict(
            zip(group, objects.allgather(list(description), tuple(group)), strict=True)
        )
        first, other = group[0], others[0]
        line, other_line = _first_difference(described[first], described[other])
        return (
            f"ranks {others} {what} than rank {first}:\n"
            f"  {line} on rank {first}\n"
            f"  {other_line} on rank {other}\n"
            f"{advice}"
        )

    digest = hashlib.blake2b("\n".join(description).encode(), digest_size=16).hexdigest()
    agreed(objects, group, digest, text)


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
    _wait_for_all(objects, ranks)
    if error is not None:
        raise error
    rank, text = failed[0][0], failed[0][1].removesuffix(".")
    raise PeerFailure(
        f"rank {rank} raised {text}. Look at the output of rank {rank} for the cause."
    )
