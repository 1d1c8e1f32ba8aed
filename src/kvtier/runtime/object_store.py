"""The object store: tiers for an engine that owns its host memory, such as SGLang's HiCache.

The engine names objects, keeps them in its own memory, and asks: how many does a tier have, bring these, keep these.
There is no planner and no large arena. Bytes pass through a staging area, because a frame needs head room and direct
I/O needs pages, and the engine's memory has neither (ADR 19). The core is a session's, in a mode of its own (ADR 24).

    calling threads    leading_run, contains, get_into, put_from: wait, and copy between slots and the caller's memory
    the mover's        tiers, frames, checksums (`runtime/mover.py`)
    the store's        deadlines, health checks and gauges (`runtime/locked_core.py`)
"""

import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import count
from numbers import Real
from reprlib import repr as short
from types import MappingProxyType, NoneType
from typing import Any, NamedTuple, TypeVar, cast, get_args

import numpy as np
import numpy.typing as npt

from kvtier.codec.frame import frame_bytes
from kvtier.core.limits import TierRules
from kvtier.core.object_cache import ObjectCache
from kvtier.device.copier import Fence
from kvtier.errors import BadCallError
from kvtier.layout import KvLayout
from kvtier.observe import metric_definitions as table
from kvtier.observe.metrics import Metrics
from kvtier.runtime.arena import Arena
from kvtier.runtime.counters import CommandCounters, Gauges, start_at_zero
from kvtier.runtime.executor import Completion, Threads
from kvtier.runtime.guards import Feature, Guards
from kvtier.runtime.journal import Journal
from kvtier.runtime.locked_core import Closed, LockedCore, SessionError
from kvtier.runtime.mailbox import Mailbox
from kvtier.runtime.mover import Mover
from kvtier.runtime.stored_forms import StoredForm
from kvtier.tier.base import Figures, Tier
from kvtier.tier.loan import clear_frames
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
    Way,
)

__all__ = ["ObjectBytes", "ObjectId", "ObjectStore", "Origin", "TierHealth"]

OBJECTS_MAX = 1 << 16
"""Most objects of one call."""

CALLS_MAX = 256
"""Most calls in progress. Further calls miss at once."""

COPY_BYTES = 2 << 20
"""Small objects are copied together up to this many bytes, so that tiers write them in batches."""

KEY_BYTES = 32

DEPTH_MAX = (1 << 32) - 1
"""Largest depth of an `Origin`, because a frame has four bytes for it."""

DEADLINE_S_MAX = 86_400.0
"""Longest deadline; longer ones, such as infinity, count as this."""

CLOSE_S_MIN = 1.0
"""Closing leaves threads and tiers at least this long, even if writes used up the deadline."""

RELEASE_S = 0.25
"""How long a call waits for its end after its deadline. The lock is held for microseconds."""


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


_T = TypeVar("_T")

_Memory = list[npt.NDArray[np.uint8]]


class _Call:
    """One call in progress."""

    __slots__ = ("copied", "inbox", "memory", "outcomes", "request")

    def __init__(self, request: RequestId, objects: int, memory: Sequence[_Memory]) -> None:
        self.request = request
        self.memory = memory
        self.inbox: Mailbox[Transfer | ObjectsDone] = Mailbox()
        """Copies to execute, and the end, from the holder of the lock."""
        self.outcomes: Sequence[Outcome] = [Outcome.CANCELLED] * objects
        self.copied: dict[int, Outcome] = {}
        """The outcome of each object that was copied, if the core tells none: a get has filled the caller's memory with
        verified bytes, and the write of a put may end later."""

    def answer(self) -> list[Outcome]:
        """The outcome of each object, also when the call has ended early."""
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
        """See `Executor`."""
        self._put = put
        self._mover.complete_to(put, ready)

    def submit(self, *commands: Command) -> None:
        """See `Executor`."""
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
        """See `Executor`. The first call leaves its threads some time in any case."""
        close_s_min, self._close_s_min = self._close_s_min, 0.0
        return self._mover.close(max(close_s_min, deadline_s))


