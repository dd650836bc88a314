"""Tells the user's own files from those of libraries, and finds the user's line that is running.

This module must not know what the user's code does, nor torch.
"""

import functools
import importlib.util
import linecache
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path

__all__ = [
    "at_script_line",
    "is_model_code",
    "is_script_code",
    "line_in",
    "script_line_of",
    "script_place_of",
]

_PACKAGE = Path(__file__).resolve().parent
_INSTALLED = frozenset(("site-packages", "dist-packages"))
"""Folders of installed packages, wherever they are: those of the user, of the system."""

_TYPED = ("<stdin>", "<ipython-input-", "<python-input-")
"""What Python, IPython and Python 3.13 call code that is typed in; notebooks name files."""


def _folders(*kinds: str) -> tuple[str, ...]:
    return tuple(f"{Path(sysconfig.get_path(kind)).resolve()}/" for kind in kinds)


_PYTHON, _PACKAGES = _folders("stdlib", "platstdlib"), _folders("purelib", "platlib")


@functools.cache
def _libraries() -> tuple[str, ...]:
    """Where torch and NumPy are, without importing them; users' folders may have such names."""
    specs = [importlib.util.find_spec(name) for name in ("torch", "torch_xla", "numpy")]
    return tuple(f"{Path(s.origin).resolve().parent}/" for s in specs if s and s.origin)


@functools.cache
def is_script_code(filename: str) -> bool:
    """Whether a file belongs to the user: not to Python, to installed packages or to mpxla.

    mpxla's own tests play the part of scripts.
    """
    return is_model_code(filename) and not _is_installed(Path(filename).resolve())


@functools.cache
def is_model_code(filename: str) -> bool:
    """Whether a model may be written in a file: the user's, or one of a package (transformers).

    Not one of Python, torch, NumPy or mpxla, whose lines say nothing about a model.
    """
    if filename.startswith("<"):
        return filename.startswith(_TYPED)
    path = Path(filename).resolve()
    if path.is_relative_to(_PACKAGE):
        return path.is_relative_to(_PACKAGE / "tests")
    if _is_installed(path):
        return not str(path).startswith(_libraries())
    return not str(path).startswith((*_PYTHON, *_libraries()))


def _is_installed(path: Path) -> bool:
    return str(path).startswith(_PACKAGES) or not _INSTALLED.isdisjoint(path.parts)


def at_script_line() -> str:
    """`file:line: source` of the script's line that is running."""
    return line_in(is_script_code) or "the script"


def script_line_of(error: BaseException) -> str:
    """`file:line: source` of the script's innermost line that an error came through."""
    return line_in(is_script_code, error) or "the script"


def script_place_of(error: BaseException) -> tuple[str, int] | None:
    """File and line of the script's innermost frame that an error came through."""
    return _place_in(is_script_code, error)


def line_in(is_code: Callable[[str], bool], error: BaseException | None = None) -> str | None:
    """`file:line: source` of the innermost line in some files that is running, or of an error."""
    place = _place_in(is_code, error)
    return place and f"{place[0]}:{place[1]}: {linecache.getline(*place).strip()}"


def _place_in(
    is_code: Callable[[str], bool], error: BaseException | None
) -> tuple[str, int] | None:
    if error is None:
        frames = traceback.walk_stack(sys._getframe(1))  # pyright: ignore[reportPrivateUsage]
    else:
        frames = reversed([*traceback.walk_tb(error.__traceback__)])
    places = ((frame.f_code.co_filename, number) for frame, number in frames)
    return next((place for place in places if is_code(place[0])), None)
