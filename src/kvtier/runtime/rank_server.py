"""Serves one rank's mover to the core's process over an abstract Unix socket.

    worker                                       the core's process
    RankServer(rank, on_note)
        .handshake       -- via the engine's channel --> connect([handshake, ...])
        reader thread    <-- commands, notes --          RemoteRank, or RankGroup of several
        mover's threads  -- completions -->
        reader thread    -- tiers' figures -->

The server serves only one connection, because slots belong to one core. Each side proves that it knows the handshake's
key without sending it. The core does so with its first bytes, and the rank with its answer. `local_server` accepts the
connections. `protocol` defines the messages, and `remote_rank` describes how a connection ends.
"""

import hmac
import logging
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from operator import eq
from typing import Any, NamedTuple

from kvtier.runtime.executor import Completion, Work
from kvtier.runtime.local_server import CONNECTIONS_MAX, LocalServer, set_timeout, shut
from kvtier.runtime.mover import FIGURES_EVERY_S, Mover
from kvtier.runtime.protocol import (
    CommandMessage,
    CompletionMessage,
    Leave,
    Message,
    MessageReader,
    Note,
    Ping,
    ProtocolError,
    TierReport,
    decode,
    encode,
)
from kvtier.runtime.rank import Rank
from kvtier.runtime.rank_group import OpenRanks, RankGroup
from kvtier.runtime.remote_rank import HUNG_S, RECV_BYTES, RemoteRank
from kvtier.types import Cancel, Figures, Outcome

SEND_S = 10.0
"""How long the core may take to read a completion before the connection is closed."""

DRAIN_STEP_S = 0.01
CLOCKS_APART_S_MAX = 0.1

_KEY_BYTES = 32
_CLOCK = struct.Struct("<d")
_GREETING_BYTES = 2 * _KEY_BYTES
_ANSWER_BYTES = _KEY_BYTES + _CLOCK.size

logger = logging.getLogger(__name__)

_SERVED: "dict[str, RankServer]" = {}
"""The servers of this process, by address."""


