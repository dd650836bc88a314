"""Tells the script's own code from that of libraries, and finds the script's line that is running.

Only the script sees CUDA names mapped: torch itself and installed packages ask the same questions
for their own ends, and have to be told the truth.
"""

import functools
import linecache
import sys
import sysconfig
from pathlib import Path
from types import FrameType

__all__ = ["at_script_line", "is_script_code"]

_PACKAGE = Path(__file__).resolve().parents[1]
_LIBRARIES = tuple(
    f"{Path(sysconfig.get_path(kind)).resolve()}/" for kind in ("stdlib", "purelib", "platlib")
)


@functools.cache
def is_script_code(filename: str) -> bool:
    """Whether a file belongs to the user: not to Python, to installed packages or to mpxla."""
    if filename.startswith("<frozen"):
        return False
    path = Path(filename).resolve()
    if path.is_relative_to(_PACKAGE):
        return path.is_relative_to(_PACKAGE / "tests")
    return not str(path).startswith(_LIBRARIES)


def at_script_line() -> str:
    """`file:line: source` of the script's line that is running."""
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        filename = frame.f_code.co_filename
        if is_script_code(filename):
            source = linecache.getline(filename, frame.f_lineno).strip()
            return f"{filename}:{frame.f_lineno}: {source}"
        frame = frame.f_back
    return "the script"