class ObjectStore(LockedCore):
    """Objects in tiers, for callers with memory of their own. Any thread may call it.

    Every call returns within its `deadline_s` seconds and the time of a copy. It raises `BadCallError` (a ValueError)
    for wrong arguments and nothing else: whatever fails is a miss. After `close`, in a forked child and with too many
    calls in progress, every answer is a miss at once.

    A tier may forget any object. What is returned is verified: checksums, the object's name, the fingerprint and the
    layout.

    Args:
        layout: this rank's KV groups; `chunk_tokens` is the engine's page.
        name_root: 32 secret bytes that key the names of objects (`keys.fingerprint.root_key`).
        model: 16 bytes, `keys.secret.model_id`; in every frame that is written.
        tiers: tiers by name, fastest first; the store's from now on.
        rules: limits of each tier, in the same order.
        arena: slots of `layout` for objects on their way; the store's from now on.
        forms: how the objects of tiers are stored, by name; of others raw and without a seal.
        tier_threads: threads of single tiers, by name.
        common: names of tiers in which all ranks of the engine use one store.
        down: names of tiers that are not open yet.
        metrics: counts objects, transfers and probes.
        journal: gets a line for each object that a tier reads or writes, if enabled.
        guards: of what is optional.
        on_close: called once at the end, with the remaining seconds, to close the tiers.
        clock: monotonic seconds.

    Raises:
        RuntimeError: the system cannot start a thread.
    """

    THREAD_NAME = "kvtier-objects"
    SHUT_TEXT = "internal error: the object store answers no more calls"

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
        journal: Journal | None = None,
        guards: Guards | None = None,
        on_close: Callable[[float], None] = lambda _seconds: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.layout = layout
        self._close_tiers = on_close
        self._layers = [group.layer_bytes for group in layout.groups]
        self._groups = frozenset(range(len(layout.groups)))
        self._offsets = [group.layer_offsets for group in layout.groups]
        self._sizes = [frame_bytes(group) for group in layout.groups]
        self._arena = arena
        self._calls: dict[RequestId, _Call] = {}
        """Calls in progress."""
        self._numbers = count(1)
        self._objects = ObjectCache(layout=layout, slots=arena.slots, tiers=rules, down=down)
        self._mover = Mover(
            layout=layout,
            model=model,
            arena=arena,
            copier=_NoDevice(),
            tiers=tiers,
            common=common,
            forms=forms,
            threads=Threads(device=0),
            tier_threads=tier_threads or {},
            clock=clock,
            name_root=name_root,
        )
        metrics = metrics or Metrics()
        start_at_zero(metrics, tiers)
        for name in tiers:
            for way in get_args(Way):
                metrics.set(table.TIER_UP, float(name not in down), tier=name, way=way)
        counters = CommandCounters(metrics, *(() if journal is None else (journal,)))
        self._gauges = Gauges(metrics, self._objects, [layout], [self._mover.views], counters)
        super().__init__(
            self._objects,
            _CallersExecutor(self._mover, self._calls),
            publish=self._answer,
            fail=self._miss,
            on_close=self._close_all,
            on_second=self._each_second,
            metrics=metrics,
            observer=counters,
            guards=guards or Guards(),
            clock=clock,
        )
        self._start()

    # ---- calls -----------------------------------------------------------------------------------------------------

    def leading_run(self, objects: Sequence[ObjectId], deadline_s: float) -> int:
        """How many of the leading objects the tiers hold, together. Stale answers are possible: a get verifies.

        Tiers are asked in order, each for what faster ones lack. A remote tier is asked in at most three rounds, of
        at most 23 names; so among more than 553 objects the number may be a few too small, and holes are not seen.

        Args:
            objects: in the order of the prefix.
            deadline_s: tiers that have not answered by then hold nothing.

        Raises:
            BadCallError: `objects` is no list of `ObjectId`, a key is not 32 bytes, a group is unknown, there are more
                than `OBJECTS_MAX` objects, or the deadline is no number.
        """
        return [*self._find("leading_run", objects, deadline_s, is_run=True), False].index(False)

    def contains(self, objects: Sequence[ObjectId], deadline_s: float) -> list[bool]:
        """For each object whether a tier holds it. Stale answers are possible: a get verifies.

        Remote tiers are asked for every name that faster ones lack, at a request each.

        Raises:
            BadCallError: as `leading_run`.
        """
        return self._find("contains", objects, deadline_s, is_run=False)

    def get_into(self, reads: Sequence[ObjectBytes], deadline_s: float) -> list[Outcome]:
        """Bring objects into the caller's memory.

        Returns:
            For each object, in order: DONE when its pieces are filled with verified bytes. Otherwise ABSENT (also if
            it cannot be read here, and is kept), CORRUPT (and dropped; the next put heals it), FAILED, or CANCELLED
            when no tier could be asked in time. Pieces of an object that is not DONE are unchanged, however the call
            ends, unless it raises. Nothing touches a piece after the call.

        Raises:
            BadCallError: as `leading_run`; or an origin has no such form, or pieces do not fit the group's layers or
                cannot be written to.
        """
        objects, origins, memory = self._arguments(reads, is_written=True)

        def begin(request: RequestId, now_s: float) -> None:
            self._objects.get(request, objects, origins, now_s)

        def run(until_s: float) -> list[Outcome]:
            return self._run_call(len(objects), until_s, begin, memory)

        outcomes = self._answered("get", len(objects), deadline_s, run)
        self.guards.run(Feature.METRICS, self._count, "read", outcomes, otherwise=None)
        return outcomes

    def put_from(self, writes: Sequence[ObjectBytes], deadline_s: float) -> list[Outcome]:
        """Keep objects from the caller's memory, which is free when the call returns.

        A write goes to every tier that accepts it. Some may get it after the call. An object that the first tier holds
        at its start is not written again, unless its search has no answer in time: a key names one content.

        Returns:
            For each object, in order: DONE when a tier that persists holds it (or any, if none that persists took
            it). Otherwise FAILED: no tier has taken it in time, although one may still; or CANCELLED: not begun.

        Raises:
            BadCallError: as `get_into`, but pieces may be read-only.
        """
        objects, origins, memory = self._arguments(writes, is_written=False)

        def find(request: RequestId, now_s: float) -> None:
            self._objects.find_for_put(request, objects, now_s)

        def run(until_s: float) -> list[Outcome]:
            outcomes = self._run_call(len(objects), until_s, find)
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
        """The state of each tier, by name, fastest first. Does no I/O."""
        is_up = self._objects.is_up
        return {
            name: TierHealth(is_up(name), is_up(name, Direction.DEMOTE), view.figures)
            for name, view in self._mover.views.items()
        }

    def cancel(self) -> None:
        """End all calls in progress early, as a deadline does. Their threads complete the copies that they have got.

        Memory of an object that is not DONE then is as it was. Slots of a canceled call come free within about a
        second.
        """
        self._miss()

    def close(self, deadline_s: float = 30.0) -> Closed:
        """End calls in progress with misses, finish the writes, and end all threads, in about `deadline_s` seconds.

        Idempotent. In a forked child it does nothing.

        Raises:
            BadCallError: the deadline is no number. The store stays open.
        """
        _check_deadline(deadline_s)
        try:
            return super().close(min(deadline_s, DEADLINE_S_MAX) if deadline_s > 0 else 0.0)
        except SessionError:
            return Closed(flushed=False, lost=0)

    # ---- a call ----------------------------------------------------------------------------------------------------

    def _find(self, name: str, objects: Sequence[ObjectId], deadline_s: float, *, is_run: bool) -> list[bool]:
        asked = _listed(objects, ObjectId)
        self._check_objects(asked)

        def begin(request: RequestId, now_s: float) -> None:
            self._objects.find(request, asked, now_s, is_run=is_run)

        def run(until_s: float) -> list[Outcome]:
            return self._run_call(len(asked), until_s, begin)

        done = Outcome.DONE
        return [outcome is done for outcome in self._answered(name, len(asked), deadline_s, run)]

    def _answered(
        self, name: str, objects: int, deadline_s: float, run: Callable[[float], list[Outcome]]
    ) -> list[Outcome]:
        """The outcomes of `run`, which gets the time at which the call must end. Misses if the call cannot begin."""
        _check_deadline(deadline_s)
        if (
            self._process != os.getpid()  # before any lock
            or self._is_broken
            or self._close_until_s is not None
            or len(self._calls) >= CALLS_MAX
            or not deadline_s > 0
        ):
            return [Outcome.CANCELLED] * objects
        began_s = self._clock()
        outcomes = run(began_s + min(deadline_s, DEADLINE_S_MAX))
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
        memory: Sequence[_Memory] = (),
    ) -> list[Outcome]:
        """Begin an operation of the core, execute its copies, and wait for its end or the deadline."""
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
        except Exception as error:  # noqa: BLE001 - an engine must not end because of a cache
            self._shut(error)
        except BaseException:  # an interrupt of the calling thread
            self._uninterrupted(self._release, call)
            raise
        finally:
            self._calls.pop(call.request, None)
        return call.answer()

    def _work_off(self, call: _Call, until_s: float) -> bool:
        """Execute copies until the operation ends; False if the deadline comes first."""
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
        """Complete copies that took `seconds` each."""
        for transfer in copied:
            size_bytes = sum(self._layers[transfer.group])
            self._inbox.append(Completion(transfer, Outcome.DONE, size_bytes=size_bytes, seconds=seconds))
        self.ready()

    def _release(self, call: _Call) -> None:
        """End an operation early, and take its outcomes. Its thread, which is this one, executes no copy any more."""
        self._wish(lambda now_s: self._forget(call.request, now_s))
        self.ready()
        until_s = self._clock() + RELEASE_S
        while (left_s := until_s - self._clock()) > 0:
            each = call.inbox.get(left_s)
            if isinstance(each, ObjectsDone):
                call.outcomes = each.outcomes or call.outcomes
                return

    def _forget(self, request: RequestId, now_s: float) -> None:
        """Release an operation, and complete the copies that its thread will not execute. Under the lock."""
        self._objects.release(request, now_s)
        self._inbox.extend(Completion(it, Outcome.CANCELLED) for it in self._objects.copies_of(request))

    def _each_second(self) -> None:
        """Refresh gauges, and end operations whose threads have left in the middle of an interrupt. Under the lock."""
        self.guards.run(Feature.METRICS, self._gauges, otherwise=None)
        for request in self._objects.requests():
            if request not in self._calls:
                self._forget(request, self._clock())

    def _copy_out(self, transfer: Transfer, memory: _Memory) -> None:
        payload = np.frombuffer(self._arena.payload(transfer.group, transfer.slot), np.uint8)
        for piece, offset in zip(memory, self._offsets[transfer.group], strict=True):
            np.copyto(piece, payload[offset : offset + piece.size])  # other threads run meanwhile

    def _copy_in(self, transfer: Transfer, memory: _Memory) -> None:
        payload = np.frombuffer(self._arena.payload(transfer.group, transfer.slot), np.uint8)
        for piece, offset in zip(memory, self._offsets[transfer.group], strict=True):
            np.copyto(payload[offset : offset + piece.size], piece)

    def _count(self, way: str, outcomes: Sequence[Outcome]) -> None:
        if self._process == os.getpid():
            for outcome in set(outcomes):
                self.metrics.add(table.OBJECTS, outcomes.count(outcome), way=way, outcome=outcome.value)

    # ---- the core's side -------------------------------------------------------------------------------------------

    def _answer(self, event: Event) -> None:
        """Pass the end of an operation to its call."""
        if isinstance(event, ObjectsDone):
            call = self._calls.get(event.request)
            if call is not None:
                call.inbox.put(event)

    def _settle_shut(self, now_s: float) -> None:
        for command in self._open.values():
            if isinstance(command, Transfer) and command.request and command.request not in self._calls:
                self._inbox.append(Completion(command, Outcome.CANCELLED))  # its thread has left, and never copies it
        super()._settle_shut(now_s)

    def _miss(self, _copying: Collection[RequestId] = ()) -> None:
        """End all calls. A copy runs only in the thread of its call, so none goes on afterwards."""
        for call in list(self._calls.values()):
            call.inbox.put(ObjectsDone(call.request, ()))

    def _shut(self, error: BaseException) -> None:
        super()._shut(error)
        self._miss()

    def _close_all(self, deadline_s: float) -> None:
        self._close_tiers(max(CLOSE_S_MIN, deadline_s))
        if not self._calls:  # otherwise a call is in a copy, and the memory goes with the store
            self._arena.close()

    # ---- arguments -------------------------------------------------------------------------------------------------

    def _check_objects(self, objects: Sequence[ObjectId]) -> None:
        groups = [each.group for each in objects]
        if _are(groups, int) and self._groups.issuperset(groups) and _are_keys([each.key for each in objects]):
            return
        for key, group in objects:
            if not (_are_keys((key,)) and _are((group,), int) and group in self._groups):
                raise BadCallError(
                    f"object ({key!r:.80}, group {group!r:.20}); allowed: a key of {KEY_BYTES} bytes, and an int below "
                    f"{len(self._groups)} as group"
                )

    def _arguments(
        self, items: Sequence[ObjectBytes], *, is_written: bool
    ) -> tuple[list[ObjectId], list[Origin], list[_Memory]]:
        """The objects of `items`, their origins, and the pieces of each as arrays of bytes."""
        items = _listed(items, ObjectBytes)
        objects, origins = _listed([item.object for item in items], ObjectId), [item.origin for item in items]
        self._check_objects(objects)
        if not _are_origins(origins):
            raise BadCallError(
                f"origin {next(it for it in origins if not _are_origins([it]))!r:.120}; allowed: an Origin with a "
                f"parent of {KEY_BYTES} bytes or None, a depth of 0 to {DEPTH_MAX}, and a conversation, str or None"
            )
        try:
            return objects, origins, [self._pieces(item, is_written=is_written) for item in items]
        except BadCallError as error:
            clear_frames(error)  # their arrays would keep the caller's memory in use
            raise

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


