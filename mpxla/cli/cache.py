"""`python -m mpxla cache`: what starts of jobs leave on disk as one file, for other machines.

A job on fresh machines finds its programs compiled if the file of an earlier one is loaded first.
"""

import argparse
import re
import tarfile
from pathlib import Path, PurePosixPath
from typing import Any

from mpxla.env import read_environment
from mpxla.errors import MpxlaError
from mpxla.kept import SUFFIX

__all__ = ["add_parser"]

_NAME = re.compile(rf"\w+{re.escape(SUFFIX)}")


def add_parser(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "cache",
        help="pack or unpack compiled programs",
        description="Packs what jobs have left in the folder of compile_cache, or unpacks it: "
        "compiled programs of device: pjrt, and how steps are cut and lowered. A job on another "
        "machine of the same kind then compiles nothing. Unpack only files that you trust: "
        "programs are code.",
    )
    parser.add_argument("action", choices=("save", "load"))
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument(
        "--folder", type=Path, metavar="DIR", help="compile_cache, if it is not the default"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Packs or unpacks, and says how many files."""
    folder = options.folder or Path(read_environment().cache_dir, "mpxla", "programs")
    act = _save if options.action == "save" else _load
    try:
        count = act(folder.expanduser(), options.file)
    except (OSError, tarfile.TarError) as error:
        raise MpxlaError(f"cache {options.action} {options.file}: {error}") from error
    words = "into" if options.action == "save" else "from"
    print(f"{count} files of {folder.expanduser()} {words} {options.file}")


def _save(folder: Path, file: Path) -> int:
    files = sorted(folder.glob(f"*/*{SUFFIX}"))
    if not files:
        raise MpxlaError(
            f"{folder} has nothing in it. Train first, or name the folder of compile_cache by "
            f"--folder."
        )
    part = file.with_name(file.name + ".part")
    with tarfile.open(part, "w") as archive:  # they are compressed already
        for path in files:
            archive.add(path, path.relative_to(folder).as_posix(), recursive=False)
    part.replace(file)
    return len(files)


def _load(folder: Path, file: Path) -> int:
    """Adds what is not there; nothing of the archive lands anywhere else."""
    count = 0
    with tarfile.open(file) as archive:
        for member in archive:
            path = PurePosixPath(member.name)
            is_kept = len(path.parts) == 2 and _NAME.fullmatch(path.name)
            if not is_kept or not member.isfile() or path.parts[0] in (".", ".."):
                raise MpxlaError(
                    f"{file} holds {member.name!r}, which is no file of a job. Load files that "
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
            count += 1
    return count
