"""The object store: tiers for an engine that owns its host memory, such as SGLang's HiCache.

The engine names objects, keeps them in its own memory, and asks: how many does a tier have, bring these, keep these.
There is no session, no planner and no large arena. Bytes pass through a staging area, because a frame needs head room
and direct I/O needs pages, and the engine's memory has neither (ADR 19).

    calling threads    leading_run, contains, get_into, put_from: wait, and copy between slots and the caller's memory
    the mover's        tiers, frames, checksums (`runtime/mover.py`)
    the store's        deadlines, health checks and gauges, a few times a second

One lock is held for decisions (`runtime/object_transfers.py`), never across I/O, a copy or a wait.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt

from kvtier.codec.base import Codec
from kvtier.codec.frame import frame_bytes
from kvtier.core.host_memory import HOST
from kvtier.core.limits import TierRules
from kvtier.core.tier_state import WAYS, TierState
from kvtier.device.copier import Fence
from kvtier.errors import BadCallError
from kvtier.layout import KvLayout
from kvtier.observe import metric_definitions as table
from kvtier.observe.metrics import Metrics
from kvtier.runtime.arena import Arena
from kvtier.runtime.counters import CommandCounters, TierGauges, start_at_zero
from kvtier.runtime.executor import Completion, Threads
from kvtier.runtime.journal import Journal
from kvtier.runtime.mover import Mover
from kvtier.runtime.object_search import search
from kvtier.runtime.object_transfers import ObjectTransfers
from kvtier.runtime.object_work import ObjectCall, ObjectRead, ObjectWrite, Question
from kvtier.runtime.session import Closed
from kvtier.tier.base import Figures, Tier
from kvtier.types import Command, Link, ObjectBytes, ObjectId, Origin, Outcome, RequestId, TierNotice

__all__ = ["ObjectBytes", "ObjectId", "ObjectStore", "Origin", "TierHealth"]

logger = logging.getLogger(__name__)

OBJECTS_MAX = 1 << 16
"""Most objects of one call."""

CALLS_MAX = 256
"""Most calls in progress. Further calls miss at once."""

TICK_S = 0.25
"""Interval at which the store's thread looks for overdue commands."""

SECOND_S = 1.0
"""Interval of health checks and gauges."""

COPY_BYTES = 2 << 20
"""Small objects are staged together up to this many bytes, so that tiers write them in batches."""

KEY_BYTES = 32

DEADLINE_S_MAX = 86_400.0
"""Longest deadline; longer ones, such as infinity, count as this."""

CLOSE_S_MIN = 1.0
"""Closing leaves threads and tiers at least this long, even if writes used up the deadline."""


class TierHealth(NamedTuple):
    """The state of one tier."""

    reads: bool
    """Whether the tier is read, rather than left alone after failures."""
    writes: bool
    figures: Figures


class _NoDevice:
    """The copier of a mover whose device queue has no thread and gets no command."""

    def gather(self, request: RequestId, group: int, blocks: tuple[int, ...], payload: memoryview) -> None:
        raise NotImplementedError

    scatter = gather

    def done(self, fence: Fence) -> bool:
        raise NotImplementedError


_Memory = list[npt.NDArray[np.uint8]]


