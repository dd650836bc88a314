"""Files that are there completely or not at all, with checksums.

A new file gets a temporary name, is flushed to the disk, and then takes its name in one step. A
checksum covers every byte of a file (CRC-32: against damage, not against forgery; who can write a
file can write its manifest too). Nothing is unpickled here that `weights_only` refuses, unless the
caller says so. This module must not know ranks.
"""

import contextlib
import glob
import io
import os
import pickle
import secrets
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from mpxla.checkpoint.plain_data import find_unsafe, foreign_classes
from mpxla.comm.codec import register
from mpxla.comm.objects import unpicklable
from mpxla.errors import CheckpointError
from mpxla.log import get_logger

__all__ = [
    "FileRecord",
    "check_file",
    "check_zip",
    "is_zip",
    "load_object",
    "remove_stale",
    "replace_file",
    "replace_files",
    "save_object",
    "serialize",
    "sync_folder",
    "write_file",
]

_BLOCK_BYTES = 1 << 20
_WRITING = ".writing"


@register
class FileRecord(NamedTuple):
    """Size and checksum of a file."""

    num_bytes: int
    crc32: int


class _ChecksummedFile:
    """A file for writing that counts and sums what goes through it."""

    def __init__(self, file: BinaryIO):
        self._file = file
        self.num_bytes = 0
        self.crc32 = 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        """Writes all of `data`."""
        view = memoryview(data).cast("B")
        self.crc32 = zlib.crc32(view, self.crc32)
        self.num_bytes += len(view)
        written = 0
        try:
            while written < len(view):
                written += self._file.write(view[written:])
        except OSError as error:
            self.error = error  # torch's writer, which is C++, makes something else of it
            raise
        return len(view)

    def flush(self) -> None:
        """The file has no buffer."""


def write_file(path: Path, write: Callable[[Any], Any]) -> FileRecord:
    """Creates a file and flushes it to the disk; its folder is still to be synced.

    `write` writes the content to the file object that it gets.

    Raises:
        OSError: naming the file.
    """
    with open(path, "xb", buffering=0) as file:
        summed = _ChecksummedFile(file)
        try:
            write(summed)
            os.fsync(file.fileno())
        except Exception as error:
            cause = summed.error or error
            if isinstance(cause, OSError):
                raise OSError(cause.errno, cause.strerror, str(path)) from error
            raise
    return FileRecord(summed.num_bytes, summed.crc32)


def save_object(path: Path, value: Any) -> FileRecord:
    """`torch.save` to a new file, on the disk when it returns."""
    return write_file(path, lambda file: torch.save(value, file))


def serialize(
    value: Any, what: str, is_trusted: bool = False, has_to_load: bool = False, **options: Any
) -> bytes:
    """`torch.save` to memory; tells the user of what loading would refuse.

    Args:
        value: what to save.
        what: where it comes from, for the texts: as the user writes it.
        is_trusted: whether loading will not refuse anything.
        has_to_load: whether it is an error, not a warning, if loading would refuse it.
        **options: of `torch.save`.

    Raises:
        CheckpointError: it cannot be pickled, or would not be loaded; names the entry.
    """
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer, **options)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        place, part = unpicklable(value, what)
        raise CheckpointError(
            f"{place} is {_kind(part)} and cannot be saved: {error}. {_PLAIN}"
        ) from error
    data, unsafe = buffer.getvalue(), list[str]()
    with contextlib.suppress(Exception):  # a foreign pickle_module cannot be looked into
        unsafe = [] if is_trusted else foreign_classes(io.BytesIO(data))[1]
    if unsafe:
        place, part = find_unsafe(value, what)
        text = (
            f"{place} is {_kind(part)}. Loading it could run code ({', '.join(sorted(unsafe))}), "
            f"so it is refused when the checkpoint is loaded. {_PLAIN} If you trust everybody who "
            f"can write your checkpoints, set the key trust_checkpoints: True (with the launcher "
            f"mpxla.compat, --trust-checkpoints)."
        )
        if has_to_load:
            raise CheckpointError(text)
        get_logger().warning("%s", text)
    return data


_PLAIN = (
    "Keep plain data in its place: numbers, strings, tensors, NumPy's values, dataclasses, and "
    "lists, tuples and dicts of them; of a scheduler or a sampler, what its state_dict() returns."
)


def _kind(value: Any) -> str:
    kind = type(value)
    if kind.__name__ in ("function", "builtin_function_or_method", "method"):
        return f"the function {getattr(value, '__qualname__', '?')}"
    name = kind.__qualname__
    return f"a {name}" if kind.__module__ == "builtins" else f"a {kind.__module__}.{name}"


