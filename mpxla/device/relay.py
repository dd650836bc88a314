"""Hides the loss of a server from a client that would not survive it.

XLA's coordination client ends its whole process when the process that serves it dies (jaxlib 0.10:
an abort; a Python callback in its place ends in std::bad_cast). But the death of a rank is news for
the lifeline, which ends the others with an error that names the rank. So the client talks to a
relay in its own process: when the server is lost, its connection stays open, without answers.

Knows sockets only.
"""

import contextlib
import socket
import threading

__all__ = ["Relay"]

_CHUNK_BYTES = 1 << 16


class Relay:
    """Forwards local connections to a server.

    Attributes:
        address: host and port to give to the client, as in `127.0.0.1:4321`.
    """

    def __init__(self, host: str, port: int) -> None:
        """Starts to listen on the loopback interface, for a server at `host` and `port`."""
        self._server = (host, port)
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = "{}:{}".format(*self._listener.getsockname())
        threading.Thread(target=self._accept, name="mpxla-relay", daemon=True).start()

    def close(self) -> None:
        """Ends all connections. After the client has ended its own."""
        with self._lock:
            sockets, self._sockets = [self._listener, *self._sockets], []
        for end in sockets:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                near, _ = self._listener.accept()
                self._connect(near)

    def _connect(self, near: socket.socket) -> None:
        try:
            far = socket.create_connection(self._server)
        except OSError:  # the client tries again
            near.close()
            return
        with self._lock:
            self._sockets += [near, far]
        for run, name in ((self._forward, "forward"), (self._answer, "answer")):
            thread = threading.Thread(target=run, args=(near, far), name=f"mpxla-relay-{name}")
            thread.daemon = True
            thread.start()

    def _forward(self, near: socket.socket, far: socket.socket) -> None:
        """Client to server; what no server takes any more is dropped."""
        with contextlib.suppress(OSError):
            while data := near.recv(_CHUNK_BYTES):
                with contextlib.suppress(OSError):
                    far.sendall(data)
        with contextlib.suppress(OSError):
            far.shutdown(socket.SHUT_RDWR)

    def _answer(self, near: socket.socket, far: socket.socket) -> None:
        """Server to client; the end of the server is kept to itself."""
        with contextlib.suppress(OSError):
            while data := far.recv(_CHUNK_BYTES):
                near.sendall(data)
