"""Adds deadlines to calls that have none, such as client library calls and host lookups, by means of threads."""

import errno
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any, TypeVar

from kvtier.errors import TierError

THREADS = 4
LOOKUPS_MAX = 64
"""Maximum number of host names looked up at the same time."""

_T = TypeVar("_T")

_lookups: dict[str, Future[list[Any]]] = {}
"""Host names being looked up, each in its own thread."""
os.register_at_fork(after_in_child=_lookups.clear)


def remaining_s(end_s: float) -> float:
    """Return the seconds until `end_s` on the monotonic clock.

    Raises:
        TimeoutError: `end_s` has passed.
    """
    left_s = end_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("no answer in time")
    return left_s


def connected(host: str, port: int, end_s: float) -> socket.socket:
    """Open a TCP connection. The name lookup and all addresses of the host share the time.

    Args:
        host: a name or an address.
        port: port of the server.
        end_s: when the connection must be open, on the monotonic clock.

    Raises:
        TimeoutError: the connection is not open by then.
        OSError: the host has no address, or none accepts the connection.
    """
    cause: OSError = OSError(errno.EADDRNOTAVAIL, "the host has no address")
    found = _addresses(host, end_s)
    for number, (family, kind, protocol, _, address) in enumerate(found):
        line = None
        try:
            line = socket.socket(family, kind, protocol)
            line.settimeout(remaining_s(end_s) / (len(found) - number))
            line.connect((address[0], port, *address[2:]))
            line.settimeout(remaining_s(end_s))
        except OSError as error:
            cause = error
            if line is not None:
                line.close()
        else:
            return line
    raise cause


def _addresses(host: str, end_s: float) -> list[Any]:
    """Return the addresses that `getaddrinfo` finds. A lookup may take minutes; later callers wait for the same one."""
    with suppress(OSError):
        return _look_up(host, socket.AI_NUMERICHOST)
    if len(_lookups) >= LOOKUPS_MAX and host not in _lookups:
        raise OSError(errno.EAGAIN, "too many host names are being looked up")
    mine: Future[list[Any]] = Future()
    found = _lookups.setdefault(host, mine)
    if found is mine:
        try:
            threading.Thread(target=_answer, args=(host, mine), name="kvtier-name", daemon=True).start()
        except RuntimeError:
            _lookups.pop(host, None)
            mine.set_exception(OSError(errno.EAGAIN, "no thread can be started"))
    try:
        return found.result(remaining_s(end_s))
    except TimeoutError:
        raise TimeoutError(f"the address of {host} was not found in time") from None


def _answer(host: str, answer: Future[list[Any]]) -> None:
    try:
        answer.set_result(_look_up(host, 0))
    except OSError as error:
        answer.set_exception(error)
    finally:
        _lookups.pop(host, None)


def _look_up(host: str, flags: int) -> list[Any]:
    try:
        return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=flags)
    except ValueError:  # also raised for a name that cannot be encoded
        raise OSError(errno.EINVAL, "not a host name") from None


class DeadlineCalls:
    """Runs calls that may hang, and gives up on them after a deadline. The calls must not use the caller's memory.

    Further calls fail immediately while an abandoned call still runs.

    Args:
        tier: the tier's name, for errors.
        subject: name of the server that answers the calls, for errors.
    """

    def __init__(self, tier: str, subject: str) -> None:
        self._tier, self._subject = tier, subject
        self._pool = ThreadPoolExecutor(THREADS, f"kvtier-{tier}-call")
        self._overdue: set[Future[Any]] = set()

    def check(self) -> None:
        """Raise `TierError` while a call is overdue."""
        if self._overdue:
            raise TierError(self._tier, f"{self._subject} does not answer")

    def call(self, act: Callable[[], _T], deadline_s: float) -> _T:
        """Return the result of `act`, or raise its exception.

        Raises:
            TierError: `act` did not end within `deadline_s` seconds.
        """
        self.check()
        try:
            answer = self._pool.submit(act)
        except RuntimeError:
            raise TierError(self._tier, "Python is exiting") from None
        try:
            return answer.result(deadline_s)
        except TimeoutError:
            self._overdue.add(answer)
            answer.add_done_callback(self._overdue.discard)
            raise TierError(self._tier, f"{self._subject} did not answer within {deadline_s:g} s") from None

    def close(self, deadline_s: float) -> bool:
        """End the threads. Return whether all calls have ended within about `deadline_s` seconds."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        return not wait(list(self._overdue), deadline_s).not_done
