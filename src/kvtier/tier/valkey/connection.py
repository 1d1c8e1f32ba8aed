"""A connection to a Valkey server, which sends commands and reads replies within a deadline and size limits.

Payloads move between the socket and the caller's memory without copies. valkey-py copies them. Its parsers limit
neither lines, lengths nor total time (`docs/adr/0016`).
"""

import socket
import ssl
import time
from collections.abc import Iterable, Sequence
from math import inf
from pathlib import Path
from typing import NamedTuple, TypeAlias

from kvtier.config.value_types import PrivateText
from kvtier.tier.deadline_calls import connected, remaining_s

BUFFER_BYTES = 4096
"""Small replies are read in blocks of this size. A server's lines are shorter."""
REPLY_COST_MAX = 8 << 20
"""Budget of one reply without payloads: its bytes, plus `ITEM_COST` per item. The slot list of a cluster in 16,384
pieces costs less."""
ITEM_COST = 8
REPLY_DEPTH_MAX = 6
SEND_BUFFER_BYTES = 1 << 18
"""Send buffer for a server on the same machine; Linux doubles it. Waiting bytes then stay in the processor's cache.
The default of up to 4 MiB costs such a server 50 % more processor time for a write. A network needs a larger buffer: at
25 Gbit/s and 0.5 ms, some 1.6 MB are in flight."""
BUFFERS_PER_CALL = 512
"""Maximum number of buffers in one `sendmsg`. Linux allows 1024."""

Buffer: TypeAlias = bytes | memoryview


class BrokenWireError(Exception):
    """The connection failed or the server broke the protocol. The connection is closed."""


class NonsenseError(BrokenWireError):
    """The server sent something that does not follow the protocol."""


class RefusedError(Exception):
    """A server's error reply. Some are returned rather than raised.

    Args:
        text: text of the reply.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text[:200])
        self.text = text[:200]
        self.code = text.partition(" ")[0][:40]


Reply: TypeAlias = int | bytes | RefusedError | list["Reply"] | None


MANY_CLIENTS = "ERR max number of clients reached"
"""A refusal that is temporary, despite its code."""


class Node(NamedTuple):
    """Address of a server."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Access(NamedTuple):
    """The settings of a connection, without the address."""

    username: str = ""
    password: PrivateText = PrivateText()
    database: int = 0
    tls: bool = False
    ca_file: Path | None = None
    """PEM file of further trusted authorities."""
    certificate_file: Path | None = None
    key_file: Path | None = None
    """PEM file of the client's key."""
    connect_deadline_s: float = 2.0


def command(*parts: bytes) -> bytes:
    """Encode a command for the protocol."""
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)


