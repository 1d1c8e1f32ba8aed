"""A server of loopback that says what a test makes it say: nonsense, too much, too slowly, or nothing."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Self

Say = Callable[[bytes], Iterable[bytes | float]]
"""Takes what has come on a connection. Gives bytes to send and seconds to wait; ends to close the connection."""


class Hostile:
    """Answers each block of bytes that comes with what `say` gives. A context manager."""

    def __init__(self, say: Say) -> None:
        self.say = say
        self.blocks = 0
        """Blocks of bytes that have come."""
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = self._listener.getsockname()[1]
        self._ends = threading.Event()

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while not self._ends.is_set():
            try:
                line, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(line,), daemon=True).start()

    def _serve(self, line: socket.socket) -> None:
        with line, contextlib.suppress(OSError):
            line.settimeout(30)
            while data := line.recv(1 << 20):
                self.blocks += 1
                for each in self.say(data):
                    if self._ends.is_set():
                        return
                    if isinstance(each, float):
                        time.sleep(each)
                    else:
                        line.sendall(each)
                if getattr(self.say, "closes", False):
                    return


NO_CLUSTER = b"-ERR This instance has cluster support disabled\r\n"


def opens(after: Say, slots: Callable[[], bytes] = lambda: NO_CLUSTER) -> Say:
    """A server that opens well, with what `slots` gives for its slots, and then says what `after` does."""

    def say(data: bytes) -> Iterable[bytes | float]:
        replies = []
        for word, reply in (
            (b"SLOTS\r\n", slots()),
            (b"PING\r\n", b"+PONG\r\n"),
            (b"SMEMBERS\r\n", b"*0\r\n"),
            (b"SADD\r\n", b":1\r\n"),
            (b"INFO\r\n", b"$0\r\n\r\n"),
        ):
            if word in data:
                replies.append(reply)
        return replies or after(data)

    return say
