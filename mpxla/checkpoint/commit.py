"""A partial checkpoint becomes visible in one step, after everything in it is on the disk.

    prepare   rank 0 removes what interrupted attempts left, and makes the folder `.writing`
    write     every rank writes its files there, flushes them and tells their checksums
    commit    rank 0 writes the manifest, renames the folder, and then points `newest` at it

Whoever is killed at any of these moments leaves the earlier checkpoints as they were. If anything
fails on any rank, all ranks raise, and the folder is removed. This module must not know models.
"""

import contextlib
import json
import os
import shutil
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mpxla.checkpoint.files import (
    FileRecord,
    check_file,
    remove_stale,
    replace_file,
    sync_folder,
    write_file,
)
from mpxla.checkpoint.layout import (
    MANIFEST,
    NEWEST,
    full_file,
    hidden_folder,
    leftovers,
    manifests,
    partial_folder,
    writing_folder,
)
from mpxla.checkpoint.together import Exchange, together
from mpxla.comm.codec import register
from mpxla.errors import CheckpointError
from mpxla.log import get_logger

__all__ = [
    "Written",
    "abandon",
    "check_share",
    "find_partial",
    "partial_tags",
    "prepare",
    "read_manifest",
    "record_newest",
    "write_partial",
]

FORMAT = 1


@register
class Written(NamedTuple):
    """What one rank wrote."""

    files: dict[str, FileRecord]
    """By name in the folder."""
    content: dict[str, Any]
    """What the manifest says about it; JSON-able."""


def prepare(path: Path, tag: str, token: str) -> None:
    """Makes the folder to write to; for rank 0, before any rank writes.

    The token is of this attempt; those of other jobs that save to the same folder are different.

    Raises:
        OSError: the folder cannot be made.
    """
    path.mkdir(parents=True, exist_ok=True)
    for other, state, folder in list(leftovers(path)):
        final = partial_folder(path, other)
        if state == "replaced" and not final.exists():  # killed between the renames of a commit
            os.rename(folder, final)
        else:
            _remove(folder)
    remove_stale(path / NEWEST)
    writing_folder(path, tag, token).mkdir()
    sync_folder(path)


def abandon(path: Path, tag: str, token: str) -> None:
    """Removes what an attempt to save has written so far; for rank 0."""
    shutil.rmtree(writing_folder(path, tag, token), ignore_errors=True)


def write_partial(
    path: Path,
    tag: str,
    token: str,
    exchange: Exchange,
    write: Callable[[Path], Written],
    facts: Mapping[str, Any],
    num_kept: int | None,
) -> None:
    """Writes and commits a partial checkpoint; every rank must call it, after `prepare`.

    `write` writes this rank's files to the folder that it gets; `facts`, of rank 0, go into the
    manifest; so many partial checkpoints are kept, or all (None).

    Raises:
        CheckpointError: writing failed on some rank; raised on all, and nothing has changed.
    """
    what = f"saving checkpoint {tag!r} in {path}"
    folder = writing_folder(path, tag, token)

    def write_own() -> Written:
        try:
            return write(folder)
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{folder} is not there, or was removed meanwhile; all ranks need one shared "
                f"folder, and every job one of its own"
            ) from error

    def commit() -> None:
        if exchange.rank == 0:
            _commit(path, tag, folder, parts, facts)

    try:
        parts = together(exchange, what, write_own)
        together(exchange, what, commit)
    except CheckpointError:
        if exchange.rank == 0:
            abandon(path, tag, token)
        raise
    if exchange.rank == 0 and num_kept is not None:
        _prune(path, tag, num_kept)


