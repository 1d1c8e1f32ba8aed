"""Requests to a Valkey store, sent in one pipeline per server and repeated within a deadline.

The keys of one object are in one slot. A request is one command or transaction on one server.
"""

import random
import time
from collections.abc import Sequence
from contextlib import suppress
from math import inf

from kvtier.tier.deadline_calls import remaining_s
from kvtier.tier.valkey.connection import (
    MANY_CLIENTS,
    BrokenWireError,
    Buffer,
    Node,
    NonsenseError,
    Reader,
    RefusedError,
    Reply,
    Wire,
    cause_of,
    command,
)
from kvtier.tier.valkey.servers import ServerDownError, Servers

REPEATS_MAX = 6
"""Maximum number of repetitions of one request after temporary failures."""
PAUSE_S, PAUSE_MAX_S = 0.02, 0.5
"""Pause before the second repetition, and longest pause. Pauses double, and half of each is random."""
PASSING = frozenset({"MOVED", "CLUSTERDOWN", "TRYAGAIN", "LOADING", "READONLY", "MASTERDOWN", "BUSY"})
"""Codes of refusals worth a retry."""
STALL_SHARE = 0.15
"""Share of the deadline after which a read without a byte has stalled. If the server still answers, each object is then
read once more on its own connection. If no byte arrives there either, the read fails."""
AHEAD_BYTES = 2 << 20
"""Payload that one connection asks for before it arrives. At 25 Gbit/s and 0.5 ms, 1.6 MB are in flight.

More would wait in the server's memory, outside the processor's cache: four readers of 32 MiB get half as much then."""
MOVING = frozenset({"ASK", "TRYAGAIN"})
"""Codes of refusals while a slot moves to another server."""


class Request:
    """One command with its reply.

    Args:
        slot: slot of its keys.
        buffers: the bytes to send.
    """

    may_stall = False
    """Whether this reads an object. Only reads fail after `STALL_SHARE` of the deadline without a byte."""
    payload_bytes = 0
    """Payload of the reply, at most. It counts towards `AHEAD_BYTES`."""

    def __init__(self, slot: int, buffers: Sequence[Buffer]) -> None:
        self.slot, self.buffers = slot, buffers
        self.is_alone = False
        """Whether it must not share a connection with other slots, because it has waited for a request that stalled."""
        self.answer: Reply = None
        """The server's answer or refusal, which counts only without a `failure`."""
        self.failure = ""
        """Why there is no answer."""
        self.is_down = self.may_pass = False
        """`is_down`: the server failed a moment ago and was not asked. `may_pass`: another attempt may succeed."""
        self.repeats = 0

    @property
    def refusal(self) -> RefusedError | None:
        """The server's refusal, if any."""
        return self.answer if not self.failure and isinstance(self.answer, RefusedError) else None

    @property
    def has_failed(self) -> bool:
        """Whether it was refused or has no answer."""
        return bool(self.failure) or isinstance(self.answer, RefusedError)

    def take(self, reader: Reader) -> Reply:
        """Read all replies to the request, and return the one that counts."""
        return reader.reply()


class Transaction(Request):
    """Several commands that take effect together or not at all. The answer is the list of their replies.

    Args:
        slot: slot of all keys.
        commands: the buffers of each command.
    """

    def __init__(self, slot: int, commands: Sequence[Sequence[Buffer]]) -> None:
        buffers = [command(b"MULTI"), *(each for parts in commands for each in parts), command(b"EXEC")]
        super().__init__(slot, buffers)
        self._count = len(commands)

    def take(self, reader: Reader) -> Reply:
        """Return the first refusal, or else the last reply. A refused EXEC only follows from an earlier refusal."""
        replies = [reader.reply() for _ in range(self._count + 2)]
        return next((each for each in replies if isinstance(each, RefusedError)), replies[-1])


