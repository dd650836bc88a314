"""A rank whose process is stopped (SIGSTOP) ends the job wherever it and the others stand.

A stopped process keeps its connections, so nothing but its silence tells. It ends here by SIGKILL,
as a launcher would end it once another rank has failed.
"""

import contextlib
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import mpxla as smp
from mpxla import session
from mpxla.checkpoint import save
from mpxla.comm import host, lifeline
from mpxla.runtime.engine import StepEngine
from mpxla.tests.ranks.run import run_ranks_unpooled

pytestmark = pytest.mark.ranks

STALL_S = 3.0
# What is promised is 15 s after the timeout, of which mpxla leaves the script 10; a busy machine
# needs more.
SOON_S = 60.0


@smp.step
def train(model, x):
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


def stop_self():
    print(f"stops at {time.time()}", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)


def before(owner, name):
    """Stops this process where it calls something the next time."""
    original = getattr(owner, name)

    def stop_first(*args, **kwargs):
        stop_self()
        return original(*args, **kwargs)

    setattr(owner, name, stop_first)


def prepare(replicas=False, **further):
    config = {"microbatches": 2, "stall_timeout_s": STALL_S, "ddp": replicas, **further}
    smp.init({"pipeline_parallel_degree": 1 if replicas else 2, **config})
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
    train(model, torch.ones(4, 4))
    smp.barrier()  # nobody needs a message of this step any more
    return model, optimizer


def at_barrier(is_stopped, folder):
    prepare()
    if is_stopped:
        time.sleep(1.0)  # so that it has told where it is
        stop_self()
    smp.barrier()


def at_allgather(is_stopped, folder):
    prepare()
    if is_stopped:
        stop_self()
    smp.allgather(smp.rank(), smp.WORLD)


def in_a_step(is_stopped, folder):
    model, _ = prepare()
    if is_stopped:
        stop_self()
    train(model, torch.ones(4, 4))


def in_compilation(is_stopped, folder):
    model, _ = prepare()
    if is_stopped:
        before(StepEngine, "_build")
    train(model, torch.ones(8, 4))


def at_clipping(is_stopped, folder):
    model, _ = prepare()
    if is_stopped:
        stop_self()
    smp.clip_grad_norm_(model.parameters(), 1.0)


def in_an_update(is_stopped, folder):
    _, optimizer = prepare(replicas=True, shard_optimizer_state=True, transport="host")
    if is_stopped:
        stop_self()
    optimizer.step()
    smp.barrier()


def saving(is_stopped, folder):
    model, optimizer = prepare()
    if is_stopped:
        before(save, "save_object")
    smp.save_checkpoint(folder, "a", model=model, optimizer=optimizer)


def loading(is_stopped, folder):
    model, optimizer = prepare()
    smp.save_checkpoint(folder, "a", model=model, optimizer=optimizer)
    if is_stopped:
        stop_self()
    smp.resume_from_checkpoint(folder, "a")


def saving_in_the_background(is_stopped, folder):
    model, optimizer = prepare()
    if is_stopped:
        before(save, "save_object")
    smp.save_checkpoint(folder, "a", model=model, optimizer=optimizer, asynchronous=True).wait()


def ending_with_a_checkpoint_in_the_background(is_stopped, folder):
    model, optimizer = prepare()
    if is_stopped:
        before(save, "save_object")
    smp.save_checkpoint(folder, "a", model=model, optimizer=optimizer, asynchronous=True)


def making_the_default_group(is_stopped, folder):
    if is_stopped:
        before(session.dist, "init_process_group")
    prepare()


def making_the_transport(is_stopped, folder):
    if is_stopped:
        before(host.HostTransport, "__init__")
    prepare()


def at_shutdown(is_stopped, folder):
    prepare()
    if is_stopped:
        stop_self()
    smp.shutdown()


def in_shutdown(is_stopped, folder):
    prepare()
    if is_stopped:
        before(lifeline.Lifeline, "_release")
    smp.shutdown()


def at_the_end(is_stopped, folder):
    prepare()
    if is_stopped:
        stop_self()


def elsewhere(is_stopped, folder):
    """The other ranks do not even need the stopped one."""
    prepare()
    if is_stopped:
        stop_self()
    end = time.monotonic() + 600
    while time.monotonic() < end:
        torch.ones(100, 100).sum()


