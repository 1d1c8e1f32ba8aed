"""One connection to a Valkey server: commands out, replies in, all within a deadline and within limits.

valkey-py connects, does TLS, authenticates and selects the database. `Reader` replaces its parser, which has no limit
of a line, of a length and of the whole time. Payloads move between the socket and the caller's memory
without copies.
"""

import socket
import ssl
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast

from valkey.connection import Connection, SSLConnection
from valkey.exceptions import ResponseError, ValkeyError

from kvtier.config.value_types import PrivateText
from kvtier.tier.deadline_calls import connected, remaining_s

BUFFER_BYTES = 4096
"""Small replies are read in blocks of this size; a line of a server is shorter."""
REPLY_BYTES_MAX = 1 << 16
"""The longest reply to a command on an object, but for payloads."""
LIST_BYTES_MAX = 8 << 20
"""The longest reply with a list of servers or keys. The one of a cluster in 16,384 pieces is half as long."""
REPLY_ITEMS_MAX = 500_000
"""The most items of one reply. A cluster in 16,384 pieces has fewer."""
REPLY_DEPTH_MAX = 6
SEND_BUFFER_BYTES = 1 << 18
"""For a server on the same machine; Linux keeps twice as much. What waits there then stays in the processor's cache:
with the default of up to 4 MiB such a server needs half as much again of processor time for a store. A network needs
more: at 25 Gbit/s and 0.5 ms some 1.6 MB are on their way."""
BUFFERS_PER_CALL = 512
"""Of `sendmsg`; Linux takes 1024."""

Buffer: TypeAlias = bytes | memoryview


class BrokenWireError(Exception):
    """The connection has failed, or the server broke the protocol. It is closed."""


class NonsenseError(BrokenWireError):
    """What the server sends is not the protocol."""


class RefusedError(ResponseError):
    """A server's error reply. Some are values rather than exceptions.

    Args:
        text: of the reply.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text[:200])
        self.text = text[:200]
        self.code = text.partition(" ")[0][:40]


Reply: TypeAlias = int | bytes | RefusedError | list["Reply"] | None


MANY_CLIENTS = "ERR max number of clients reached"
"""A refusal that passes, in spite of its code."""


class Node(NamedTuple):
    """Address of a server."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Access(NamedTuple):
    """What a connection needs besides the address."""

    username: str = ""
    password: PrivateText = PrivateText()
    database: int = 0
    tls: bool = False
    ca_file: Path | None = None
    """Further trusted authorities, PEM."""
    certificate_file: Path | None = None
    key_file: Path | None = None
    """Of the client, PEM."""
    connect_deadline_s: float = 2.0


def command(*parts: bytes) -> bytes:
    """A command as the protocol sends it."""
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)


