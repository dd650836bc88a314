"""The line that a thread of this process is in, found out by another one.

`sys._current_frames()` would tell as well, but whoever holds a frame of a running function may be
the last to hold its variables, and torch's tensors do not survive being dropped by another thread
(seen as "'FakeTensor' object has no attribute 'fake_mode'" in the middle of a capture). So the
stacks are read as text, which holds nothing.
"""

import faulthandler
import re
import sysconfig
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

__all__ = ["Whereabouts"]

_PACKAGE = str(Path(__file__).parents[1])
_LIBRARIES = (
    _PACKAGE,
    "<",
    *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")),
)
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)')


class Whereabouts:
    """Looks after one thread."""

    def __init__(self, thread: threading.Thread) -> None:
        """Looks nowhere yet.

        Args:
            thread: whose place is asked for.
        """
        self._thread = thread

    def find(self) -> str:
        """The user's line that the thread is in, or the innermost one; empty if it has ended."""
        lines = list(self._stack())
        users = [line for line in lines if _is_users(line["file"])]
        for line in users[:1] or lines[:1]:
            return f"{Path(line['file']).name}:{line['line']} {line['name']}"
        return ""

    def _stack(self) -> Iterator[re.Match[str]]:
        """Frames of the thread, the innermost first."""
        with tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file)
            file.seek(0)
            text = file.read().decode(errors="replace")
        _, _, rest = text.partition(f" 0x{self._thread.ident or 0:016x} ")
        for line in rest.splitlines()[1:]:
            frame = _FRAME.fullmatch(line)
            if frame is None:  # the next thread
                return
            yield frame


def _is_users(filename: str) -> bool:
    """Whether a file belongs to the script; mpxla's own tests play that part as well."""
    return not filename.startswith(_LIBRARIES) or filename.startswith(f"{_PACKAGE}/tests/")