def replace_file(path: Path, data: bytes) -> None:
    """Gives a file this content, in one step: a reader sees the old one or the new one."""
    replace_files({path: lambda file: file.write(data)})


def replace_files(contents: Mapping[Path, Callable[[Any], Any]]) -> None:
    """As `replace_file`, for files of one folder and what writes their contents.

    First all new files are on the disk, then they take their names.

    Raises:
        OSError: naming the file; the old ones are as they were.
    """
    # Several ranks may write one file at once, as scripts do that save on all dp_rank 0 ranks; in
    # containers on several hosts they may even have the same process number.
    ending = f"{os.getpid()}-{secrets.token_hex(4)}{_WRITING}"
    temporary = {path: path.with_name(f".{path.name}.{ending}") for path in contents}
    try:
        for path, write in contents.items():
            write_file(temporary[path], write)
        for path in contents:
            os.replace(temporary[path], path)
    except BaseException:
        for path in temporary.values():
            with contextlib.suppress(OSError):
                path.unlink()
        raise
    sync_folder(next(iter(contents)).parent)


def remove_stale(path: Path) -> None:
    """Removes what killed processes left that were replacing a file."""
    for stale in path.parent.glob(f".{glob.escape(path.name)}.*{_WRITING}"):
        stale.unlink(missing_ok=True)


def sync_folder(path: Path) -> None:
    """Flushes the names in a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_file(path: Path, expected: FileRecord) -> None:
    """Reads a file and compares it with its record.

    Raises:
        CheckpointError: it is missing, shorter, longer or altered; names it.
    """
    try:
        num_bytes = path.stat().st_size
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} is missing, which the checkpoint needs; use another checkpoint, or bring the "
            f"file back."
        ) from error
    if num_bytes != expected.num_bytes:
        raise CheckpointError(
            f"{path} has {num_bytes} bytes instead of {expected.num_bytes}: it was truncated or "
            f"altered. Use another checkpoint."
        )
    crc32 = 0
    with open(path, "rb", buffering=0) as file:
        while block := file.read(_BLOCK_BYTES):
            crc32 = zlib.crc32(block, crc32)
    if crc32 != expected.crc32:
        raise CheckpointError(
            f"{path} was altered since it was written (its checksum is {crc32:08x} instead of "
            f"{expected.crc32:08x}). Use another checkpoint."
        )


def is_zip(path: Path) -> bool:
    """Whether a file is in the format that torch writes since version 1.6."""
    with open(path, "rb") as file:
        return file.read(2) == b"PK"


def check_zip(path: Path) -> None:
    """Checks a file of `torch.save` by the checksums inside; files of other formats pass.

    Raises:
        CheckpointError: it was truncated or altered; names it.
    """
    if not is_zip(path):
        return
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except (zipfile.BadZipFile, EOFError, zlib.error, OSError) as error:
        raise CheckpointError(
            f"{path} was truncated or altered since it was written ({error})."
        ) from error
    if damaged is not None:
        raise CheckpointError(f"{path} was altered since it was written (its part {damaged}).")


def load_object(path: Path, weights_only: bool = True, **options: Any) -> Any:
    """`torch.load`, refusing to run code unless `weights_only` is False.

    Raises:
        CheckpointError: the file is missing, damaged, or holds objects whose loading runs code.
    """
    options.setdefault("map_location", "cpu")
    try:
        with torch.serialization.safe_globals(_safe_classes(path) if weights_only else []):
            return torch.load(path, weights_only=weights_only, **options)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist; check the path and the tag.") from error
    except pickle.UnpicklingError as error:
        if "GLOBAL" not in str(error) and "Unsupported class" not in str(error):
            raise CheckpointError(
                f"{path} cannot be read, it may be truncated or altered: {_culprit(error)}"
            ) from error
        raise CheckpointError(
            f"{path} holds objects whose loading could run code, so it was not loaded "
            f"({_culprit(error)}). If you trust whoever wrote the file, pass weights_only=False, "
            f"or set the key trust_checkpoints: True (with the launcher mpxla.compat, "
            f"--trust-checkpoints)."
        ) from error
    except (RuntimeError, EOFError) as error:
        raise CheckpointError(
            f"{path} cannot be read, it may be truncated or altered: {_first_line(error)}"
        ) from error


def _safe_classes(path: Path) -> list[Any]:
    try:
        return foreign_classes(path)[0]
    except Exception:  # no file of torch.save: loading says so
        return []


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _culprit(error: BaseException) -> str:
    for line in str(error).splitlines():
        if "GLOBAL" in line or "Unsupported" in line:
            return line.strip()
    return _first_line(error)