class ObjectStore:
    """Objects in tiers, for callers with memory of their own. Any thread may call it.

    Every call returns within its `deadline_s` seconds and the time of a copy. It raises `BadCallError` (a ValueError)
    for wrong arguments and nothing else: whatever fails is a miss. After `close`, in a forked child and with too many
    calls in progress, every answer is a miss at once.

    A tier may forget any object. What is returned is verified: checksums, the object's name, the fingerprint and the
    layout.

    Args:
        layout: this rank's KV groups; `chunk_tokens` is the engine's page.
        name_root: 32 secret bytes that key the names of objects (`keys.fingerprint.root_key`).
        fingerprint: 32 bytes, `Fingerprint.digest`; part of every frame.
        tiers: tiers by name, fastest first; the store's from now on.
        rules: limits of each tier, in the same order.
        arena: slots of `layout` for objects on their way; the store's from now on.
        codec: encodes objects for tiers.
        tier_threads: threads of single tiers, by name.
        common: names of tiers in which all ranks of the engine use one store.
        down: names of tiers that are not open yet.
        metrics: counts objects, transfers and probes.
        journal: gets a line for each object that a tier reads or writes, if enabled.
        on_close: called once at the end, with the remaining seconds, to close the tiers.
        clock: monotonic seconds.

    Raises:
        RuntimeError: the system cannot start a thread.
    """

    def __init__(
        self,
        *,
        layout: KvLayout,
        name_root: bytes,
        fingerprint: bytes,
        tiers: Mapping[str, Tier],
        rules: Sequence[TierRules],
        arena: Arena,
        codec: Codec | None = None,
        tier_threads: Mapping[str, Threads] | None = None,
        common: Collection[str] = (),
        down: Collection[str] = (),
        metrics: Metrics | None = None,
        journal: Journal | None = None,
        on_close: Callable[[float], None] = lambda _seconds: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.layout = layout
        self.metrics = metrics or Metrics()
        self._process = os.getpid()
        self._clock = clock
        self._on_close = on_close
        self._layers = [group.layer_bytes for group in layout.groups]
        self._groups = frozenset(range(len(layout.groups)))
        self._offsets = [group.layer_offsets for group in layout.groups]
        self._sizes = [frame_bytes(group) for group in layout.groups]
        self._arena = arena
        self._lock = threading.Lock()
        self._calls: set[ObjectCall | Question] = set()
        """Calls in progress."""
        self._is_closing = False
        self._is_broken = False
        """There was an internal error."""
        self._is_shut = False
        """Closing or broken: every answer is a miss."""
        self._has_left = threading.Condition(self._lock)
        """A call has returned, or a write has ended, while the store closes."""
        self._over = threading.Event()
        self._closed: Closed | None = None
        self._inbox: deque[Completion] = deque()
        """Filled by the mover's threads, without the lock; bounded by the commands in flight."""
        self._counters = CommandCounters(self.metrics, *(() if journal is None else (journal,)))
        self._transfers = ObjectTransfers(
            layout=layout, slots=arena.slots, tiers=rules, down=down, observer=self._counters
        )
        self._tiers = self._transfers.tiers
        self._mover = Mover(
            layout=layout,
            fingerprint=fingerprint,
            arena=self._arena,
            copier=_NoDevice(),
            tiers=tiers,
            common=common,
            codec=codec,
            threads=Threads(device=0),
            tier_threads=tier_threads or {},
            clock=clock,
            name_root=name_root,
        )
        self._mover.complete_to(self._inbox.append, self._ready)
        self._gauges = TierGauges(self.metrics, [self._mover.views], self._is_up)
        start_at_zero(self.metrics, tiers)
        for tier in self._tiers.all:
            for link, way in WAYS.items():
                self.metrics.set(table.TIER_UP, float(tier.breakers[link].is_up()), tier=tier.name, way=way)
        self._thread = threading.Thread(target=self._run, name="kvtier-objects", daemon=True)
        self._thread.start()

    # ---- calls -----------------------------------------------------------------------------------------------------

    def leading_run(self, objects: Sequence[ObjectId], deadline_s: float) -> int:
        """How many of the leading objects the tiers hold, together. Stale answers are possible: a get verifies.

        Tiers are asked in order, each for what faster ones lack. A remote tier is asked in at most three rounds, of
        at most 23 names; so among more than 553 objects the number may be a few too small, and holes are not seen.

        Args:
            objects: in the order of the prefix.
            deadline_s: tiers that have not answered by then hold nothing.

        Raises:
            BadCallError: a key is not 32 bytes, a group is unknown, or there are more than `OBJECTS_MAX` objects.
        """
        return self._asked("leading_run", objects, deadline_s, is_run=True).index(False)

    def contains(self, objects: Sequence[ObjectId], deadline_s: float) -> list[bool]:
        """For each object whether a tier holds it. Stale answers are possible: a get verifies.

        Remote tiers are asked for every name that faster ones lack, at a request each.

        Raises:
            BadCallError: as `leading_run`.
        """
        return self._asked("contains", objects, deadline_s, is_run=False)[:-1]

    def get_into(self, reads: Sequence[ObjectBytes], deadline_s: float) -> list[Outcome]:
        """Bring objects into the caller's memory.

        Returns:
            For each object, in order: DONE when its pieces are filled with verified bytes. Otherwise ABSENT (also if
            it cannot be read here, and is kept), CORRUPT (and dropped; the next put heals it), FAILED, or CANCELLED
            when no tier could be asked in time. Pieces of an object that is not DONE are unchanged, except after an
            internal error. Nothing touches a piece after the call.

        Raises:
            BadCallError: as `leading_run`, or pieces do not fit the group's layers or cannot be written to.
        """
        memory = self._memory(reads, is_written=True)
        outcomes = [Outcome.CANCELLED] * len(reads)
        with self._call("get", deadline_s) as until_s:
            if until_s is not None and reads:
                self._get(reads, memory, outcomes, until_s)
        self._count("read", outcomes)
        return outcomes

    def put_from(self, writes: Sequence[ObjectBytes], deadline_s: float) -> list[Outcome]:
        """Keep objects from the caller's memory, which is free when the call returns.

        A write goes to the first tier that accepts it, and from there to slower tiers, after the call and as long as
        they keep up.

        Returns:
            For each object, in order: DONE when a tier that persists holds it (or any, if none that persists took
            it). Otherwise FAILED: no tier has taken it in time, although one may still; or CANCELLED: not begun.

        Raises:
            BadCallError: as `leading_run`, or pieces do not fit the group's layers.
        """
        memory = self._memory(writes, is_written=False)
        outcomes = [Outcome.CANCELLED] * len(writes)
        with self._call("put", deadline_s) as until_s:
            if until_s is not None and writes:
                self._put(writes, memory, outcomes, until_s)
        self._count("write", outcomes)
        return outcomes

    def health(self) -> dict[str, TierHealth]:
        """The state of each tier, by name, fastest first. Does no I/O."""
        return {
            tier.name: TierHealth(
                tier.breakers[Link.PROMOTE].is_up(),
                tier.breakers[Link.DEMOTE].is_up(),
                self._mover.views[tier.name].figures,
            )
            for tier in self._tiers.all
        }

    def close(self, deadline_s: float = 30.0) -> Closed:
        """End calls in progress with misses, finish the writes, and end all threads, in about `deadline_s` seconds.

        Idempotent. In a forked child it does nothing.
        """
        if self._process != os.getpid():
            return Closed(flushed=False, lost=0)
        deadline_s = min(deadline_s, DEADLINE_S_MAX) if deadline_s > 0 else 0.0
        until_s = self._clock() + deadline_s
        if not self._lock.acquire(timeout=deadline_s):  # a signal handler, perhaps
            return Closed(flushed=False, lost=0)
        try:
            is_first, self._is_closing, self._is_shut = not self._is_closing, True, True
            lost = self._finish(until_s) if is_first else 0
            is_idle = not self._calls
        finally:
            self._lock.release()
        if not is_first:
            self._over.wait(max(0.0, until_s - self._clock()))
            return self._closed or Closed(flushed=False, lost=0)
        self._closed = Closed(flushed=not lost, lost=lost)
        self._over.set()
        self._mover.close(max(CLOSE_S_MIN, until_s - self._clock()))
        self._on_close(max(CLOSE_S_MIN, until_s - self._clock()))
        if is_idle:  # otherwise a call is in a copy, and the memory goes with the store
            self._arena.close()
        self._thread.join(max(0.0, until_s - self._clock()))
        return self._closed

    def _finish(self, until_s: float) -> int:
        """Wait for calls and writes, under the lock; how many writes are left."""
        for call in self._calls:
            call.wake()
        while self._calls or (self._transfers.is_writing and not self._is_broken):
            wait_s = until_s - self._clock()
            if wait_s <= 0:
                break
            self._has_left.wait(min(wait_s, TICK_S))
        return self._transfers.writes

    # ---- gets and puts ---------------------------------------------------------------------------------------------

    def _get(
        self, reads: Sequence[ObjectBytes], memory: Sequence[_Memory], outcomes: list[Outcome], until_s: float
    ) -> None:
        transfers = self._transfers
        bell = threading.Condition(self._lock)
        call = ObjectCall(bell.notify, outcomes, len(reads))
        arrived: list[ObjectRead] = []
        try:
            with self._lock:
                self._calls.add(call)
                for number, (object_id, _, origin) in enumerate(reads):
                    transfers.read(ObjectRead(call, number, object_id, origin))
            while not call.is_over or arrived:
                for read in arrived:
                    self._copy_out(read, memory[read.number])
                with self._lock:
                    now_s = self._settle()
                    while arrived:
                        transfers.delivered(arrived.pop(), now_s)
                    transfers.advance(now_s)  # first, because it may end reads
                    arrived, call.arrived = call.arrived, arrived
                    if call.is_over or call.left == len(arrived) or now_s >= until_s or self._is_shut:
                        self._leave(call, now_s, is_copying=bool(arrived))
                    due = self._due()
                    if not arrived and not due and not call.is_over:
                        bell.wait(self._wait_s(now_s, until_s))
                self._do(due)
        except BaseException:  # an interrupt of the calling thread
            with self._lock:
                self._calls.discard(call)
                call.arrived += arrived
                self._leave(call, self._clock())
            raise

    def _put(
        self, writes: Sequence[ObjectBytes], memory: Sequence[_Memory], outcomes: list[Outcome], until_s: float
    ) -> None:
        transfers = self._transfers
        todo = deque(self._missing(writes, outcomes, until_s))
        bell = threading.Condition(self._lock)
        call = ObjectCall(bell.notify, outcomes, len(todo))
        staged: list[tuple[ObjectWrite, int]] = []
        try:
            with self._lock:
                self._calls.add(call)
            while not call.is_over:
                for write, number in staged:
                    self._copy_in(write, memory[number])
                with self._lock:
                    now_s = self._settle()
                    while staged:
                        transfers.filled(staged.pop(0)[0], now_s)
                    transfers.advance(now_s)  # first, because it may end writes
                    if call.left and now_s < until_s and not self._is_shut:
                        staged = self._stage(call, writes, todo)
                    if not call.left or now_s >= until_s or self._is_shut:
                        self._leave(call, now_s)
                    due = self._due()
                    if not staged and not due and not call.is_over:
                        bell.wait(self._wait_s(now_s, until_s))
                self._do(due)
        except BaseException:  # an interrupt of the calling thread
            with self._lock:
                for write, _ in staged:
                    transfers.unstage(write)
                self._leave(call, self._clock())
            raise

    def _stage(
        self, call: ObjectCall, writes: Sequence[ObjectBytes], todo: deque[int]
    ) -> list[tuple[ObjectWrite, int]]:
        """Begin the next writes; those whose slots the calling thread fills, with their positions."""
        staged: list[tuple[ObjectWrite, int]] = []
        size_bytes = 0
        while todo and size_bytes < COPY_BYTES:
            number = todo[0]
            object_id, _, origin = writes[number]
            if not self._transfers.join(call, number, object_id):
                write = self._transfers.stage(call, number, object_id, origin)
                if write is None:
                    break
                staged.append((write, number))
                size_bytes += self._sizes[object_id.group]
            call.outcomes[number] = (
                Outcome.FAILED if call.outcomes[number] is Outcome.CANCELLED else call.outcomes[number]
            )
            todo.popleft()
        return staged

    def _missing(self, writes: Sequence[ObjectBytes], outcomes: list[Outcome], until_s: float) -> list[int]:
        """Positions of the objects that the first tier lacks; the others are DONE."""
        tier, objects = self._tiers.all[0], [write.object for write in writes]
        present = self._ask(tier, objects, until_s)
        if present is None:
            return list(range(len(writes)))
        missing: list[int] = []
        with self._lock:
            for number, (is_present, object_id) in enumerate(zip(present, objects, strict=True)):
                if is_present and not self._transfers.must_write(tier, object_id):
                    outcomes[number] = Outcome.DONE
                else:
                    missing.append(number)
        return missing

    def _copy_out(self, read: ObjectRead, memory: _Memory) -> None:
        group = read.object.group
        payload = np.frombuffer(self._arena.payload(group, read.slot), np.uint8)
        for piece, offset in zip(memory, self._offsets[group], strict=True):
            np.copyto(piece, payload[offset : offset + piece.size])  # other threads run meanwhile

    def _copy_in(self, write: ObjectWrite, memory: _Memory) -> None:
        group = write.object.group
        payload = np.frombuffer(self._arena.payload(group, write.slot), np.uint8)
        for piece, offset in zip(memory, self._offsets[group], strict=True):
            np.copyto(payload[offset : offset + piece.size], piece)

    # ---- questions -------------------------------------------------------------------------------------------------

    def _asked(self, name: str, objects: Sequence[ObjectId], deadline_s: float, *, is_run: bool) -> list[bool]:
        """Whether a tier holds each object, and False at the end."""
        self._check(objects)
        present = [False] * (len(objects) + 1)
        with self._call(name, deadline_s) as until_s:
            if until_s is not None:
                self._search(objects, present, until_s, is_run=is_run)
        return present

    def _search(self, objects: Sequence[ObjectId], present: list[bool], until_s: float, *, is_run: bool) -> None:
        def ask(tier: TierState, asked: Sequence[ObjectId]) -> Sequence[bool] | None:
            return (self._ask_remote if is_run and tier.rules.is_remote else self._ask)(tier, asked, until_s)

        found = search(self._tiers.all, objects, ask, is_run=is_run)
        if len(self._tiers) > 1:
            held = [(each, tier) for each, tier in zip(objects, found, strict=True) if tier is not None]
            with self._lock:
                self._transfers.found(held)
        present[:-1] = [tier is not None for tier in found]

    def _ask_remote(self, tier: TierState, objects: Sequence[ObjectId], until_s: float) -> Sequence[bool]:
        """The answer of a remote tier, remembered or new; False where it does not come."""
        with self._lock:
            now_s = self._clock()
            known = [tier.remembered(each, now_s) for each in objects]
        unknown = [each for each, answer in zip(objects, known, strict=True) if answer is None]
        answers = self._ask(tier, unknown, until_s) if unknown else ()
        if answers is None:
            return [bool(answer) for answer in known]
        with self._lock:
            now_s = self._clock()
            for each, answer in zip(unknown, answers, strict=True):
                tier.remember(each, now_s, is_present=answer)
        rest = iter(answers)
        return [next(rest) if answer is None else answer for answer in known]

    def _ask(self, tier: TierState, objects: Sequence[ObjectId], until_s: float) -> Sequence[bool] | None:
        """One probe; None without an answer in time."""
        bell = threading.Condition(self._lock)
        question = Question(bell.notify)
        with self._lock:
            now_s = self._settle()
            if now_s >= until_s or self._is_shut or not tier.can_read(now_s):
                return None
            self._transfers.ask(tier, objects, question, now_s)
            self._calls.add(question)
            due = self._due()
        self._do(due)
        with self._lock:
            try:
                while True:
                    now_s = self._settle()
                    if question.is_over or now_s >= until_s or self._is_shut:
                        return question.present
                    bell.wait(self._wait_s(now_s, until_s))
            finally:
                self._calls.discard(question)

    # ---- the lock --------------------------------------------------------------------------------------------------

    @contextmanager
    def _call(self, name: str, deadline_s: float) -> Generator[float | None]:
        """The time at which the call must end; None if it cannot begin."""
        began_s, deadline_s = self._clock(), min(deadline_s, DEADLINE_S_MAX)
        is_usable = (
            self._process == os.getpid()  # before any lock
            and not self._is_shut
            and len(self._calls) < CALLS_MAX
            and deadline_s > 0
            # Not free in time: a signal handler or finalizer, in the middle of another call of this thread.
            and self._lock.acquire(timeout=deadline_s)
        )
        if is_usable:
            self._lock.release()
        try:
            yield began_s + deadline_s if is_usable else None
        except Exception as error:  # noqa: BLE001 - an engine must not end because of a cache
            self._break(error)
        if is_usable:
            self.metrics.observe(table.OBJECT_CALL_SECONDS, self._clock() - began_s, call=name)

    def _leave(self, call: ObjectCall, now_s: float, *, is_copying: bool = False) -> None:
        """The call returns, perhaps after a last copy; others get its slots."""
        self._transfers.abandon(call)
        self._transfers.advance(now_s)
        if is_copying:
            return
        self._calls.discard(call)
        if self._is_shut:
            self._has_left.notify_all()

    def _wait_s(self, now_s: float, until_s: float) -> float:
        due_s = self._transfers.next_deadline()
        return max(0.0, (until_s if due_s is None else min(until_s, due_s)) - now_s)

    def _settle(self) -> float:
        """Handle the completions so far and overdue commands; the time."""
        now_s = self._clock()
        inbox, transfers = self._inbox, self._transfers
        while inbox:
            transfers.complete(inbox.popleft(), now_s)
        transfers.expire(now_s)
        return now_s

    def _due(self) -> list[Command | TierNotice]:
        """What is to do without the lock."""
        output = self._transfers.output
        due: list[Command | TierNotice] = [*output.commands]
        output.commands.clear()
        if output.events:
            due += [event for event in output.events if isinstance(event, TierNotice)]
            output.events.clear()
        return due

    def _do(self, due: Sequence[Command | TierNotice]) -> None:
        if not due:
            return
        commands = [each for each in due if not isinstance(each, TierNotice)]
        if commands:
            self._mover.submit(*commands)
        for notice in due:
            if isinstance(notice, TierNotice):
                self.metrics.set(table.TIER_UP, float(notice.is_up), tier=notice.tier, way=notice.way)
                level = logging.INFO if notice.is_up else logging.WARNING
                logger.log(level, "tier %s %s", notice.tier, notice.detail)

    def _ready(self) -> None:
        """The mover has put completions into the inbox."""
        if self._is_broken:
            return
        try:
            with self._lock:
                self._transfers.advance(self._settle())
                due = self._due()
                if self._is_shut:
                    self._has_left.notify_all()
            self._do(due)
        except Exception as error:  # noqa: BLE001 - a bug must not end the mover's threads
            self._break(error)

    def _break(self, error: Exception) -> None:
        """An internal error: calls in progress and all further ones miss."""
        with self._lock:
            is_first, self._is_broken, self._is_shut = not self._is_broken, True, True
            for call in self._calls:
                call.wake()
            self._has_left.notify_all()
        if is_first:
            logger.error("internal error: the object store answers no more calls", exc_info=error)

    def _run(self) -> None:
        try:
            self._tick()
        except Exception as error:  # noqa: BLE001 - as in `_ready`
            self._break(error)

    def _tick(self) -> None:
        next_second_s = self._clock()
        while not self._over.wait(TICK_S):
            with self._lock:
                now_s = self._settle()
                if now_s >= next_second_s:
                    next_second_s = now_s + SECOND_S
                    self._transfers.check_tiers(now_s)
                    self._gauge()
                self._transfers.advance(now_s)
                due = self._due()
            self._do(due)
            self._mover.flush()

    def _is_up(self, tier: str) -> bool:
        return self._tiers[tier].breakers[Link.PROMOTE].is_up()

    def _gauge(self) -> None:
        staging, metrics = self._transfers.staging, self.metrics
        self._counters.gauge()
        sizes = list(enumerate(self._sizes))
        metrics.set(table.HELD_BYTES, sum(staging.used(group) * size for group, size in sizes), place=HOST)
        metrics.set(table.CAPACITY_BYTES, self._arena.size_bytes, place=HOST)
        dropped, self._transfers.followers_dropped = self._transfers.followers_dropped, 0
        metrics.add(table.RELAYS_DROPPED, dropped)
        for name, count in self._transfers.relays_waiting().items():
            metrics.set(table.RELAYS_WAITING, count, tier=name)
        self._gauges()

    # ---- arguments -------------------------------------------------------------------------------------------------

    def _check(self, objects: Sequence[ObjectId]) -> None:
        if len(objects) > OBJECTS_MAX:
            raise BadCallError(f"{len(objects)} objects in one call; allowed: at most {OBJECTS_MAX}")
        if self._groups.issuperset([group for _, group in objects]) and _are_keys([key for key, _ in objects]):
            return
        groups = len(self._groups)
        for key, group in objects:
            if not _are_keys((key,)) or group not in self._groups:
                raise BadCallError(
                    f"object ({key!r:.80}, group {group}); allowed: a key of {KEY_BYTES} bytes, and a group below "
                    f"{groups}"
                )

    def _memory(self, items: Sequence[ObjectBytes], *, is_written: bool) -> list[_Memory]:
        """The pieces of each object as arrays of bytes."""
        self._check([item.object for item in items])
        return [self._pieces(item, is_written=is_written) for item in items]

    def _pieces(self, item: ObjectBytes, *, is_written: bool) -> _Memory:
        group = item.object.group
        try:
            pieces: _Memory = [np.frombuffer(piece, np.uint8) for piece in item.pieces]
        except (TypeError, ValueError, BufferError) as error:
            raise BadCallError(f"a piece of group {group} is no contiguous buffer: {error}") from error
        sizes = tuple(piece.size for piece in pieces)
        if sizes != self._layers[group]:
            raise BadCallError(f"pieces of {sizes} bytes; allowed in group {group}: {self._layers[group]}")
        if is_written and not all(piece.flags.writeable for piece in pieces):
            raise BadCallError(f"a piece of group {group} is read-only; allowed: memory that can be written to")
        return pieces

    def _count(self, way: str, outcomes: Sequence[Outcome]) -> None:
        if self._process == os.getpid():
            for outcome in set(outcomes):
                self.metrics.add(table.OBJECTS, outcomes.count(outcome), way=way, outcome=outcome.value)


def _are_keys(keys: Sequence[object]) -> bool:
    """Whether all are bytes of the right length. Of 2,048 in 0.1 ms, half of what a loop takes."""
    return set(map(type, keys)) <= {bytes} and set(map(len, cast("Sequence[bytes]", keys))) <= {KEY_BYTES}
