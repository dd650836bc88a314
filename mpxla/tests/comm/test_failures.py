"""Ranks that die, raise, hang or leave, in processes that end as scripts do."""

import os
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist

from mpxla.comm.objects import Objects
from mpxla.tests.comm.worlds import (
    await_mark,
    close_transport,
    mark,
    open_transport,
    run_host,
    run_host_unpooled,
)
from mpxla.tests.ranks.run import run_ranks_unpooled

pytestmark = pytest.mark.ranks

# Between the ends of the failing rank and of the last one; what is promised, so that a slow machine
# has time as well.
SOON_S = 15.0


def kill_self():
    os.kill(os.getpid(), signal.SIGKILL)


def assert_soon(result, failed):
    """A process has ended soon after the one that failed."""
    assert result.duration_s - failed.duration_s < SOON_S


def last_error(result):
    """The last line of standard error that tells of a failure; others may follow it."""
    lines = result.stderr.splitlines()
    return next(line for line in reversed(lines) if "PeerFailure: " in line)


def die_while_others_receive(transport, dead):
    others = [rank for rank in range(3) if rank not in (dead, transport.rank)]
    if transport.rank == dead:
        for rank in others:
            await_mark(f"rank {rank} waits")
        time.sleep(0.5)
        kill_self()
    # Not from the rank that dies: only the lifeline can tell.
    message = transport.recv([torch.ones(1)], others[0], "forward")
    mark(f"rank {transport.rank} waits")
    message.result()


@pytest.mark.parametrize("dead", [0, 1])
def test_killed_rank_is_named_on_all_others(dead):
    results = run_host_unpooled(die_while_others_receive, 3, dead)
    assert results[dead].exit_code == -signal.SIGKILL
    for rank, result in enumerate(results):
        if rank == dead:
            continue
        assert result.exit_code == 1
        assert_soon(result, results[dead])
        last = last_error(result)
        assert f"PeerFailure: rank {dead} " in last
        assert "died: its process ended without a report" in last
        assert f"rank {rank} was waiting for a 'forward' message from rank" in last


def send_for_ever(transport):
    """One message may be on its way before its receiver dies."""
    while True:
        transport.send([torch.ones(4)], 1, "forward").result()
        time.sleep(0.05)


def die_while_others_wait_for_it(transport, wait):
    world = (0, 1)
    if transport.rank == 1:
        await_mark("rank 0 waits")
        time.sleep(0.5)
        kill_self()
    big = torch.ones(1 << 24)
    waits = {
        "recv": lambda: transport.recv([big], 1, "forward").result(),
        "send": lambda: send_for_ever(transport),
        "all_reduce": lambda: transport.all_reduce(big, world).result(),
        "barrier": lambda: transport.barrier(world).result(),
        "make_groups": lambda: transport.make_groups([world]),
        "object send": lambda: Objects(transport).send("x", 1),
        "allgather": lambda: Objects(transport).allgather("x", world),
    }
    mark("rank 0 waits")
    waits[wait]()


FURTHER_WAITS = ("send", "barrier", "make_groups", "object send", "allgather")


@pytest.mark.parametrize(
    "wait",
    ["recv", "all_reduce", *(pytest.param(w, marks=pytest.mark.slow) for w in FURTHER_WAITS)],
)
def test_broken_connection_is_translated(wait):
    alive, dead = run_host_unpooled(die_while_others_wait_for_it, 2, wait)
    assert dead.exit_code == -signal.SIGKILL
    assert alive.exit_code == 1
    assert_soon(alive, dead)
    last = last_error(alive)
    assert "PeerFailure: rank 1 (pid " in last
    assert "rank 0 was waiting for" in last


def die_while_others_gather_by_host(transport):
    group = (0, 1, 2, 3)
    transport.gather_by_host([group], [0, 0, 1, 1])
    if transport.rank == 3:
        for rank in range(3):
            await_mark(f"rank {rank} waits")
        time.sleep(0.5)
        kill_self()
    handle = transport.all_gather(torch.ones(4), group)
    mark(f"rank {transport.rank} waits")
    handle.result()


def test_killed_rank_is_named_in_both_phases_of_a_gather():
    results = run_host_unpooled(die_while_others_gather_by_host, 4)
    for result in results[:3]:
        assert result.exit_code == 1
        assert_soon(result, results[3])
        last = last_error(result)
        assert "PeerFailure: rank 3 " in last
        assert "died: its process ended without a report" in last
        assert "was waiting for all_gather of float32[4] with rank" in last


def raise_in_step(transport):
    if transport.rank == 1:
        await_mark("rank 0 waits")
        await_mark("rank 2 waits")
        raise ValueError("the batch has 3 samples")
    message = transport.recv([torch.ones(1)], 0 if transport.rank else 2, "forward")
    mark(f"rank {transport.rank} waits")
    message.result()


