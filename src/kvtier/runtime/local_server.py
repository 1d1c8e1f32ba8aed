"""A server on a Unix socket, for ranks and for the control socket.

One thread accepts connections. Each connection has its own thread, so a silent client delays no other. Processes of
other users are refused, except root's.
"""

import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from kvtier.errors import described
from kvtier.runtime.observers.fault_log import FaultLog
from kvtier.tier.files.safe_open import close_in_children

CONNECTIONS_MAX: Final = 16
"""Maximum number of connections. A further one replaces the oldest that has sent no request. If all have sent one, the
further one is refused."""
IDLE_S: Final = 60.0
"""Interval at which the accepting thread checks whether to end."""
BUSY_S: Final = 0.02
"""Pause before a retry if no file descriptor or queue entry is available."""


class LocalServer:
    """Accepts connections and starts a thread for each.

    Args:
        name: name of the threads, and of the server in the log.
        listener: a listening socket, owned by the server from now on.
        serve: serves a connection in its thread, and must not raise. The server closes the connection afterwards.
    """

    def __init__(self, name: str, listener: socket.socket, serve: Callable[[socket.socket], None]) -> None:
        self.name = name
        self._listener = listener
        self._serve = serve
        self._refusals = FaultLog()
        self._changed = threading.Condition()
        self._clients: dict[socket.socket, bool] = {}
        """Maps each open connection, oldest first, to whether it has sent a request."""
        self._is_stopped = False
        self._thread = threading.Thread(target=self._accept, name=name, daemon=True)
        # With `settimeout`, an accept would spin after `stop`.
        set_timeout(listener, socket.SO_RCVTIMEO, IDLE_S)
        close_in_children(listener)  # otherwise it would keep listening while a child lives

    def start(self) -> None:
        """Start accepting connections.

        Raises:
            RuntimeError: the system cannot start a thread.
        """
        self._thread.start()

    def keep(self, connection: socket.socket) -> bool:
        """Protect this connection from newer ones and from `stop`. Return False if it has already ended."""
        with self._changed:
            is_open = connection in self._clients and not self._is_stopped
            if is_open:
                self._clients[connection] = True
        return is_open

    def refused(self, why: str) -> None:
        """Log that a connection was refused."""
        self._refusals.report(f"{self.name}: a connection was refused", why)

    def stop(self, *, is_whole: bool = False) -> None:
        """Stop accepting connections, and end those without a request, or all if `is_whole`. Idempotent."""
        with self._changed:
            self._is_stopped = True
            shut(self._listener)  # wakes the accepting thread; closing would not
            for connection, has_asked in self._clients.items():
                if is_whole or not has_asked:
                    shut(connection)

    def join(self, deadline_s: float) -> bool:
        """Wait up to `deadline_s` seconds for all connections to end. Return whether all threads have ended."""
        until_s = time.monotonic() + deadline_s
        self._thread.join(deadline_s)
        with self._changed:
            is_empty = self._changed.wait_for(lambda: not self._clients, max(0.0, until_s - time.monotonic()))
        return is_empty and not self._thread.is_alive()

    def _accept(self) -> None:
        with self._listener:
            while not self._is_stopped:
                try:
                    connection, _ = self._listener.accept()
                except OSError:  # no client came, the server has stopped, or no descriptor is left and the client waits
                    time.sleep(BUSY_S)
                    continue
                close_in_children(connection)
                try:
                    if self._admits(connection):
                        threading.Thread(target=self._run, args=(connection,), name=self.name, daemon=True).start()
                    else:
                        connection.close()
                except (OSError, RuntimeError) as error:  # the peer has gone, or no thread can be started
                    self.refused(described(error))
                    self._forget(connection)

    def _admits(self, connection: socket.socket) -> bool:
        process, user = peer_of(connection)
        if user not in {0, os.geteuid()}:
            self.refused(f"process {process} belongs to user {user}")
            return False
        with self._changed:
            silent = next((it for it, has_asked in self._clients.items() if not has_asked), None)
            if len(self._clients) >= CONNECTIONS_MAX and silent is not None:
                del self._clients[silent]
                shut(silent)
            is_admitted = not self._is_stopped and len(self._clients) < CONNECTIONS_MAX
            if is_admitted:
                self._clients[connection] = False
        return is_admitted

    def _run(self, connection: socket.socket) -> None:
        try:
            self._serve(connection)
        finally:
            self._forget(connection)

    def _forget(self, connection: socket.socket) -> None:
        connection.close()
        with self._changed:
            self._clients.pop(connection, None)
            self._changed.notify_all()


def shut(connection: socket.socket, how: int = socket.SHUT_RDWR) -> None:
    """Wake the thread that waits for this socket; it sees the end of the stream or an error."""
    with suppress(OSError):  # already closed
        connection.shutdown(how)


def set_timeout(connection: socket.socket, which: int, seconds: float) -> None:
    """Set how long a blocking `recv` (SO_RCVTIMEO) or `send` (SO_SNDTIMEO) waits before it raises BlockingIOError."""
    whole = int(seconds)
    connection.setsockopt(socket.SOL_SOCKET, which, struct.pack("ll", whole, int((seconds - whole) * 1e6)))


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return the process and user ids at the other end, as this process sees them."""
    process, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return process, user
