"""Where in the user's code something happens, and errors of tracing in one line of it.

Torch's own texts for such errors hold a page of graph. This module must not know what is traced.
"""

import contextlib
import re
import sys
import traceback
from collections.abc import Callable, Generator, Sequence
from types import FrameType
from typing import Any, TypeVar

from torch import fx, nn
from torch.fx import proxy
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from mpxla.errors import CaptureError, MpxlaError
from mpxla.graph.exchanged import exchanged
from mpxla.user_lines import is_model_code, line_in

__all__ = [
    "AgainError",
    "OutsideWriteError",
    "UndecidedError",
    "ValueNeededError",
    "at_user_line",
    "explain",
    "is_called_by_user",
    "line_of",
    "needs_value",
    "symbols_noted",
    "until_captured",
    "user_lines_recorded",
]

T = TypeVar("T")
_NARROW = ("BFloat16", "bfloat16", "Half", "float16")
"""What errors of torch call 16-bit types."""
_NEED_VALUES = (
    *("GuardOnDataDependentSymNode", "NeedsValueError", "UserError"),
    "PendingUnbackedSymbolNotFound",  # at what follows a slice that ends at a tensor
)
_OF_VALUES = (
    *("data-dependent", "non-nested SymInt", "for tensor subclasses"),
    *("NumberRead", "ArrayRead", "integer or boolean arrays are valid indices"),
)
"""Texts of torch's and Python's errors, of its own functions and of dictionaries, say."""
_FRAME = re.compile(r'File "(.*)", line (\d+), in .*')


class UndecidedError(CaptureError):
    """Python needs the value of a tensor, which the step's inputs do not give."""


class ValueNeededError(CaptureError):
    """Python needs the value of a tensor; with the values of inputs there may be an answer.

    Attributes:
        raised: what something else raised, perhaps since it had no value.
    """

    raised: Exception | None = None


class OutsideWriteError(CaptureError):
    """A step writes to tensors of no model.

    Attributes:
        written: these tensors, as far as they are known.
    """

    written: Sequence[Any] = ()


class AgainError(BaseException):
    """A step is to be captured once more, when something has been prepared.

    It passes what catches the errors of users' code.

    Args:
        what: makes that necessary.
        prepare: does what the next capture needs.
    """

    def __init__(self, what: object, prepare: Callable[[], object] = lambda: None):
        super().__init__(what)
        self._prepare = prepare

    def prepare(self) -> None:
        """Does what the next capture needs."""
        self._prepare()


def until_captured(capture: Callable[[], T]) -> T:
    """What a capture gives that may raise `AgainError`."""
    while True:
        try:
            return capture()
        except AgainError as error:
            error.prepare()


def needs_value(error: Exception) -> bool:
    """Whether something went wrong because a tensor has no value while a step is captured."""
    return type(error).__name__ in _NEED_VALUES or any(text in str(error) for text in _OF_VALUES)


def explain(error: Exception, is_final: bool = True, outside: Sequence[str] = ()) -> Exception:
    """One line of the user's code in place of a page of graph; own errors as they are.

    It is not final where the values of the step's inputs may still help. `outside` are the lines
    that write to tensors of no model.
    """
    hidden = error.__context__
    if isinstance(error, IndexError) and isinstance(hidden, Exception) and not hidden.args:
        error = hidden  # torch.fx has looked for its text, and there is none
    if isinstance(error, MpxlaError):
        return error
    if outside and (isinstance(error, StopIteration) or "mutated" in str(error)):
        return OutsideWriteError(
            f"The step function writes to a tensor that no DistributedModel holds{outside[0]}. It "
            f"is a constant of the captured step. Make it a buffer of a module that smp."
            f"DistributedModel has wrapped (self.register_buffer), wrap the module that it is part "
            f"of (a teacher whose batch norms are in training mode; or call teacher.eval()), or "
            f"return the new value and write it after the step call."
        )
    where = _line_of_symbol(str(error)) or line_in(is_model_code, error)
    place = f" at {where}" if where else ""
    if needs_value(error) or _line_of_symbol(str(error)):
        return (UndecidedError if is_final else ValueNeededError)(
            f"The step function depends on a tensor's value in Python{place}. A step is captured "
            f"once as a graph, so `.numpy()` is not possible inside it, unless the value follows "
            f"from the inputs alone; nor are `if`, `while`, `int()` and loops over a number with "
            f"sharded_data_parallel_degree. Use torch.where or masks, "
            f"index by tensors (x[start + torch.arange(n)] in place of x[start : start + n]), or "
            f"move the decision out of the step function; what .item() and float() read may be "
            f"computed with, and returned, and int() gives a number that has few values. What "
            f"has to have values runs on the host as an operator of your own "
            f"(torch.library.custom_op)."
        )
    if not isinstance(error, RuntimeError) and not type(error).__module__.startswith("torch"):
        error.add_note(f"mpxla: raised while the step function was captured{place}.")
        return error
    text = str(error).strip().split("\n")[0][:500]
    return CaptureError(
        f"The step function could not be captured{place}: {type(error).__name__}: {text}"
        f"{_advice_on_types(error, text)}"
    )


