"""Serves one rank's mover to the core's process, over a Unix-domain socket in a private directory.

    worker                                       the core's process
    RankServer(rank, on_note)
        .handshake       -- by the engine's channel -->  connect([handshake, ...])
        reader thread    <-- commands, notes --          RemoteRank, or RankGroup of several
        mover's threads  -- completions -->
        reader thread    -- tiers' figures -->

It accepts one connection, because slots belong to one core. Each side proves that it knows the key of the handshake
without sending it. `protocol` has the messages, `remote_rank` describes how a connection ends.
"""

import fcntl
import hmac
import logging
import os
import secrets
import shutil
import socket
import stat
import struct
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

from kvtier.errors import ConfigError
from kvtier.runtime.executor import Completion, Work
from kvtier.runtime.fault_log import FaultLog
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
from kvtier.runtime.remote_rank import HUNG_S, RECV_BYTES, RemoteRank, set_timeout
from kvtier.tier.safe_open import Descriptor, directory_at, open_directory
from kvtier.types import Cancel, Figures, Outcome

GREETING_S = 5.0
"""How long the authentication of a connection may take."""

GREETINGS_MAX = 16
"""Connections that authenticate themselves at the same time. Another one ends the oldest of them."""

SEND_S = 10.0
"""Deadline for the core to read a completion; past it the connection is closed."""

IDLE_S = 60.0
"""A thread that waits for a connection checks for the end at this interval."""

FOLDER_PREFIX = "kvtier-rank-"
"""Of the folders of sockets, in the directory for temporary files."""

DRAIN_STEP_S = 0.01
CLOCKS_APART_S_MAX = 0.1

_MAGIC = b"kvtier 2"
"""Ends with the protocol's version."""
_SOCKET = "rank"
_KEY_BYTES = 32
_CLOCK = struct.Struct("<d")

logger = logging.getLogger(__name__)

_SERVED: "dict[str, RankServer]" = {}
"""Servers of this process, by address."""


