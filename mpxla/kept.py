"""What a start of a job leaves on disk for the next one: values by what they follow from.

A key is a hash of everything that a value depends on, this library's own code among it, so a value
is right or not found. Ranks read and write at once: files appear whole, under their names. What was
used least recently goes when the folder grows beyond `MAX_BYTES`.
"""

import contextlib
import functools
import hashlib
import os
import platform
import threading
import time
import zlib
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

import mpxla
from mpxla.log import get_logger

__all__ = ["MAX_BYTES", "SUFFIX", "Kept", "key_of", "kind_of_processor", "open_kept"]

MAX_BYTES = 4 * 2**30
"""Of one folder."""

SUFFIX = ".kept"
"""Of the names of files."""
_PART = ".part"
_PART_AGE_S = 3600.0
"""Older ones are of processes that were killed."""
_DIGEST_BYTES = 32
_CHECKED_EVERY = 16
"""How many values are added between two looks at the size of the folder."""

_Value = TypeVar("_Value")


class Kept:
    """A folder of values, or none.

    Args:
        folder: is there; None keeps nothing.

    Attributes:
        num_found: values that were there.
        num_added: values that were put there.
    """

    def __init__(self, folder: Path | None = None):
        self._folder = folder
        self.num_found = 0
        self.num_added = 0

    def __bool__(self) -> bool:
        return self._folder is not None

    def recall(
        self,
        key: str | None,
        make: Callable[[], _Value],
        write: Callable[[_Value], bytes],
        read: Callable[[bytes], _Value],
    ) -> _Value:
        """What an earlier start has made, or what is made now and kept for later ones.

        Args:
            key: what it follows from; None if that is not known.
            make: makes it.
            write: writes it down. What cannot be written is not kept.
            read: reads what `write` has written. What cannot be read is made anew.
        """
        found = None if key is None else self.get(key)
        if found is not None:
            try:
                return read(found)
            except Exception as error:  # unpickling and XLA raise anything
                text = "what an earlier start has kept cannot be read, and is made anew: %r"
                get_logger().warning(text, error)
        made = make()
        if key is not None and self:
            try:
                self.put(key, write(made))
            except Exception as error:  # a graph may hold anything, and a plugin raises anything
                get_logger().debug("a value is not kept: %r", error)
        return made

    def get(self, key: str) -> bytes | None:
        """The value of a key, if it is there and whole; a torn file goes."""
        if self._folder is None:
            return None
        path = self._folder / (key + SUFFIX)
        try:
            content = path.read_bytes()
        except OSError:
            return None
        digest, packed = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        is_whole = hashlib.sha256(packed).digest() == digest
        with contextlib.suppress(OSError):
            if is_whole:
                os.utime(path)
            else:
                path.unlink()
        if not is_whole:
            return None
        self.num_found += 1
        return zlib.decompress(packed)

    def put(self, key: str, value: bytes) -> None:
        """Keeps a value; a folder that cannot be written any more is left alone, with a warning."""
        if self._folder is None:
            return
        path = self._folder / (key + SUFFIX)
        part = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}{_PART}")
        packed = zlib.compress(value, level=1)
        try:
            part.write_bytes(hashlib.sha256(packed).digest() + packed)
            part.replace(path)
            if self.num_added % _CHECKED_EVERY == 0:
                _make_room(self._folder)
        except OSError as error:
            _warn(self._folder, error)
            with contextlib.suppress(OSError):
                part.unlink()
            self._folder = None
        self.num_added += 1


def open_kept(folder: str, kind: str) -> Kept:
    """A folder for values of one kind of machine.

    Args:
        folder: for all kinds of machines; made if need be, for this user only. "" keeps nothing.
        kind: of machine.

    Returns:
        What keeps values there; nothing if it cannot be used, with a log line that says why.
    """
    if not folder:
        return Kept()
    place = Path(folder) / kind
    try:
        place = place.expanduser()
        for part in (place.parent, place):  # the mode is not that of parents
            part.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not os.access(place, os.W_OK):
            raise PermissionError("it is not writable")
        for path in place.glob(f"*{_PART}"):
            with contextlib.suppress(FileNotFoundError):  # another process has written it
                if time.time() - path.stat().st_mtime > _PART_AGE_S:
                    path.unlink(missing_ok=True)
    except (OSError, RuntimeError) as error:  # a user without a home directory
        _warn(place, error)
        return Kept()
    return Kept(place)


def key_of(*parts: str) -> str:
    """A key for what follows from texts and from the code of this library and of PyTorch."""
    found = hashlib.sha256(_stamp())
    for part in parts:
        found.update(hashlib.sha256(part.encode()).digest())
    return found.hexdigest()


@functools.cache
def kind_of_processor() -> str:
    """A name for processors with the same instructions; XLA's code for another one fails."""
    found = {platform.machine(), platform.processor()}
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        found |= {line for line in lines if line.startswith(("flags", "Features", "model name"))}
    return "cpu-" + hashlib.sha256("".join(sorted(found)).encode()).hexdigest()[:12]


@functools.cache
def _stamp() -> bytes:
    """Of the code: another version, or a changed file, and nothing is found."""
    root = Path(mpxla.__file__).parent
    found = hashlib.sha256(f"{mpxla.__version__} {version('torch')}".encode())
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in ("tests", "__pycache__"))
        for name in sorted(name for name in files if name.endswith(".py")):
            path = os.path.join(folder, name)
            found.update(os.path.relpath(path, root).encode())
            with open(path, "rb") as file:
                found.update(file.read())
    return found.digest()


def _make_room(folder: Path) -> None:
    """Removes what was used least recently, if the folder is too large."""
    files: list[tuple[float, int, str]] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if not entry.name.endswith(SUFFIX):
                continue  # is being written
            with contextlib.suppress(FileNotFoundError):  # another rank makes room as well
                state = entry.stat()
                files.append((state.st_mtime, state.st_size, entry.path))
    total = sum(size for _, size, _ in files)
    for _, size, path in sorted(files):
        if total <= MAX_BYTES:
            break
        Path(path).unlink(missing_ok=True)
        total -= size


def _warn(place: Path, error: Exception) -> None:
    get_logger().warning(
        "compiled programs are not kept: %s cannot be used (%s). Set compile_cache to a folder "
        'that can be written, or to "".',
        place,
        error,
    )
