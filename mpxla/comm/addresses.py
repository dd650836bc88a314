"""Which addresses of this host the processes of a job talk over.

A socket listens where it is used: on the loopback interface when all processes are on one host,
else on the interface that leads to the host of rank 0. Nothing listens on all interfaces, except
where a host knows itself by a loopback name only.

This file knows names, interfaces and ports; it must not know what is served, nor torch.
"""

import contextlib
import errno
import fcntl
import ipaddress
import socket
import struct

__all__ = [
    "host_identity",
    "interface_for",
    "is_loopback",
    "listen",
    "listen_for_store",
    "listening_address",
    "reserved_port",
]

_SIOCGIFADDR = 0x8915
_LOOPBACK = "127.0.0.1"


def host_identity() -> str:
    """A text that differs between hosts, and between containers with their own network."""
    boot_id = ""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        boot_id = file.read().strip()
    return f"{socket.gethostname()} {boot_id}"


def is_loopback(address: str) -> bool:
    """Whether an address (not a name) is reached from this host only."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def listen(host: str, port: int = 0, backlog: int = 128) -> socket.socket:
    """A listening socket at an address of this host; of any free port if none is given."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=backlog)


def reserved_port(address: str) -> int:
    """A port of this host that the system gives to nobody else for the next minute.

    A connection to the port, which the serving end closes first, leaves it waiting for stray
    packets (TIME_WAIT). Meanwhile the system chooses it for no socket that asks for any port, and a
    server that sets SO_REUSEADDR, as nearly all do, can open it, perhaps in another process.
    """
    with listen(address) as server:
        port = server.getsockname()[1]
        with socket.create_connection((address, port)) as client:
            server.accept()[0].close()
            client.recv(1)  # the other end has closed
    return port


def listening_address(is_one_host: bool, master_addr: str | None) -> str:
    """Chooses where rank 0 listens; without `master_addr`, this host is the master's.

    Returns:
        The address of this host to bind, and to publish.
    """
    if is_one_host:
        return _LOOPBACK
    target = master_addr or socket.gethostname()
    for family, _, _, _, address in socket.getaddrinfo(target, 0, type=socket.SOCK_STREAM):
        host = str(address[0])
        if is_loopback(host):
            continue
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((host, 0))
            return host
    # Rank 0 is not on the master's host: publish the interface that leads there.
    return _address_towards(target)


def listen_for_store(is_one_host: bool, master_addr: str, port: int) -> socket.socket | None:
    """Opens the listening socket of the store that rank 0 serves.

    A name that leads to the loopback interface on its own host (Debian's 127.0.1.1) says nothing
    about where others look for it, so then the store listens on all interfaces.

    Returns:
        The socket; None if the port is taken, perhaps by another store of this very process.
    """
    bound = listening_address(is_one_host, master_addr)
    is_name = not _is_address(master_addr)
    if not is_one_host and is_name and is_loopback(bound):
        bound = ""
    try:
        return listen(bound, port, backlog=2048)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return None


def interface_for(is_one_host: bool, master_addr: str | None) -> str | None:
    """Name of the network interface by which the processes of a job reach each other.

    Returns:
        As in `lo` or `eth0`; None if it cannot be told.
    """
    if is_one_host:
        return _interface_of(_LOOPBACK)
    if master_addr is None:
        return None
    try:
        local = listening_address(False, master_addr)
    except OSError:  # a name that does not resolve: whoever connects there says so
        return None
    # A loopback address would not be reached from the other hosts.
    return None if is_loopback(local) else _interface_of(local)


def _address_towards(target: str) -> str:
    """The own address of packets that go to a host; nothing is sent."""
    family, kind, _, _, address = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _interface_of(address: str) -> str | None:
    """The interface that has an address."""
    wanted = ipaddress.ip_address(address.partition("%")[0])
    for _, name in socket.if_nameindex():
        if wanted in _addresses_of(name):
            return name
    return None


def _addresses_of(interface: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    found: list[ipaddress.IPv4Address | ipaddress.IPv6Address] = []
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode()[:15])
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        found.append(ipaddress.IPv4Address(answer[20:24]))
    with contextlib.suppress(OSError), open("/proc/net/if_inet6") as file:
        for line in file:
            digits, *_, name = line.split()
            if name == interface:
                found.append(ipaddress.IPv6Address(bytes.fromhex(digits)))
    return found