class RankServer:
    """Accepts the core's connection and executes its commands.

    Args:
        rank: owned by the caller, which closes it before this server.
        on_note: receives the core's notes, in order: in a thread of the server, or in the sender's thread if the core
            is in this process. It must be quick and must not raise.

    Raises:
        ConfigError: no socket can be created in the directory for temporary files.
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
        """Which of `leave` and `_begin` comes second announces it, so that it is announced once."""
        self._is_mute = False
        self._open: dict[int, tuple[int, Work]] = {}
        """Number of each open command, by the identity of the command."""
        self._next_report_s = 0.0
        self._reported = {name: TierReport(name, Figures(), 0) for name in rank.tiers}
        """What the core knows of each tier."""
        self._refusals = FaultLog()
        self._listener, self.address, folder = _listen()
        self._remove_folder = weakref.finalize(self, _remove, Path(self.address).parent, folder, self._process)
        """Runs at exit, too, if no core has connected."""
        _SERVED[self.address] = self
        self._thread = threading.Thread(target=self._serve, name=f"kvtier rank {rank.number} server", daemon=True)
        self._thread.start()

    @property
    def handshake(self) -> dict[str, Any]:
        """Arguments of `connect`, as JSON values. Secret: it gives control of this rank."""
        rank = self._rank
        return {
            "address": self.address,
            "key": self._key.hex(),
            "pid": os.getpid(),
            "rank": rank.number,
            "ranks": rank.ranks,
            "slots": list(rank.slots),
            "tiers": list(rank.tiers),
            "remote": list(rank.remote),
            "down": list(rank.down),
        }

    def take_here(self) -> Mover:
        """The mover, for a core in this process. Later connections are refused.

        Raises:
            ProtocolError: a core has connected before.
        """
        if not self._take():
            raise ProtocolError(f"rank {self._rank.number} has a connection already")
        self._rank.mover.on_note = self._on_note
        self.is_here = True
        return self._rank.mover

    def leave(self, deadline_s: float) -> bool:
        """Announce to the core that this process is about to end; wait up to `deadline_s` seconds until it disconnects.

        Returns:
            Whether the core has disconnected, or there was none. In a forked child it does nothing, because the
            connection is the parent's.
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
        self._thread.join(deadline_s)
        return not self._thread.is_alive()

    def close(self, deadline_s: float = 5.0) -> bool:
        """Close the connection once running commands have ended; whether that took at most `deadline_s` seconds.

        Idempotent. In a forked child it does nothing.
        """
        if self._process != os.getpid():
            return True
        self._take()
        with self._lock:
            if self._peer is not None:
                _shut(self._peer, socket.SHUT_RD)
        self._thread.join(deadline_s)
        return not self._thread.is_alive()

    def _take(self, peer: socket.socket | None = None, answer: bytes = b"") -> bool:
        """Listen no longer, and serve `peer`, which gets `answer`; False if that was decided before.

        Raises:
            OSError: the peer has gone. Listening goes on.
        """
        with self._lock:
            was_taken = self._is_taken
            if peer is not None and not was_taken:
                peer.sendall(answer)  # under the lock, because no message may be sent before
                self._peer = peer
            self._is_taken = True
        self._stop_listening()
        return not was_taken

    def _stop_listening(self) -> None:
        _SERVED.pop(self.address, None)
        _shut(self._listener, socket.SHUT_RDWR)  # wakes an `accept`; closing would not
        self._remove_folder()

    # ---- the reader's thread ---------------------------------------------------------------------------------------

    def _serve(self) -> None:
        with self._listener:
            peer = self._accept()
        if peer is None:
            return
        with peer:
            try:
                self._begin(peer)
                self._obey(peer)
            except ProtocolError as error:
                logger.warning("rank %d closes the connection to the core: %s", self._rank.number, error)
            except Exception:
                logger.exception("internal error: rank %d closes the connection to the core", self._rank.number)
            finally:
                self._drain()

    def _accept(self) -> socket.socket | None:
        """The first connection that knows the key; None if the server is closed.

        Each has a thread of its own until then, so a silent one holds up no other.
        """
        greetings: deque[socket.socket] = deque()
        # Not `settimeout`, with which `accept` polls, so that a shutdown does not wake it.
        set_timeout(self._listener, socket.SO_RCVTIMEO, IDLE_S)
        while not self._is_taken:
            try:
                peer, _ = self._listener.accept()
            except BlockingIOError:
                continue
            except OSError:
                break
            greetings.append(peer)
            name = f"kvtier rank {self._rank.number} greeting"
            try:
                threading.Thread(target=self._admit, args=(peer,), name=name, daemon=True).start()
            except RuntimeError:  # the system starts no more threads for now
                greetings.pop().close()
            if len(greetings) > GREETINGS_MAX:
                self._refuse(greetings.popleft())
        for peer in greetings:
            self._refuse(peer)
        return self._peer

    def _admit(self, peer: socket.socket) -> None:
        """Authenticate a connection, and serve it if it is the first that knows the key."""
        try:
            answer = _greet(peer, self._key, time.monotonic() + GREETING_S)
            refusal = "" if self._take(peer, answer) else "the rank has another connection, or ends"
        except (ProtocolError, OSError) as error:
            refusal = str(error)
        if refusal:
            self._refusals.report(f"rank {self._rank.number}: a connection was refused", refusal)
            with self._lock:
                peer.close()

    def _refuse(self, peer: socket.socket) -> None:
        """End the authentication of a connection. Its thread closes it."""
        with self._lock:
            if peer is not self._peer:
                _shut(peer, socket.SHUT_RDWR)

    def _begin(self, peer: socket.socket) -> None:
        self._rank.mover.complete_to(self._answer)
        peer.settimeout(None)
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
            raise ProtocolError(f"a core does not send {type(message).__name__}")
        self._rank.mover.flush()

    def _report(self) -> None:
        """Send the figures of tiers that have changed, unless that was done within `FIGURES_EVERY_S`."""
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
        """End the mover: a closed connection means that no command runs any more."""
        has_ended = False
        while self._open and not has_ended:
            try:
                has_ended = self._rank.mover.close(DRAIN_STEP_S)
            except Exception:
                logger.exception("internal error: rank %d retries to end its mover", self._rank.number)
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
                self._mute()  # part of a message may be sent, so no other can follow

    def _mute(self) -> None:
        """Stop sending. The reader thread gets the end of the stream and ends the mover."""
        self._is_mute = True
        if self._peer is not None:
            _shut(self._peer, socket.SHUT_RD)


