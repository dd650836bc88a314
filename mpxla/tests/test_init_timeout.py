"""A rank that never starts, or runs another version: `smp.init` names it, however ranks meet."""

import os

import pytest
import torch.distributed as dist

import mpxla as smp
from mpxla import connection
from mpxla.comm import store as store_module
from mpxla.errors import PeerFailure, RankMismatch
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks

TWO = {"pipeline_parallel_degree": 2, "init_timeout_s": 1.0}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "RANK",
    "OMPI_COMM_WORLD_SIZE": "WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK": "LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "LOCAL_WORLD_SIZE",
}


def as_mpirun():
    """The environment that mpirun makes, in which rank 0 serves the store."""
    for name, torchrun_name in MPIRUN.items():
        os.environ[name] = os.environ.pop(torchrun_name)


def start_without(missing, launcher):
    """The error of the rank that is there."""
    before = dict(os.environ)
    rank = int(os.environ["RANK"])
    if launcher != "file":
        del os.environ["MPXLA_RENDEZVOUS_FILE"]
    agent = None
    try:
        if launcher == "torchrun":
            os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
            if rank != missing:  # the agent outlives its processes
                port = int(os.environ["MASTER_PORT"])
                agent = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        if launcher == "mpirun":
            as_mpirun()
        if rank == missing:
            return None
        smp.init(TWO)
    except PeerFailure as error:
        return str(error)
    finally:
        del agent
        store_module._launch_stores.clear()
        os.environ.clear()
        os.environ.update(before)


@pytest.mark.parametrize(
    ("launcher", "missing"),
    [
        *(("file", 0), ("torchrun", 1), ("mpirun", 1)),
        *(
            pytest.param(launcher, missing, marks=pytest.mark.slow)
            for launcher, missing in (("file", 1), ("torchrun", 0), ("mpirun", 0))
        ),
    ],
)
def test_a_rank_that_never_starts_is_named(launcher, missing):
    text = run_ranks(start_without, 2, missing, launcher)[1 - missing]
    assert text is not None and f"rank {1 - missing} waited 1 s (init_timeout_s) for " in text
    assert f"Look at the output of rank {missing}" in text
    if launcher == "mpirun" and missing == 0:
        assert "rank 0 at 127.0.0.1 port " in text and "this rank is there" in text
    else:
        assert f"for rank {missing} to call smp.init; rank {1 - missing} of 2 came" in text


def init_with_the_users_group(missing):
    """The default group exists, so all processes do, but one does not call `smp.init`."""
    rank = int(os.environ["RANK"])
    store = dist.FileStore(os.environ["MPXLA_RENDEZVOUS_FILE"], 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    try:
        if rank != missing:
            smp.init(TWO)
    except PeerFailure as error:
        return str(error)
    finally:
        if rank == missing:  # it may have made the group before the other is connected
            store.wait(["done"])
        else:
            store.set("done", "")
        dist.destroy_process_group()


def test_a_rank_that_does_not_come_to_init_is_named():
    text = run_ranks(init_with_the_users_group, 2, 1)[0]
    assert text is not None
    assert "for rank 1 to call smp.init; rank 0 of 2 came" in text


def init_with_a_version():
    original = connection.__version__
    connection.__version__ = f"9.{os.environ['RANK']}"
    try:
        smp.init({"pipeline_parallel_degree": 2})
    except RankMismatch as error:
        return str(error)
    finally:
        connection.__version__ = original


def test_ranks_with_different_versions_are_refused():
    for text in run_ranks(init_with_a_version, 2):
        assert "different versions of mpxla: 9.0 on rank 0, 9.1 on rank 1" in text
        assert "Install the same version" in text
