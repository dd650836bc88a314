"""Somebody who can reach the ports of a job, and does not know its secret."""

import contextlib
import os
import socket
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import mpxla
import mpxla as smp
from mpxla.comm import secret as secret_module
from mpxla.comm.addresses import host_identity
from mpxla.comm.lifeline import Lifeline
from mpxla.comm.lifeline_server import encode
from mpxla.comm.rollcall import call_roll
from mpxla.comm.store import session_store
from mpxla.env import read_environment
from mpxla.errors import PeerFailure, RankMismatch
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks

NOISE = (
    b"",
    b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    encode(type="hello", rank=1, token="guess", home="here"),
    encode(type="hello", rank=1, nonce="0" * 64, proof="0" * 64, home="here"),
    encode(type="report", rank=1, text="rank 1 raised nothing"),
    b"\x80\x04cposix\nsystem\n(S'true'\ntR.",
    bytes(range(256)) * 40,
)


def listening_sockets():
    """(address, port, inode) of every listening TCP socket of this network."""
    found = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                digits, _, port = fields[1].partition(":")
                found.add((digits, int(port, 16), fields[9]))
    return found


def inodes_of(process):
    """Inodes of the sockets that a process has open."""
    found = set()
    folder = Path(f"/proc/{process}/fd")
    with contextlib.suppress(OSError):  # it has ended
        for descriptor in folder.iterdir():
            with contextlib.suppress(OSError):
                link = os.readlink(descriptor)
                if link.startswith("socket:["):
                    found.add(link.removeprefix("socket:[").removesuffix("]"))
    return found


def own_listening_addresses(except_for=frozenset()):
    """Addresses, as digits, at which this process listens, without some sockets."""
    own = inodes_of("self") - except_for
    return sorted(address for address, _, inode in listening_sockets() if inode in own)


def descendants(process):
    """The processes that a process has started, and those that they have started."""
    found = set()
    for thread in Path(f"/proc/{process}/task").iterdir():
        with contextlib.suppress(OSError):
            for child in (thread / "children").read_text().split():
                found |= {child, *descendants(child)}
    return found


LOOPBACK = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")


def pester(port):
    """Says all kinds of things to a port, each on a connection of its own; some stay open."""
    opened = []
    for text in NOISE:
        try:
            connection = socket.create_connection(("127.0.0.1", port), 1.0)
            opened.append(connection)
            connection.sendall(text)
        except OSError:
            continue
    return opened


@contextmanager
def attacker():
    """Talks to every port that a rank opens meanwhile, as soon as it is there."""
    known, done, opened = {s[2] for s in listening_sockets()}, threading.Event(), []
    seen = []

    def attack():
        while not done.is_set():
            for _, port, inode in listening_sockets():
                if inode in known:
                    continue
                known.add(inode)
                # Other jobs of this host are left alone.
                if any(inode in inodes_of(process) for process in descendants(os.getpid())):
                    seen.append(port)
                    opened.extend(pester(port))
            time.sleep(0.002)

    thread = threading.Thread(target=attack)
    thread.start()
    try:
        yield seen
    finally:
        done.set()
        thread.join()
        for connection in opened:
            connection.close()


def meet_at_a_port():
    """As scripts do without torchrun: the store is rank 0's, and so is everything that listens."""
    os.environ.pop("MPXLA_RENDEZVOUS_FILE")


def train(secret, runtime_dir):
    meet_at_a_port()
    of_earlier_tests = inodes_of("self")  # gloo leaves its sockets open (torch 2.9)
    os.environ["XDG_RUNTIME_DIR"] = runtime_dir
    if secret is not None:
        os.environ["MPXLA_SECRET"] = secret
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    torch.manual_seed(0)
    layers = torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)
    model = smp.DistributedModel(torch.nn.Sequential(*layers))

    @smp.step
    def step(model, x):
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    losses = [step(model, torch.ones(4, 4)).reduce_mean().item() for _ in range(2)]
    time.sleep(0.5)  # for the attacker to come to the ports that were opened last
    losses.append(step(model, torch.ones(4, 4)).reduce_mean().item())
    gathered = smp.allgather({"rank": smp.rank(), "set": {1, 2}}, smp.WORLD)
    listening = own_listening_addresses(of_earlier_tests)
    smp.shutdown()
    return losses, gathered, listening


@pytest.mark.parametrize(
    "secret",
    [
        pytest.param(None, id="file"),
        pytest.param("0123456789abcdef" * 4, id="environment", marks=pytest.mark.slow),
    ],
)
def test_strangers_at_every_port_change_nothing(tmp_path, secret):
    with attacker() as ports:
        found = run_ranks(train, 2, secret, str(tmp_path))
    for losses, gathered, listening in found:
        assert len(set(losses)) == 1 and losses == found[0][0]
        assert gathered == [{"rank": 0, "set": {1, 2}}, {"rank": 1, "set": {1, 2}}]
        # Rank 0: store and lifeline; both: gloo and the door for messages.
        assert listening and set(listening) <= set(LOOPBACK)
    assert len(found[0][2]) >= len(found[1][2]) + 2
    assert len(ports) >= len(found[0][2])
    assert list(tmp_path.iterdir()) == [], "the secret of rank 0 was left behind"


def impersonate():
    """Rank 1 follows the protocol of `init` as far as anybody can who does not know the secret."""
    meet_at_a_port()
    if os.environ["RANK"] == "0":
        os.environ["MPXLA_SECRET"] = "0123456789abcdef" * 4
        with pytest.raises(PeerFailure) as caught:
            smp.init({"pipeline_parallel_degree": 2, "init_timeout_s": 4})
        return str(caught.value)
    store = session_store(read_environment(), 60.0)
    call_roll(store, 1, 2, mpxla.__version__, 60.0)
    board = secret_module._Board(store, 1, 2, 60.0)
    board.exchange("start", [host_identity(), "0" * 64, True])
    board.write("check", board.read("check", 0))  # claims to have the key
    with pytest.raises(PeerFailure, match="did not take it for a rank of this job"):
        Lifeline(1, 2, store, key=b"a guess", is_one_host=True, connect_timeout_s=60.0)
    return None


@pytest.mark.slow
def test_a_process_that_claims_to_be_rank_1_is_turned_away_before_any_object():
    text, _ = run_ranks(impersonate, 2)
    assert "waited 4 s for all 2 ranks to connect" in text


def start_with(secrets):
    os.environ["MPXLA_SECRET"] = secrets[int(os.environ["RANK"])]
    with pytest.raises(RankMismatch) as caught:
        smp.init({"pipeline_parallel_degree": 2})
    dist_is_clean = not dist.is_initialized() and not smp.is_initialized()
    return str(caught.value), dist_is_clean


def test_a_wrong_secret_is_an_error_on_all_ranks_that_names_it():
    found = run_ranks(start_with, 2, ["a" * 32, "b" * 32])
    assert len(set(found)) == 1
    text, dist_is_clean = found[0]
    assert text.startswith("ranks [1] have another secret than rank 0. Set MPXLA_SECRET to")
    assert dist_is_clean
