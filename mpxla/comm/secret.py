"""The secret of a job, and the key that its processes make of it.

Who knows the secret belongs to the job: connections prove it (`handshake`) and objects between
ranks carry it (`seal`). It comes from the launcher (`MPXLA_SECRET`), or rank 0 makes one and hands
it over in a file that only this user can read, which needs all ranks on one host:

    start     every rank tells its host, a number that nobody can foresee, and whether it was given
              a secret
    hand over rank 0 tells the path of its file, if it needs one
    check     every rank tells what its key looks like from outside; rank 0 removes the file

The store that carries this is open to everybody who can reach it. So nothing in it is secret, and
nothing in it is believed: whoever writes there can keep a job from starting, but the key depends on
the secret and on the own number of every rank, so that no session has the key of an earlier one.

This file knows no sockets and no messages.
"""

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed import Store

from mpxla.comm.addresses import host_identity
from mpxla.comm.store import await_note
from mpxla.errors import ConfigError, MpxlaError, RankMismatch

__all__ = ["Trust", "agree_on_key", "create_secret_file", "read_secret_file"]

_PREFIX = "mpxla_trust"
_HEADER = "mpxla secret "
_FAREWELL_S = 10.0
_HOW_TO_MAKE = (
    "Make one with\n"
    "    export MPXLA_SECRET=$(python3 -c 'import secrets; print(secrets.token_hex(32))')\n"
    "on one host, and give the same value to the processes of all hosts (see docs/security.md)."
)


class Trust(NamedTuple):
    """What the processes of a job have agreed on."""

    key: bytes
    """Known to the ranks of this session only."""
    is_one_host: bool
    """Whether all of them are on one host."""


def agree_on_key(
    store: Store,
    rank: int,
    world_size: int,
    secret: str | None,
    runtime_dir: str | None = None,
    timeout_s: float = 300.0,
) -> Trust:
    """Makes the key of a session. Every rank calls it.

    The secret is what the launcher has given to this process, if anything. A file of rank 0, if one
    is needed, is put into `runtime_dir`, by default the system's.

    Raises:
        ConfigError: Several hosts and no secret.
        PeerFailure: A rank did not come in time.
        RankMismatch: Ranks were given different secrets, or cannot share one in a file.
    """
    board = _Board(store, rank, world_size, timeout_s)
    nonce = secrets.token_hex(32)
    hosts = board.exchange("start", [host_identity(), nonce, secret is not None])
    is_one_host = len({host for host, _, _ in hosts}) == 1
    nonces = [other for _, other, _ in hosts]
    nonces[rank] = nonce  # not what the store says
    file: Path | None = None
    try:
        problem: str | None = None
        if _needs_file(hosts, is_one_host):
            try:
                secret, file = _hand_over(board, rank, runtime_dir)
            except (OSError, ValueError) as error:
                problem = f"{type(error).__name__}: {error}"
        key = _derive(secret or "", nonces)
        _judge(board.exchange("check", [problem, _fingerprint(key)]))
    except (ConfigError, RankMismatch):
        board.part()
        raise
    finally:
        if file is not None:
            remove_secret_file(file)
    return Trust(key, is_one_host)


class _Board:
    """Short notes of all ranks in the store of a session."""

    def __init__(self, store: Store, rank: int, world_size: int, timeout_s: float) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._timeout_s = timeout_s

    def write(self, name: str, value: Any) -> None:
        self._store.set(f"{_PREFIX}/{name}/{self._rank}", json.dumps(value))

    def read(self, name: str, rank: int, timeout_s: float | None = None) -> Any:
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        return json.loads(
            await_note(self._store, f"{_PREFIX}/{name}/{rank}", self._rank, rank, timeout_s)
        )

    def exchange(self, name: str, values: list[Any]) -> list[list[Any]]:
        """What every rank has written; as many values as this rank."""
        self.write(name, values)
        found = [self.read(name, rank) for rank in range(self._world_size)]
        for rank, other in enumerate(found):
            if not isinstance(other, list) or len(other) != len(values):
                raise MpxlaError(
                    f"the store of the launcher holds {str(other)[:80]!r} where rank {rank} "
                    f"describes itself. Start the same version of mpxla on all ranks."
                )
        return found

    def part(self) -> None:
        """Before an error that all ranks raise: rank 0, which may serve the store, goes last."""
        with contextlib.suppress(RuntimeError):
            self.write("part", None)
            if self._rank == 0:
                for rank in range(1, self._world_size):
                    self.read("part", rank, _FAREWELL_S)


