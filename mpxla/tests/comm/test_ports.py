import socket

import pytest

from mpxla.comm.addresses import reserved_port

pytestmark = pytest.mark.unit


def test_a_reserved_port_is_free_for_servers_only():
    port = reserved_port("127.0.0.1")
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    for _ in range(2):
        with socket.create_server(("127.0.0.1", port)) as server:
            assert server.getsockname()[1] == port


def test_ports_differ():
    ports = [reserved_port("127.0.0.1") for _ in range(20)]
    assert len(set(ports)) == 20
