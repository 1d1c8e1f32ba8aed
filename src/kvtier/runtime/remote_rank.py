"""Represents, in the core's process, a rank that runs in another process.

    submit              queues messages in the outbox; `flush` sends them together
    send_note           sends immediately
    a reader thread     turns the rank's messages into completions, and copies the tiers' figures to `views`

To close, this side stops sending. The rank then cancels commands that have not started, waits for the others, sends
their completions and closes the connection. So the rank no longer uses the engine's blocks or slots when the stream or
the process ends. All open commands then fail. The transfers of a process that only stops answering stay open. The
process may resume, and write to the engine's blocks or to slots that ranks share. This delays nothing else, because the
engine waits for that worker in each step anyway. Promotions and demotions have deadlines in the core.
"""

import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from kvtier.errors import described
from kvtier.runtime.executor import Completing, Completion, TierView, Work
from kvtier.runtime.local_server import peer_of, set_timeout, shut
from kvtier.runtime.mover import CLOSED
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
from kvtier.types import Cancel, Command, Outcome, Probe, Recall, Transfer

SILENCE_S = 1.0
"""A rank that has sent no message for this long is checked."""

HUNG_S = 30.0
"""A rank that leaves a ping unanswered for this long is lost. The time is long because the process may be busy. Tiers
have their own deadlines in the core."""

RETRY_S = 0.005
"""Time after which a rank that reads slowly is sent the rest of its commands."""

OUTBOX_BYTES_MAX = 32 << 20
RECV_BYTES = 1 << 16

logger = logging.getLogger(__name__)


