"""Ports for servers that open them later, perhaps in another process.

This file must not know what is served.
"""

import socket

__all__ = ["reserved_port"]


def reserved_port(address: str) -> int:
    """A port of this host that the system gives to nobody else for the next minute.

    A connection to the port, which the serving end closes first, leaves it waiting for stray
    packets (TIME_WAIT). Meanwhile the system chooses it for no socket that asks for any port, and a
    server that sets SO_REUSEADDR, as nearly all do, can open it.

    Args:
        address: IPv4 or IPv6 address of this host.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as server:
        port = server.getsockname()[1]
        with socket.create_connection((address, port)) as client:
            server.accept()[0].close()
            client.recv(1)  # the other end has closed
    return port
