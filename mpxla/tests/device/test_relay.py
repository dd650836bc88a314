"""A client behind a relay does not notice the end of its server."""

import socket

import pytest

from mpxla.device.relay import Relay

pytestmark = pytest.mark.unit


def connect(relay: Relay) -> socket.socket:
    host, port = relay.address.split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def test_bytes_pass_both_ways_and_the_loss_of_the_server_is_hidden():
    with socket.create_server(("127.0.0.1", 0)) as server:
        relay = Relay(*server.getsockname())
        with connect(relay) as client:
            served, _ = server.accept()
            client.sendall(b"question")
            assert served.recv(100) == b"question"
            served.sendall(b"answer")
            assert client.recv(100) == b"answer"
            served.close()
            client.settimeout(0.3)
            with pytest.raises(TimeoutError):
                client.recv(100)
            client.sendall(b"anybody there?")
            client.sendall(b"still nobody?")
            relay.close()
            client.settimeout(10)
            assert client.recv(100) == b""


def test_the_end_of_the_client_reaches_the_server():
    with socket.create_server(("127.0.0.1", 0)) as server:
        relay = Relay(*server.getsockname())
        client = connect(relay)
        served, _ = server.accept()
        client.close()
        served.settimeout(10)
        assert served.recv(100) == b""
        served.close()
        relay.close()


def test_without_a_server_the_connection_ends():
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        relay = Relay(*deaf.getsockname())
        with connect(relay) as client:
            assert client.recv(100) == b""
        relay.close()
