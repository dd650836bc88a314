"""`python -m mpxla cache`: compiled programs as one file, for other machines.

A job on fresh machines finds its programs compiled if the file of an earlier one is loaded first.
"""

import argparse
import re
import tarfile
from pathlib import Path, PurePosixPath
from typing import Any

from mpxla.env import read_environment
from mpxla.errors import MpxlaError

__all__ = ["add_parser"]

_NAME = re.compile(r"[\w.-]+-(cache|atime)")
"""Of a program in jax's cache, and of the time of its last use."""


def add_parser(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "cache",
        help="pack or unpack compiled programs",
        description="Packs the compiled programs of device: pjrt into a file, or unpacks them: a "
        "job on another machine of the same kind then compiles nothing. Unpack only files that "
        "you trust; programs are code.",
    )
    parser.add_argument("action", choices=("save", "load"))
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument(
        "--folder", type=Path, metavar="DIR", help="compile_cache, if it is not the default"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Packs or unpacks, and says how many programs."""
    folder = options.folder or Path(read_environment().cache_dir, "mpxla", "programs")
    act = _save if options.action == "save" else _load
    try:
        count = act(folder.expanduser(), options.file)
    except (OSError, tarfile.TarError) as error:
        raise MpxlaError(f"cache {options.action} {options.file}: {error}") from error
    words = "into" if options.action == "save" else "from"
    print(f"{count} programs of {folder.expanduser()} {words} {options.file}")


def _save(folder: Path, file: Path) -> int:
    """Ranks may write at the same time: what is not finished has no time of use, and is left."""
    times = sorted(folder.glob("*/*-atime"))
    pairs = [(time.with_name(time.name.removesuffix("-atime") + "-cache"), time) for time in times]
    pairs = [pair for pair in pairs if pair[0].exists()]
    if not pairs:
        raise MpxlaError(
            f"{folder} has no compiled programs. Train with device: pjrt first, or name the folder "
            f"of compile_cache by --folder."
        )
    part = file.with_name(file.name + ".part")
    with tarfile.open(part, "w") as archive:  # programs are compressed already
        for path in (path for pair in pairs for path in pair):
            archive.add(path, path.relative_to(folder).as_posix(), recursive=False)
    part.replace(file)
    return len(pairs)


def _load(folder: Path, file: Path) -> int:
    """Adds what is not there; nothing of the archive lands anywhere else."""
    count = 0
    with tarfile.open(file) as archive:
        for member in archive:
            path = PurePosixPath(member.name)
            is_program = len(path.parts) == 2 and _NAME.fullmatch(path.name)
            if not is_program or not member.isfile() or path.parts[0] in (".", ".."):
                raise MpxlaError(
                    f"{file} holds {member.name!r}, which is no compiled program. Load files that "
                    f"`python -m mpxla cache save` has written."
                )
            source, target = archive.extractfile(member), folder / path
            if target.exists() or source is None:
                continue
            for place in (folder, target.parent):  # the mode is not that of parents
                place.mkdir(parents=True, exist_ok=True, mode=0o700)
            part = target.with_name(target.name + ".part")
            part.write_bytes(source.read())
            part.replace(target)  # ranks may read at the same time
            count += path.name.endswith("-cache")
    return count