def test_raising_rank_is_named_with_its_error():
    results = run_host_unpooled(raise_in_step, 3)
    assert [result.exit_code for result in results] == [1, 1, 1]
    for rank in (0, 2):
        assert_soon(results[rank], results[1])
        last = last_error(results[rank])
        assert (
            "PeerFailure: rank 1 raised ValueError in raise_in_step: the batch has 3 samples "
            f"(rank {rank} was waiting for a 'forward' message"
        ) in last
    assert "ValueError: the batch has 3 samples" in results[1].stderr
    assert "PeerFailure" not in results[1].stderr


def hang_outside(transport):
    if transport.rank == 1:
        await_mark("rank 0 is busy")
        kill_self()
    print("busy", flush=True)
    mark("rank 0 is busy")
    time.sleep(1000)


def test_rank_that_is_busy_elsewhere_is_ended():
    alive, dead = run_host_unpooled(hang_outside, 2, grace_s=1.0)
    assert alive.exit_code == 1
    assert alive.duration_s > 1, "it had its time of grace"
    assert_soon(alive, dead)
    assert alive.stdout.endswith("busy\n")
    assert "mpxla.errors.PeerFailure: rank 1 (pid " in alive.stderr
    assert "Rank 0 was busy outside mpxla for 1 s after that" in alive.stderr
    assert "in hang_outside" in alive.stderr, "its stack is shown"


def hang_in_collective_of_user(transport):
    """Ranks 1 and 2 never come to it, but neither breaks a connection of rank 0's collective."""
    if transport.rank == 0:
        mark("rank 0 waits")
        dist.all_reduce(torch.ones(4))
    await_mark("rank 0 waits")
    time.sleep(0.3)
    if transport.rank == 1:
        transport.watch.report("user code", RuntimeError("stopped but alive"))
    time.sleep(4)


@pytest.mark.slow
def test_rank_in_a_collective_of_the_user_is_ended():
    results = run_host_unpooled(hang_in_collective_of_user, 3, grace_s=1.0)
    assert results[0].exit_code == 1
    assert results[0].duration_s < results[1].duration_s, "it was ended while the others lived"
    assert "rank 1 raised RuntimeError in user code: stopped but alive" in results[0].stderr
    assert "in all_reduce" in results[0].stderr


def notice_and_go_on(transport):
    if transport.rank == 1:
        kill_self()
    try:
        transport.recv([torch.ones(1)], 1, "forward").result()
    except RuntimeError as error:
        time.sleep(2.5)
        return str(error)


@pytest.mark.slow
def test_rank_that_noticed_the_failure_may_go_on():
    alive, _ = run_host_unpooled(notice_and_go_on, 2, grace_s=0.5)
    assert alive.exit_code == 0
    assert alive.value.startswith("rank 1 (pid ")


def die_with_forked_child(transport):
    if transport.rank == 1:
        if os.fork() == 0:
            os.setsid()  # else it is ended with its parent
            time.sleep(2 * SOON_S)
            os._exit(0)
        kill_self()
    transport.recv([torch.ones(1)], 2 if transport.rank == 0 else 0, "forward").result()


def test_forked_child_does_not_hide_the_death_of_its_parent():
    results = run_host_unpooled(die_with_forked_child, 3)
    assert [result.exit_code for result in results] == [1, -signal.SIGKILL, 1]
    for rank in (0, 2):
        assert_soon(results[rank], results[1])
        assert "PeerFailure: rank 1 (pid " in results[rank].stderr


def fork_a_child_that_ends(transport):
    """The child closes what it believes to be its own; nobody has connected before."""
    child = os.fork()
    if child == 0:
        transport.close()
        transport._abort()  # as at the end of the interpreter
        os._exit(0)
    os.waitpid(child, 0)
    other = 1 - transport.rank
    for channel in ("a", "b"):
        transport.send([torch.full((3,), float(transport.rank))], other, channel)
        assert transport.recv([torch.ones(3)], other, channel).result()[0][0].item() == other
    return transport.all_reduce(torch.ones(1), (0, 1)).result().item()


def test_a_forked_child_closes_nothing_of_its_parents():
    assert run_host(fork_a_child_that_ends, 2) == [2.0, 2.0]