def _commit(
    path: Path, tag: str, folder: Path, parts: list[Written], facts: Mapping[str, Any]
) -> None:
    final = partial_folder(path, tag)
    files = {name: record for part in parts for name, record in part.files.items()}
    for name, record in files.items():
        if not (folder / name).exists() or (folder / name).stat().st_size != record.num_bytes:
            raise CheckpointError(
                f"{folder / name} was written by another rank but is not there for rank 0; all "
                f"ranks need one shared folder"
            )
    body = {
        **facts,
        "format": FORMAT,
        "tag": tag,
        "files": files,
        "parts": [part.content for part in parts],
        "saved_at_s": time.time(),
    }
    text = json.dumps(body)
    data = json.dumps({"crc32": zlib.crc32(text.encode()), "body": text}).encode()
    write_file(folder / MANIFEST, lambda file: file.write(data))
    sync_folder(folder)
    replaced = hidden_folder(path, tag, "replaced")
    if final.exists():
        os.rename(final, replaced)
    os.rename(folder, final)
    sync_folder(path)
    record_newest(path, tag)
    _remove(replaced)


def record_newest(path: Path, tag: str) -> None:
    """Makes a checkpoint the newest."""
    replace_file(path / NEWEST, f"{tag}\n".encode())


def _prune(path: Path, tag: str, num_kept: int) -> None:
    others = [other for other in partial_tags(path) if other != tag]
    for old in others[: max(0, len(others) - num_kept + 1)]:
        removed = hidden_folder(path, old, "removed")
        try:
            _remove(removed)
            os.rename(partial_folder(path, old), removed)
            shutil.rmtree(removed)
        except OSError as error:
            get_logger().warning(
                "the checkpoint %r in %s, which is no longer kept, cannot be deleted: %s. Delete "
                "it by hand.",
                old,
                path,
                error,
            )


def _remove(folder: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(folder)


def partial_tags(path: Path) -> list[str]:
    """Tags of the complete partial checkpoints, oldest first.

    By what their manifests say: copying a folder changes the times of its files.
    """
    found = []
    for tag, file in manifests(path).items():
        try:
            saved_at_s = float(read_manifest(file.parent, tag)["saved_at_s"])
        except (CheckpointError, OSError):
            saved_at_s = file.stat().st_mtime
        found.append((saved_at_s, tag))
    return [tag for _, tag in sorted(found)]


def find_partial(path: Path, tag: str) -> Path:
    """Folder of a complete partial checkpoint.

    Raises:
        CheckpointError: there is none of that tag; names those that are there.
    """
    for folder in (partial_folder(path, tag), hidden_folder(path, tag, "replaced")):
        if folder.is_dir():
            return folder
    there = ", ".join(partial_tags(path)) or "none"
    full = (
        " There is a full one of that name: pass partial=False."
        if full_file(path, tag).is_file()
        else ""
    )
    raise CheckpointError(
        f"there is no partial checkpoint {tag!r} in {path}. Its partial checkpoints: {there}.{full}"
    )


def read_manifest(folder: Path, tag: str) -> dict[str, Any]:
    """Reads and checks the manifest of a partial checkpoint.

    Raises:
        CheckpointError: it is missing, damaged, of another format or of another tag.
    """
    file = folder / MANIFEST
    try:
        sealed = json.loads(file.read_bytes())
        text = sealed["body"]
        is_intact = zlib.crc32(text.encode()) == sealed["crc32"]
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{file} is missing, so {folder} is no complete checkpoint; use another one."
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{file} was truncated or altered; use another checkpoint."
        ) from error
    if not is_intact:
        raise CheckpointError(f"{file} was altered since it was written; use another checkpoint.")
    body = json.loads(text)
    if body["format"] != FORMAT:
        raise CheckpointError(
            f"{file} has format {body['format']}, and this version of mpxla reads {FORMAT}; load "
            f"it with the version that wrote it."
        )
    if body["tag"] != tag:
        raise CheckpointError(
            f"{file} belongs to the checkpoint {body['tag']!r}, not to {tag!r}; the folders were "
            f"mixed up. Use another checkpoint."
        )
    body["files"] = {name: FileRecord(*record) for name, record in body["files"].items()}
    return body


def check_share(folder: Path, manifest: Mapping[str, Any], rank: int, world_size: int) -> None:
    """Checks this rank's share of the files; together, the ranks check all.

    Raises:
        CheckpointError: a file is missing, truncated or altered; names it.
    """
    files = sorted(manifest["files"].items(), key=lambda item: (-item[1].num_bytes, item[0]))
    for name, record in files[rank::world_size]:
        check_file(folder / name, record)
