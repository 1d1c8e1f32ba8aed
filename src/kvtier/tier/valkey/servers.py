"""The servers of a Valkey store, with the slots that each has, their connections and their failures.

A store is one server or a cluster. A cluster's slots are read when it is opened, and again when a server reports a
moved slot or fails. They are read at most a few times a second. A server that failed is left alone for a moment. After
that, only one operation at a time waits for it, and others that need it fail immediately, until it has answered.
"""

import re
import ssl
import threading
import time
from binascii import crc_hqx
from collections.abc import Sequence
from contextlib import suppress

from kvtier.errors import ConfigError, TierError, UnusablePathError
from kvtier.tier.valkey.connection import (
    MANY_CLIENTS,
    Access,
    BrokenWireError,
    Node,
    NonsenseError,
    RefusedError,
    Reply,
    Wire,
    cause_of,
    command,
    printable,
)

SLOTS = 16384
DEFAULT_PORT = 6379
ADDRESSES_MAX = 64
IDLE_MAX = 64
"""Maximum number of unused connections kept for each server."""
REFRESH_INTERVAL_S = 0.25
"""The slots are read at most once in this interval."""
DOWN_S = 1.0
"""How long a server that failed is left alone."""
REFRESH_SHARE = 0.3
"""Share of the remaining time that reading the slots from one server may take."""

_NAME = r"[A-Za-z0-9_-]{1,63}(?:\.[A-Za-z0-9_-]{1,63})*\.?"
_ADDRESS = re.compile(rf"(?:\[(?P<v6>[0-9A-Fa-f:.]{{2,45}})\]|(?P<host>{_NAME}))(?::(?P<port>[0-9]{{1,5}}))?")
_MOVED = re.compile(r"MOVED ([0-9]{1,5}) (\S*):([0-9]{1,5})")
_HINTS = {
    "WRONGPASS": "correct username and password",
    "NOAUTH": "set password or password_file",
    "NOPERM": "the user needs the commands GET, GETEX, GETRANGE, SET, EXISTS, UNLINK, MULTI, EXEC, SCAN, SADD, "
    "SMEMBERS, SREM, PING, INFO, CLUSTER SLOTS and the keys of the prefix",
    "DENIED": "its protected mode accepts only loopback connections",
}
_WRONG_ACCESS = frozenset({*_HINTS, "ERR"})


def parse_addresses(text: str, setting: str = "addresses") -> tuple[Node, ...]:
    """Parse ``HOST[:PORT],HOST[:PORT]`` into servers; an IPv6 host is in brackets.

    Args:
        text: the servers.
        setting: the name of their setting, for messages.

    Raises:
        ConfigError: `text` does not have this form.
    """
    found: list[Node] = []
    for part in text.removeprefix("//").split(","):
        match = _ADDRESS.fullmatch(part.strip())
        if match is None or not 0 < int(match["port"] or DEFAULT_PORT) < 65536:
            raise ConfigError(
                setting=setting, value=_shown(part), allowed="HOST[:PORT], several with commas between them"
            )
        found.append(Node(match["v6"] or match["host"], int(match["port"] or DEFAULT_PORT)))
    if len(found) > ADDRESSES_MAX:
        raise ConfigError(f"there are {len(found)} servers", setting=setting, allowed=f"at most {ADDRESSES_MAX}")
    return tuple(dict.fromkeys(found))


def slot_of(tag: bytes) -> int:
    """Return the slot of all keys with this hash tag."""
    return crc_hqx(tag, 0) % SLOTS


class ServerDownError(Exception):
    """A server failed a moment ago, and it is too early to ask it again."""