class Reader:
    """Reads replies. It is the parser of a connection of valkey-py, too.

    Every method raises `BrokenWireError` on nonsense and `OSError` (also `TimeoutError`) when the connection fails.
    """

    def __init__(self, socket_read_size: int = 0) -> None:
        del socket_read_size
        self.end_s = 0.0
        """When the running operation must have ended, on the monotonic clock."""
        self._socket: socket.socket | None = None
        self._buffer = bytearray(BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = self._stop = 0
        self._bytes_left = self._items_left = 0
        """Of the reply that is being read."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing has come that was not read."""
        return self._start == self._stop

    def on_connect(self, connection: Any) -> None:  # noqa: ANN401 - of the library, without types
        """See the library's parsers."""
        self._socket = connection._sock  # noqa: SLF001 - as the library's parsers do
        self._start = self._stop = 0

    def on_disconnect(self) -> None:
        """See the library's parsers."""
        self._socket = None

    def read_response(self, *, disable_decoding: bool = False) -> Reply:
        """See the library's parsers."""
        del disable_decoding
        return self.reply()

    def reply(self, most: int = REPLY_BYTES_MAX) -> Reply:
        """The next reply, of strings and numbers.

        Args:
            most: a reply of more bytes breaks the connection.
        """
        self._bytes_left, self._items_left = most, REPLY_ITEMS_MAX
        return self._reply(0)

    def bulk(self, most: int) -> int | RefusedError | None:
        """Begin a reply that is a string: its length in bytes; then `take` or `skip` that number, and `end`.

        Args:
            most: a longer one breaks the connection.
        """
        line = self._line()
        if line[:1] == b"-":
            return RefusedError(_text(line[1:]))
        if line[:1] != b"$":
            raise NonsenseError(f"a reply of type {line[:1]!r} came for a string")
        return _length(line[1:], most)

    def take(self, into: memoryview) -> None:
        """Fill `into` with the next bytes."""
        count = min(self._stop - self._start, into.nbytes)
        into[:count] = self._view[self._start : self._start + count]
        self._start += count
        while count < into.nbytes:
            count += self._receive(into[count:])

    def skip(self, byte_count: int) -> None:
        """Drop the next bytes."""
        while byte_count:
            if self.is_empty:
                self._fill()
            count = min(self._stop - self._start, byte_count)
            self._start += count
            byte_count -= count

    def end(self) -> None:
        """The end of a string."""
        if self._line():
            raise NonsenseError("a string is longer than its length")

    def _reply(self, depth: int) -> Reply:
        self._items_left -= 1
        if depth > REPLY_DEPTH_MAX or self._items_left < 0:
            raise NonsenseError("a reply has too many items")
        line = self._line()
        self._bytes_left -= len(line)
        if self._bytes_left < 0:
            raise NonsenseError("a reply is too long")
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest
        if kind == b"-":
            return RefusedError(_text(rest))
        if kind == b":":
            return _number(rest)
        if kind == b"$":
            length = _length(rest, self._bytes_left)
            if length is None:
                return None
            self._bytes_left -= length
            content = bytearray(length)
            self.take(memoryview(content))
            self.end()
            return bytes(content)
        if kind == b"*":
            count = _length(rest, self._items_left)
            return None if count is None else [self._reply(depth + 1) for _ in range(count)]
        raise NonsenseError(f"a reply begins with {kind!r}")

    def _line(self) -> bytes:
        while True:
            end = self._buffer.find(b"\n", self._start, self._stop)
            if end >= 0:
                line = bytes(self._view[self._start : end])
                self._start = end + 1
                if not line.endswith(b"\r"):
                    raise NonsenseError("a line ends without a carriage return")
                return line[:-1]
            if self._start:
                rest = self._stop - self._start
                self._buffer[:rest] = self._buffer[self._start : self._stop]
                self._start, self._stop = 0, rest
            elif self._stop == BUFFER_BYTES:
                raise NonsenseError(f"a line of more than {BUFFER_BYTES} bytes")
            self._fill()

    def _fill(self) -> None:
        """Receive at least one byte."""
        if self.is_empty:
            self._start = self._stop = 0
        self._stop += self._receive(self._view[self._stop :])

    def _receive(self, into: memoryview) -> int:
        line = self._socket  # another thread may close the connection
        if line is None:
            raise BrokenWireError("closed")
        # After the deadline, what has come is still read: the thread may have waited for another server.
        line.settimeout(max(0.0, self.end_s - time.monotonic()))
        try:
            count = line.recv_into(into)
        except (BlockingIOError, ssl.SSLWantReadError):
            raise TimeoutError("no answer in time") from None
        except ValueError:  # of a TLS socket
            raise BrokenWireError("closed") from None
        if count == 0:
            raise BrokenWireError("the server has closed the connection")
        return count


class _Plain(Connection):
    """Connects until the reader's deadline."""

    def _connect(self) -> socket.socket:
        end_s = cast("Reader", self._parser).end_s  # pyright: ignore[reportUnknownMemberType] - of the library
        line = connected(self.host, self.port, end_s)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return line


class _Tls(SSLConnection, _Plain):
    """The same, and then the handshake."""


class Wire:
    """An open connection. One thread uses it at a time.

    Args:
        node: the server.
        access: how.
        end_s: when the connection must be there, on the monotonic clock.

    Raises:
        BrokenWireError: it cannot be made in time.
        RefusedError: the server refuses the password or the database.
        ssl.SSLError: the TLS handshake failed.
        OSError: the connection failed.
    """

    def __init__(self, node: Node, access: Access, end_s: float) -> None:
        self.node = node
        end_s = min(end_s, time.monotonic() + access.connect_deadline_s)
        common: dict[str, Any] = {
            "host": node.host,
            "port": node.port,
            "db": access.database,
            "username": access.username or None,
            "password": access.password.reveal() or None,
            "socket_timeout": remaining_s(end_s),
            "parser_class": Reader,
            "lib_name": None,
            "lib_version": None,
        }
        if access.tls:
            connection: Any = _Tls(**common, **tls_options(access))
        else:
            connection = _Plain(**common)
        self._connection = connection
        self._has_sendmsg = not access.tls
        self.reader: Reader = connection._parser  # noqa: SLF001 - the one that it made of our class
        self.reader.end_s = end_s
        try:
            connection.connect()
        except RefusedError as error:  # a server that does not know AUTH repeats its arguments
            text = error.text.partition(" with args")[0]
            secret = access.password.reveal()
            raise RefusedError(text.replace(secret, "***") if secret else text) from None
        except ValkeyError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise BrokenWireError(f"{type(error).__name__} of the library") from None
        self._socket: Any = connection._sock  # noqa: SLF001
        if self._socket.getsockname()[0] == self._socket.getpeername()[0]:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self.is_used = False
        """It has answered commands before, so that the server may have closed it since."""

    def send(self, buffers: Sequence[Buffer], end_s: float) -> None:
        """Send all of `buffers`, and set the deadline of the replies.

        Raises:
            OSError: the connection failed, or not in time.
        """
        self.reader.end_s = end_s
        if not self._has_sendmsg:
            for each in _joined(buffers):
                self._socket.settimeout(remaining_s(end_s))
                self._socket.sendall(each)
            return
        for first in range(0, len(buffers), BUFFERS_PER_CALL):
            self._send_some([memoryview(each) for each in buffers[first : first + BUFFERS_PER_CALL]], end_s)

    def close(self) -> None:
        """Idempotent. A thread that waits in it gets an error."""
        self._connection.disconnect()

    def _send_some(self, views: list[memoryview], end_s: float) -> None:
        first = 0
        while first < len(views):
            self._socket.settimeout(remaining_s(end_s))
            sent = self._socket.sendmsg(views[first:] if first else views)
            while first < len(views) and sent >= views[first].nbytes:
                sent -= views[first].nbytes
                first += 1
            if sent:
                views[first] = views[first][sent:]


def tls_options(access: Access) -> dict[str, Any]:
    """For a connection of the library; a key with a pass phrase is an error, and nothing asks for it."""
    paths = {"ca_certs": access.ca_file, "certfile": access.certificate_file, "keyfile": access.key_file}
    files = {f"ssl_{key}": str(path) for key, path in paths.items() if path is not None}
    return files | {"ssl_password": "", "ssl_check_hostname": True}


def _joined(buffers: Iterable[Buffer]) -> Iterable[Buffer]:
    """Small neighbours in one piece: TLS makes a record of each."""
    small = bytearray()
    for each in buffers:
        if len(each) <= BUFFER_BYTES:
            small += each
            continue
        if small:
            yield bytes(small)
            small.clear()
        yield each
    if small:
        yield bytes(small)


def _text(line: bytes) -> str:
    return "".join(each if each.isprintable() else "?" for each in line.decode("utf-8", "replace"))


def _number(digits: bytes) -> int:
    if len(digits) > 20 or not digits.removeprefix(b"-").isdigit():
        raise NonsenseError("a number that is none")
    return int(digits)


def _length(digits: bytes, most: int) -> int | None:
    """None for -1, the protocol's nothing."""
    length = _number(digits)
    if length == -1:
        return None
    if not 0 <= length <= most:
        raise NonsenseError(f"a length of {length}, above the limit of {most}")
    return length
