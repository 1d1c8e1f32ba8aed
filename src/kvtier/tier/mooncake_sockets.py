"""Sockets that Mooncake's client opens in this process, and the data port of a storage node.

The client listens on all addresses of the machine, and any program that connects may read and write
the memory that it has registered. A client without a segment needs no such connection, so `shut_out` drops every
packet to these sockets.

The client cannot cancel a transfer with a node that is silent. `cut` shuts the connections to that node down, and the
client then ends the transfer as failed.
"""

import ctypes
import json
import os
import socket
import struct
import time
from collections.abc import Container, Iterator
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

from kvtier.errors import KvError

Address = tuple[str, int]

ANSWER_BYTES_MAX = 1 << 20
"""Longest answer of a node; the client has the same limit."""
PORTS = range(15_000, 17_000)
"""Where Mooncake's client listens."""
OWN_DEADLINE_S = 1.0
"""How long this process's own client may take to name its data port."""

_METADATA = 1
"""Type of the request for a node's buffers and data port."""
_SO_ATTACH_FILTER = 26
_DROP = struct.pack("=HBBI", 0x06, 0, 0, 0)
"""A socket filter of one instruction: return 0, keep no byte of any packet."""


class NodeError(KvError):
    """A storage node does not answer as one."""


def split_address(text: str) -> Address:
    """Host and port of ``host:port``.

    Raises:
        NodeError: it is not an address.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise NodeError(f"{text[:80]!r} is not an address")
    return host.strip("[]"), int(port)


def listening() -> set[tuple[int, int]]:
    """(port, inode) of each TCP socket of this process that listens on all addresses."""
    found: set[tuple[int, int]] = set()
    for each in _sockets():
        with each:
            if (
                each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                and ip_address(each.getsockname()[0]).is_unspecified
            ):
                found.add((each.getsockname()[1], os.fstat(each.fileno()).st_ino))
    return found


def shut_out(before: set[tuple[int, int]], handshakes: int) -> list[int]:
    """Drop all packets to the sockets of Mooncake's client that listen now and are not in `before`; their ports.

    The client itself names its data port at the port for `handshakes`, so that no other new socket is taken for it. One
    that does not name it, such as one of RDMA, has all new sockets in `PORTS`.

    Raises:
        OSError: the system has no socket filters.
    """
    ports: list[int] = []
    try:
        mine: Container[int] = {handshakes, data_address(f"127.0.0.1:{handshakes}", OWN_DEADLINE_S)[1]}
    except NodeError:
        mine = PORTS
    wanted = {inode for port, inode in listening() - before if port in mine}
    program = ctypes.create_string_buffer(_DROP, len(_DROP))
    for each in _sockets():
        with each:
            if os.fstat(each.fileno()).st_ino in wanted:
                each.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("@HP", 1, ctypes.addressof(program)))
                ports.append(each.getsockname()[1])
    return ports


def data_address(endpoint: str, deadline_s: float) -> Address:
    """Where the node that answers at `endpoint` transfers data: numeric host and port.

    Raises:
        NodeError: it does not answer within `deadline_s` seconds, or not as a node does.
    """
    end_s = time.monotonic() + deadline_s
    try:
        with socket.create_connection(split_address(endpoint), deadline_s) as link:
            link.sendall(struct.pack("<QB", 3, _METADATA) + b"{}")
            (size,) = struct.unpack("<Q", _exactly(link, 8, end_s))
            if not 1 < size <= ANSWER_BYTES_MAX:
                raise NodeError(f"{endpoint} announces an answer of {size} bytes")
            answer = json.loads(_exactly(link, size, end_s)[1:])
            host, port = answer.get("tcp_data_host") or link.getpeername()[0], answer["tcp_data_port"]
            if not isinstance(host, str) or not isinstance(port, int) or not 0 < port < 1 << 16:
                raise NodeError(f"{endpoint} names no data port")
            return str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]), port
    except (OSError, EOFError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise NodeError(f"{endpoint} does not answer as a storage node: {type(error).__name__}") from None


def cut(address: Address) -> int:
    """Shut down this process's connections to `address`; how many there were; with no free descriptor, 0."""
    count = 0
    with suppress(OSError):
        for each in _sockets():
            with each, suppress(OSError):  # not connected
                host, port = each.getpeername()[:2]
                if port == address[1] and host.removeprefix("::ffff:") == address[0]:
                    each.shutdown(socket.SHUT_RDWR)
                    count += 1
    return count


def _sockets() -> Iterator[socket.socket]:
    """A duplicate of each TCP socket of this process; the caller closes it."""
    for entry in list(Path("/proc/self/fd").iterdir()):
        try:
            number = os.dup(int(entry.name))
        except OSError:  # closed meanwhile
            continue
        try:
            # Made as non-blocking, the object leaves the mode of the socket alone, whatever the default time-out is.
            each = socket.socket(type=socket.SOCK_STREAM | socket.SOCK_NONBLOCK, fileno=number)
        except OSError:  # no socket
            os.close(number)
            continue
        is_stream = each.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE) == socket.SOCK_STREAM
        if is_stream and each.family in {socket.AF_INET, socket.AF_INET6}:
            yield each
        else:
            each.close()


def _exactly(link: socket.socket, size: int, end_s: float) -> bytes:
    content = bytearray()
    while len(content) < size:
        left_s = end_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        link.settimeout(left_s)
        part = link.recv(min(size - len(content), 1 << 16))
        if not part:
            raise EOFError
        content += part
    return bytes(content)