def _remove(path: Path, folder: Descriptor, process: int) -> None:
    """Remove the socket's folder, unless this is a forked child."""
    if process == os.getpid():
        shutil.rmtree(path, ignore_errors=True)
    folder.close()


class _Handshake(NamedTuple):
    address: str
    key: bytes
    pid: int
    rank: int
    down: frozenset[str]
    ranks: int
    slots: tuple[int, ...]
    tiers: tuple[str, ...]
    remote: tuple[str, ...]


def connect(handshakes: Sequence[Mapping[str, Any]], deadline_s: float = 10.0, *, hung_s: float = HUNG_S) -> OpenRanks:
    """Connect to every rank of an engine. A rank in this process is used directly.

    Args:
        handshakes: `RankServer.handshake` of all ranks, in any order.
        deadline_s: seconds for all connections.
        hung_s: how long a rank may leave a ping unanswered before it is lost.

    Raises:
        ProtocolError: a rank is missing, cannot be reached, or differs from the others. Nothing stays connected.
    """
    until_s = time.monotonic() + deadline_s
    peers = sorted((_read(handshake) for handshake in handshakes), key=lambda peer: peer.rank)
    numbers = [peer.rank for peer in peers]
    if not peers or numbers != list(range(peers[0].ranks)):
        expected = f"0 to {peers[0].ranks - 1}" if peers else "at least one"
        raise ProtocolError(f"ranks {numbers} sent a handshake; expected {expected}")
    for peer in peers:
        if peer[5:] != peers[0][5:]:
            raise ProtocolError(
                f"rank {peer.rank} has {peer.slots} slots and tiers {peer.tiers}, rank 0 has {peers[0].slots} slots "
                f"and tiers {peers[0].tiers}; all ranks must be opened with the same settings"
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
            frozenset(map(str, handshake["down"])),
            int(handshake["ranks"]),
            tuple(map(int, handshake["slots"])),
            tuple(map(str, handshake["tiers"])),
            tuple(map(str, handshake["remote"])),
        )
    except (KeyError, TypeError, ValueError) as error:
        # Without the values, because one is the key.
        raise ProtocolError(f"invalid handshake with the fields {', '.join(map(str, handshake))}") from error


def _dial(peer: _Handshake, until_s: float, hung_s: float) -> RemoteRank:
    name = f"rank {peer.rank} (process {peer.pid})"
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # Not `settimeout`, with which `connect` fails at once while others wait to be accepted.
        set_timeout(connection, socket.SO_SNDTIMEO, max(0.001, until_s - time.monotonic()))
        connection.connect(peer.address)
        _greet_back(connection, peer.key, until_s)
        connection.settimeout(None)
        set_timeout(connection, socket.SO_SNDTIMEO, 0.0)  # it was that of the connection; 0: none
        return RemoteRank(connection, name, peer.tiers, hung_s=hung_s)
    except (OSError, ProtocolError) as error:
        connection.close()
        advice = "all ranks must run on one machine, and no other core may be connected to them"
        raise ProtocolError(f"{name} cannot be reached at {peer.address}: {error}; {advice}") from error


