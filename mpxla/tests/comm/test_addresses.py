import socket

import pytest

from mpxla.comm import addresses as module
from mpxla.comm.addresses import interface_for, is_loopback, listen_for_store, reserved_port

pytestmark = pytest.mark.unit


def test_several_hosts_listen_where_the_master_address_leads(monkeypatch):
    addresses = {"10.9.9.9": False, "192.0.2.7": True}

    class FakeSocket:
        def __init__(self, family, kind):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def bind(self, address):
            if not addresses[address[0]]:
                raise OSError("not an address of this host")

        def connect(self, address):
            assert address[0] == "10.9.9.9"

        def getsockname(self):
            return ("192.0.2.7", 1234)

    monkeypatch.setattr(module.socket, "socket", FakeSocket)
    choose = module.listening_address
    assert choose(is_one_host=True, master_addr="192.0.2.7") == "127.0.0.1"
    assert choose(is_one_host=False, master_addr="192.0.2.7") == "192.0.2.7"
    assert choose(is_one_host=False, master_addr="10.9.9.9") == "192.0.2.7"


@pytest.mark.parametrize(
    ("is_one_host", "master_addr", "bound"),
    [
        (True, "127.0.0.1", "127.0.0.1"),
        (True, "the.name.is.not.asked.for", "127.0.0.1"),
        (False, "127.0.0.1", "127.0.0.1"),
        (False, "localhost", "0.0.0.0"),
    ],
)
def test_store_listens_where_it_is_used(is_one_host, master_addr, bound):
    port = reserved_port("127.0.0.1")
    listener = listen_for_store(is_one_host, master_addr, port)
    assert listener is not None
    with listener:
        assert listener.getsockname() == (bound, port)
        assert listen_for_store(is_one_host, master_addr, port) is None


def test_loopback_interface_is_found_by_its_address():
    names = [name for _, name in socket.if_nameindex()]
    assert interface_for(True, "10.9.9.9") in names
    assert module._interface_of("127.0.0.1") == module._interface_of("::1")


def test_several_hosts_do_not_meet_on_the_loopback_interface():
    assert interface_for(False, "127.0.0.1") is None
    assert interface_for(False, None) is None
    assert interface_for(False, "no.such.name.invalid") is None


def test_interface_that_leads_to_the_master(monkeypatch):
    monkeypatch.setattr(module, "listening_address", lambda *_: "192.0.2.7")
    addresses = {"lo": "127.0.0.1", "eth7": "192.0.2.7"}
    monkeypatch.setattr(module.socket, "if_nameindex", lambda: enumerate(addresses, 1))
    monkeypatch.setattr(
        module, "_addresses_of", lambda name: [module.ipaddress.ip_address(addresses[name])]
    )
    assert interface_for(False, "node0") == "eth7"


@pytest.mark.parametrize(
    ("address", "expected"),
    [("127.0.1.1", True), ("::1", True), ("192.0.2.7", False), ("fe80::1%eth0", False)],
)
def test_loopback_addresses(address, expected):
    assert is_loopback(address) is expected
