"""The timed loop behind every measure: some threads, one operation at a time each, bounded in time and bytes.

The threads are never the caller's, so that Ctrl-C is heard at once; it ends the loop at the next operation.
"""

import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass

from kvtier.errors import KvError
from kvtier.probe.result import Measure

GRACE_S = 30.0
"""How long an operation that has begun may still take when time is up."""

Act = Callable[[int, int], int]
"""(worker, number of the operation) -> bytes moved; 0 does not count."""

Tick = Callable[[str], None]
"""Told before each measure what it is."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one measure. One operation of each worker is always done."""

    seconds: float
    bytes: int


class _Tickets:
    """Numbers for operations, until time or bytes are used up."""

    def __init__(self, size: int, depth: int, limits: Limits) -> None:
        self._lock = threading.Lock()
        self._next = 0
        self._count = max(limits.bytes // size, 1)
        self._depth = depth
        self._seconds = limits.seconds
        self._until_s = 0.0
        self._is_stopped = False

    def start(self) -> None:
        self._until_s = time.perf_counter() + self._seconds

    def take(self) -> int | None:
        with self._lock:
            # A slow link gets one operation of each thread, however long they take.
            is_late = self._next >= self._depth and time.perf_counter() > self._until_s
            if self._is_stopped or is_late or self._next >= self._count:
                return None
            self._next += 1
            return self._next - 1

    def stop(self) -> None:
        self._is_stopped = True


def measure(act: Act, *, op: str, size: int, depth: int, limits: Limits) -> Measure | None:
    """Time `act` with `depth` threads; None when no operation moved anything.

    Args:
        act: does one operation; called by several threads, each with its own worker number.
        op: name of the operation.
        size: bytes of one operation, for the limit.
        depth: threads.
        limits: when to end.

    Raises:
        KvError: an operation did not return long after the time was up.
        Exception: whatever `act` raises.
    """
    tickets = _Tickets(size, depth, limits)
    spent: list[list[tuple[float, int]]] = [[] for _ in range(depth)]
    ends: list[Future[None]] = [Future() for _ in range(depth)]
    gate = threading.Event()

    def work(worker: int) -> None:
        try:
            gate.wait(GRACE_S)
            while (number := tickets.take()) is not None:
                start_s = time.perf_counter()
                moved = act(worker, number)
                spent[worker].append((time.perf_counter() - start_s, moved))
            ends[worker].set_result(None)
        except Exception as error:  # noqa: BLE001 - raised again in the thread that waits
            tickets.stop()
            ends[worker].set_exception(error)

    threads = [
        threading.Thread(target=work, args=(n,), name=f"kvtier probe {op} {n}", daemon=True) for n in range(depth)
    ]
    try:
        for thread in threads:
            thread.start()
        began_s = time.perf_counter()
        tickets.start()
        gate.set()
        wait(ends, limits.seconds + GRACE_S, FIRST_EXCEPTION)
        took_s = time.perf_counter() - began_s
    finally:
        tickets.stop()
        gate.set()
        for thread in threads:
            if thread.ident is not None:
                thread.join(GRACE_S)
    for end in ends:
        if not end.done():
            raise KvError(f"{op} of {size} bytes did not return within {GRACE_S:g} s after its time was up")
        end.result(0)
    counted = [(seconds, moved) for worker in spent for seconds, moved in worker if moved]
    if not counted:
        return None
    latencies_us = sorted(seconds * 1e6 for seconds, _ in counted)
    return Measure(
        op=op,
        bytes=size,
        depth=depth,
        gb_per_s=round(sum(moved for _, moved in counted) / max(took_s, 1e-9) / 1e9, 4),
        latency_us_p50=round(percentile(latencies_us, 0.5), 1),
        latency_us_p99=round(percentile(latencies_us, 0.99), 1),
        count=len(counted),
    )


def percentile(ordered: Sequence[float], share: float) -> float:
    """The least of `ordered` (ascending, not empty) that `share` of them do not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