def _greet(peer: socket.socket, key: bytes, until_s: float) -> bytes:
    """Authenticate a connection, on the server's side; the answer, with the clock."""
    mine = secrets.token_bytes(_KEY_BYTES)
    peer.sendall(_MAGIC + mine)
    received = _receive(peer, 2 * _KEY_BYTES, until_s)
    theirs = received[:_KEY_BYTES]
    if not hmac.compare_digest(received[_KEY_BYTES:], _proof(key, b"core", mine, theirs)):
        raise ProtocolError("it does not know the key")
    return _proof(key, b"rank", mine, theirs) + _CLOCK.pack(time.monotonic())


def _greet_back(connection: socket.socket, key: bytes, until_s: float) -> None:
    """Authenticate a connection, on the core's side, and compare the clocks."""
    received = _receive(connection, len(_MAGIC) + _KEY_BYTES, until_s)
    if received[: len(_MAGIC)] != _MAGIC:
        raise ProtocolError("it is not a rank of this version of kvtier")
    theirs, mine = received[len(_MAGIC) :], secrets.token_bytes(_KEY_BYTES)
    sent_s = time.monotonic()
    connection.sendall(mine + _proof(key, b"core", theirs, mine))
    received = _receive(connection, _KEY_BYTES + _CLOCK.size, until_s)
    if not hmac.compare_digest(received[:_KEY_BYTES], _proof(key, b"rank", theirs, mine)):
        raise ProtocolError("it does not know the key")
    (clock_s,) = _CLOCK.unpack(received[_KEY_BYTES:])
    if not sent_s - CLOCKS_APART_S_MAX <= clock_s <= time.monotonic() + CLOCKS_APART_S_MAX:
        raise ProtocolError(f"its clock is {clock_s - sent_s:.1f} s ahead of ours; they must share one time namespace")


def _proof(key: bytes, role: bytes, server: bytes, client: bytes) -> bytes:
    # The role prevents that one side's proof is replayed to it.
    return hmac.digest(key, role + server + client, "sha256")


def _receive(connection: socket.socket, size_bytes: int, until_s: float) -> bytes:
    received = b""
    while len(received) < size_bytes:
        connection.settimeout(max(0.001, until_s - time.monotonic()))
        piece = connection.recv(size_bytes - len(received))
        if not piece:
            raise ProtocolError("the connection has ended")
        received += piece
    return received


def _listen() -> tuple[socket.socket, str, Descriptor]:
    """A socket, its address, and its folder, which is locked as long as this process lives."""
    with ExitStack() as undo:
        listener = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        try:
            _sweep(Path(tempfile.gettempdir()))
            path = tempfile.mkdtemp(prefix=FOLDER_PREFIX)  # mode 0700
            undo.callback(shutil.rmtree, path, ignore_errors=True)
            folder = Descriptor(open_directory(path, is_listed=True))
            undo.callback(folder.close)
            with suppress(OSError):  # without locks there, no folder is swept
                fcntl.flock(folder.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            listener.bind(address := f"{path}/{_SOCKET}")  # after the lock, so that `_sweep` finds none without one
            listener.listen(GREETINGS_MAX)
        except OSError as error:
            raise ConfigError(f"no socket can be created in {tempfile.gettempdir()} (TMPDIR): {error}") from error
        undo.pop_all()
    return listener, address, folder


def _sweep(parent: Path) -> None:
    """Remove the folders of this user's ranks that were killed: no process holds their locks."""
    for path in parent.glob(f"{FOLDER_PREFIX}*"):
        with suppress(OSError), directory_at(str(path), is_listed=True) as folder:
            is_rank = stat.S_ISSOCK(os.stat(_SOCKET, dir_fd=folder, follow_symlinks=False).st_mode)
            if is_rank and os.fstat(folder).st_uid == os.geteuid():
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(_SOCKET, dir_fd=folder)
                path.rmdir()


def _shut(connection: socket.socket, how: int) -> None:
    try:
        connection.shutdown(how)
    except OSError:
        return  # the connection is closed already
