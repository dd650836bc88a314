"""Which rank is the first to claim something, by a store that all ranks reach.

For the last words of a process, which must not wait long for anybody.
"""

import contextlib
import threading
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

__all__ = ["claims_in", "open_agent_store"]

_LONGEST_S = 3.0


def claims_in(open_store: Callable[[], dist.Store], rank: int) -> Callable[[str], int]:
    """Makes a function that claims a name for this rank, and tells whose it is.

    Args:
        open_store: gives the store.
        rank: of this process.
    """

    def claim(name: str) -> int:
        found: list[int] = []

        def ask() -> None:
            with contextlib.suppress(Exception):  # of whatever the store is, or was
                answer()

        def answer() -> None:
            store = dist.PrefixStore("mpxla_claims", open_store())
            found.append(int(store.compare_set(name, "", str(rank))))

        thread = threading.Thread(target=ask, name="mpxla-claim", daemon=True)
        thread.start()
        thread.join(_LONGEST_S)
        if not found:
            raise TimeoutError(f"nobody answered to the claim of {name!r}")
        return found[0]

    return claim


def open_agent_store(address: str, port: int) -> dist.Store:
    """A connection of its own to the store that torchrun serves."""
    return dist.TCPStore(
        address,
        port,
        is_master=False,
        timeout=timedelta(seconds=_LONGEST_S),
        wait_for_workers=False,
    )
