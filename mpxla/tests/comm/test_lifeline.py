import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch.distributed as dist

from mpxla.comm import lifeline as lifeline_module
from mpxla.comm.handshake import introduce
from mpxla.comm.lifeline import Lifeline
from mpxla.comm.lifeline_server import LifelineServer, decode, encode
from mpxla.errors import PeerFailure

pytestmark = pytest.mark.unit

KEY = b"known to all ranks"


@contextmanager
def lifelines(world_size, store=None, **options):
    """The lifelines of all ranks in one process, where nobody may be ended by a watchdog."""
    store = store or dist.HashStore()
    options = {
        "key": KEY,
        "is_one_host": True,
        "grace_s": 1000.0,
        "connect_timeout_s": 60.0,
        **options,
    }
    with ThreadPoolExecutor(world_size) as pool:
        opened = list(
            pool.map(lambda rank: Lifeline(rank, world_size, store, **options), range(world_size))
        )
        try:
            yield opened
        finally:
            list(pool.map(lambda line: line.close(linger_s=1.0), opened))
            for line in opened:
                line.noticed.set()


def await_that(condition, timeout_s=30.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def cut(line):
    """What the kernel does when the process of a rank dies."""
    line._closed.set()
    line._connection.shutdown(socket.SHUT_RDWR)


def test_report_reaches_all_ranks():
    with lifelines(3) as lines:
        heard = []
        lines[0].on_failure(heard.append)
        lines[2].report("stage 1", ValueError("bad"))
        await_that(lambda: heard and all(line.failure for line in lines))
        for line in lines:
            with pytest.raises(PeerFailure, match="rank 2 raised ValueError in stage 1: bad"):
                line.check()
        assert heard == [lines[1].failure]


def test_first_report_stays_on_all_ranks():
    with lifelines(3) as lines:
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(lambda line: line.report("x", ValueError(str(line.rank))), lines))
        lines[1].report("later", PeerFailure("caused by another"))
        await_that(lambda: all(line.failure for line in lines))
        assert len({line.failure for line in lines}) == 1
        assert "raised ValueError in x" in lines[0].failure.text


@pytest.mark.parametrize("dead", [1, 2])
def test_lost_process_is_named(dead):
    with lifelines(3) as lines:
        cut(lines[dead])
        others = [line for line in lines if line.rank != dead]
        await_that(lambda: all(line.failure for line in others))
        for line in others:
            assert line.failure.rank == dead
            assert f"rank {dead} (pid " in line.failure.text
            assert "died: its process ended without a report" in line.failure.text


def test_lost_rank_0_is_noticed_without_a_server():
    with lifelines(3) as lines:
        lines[0]._server.stop(0.0)
        await_that(lambda: lines[1].failure and lines[2].failure)
        assert lines[1].failure.rank == 0
        assert "rank 0 died" in lines[1].failure.text


def test_leaving_in_order_is_no_failure():
    with lifelines(3) as lines:
        lines[1].close()
        await_that(lambda: all(line.has_left(1) for line in lines))
        assert [line.failure for line in lines] == [None] * 3
        lines[2].report("after that", ValueError("bad"))
        await_that(lambda: lines[0].failure)
        assert lines[1].failure is None


def test_rank_0_stays_until_the_others_have_left():
    with lifelines(3) as lines:
        closing = threading.Thread(target=lines[0].close, args=(5.0,))
        closing.start()
        await_that(lambda: lines[1].has_left(0))
        lines[1].report("still there", ValueError("bad"))
        await_that(lambda: lines[2].failure)
        assert lines[2].failure.rank == 1
        closing.join(10.0)
        assert not closing.is_alive()


def test_rank_0_does_not_wait_for_ever():
    with lifelines(2) as lines:
        start = time.monotonic()
        lines[0].close(linger_s=0.3)
        assert 0.3 <= time.monotonic() - start < 20
        await_that(lambda: lines[1].has_left(0))
        assert lines[1].failure is None, "its end was announced"