def _check_deadline(deadline_s: object) -> None:
    if isinstance(deadline_s, bool) or not isinstance(deadline_s, Real):
        raise BadCallError(f"deadline_s = {deadline_s!r:.40}; allowed: a number of seconds")


def _listed(items: Any, kind: type[_T]) -> list[_T]:  # noqa: ANN401 - whatever a caller gives
    """A copy of `items`, which the caller may change meanwhile.

    Raises:
        BadCallError: they are no sequence, too many, or not all of type `kind`.
    """
    given: list[Any] | None = None
    if isinstance(items, Sequence) and len(cast("Sequence[Any]", items)) <= OBJECTS_MAX:
        given = [*cast("Sequence[Any]", items)]
    if given is None or not _are(given, kind):
        wrong = [it for it in given or () if type(it) is not kind] or cast("object", items)
        raise BadCallError(f"{short(wrong)}; allowed: a sequence of at most {OBJECTS_MAX} {kind.__name__}")
    return given


def _are(values: Iterable[object], *kinds: type) -> bool:
    """Whether all are of these types. A set of the types takes less time than a loop."""
    return {*map(type, values)} <= {*kinds}


def _are_keys(keys: Sequence[object]) -> bool:
    """Whether all are bytes of the right length."""
    return _are(keys, bytes) and {*map(len, cast("Sequence[bytes]", keys))} <= {KEY_BYTES}


def _are_origins(origins: Sequence[Origin]) -> bool:
    """Whether tiers and frames can take all of them."""
    return (
        _are(origins, Origin)
        and _are_keys([it.parent for it in origins if it.parent is not None])
        and _are([it.depth for it in origins], int)
        and all(0 <= it.depth <= DEPTH_MAX for it in origins)
        and _are([it.conversation for it in origins], str, NoneType)
    )