class RankServer:
    """Accepts the core's connection and executes its commands.

    Args:
        rank: the rank; the caller owns it and closes it before this server.
        on_note: receives the core's notes in order, in a thread of the server. It runs in the sender's thread if the
            core is in this process. It must be quick and must not raise.

    Raises:
        OSError: the system cannot create a socket.
    """

    def __init__(self, rank: Rank, on_note: Callable[[Note], None]) -> None:
        self._rank = rank
        self._on_note = on_note
        self._process = os.getpid()
        self._key = secrets.token_bytes(_KEY_BYTES)
        self._lock = threading.Lock()
        self._is_taken = False
        self._peer: socket.socket | None = None
        self.is_here = False
        """Whether the core is in this process."""
        self._is_leaving = self._has_begun = False
        """Set by `leave` and `_begin`; the later of the two announces once that the rank leaves."""
        self._is_mute = False
        self._open: dict[int, tuple[int, Work]] = {}
        """Each open command with its number, by the command's identity."""
        self._next_report_s = 0.0
        self._reported = {name: TierReport(name, Figures(), 0) for name in rank.tiers}
        """The last report on each tier that the core received."""
        self.address = f"kvtier-rank-{secrets.token_hex(16)}"
        """Abstract socket name in this process's network namespace."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(f"\0{self.address}")
        listener.listen(CONNECTIONS_MAX)
        _SERVED[self.address] = self
        self._server = LocalServer(f"kvtier rank {rank.number}", listener, self._serve)
        self._server.start()

    @property
    def handshake(self) -> dict[str, Any]:
        """The values that `connect` needs, as JSON. They are secret, because they give control of this rank."""
        rank = self._rank
        return {
            "address": self.address,
            "key": self._key.hex(),
            "pid": os.getpid(),
            "rank": rank.number,
            "ranks": rank.ranks,
            "slots": list(rank.slots),
            "parts": [
                f"{it.part and it.part.text}, {f'absent on rank {rank.number}' if it.is_absent else f'copy {it.copy}'}"
                for it in rank.layout.groups
            ],
            "tiers": list(rank.tiers),
            "remote": list(rank.remote),
            "down": list(rank.down),
        }

    def take_here(self) -> Mover:
        """Return the mover to a core in this process. Later connections are refused.

        Raises:
            ProtocolError: a core is already connected.
        """
        if not self._take():
            raise ProtocolError(f"rank {self._rank.number} has a connection already")
        self._rank.mover.on_note = self._on_note
        self.is_here = True
        return self._rank.mover

    def leave(self, deadline_s: float) -> bool:
        """Tell the core that this process is about to end; wait up to `deadline_s` seconds for it to disconnect.

        This does nothing in a forked child, because the parent owns the connection.

        Returns:
            Whether the core has disconnected, or there was none.
        """
        if self._process != os.getpid():
            return True
        if self.is_here:
            return self._rank.mover.leave(deadline_s)
        with self._lock:
            self._is_leaving = True
            is_taken, has_begun = self._is_taken, self._has_begun
        if not is_taken:
            return True
        if has_begun:
            self._send(encode(Leave()))
        return self._server.join(deadline_s)

    def close(self, deadline_s: float = 5.0) -> bool:
        """Close the connection once running commands have ended. Return whether this took at most `deadline_s` s.

        Idempotent. It does nothing in a forked child.
        """
        if self._process != os.getpid():
            return True
        self._take()
        with self._lock:
            if self._peer is not None:
                shut(self._peer, socket.SHUT_RD)
        return self._server.join(deadline_s)

    def _take(self, peer: socket.socket | None = None, answer: bytes = b"") -> bool:
        """Stop listening, and send `answer` to `peer`, which is then the only one that is served.

        Return False if an earlier call has done so already.

        Raises:
            OSError: the peer has gone. The server keeps listening.
        """
        with self._lock:
            was_taken = self._is_taken
            if peer is not None and not was_taken:
                peer.sendall(answer)  # under the lock, because no message may precede it
                self._peer = peer
            self._is_taken = True
        _SERVED.pop(self.address, None)
        self._server.stop()
        return not was_taken

    # ---- the reader's thread ---------------------------------------------------------------------------------------

    def _serve(self, peer: socket.socket) -> None:
        """Serve a connection if it is the first that knows the key."""
        try:
            peer.recv(1, socket.MSG_PEEK)
            if not self._server.keep(peer):
                return
            answer = _answer(peer, self._key)
            refusal = "" if self._take(peer, answer) else "the rank already has a connection, or is ending"
        except (ProtocolError, OSError) as error:
            refusal = str(error)
        if refusal:
            self._server.refused(refusal)
            return
        try:
            self._begin(peer)
            self._obey(peer)
        except ProtocolError as error:
            logger.warning("rank %d closes the connection to the core: %s", self._rank.number, error)
        except Exception:
            logger.exception("internal error: rank %d closes the connection to the core", self._rank.number)
        finally:
            self._drain()

    def _begin(self, peer: socket.socket) -> None:
        self._rank.mover.complete_to(self._answer)
        set_timeout(peer, socket.SO_RCVTIMEO, FIGURES_EVERY_S)
        set_timeout(peer, socket.SO_SNDTIMEO, SEND_S)
        with self._lock:
            self._has_begun = True
            is_leaving = self._is_leaving
        if is_leaving:
            self._send(encode(Leave()))

    def _obey(self, peer: socket.socket) -> None:
        reader = MessageReader()
        while True:
            try:
                data = peer.recv(RECV_BYTES)
            except BlockingIOError:
                self._report()
                continue
            except OSError:
                return
            if not data:
                return
            for body in reader.feed(data):
                self._receive(decode(body))
            self._report()

    def _receive(self, message: Message) -> None:
        if isinstance(message, CommandMessage):
            command = message.command
            self._open[id(command)] = (message.number, command)
            try:
                self._rank.mover.submit(command)
            except ValueError as error:
                self._answer(Completion(command, Outcome.FAILED, detail=str(error)))
        elif isinstance(message, Cancel):
            self._rank.mover.submit(message)
        elif isinstance(message, Note):
            self._on_note(message)
        elif isinstance(message, Ping):
            self._send(encode(message))
        else:
            raise ProtocolError(f"the core has sent an unexpected {type(message).__name__}")
        self._rank.mover.flush()

    def _report(self) -> None:
        """Send the tiers' figures that have changed, unless they were sent within `FIGURES_EVERY_S`."""
        now_s = time.monotonic()
        if now_s < self._next_report_s:
            return
        self._next_report_s = now_s + FIGURES_EVERY_S
        for name, view in self._rank.mover.views.items():
            report = TierReport(name, view.figures, view.stuck_queues())
            if report != self._reported[name]:
                self._reported[name] = report
                self._send(encode(report))

    def _drain(self) -> None:
        """End the mover, because a closed connection must mean that no command runs any more."""
        has_ended = False
        while self._open and not has_ended:
            try:
                has_ended = self._rank.mover.close(DRAIN_STEP_S)
            except Exception:
                logger.exception("internal error: rank %d failed to stop its mover and will retry", self._rank.number)
                time.sleep(DRAIN_STEP_S)
        with self._lock:
            self._peer = None

    # ---- any thread ------------------------------------------------------------------------------------------------

    def _answer(self, completion: Completion) -> None:
        number, _ = self._open[id(completion.command)]
        try:
            self._send(encode(CompletionMessage(number, *completion[1:])))
        except Exception:
            logger.exception("internal error: rank %d cannot send a completion and disconnects", self._rank.number)
            self._mute()
        del self._open[id(completion.command)]

    def _send(self, frame: bytes) -> None:
        with self._lock:
            if self._is_mute or self._peer is None:
                return
            try:
                self._peer.sendall(frame)
            except OSError:
                self._mute()  # part of a message may have been sent, so no other may follow

    def _mute(self) -> None:
        """Stop sending. The reader thread then sees the end of the stream and ends the mover."""
        self._is_mute = True
        if self._peer is not None:
            shut(self._peer, socket.SHUT_RD)


