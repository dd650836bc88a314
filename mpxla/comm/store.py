"""The store by which the processes of a launch find each other, before they can trust each other.

It is a test runner's file, the one that torchrun serves at the master's port, or one that rank 0
serves there. Sessions of mpxla that follow each other have parts of their own in it.

This file knows the launcher's variables; it must not know what is written into the store.
"""

import contextlib
import threading
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    _get_default_store,  # pyright: ignore[reportPrivateUsage]
)

from mpxla.comm.addresses import listen_for_store
from mpxla.env import LaunchEnv
from mpxla.errors import MpxlaError, PeerFailure

__all__ = ["GROUP_TIMEOUT", "await_note", "claims_in", "open_agent_store", "session_store"]

_LONGEST_CLAIM_S = 3.0

GROUP_TIMEOUT = timedelta(minutes=10)
"""Of the default group and its store, for the user's own collectives."""
_launch_stores: dict[str, dist.Store] = {}


def session_store(env: LaunchEnv, timeout_s: float) -> dist.Store:
    """A part of the default group's store, or of the launcher's, for one session.

    Every rank calls it at the begin of the session; it waits for the server only.

    Raises:
        MpxlaError: rank 0 cannot serve the store.
        PeerFailure: nobody serves it.
    """
    store = _get_default_store() if dist.is_initialized() else _launch_store(env, timeout_s)
    # A store keeps the keys of an earlier session, and torchrun's those of processes that it
    # has restarted; all ranks count alike.
    number = store.add(f"mpxla_sessions_{env.attempt}_{env.rank}", 1)
    return dist.PrefixStore(f"mpxla_session_{env.attempt}_{number}", store)


def await_note(store: dist.Store, key: str, rank: int, author: int, timeout_s: float) -> str:
    """What another rank, the author, has written or will write at a key.

    Raises:
        PeerFailure: it did not come in time.
    """
    try:
        store.wait([key], timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise PeerFailure(
            f"rank {rank} waited {timeout_s:g} s for rank {author} to start mpxla. Start the same "
            f"script on all ranks, and look at the output of rank {author}."
        ) from error
    return store.get(key).decode()


def _launch_store(env: LaunchEnv, timeout_s: float) -> dist.Store:
    """Where the processes of a launch meet; one object per process, since rank 0 may serve it."""
    place = env.rendezvous_file or f"tcp://{env.master_addr}:{env.master_port}"
    if place not in _launch_stores:
        _launch_stores.clear()
        if env.rendezvous_file is not None:
            store: dist.Store = dist.FileStore(env.rendezvous_file, env.world_size)
        else:
            store = _open_tcp_store(env, timeout_s)
        store.set_timeout(GROUP_TIMEOUT)
        _launch_stores[place] = store
    return _launch_stores[place]


def _open_tcp_store(env: LaunchEnv, timeout_s: float) -> dist.Store:
    """torchrun's store, or one that rank 0 serves; the other ranks are not waited for here."""
    is_one_host = env.local_size == env.world_size
    is_server, listener = env.rank == 0 and not env.has_agent_store, None
    try:
        if is_server:
            listener = listen_for_store(is_one_host, env.master_addr, env.master_port)
        return dist.TCPStore(
            "127.0.0.1" if is_one_host and not env.has_agent_store else env.master_addr,
            env.master_port,
            env.world_size,
            is_master=is_server,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            # A port that this process serves already is shared.
            multi_tenant=not env.has_agent_store,
            master_listen_fd=None if listener is None else listener.detach(),
        )
    except (dist.DistError, OSError) as error:
        place = f"{env.master_addr} port {env.master_port}"
        if is_server:
            raise MpxlaError(
                f"rank 0 cannot serve the store by which ranks find each other at {place}: "
                f"{error}. Set MASTER_PORT to a free port, on all ranks alike."
            ) from error
        server = "the launcher" if env.has_agent_store else "rank 0"
        raise PeerFailure(
            f"rank {env.rank} waited {timeout_s:g} s (init_timeout_s) for {server} at {place}, "
            f"where ranks find each other; this rank is there, and without {server} no other can "
            f"be seen. Look at the output of {server}; start the same script on all ranks, and set "
            f"MASTER_ADDR and MASTER_PORT to what all hosts can reach. ({error})"
        ) from error


def claims_in(open_store: Callable[[], dist.Store], rank: int) -> Callable[[str], int]:
    """Makes a function that claims a name for this rank, and tells whose it is.

    For the last words of a process, which must not wait long for anybody.
    """

    def claim(name: str) -> int:
        found: list[int] = []

        def ask() -> None:
            with contextlib.suppress(Exception):  # of whatever the store is, or was
                store = dist.PrefixStore("mpxla_claims", open_store())
                found.append(int(store.compare_set(name, "", str(rank))))

        thread = threading.Thread(target=ask, name="mpxla-claim", daemon=True)
        thread.start()
        thread.join(_LONGEST_CLAIM_S)
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
        timeout=timedelta(seconds=_LONGEST_CLAIM_S),
        wait_for_workers=False,
    )
