"""The servers of a Valkey store: which one has a slot, their connections, and their failures.

A store is one server or a cluster. A cluster's slots are read when it is opened, and again when a server answers that
a slot has moved or when a server fails, but at most a few times a second. A server that failed is left alone for a
moment: of the operations that need it only one a moment waits for it, the others fail at once.
"""

import re
import ssl
import threading
import time
from binascii import crc_hqx
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import cast

from kvtier.errors import ConfigError, TierError
from kvtier.tier.valkey.wire import (
    LIST_BYTES_MAX,
    MANY_CLIENTS,
    Access,
    BrokenWireError,
    Node,
    NonsenseError,
    RefusedError,
    Reply,
    Wire,
    command,
)

SLOTS = 16384
DEFAULT_PORT = 6379
ADDRESSES_MAX = 64
NODES_MAX = 1000
IDLE_MAX = 64
"""Unused connections kept for each server."""
REFRESH_INTERVAL_S = 0.25
"""The slots are read at most once in this time."""
DOWN_S = 1.0
"""How long a server that failed is left alone."""
REFRESH_SHARE = 0.3
"""Part of the time that is left which reading the slots from one server may take."""

_NAME = r"[A-Za-z0-9_-]{1,63}(?:\.[A-Za-z0-9_-]{1,63})*\.?"
_ADDRESS = re.compile(rf"(?:\[(?P<v6>[0-9A-Fa-f:.]{{2,45}})\]|(?P<host>{_NAME}))(?::(?P<port>[0-9]{{1,5}}))?")
_NAMED = re.compile(r"[A-Za-z0-9._:%-]{1,253}")
_HINTS = {
    "WRONGPASS": "correct username and password",
    "NOAUTH": "set password or password_file",
    "NOPERM": "the user needs the commands GET, GETEX, GETRANGE, SET, EXISTS, UNLINK, MULTI, EXEC, ASKING, SCAN, SADD, "
    "SMEMBERS, SREM, PING, INFO, CLUSTER SLOTS and the keys of the prefix",
    "DENIED": "the server accepts loopback only: its protected mode",
}
_WRONG_ACCESS = frozenset({*_HINTS, "ERR"})


def parse_addresses(text: str) -> tuple[Node, ...]:
    """Servers of ``HOST[:PORT],HOST[:PORT]``; a host of IPv6 is in brackets.

    Raises:
        ConfigError: not of this form.
    """
    found: list[Node] = []
    for part in text.removeprefix("//").split(","):
        match = _ADDRESS.fullmatch(part.strip())
        if match is None or not 0 < int(match["port"] or DEFAULT_PORT) < 65536:
            raise ConfigError(f"Valkey address {_shown(part)}: allowed: HOST[:PORT], several with commas between them")
        found.append(Node(match["v6"] or match["host"], int(match["port"] or DEFAULT_PORT)))
    if len(found) > ADDRESSES_MAX:
        raise ConfigError(f"Valkey addresses: {len(found)} of them; allowed: at most {ADDRESSES_MAX}")
    return tuple(dict.fromkeys(found))


def slot_of(tag: bytes) -> int:
    """The slot of all keys with this hash tag."""
    return crc_hqx(tag, 0) % SLOTS


def hint(code: str) -> str:
    """What to do about a refusal at the start."""
    return _HINTS.get(code, "check the tier's settings")


class ServerDownError(Exception):
    """A server failed a moment ago and is not asked again yet."""