class RemoteRank(Completing):
    """One rank in another process, as an `Executor`.

    Args:
        connection: an authenticated connection, owned by this object from now on.
        name: name of the rank, for the log.
        tiers: names of the rank's tiers.
        hung_s: how long a ping may stay unanswered while commands are open.

    Only the owner's thread may call `close`; any thread may call the other methods.
    """

    needs_flush = True

    def __init__(
        self, connection: socket.socket, name: str, tiers: Sequence[str] = (), *, hung_s: float = HUNG_S
    ) -> None:
        self._socket = connection
        self._name = name
        self.views = {tier: TierView() for tier in tiers}
        """Each tier's figures as the rank last sent them, even if the rank is lost."""
        self._hung_s = hung_s
        set_timeout(connection, socket.SO_RCVTIMEO, min(SILENCE_S, hung_s))
        self._process = _process_of(connection)
        self._lock = threading.Lock()
        self._outbox = bytearray()
        self._open: dict[int, Work] = {}
        self._last_number = 0
        self._lost = ""
        self._is_closed = False
        self._has_refused = False
        self._pinged_s: float | None = None
        """Time of the last ping; None if a message has arrived since."""
        self._leaving: Callable[[], None] = lambda: None
        self._reader = threading.Thread(target=self._read, name=f"kvtier {name}", daemon=True)
        self._reader.start()

    @property
    def lost(self) -> str:
        """Why every command is completed as FAILED; empty while the rank is reachable."""
        return self._lost

    def submit(self, *commands: Command) -> None:
        """Queue `commands`, in order. The next `flush` sends them."""
        for command in commands:
            if isinstance(command, Cancel):
                with self._lock, suppress(ProtocolError):  # a cancel is optional
                    self._post(command)
            elif refusal := self._refusal(command):
                self._put(Completion(command, refusal[0], detail=refusal[1]))
                self._ready()

    def _refusal(self, command: Work) -> tuple[Outcome, str] | None:
        """Post `command`, or return the outcome and detail of its refusal."""
        with self._lock:
            if self._is_closed:
                return Outcome.CANCELLED, CLOSED
            if self._lost:
                return Outcome.FAILED, self._lost
            self._last_number += 1
            try:
                self._post(CommandMessage(self._last_number, command))
            except ProtocolError as error:
                if not self._has_refused:
                    self._has_refused = True
                    logger.warning("%s: %s; the command fails (this is logged once)", self._name, error)
                return Outcome.FAILED, str(error)
            self._open[self._last_number] = command
            return None

    def when_leaving(self, act: Callable[[], None]) -> None:
        """Call `act` when the rank's process is about to end, in the reader's thread."""
        self._leaving = act

    def flush(self) -> bool:
        """Send the commands that `submit` has queued. Return False if some remain because the rank reads slowly."""
        if not self._outbox:
            return True
        with self._lock:
            while self._outbox:
                try:
                    sent = self._socket.send(self._outbox, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    return False
                except OSError:
                    self._outbox.clear()  # the reader thread also gets the error
                else:
                    del self._outbox[:sent]
        return True

    def send_note(self, note: Note) -> None:
        """Send `note` to the rank's engine adapter, from any thread. A lost rank does not receive it."""
        with self._lock, suppress(ProtocolError):  # a rank with a full outbox counts as lost
            self._post(note)
        self.flush()

    def close(self, deadline_s: float) -> bool:
        """Cancel commands that have not started and wait for the others. Return whether all have ended.

        Commands that still run are completed when they end.
        """
        until_s = time.monotonic() + deadline_s
        with self._lock:
            self._is_closed = True
        while not self.flush() and time.monotonic() < until_s:
            time.sleep(RETRY_S)
        self._stop_sending()
        self._reader.join(max(0.0, until_s - time.monotonic()))
        return not self._reader.is_alive()

    # ---- under the lock --------------------------------------------------------------------------------------------

    def _post(self, message: Message) -> None:
        if self._is_closed or self._lost:
            return
        frame = encode(message)
        if len(self._outbox) + len(frame) > OUTBOX_BYTES_MAX:
            raise ProtocolError(f"the process does not read; {len(self._outbox)} bytes wait to be sent")
        self._outbox += frame

    # ---- the reader's thread ---------------------------------------------------------------------------------------

    def _read(self) -> None:
        reader: MessageReader | None = MessageReader()
        while True:
            try:
                data = self._read_bytes()
                if data is None:
                    self._check_alive()
                elif not data:
                    break
                elif reader is not None:
                    for body in reader.feed(data):
                        self._receive(decode(body))
            except Exception as error:
                if not isinstance(error, ProtocolError):
                    logger.exception("internal error: kvtier gives up on %s", self._name)
                reader = None  # discards further messages
                self._lose(described(error), is_gone=False)
        self._lose("its process has ended", is_gone=True)
        with self._lock:
            self._socket.close()
        if self._process is not None:
            os.close(self._process)

    def _read_bytes(self) -> bytes | None:
        """Read bytes from the rank. Return None if there are none yet, and empty bytes at the end of the stream."""
        try:
            data = self._socket.recv(RECV_BYTES)
        except BlockingIOError:
            return b"" if self._has_ended() else None
        except OSError:
            return b""
        self._pinged_s = None
        return data

    def _receive(self, message: Message) -> None:
        if isinstance(message, Ping):
            return
        if isinstance(message, Leave):
            self._leaving()
            return
        if isinstance(message, TierReport) and message.tier in self.views:
            view = self.views[message.tier]
            view.figures = message.figures
            view.stuck_queues = lambda: message.stuck_queues
            return
        if not isinstance(message, CompletionMessage):
            raise ProtocolError(f"the rank has sent an unexpected {type(message).__name__}")
        with self._lock:
            command = self._open.get(message.number)
            if command is None:
                return  # it has already failed
            wanted = len(command.objects) if isinstance(command, Probe) and message.outcome is Outcome.DONE else 0
            if len(message.present) != wanted:
                raise ProtocolError(
                    f"the rank answered a probe of {wanted} objects with {len(message.present)} results"
                )
            if (message.page is not None) != (isinstance(command, Recall) and message.outcome is Outcome.DONE):
                raise ProtocolError("only a completed recall has a page of records")
            completion = Completion(command, *message[1:])
            del self._open[message.number]
        self._give(completion)

    def _give(self, completion: Completion) -> None:
        try:
            self._put(completion)
        except Exception as error:
            logger.exception("internal error: a command of %s has failed", self._name)
            self._put(Completion(completion.command, Outcome.FAILED, detail=described(error)))
        self._ready()

    def _check_alive(self) -> None:
        """Ping a silent rank with open commands. It is lost if a ping stays unanswered."""
        now_s = time.monotonic()
        if not self._open or self._lost or self._is_closed:
            return
        if self._pinged_s is None:
            self._pinged_s = now_s
            with self._lock, suppress(ProtocolError):  # if the outbox is full, the ping counts as unanswered
                self._post(Ping())
            self.flush()
        elif now_s - self._pinged_s > self._hung_s:
            self._lose(f"its process has not answered for {now_s - self._pinged_s:.0f} s", is_gone=False)

    def _has_ended(self) -> bool:
        """Return whether the process has ended. The stream may stay open because a child inherited the socket."""
        if self._process is None:
            return False
        question = select.poll()
        question.register(self._process, select.POLLIN)
        return bool(question.poll(0))

    def _lose(self, why: str, *, is_gone: bool) -> None:
        """Fail open and later commands. Transfers stay open while the process may still be alive."""
        with self._lock:
            detail = self._lost or (CLOSED if self._is_closed else f"{self._name} is lost: {why}")
            is_news = detail not in (self._lost, CLOSED)
            if is_news:
                self._lost = detail
            self._outbox.clear()
            failed = [number for number, command in self._open.items() if is_gone or not isinstance(command, Transfer)]
            commands = [self._open.pop(number) for number in failed]
        if is_news:
            logger.error("%s; from now on nothing is stored or loaded, and all prompts are computed", detail)
        for command in commands:
            self._give(Completion(command, Outcome.FAILED, detail=detail))
        self._stop_sending()

    def _stop_sending(self) -> None:
        with self._lock:
            shut(self._socket, socket.SHUT_WR)


def _process_of(connection: socket.socket) -> int | None:
    """Return a pidfd of the process at the other end, readable once it dies, or None if the system provides none."""
    try:
        return os.pidfd_open(peer_of(connection)[0])
    except OSError:
        return None
