"""Requests to a Valkey store: pipelined, one pipeline for each server, redirected and repeated within a deadline.

The keys of one object are in one slot. A request is what one server does at once: a command, or a transaction.
"""

import random
import time
from collections.abc import Sequence
from enum import Enum

from kvtier.tier.valkey.servers import ServerDownError, Servers, redirection
from kvtier.tier.valkey.wire import (
    MANY_CLIENTS,
    REPLY_BYTES_MAX,
    BrokenWireError,
    Buffer,
    Node,
    NonsenseError,
    Reader,
    RefusedError,
    Reply,
    Wire,
    command,
)

REDIRECTIONS_MAX = 5
"""Of one request. A cluster that is well needs two at most."""
REPEATS_MAX = 6
"""Of one request, after failures that pass."""
PAUSE_S, PAUSE_MAX_S = 0.02, 0.5
"""Before a repetition: doubles from the first to the second, and half of it is drawn at random."""
PASSING = frozenset({"CLUSTERDOWN", "TRYAGAIN", "LOADING", "READONLY", "MASTERDOWN", "BUSY"})
"""Refusals that another attempt may not get."""
MOVING = frozenset({"TRYAGAIN", "ASK"})
"""Refusals while a slot is on its way to another server."""

_ASKING = command(b"ASKING")


class Failure(Enum):
    """Why a request has no answer, where a server's refusal does not say it."""

    DOWN = "the server failed a moment ago"
    """And was not asked."""
    BROKEN = "the connection failed"
    STALE = "an idle connection turned out to be closed"
    LATE = "no answer in time"
    STORM = "redirected from server to server"


class Request:
    """One command with its reply.

    Args:
        slot: of its keys.
        buffers: what is sent.
        most: bytes of the longest reply.
    """

    def __init__(self, slot: int, buffers: Sequence[Buffer], most: int = REPLY_BYTES_MAX) -> None:
        self.slot, self.buffers, self._most = slot, buffers, most
        self.answer: Reply = None
        """Of the server: a refusal, too. It counts only when there is no `failure`."""
        self.failure: Failure | None = None
        self.detail = ""
        """Of the failure."""
        self.target: Node | None = None
        """A server that takes it for its slot, which is on its way there."""
        self.redirections = self.repeats = 0

    @property
    def refusal(self) -> RefusedError | None:
        """The server's, if it refused."""
        return self.answer if self.failure is None and isinstance(self.answer, RefusedError) else None

    @property
    def has_failed(self) -> bool:
        """Whether it was refused or has no answer."""
        return self.failure is not None or isinstance(self.answer, RefusedError)

    def take(self, reader: Reader) -> Reply:
        """Read all of its replies; the one that counts."""
        return reader.reply(self._most)


class Transaction(Request):
    """Several commands that take effect together, or none of them. The answer is the list of their replies.

    Args:
        slot: of all keys.
        commands: each as buffers.
    """

    def __init__(self, slot: int, commands: Sequence[Sequence[Buffer]]) -> None:
        buffers = [command(b"MULTI"), *(each for parts in commands for each in parts), command(b"EXEC")]
        super().__init__(slot, buffers)
        self._count = len(commands)

    def take(self, reader: Reader) -> Reply:
        """The first refusal is the cause, the transaction's own is only its effect."""
        replies = [reader.reply() for _ in range(self._count + 2)]
        return next((each for each in replies if isinstance(each, RefusedError)), replies[-1])


