"""What a thread of this process is in, in the user's words, found out by another one.

`sys._current_frames()` would tell as well, but whoever holds a frame of a running function may be
the last to hold its variables, and torch's tensors do not survive being dropped by another thread
(seen as "'FakeTensor' object has no attribute 'fake_mode'" in the middle of a capture). So the
stacks are read as text, which holds nothing.

The interpreter writes it for one thread. `faulthandler` would write it for all, of which one may be
in the making: threads of XLA enter Python to free what they have of PyTorch, and are known a moment
before they can be read (Python 3.11; a segmentation fault of a job on jax).
"""

import ctypes
import faulthandler
import re
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from mpxla.user_lines import is_script_code

__all__ = ["STEP", "Place", "Whereabouts"]

STEP = "a step function"
"""The call of a step function, whose name no stack tells."""

_write_stack: Any = getattr(ctypes.PyDLL(None), "_Py_DumpTraceback", None)
"""Not public: writes the stack of one thread, of which it is given the state, to a descriptor."""
if _write_stack is not None:
    _write_stack.argtypes, _write_stack.restype = (ctypes.c_int, ctypes.c_void_p), None

_PACKAGE = str(Path(__file__).parents[1])
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)')
# File of mpxla -> how users write a function of it.
_SPELLINGS = {
    "api.py": "smp.{}",
    "session.py": "smp.{}",
    "checkpoint/load.py": "smp.{}",
    "checkpoint/save.py": "smp.{}",
    "checkpoint/single.py": "smp.{}",
    "parallel/gradients/norms.py": "smp.{}",
    "parallel/gradients/torch_clipping.py": "torch.nn.utils.clip_grad_norm_",
    "parallel/model.py": "model.{}()",
    "parallel/contents.py": "model.{}()",
    "parallel/optimizer.py": "optimizer.{}()",
    "runtime/step.py": STEP,
}
_OTHERWISE = {
    "model.__init__()": "smp.DistributedModel",
    "optimizer.__init__()": "smp.DistributedOptimizer",
    "smp.shutdown_if_started": "smp.shutdown",
}
_BYTES = re.compile(r"(\w+ of \w+\[[^]]*\]|barrier) with (?=rank)")


class Place(NamedTuple):
    """Where a thread is.

    Attributes:
        call: mpxla's function that the user's line has called, as users write it; empty if it is in
            none.
        line: `file:line function` of the user's line, or of the innermost one.
    """

    call: str
    line: str

    def __str__(self) -> str:
        return f"{self.call} at {self.line}" if self.call else self.line

    def waits_for(self, what: str) -> str:
        """A communication in words: of a call that users know, only what they could not guess."""
        return _BYTES.sub("", what) if self.call else what


class Whereabouts:
    """Looks after one thread; better the one that makes it."""

    def __init__(self, thread: threading.Thread) -> None:
        self._thread = thread
        is_own = thread is threading.current_thread()
        self._state = _own_state() if is_own and _write_stack is not None else None

    def find(self) -> Place:
        """The user's line that the thread is in, or the innermost one; empty if it has ended."""
        called, innermost = "", None
        for frame in self._stack():
            if innermost is None:
                innermost = frame
            if is_script_code(frame["file"]):
                return Place(called, _line(frame))
            called = _spelled(frame) or called
        return Place(called, _line(innermost) if innermost is not None else "")

    def _stack(self) -> Iterator[re.Match[str]]:
        """Frames of the thread, the innermost first."""
        with tempfile.TemporaryFile() as file:
            if self._state is None:
                faulthandler.dump_traceback(file)
            elif self._thread.is_alive():
                _write_stack(file.fileno(), self._state)
            file.seek(0)
            text = file.read().decode(errors="replace")
        if self._state is None:
            _, _, text = text.partition(f" 0x{self._thread.ident or 0:016x} ")
        for line in text.splitlines()[1:]:
            frame = _FRAME.fullmatch(line)
            if frame is None:  # the next thread
                return
            yield frame


def _own_state() -> int:
    """Address of the interpreter's state of the calling thread."""
    get = ctypes.PyDLL(None).PyThreadState_Get
    get.restype = ctypes.c_void_p
    return get()


def _line(frame: re.Match[str]) -> str:
    return f"{Path(frame['file']).name}:{frame['line']} {frame['name']}"


def _spelled(frame: re.Match[str]) -> str:
    """mpxla's public function that a frame is, as users write it; empty if it is something else."""
    file, name = frame["file"], frame["name"]
    if not file.startswith(f"{_PACKAGE}/"):
        return ""
    spelling = _SPELLINGS.get(file.removeprefix(f"{_PACKAGE}/"), "")
    if spelling == STEP:
        return STEP if name == "__call__" else ""
    spelled = spelling.format(name)
    return _OTHERWISE.get(spelled, "" if name.startswith("_") else spelled)