class Servers:
    """Connections by server, and servers by slot.

    Args:
        tier: name of the tier, for errors.
        addresses: the first servers to ask.
        access: how to connect.
        end_s: when the store must have answered, on the monotonic clock.

    Raises:
        UnusablePathError: the servers refuse the user or the database, or they speak another protocol.
        TierError: no server answers.
    """

    def __init__(self, tier: str, addresses: Sequence[Node], access: Access, end_s: float) -> None:
        self._tier, self._addresses, self._access = tier, tuple(addresses), access
        self._lock = threading.Lock()
        self._idle: dict[Node, list[Wire]] = {}
        self._down_until: dict[Node, float] = {}
        self._is_closed = False
        self._refreshed_s = 0.0
        self._refreshing = threading.Lock()
        self.is_cluster = False
        self._slots: list[Node] = [self._addresses[0]] * SLOTS
        self.masters: tuple[Node, ...] = self._addresses[:1]
        """The servers that have slots; without cluster mode the only server."""
        try:
            self._open(end_s)
        except BaseException:
            self.close()
            raise

    def node_of(self, slot: int) -> Node:
        """Return the server that had `slot` when it was last reported."""
        return self._slots[slot]

    def moved(self, refusal: RefusedError) -> None:
        """Follow ``MOVED SLOT HOST:PORT``. Other refusals change nothing."""
        match = _MOVED.fullmatch(refusal.text)
        if match and self.is_cluster and int(match[1]) < SLOTS:
            slot = int(match[1])
            with suppress(NonsenseError):
                self._slots[slot] = _named(match[2].strip("[]"), int(match[3]), self._slots[slot])

    def take(self, node: Node, end_s: float) -> Wire:
        """Take a connection to `node`, for one thread until `give` or until it is closed.

        Raises:
            ServerDownError: the server failed a moment ago.
            BrokenWireError, RefusedError, OSError: the connection cannot be made.
        """
        with self._lock:
            if self._is_closed:
                raise BrokenWireError("closed")
            idle = self._idle.get(node)
            if idle:
                return idle.pop()
            now_s = time.monotonic()
            if self._down_until.get(node, 0.0) > now_s:
                raise ServerDownError(f"{node} does not answer")
            if node in self._down_until:
                self._down_until[node] = end_s + DOWN_S  # only this thread tries it, until it knows more
        try:
            return Wire(node, self._access, end_s)
        except (BrokenWireError, OSError):
            self.failed(node)
            raise

    def give(self, wire: Wire) -> None:
        """Give back a connection whose replies have all been read."""
        wire.is_used = True
        with self._lock:
            self._down_until.pop(wire.node, None)  # not earlier: the kernel of a stopped server accepts connections
            idle = self._idle.setdefault(wire.node, [])
            if wire.reader.is_empty and len(idle) < IDLE_MAX and not self._is_closed:
                idle.append(wire)
                return
        wire.close()

    def failed(self, node: Node, *, is_down: bool = True) -> None:
        """Record a failed connection and close the server's idle ones.

        The server is left alone for a moment if `is_down`. The only server of a store is never left alone, because the
        tier's circuit breaker does that.
        """
        with self._lock:
            if self.is_cluster and is_down:
                self._down_until[node] = time.monotonic() + DOWN_S
            closed = self._idle.pop(node, [])
        for each in closed:
            each.close()

    @property
    def has_live(self) -> bool:
        """Whether some server of the store has not failed."""
        return any(each not in self._down_until for each in self.masters)

    @property
    def has_failed(self) -> bool:
        """Whether a server of a cluster has failed and not answered since. It may have a successor."""
        return bool(self._down_until)

    def refresh(self, end_s: float) -> None:
        """Read the slots again, unless another thread is doing so or just did. Failures change nothing."""
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
        """Send one command to `node`, and return its reply.

        Raises:
            ServerDownError, BrokenWireError, OSError: the connection failed.
            RefusedError: the server refuses.
        """
        wire = self.take(node, end_s)
        try:
            wire.send([command(*parts)], end_s)
            reply = wire.reader.reply()
        except BaseException:
            wire.close()
            raise
        self.give(wire)
        if isinstance(reply, RefusedError):
            raise reply
        return reply

    def close(self) -> None:
        """Close idle connections now, and the others when they are given back."""
        with self._lock:
            self._is_closed = True
            closed = [wire for idle in self._idle.values() for wire in idle]
            self._idle.clear()
        for each in closed:
            each.close()

    def _open(self, end_s: float) -> None:
        causes: list[str] = []
        for number, node in enumerate(self._addresses):
            now_s = time.monotonic()
            try:
                self._read_slots(node, now_s + max(0.0, end_s - now_s) / (len(self._addresses) - number))
            except (BrokenWireError, RefusedError, OSError) as error:
                if mistake := _mistake(error):
                    raise UnusablePathError(f"tier {self._tier!r}: {node}{mistake}") from None
                causes.append(f"{node}: {cause_of(error)}")
            else:
                return
        raise TierError(self._tier, f"no server answers: {'; '.join(causes)[:500]}")

    def _read_slots(self, node: Node, end_s: float) -> None:
        try:
            rows = _slot_rows(self.ask(node, b"CLUSTER", b"SLOTS", end_s=end_s), node)
        except RefusedError as error:
            if error.code != "ERR" or error.text == MANY_CLIENTS or self.is_cluster:
                raise
            # The server is not in cluster mode or lacks the command. A refused connection also fails here.
            self.ask(node, b"PING", end_s=end_s)
            self._slots, self.masters = [node] * SLOTS, (node,)
            return
        slots = self._slots.copy()
        for (first, last), master in rows.items():
            slots[first : last + 1] = [master] * (last + 1 - first)
        masters = tuple(dict.fromkeys(rows.values()))
        self._slots, self.masters, self.is_cluster = slots, masters, True
        with self._lock:
            left = {*self._down_until, *self._idle}.difference(masters)
        for gone in left:
            self.failed(gone, is_down=False)
            self._down_until.pop(gone, None)