class _Handshake(NamedTuple):
    address: str
    key: bytes
    pid: int
    rank: int
    parts: tuple[str, ...]
    down: frozenset[str]
    ranks: int
    slots: tuple[int, ...]
    tiers: tuple[str, ...]
    remote: tuple[str, ...]


def connect(handshakes: Sequence[Mapping[str, Any]], deadline_s: float = 10.0, *, hung_s: float = HUNG_S) -> OpenRanks:
    """Connect to every rank of an engine. A rank in this process is used directly.

    Args:
        handshakes: `RankServer.handshake` of all ranks, in any order.
        deadline_s: deadline for all connections together.
        hung_s: how long a rank may leave a ping unanswered before it is lost.

    Raises:
        ProtocolError: a rank is missing, cannot be reached, or differs from the others. Nothing stays connected.
    """
    until_s = time.monotonic() + deadline_s
    peers = sorted((_read(handshake) for handshake in handshakes), key=lambda peer: peer.rank)
    numbers = [peer.rank for peer in peers]
    if not peers or numbers != list(range(peers[0].ranks)):
        expected = f"0 to {peers[0].ranks - 1}" if peers else "at least one"
        raise ProtocolError(f"the ranks {numbers} have sent a handshake; expected {expected}")
    for peer in peers:
        for other in peers[: peer.rank]:
            if any(map(eq, other.parts, peer.parts)):
                raise ProtocolError(
                    f"rank {other.rank} holds {other.parts} of the KV groups and rank {peer.rank} {peer.parts}; two "
                    "ranks may not claim the same copy of a part: their objects would have the same names"
                )
        if peer[6:] != peers[0][6:]:
            raise ProtocolError(
                f"rank {peer.rank} has {peer.slots} slots and the tiers {peer.tiers}, but rank 0 has {peers[0].slots} "
                f"slots and the tiers {peers[0].tiers}; all ranks must be opened with the same settings"
            )
    ranks: list[Mover | RemoteRank] = []
    try:
        for peer in peers:
            here = _SERVED.get(peer.address) if peer.pid == os.getpid() else None
            ranks.append(here.take_here() if here is not None else _dial(peer, until_s, hung_s))
    except BaseException:
        for rank in ranks:
            rank.close(0.0)
        raise
    down = frozenset[str]().union(*(peer.down for peer in peers))
    executor = ranks[0] if len(ranks) == 1 else RankGroup(ranks, peers[0].remote)
    views = [rank.views for rank in ranks]
    return OpenRanks(executor, peers[0].slots, peers[0].tiers, down, views, len(ranks))