class Requests:
    """Runs requests on `servers`."""

    def __init__(self, servers: Servers) -> None:
        self._servers = servers

    def run(self, requests: Sequence[Request], end_s: float) -> None:
        """Send `requests` and read their answers, all until `end_s` of the monotonic clock."""
        start_s = time.monotonic()
        last_start_s = start_s + (end_s - start_s) / 2
        if self._servers.has_failed:
            self._servers.refresh(end_s)
        waiting = requests
        while waiting:
            self._round(waiting, end_s)
            again = [each for each in waiting if self._goes_on(each)]
            if not again:
                return
            pause_s = max(_pause_s(each) for each in again)
            if time.monotonic() + pause_s > last_start_s:
                return
            self._servers.refresh(end_s)
            if pause_s:
                time.sleep(pause_s)
            waiting = again

    def _round(self, requests: Sequence[Request], end_s: float) -> None:
        """Send all, and only then read: the servers work at the same time."""
        groups: dict[Node, list[Request]] = {}
        for each in requests:
            each.failure = None
            groups.setdefault(each.target or self._servers.node_of(each.slot), []).append(each)
        sent: list[tuple[Wire, list[Request]]] = []
        try:
            for node, group in groups.items():
                wire = self._sent(node, group, end_s)
                if wire is not None:
                    sent.append((wire, group))
            while sent:
                self._read(*sent.pop())
        finally:  # after an interrupt, replies may still come on these
            for wire, _ in sent:
                self._servers.drop(wire)

    def _sent(self, node: Node, group: list[Request], end_s: float) -> Wire | None:
        if time.monotonic() >= end_s:  # another server took all of the time
            _fail(group, Failure.LATE, "no time left")
            return None
        try:
            wire = self._servers.take(node, end_s)
        except ServerDownError as error:
            _fail(group, Failure.DOWN, str(error))
        except RefusedError as error:
            for each in group:
                each.answer = error
        except (BrokenWireError, OSError) as error:
            self._servers.failed(node)
            _fail(group, _kind(error), f"{node}: {_cause(error)}")
        else:
            try:
                wire.send([part for each in group for part in _wired(each)], end_s)
            except (BrokenWireError, OSError) as error:
                self._broke(wire, group, error)
            except BaseException:
                self._servers.drop(wire)
                raise
            else:
                return wire
        return None

    def _read(self, wire: Wire, group: list[Request]) -> None:
        done = 0
        try:
            for each in group:
                if each.target is not None:
                    wire.reader.reply()
                each.answer = each.take(wire.reader)
                done += 1
        except (BrokenWireError, OSError) as error:
            self._broke(wire, group[done:], error)
        except BaseException:
            self._servers.drop(wire)
            raise
        else:
            self._servers.give(wire)

    def _broke(self, wire: Wire, group: list[Request], error: Exception) -> None:
        self._servers.drop(wire)
        kind = _kind(error)
        if kind is Failure.BROKEN and wire.is_used and not isinstance(error, NonsenseError):
            kind = Failure.STALE
        else:
            self._servers.failed(wire.node)
        _fail(group, kind, f"{wire.node}: {_cause(error)}")

    def _goes_on(self, request: Request) -> bool:
        """Whether to send it again. Its answer is final otherwise."""
        refusal = request.refusal
        if refusal is not None and refusal.code in ("MOVED", "ASK"):
            return self._redirected(request, refusal)
        is_slots_of_way = refusal is not None and (refusal.code in PASSING or refusal.text == MANY_CLIENTS)
        if request.failure in (Failure.BROKEN, Failure.STALE) or is_slots_of_way:
            request.target = None
            request.repeats += 1
            return request.repeats <= REPEATS_MAX
        return False

    def _redirected(self, request: Request, refusal: RefusedError) -> bool:
        asked = request.target or self._servers.node_of(request.slot)
        node = redirection(refusal, asked)
        request.redirections += 1
        if node is None or not self._servers.is_cluster or request.redirections > REDIRECTIONS_MAX:
            if refusal.code == "MOVED":
                request.failure, request.detail = Failure.STORM, f"{asked}: {refusal.text}"
            return False
        if refusal.code == "MOVED":
            self._servers.moved(request.slot, node)
            request.target = None
        else:
            request.target = node
        return True


def _pause_s(request: Request) -> float:
    """Before `request` is sent again. The first redirections and the first new connection come at once."""
    if request.repeats == 0 and request.redirections <= 2:
        return 0.0
    if request.failure is Failure.STALE:
        return 0.0
    longest_s = min(PAUSE_MAX_S, PAUSE_S * 2 ** (request.repeats + request.redirections))
    return random.uniform(longest_s / 2, longest_s)  # noqa: S311 - no secret


def _wired(request: Request) -> Sequence[Buffer]:
    """`request` as it is sent. A server that gets a slot takes commands for it only when asked so, one by one."""
    return request.buffers if request.target is None else [_ASKING, *request.buffers]


def _fail(group: Sequence[Request], failure: Failure, detail: str) -> None:
    for each in group:
        each.failure, each.detail = failure, detail


def _kind(error: Exception) -> Failure:
    return Failure.LATE if isinstance(error, TimeoutError) else Failure.BROKEN


def _cause(error: Exception) -> str:
    """Without what a server may have sent, but for a few characters."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)[:200] or type(error).__name__