class Servers:
    """Connections by server, and servers by slot.

    Args:
        tier: its name, for errors.
        addresses: servers to begin with.
        access: how to connect.
        end_s: when the store must have answered, on the monotonic clock.

    Raises:
        ConfigError: the servers refuse the user or the database, or they speak another protocol.
        TierError: none answers.
    """

    def __init__(self, tier: str, addresses: Sequence[Node], access: Access, end_s: float) -> None:
        self._tier, self._addresses, self._access = tier, tuple(addresses), access
        self._lock = threading.Lock()
        self._idle: dict[Node, list[Wire]] = {}
        self._busy: set[Wire] = set()
        self._down_until: dict[Node, float] = {}
        self._is_closed = False
        self._refreshed_s = 0.0
        self._refreshing = threading.Lock()
        self.is_cluster = False
        self._slots: list[Node] = [self._addresses[0]] * SLOTS
        self.masters: tuple[Node, ...] = self._addresses[:1]
        """The servers that have slots; of a store without cluster mode the only one."""
        self._open(end_s)

    def node_of(self, slot: int) -> Node:
        """The server that had `slot` when last heard of."""
        return self._slots[slot]

    def moved(self, slot: int, node: Node) -> None:
        """A server says that `slot` is at `node` now."""
        if self.is_cluster:
            self._slots[slot] = node

    def take(self, node: Node, end_s: float) -> Wire:
        """A connection to `node`, for one thread until `give` or `drop`.

        Raises:
            ServerDownError: it failed a moment ago.
            BrokenWireError, RefusedError, OSError: it cannot be made.
        """
        with self._lock:
            if self._is_closed:
                raise BrokenWireError("closed")
            idle = self._idle.get(node)
            if idle:
                wire = idle.pop()
                self._busy.add(wire)
                return wire
            now_s = time.monotonic()
            if self._down_until.get(node, 0.0) > now_s:
                raise ServerDownError(f"{node} does not answer")
            if node in self._down_until:
                self._down_until[node] = max(end_s, now_s + DOWN_S)  # this thread tries it, and no other
        try:
            wire = Wire(node, self._access, end_s)
        except BaseException:
            with self._lock:
                self._leave_alone(node)
            raise
        with self._lock:
            self._busy.add(wire)
            if self._is_closed:
                wire.close()
        return wire

    def give(self, wire: Wire) -> None:
        """Give a connection back whose replies have all been read."""
        wire.is_used = True
        with self._lock:
            self._busy.discard(wire)
            self._down_until.pop(wire.node, None)  # not before: the kernel of a stopped server takes connections
            idle = self._idle.setdefault(wire.node, [])
            if wire.reader.is_empty and len(idle) < IDLE_MAX and not self._is_closed:
                idle.append(wire)
                return
        wire.close()

    def drop(self, wire: Wire) -> None:
        """Close a connection that failed, and the idle ones of its server: they may have failed, too."""
        with self._lock:
            self._busy.discard(wire)
            self._leave_alone(wire.node)
            closed = [wire, *self._idle.pop(wire.node, [])]
        for each in closed:
            each.close()

    def failed(self, node: Node) -> None:
        """`node` does not answer: in a cluster, leave it alone for a moment."""
        with self._lock:
            if self.is_cluster:
                self._down_until[node] = time.monotonic() + DOWN_S
            closed = self._idle.pop(node, [])
        for each in closed:
            each.close()

    def _leave_alone(self, node: Node) -> None:
        """If `node` had failed, only for a moment from now on: the thread that tried it has ended."""
        if node in self._down_until:
            self._down_until[node] = time.monotonic() + DOWN_S

    def has_other_than(self, node: Node) -> bool:
        """Whether another server of the store has not failed."""
        now_s = time.monotonic()
        return any(each != node and self._down_until.get(each, 0.0) < now_s for each in self.masters)

    @property
    def has_failed(self) -> bool:
        """Whether a server of a cluster has failed and has not answered since; it may have a successor."""
        return bool(self._down_until)

    def refresh(self, end_s: float) -> None:
        """Read the slots again, unless another thread does or that was a moment ago. Failures change nothing."""
        if not self.is_cluster or time.monotonic() - self._refreshed_s < REFRESH_INTERVAL_S:
            return
        if not self._refreshing.acquire(blocking=False):
            return
        try:
            known = dict.fromkeys((*self.masters, *self._addresses))
            for node in sorted(known, key=self._down_until.__contains__):
                now_s = time.monotonic()
                if now_s >= end_s:
                    return
                with suppress(ServerDownError, BrokenWireError, RefusedError, OSError):
                    self._read_slots(node, now_s + (end_s - now_s) * REFRESH_SHARE)
                    return
        finally:
            self._refreshed_s = time.monotonic()
            self._refreshing.release()

    def ask(self, node: Node, *parts: bytes, end_s: float) -> Reply:
        """One command to `node`; a refusal is returned.

        Raises:
            ServerDownError, BrokenWireError, RefusedError, OSError: the connection failed.
        """
        wire = self.take(node, end_s)
        try:
            wire.send([command(*parts)], end_s)
            reply = wire.reader.reply(LIST_BYTES_MAX)
        except BaseException:
            self.drop(wire)
            raise
        self.give(wire)
        return reply

    def close(self) -> None:
        """Close all connections. Threads that wait in them get errors."""
        with self._lock:
            self._is_closed = True
            closed = [*self._busy, *(wire for idle in self._idle.values() for wire in idle)]
            self._idle.clear()
        for each in closed:
            each.close()

    def _open(self, end_s: float) -> None:
        causes: list[str] = []
        for number, node in enumerate(self._addresses):
            now_s = time.monotonic()
            try:
                self._read_slots(node, now_s + max(0.0, end_s - now_s) / (len(self._addresses) - number))
            except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
                causes.append(f"{node}: closes the connection in the TLS handshake")
            except ssl.SSLError as error:
                self.close()
                raise ConfigError(f"tier {self._tier!r}: {node}: {_tls_cause(error)}") from None
            except RefusedError as error:
                if error.code in _WRONG_ACCESS and error.text != MANY_CLIENTS:
                    self.close()
                    raise ConfigError(
                        f"tier {self._tier!r}: {node} refuses: {error.text}: {hint(error.code)}"
                    ) from None
                causes.append(f"{node}: {error.text}")
            except NonsenseError as error:
                self.close()
                raise ConfigError(
                    f"tier {self._tier!r}: {node}: {error}; this is not a Valkey server, or one that speaks TLS"
                ) from None
            except BrokenWireError as error:
                causes.append(f"{node}: {error}")
            except OSError as error:
                causes.append(f"{node}: {error.strerror or error}")
            else:
                return
        self.close()
        raise TierError(self._tier, f"no server answers: {'; '.join(causes)[:500]}")

    def _read_slots(self, node: Node, end_s: float) -> None:
        reply = self.ask(node, b"CLUSTER", b"SLOTS", end_s=end_s)
        if isinstance(reply, RefusedError):
            if (
                reply.code == "ERR" and reply.text != MANY_CLIENTS
            ):  # not in cluster mode, or a server without the command
                if self.is_cluster:
                    raise BrokenWireError("a server of the cluster is in no cluster")
                reply = self.ask(node, b"PING", end_s=end_s)
                if isinstance(reply, RefusedError):
                    raise reply
                self._slots, self.masters = [node] * SLOTS, (node,)
                return
            raise reply
        found = dict(_slot_ranges(reply, node))
        if not found:
            raise BrokenWireError("the cluster has no slots")
        slots = self._slots if self.is_cluster else [next(iter(found.values()))] * SLOTS
        slots = slots.copy()
        for (first, last), master in found.items():
            slots[first : last + 1] = [master] * (last + 1 - first)
        masters = tuple(dict.fromkeys(found.values()))
        self._slots, self.masters, self.is_cluster = slots, masters, True
        with self._lock:
            for gone in set(self._down_until).difference(masters):
                del self._down_until[gone]
            closed = [wire for gone in set(self._idle).difference(masters) for wire in self._idle.pop(gone)]
        for each in closed:
            each.close()