def _slot_rows(reply: Reply, asked: Node) -> dict[tuple[int, int], Node]:
    """Read the master of each range (first slot, last slot) from the reply of CLUSTER SLOTS."""
    if not isinstance(reply, list) or not 0 < len(reply) <= SLOTS:
        raise NonsenseError("it did not send a list of slots")
    found: dict[tuple[int, int], Node] = {}
    for row in reply:
        match row:
            case [int(first), int(last), [bytes() | None as host, int(port), *_], *_] if 0 <= first <= last < SLOTS:
                found[first, last] = _named(printable(host or b""), port, asked)
            case _:
                raise NonsenseError("it sent a malformed row of slots")
    return found


def _named(host: str, port: int, asked: Node) -> Node:
    """Return the server that `asked` named by `host` and `port`. An empty `host` or ``?`` means the host of `asked`."""
    if not 0 < port < 65536:
        raise NonsenseError(f"it named a server with the port {port}")
    return Node(asked.host if host in ("", "?") else host, port)


def _mistake(error: Exception) -> str:
    """Return the mistake in the settings that `error` shows at the start, or an empty string if it shows none."""
    if isinstance(error, NonsenseError):
        return f": {error}; it is not a Valkey server, or it speaks TLS"
    if isinstance(error, RefusedError) and error.code in _WRONG_ACCESS and error.text != MANY_CLIENTS:
        return f" refuses: {error.text}: {_HINTS.get(error.code, 'check the settings of the tier')}"
    if isinstance(error, ssl.SSLCertVerificationError):
        why = error.verify_message
        return f": the server's certificate is not trusted ({why}): set ca_file to the certificate of its authority"
    if isinstance(error, ssl.SSLError):
        why = error.reason or "without a reason"
        return f": the TLS handshake failed ({why}): check tls, the port and the client's certificate"
    return ""


def _shown(part: str) -> str:
    """Return `part` without anything that may be a password: a login, and the text after a host."""
    whole = part.rpartition("@")[2].strip()
    found = _ADDRESS.match(whole)
    shown = found[0] if found else ""
    return repr(shown if shown == whole else f"{shown}(hidden)")
