import json
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from mpxla.comm.handshake import Stranger, answer_hello, introduce, new_nonce
from mpxla.errors import PeerFailure

pytestmark = pytest.mark.unit

KEY = b"known to all ranks"


def listen(behave):
    """A server that does one thing with its first connection, and its address."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve():
        with server:
            connection, _ = server.accept()
        with connection, connection.makefile("rwb") as file:
            behave(file)

    return server.getsockname(), serve


def greet(behave, key=KEY, rank=1):
    address, serve = listen(behave)
    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(serve)
        with socket.create_connection(address, 10.0) as connection:
            try:
                introduce(connection, key, rank, "here")
                rest = connection.recv(100)
            finally:
                connection.close()
                served.result()
    return rest


def honest(file, key=KEY, world_size=2):
    challenge = new_nonce()
    file.write(json.dumps({"nonce": challenge}).encode() + b"\n")
    file.flush()
    found = answer_hello(key, file.readline(), challenge, world_size)
    file.write(json.dumps({"proof": found[2]}).encode() + b"\nrest")
    file.flush()
    assert found[:2] == (1, "here")


def test_both_ends_prove_themselves_and_nothing_behind_is_read():
    assert greet(honest) == b"rest"


def test_another_key_is_refused():
    with pytest.raises(Stranger, match="says that it is rank 1, and cannot prove it"):
        greet(honest, key=b"another")


def test_a_rank_beyond_the_world_is_refused():
    with pytest.raises(Stranger, match="no such rank"):
        greet(honest, rank=2)


def reflect(file):
    """Sends back what the rank says: its own nonce, and its own proof."""
    file.write(json.dumps({"nonce": "0" * 64}).encode() + b"\n")
    file.flush()
    file.write(file.readline())
    file.flush()


def test_a_server_that_reflects_proves_nothing():
    with pytest.raises(PeerFailure, match="somebody answered who does not know the secret"):
        greet(reflect)


@pytest.mark.parametrize("text", [b"", b"\n", b"[1]\n", b"x" * 5000, b"[" * 3000 + b"\n"])
def test_a_server_that_talks_nonsense_is_an_error(text):
    def behave(file):
        file.write(text)

    with pytest.raises(PeerFailure, match="did not take it for a rank of this job"):
        greet(behave)


def test_a_recorded_greeting_is_worth_nothing():
    recorded = []

    def record(file):
        file.write(json.dumps({"nonce": "1" * 64}).encode() + b"\n")
        file.flush()
        recorded.append(file.readline())

    with pytest.raises(PeerFailure):
        greet(record)
    assert answer_hello(KEY, recorded[0], "1" * 64, 2)[0] == 1
    with pytest.raises(Stranger, match="cannot prove it"):
        answer_hello(KEY, recorded[0], "2" * 64, 2)


@pytest.mark.parametrize(
    "hello",
    [
        {},
        {"type": "hello"},
        {"type": "hello", "rank": "1", "nonce": "", "proof": "", "home": ""},
        {"type": "hello", "rank": True, "nonce": "", "proof": "", "home": ""},
        {"type": "hello", "rank": -1, "nonce": "", "proof": "", "home": ""},
        {"type": "hello", "rank": 1, "nonce": 0, "proof": "", "home": ""},
        {"type": "hello", "rank": 1, "nonce": "", "proof": "\ud800", "home": ""},
        {"type": "hello", "rank": 1, "nonce": "", "proof": [], "home": ""},
    ],
)
def test_greetings_without_a_proof_are_refused(hello):
    with pytest.raises(Stranger):
        answer_hello(KEY, json.dumps(hello).encode(), "0", 2)