def one_rank(cases, folder):
    """Ranks 0 and 1 are the world of the first case, 2 and 3 that of the second, and so on."""
    place, rank = divmod(int(os.environ["RANK"]), 2)
    work, stopped = cases[place]
    folder = Path(folder) / str(place)
    meeting = os.environ["MPXLA_RENDEZVOUS_FILE"]
    own = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2}
    own["MPXLA_RENDEZVOUS_FILE"] = f"{meeting}-{place}"
    os.environ.update({name: str(value) for name, value in own.items()})
    (folder / f"{rank}.pid").write_text(str(os.getpid()))
    work(rank == stopped, str(folder))


def state_of(pid):
    """Of a process, as a letter; empty if there is none any more."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def kill_after_the_other(folder, stopped, ended):
    """Ends the stopped process when the other one has ended."""
    files = [folder / f"{rank}.pid" for rank in range(2)]
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        time.sleep(0.1)
        pids = [int(f.read_text() or 0) if f.exists() else 0 for f in files]
        if all(pids) and state_of(pids[stopped]) in ("", "T"):
            if state_of(pids[1 - stopped]):
                continue
            ended.append(time.time())
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids[stopped], signal.SIGKILL)
            return


def errors_of(cases, folder):
    """What the other rank of every case wrote when one stopped; all have failed in time.

    Several cases run at a time, since they mostly wait.
    """
    ended, killers = [[] for _ in cases], []
    for place, (_, stopped) in enumerate(cases):
        (folder / str(place)).mkdir()
        arguments = (folder / str(place), stopped, ended[place])
        killers.append(threading.Thread(target=kill_after_the_other, args=arguments, daemon=True))
        killers[-1].start()
    results = run_ranks_unpooled(one_rank, 2 * len(cases), cases, str(folder), timeout_s=240)
    for killer in killers:
        killer.join(10)
    texts = []
    for place, (work, stopped) in enumerate(cases):
        own, other = results[2 * place + stopped], results[2 * place + 1 - stopped]
        assert own.exit_code == -signal.SIGKILL, (work, own.stderr, other.stderr)
        assert other.exit_code == 1, (work, other.stderr)
        stopped_at = float(re.search(r"stops at (\S+)", own.stderr)[1])
        assert STALL_S < ended[place][0] - stopped_at < STALL_S + SOON_S, work
        texts.append(other.stderr)
    return texts


def check(cases, folder):
    texts = errors_of(cases, folder)
    for (work, stopped), text in zip(cases, texts, strict=True):
        ended = f"PeerFailure: no action completed for 3 s (stall_timeout_s): rank {stopped} is"
        assert ended in text, (work, text)
        silent = "is silent: its process gives no sign of life, so it is stopped (SIGSTOP)"
        assert silent in text, (work, text)
        assert re.search(rf" {stopped} +\d+ s +\(silent\)", text), (work, text)
    return texts


def test_rank_0_stopped_while_the_other_is_in_a_step(tmp_path):
    (text,) = check([(in_a_step, 0)], tmp_path)
    assert "rank 0: a 'control' message from rank 0" in text


@pytest.mark.slow
def test_stopped_while_the_other_is_at_a_barrier_or_at_its_end(tmp_path):
    """At the end, the launcher sees that the other failed, although it had nothing left to do."""
    text, *_ = check([(at_barrier, 1), (at_the_end, 0), (at_the_end, 1)], tmp_path)
    assert "was waiting in smp.barrier at test_freezes.py:" in text
    assert "last test_freezes.py:" in text and "Look at the output of rank 1" in text


FURTHER = [
    (at_allgather, 0),
    (in_compilation, 1),
    (at_clipping, 1),
    (in_an_update, 0),
    (saving, 1),
    (loading, 1),
    (saving_in_the_background, 0),
    (ending_with_a_checkpoint_in_the_background, 1),
    (making_the_default_group, 0),
    (making_the_transport, 1),
    (at_shutdown, 0),
    (in_shutdown, 1),
    (elsewhere, 0),
]


@pytest.mark.slow
@pytest.mark.parametrize("first", range(4))
def test_stopped_wherever_the_other_is(tmp_path, first):
    check(FURTHER[first::4], tmp_path)