def test_missing_rank_is_named():
    with pytest.raises(PeerFailure, match=r"rank 0 waited 0\.3 s for all 2 ranks to connect"):
        Lifeline(0, 2, dist.HashStore(), key=KEY, is_one_host=True, connect_timeout_s=0.3)
    with pytest.raises(PeerFailure, match=r"rank 1 waited 0\.3 s for rank 0 to start mpxla"):
        Lifeline(1, 2, dist.HashStore(), key=KEY, is_one_host=True, connect_timeout_s=0.3)


def test_unreachable_server_is_an_error_with_a_remedy():
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        port = deaf.getsockname()[1]
        store = dist.HashStore()
        store.set("mpxla_lifeline/address", f"127.0.0.1 {port}")
        with pytest.raises(
            PeerFailure, match=rf"could not reach rank 0 at 127.0.0.1 port {port}.*MASTER_ADDR"
        ):
            Lifeline(1, 2, store, key=KEY, is_one_host=True)


def test_rank_that_does_not_connect_is_an_error():
    server = LifelineServer("127.0.0.1", 2, KEY)
    store = dist.HashStore()
    store.set("mpxla_lifeline/address", f"127.0.0.1 {server.port}")
    with pytest.raises(PeerFailure, match=r"waited 0\.3 s for all 2 ranks to connect"):
        Lifeline(1, 2, store, key=KEY, is_one_host=True, connect_timeout_s=0.3)
    server.stop(0.0)


def test_failure_before_the_others_connect_is_told_to_them():
    server = LifelineServer("127.0.0.1", 2, KEY)
    with socket.create_connection(("127.0.0.1", server.port)) as early:
        introduce(early, KEY, 0, "here")
        early.sendall(encode(type="report", text="rank 0 raised KeyError: early"))
        assert decode(bytearray(early.recv(4096)))[0]["type"] == "failure"
    store = dist.HashStore()
    store.set("mpxla_lifeline/address", f"127.0.0.1 {server.port}")
    with pytest.raises(PeerFailure, match="rank 0 raised KeyError: early"):
        Lifeline(1, 2, store, key=KEY, is_one_host=True, grace_s=1000.0)
    server.stop(0.0)


@pytest.mark.parametrize(
    "noise",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"[1]\n",
        b"{}\n",
        encode(type="hello", rank=1, nonce="0", proof="0", home="here"),
        encode(type="hello", rank=[1], nonce={}, proof=None, home=3),
        b"[" * 4000 + b"\n",
        b"x" * (1 << 21),
    ],
)
def test_strangers_are_dropped_and_harm_nobody(noise):
    with lifelines(2) as lines:
        with socket.create_connection(("127.0.0.1", lines[0]._server.port)) as stranger:
            stranger.settimeout(30.0)
            try:
                stranger.sendall(noise)
                assert decode(bytearray(stranger.recv(100)))[0]["type"] == "challenge"
                assert stranger.recv(100) == b""
            except ConnectionError:
                pass
        lines[1].report("", ValueError("heard"))
        await_that(lambda: lines[0].failure)
        assert "heard" in lines[0].failure.text


def test_a_rank_that_is_there_cannot_be_replaced():
    with lifelines(2) as lines:
        with socket.create_connection(("127.0.0.1", lines[0]._server.port)) as second:
            introduce(second, KEY, 1, "elsewhere")
            second.settimeout(30.0)
            assert second.recv(100) == b""
        lines[1].report("", ValueError("heard"))
        await_that(lambda: lines[0].failure)
        assert "heard" in lines[0].failure.text


def test_messages_may_come_in_pieces():
    data = encode(type="bye", rank=1) + encode(type="ready")
    buffer, messages = bytearray(), []
    for byte in data:
        buffer.append(byte)
        messages += decode(buffer)
    assert messages == [{"type": "bye", "rank": 1}, {"type": "ready"}]
    assert json.loads(encode(text="a\nb")) == {"text": "a\nb"}
    assert encode(text="a\nb").count(b"\n") == 1


def test_one_host_listens_on_loopback_only():
    with lifelines(2) as lines:
        assert lines[0]._server._door.listener.getsockname()[0] == "127.0.0.1"


def test_address_of_a_tcp_store_is_found_behind_prefixes():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert lifeline_module._store_host(dist.PrefixStore("a", dist.PrefixStore("b", store))) == (
        "127.0.0.1"
    )
    assert lifeline_module._store_host(dist.HashStore()) is None