class Reader:
    """Reads replies from `line`.

    Every method raises `BrokenWireError` if the server breaks the protocol, and `OSError` (such as `TimeoutError`) if
    the connection fails.
    """

    def __init__(self, line: socket.socket, end_s: float) -> None:
        self.end_s = end_s
        """Deadline of the running operation, on the monotonic clock."""
        self.stall_s = inf
        """Longest time without a byte."""
        self.progress_s = 0.0
        """Time at which the last byte arrived, or the operation started."""
        self._socket = line
        self._buffer = bytearray(BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = self._stop = 0
        self._left = 0
        """The rest of `REPLY_COST_MAX` for the current reply."""

    @property
    def is_empty(self) -> bool:
        """Whether everything that has arrived has been read."""
        return self._start == self._stop

    def reply(self) -> Reply:
        """Return the next reply, as a string, a number, a list of these, or a refusal."""
        self._left = REPLY_COST_MAX
        return self._reply(0)

    def bulk(self, most: int) -> int | RefusedError | None:
        """Start reading a string, and return its length in bytes.

        The caller must `take` or `skip` that many bytes, then call `end`.

        Args:
            most: maximum length; a longer string breaks the connection.
        """
        line = self._line()
        if line[:1] == b"-":
            return RefusedError(printable(line[1:]))
        if line[:1] != b"$":
            raise NonsenseError(f"it sent a reply of type {line[:1]!r} instead of a string")
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
        """Read the end of a string."""
        if self._line():
            raise NonsenseError("it sent a string that is longer than its length")

    def _reply(self, depth: int) -> Reply:
        line = self._line()
        self._left -= len(line) + ITEM_COST
        if depth > REPLY_DEPTH_MAX or self._left < 0:
            raise NonsenseError("it sent a reply that is too long")
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest
        if kind == b"-":
            return RefusedError(printable(rest))
        if kind == b":":
            return _number(rest)
        if kind == b"$":
            length = _length(rest, self._left)
            if length is None:
                return None
            self._left -= length
            content = bytearray(length)
            self.take(memoryview(content))
            self.end()
            return bytes(content)
        if kind == b"*":
            count = _length(rest, self._left)
            return None if count is None else [self._reply(depth + 1) for _ in range(count)]
        raise NonsenseError(f"it sent a reply that begins with {kind!r}")

    def _line(self) -> bytes:
        while True:
            end = self._buffer.find(b"\n", self._start, self._stop)
            if end >= 0:
                line = bytes(self._view[self._start : end])
                self._start = end + 1
                if not line.endswith(b"\r"):
                    raise NonsenseError("it sent a line that ends without a carriage return")
                return line[:-1]
            if self._start:
                rest = self._stop - self._start
                self._buffer[:rest] = self._buffer[self._start : self._stop]
                self._start, self._stop = 0, rest
            elif self._stop == BUFFER_BYTES:
                raise NonsenseError(f"it sent a line of more than {BUFFER_BYTES} bytes")
            self._fill()

    def _fill(self) -> None:
        """Receive at least one byte."""
        if self.is_empty:
            self._start = self._stop = 0
        self._stop += self._receive(self._view[self._stop :])

    def _receive(self, into: memoryview) -> int:
        # Bytes that have arrived are read even after the deadline, because the thread may have waited for another
        # server.
        self._socket.settimeout(max(0.0, min(self.end_s, self.progress_s + self.stall_s) - time.monotonic()))
        try:
            count = self._socket.recv_into(into)
        except (BlockingIOError, ssl.SSLWantReadError):
            raise TimeoutError("no answer in time") from None
        if count == 0:
            raise BrokenWireError("the server has closed the connection")
        self.progress_s = time.monotonic()
        return count


class Wire:
    """An open connection. One thread uses it at a time.

    Args:
        node: the server.
        access: how to connect.
        end_s: when the connection must be open, on the monotonic clock.

    Raises:
        BrokenWireError: the server closes the connection, or does not speak the protocol.
        RefusedError: the server refuses the password or the database.
        ssl.SSLError: the TLS handshake failed.
        OSError: the connection fails or takes too long.
    """

    def __init__(self, node: Node, access: Access, end_s: float) -> None:
        self.node = node
        self.is_used = False
        """Whether it was used for commands before, so that the server may have closed it since."""
        end_s = min(end_s, time.monotonic() + access.connect_deadline_s)
        self._socket = connected(node.host, node.port, end_s)
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if self._socket.getsockname()[0] == self._socket.getpeername()[0]:
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            if access.tls:
                self._socket = _with_tls(self._socket, node.host, access)
            self.reader = Reader(self._socket, end_s)
            self._log_in(access, end_s)
        except BaseException:
            self.close()
            raise

    def send(self, buffers: Sequence[Buffer], end_s: float, stall_s: float = inf) -> None:
        """Send all of `buffers`, and set the replies' deadline and longest time without a byte.

        Raises:
            OSError: the connection failed, or the deadline passed.
        """
        self.reader.end_s, self.reader.stall_s, self.reader.progress_s = end_s, stall_s, time.monotonic()
        if isinstance(self._socket, ssl.SSLSocket):  # it has no sendmsg
            for each in _joined(buffers):
                self._socket.settimeout(remaining_s(end_s))
                self._socket.sendall(each)
            return
        views = [memoryview(each) for each in buffers]
        first = 0
        while first < len(views):
            self._socket.settimeout(remaining_s(end_s))
            sent = self._socket.sendmsg(views[first : first + BUFFERS_PER_CALL])
            while first < len(views) and sent >= views[first].nbytes:
                sent -= views[first].nbytes
                first += 1
            if sent:
                views[first] = views[first][sent:]

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._socket.close()

    def _log_in(self, access: Access, end_s: float) -> None:
        commands: list[bytes] = []
        secret = access.password.reveal()
        if secret:
            commands.append(command(b"AUTH", *(each.encode() for each in (access.username, secret) if each)))
        if access.database:
            commands.append(command(b"SELECT", b"%d" % access.database))
        self.send(commands, end_s)
        for _ in commands:
            reply = self.reader.reply()
            if isinstance(reply, RefusedError):  # a server without AUTH repeats its arguments
                text = reply.text.partition(" with args")[0]
                raise RefusedError(text.replace(secret, "***") if secret else text)


def _with_tls(line: socket.socket, host: str, access: Access) -> ssl.SSLSocket:
    context = ssl.create_default_context()
    if access.ca_file is not None:
        context.load_verify_locations(access.ca_file)
    if access.certificate_file is not None:
        # With an empty pass phrase, a key that requires one causes an error instead of a prompt.
        context.load_cert_chain(access.certificate_file, access.key_file, password="")
    try:
        return context.wrap_socket(line, server_hostname=host)
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
        raise BrokenWireError("the server closed the connection during the TLS handshake") from None


def cause_of(error: Exception) -> str:
    """Return the cause of an error, with at most 200 characters of the server's text."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)[:200] or type(error).__name__


def _joined(buffers: Iterable[Buffer]) -> Iterable[Buffer]:
    """Join small neighbors, because TLS makes a record of each piece."""
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


def printable(line: bytes) -> str:
    """Return the text of `line`, with question marks for unprintable characters."""
    return "".join(each if each.isprintable() else "?" for each in line.decode("utf-8", "replace"))


def _number(digits: bytes) -> int:
    if len(digits) > 20 or not digits.removeprefix(b"-").isdigit():
        raise NonsenseError("it sent something else instead of a number")
    return int(digits)


def _length(digits: bytes, most: int) -> int | None:
    """Parse a length. Return None for -1, the protocol's null."""
    length = _number(digits)
    if length == -1:
        return None
    if not 0 <= length <= most:
        raise NonsenseError(f"it sent the length {length}, which is not in 0..{most}")
    return length