def _slot_ranges(reply: Reply, asked: Node) -> Iterator[tuple[tuple[int, int], Node]]:
    """(first slot, last slot), master; of the reply of CLUSTER SLOTS."""
    if not isinstance(reply, list) or len(reply) > SLOTS:
        raise NonsenseError("no list of slots")
    seen: set[Node] = set()
    for row in reply:
        match row:
            case [int(first), int(last), [bytes() | None as host, int(port), *_], *_] if 0 <= first <= last < SLOTS:
                node = Node(_host((host or b"").decode("utf-8", "replace"), asked), port)
            case _:
                raise NonsenseError("a row of slots of another form")
        seen.add(node)
        if len(seen) > NODES_MAX or not 0 < port < 65536:
            raise NonsenseError("a list of slots with nonsense")
        yield (first, last), node


def redirection(refusal: RefusedError, asked: Node) -> Node | None:
    """The server that ``MOVED SLOT HOST:PORT`` or ``ASK SLOT HOST:PORT`` names; None when it names none."""
    parts = refusal.text.split()
    if len(parts) < 3:
        return None
    host, _, port = parts[2].rpartition(":")
    if not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 65536:
        return None
    with suppress(NonsenseError):
        return Node(_host(host.strip("[]"), asked), int(port))
    return None


def _host(text: str, asked: Node) -> str:
    """A host that a server names; the one of `asked` for an unknown one."""
    if text in ("", "?"):
        return asked.host
    if not _NAMED.fullmatch(text):
        raise NonsenseError("a name of a host with other characters")
    return text


def info(reply: Reply) -> Mapping[str, str]:
    """The lines of INFO; empty for another reply."""
    if not isinstance(reply, bytes):
        return {}
    lines = reply.decode("utf-8", "replace").splitlines()
    return dict(cast("tuple[str, str]", tuple(line.split(":", 1))) for line in lines if ":" in line)


def _tls_cause(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the server's certificate is not trusted ({error.verify_message}): set ca_file to the authority's"
    return f"the TLS handshake failed ({error.reason or 'no reason'}): check tls, the port and the client's certificate"


def _shown(part: str) -> str:
    """Without what may be a password."""
    return repr(part.rpartition("@")[2][:80])