def _read(handshake: Mapping[str, Any]) -> _Handshake:
    try:
        return _Handshake(
            str(handshake["address"]),
            bytes.fromhex(handshake["key"]),
            int(handshake["pid"]),
            int(handshake["rank"]),
            tuple(map(str, handshake["parts"])),
            frozenset(map(str, handshake["down"])),
            int(handshake["ranks"]),
            tuple(map(int, handshake["slots"])),
            tuple(map(str, handshake["tiers"])),
            tuple(map(str, handshake["remote"])),
        )
    except (KeyError, TypeError, ValueError) as error:
        # The message omits the values, because one is the key.
        raise ProtocolError(f"invalid handshake with the fields {', '.join(map(str, handshake))}") from error


def _dial(peer: _Handshake, until_s: float, hung_s: float) -> RemoteRank:
    name = f"rank {peer.rank} (process {peer.pid})"
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # With `settimeout`, `connect` would fail immediately while others wait to be accepted.
        for which in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            set_timeout(connection, which, max(0.001, until_s - time.monotonic()))
        connection.connect(f"\0{peer.address}")
        _greet(connection, peer.key)
        set_timeout(connection, socket.SO_SNDTIMEO, 0.0)  # no timeout from here on
        return RemoteRank(connection, name, peer.tiers, hung_s=hung_s)
    except (OSError, ProtocolError) as error:
        connection.close()
        advice = "all ranks must run on one machine, and no other core may be connected to them"
        raise ProtocolError(f"{name} cannot be reached at {peer.address}: {error}; {advice}") from error


def _greet(connection: socket.socket, key: bytes) -> None:
    """Authenticate a connection on the core's side, and compare the clocks."""
    nonce, sent_s = secrets.token_bytes(_KEY_BYTES), time.monotonic()
    connection.sendall(nonce + _proof(key, b"core", nonce))
    answer = connection.recv(_ANSWER_BYTES, socket.MSG_WAITALL)
    if len(answer) < _ANSWER_BYTES:
        raise ProtocolError("the connection has ended")
    if not hmac.compare_digest(answer[:_KEY_BYTES], _proof(key, b"rank", nonce)):
        raise ProtocolError("it does not know the key")
    (clock_s,) = _CLOCK.unpack(answer[_KEY_BYTES:])
    if not sent_s - CLOCKS_APART_S_MAX <= clock_s <= time.monotonic() + CLOCKS_APART_S_MAX:
        raise ProtocolError(f"its clock is {clock_s - sent_s:.1f} s ahead; all ranks must share a time namespace")


def _answer(peer: socket.socket, key: bytes) -> bytes:
    """Return the answer to a connection's greeting, including the clock. A greeting arrives in one piece."""
    greeting = peer.recv(_GREETING_BYTES, socket.MSG_DONTWAIT)
    nonce = greeting[:_KEY_BYTES]
    if not hmac.compare_digest(greeting[_KEY_BYTES:], _proof(key, b"core", nonce)):
        raise ProtocolError("it does not know the key")
    return _proof(key, b"rank", nonce) + _CLOCK.pack(time.monotonic())


def _proof(key: bytes, role: bytes, nonce: bytes) -> bytes:
    # The role prevents replaying a side's own proof to it. The number is the protocol's version.
    return hmac.digest(key, b"kvtier 4 " + role + nonce, "sha256")
