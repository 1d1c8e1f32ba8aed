"""The object store provides tiers to an engine that owns its host memory, such as SGLang's HiCache.

The engine names objects and keeps them in its own memory. It asks how many of them are in tiers, and gets and puts
them. There is no planner and no large arena. Bytes pass through a staging area (ADR 19), because the engine's memory
lacks a frame's head room and direct I/O's alignment. The core is a session's, in another mode (ADR 24).

    calling threads    leading_run, contains, get_into, put_from: wait, and copy between slots and the caller's memory
    mover's threads    tiers, frames, checksums (`runtime/mover.py`)
    store's thread     deadlines, health checks and gauges (`runtime/locked_core.py`)
"""

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import count
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from kvtier.codec.frame import frame_bytes
from kvtier.core.limits import TierRules
from kvtier.core.staging_core import ObjectCache
from kvtier.layout import KvLayout
from kvtier.observe import metric_definitions as table
from kvtier.observe.metrics import Metrics
from kvtier.runtime.arena import Arena
from kvtier.runtime.command_runner import CommandRunner
from kvtier.runtime.executor import Completion, Threads
from kvtier.runtime.locked_core import Closed, LockedCore, SessionError
from kvtier.runtime.mailbox import Mailbox
from kvtier.runtime.mover import Mover
from kvtier.runtime.object_arguments import Memory, ObjectArguments, deadline_of
from kvtier.runtime.observers.guards import Feature, Guards
from kvtier.runtime.observers.transfer_metrics import CommandCounters, Gauges, start_series
from kvtier.runtime.tier_encoding import StoredForm
from kvtier.tier.base import Figures, Tier
from kvtier.types import (
    Command,
    Direction,
    Event,
    ObjectBytes,
    ObjectId,
    ObjectsDone,
    Origin,
    Outcome,
    RequestId,
    Transfer,
)

__all__ = ["ObjectBytes", "ObjectId", "ObjectStore", "Origin", "TierHealth"]

CALLS_MAX = 256
"""Maximum number of calls in progress. Further calls miss immediately."""

COPY_BYTES = 2 << 20
"""Small objects are copied together, up to this many bytes, so that tiers can write them in batches."""

CLOSE_S_MIN = 1.0
"""Minimum time for closing threads and tiers, even if writes have used up the deadline."""

RELEASE_S = 0.25
"""How long after its deadline a call waits for its operation to end. The lock is usually held for microseconds."""


class TierHealth(NamedTuple):
    """The state of one tier."""

    reads: bool
    """Whether the store reads the tier; it does not after failures."""
    writes: bool
    figures: Figures


class _Call:
    """One call in progress."""

    __slots__ = ("copied", "inbox", "memory", "outcomes", "request")

    def __init__(self, request: RequestId, objects: int, memory: Sequence[Memory]) -> None:
        self.request = request
        self.memory = memory
        self.inbox: Mailbox[Transfer | ObjectsDone] = Mailbox()
        """Copies to execute, followed by the end of the operation, sent by the holder of the lock."""
        self.outcomes: Sequence[Outcome] = [Outcome.CANCELLED] * objects
        self.copied: dict[int, Outcome] = {}
        """The outcome of each copied object if the core reports none. A get has filled the caller's memory with
        verified bytes, and the write of a put may end later."""

    def answer(self) -> list[Outcome]:
        """Return the outcome of each object, even if the call has ended early."""
        copied = self.copied
        return [
            copied.get(at, outcome) if outcome is Outcome.CANCELLED else outcome
            for at, outcome in enumerate(self.outcomes)
        ]


