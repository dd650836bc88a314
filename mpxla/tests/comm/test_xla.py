"""The `xla` transport between processes, beyond what all transports do (test_transport.py)."""

import re
import signal
import time
from unittest.mock import patch

import pytest
import torch

import mpxla as smp
from mpxla import session
from mpxla.comm.host import HostTransport
from mpxla.comm.packing import as_bytes
from mpxla.comm.transport import Use
from mpxla.comm.xla import XlaTransport
from mpxla.device import cpu_world
from mpxla.env import read_environment
from mpxla.errors import MpxlaError, PeerFailure, RankMismatch, TopologyError
from mpxla.tests.comm.recorder import Kind, check
from mpxla.tests.comm.test_failures import assert_soon, kill_self, last_error
from mpxla.tests.comm.worlds import await_mark, mark, on_xla, run_xla
from mpxla.tests.ranks.run import run_ranks, run_ranks_unpooled

pytestmark = pytest.mark.ranks

MIXED = [
    torch.arange(6.0).view(2, 3).T,
    torch.tensor([True, False, True]),
    torch.tensor(-7),
    torch.empty(0, 3),
    torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    torch.tensor([255, 0], dtype=torch.uint8),
    torch.tensor(float("nan")),
]


def same(one, other):
    return one.dtype == other.dtype and torch.equal(as_bytes(one), as_bytes(other))


# --- messages and collectives, with groups that share ranks -----------------------------------


def move_everything(transport):
    """Two pipelines of two stages; then a skip, an odd ring, and sums over replicas."""
    rank, world = transport.rank, (0, 1, 2, 3)
    transport.make_groups([world, (0, 1), (2, 3), (0, 2), (1, 3)])
    peer = rank ^ 1
    if rank % 2 == 0:
        sent = transport.send(
            [t + rank if t.is_floating_point() else t for t in MIXED], peer, "forward"
        )
        (back,) = transport.recv([torch.empty(2)], peer, "backward").result()
        assert sent.result() is None
        assert back.tolist() == [peer, peer]
    else:
        arrived = transport.recv(MIXED, peer, "forward").result()
        for tensor, original in zip(arrived, MIXED, strict=True):
            assert tensor.shape == original.shape
            assert same(tensor, original + peer if original.is_floating_point() else original)
        transport.send([torch.full((2,), float(rank))], peer, "backward")
    replicas = (rank % 2, rank % 2 + 2)
    handles = [
        transport.all_reduce(torch.tensor([1.0, 10.0]) * (rank + 1), replicas),
        transport.all_gather(torch.tensor([rank]), replicas),
        transport.reduce_scatter(torch.arange(4).view(2, 2) + rank, replicas),
        transport.broadcast(torch.full((3,), rank == 0), 0, world),
        transport.broadcast(torch.tensor([rank], dtype=torch.uint8), 3, world),
        transport.barrier(world),
    ]
    results = [handle.result() for handle in handles]
    assert results[4].item() == 3
    assert results[3].tolist() == [True] * 3
    return [result.tolist() for result in results[:3]], transport.events


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("torch_xla", marks=[pytest.mark.torch_xla, pytest.mark.slow]),
        "pjrt",
    ],
)
def test_operations_in_groups_that_share_ranks(backend):
    results = run_xla(move_everything, 4, pipelines=[(0, 1), (2, 3)], backend=backend)
    assert [values for values, _ in results] == [
        [[4.0, 40.0], [[0], [2]], [2, 4]],
        [[6.0, 60.0], [[1], [3]], [4, 6]],
        [[4.0, 40.0], [[0], [2]], [6, 8]],
        [[6.0, 60.0], [[1], [3]], [8, 10]],
    ]
    recordings = [events for _, events in results]
    check(recordings, whole_mesh=True)
    meshes = {str(event.program.mesh) for events in recordings for event in events}
    assert meshes == {"{0,1,2,3}", "{0,1} {2,3}", "{0,2} {1,3}"}


def go_round(transport):
    """A value visits all stages and comes back to the first, adding one everywhere."""
    rank, size, value = transport.rank, transport.world_size, torch.zeros(3)
    before, after = (rank - 1) % size, (rank + 1) % size
    if rank > 0:
        value = transport.recv([value], before, "forward").result()[0]
    transport.send([value + 1], after, "forward").result()
    if rank == 0:
        value = transport.recv([value], before, "forward").result()[0]
    return value.tolist(), transport.events


def test_rule_4_a_ring_of_three_stages():
    results = run_xla(go_round, 3, pipelines=[(0, 1, 2)])
    assert results[0][0] == [3.0] * 3
    check([events for _, events in results])
    assert (
        len({e.program.mesh for _, events in results for e in events if e.program.op == "transfer"})
        == 3
    )


def prepare_differently(transport):
    """Each rank knows of something else; all load all of it, and nothing later."""
    world, rank = (0, 1), transport.rank
    known = [Use("message", world, tuple(MIXED)), Use("all_reduce", world, (torch.empty(3),))]
    transport.prepare(known[rank:], world)
    transport.prepare(known[:rank], world)
    if rank == 0:
        transport.send(MIXED, 1, "forward").result()
    else:
        transport.recv(MIXED, 0, "forward").result()
    transport.all_reduce(torch.ones(3), world).result()
    return transport.events


