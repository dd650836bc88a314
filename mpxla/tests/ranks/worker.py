"""What runs in a process that `mpxla.tests.ranks.run` starts: one rank, ready to call functions.

Talks to the test process over one inherited connection. How such a process comes to be, and what
it has imported by then, is the business of `launcher`.
"""

import atexit
import faulthandler
import gc
import importlib
import importlib.util
import os
import pickle
import random
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

from mpxla.tests.ranks.launcher import become_zygote
from mpxla.tests.ranks.sharing import share_what_is_kept

__all__ = ["Failed", "Finished", "FunctionRef", "Request", "Started", "main"]

_THRESHOLDS = 50_000, 20, 1_000
"""Python searches what a trace has made for garbage, again and again; see `mpxla.collection`, which
leaves that to processes with frozen objects. Calls end with a search of everything."""


class FunctionRef(NamedTuple):
    """A module-level function, found again in another process."""

    module: str
    path: str
    """The module's file: test modules are often not importable by name."""
    qualname: str


class Request(NamedTuple):
    """One call on one rank."""

    function: FunctionRef
    args: bytes
    """Pickled; unpickled after the module of the function is loaded."""
    script: str | None
    """File of the script of the test process, if the arguments refer to it."""
    environ: Mapping[str, str]


class Started(NamedTuple):
    """The function is about to be called."""

    time_s: float


class Finished(NamedTuple):
    """The function returned."""

    value: bytes


class Failed(NamedTuple):
    """The function raised."""

    error: str
    """Type and text."""
    trace: str
    is_consequence: bool
    """Whether it only tells that another rank failed."""


def main() -> None:
    """Serves calls until the test process closes the connection.

    Arguments of the process: descriptor of the connection, and one of

    * `pool`: serves any number of calls,
    * `once`: serves one, of which an exception ends the process as it would end a script,
    * `zygote`: forks processes of the other two kinds.
    """
    descriptor, mode = int(sys.argv[1]), sys.argv[2]
    if mode == "zygote":
        descriptor, mode = become_zygote(descriptor)
    connection = Connection(descriptor)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    _end_with_parent(connection.fileno())
    importlib.import_module("torch")
    gc.set_threshold(*_THRESHOLDS)
    connection.send(None)
    if mode == "pool":
        share_what_is_kept()
    while True:
        try:
            request = connection.recv()
        except EOFError:
            os._exit(0)
        if mode == "once":
            _serve_as_a_script(request, connection)
        _serve(request, connection)


def _end_with_parent(descriptor: int) -> None:
    """Ends this process when the test process is gone, whatever this one is doing."""

    def wait_for_hangup() -> None:
        poll = select.poll()
        poll.register(descriptor, 0)  # hang-ups are always reported
        poll.poll()
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait_for_hangup, name="parent-watch", daemon=True).start()


def _serve_as_a_script(request: Request, connection: Connection) -> NoReturn:
    """Serves a call and ends the process as the interpreter does, but for the very last.

    Threads are waited for and exit handlers run. Modules and libraries are not taken apart: that
    copies all the memory that a forked process shares with its zygote, and takes half a second.
    """
    code: Any = 0
    try:
        connection.send(Finished(_call(request, connection)))
    except SystemExit as exit_:
        code = exit_.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException as error:
        code = 1
        sys.excepthook(type(error), error, error.__traceback__)
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)


def _serve(request: Request, connection: Connection) -> None:
    environ = dict(os.environ)
    random.seed(0)
    sys.modules["torch"].manual_seed(0)
    try:
        value = _call(request, connection)
        _end_session()
    except BaseException as error:
        names = [base.__name__ for base in type(error).__mro__]
        text = f"{type(error).__name__}: {error}"
        trace = "".join(traceback.format_exception(error))
        connection.send(Failed(text, trace, "PeerFailure" in names))
        # From here on as in a script: hooks run, and the peers see this process end.
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)
    finally:
        os.environ.clear()
        os.environ.update(environ)
    gc.collect()
    gc.freeze()  # what has stayed, jax's and torch's caches above all, is not searched again
    connection.send(Finished(value))


def _call(request: Request, connection: Connection) -> bytes:
    os.environ.update(request.environ)
    function = _load(request.function)
    if request.script is not None:
        _load_module(FunctionRef("__main__", request.script, ""))
    args = pickle.loads(request.args)
    connection.send(Started(time.time()))
    value = function(*args)
    from mpxla.comm.objects import dump

    return bytes(dump(value, f"the value returned by {request.function.qualname}").numpy())


def _end_session() -> None:
    """Brings the process back to where the next call can start a session."""
    if session := sys.modules.get("mpxla.session"):
        session.shutdown_if_started()
    if log := sys.modules.get("mpxla.log"):
        log.forget_warnings()
    distributed = sys.modules.get("torch.distributed")
    if distributed and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def _load(ref: FunctionRef) -> Callable[..., Any]:
    found: Any = _load_module(ref)
    for name in ref.qualname.split("."):
        found = getattr(found, name)
    return found


def _load_module(ref: FunctionRef) -> ModuleType:
    return _import(ref) or _import_file(ref)


def _import(ref: FunctionRef) -> ModuleType | None:
    """The module by its name, if that leads to the right file."""
    if ref.module == "__main__":
        module = sys.modules.get("__mpxla_main__")
    else:
        try:
            module = importlib.import_module(ref.module)
        except ModuleNotFoundError:
            return None
    found = getattr(module, "__file__", None)
    return module if found and Path(found).resolve() == Path(ref.path).resolve() else None


def _import_file(ref: FunctionRef) -> ModuleType:
    """The module by its file, under the name by which its classes are pickled."""
    # Under its own name, `if __name__ == "__main__"` would start the script again.
    name = "__mpxla_main__" if ref.module == "__main__" else ref.module
    spec = importlib.util.spec_from_file_location(name, ref.path)
    assert spec is not None and spec.loader is not None, ref
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = sys.modules[ref.module] = module
    spec.loader.exec_module(module)
    return module
