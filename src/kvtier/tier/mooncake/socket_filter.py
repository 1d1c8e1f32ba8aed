"""Shuts the sockets on which Mooncake's client listens in this process, and finds the data port of a storage node.

The client listens on all addresses of the machine. Any program that connects may read and write the memory that the
client has registered. A client without a segment needs no such connection, so `shut_out` drops every packet to these
sockets.
"""

import ctypes
import json
import os
import socket
import stat
import struct
import time
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path

from kvtier.errors import KvError
from kvtier.tier.deadline_calls import connected, remaining_s

Address = tuple[str, int]

ANSWER_BYTES_MAX = 1 << 20
"""Longest answer of a node; the client has the same limit."""
OWN_DEADLINE_S = 5.0
"""How long the client in this process may take to name its data port."""

_METADATA = 1
"""Type of the request that asks for a node's buffers and data port."""
_SO_ATTACH_FILTER = 26
_DROP = struct.pack("=HBBI", 0x06, 0, 0, 0)
"""A socket filter of one instruction, which returns 0 to keep no byte of any packet."""
_EVERYWHERE = frozenset({"0.0.0.0", "::"})  # noqa: S104 - only compared


class NodeError(KvError):
    """A node does not answer as a storage node."""


def split_address(text: str) -> Address:
    """Split ``host:port`` into host and port.

    Raises:
        NodeError: `text` is not an address.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise NodeError(f"{text[:80]!r} is not an address")
    return host.strip("[]"), int(port)


def shut_out(handshakes: int) -> list[int]:
    """Drop all packets to the sockets of Mooncake's client. Return their ports, as far as they are known.

    The system lets only one socket listen on a port on all addresses. So this process's socket at `handshakes` is the
    client's, and so is the one at the data port named there. An RDMA client names no data port.

    Raises:
        OSError: the system has no socket filters.
    """
    ports = [handshakes]
    with suppress(NodeError):
        ports.append(data_port(f"127.0.0.1:{handshakes}", OWN_DEADLINE_S))
    program = ctypes.create_string_buffer(_DROP, len(_DROP))
    shut: list[int] = []
    for mine in _own_sockets():
        if mine.family not in {socket.AF_INET, socket.AF_INET6}:
            continue
        host, port = mine.getsockname()[:2]
        listens = mine.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        if listens and host in _EVERYWHERE and port in ports:
            mine.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("@HP", 1, ctypes.addressof(program)))
            shut.append(port)
    return shut


def _own_sockets() -> Generator[socket.socket]:
    """Yield a copy of each socket of this process. Other threads may close theirs meanwhile."""
    for entry in list(Path("/proc/self/fd").iterdir()):
        try:
            if not str(entry.readlink()).startswith("socket:"):
                continue
            copy = os.dup(int(entry.name))
        except OSError:
            continue  # closed meanwhile
        if not stat.S_ISSOCK(os.fstat(copy).st_mode):  # another file has taken the number of a closed socket
            os.close(copy)
            continue
        # Created as non-blocking, the object leaves the socket's mode alone, whatever the default timeout is.
        with socket.socket(type=socket.SOCK_STREAM | socket.SOCK_NONBLOCK, fileno=copy) as mine:
            yield mine


def data_port(endpoint: str, deadline_s: float) -> int:
    """Return the port where the node that answers at `endpoint` transfers data.

    Raises:
        NodeError: it does not answer within `deadline_s` seconds, or its answer is not a node's.
    """
    end_s = time.monotonic() + deadline_s
    try:
        with connected(*split_address(endpoint), end_s) as link:
            link.sendall(struct.pack("<QB", 3, _METADATA) + b"{}")
            (size,) = struct.unpack("<Q", _exactly(link, 8, end_s))
            if not 1 < size <= ANSWER_BYTES_MAX:
                raise NodeError(f"{endpoint} announces an answer of {size} bytes")
            port = json.loads(_exactly(link, size, end_s)[1:])["tcp_data_port"]
            if not isinstance(port, int) or not 0 < port < 1 << 16:
                raise NodeError(f"{endpoint} names no data port")
            return port
    except (OSError, EOFError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise NodeError(f"{endpoint} does not answer as a storage node: {type(error).__name__}") from None


def _exactly(link: socket.socket, size: int, end_s: float) -> bytes:
    content = bytearray()
    while len(content) < size:
        link.settimeout(remaining_s(end_s))
        part = link.recv(min(size - len(content), 1 << 16))
        if not part:
            raise EOFError
        content += part
    return bytes(content)