def _needs_file(hosts: Sequence[Any], is_one_host: bool) -> bool:
    """Whether rank 0 has to make a secret; the same answer, or error, on every rank."""
    without = [rank for rank, (_, _, has_secret) in enumerate(hosts) if not has_secret]
    if not without:
        return False
    if len(without) < len(hosts):
        raise RankMismatch(
            f"MPXLA_SECRET is set on some ranks but not on ranks {without}. Set it to the same "
            f"value on all ranks, or on none if all are on one host."
        )
    if not is_one_host:
        names = sorted({str(host).partition(" ")[0] for host, _, _ in hosts})
        raise ConfigError(
            f"the ranks of this job are on several hosts ({', '.join(names)}), and MPXLA_SECRET is "
            f"not set: they cannot tell each other from strangers on the network. {_HOW_TO_MAKE}"
        )
    return True


def _hand_over(board: _Board, rank: int, runtime_dir: str | None) -> tuple[str, Path | None]:
    """The secret that rank 0 makes, and on rank 0 its file, which it has to remove later."""
    if rank != 0:
        path = board.read("file", 0)
        if not path:
            raise ValueError("rank 0 could not write it")
        return read_secret_file(Path(str(path))), None
    secret = secrets.token_hex(32)
    try:
        file = create_secret_file(secret, runtime_dir)
    except OSError:
        board.write("file", "")
        raise
    board.write("file", str(file))
    return secret, file


def _derive(secret: str, nonces: Sequence[str]) -> bytes:
    context = json.dumps(["mpxla session key", *nonces]).encode()
    return hmac.digest(secret.encode(), context, hashlib.sha256)


def _fingerprint(key: bytes) -> str:
    return hmac.digest(key, b"mpxla fingerprint", hashlib.sha256).hex()


def _judge(everyone: Sequence[Any]) -> None:
    """Raises the same error on every rank if any two have different keys."""
    for rank, (problem, _) in enumerate(everyone):
        if problem is not None:
            raise RankMismatch(
                f"rank {rank} cannot share a secret with the other ranks in a file ({problem}). "
                f"Set MPXLA_SECRET instead. {_HOW_TO_MAKE}"
            )
    others = [rank for rank, (_, text) in enumerate(everyone) if text != everyone[0][1]]
    if others:
        raise RankMismatch(
            f"ranks {others} have another secret than rank 0. Set MPXLA_SECRET to the same value "
            f"on all ranks."
        )


def create_secret_file(secret: str, runtime_dir: str | None) -> Path:
    """Writes a secret where only this user can read it, in a new folder that is only theirs.

    The folder is in `runtime_dir`, or in the system's temporary one.
    """
    base = runtime_dir if runtime_dir and os.access(runtime_dir, os.W_OK | os.X_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="mpxla-", dir=base))  # mode 0700
    file = folder / "secret"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(file, flags, 0o600), "w") as opened:
        opened.write(_HEADER + secret)
    return file


def remove_secret_file(file: Path) -> None:
    """Removes what `create_secret_file` has made."""
    with contextlib.suppress(OSError):
        file.unlink()
        file.parent.rmdir()


def read_secret_file(file: Path) -> str:
    """Reads what `create_secret_file` has written, and nothing that anybody else could have.

    Raises:
        OSError: It cannot be opened, or is a link.
        ValueError: Folder or file belong to another user or are open to others, or it is no secret.
    """
    _check_private(file.parent, os.lstat(file.parent), stat.S_ISDIR)
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    with os.fdopen(os.open(file, flags)) as opened:
        _check_private(file, os.fstat(opened.fileno()), stat.S_ISREG)
        text = opened.read(1024)
    if not text.startswith(_HEADER):
        raise ValueError(f"{file} holds no secret of mpxla")
    return text.removeprefix(_HEADER)


def _check_private(path: Path, found: os.stat_result, is_kind: Any) -> None:
    is_mine = found.st_uid == os.geteuid() and not stat.S_IMODE(found.st_mode) & 0o077
    if not is_mine or not is_kind(found.st_mode):
        raise ValueError(
            f"{path} is not private to user {os.geteuid()}: owner {found.st_uid}, mode "
            f"{stat.filemode(found.st_mode)}"
        )
