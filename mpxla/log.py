"""The logger of mpxla: one line prefix per rank, on standard error.

Many processes write to one terminal, so every line says which rank wrote it. Only the logger named
`mpxla` is configured: the root logger belongs to the user's script. This module must not read the
environment (`env` does, and the level arrives as an argument) and knows nothing of devices.
"""

import contextlib
import logging
import sys
import threading
from collections.abc import Generator

__all__ = [
    "forget_warnings",
    "get_logger",
    "root_logger_kept",
    "set_level",
    "set_rank",
    "warn_once",
]

_NAME = "mpxla"


class _StderrHandler(logging.Handler):
    """Writes to whatever `sys.stderr` is at that moment, so that redirections are followed."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            # One write per message, so that processes do not interleave within a line.
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except Exception:
            self.handleError(record)  # as every handler of the logging module does


class _RankFormatter(logging.Formatter):
    """Puts the rank, and the level from warning upwards, in front of every line of a message."""

    prefix = "[mpxla]"

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if record.levelno >= logging.WARNING:
            text = f"{record.levelname.lower()}: {text}"
        return "\n".join(f"{self.prefix} {line}" for line in text.split("\n"))


def _make_logger() -> logging.Logger:
    logger = logging.getLogger(_NAME)
    logger.propagate = False
    logger.setLevel(logging.INFO)
    handler = _StderrHandler()
    handler.setFormatter(_formatter)
    logger.addHandler(handler)
    return logger


_formatter = _RankFormatter()
_logger = _make_logger()
_warned: set[str] = set()
_warned_lock = threading.Lock()


def get_logger() -> logging.Logger:
    """Returns the logger `mpxla`. It does not propagate to the root logger."""
    return _logger


def set_rank(rank: int, world_size: int) -> None:
    """Makes every later line start with the rank, unless there is only one process.

    Args:
        rank: Global rank of this process.
        world_size: Number of processes.
    """
    _formatter.prefix = f"[mpxla rank {rank}]" if world_size > 1 else "[mpxla]"


def set_level(level: str | int) -> None:
    """Sets the least severe level that is shown.

    Args:
        level: Name such as `"DEBUG"`, or a number of the `logging` module.
    """
    _logger.setLevel(level)


def warn_once(key: str, message: str) -> None:
    """Logs a warning the first time `key` is seen in this process.

    Args:
        key: Identifies the warning; later calls with the same key do nothing.
        message: Complete text; it is not formatted further.
    """
    with _warned_lock:
        if key in _warned:
            return
        _warned.add(key)
    _logger.warning("%s", message)


@contextlib.contextmanager
def root_logger_kept() -> Generator[None]:
    """Takes handlers away again that a library puts on the root logger in the meantime.

    torch_xla logs by the functions of `logging` while it is imported, which makes a handler if
    there is none. The script's own `logging.basicConfig` would then do nothing.
    """
    before = list(logging.root.handlers)
    try:
        yield
    finally:
        logging.root.handlers[:] = [h for h in logging.root.handlers if h in before]


def forget_warnings() -> None:
    """Lets `warn_once` show every warning again, as in a fresh process."""
    with _warned_lock:
        _warned.clear()
