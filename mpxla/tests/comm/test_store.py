"""Sessions of one launch have parts of their own in its store."""

import pytest
import torch.distributed as dist

from mpxla.comm import store as module
from mpxla.comm.store import await_note, session_store
from mpxla.env import LaunchEnv
from mpxla.errors import PeerFailure

pytestmark = pytest.mark.unit


def test_sessions_and_restarted_processes_do_not_see_what_earlier_ones_wrote(monkeypatch):
    launch = dist.HashStore()
    monkeypatch.setattr(module, "_launch_store", lambda env, timeout_s: launch)

    def begin(rank, attempt=0):
        return session_store(LaunchEnv(rank=rank, world_size=2, attempt=attempt), 1.0)

    begin(0).set("note", "first")
    begin(0).set("note", "second")
    assert [await_note(begin(1), "note", 1, 0, 1.0) for _ in range(2)] == ["first", "second"]
    with pytest.raises(PeerFailure, match=r"rank 1 waited 0\.1 s for rank 0 to start mpxla"):
        await_note(begin(1, attempt=1), "note", 1, 0, 0.1)