def test_rule_6_ranks_load_together_what_any_of_them_names():
    recordings = run_xla(prepare_differently, 2)
    check(recordings, whole_mesh=True)
    assert [str(event) for event in recordings[0]] == [str(event) for event in recordings[1]]
    expected = [Kind.LOAD, Kind.EXECUTE, Kind.LOAD, Kind.LOAD, Kind.EXECUTE, Kind.EXECUTE]
    assert [event.kind for event in recordings[0]] == expected


# --- wrong use --------------------------------------------------------------------------------


def both_receive_first(transport):
    peer = 1 - transport.rank
    received = transport.recv([torch.ones(2)], peer, "forward")
    transport.send([torch.ones(2)], peer, "forward")
    with pytest.raises(RankMismatch) as caught:
        received.result()
    return str(caught.value)


def test_order_that_only_buffers_would_save_is_an_error():
    assert run_xla(both_receive_first, 2)[0] == (
        "rank 0 expected float32[2] from rank 1 on channel 'forward', but rank 1 came to a message "
        "from rank 0 to rank 1 on channel 'forward' of float32[2]. Run the same script with the "
        "same model and arguments on all ranks."
    )


def disagree_in_three(transport):
    dtype = torch.float32 if transport.rank == 0 else torch.float64
    with pytest.raises(RankMismatch) as caught:
        transport.all_reduce(torch.ones(2, dtype=dtype), (0, 1, 2)).result()
    if transport.rank == 2:
        return str(caught.value), ""
    with pytest.raises(TopologyError) as not_made:
        transport.barrier((0, 1))
    return str(caught.value), str(not_made.value)


def test_collectives_that_differ_are_an_error():
    text, not_made = run_xla(disagree_in_three, 3)[1]
    assert text == (
        "rank 1 came to all_reduce of float64[2] over the ranks (0, 1, 2), but rank 0 came to "
        "all_reduce of float32[2] over the ranks (0, 1, 2). Run the same script with the same "
        "model and arguments on all ranks."
    )
    assert "rank 1: barrier over the ranks (0, 1), for which no group was made" in not_made


def start_without_jax():
    """jax is missing on rank 1; rank 0 has it."""
    missing = (None, "No module named 'jax'")
    found = cpu_world._import_jax()
    broken = missing if read_environment().rank == 1 else found
    with (
        patch.object(cpu_world, "_import_jax", lambda: broken),
        pytest.raises(MpxlaError) as caught,
    ):
        smp.init({"ddp": True, "transport": "xla"})
    return str(caught.value)


def test_missing_jax_names_the_extra_on_all_ranks():
    for result in run_ranks_unpooled(start_without_jax, 2, timeout_s=120):
        assert result.value == (
            "transport: 'xla' on CPU needs jax, which rank 1 cannot import (No module named "
            "'jax'). Install it on all ranks with pip install 'mpxla[cpu-collectives]', or set "
            "transport: 'host'."
        )


def name_transport(config):
    smp.init({"ddp": True, **config})
    transport = session.current().transport
    return type(transport).__name__, session.current().objects.allgather(smp.rank(), (0, 1))


def test_session_chooses_the_transport_once():
    for config, expected in [({}, HostTransport), ({"transport": "xla"}, XlaTransport)]:
        assert run_ranks(name_transport, 2, config) == [(expected.__name__, [0, 1])] * 2


# --- failures ---------------------------------------------------------------------------------


def fail(transport, failing, how):
    """A rank fails while the others wait in a program that it never comes to."""
    world = (0, 1, 2)
    transport.all_reduce(torch.ones(1), world).result()
    if transport.rank == failing:
        for rank in {*world} - {failing}:
            await_mark(f"rank {rank} waits")
        time.sleep(0.5)
        if how == "kill":
            kill_self()
        raise ValueError("bad batch")
    waiting = transport.all_reduce(torch.ones(100), world)
    mark(f"rank {transport.rank} waits")
    waiting.result()


@pytest.mark.parametrize(
    ("failing", "how"),
    [*(pytest.param(rank, "kill", marks=pytest.mark.slow) for rank in (0, 2)), (1, "raise")],
)
def test_failure_of_a_rank_ends_the_wait_for_its_programs(failing, how):
    results = run_ranks_unpooled(on_xla, 3, fail, {}, (failing, how), timeout_s=120)
    assert results[failing].exit_code == (-signal.SIGKILL if how == "kill" else 1)
    for rank in {0, 1, 2} - {failing}:
        assert results[rank].exit_code == 1, results[rank].stderr
        last = last_error(results[rank])
        assert f"PeerFailure: rank {failing} " in last
        assert f"rank {rank} was waiting for all_reduce of float32[100] with rank" in last
        assert_soon(results[rank], results[failing])


def leave_early(transport):
    if transport.rank == 1:
        return None
    with pytest.raises(PeerFailure) as caught:
        transport.barrier((0, 1)).result()
    return re.sub(r" \(.*", "", str(caught.value))


@pytest.mark.slow
def test_rank_that_left_is_named():
    assert run_xla(leave_early, 2)[0].startswith("rank 1 finished")