_lines_of_symbols: dict[str, str] = {}


@contextlib.contextmanager
def symbols_noted() -> Generator[None]:
    """Notes the user's lines where numbers get symbols, of which errors tell later, as `zuf0`."""
    own: Any = ShapeEnv.create_unbacked_symfloat

    def create(self: ShapeEnv) -> Any:
        found = own(self)
        _lines_of_symbols[str(found.node.expr)] = at_user_line().removeprefix(" at ")
        return found

    with exchanged(ShapeEnv, create_unbacked_symfloat=create):
        _lines_of_symbols.clear()
        yield


def _line_of_symbol(text: str) -> str:
    found = re.search(r"Unknown symbol (\w+)", text)
    return _lines_of_symbols.get(found[1], "") if found else ""


def _advice_on_types(error: Exception, text: str) -> str:
    """The module that needs float32, where an operator refuses 16 bits."""
    if not any(name in text for name in _NARROW):
        return ""
    frames = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    modules = [module for module in frames if isinstance(module, nn.Module)]
    found = modules[0].named_modules() if modules else ()
    # Around the user's model are torch.export's module and the one that is captured.
    paths = {id(m): path.partition("model.")[2] for path, m in found}
    inner = next((m for m in reversed(modules) if paths.get(id(m))), None)
    if inner is None:
        return ". There is no such operator in 16 bits: widen its arguments there by .float()."
    return (
        f". The module {paths[id(inner)]!r} ({type(inner).__name__}) needs float32 there: widen "
        f"the arguments of that operator by .float(), and convert its result back."
    )


def at_user_line() -> str:
    """` at file:line: source` of the user's line that is running, or nothing."""
    where = line_in(is_model_code)
    return f" at {where}" if where else ""


def is_called_by_user(*but: str) -> bool:
    """Whether the caller of the caller is none of torch, what it uses for symbols, and `but`.

    Captures ask symbols for the user as well, and get what the user gets.
    """
    frame = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]
    name = frame.f_globals.get("__name__", "")
    return not f"{name}.".startswith(("torch.", "sympy.", *but))


@contextlib.contextmanager
def user_lines_recorded() -> Generator[None]:
    """Lets traced nodes know the lines of the user's functions, not only those of modules.

    Torch keeps the frames of functions named `forward` (2.9); a step function has another name.
    """
    tracer: Any = fx.Tracer.__mro__[1]  # the filter is private to the base of all tracers
    with (
        exchanged(proxy, CapturedTraceback=_UserFrames),
        exchanged(tracer, _filter_traceback_frames=lambda _, frames: frames),
    ):
        yield


class _UserFrames:
    """In place of torch's class, which looks up the lines of all frames, a hundred per node."""

    @staticmethod
    def extract() -> "type[_UserFrames]":
        return _UserFrames

    @staticmethod
    def summary() -> traceback.StackSummary:
        """Frames from the outermost `forward` on, of functions of that name and of models."""
        running = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
        inside: list[tuple[FrameType, int]] = []
        num_inside = 0
        for frame, line in traceback.walk_stack(running):
            is_forward = frame.f_code.co_name == "forward"
            if is_forward or is_model_code(frame.f_code.co_filename):
                inside.append((frame, line))
            if is_forward:
                num_inside = len(inside)
        return traceback.StackSummary.from_list(
            traceback.FrameSummary(frame.f_code.co_filename, line, frame.f_code.co_name)
            for frame, line in reversed(inside[:num_inside])
        )


def line_of(node: fx.Node) -> str:
    """` at file:line: source` of the user's line that a traced node comes from, or nothing."""
    lines = (node.meta.get("stack_trace") or "").split("\n")
    for place in range(len(lines) - 1, -1, -1):
        found = _FRAME.fullmatch(lines[place].strip())
        if found and is_model_code(found[1]):
            source = "".join(line.strip() for line in lines[place + 1 : place + 2])
            return f" at {found[1]}:{found[2]}: {source}"
    return ""
