"""A worker's half: it owns the rank's memory, tiers and copies, and reports to vLLM what has ended.

What moves bytes is commanded by the core, directly and between steps. With each step come only the orders that have to
be in time with the forward: what to keep off blocks that are handed out again, and what to wait for.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable
from typing import NamedTuple, Protocol

from kvtier.connect.vllm.meta import ASYNC_NOTE, SYNC_NOTE, Awaited, Ended, StepDone, StepOrders
from kvtier.runtime.rank_group import Note
from kvtier.types import RequestId

logger = logging.getLogger(__name__)

IDLE_WAIT_S = 0.002
"""A step without anything to compute waits so long for the next report. See `Worker.results`; a request that arrives
meanwhile waits, too."""

SYNC_WAIT_S = 1.0
"""How long the forward waits for a load from host memory; then it is computed."""

FENCE_WAIT_S = 30.0
"""How long a copy into vLLM's blocks may run on after it was given up. A device that hangs longer is lost."""


class Revoker(Protocol):
    """The side of a copier that keeps copies off blocks."""

    def revoke(self, requests: Collection[RequestId], wait_s: float) -> bool:
        """Let no copy of `requests` begin any more; whether none runs any more after at most `wait_s` seconds."""
        ...


class Results(NamedTuple):
    """What a worker reports to vLLM after a step."""

    received: set[str]
    failed: set[str]


class Worker:
    """One worker. All of an engine report the same: a load has ended when it has on every rank, and vLLM counts them.

    Args:
        copier: of its rank.
    """

    def __init__(self, copier: Revoker) -> None:
        self._copier = copier
        self._news = threading.Condition()
        # Both are limited by the loads that are open.
        self._loaded: deque[Ended] = deque()
        self._ready: dict[RequestId, Ended] = {}
        self._heard_once: set[RequestId] = set()
        """Loads that were told of, or ordered to be reported, but not yet both."""
        self._late: set[RequestId] = set()
        """Loads that were no longer waited for when they ended."""
        self._bad_blocks: set[int] = set()
        self._orders = StepOrders(0)

    def hear(self, note: Note) -> None:
        """The scheduler's half says that a load has ended. Any thread."""
        if note.subject in (ASYNC_NOTE, SYNC_NOTE):
            self._hear(Ended(note.request, note.numbers, note.flag, note.subject == ASYNC_NOTE))

    def begin(self, orders: StepOrders) -> None:
        """A step begins: whatever is written to vLLM's blocks from now on may be read by nobody else's copy."""
        self._orders = orders
        if orders.revoked:
            self._fence(orders.revoked)
        for ended in orders.ended:
            self._hear(ended)

    def wait_for_loads(self) -> None:
        """Wait for what the forward needs."""
        until_s = time.monotonic() + SYNC_WAIT_S
        for awaited in self._orders.awaited:
            ended = self._wait_for(awaited, until_s)
            if ended is not None:
                self._give_back((ended,))
                continue
            logger.warning("a load from host memory took longer than %g s; it is computed instead", SYNC_WAIT_S)
            self._fence((awaited.load,))
            self._bad_blocks.update(awaited.blocks)

    def results(self) -> Results:
        """What has ended.

        When there is nothing to compute vLLM runs empty steps as fast as it can, in the very process whose threads are
        moving the bytes. Each of their system calls then has to wait for Python's lock, up to the 5 ms for which one
        thread may keep it (`sys.getswitchinterval`). So such a step waits here for the next report, which lets the lock
        go. Measured with 31 files of 0.5 MB, on two cores: 14 ms with the wait; without it 51 ms in the median, 21 ms
        with a switch interval of 0.5 ms, 149 ms with one of 20 ms. (With more and smaller reads it took 2.6 s.)
        """
        with self._news:
            if self._orders.is_waiting and not self._loaded:
                self._news.wait(IDLE_WAIT_S)
            loaded = [self._loaded.popleft() for _ in range(len(self._loaded))]
        self._give_back(loaded)
        received, failed = {each.request for each in loaded}, {each.request for each in loaded if each.is_failed}
        return Results(received, failed)

    def take_bad_blocks(self) -> set[int]:
        """Blocks that vLLM believes filled and that are not."""
        bad_blocks, self._bad_blocks = self._bad_blocks, set()
        return bad_blocks

    @property
    def done(self) -> StepDone:
        """What goes back to the scheduler's half, every step."""
        return StepDone(self._orders.step)

    def _hear(self, ended: Ended) -> None:
        with self._news:
            if ended.load in self._heard_once:
                self._heard_once.discard(ended.load)
                self._late.discard(ended.load)
                return
            self._heard_once.add(ended.load)
            if ended.is_async:
                self._loaded.append(ended)
            elif ended.load not in self._late:
                self._ready[ended.load] = ended
            self._news.notify_all()

    def _wait_for(self, awaited: Awaited, until_s: float) -> Ended | None:
        with self._news:
            if not self._news.wait_for(lambda: awaited.load in self._ready, max(0.0, until_s - time.monotonic())):
                self._late.add(awaited.load)
            return self._ready.pop(awaited.load, None)

    def _give_back(self, ended: Collection[Ended]) -> None:
        """What these loads did not fill is computed, perhaps in blocks of others."""
        self._bad_blocks.update(*(each.bad_blocks for each in ended))
        # After a mistake of ours a load may be answered while a copy of it still runs.
        short = [each.load for each in ended if each.bad_blocks or each.is_failed]
        if short:
            self._fence(short)

    def _fence(self, requests: Iterable[RequestId]) -> None:
        """Keep copies off blocks. What runs cannot be stopped, and to go on beside it would be a lie."""
        if not self._copier.revoke(tuple(requests), FENCE_WAIT_S):
            raise TimeoutError(f"a copy of KV has not ended for {FENCE_WAIT_S:g} s; the device hangs")