class _CallersExecutor:
    """The executor of an object store: the mover for tiers, and the calling threads for copies."""

    needs_flush = False

    def __init__(self, mover: Mover, calls: Mapping[RequestId, _Call]) -> None:
        self._mover = mover
        self._calls = calls
        self._close_s_min = CLOSE_S_MIN
        self.flush = mover.flush

    def complete_to(self, put: Callable[[Completion], None], ready: Callable[[], None]) -> None:
        """Pass each completion to `put`, and call `ready` after one or more of them, outside of all locks."""
        self._put = put
        self._mover.complete_to(put, ready)

    def submit(self, *commands: Command) -> None:
        """Queue `commands`, in order."""
        of_tiers: list[Command] = []
        for command in commands:
            if isinstance(command, Transfer) and command.request is not None:
                call = self._calls.get(command.request)
                if call is None:
                    self._put(Completion(command, Outcome.CANCELLED))
                else:
                    call.inbox.put(command)
            else:
                of_tiers.append(command)
        self._mover.submit(*of_tiers)

    def close(self, deadline_s: float) -> bool:
        """Cancel commands that have not started and wait for the others. Return whether all have ended.

        The first call allows at least `CLOSE_S_MIN`, whatever the deadline.
        """
        close_s_min, self._close_s_min = self._close_s_min, 0.0
        return self._mover.close(max(close_s_min, deadline_s))


