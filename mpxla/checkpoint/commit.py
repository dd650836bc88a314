"""A partial checkpoint becomes visible in one step, after everything in it is on the disk.

    prepare   rank 0 removes what an interrupted attempt left, and makes the folder `.writing`
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
    hidden_folder,
    partial_folder,
    partial_tags,
)
from mpxla.checkpoint.together import Exchange, together
from mpxla.errors import CheckpointError
from mpxla.log import get_logger

__all__ = [
    "Written",
    "abandon",
    "check_share",
    "find_partial",
    "prepare",
    "read_manifest",
    "record_newest",
    "write_partial",
]

FORMAT = 1


class Written(NamedTuple):
    """What one rank wrote."""

    files: dict[str, FileRecord]
    """By name in the folder."""
    content: dict[str, Any]
    """What the manifest says about it; JSON-able."""


def prepare(path: Path, tag: str) -> None:
    """Makes the folder to write to; for rank 0, before any rank writes.

    Raises:
        OSError: the folder cannot be made.
    """
    path.mkdir(parents=True, exist_ok=True)
    final, replaced = partial_folder(path, tag), hidden_folder(path, tag, "replaced")
    if replaced.exists() and not final.exists():  # killed between the two renames of a replacement
        os.rename(replaced, final)
    for state in ("writing", "replaced", "removed"):
        _remove(hidden_folder(path, tag, state))
    remove_stale(path / NEWEST)
    hidden_folder(path, tag, "writing").mkdir()
    sync_folder(path)


def abandon(path: Path, tag: str) -> None:
    """Removes what an attempt to save has written so far; for rank 0."""
    shutil.rmtree(hidden_folder(path, tag, "writing"), ignore_errors=True)


def write_partial(
    path: Path,
    tag: str,
    exchange: Exchange,
    write: Callable[[Path], Written],
    facts: Mapping[str, Any],
    num_kept: int | None,
) -> None:
    """Writes and commits a partial checkpoint; every rank must call it, after `prepare`.

    Args:
        path: folder of the checkpoints.
        tag: name of this one.
        exchange: between all ranks.
        write: writes this rank's files to the folder that it gets.
        facts: of the manifest, from rank 0.
        num_kept: how many partial checkpoints to keep; None for all.

    Raises:
        CheckpointError: writing failed on some rank; raised on all, and nothing has changed.
    """
    what = f"saving checkpoint {tag!r} in {path}"
    folder = hidden_folder(path, tag, "writing")
    try:
        parts = together(exchange, what, lambda: write(folder)._asdict())

        def commit() -> None:
            if exchange.rank == 0:
                _commit(path, tag, parts, facts)

        together(exchange, what, commit)
    except CheckpointError:
        if exchange.rank == 0:
            abandon(path, tag)
        raise
    if exchange.rank == 0 and num_kept is not None:
        _prune(path, tag, num_kept)


def _commit(path: Path, tag: str, parts: list[dict[str, Any]], facts: Mapping[str, Any]) -> None:
    folder, final = hidden_folder(path, tag, "writing"), partial_folder(path, tag)
    files = {name: FileRecord(*record) for part in parts for name, record in part["files"].items()}
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
        "parts": [part["content"] for part in parts],
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


def find_partial(path: Path, tag: str) -> Path:
    """Folder of a complete partial checkpoint.

    Raises:
        CheckpointError: there is none of that tag; names those that are there.
    """
    for folder in (partial_folder(path, tag), hidden_folder(path, tag, "replaced")):
        if folder.is_dir():
            return folder
    there = ", ".join(partial_tags(path)) or "none"
    raise CheckpointError(
        f"there is no partial checkpoint {tag!r} in {path}. Its partial checkpoints: {there}."
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