def fail_before_sending(transport, is_connected):
    class Broken(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            if function == torch.Tensor.nbytes.__get__:  # is known before the values are
                return 8
            raise RuntimeError("device lost")

    if transport.rank == 1:
        if is_connected:
            transport.send([torch.ones(2)], 0, "first").result()
            time.sleep(0.2)  # so that the thread that sends is idle
        transport.send([torch.ones(2).as_subclass(Broken)], 0, "forward")
        time.sleep(1000)
    transport.recv([torch.ones(2)], 1, "forward").result()


@pytest.mark.parametrize("is_connected", [True, False])
def test_tensor_that_cannot_be_computed_fails_all_ranks(is_connected):
    results = run_host_unpooled(fail_before_sending, 2, is_connected, grace_s=1.0)
    assert [result.exit_code for result in results] == [1, 1]
    assert abs(results[0].duration_s - results[1].duration_s) < SOON_S
    for result in results:
        assert (
            "rank 1 raised RuntimeError in computing a 'forward' message: device lost"
            in result.stderr
        )


def leave_without_collective(transport):
    if transport.rank == 0:
        transport.all_reduce(torch.ones(1 << 20), (0, 1)).result()


def test_rank_that_left_before_a_collective_is_named():
    waiting, left = run_host_unpooled(leave_without_collective, 2)
    assert left.exit_code == 0
    assert waiting.exit_code == 1
    assert "PeerFailure: rank 1 finished (left) while rank 0 waited for all_reduce of float32" in (
        waiting.stderr
    )


def end_at_different_times(transport):
    if transport.rank == 1:
        transport.send([torch.ones(1 << 18)], 0, "forward")
        return "early"
    time.sleep(2)
    return transport.recv([torch.ones(1 << 18)], 1, "forward").result()[0].sum().item()


@pytest.mark.slow
def test_leaving_early_is_no_failure_and_everything_sent_arrives():
    late, early = run_host_unpooled(end_at_different_times, 2)
    assert (late.exit_code, early.exit_code) == (0, 0)
    assert (late.value, early.value) == (1 << 18, "early")


def forget_to_close():
    transport = open_transport()
    rank = transport.rank
    transport.send([torch.ones(3)], 1 - rank, "forward")
    transport.recv([torch.ones(3)], 1 - rank, "forward").result()
    transport.recv([torch.ones(3)], 1 - rank, "forward")
    transport.all_reduce(torch.ones(3), (0, 1)).result()
    transport.watch.close()
    sys.exit(7)


def test_process_can_end_with_threads_that_wait_in_gloo():
    results = run_ranks_unpooled(forget_to_close, 2)
    assert [result.exit_code for result in results] == [7, 7]


def mix_with_collectives_of_user(transport):
    """The user's group is used from the main thread while transfers run both ways behind it."""
    peer = 1 - transport.rank
    world = (0, 1)
    received, sums, gathered = [], [], []
    for round_ in range(30):
        tensor = torch.full((20_000,), float(round_))
        received.append(transport.recv([tensor], peer, "forward"))
        transport.send([tensor + transport.rank], peer, "forward")
        sums.append(transport.all_reduce(tensor, world))
        mine = torch.full((3,), float(transport.rank + round_))
        dist.all_reduce(mine)
        gathered.append(mine[0].item())
        if round_ % 10 == 0:
            dist.barrier()
            assert Objects(transport).allgather(round_, world) == [round_, round_]
    return (
        [handle.result()[0][0].item() for handle in received],
        [handle.result()[0].item() for handle in sums],
        gathered,
    )


def test_transfers_and_the_users_collectives_do_not_interfere():
    results = run_host(mix_with_collectives_of_user, 2)
    for rank, (received, sums, gathered) in enumerate(results):
        assert received == [round_ + 1.0 - rank for round_ in range(30)]
        assert sums == [2.0 * round_ for round_ in range(30)]
        assert gathered == [2.0 * round_ + 1 for round_ in range(30)]


def count_descriptors():
    counts = []
    for _ in range(2):
        transport = open_transport()
        world = (0, 1)
        transport.make_groups([world])
        transport.all_reduce(torch.ones(2), world).result()
        Objects(transport).allgather("x", world)
        close_transport(transport)
        dist.destroy_process_group()
        counts.append(len(os.listdir("/proc/self/fd")))
        os.environ["MPXLA_RENDEZVOUS_FILE"] += "-again"
    return counts


def test_sessions_leave_no_descriptors_behind():
    for result in run_ranks_unpooled(count_descriptors, 2):
        first, second = result.value
        assert second <= first


def make_unequal_groups(transport):
    transport.make_groups([(0, 1), (1,)] if transport.rank == 0 else [(0, 1)])


def test_unequal_groups_are_refused():
    results = run_host_unpooled(make_unequal_groups, 2)
    assert [result.exit_code for result in results] == [1, 1]
    errors = "".join(result.stderr for result in results)
    assert "makes the groups [(0, 1), (1,)], but rank 1 makes others" in errors or (
        "makes the groups [(0, 1)], but rank 0 makes others" in errors
    )


def use_unknown_group(transport):
    if transport.rank != 2:
        with pytest.raises(
            Exception, match=r"over the ranks \(0, 1\), for which no group was made"
        ):
            transport.all_reduce(torch.ones(1), (0, 1))


def test_group_that_was_not_made_is_an_error():
    run_host(use_unknown_group, 3)