class Requests:
    """Runs requests on `servers`."""

    def __init__(self, servers: Servers) -> None:
        self._servers = servers

    def run(self, requests: Sequence[Request], end_s: float) -> None:
        """Send `requests` and read their answers, until `end_s` on the monotonic clock."""
        start_s = time.monotonic()
        last_start_s = start_s + (end_s - start_s) / 2
        if self._servers.has_failed:
            self._servers.refresh(end_s)
        waiting = requests
        while waiting:
            self._round(waiting, end_s, (end_s - start_s) * STALL_SHARE)
            waiting = [each for each in waiting if self._goes_on(each)]
            if not waiting:
                return
            pause_s = _pause_s(max(each.repeats for each in waiting))
            if time.monotonic() + pause_s > last_start_s:
                return
            self._servers.refresh(end_s)
            time.sleep(pause_s)

    def _round(self, requests: Sequence[Request], end_s: float, stall_s: float) -> None:
        """Send to all servers before reading, so that they work at the same time."""
        groups: dict[tuple[Node, int | None], list[Request]] = {}
        for each in requests:
            each.failure = ""
            which = (self._servers.node_of(each.slot), each.slot if each.is_alone else None)
            groups.setdefault(which, []).append(each)
        sent: list[tuple[Wire, list[Request]]] = []
        try:
            for (node, _), group in groups.items():
                wire = self._sent(node, group, end_s, stall_s)
                if wire is not None:
                    sent.append((wire, group))
            while sent:
                self._read(*sent.pop(), end_s, stall_s)
        finally:  # after an interrupt, replies may still arrive on these connections
            for wire, _ in sent:
                wire.close()

    def _sent(self, node: Node, group: list[Request], end_s: float, stall_s: float) -> Wire | None:
        try:
            remaining_s(end_s)  # another server may have used up the time
            wire = self._servers.take(node, end_s)
        except RefusedError as error:
            for each in group:
                each.answer = error.with_traceback(None)  # its stack frames refer to the group
        except (ServerDownError, BrokenWireError, OSError) as error:
            _fail(node, group, error)
        else:
            try:
                _send(wire, group[: _ahead(group, 0, AHEAD_BYTES)], end_s, stall_s)
            except (BrokenWireError, OSError) as error:
                self._broke(wire, group, error)
            except BaseException:
                wire.close()
                raise
            else:
                return wire
        return None

    def _read(self, wire: Wire, group: list[Request], end_s: float, stall_s: float) -> None:
        done, sent = 0, _ahead(group, 0, AHEAD_BYTES)
        try:
            for each in group:
                each.answer = each.take(wire.reader)
                done += 1
                if sent < len(group) and _ahead(group, done, AHEAD_BYTES // 2) >= sent:
                    first, sent = sent, _ahead(group, sent, AHEAD_BYTES // 2)
                    _send(wire, group[first:sent], end_s, stall_s)
        except (BrokenWireError, OSError) as error:
            has_stalled = isinstance(error, TimeoutError) and time.monotonic() < end_s
            if has_stalled and self._is_well(wire.node, min(end_s, time.monotonic() + stall_s / 2)):
                wire.close()
                for each in group[done:]:
                    each.failure, each.is_down = f"{wire.node}: no byte arrived for {stall_s:g} s", False
                    each.may_pass, each.is_alone = not each.is_alone, True
            else:
                self._broke(wire, group[done:], error)
        except BaseException:
            wire.close()
            raise
        else:
            self._servers.give(wire)

    def _is_well(self, node: Node, end_s: float) -> bool:
        """Return whether the server answers, even with a refusal."""
        try:
            with suppress(RefusedError):
                self._servers.ask(node, b"PING", end_s=end_s)
        except (ServerDownError, BrokenWireError, OSError):
            return False
        return True

    def _broke(self, wire: Wire, group: list[Request], error: Exception) -> None:
        """Handle a failed connection. A healthy server may have closed it while it was idle."""
        wire.close()
        is_stale = wire.is_used and not isinstance(error, TimeoutError | NonsenseError)
        self._servers.failed(wire.node, is_down=not is_stale)
        _fail(wire.node, group, error)

    def _goes_on(self, request: Request) -> bool:
        """Decide whether to send the request again. Otherwise its answer is final."""
        may_pass, refusal = request.may_pass, request.refusal
        if refusal is not None:
            may_pass = refusal.code in PASSING or refusal.text == MANY_CLIENTS
            self._servers.moved(refusal)
        elif not request.failure:
            return False
        request.repeats += 1
        return may_pass and request.repeats <= REPEATS_MAX


def _pause_s(repeats: int) -> float:
    """Return the pause before a repetition. The first is immediate: a slot has moved, or an idle connection closed."""
    if repeats == 1:
        return 0.0
    longest_s = min(PAUSE_MAX_S, PAUSE_S * 2 ** (repeats - 2))
    return random.uniform(longest_s / 2, longest_s)  # noqa: S311 - no secret


def _ahead(group: Sequence[Request], first: int, most_bytes: int) -> int:
    """Return the end of the requests from `first` on whose payloads together are `most_bytes`, but at least one."""
    left = most_bytes
    for number in range(first, len(group)):
        left -= group[number].payload_bytes
        if left < 0 and number > first:
            return number
    return len(group)


def _send(wire: Wire, group: Sequence[Request], end_s: float, stall_s: float) -> None:
    """Send `group`. Reads then fail after `stall_s` without a byte."""
    longest_s = stall_s if all(each.may_stall for each in group) else inf
    wire.send([part for each in group for part in each.buffers], end_s, longest_s)


def _fail(node: Node, group: Sequence[Request], error: Exception) -> None:
    for each in group:
        each.failure = f"{node}: {cause_of(error)}"
        each.is_down = isinstance(error, ServerDownError)
        each.may_pass = not isinstance(error, ServerDownError | TimeoutError)
