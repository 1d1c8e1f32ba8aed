"""A raw socket on loopback as a store that keeps one object for each connection: the ceiling of stores behind TCP.

Connections outlive the threads that use them, so that other threads load what one round of threads has stored.

A store sends the size and the bytes and waits for one byte back; a load sends the size and receives the bytes. The
server is a process of its own.
"""

import multiprocessing
import socket
import struct
import threading
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection

from kvtier.errors import KvError
from kvtier.types import ObjectName

DEADLINE_S = 60.0
STORE, LOAD = b"S", b"L"
_REQUEST = struct.Struct("<cQ")
_DONE = b"+"


class Loopback:
    """The client, and the server behind it; a `RawClient`. An operation takes a connection that no other one uses.

    Raises:
        KvError: the server does not start.
    """

    def __init__(self, largest_bytes: int) -> None:
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe(duplex=False)
        self._server = context.Process(target=_serve, args=(there, largest_bytes), daemon=True)
        self._server.start()
        if not here.poll(DEADLINE_S):
            raise KvError(f"the server of the loopback socket has not started within {DEADLINE_S:g} s")
        self._port: int = here.recv()
        self._idle: deque[socket.socket] = deque()
        self._sockets: list[socket.socket] = []

    def put(self, name: ObjectName, frame: memoryview) -> None:  # noqa: ARG002 - one object for each connection
        """See `RawClient`."""
        with self._link() as link:
            _send(link, _REQUEST.pack(STORE, frame.nbytes), frame)
            if link.recv(1) != _DONE:
                raise KvError("the server of the loopback socket has closed")

    def get(self, name: ObjectName, into: memoryview) -> None:  # noqa: ARG002
        """See `RawClient`. The bytes are those of the connection's last store."""
        with self._link() as link:
            _send(link, _REQUEST.pack(LOAD, into.nbytes))
            _receive(link, into)

    def has(self, name: ObjectName) -> bool:
        """See `RawClient`. A round trip without payload."""
        self.put(name, memoryview(b""))
        return True

    def delete(self, name: ObjectName) -> None:
        """See `RawClient`. Nothing to do."""

    def close(self) -> None:
        """See `RawClient`."""
        for link in self._sockets:
            link.close()
        self._server.kill()
        self._server.join(DEADLINE_S)

    @contextmanager
    def _link(self) -> Generator[socket.socket]:
        """Take the connection that has rested longest, or a new one. It is not used again if the `with` block fails."""
        try:
            link = self._idle.popleft()
        except IndexError:
            link = _bounded(socket.create_connection(("127.0.0.1", self._port), DEADLINE_S))
            self._sockets.append(link)
        yield link
        self._idle.append(link)


def _serve(ready: Connection, largest_bytes: int) -> None:
    """Accept connections until the process is killed."""
    listener = socket.create_server(("127.0.0.1", 0))
    ready.send(listener.getsockname()[1])
    while True:
        link, _ = listener.accept()
        threading.Thread(target=_answer, args=(link, largest_bytes), daemon=True).start()


def _answer(link: socket.socket, largest_bytes: int) -> None:
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    kept = memoryview(bytearray(largest_bytes))
    request = memoryview(bytearray(_REQUEST.size))
    with link, suppress(OSError, KvError):
        while True:
            _receive(link, request)
            op, size = _REQUEST.unpack(request)
            if op == STORE:
                _receive(link, kept[:size])
                link.sendall(_DONE)
            else:
                _send(link, kept[:size])


def _bounded(link: socket.socket) -> socket.socket:
    """`link` with the kernel's deadline for each call: one with Python's never blocks, and polls before each call."""
    link.settimeout(None)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        link.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(DEADLINE_S), 0))
    return link


def _send(link: socket.socket, *parts: bytes | memoryview) -> None:
    left = [memoryview(part) for part in parts]
    while left:
        sent = link.sendmsg(left)
        while left and sent >= left[0].nbytes:
            sent -= left.pop(0).nbytes
        if left:
            left[0] = left[0][sent:]


def _receive(link: socket.socket, into: memoryview) -> None:
    at = 0
    while at < into.nbytes:
        count = link.recv_into(into[at:], 0, socket.MSG_WAITALL)
        if not count:
            raise KvError("the loopback socket was closed")
        at += count
