"""Gathers over several hosts in two phases, so that less goes between hosts (MiCS).

Every part has to reach every host; it need not do so more than once. Of four ranks on two hosts:

    parts                         host 0: rank 0 | 0 . . . |     host 1: rank 2 | . . 2 . |
                                          rank 1 | . 1 . . |             rank 3 | . . . 3 |
    across hosts: (0 2), (1 3)            rank 0 | 0 . 2 . |             rank 2 | 0 . 2 . |
                                          rank 1 | . 1 . 3 |             rank 3 | . 1 . 3 |
    inside hosts: (0 1), (2 3)            all    | 0 1 2 3 |             all    | 0 1 2 3 |

With k of p members on it, a host so sends p - k parts, by k connections at the same time. A ring
over all of them, which is what gloo has, sends p - 1 from every host, by one connection. (Zhang et
al., "MiCS", arXiv:2205.00119, section 3.3.)

This file must not know what is gathered, nor threads.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from mpxla.comm.packing import as_bytes
from mpxla.comm.transport import Group

__all__ = ["GatherByHost", "rows_by_host"]


def rows_by_host(ranks: Group, hosts: Sequence[int]) -> list[Group] | None:
    """The members of a group by their hosts, if there are several, with equally many each.

    `hosts` has, of every rank of the world, the number of its host.

    Returns:
        For every host its members, at least two; None where two phases would save nothing, and
        where the members of a host do not follow each other.
    """
    num_hosts = len({hosts[rank] for rank in ranks})
    width = len(ranks) // num_hosts
    rows = [ranks[start : start + width] for start in range(0, len(ranks), width)]
    if min(num_hosts, width) == 1 or any(len({hosts[rank] for rank in row}) > 1 for row in rows):
        return None
    return rows if len(rows) == num_hosts else None


class GatherByHost(NamedTuple):
    """A gather in two phases, of one rank."""

    across: dist.ProcessGroup
    """The members at this rank's place on all hosts."""
    inside: dist.ProcessGroup
    """The members on this rank's host."""

    def __call__(self, gathered: torch.Tensor, part: torch.Tensor) -> None:
        """Fills [members, ...] with the parts [...] of all; every member calls it."""
        num_hosts, width = self.across.size(), self.inside.size()
        received = torch.empty((num_hosts, *part.shape), dtype=part.dtype)
        dist.all_gather_into_tensor(as_bytes(received), as_bytes(part), group=self.across)
        rows = as_bytes(gathered).view(num_hosts, width, -1)
        dist.all_gather(list(rows.unbind(1)), as_bytes(received).view(num_hosts, -1), self.inside)