class ObjectStore(LockedCore):
    """Objects in tiers, for callers with their own memory. Thread-safe.

    Every call returns within its `deadline_s` seconds plus `RELEASE_S` and the time of one copy. It raises only
    `BadCallError` (a ValueError), for invalid arguments; any failure is a miss. After `close`, in a forked child or
    with too many calls in progress, every answer is an immediate miss.

    A tier may forget any object. Every object returned is verified by its checksums, name, fingerprint and layout.

    Args:
        layout: this rank's KV groups; `chunk_tokens` is the engine's page.
        name_root: 32 secret bytes that key the names of objects (`keys.fingerprint.root_key`).
        model: 16 bytes, `keys.secret.model_id`, written into every frame.
        tiers: tiers by name, fastest first, owned by the store from now on.
        rules: limits of each tier, in the same order as `tiers`.
        arena: slots of `layout` for objects in transit, owned by the store from now on.
        forms: how each tier stores its objects, by tier name. Other tiers store them raw and without a seal.
        tier_threads: numbers of threads for individual tiers, by name.
        common: names of tiers in which all ranks of the engine use one store.
        down: names of tiers that are not open yet.
        metrics: counts objects, transfers and probes.
        guards: guard the optional features and the observers.
        on_close: called once at the end, with the remaining seconds, to close the tiers.
        clock: returns monotonic seconds.

    Raises:
        RuntimeError: the system cannot start a thread.
    """

    THREAD_NAME = "kvtier-objects"
    SHUT_TEXT = "internal error: from now on, the object store answers no calls"

    def __init__(
        self,
        *,
        layout: KvLayout,
        name_root: bytes,
        model: bytes,
        tiers: Mapping[str, Tier],
        rules: Sequence[TierRules],
        arena: Arena,
        forms: Mapping[str, StoredForm] = MappingProxyType({}),
        tier_threads: Mapping[str, Threads] | None = None,
        common: Collection[str] = (),
        down: Collection[str] = (),
        metrics: Metrics | None = None,
        guards: Guards | None = None,
        on_close: Callable[[float], None] = lambda _seconds: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.layout = layout
        self._close_tiers = on_close
        self._layers = [group.layer_bytes for group in layout.groups]
        self._checked = ObjectArguments(layout)
        self._offsets = [group.layer_offsets for group in layout.groups]
        self._sizes = [frame_bytes(group) for group in layout.groups]
        self._arena = arena
        self._calls: dict[RequestId, _Call] = {}
        self._numbers = count(1)
        self._objects = ObjectCache(layout=layout, slots=arena.slots, tiers=rules, down=down)
        self._mover = Mover(
            CommandRunner(
                layout=layout,
                model=model,
                arena=arena,
                tiers=tiers,
                common=common,
                forms=forms,
                clock=clock,
                name_root=name_root,
            ),
            threads=Threads(device=0),
            tier_threads=tier_threads or {},
        )
        metrics, guards = metrics or Metrics(), guards or Guards()
        start_series(metrics, tiers, down)
        guards.register(Feature.METRICS, CommandCounters(metrics))
        guards.register(Feature.METRICS, Gauges(metrics, self._objects, [layout], [self._mover.views]))
        super().__init__(
            self._objects,
            _CallersExecutor(self._mover, self._calls),
            publish=self._answer,
            fail=self._miss,
            on_close=self._close_all,
            metrics=metrics,
            guards=guards,
            clock=clock,
        )
        self._start()

    # ---- calls -----------------------------------------------------------------------------------------------------

    def leading_run(self, objects: Sequence[ObjectId], deadline_s: float) -> int:
        """Count the leading objects that the tiers together hold. The answer may be stale; a get verifies.

        Tiers are probed in order, each for the objects that faster ones lack. A remote tier is probed in at most three
        rounds of at most 23 names. So for more than 553 objects the count may be slightly low and may miss holes.

        Args:
            objects: the objects, in the order of the prefix.
            deadline_s: seconds after which tiers that have not answered count as empty.

        Raises:
            BadCallError: `objects` is not a list of `ObjectId`, a key is not 32 bytes, a group is unknown, there are
                more than `OBJECTS_MAX` objects, or the deadline is not a number.
        """
        return [*self._lookup("leading_run", objects, deadline_s, is_run=True), False].index(False)

    def contains(self, objects: Sequence[ObjectId], deadline_s: float) -> list[bool]:
        """Return for each object whether a tier holds it. The answer may be stale; a get verifies.

        Remote tiers are probed for every name that faster ones lack, with one request per name.

        Raises:
            BadCallError: see `leading_run`.
        """
        return self._lookup("contains", objects, deadline_s, is_run=False)

    def get_into(self, reads: Sequence[ObjectBytes], deadline_s: float) -> list[Outcome]:
        """Copy objects from tiers into the caller's memory.

        Returns:
            For each object, in order: DONE if its pieces are filled with verified bytes. Otherwise ABSENT (even if it
            exists but cannot be read here), CORRUPT (and dropped; the next put replaces it), FAILED, or CANCELLED if no
            tier could be probed in time. Unless the call raises, pieces of an object that is not DONE are unchanged.
            Nothing changes a piece after the call.

        Raises:
            BadCallError: see `leading_run`; or an origin is invalid, or pieces do not fit the group's layers or
                are read-only.
        """
        objects, origins, memory = self._checked.memory(reads, is_written=True)

        def begin(request: RequestId, now_s: float) -> None:
            self._objects.get(request, objects, origins, now_s)

        def run(until_s: float) -> list[Outcome]:
            return self._run_call(len(objects), until_s, begin, memory)

        outcomes = self._answered("get", len(objects), deadline_s, run)
        self.guards.run(Feature.METRICS, self._count, "read", outcomes, objects, otherwise=None)
        return outcomes

    def put_from(self, writes: Sequence[ObjectBytes], deadline_s: float) -> list[Outcome]:
        """Store objects from the caller's memory, which may be reused when the call returns.

        Each object is written to every tier that accepts it, perhaps after the call. An object that the first tier
        already holds is not written again, unless the lookup times out. So a key must always have the same content.

        Returns:
            For each object, in order: DONE if a persistent tier holds it (or any tier, if no persistent one took
            it). Otherwise FAILED if no tier has taken it in time, although one still may, or CANCELLED if its write
            was not started.

        Raises:
            BadCallError: see `get_into`, but pieces may be read-only.
        """
        objects, origins, memory = self._checked.memory(writes, is_written=False)

        def lookup(request: RequestId, now_s: float) -> None:
            self._objects.lookup_for_put(request, objects, now_s)

        def run(until_s: float) -> list[Outcome]:
            outcomes = self._run_call(len(objects), until_s, lookup)
            todo = [at for at, outcome in enumerate(outcomes) if outcome is not Outcome.DONE]

            def begin(request: RequestId, now_s: float) -> None:
                self._objects.put(request, [objects[at] for at in todo], [origins[at] for at in todo], now_s)

            put = self._run_call(len(todo), until_s, begin, [memory[at] for at in todo])
            for at, outcome in zip(todo, put, strict=True):
                outcomes[at] = outcome
            return outcomes

        outcomes = self._answered("put", len(objects), deadline_s, run)
        self.guards.run(Feature.METRICS, self._count, "write", outcomes, otherwise=None)
        return outcomes

    def health(self) -> dict[str, TierHealth]:
        """Return the state of each tier, by name, fastest first. Do no I/O."""
        is_up = self._objects.is_up
        return {
            name: TierHealth(is_up(name), is_up(name, Direction.DEMOTE), view.figures)
            for name, view in self._mover.views.items()
        }

    def cancel(self) -> None:
        """End all calls in progress as if their deadlines had passed.

        Before a call returns, its thread makes the copies already queued for it, as far as its own deadline allows.
        Once a call has returned, the caller's memory of every object that is not DONE is unchanged. The slots of a
        cancelled call become free within about a second.
        """
        self._miss()

    def close(self, deadline_s: float = 30.0) -> Closed:
        """End calls in progress with misses, finish the writes, and end all threads, in about `deadline_s` seconds.

        Idempotent. This does nothing in a forked child.

        Raises:
            BadCallError: the deadline is not a number. The store stays open.
        """
        deadline_s = deadline_of(deadline_s)
        try:
            return super().close(deadline_s)
        except SessionError:
            return Closed(flushed=False, lost=0)

    # ---- a call ----------------------------------------------------------------------------------------------------

    def _lookup(self, name: str, objects: Sequence[ObjectId], deadline_s: float, *, is_run: bool) -> list[bool]:
        asked = self._checked.objects(objects)

        def begin(request: RequestId, now_s: float) -> None:
            self._objects.lookup_objects(request, asked, now_s, is_run=is_run)

        def run(until_s: float) -> list[Outcome]:
            return self._run_call(len(asked), until_s, begin)

        done = Outcome.DONE
        return [outcome is done for outcome in self._answered(name, len(asked), deadline_s, run)]

    def _answered(
        self, name: str, objects: int, deadline_s: float, run: Callable[[float], list[Outcome]]
    ) -> list[Outcome]:
        """Call `run` with the end of the call's time and return its outcomes, or misses if the call cannot start."""
        deadline_s = deadline_of(deadline_s)
        if (
            self._process != os.getpid()  # before any lock, which a fork may leave held
            or self._is_broken
            or self._close_until_s is not None
            or len(self._calls) >= CALLS_MAX
            or not deadline_s
        ):
            return [Outcome.CANCELLED] * objects
        began_s = self._clock()
        outcomes = run(began_s + deadline_s)
        seconds = self._clock() - began_s
        self.guards.run(
            Feature.METRICS, lambda: self.metrics.observe(table.OBJECT_CALL_SECONDS, seconds, call=name), otherwise=None
        )
        return outcomes

    def _run_call(
        self,
        objects: int,
        until_s: float,
        begin: Callable[[RequestId, float], None],
        memory: Sequence[Memory] = (),
    ) -> list[Outcome]:
        """Start an operation of the core, execute its copies, and wait for its end or the deadline."""
        call = _Call(RequestId(str(next(self._numbers))), objects, memory)
        left_s = until_s - self._clock()
        if not objects or left_s <= 0:
            return call.answer()
        try:
            self._calls[call.request] = call
            self._uninterrupted(self._call, partial(begin, call.request), left_s)
            if not self._work_off(call, until_s):
                self._uninterrupted(self._release, call)
        except SessionError:
            pass  # the store is closed, or its lock was not free in time
        except Exception as error:  # noqa: BLE001 - a cache must not stop an engine
            self._shut(error)
        except BaseException:  # an interrupt of the calling thread
            self._uninterrupted(self._release, call)
            raise
        finally:
            self._calls.pop(call.request, None)
        return call.answer()

    def _work_off(self, call: _Call, until_s: float) -> bool:
        """Execute copies until the operation ends. Return False if the deadline comes first."""
        while (left_s := until_s - self._clock()) > 0:
            each = call.inbox.get(left_s)
            copied: list[Transfer] = []
            size_bytes, began_s = 0, self._clock()
            while isinstance(each, Transfer):
                is_get = each.direction is Direction.SCATTER
                (self._copy_out if is_get else self._copy_in)(each, call.memory[each.blocks[0]])
                copied.append(each)
                call.copied[each.blocks[0]] = Outcome.DONE if is_get else Outcome.FAILED
                size_bytes += self._sizes[each.group]
                each = call.inbox.get(0.0) if size_bytes < COPY_BYTES else None
            if copied:
                self._uninterrupted(self._complete, copied, (self._clock() - began_s) / len(copied))
            if isinstance(each, ObjectsDone):
                call.outcomes = each.outcomes or call.outcomes
                return True
        return False

    def _complete(self, copied: Sequence[Transfer], seconds: float) -> None:
        """Complete copies, each of which took `seconds`."""
        self._inbox.extend(
            Completion(it, Outcome.DONE, size_bytes=sum(self._layers[it.group]), seconds=seconds) for it in copied
        )
        self.ready()

    def _release(self, call: _Call) -> None:
        """End an operation early, and take its outcomes. Only its own thread calls this, so none of its copies runs."""
        self._wish(lambda now_s: self._forget(call.request, now_s))
        self.ready()
        until_s = self._clock() + RELEASE_S
        while (left_s := until_s - self._clock()) > 0:
            each = call.inbox.get(left_s)
            if isinstance(each, ObjectsDone):
                call.outcomes = each.outcomes or call.outcomes
                return

    def _forget(self, request: RequestId, now_s: float) -> None:
        """Release an operation, and complete the copies that its thread will not execute. Runs under the lock."""
        self._objects.release(request, now_s)
        self._inbox.extend(Completion(it, Outcome.CANCELLED) for it in self._objects.copies_of(request))

    def _check(self, now_s: float) -> None:
        super()._check(now_s)
        for request in self._objects.requests():
            if request not in self._calls:  # an interrupt has ended the call in its thread
                self._forget(request, now_s)

    def _copy_out(self, transfer: Transfer, memory: Memory) -> None:
        payload = np.frombuffer(self._arena.payload(transfer.group, transfer.slot), np.uint8)
        for piece, offset in zip(memory, self._offsets[transfer.group], strict=True):
            np.copyto(piece, payload[offset : offset + piece.size])  # releases the interpreter lock

    def _copy_in(self, transfer: Transfer, memory: Memory) -> None:
        payload = np.frombuffer(self._arena.payload(transfer.group, transfer.slot), np.uint8)
        for piece, offset in zip(memory, self._offsets[transfer.group], strict=True):
            np.copyto(payload[offset : offset + piece.size], piece)

    def _count(self, way: str, outcomes: Sequence[Outcome], loaded: Sequence[ObjectId] = ()) -> None:
        if self._process == os.getpid():
            for outcome in set(outcomes):
                self.metrics.add(table.OBJECTS, outcomes.count(outcome), way=way, outcome=outcome.value)
            if self.layout.loss != "none":  # objects of other groups cover the same tokens
                done = sum(not it.group and each is Outcome.DONE for it, each in zip(loaded, outcomes, strict=False))
                self.metrics.add(table.LOSSY_LOAD_TOKENS, done * self.layout.chunk_tokens, loss=self.layout.loss)

    # ---- the core's side -------------------------------------------------------------------------------------------

    def _answer(self, event: Event) -> None:
        """Pass the event that ends an operation to its call."""
        if isinstance(event, ObjectsDone) and (call := self._calls.get(event.request)) is not None:
            call.inbox.put(event)

    def _settle_shut(self, now_s: float) -> None:
        for command in self._open.values():
            if isinstance(command, Transfer) and command.request and command.request not in self._calls:
                self._inbox.append(Completion(command, Outcome.CANCELLED))  # its thread has left, so no copy will run
        super()._settle_shut(now_s)

    def _miss(self, _copying: Collection[RequestId] = ()) -> None:
        """End all calls early. The thread of a call runs its copies, so no copy outlives its call."""
        for call in list(self._calls.values()):
            call.inbox.put(ObjectsDone(call.request, ()))

    def _shut(self, error: BaseException) -> None:
        super()._shut(error)
        self._miss()

    def _close_all(self, deadline_s: float) -> None:
        self._close_tiers(max(CLOSE_S_MIN, deadline_s))
        if not self._calls:  # otherwise a call is copying, and the memory is freed with the store
            self._arena.close()
