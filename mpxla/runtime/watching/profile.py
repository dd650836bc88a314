"""`smp.profile`: what really ran on every rank, beside what was predicted, in one file.

The file is a Chrome trace that ui.perfetto.dev opens: the process "measured" has a thread per rank
with its actions and waits, "predicted" has the simulated ones of the same steps, and each has the
bytes of saved activations over time, a curve per rank. Copies of those to and from the host are a
process of their own. The plain records are in it too, for `python -m mpxla trace`.
"""

import json
import socket
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from mpxla.errors import MpxlaError
from mpxla.runtime.watching.recorder import Recorder
from mpxla.runtime.watching.trace import merge_ranks
from mpxla.session import current

__all__ = ["Profile", "profile"]


def profile(path: str | Path) -> "Profile":
    """Records the steps of a `with` block, or from `start` to `stop`. Extension of SMP's API.

    Every rank has to use it, around the same steps. While it records, ranks wait for each of their
    programs, so that steps are a little slower than without it. Rank 0 writes the file at the end.

    Args:
        path: file to write, a Chrome trace (JSON); only that of global rank 0 counts.
    """
    return Profile(Path(path))


class Profile:
    """Records steps from `start` to `stop`; see `profile`.

    Attributes:
        path: the file that rank 0 writes.
    """

    def __init__(self, path: Path):
        self.path = path
        self._recorder: Recorder | None = None

    def start(self) -> None:
        """Begins to record. All ranks must call it.

        Raises:
            MpxlaError: `init` has not been called, or a profile is being recorded already.
        """
        session = current()
        if session.recorder is not None:
            raise MpxlaError(
                "smp.profile: a profile is being recorded already. End it (leave its `with` block, "
                "or call stop) before another one begins."
            )
        session.objects.barrier(tuple(range(session.env.world_size)))
        self._recorder = session.recorder = Recorder(session.backend.wait)

    def stop(self) -> None:
        """Ends recording and merges all ranks' records. All ranks must call it.

        Raises:
            MpxlaError: it was not started, or no step ran.
        """
        session, recorder = current(), self._recorder
        if recorder is None:
            raise MpxlaError("smp.profile: stop was called before start.")
        session.recorder = self._recorder = None
        world = tuple(range(session.env.world_size))
        steps = [asdict(step) for step in recorder.steps]
        own = {"rank": session.rank, "host": socket.gethostname(), "steps": steps}
        ranks = session.objects.allgather(own, world)
        if not any(rank["steps"] for rank in ranks):
            raise MpxlaError(
                "smp.profile recorded nothing, because no step function ran. Put calls of step "
                "functions inside its `with` block."
            )
        if session.rank == 0:
            self.path.write_text(json.dumps(merge_ranks(ranks)))

    def __enter__(self) -> "Profile":
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> Any:
        if error is None:
            self.stop()
        elif self._recorder is not None:
            # Other ranks may be gone: nothing can be gathered.
            current().recorder = self._recorder = None
