"""Runs a test body `body(transport, *args)` on every rank of a world of processes or of threads."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch.distributed as dist

from mpxla.comm.host import HostTransport
from mpxla.comm.lifeline import Lifeline
from mpxla.comm.secret import agree_on_key
from mpxla.comm.xla import XlaTransport
from mpxla.tests.backends import name_here
from mpxla.tests.comm.recorder import Recorder
from mpxla.tests.comm.threads import threads_world
from mpxla.tests.ranks.run import run_ranks, run_ranks_unpooled


def _of_torch_xla():
    from mpxla.device.torch_xla.collectives.cpu_runner import CpuRunner

    return CpuRunner


def _of_pjrt():
    from mpxla.device.pjrt.collectives import WorldRunner

    return WorldRunner


RUNNERS = {"torch_xla": _of_torch_xla, "pjrt": _of_pjrt}
"""Backend -> the class that executes its programs between CPU processes."""


def open_store():
    return dist.FileStore(os.environ["MPXLA_RENDEZVOUS_FILE"], int(os.environ["WORLD_SIZE"]))


def open_transport(**lifeline_options):
    """What a session does at its start."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = open_store()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    key, is_one_host = agree_on_key(store, rank, world_size, None)
    lifeline = Lifeline(
        rank, world_size, store, key=key, is_one_host=is_one_host, **lifeline_options
    )
    return HostTransport(rank, world_size, lifeline, key=key, address=lifeline.address)


def on_host(body, options, args):
    """One rank: what a session does around a script."""
    transport = open_transport(**options)
    try:
        value = body(transport, *args)
    except BaseException as error:
        transport.watch.report(body.__name__, error)
        raise
    close_transport(transport)
    return value


def close_transport(transport):
    transport.close()
    transport.watch.close()
    names = [thread.name for thread in threading.enumerate()]
    assert not [
        name for name in names if name.startswith(("mpxla-recv", "mpxla-send", "mpxla-xla"))
    ]


def mark(name):
    """Tells the other processes of this call that something is so; see `await_mark`."""
    Path(f"{os.environ['MPXLA_RENDEZVOUS_FILE']}-{name}").touch()


def await_mark(name):
    """Waits for `mark` in another process, however slow it is."""
    file = Path(f"{os.environ['MPXLA_RENDEZVOUS_FILE']}-{name}")
    deadline = time.monotonic() + 60
    while not file.exists():
        assert time.monotonic() < deadline, f"nobody marked {name}"
        time.sleep(0.01)


def run_host(body, world_size, *args, timeout_s=120, **options):
    return run_ranks(on_host, world_size, body, options, args, timeout_s=timeout_s)


def on_xla(body, options, args):
    """The same over the `xla` transport, with the backend and the pipelines that options name."""
    host = open_transport()
    runner = RUNNERS[options.get("backend", name_here())]()(host, host.watch.address)
    recorder = Recorder(runner, host.rank)
    transport = XlaTransport(host, recorder, options.get("pipelines", ()))
    transport.events = recorder.events
    try:
        value = body(transport, *args)
    except BaseException as error:
        transport.watch.report(body.__name__, error)
        raise
    close_transport(transport)
    return value


def run_xla(body, world_size, *args, timeout_s=120, **options):
    return run_ranks(on_xla, world_size, body, options, args, timeout_s=timeout_s)


def run_host_unpooled(body, world_size, *args, timeout_s=120, **options):
    return run_ranks_unpooled(on_host, world_size, body, options, args, timeout_s=timeout_s)


def run_threads(body, world_size, *args):
    def on_thread(transport):
        try:
            return body(transport, *args)
        except BaseException as error:
            transport.watch.report(body.__name__, error)
            raise
        finally:
            transport.close()

    world = threads_world(world_size)
    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(on_thread, world))
