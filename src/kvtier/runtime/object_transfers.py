"""Reads, writes and probes of an object store: what to order next, and what a completion means.

It decides as the core does for a session: the time is an argument, commands and notices are collected in `output`, and
nothing blocks. All of it is under the store's lock.

A read is queued at the first tier that may have the object, and at the next one after a miss or a fault. A write is
queued at the first tier that can be written. Once a tier that persists has the object, the write is answered, and it
follows to slower tiers while its slot is not needed. If it is, the object is relayed later: read again from the tier
that has it, when no call waits for a slot.
"""

from collections import OrderedDict, deque
from collections.abc import Collection, Iterator, Sequence
from heapq import heappop, heappush

from kvtier.codec.frame import frame_bytes
from kvtier.core.limits import TierRules
from kvtier.core.output import Output
from kvtier.core.tier_state import TierState, TierStates
from kvtier.layout import KvLayout
from kvtier.runtime.executor import Completion, Observer
from kvtier.runtime.object_work import Flight, ObjectCall, ObjectRead, ObjectWrite, Question
from kvtier.runtime.staging import SHARE, StagingSlots
from kvtier.types import SEVERITY, Cancel, ChunkKey, Drop, Link, ObjectId, Origin, Outcome, Probe, Transfer

RELAYS_MAX = 1 << 14
"""Objects that may wait to be relayed, per tier; of more, the oldest are dropped."""

RELAYS_IN_FLIGHT = 2
"""Relays that are read at the same time, of all tiers."""

REMEMBERED_MAX = 1 << 16
"""Objects whose tier, or whose first use from a slower tier, is remembered."""


class ObjectTransfers:
    """The objects in flight of one store.

    Args:
        layout: the KV groups.
        slots: slots of each group.
        tiers: the tiers, fastest first.
        down: names of tiers that are not open yet.
        observer: receives every command and completion.
    """

    def __init__(
        self,
        *,
        layout: KvLayout,
        slots: Sequence[int],
        tiers: Sequence[TierRules],
        down: Collection[str],
        observer: Observer,
    ) -> None:
        self.output = Output()
        self.staging = StagingSlots(slots)
        # `TierStates` gives each way a quarter of the slots that it gets as its argument.
        self.tiers = TierStates(tiers, int(4 * SHARE * min(slots)), self.output, down)
        self.followers_dropped = 0
        """Writes to slower tiers that were dropped because their slot was needed, or because the tier failed."""
        self._observer = observer
        self._sizes = [frame_bytes(group) for group in layout.groups]
        self._reads: dict[str, deque[ObjectRead]] = {name: deque() for name in self.tiers.by_name}
        self._writes: dict[str, dict[ObjectWrite, None]] = {name: {} for name in self.tiers.by_name}
        """Writes that a call waits for, by tier."""
        self._followers: dict[str, dict[ObjectWrite, None]] = {name: {} for name in self.tiers.by_name}
        """Answered writes, by tier."""
        self._droppable: list[dict[ObjectWrite, None]] = [{} for _ in slots]
        """Answered writes that wait in a queue, by group: the only holders of their slots."""
        self._relays: dict[str, OrderedDict[ObjectId, tuple[Origin, TierState]]] = {
            name: OrderedDict() for name in self.tiers.by_name
        }
        """Objects that a slower tier lacks, by that tier, with the tier that has them."""
        self._relaying = 0
        """Relays that hold a slot while they are read."""
        self._staged: dict[ObjectId, ObjectWrite] = {}
        self._dropping: dict[tuple[str, ObjectId], float] = {}
        """Drops without their completion, and until when writes wait for them."""
        self._dropped: OrderedDict[tuple[str, ObjectId], float] = OrderedDict()
        """Drops that have ended, and until when a probe may answer that was sent before."""
        self._flights: dict[int, Flight] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._held_by: OrderedDict[ObjectId, int] = OrderedDict()
        """Position of the tier that reported an object; objects that the first tier reported are not here."""
        self._used: OrderedDict[ObjectId, None] = OrderedDict()
        """Objects that a slower tier has delivered once."""
        self._slots_wanted: dict[ObjectCall, None] = {}
        """Calls that wait for a slot to write from."""

    # ---- probes ----------------------------------------------------------------------------------------------------

    def ask(self, tier: TierState, objects: Sequence[ObjectId], question: Question | None, now_s: float) -> None:
        """Probe a tier for `objects`. Without a question it is a health check."""
        deadline_s = now_s + tier.rules.probe_deadline_s
        probe = Probe(self.output.new_id(), tier.name, tuple(objects), deadline_s)
        tier.breakers[Link.PROMOTE].attempted(probe.id)
        self._send(Flight(probe, tier, question), deadline_s)

    def found(self, held: Sequence[tuple[ObjectId, TierState]]) -> None:
        """Tiers have reported these objects: reads of them begin there."""
        for each, tier in held:
            if tier.number:
                self._held_by[each] = tier.number
            elif self._held_by:
                self._held_by.pop(each, None)
        while len(self._held_by) > REMEMBERED_MAX:
            self._held_by.popitem(last=False)

    def check_tiers(self, now_s: float) -> None:
        """Send health checks to the tiers without an open probe."""
        probed = {flight.tier for flight in self._flights.values() if isinstance(flight.command, Probe)}
        for tier in self.tiers.all:
            if tier not in probed and tier.can_read(now_s):
                self.ask(tier, (), None, now_s)

    # ---- reads -----------------------------------------------------------------------------------------------------

    def read(self, read: ObjectRead) -> None:
        """Queue a read."""
        read.tier = self._held_by.get(read.object, 0) if self._held_by else 0
        self._queue_read(read)

    def delivered(self, read: ObjectRead, now_s: float) -> None:
        """The calling thread has copied the bytes of an arrived read: free its slot, or fill faster tiers from it."""
        read.call.end(read.number, Outcome.DONE)
        group, slot = read.object.group, read.slot
        faster = [tier for tier in self.tiers.all[: read.tier] if tier.can_write(now_s)]
        is_worth = bool(faster) and read.object not in self._staged and self._is_second_use(read.object)
        if is_worth and self.staging.read_becomes_write(group):
            write = ObjectWrite(read.object, read.origin, slot, deque(faster), is_held=True, is_answered=True)
            self._staged[read.object] = write
            self._write_next(write, now_s)
            return
        self.staging.give_from_read(group, slot)
        self._slot_is_free()

    def _is_second_use(self, object_id: ObjectId) -> bool:
        if object_id in self._used:
            del self._used[object_id]
            return True
        self._used[object_id] = None
        if len(self._used) > REMEMBERED_MAX:
            self._used.popitem(last=False)
        return False

    def _queue_read(self, read: ObjectRead, *, is_first: bool = False) -> None:
        if read.tier >= len(self.tiers):
            self._held_by.pop(read.object, None)
            read.call.end(read.number, read.outcome)
            return
        queue = self._reads[self.tiers.all[read.tier].name]
        (queue.appendleft if is_first else queue.append)(read)

    def _try_next(self, read: ObjectRead) -> None:
        read.tier += 1
        self._queue_read(read, is_first=True)

    def _start_reads(self, tier: TierState, now_s: float) -> None:
        queue = self._reads[tier.name]
        while queue:
            read = queue[0]
            if read.call.is_over:
                queue.popleft()
                continue
            if not tier.can_load():
                self._try_next(queue.popleft())
                continue
            key, group = read.object
            if not tier.has_room(Link.PROMOTE, self._sizes[group]):
                return
            slot = self.staging.take_for_read(group)
            if slot is None:
                if not self._drop_follower(group):
                    return
                continue
            queue.popleft()
            read.slot = slot
            read.flight = self._transfer(Link.PROMOTE, read, tier, key, group, slot, read.origin, now_s)
            read.call.reads.add(read)

    def _read_ended(self, flight: Flight, completion: Completion, read: ObjectRead, now_s: float) -> None:
        transfer, outcome = flight.command, completion.outcome
        assert isinstance(transfer, Transfer)
        self._tier_read(flight, completion, read.object, now_s)
        if read.flight is not flight or read.call.is_over:
            self.staging.give_from_read(transfer.group, transfer.slot)
            self._slot_is_free()
            return
        read.flight = None
        read.call.reads.discard(read)
        if outcome is Outcome.DONE:
            read.call.arrived.append(read)
            read.call.wake()
            return
        self.staging.give_from_read(transfer.group, transfer.slot)
        self._slot_is_free()
        read.outcome = max(read.outcome, outcome, key=SEVERITY.__getitem__)
        self._try_next(read)

    def _tier_read(self, flight: Flight, completion: Completion, object_id: ObjectId, now_s: float) -> None:
        """Note what a read shows about the tier and its copy."""
        tier, outcome = flight.tier, completion.outcome
        is_fault = None if outcome is Outcome.CANCELLED else completion.is_tier_fault
        assert isinstance(flight.command, Transfer)
        tier.ended(flight.command, self._sizes[object_id.group], now_s, is_late=flight.is_late, is_fault=is_fault)
        if outcome is Outcome.DONE or outcome is Outcome.CORRUPT:
            tier.clear_suspect(object_id)
        elif is_fault and not flight.is_late:
            tier.mark_suspect([object_id])  # as with a bad block: the tier has a copy that cannot be read
        if outcome is Outcome.CORRUPT:
            self.output.counters.corrupt += 1
            self._drop(tier, object_id, now_s)
        if outcome is Outcome.CORRUPT or outcome is Outcome.ABSENT:
            tier.remember(object_id, now_s, is_present=False)

    # ---- writes ----------------------------------------------------------------------------------------------------

    def join(self, call: ObjectCall, number: int, object_id: ObjectId) -> bool:
        """Whether another write of the object is on its way, whose outcome `call` gets, too."""
        write = self._staged.get(object_id)
        if write is None:
            return False
        if write.is_held:
            call.end(number, Outcome.DONE)
        elif write.flights and write.queue is None and not self._is_awaited(write):
            call.end(number, Outcome.FAILED)  # only overdue threads have it
        else:
            write.is_answered = False  # its own call may have left
            write.waiting.append((call, number))
        return True

    def _is_awaited(self, write: ObjectWrite) -> bool:
        """Whether a command of `write` is in flight and not overdue."""
        return any(flight.work is write and not flight.is_late for flight in self._flights.values())

    def must_write(self, tier: TierState, object_id: ObjectId) -> bool:
        """Whether the copy that `tier` reports may be bad, or may be dropped by now."""
        dropped = tier.name, object_id
        return dropped in self._dropping or dropped in self._dropped or tier.is_suspect(object_id)

    def stage(self, call: ObjectCall, number: int, object_id: ObjectId, origin: Origin) -> ObjectWrite | None:
        """Begin a write: it has a slot that the calling thread fills before `filled`. None: no slot is free."""
        group = object_id.group
        slot = self.staging.take_for_write(group)
        if slot is None and self._drop_follower(group):
            slot = self.staging.take_for_write(group)
        if slot is None:
            self._slots_wanted[call] = None
            return None
        write = ObjectWrite(object_id, origin, slot, deque(self.tiers.all), [(call, number)])
        self._staged[object_id] = write
        return write

    def unstage(self, write: ObjectWrite) -> None:
        """The calling thread was interrupted before it had filled the slot."""
        write.tiers.clear()
        self._answer(write, Outcome.FAILED)
        self._end_if_over(write)

    def filled(self, write: ObjectWrite, now_s: float) -> None:
        """The slot of a write has its bytes."""
        self._write_next(write, now_s)

    def _write_next(self, write: ObjectWrite, now_s: float) -> None:
        """Queue a write at the next tier, or end it."""
        while write.tiers:
            tier = write.tiers.popleft()
            if write.is_held and tier.remembered(write.object, now_s):
                continue
            if not tier.can_write(now_s):
                self._relay_later(write, tier)
            else:
                write.queue = (self._followers if write.is_answered else self._writes)[tier.name]
                write.queue[write] = None
                if write.is_answered and not write.flights:
                    self._droppable[write.object.group][write] = None
                    self._slot_is_free()
                return
        if not write.is_answered:
            self._answer(write, Outcome.DONE if write.is_held else Outcome.FAILED)
        self._end_if_over(write)

    def _answer(self, write: ObjectWrite, outcome: Outcome) -> None:
        write.is_answered = True
        for call, number in write.waiting:
            if not call.is_over:
                call.end(number, outcome)
        write.waiting.clear()

    def _end_if_over(self, write: ObjectWrite) -> None:
        is_over = write.queue is None and not write.flights and not write.tiers
        if is_over:  # calls may have joined it since it was answered
            self._answer(write, Outcome.DONE if write.is_held else Outcome.FAILED)
        if is_over and self._staged.get(write.object) is write:
            del self._staged[write.object]
            self.staging.give_from_write(write.object.group, write.slot)
            self._slot_is_free()

    def _drop_follower(self, group: int) -> bool:
        """Give up the oldest answered write of `group` that waits; whether that freed a slot."""
        if not self._droppable[group]:
            return False
        self._leave_queue(next(iter(self._droppable[group])))
        return True

    def _leave_queue(self, write: ObjectWrite) -> None:
        """End a write that waits in a queue."""
        if write.is_answered:
            for tier in (*(it for it in self.tiers.all if write.queue is self._followers[it.name]), *write.tiers):
                self._relay_later(write, tier)
        self._answer(write, Outcome.FAILED)
        if write.queue is not None:
            write.queue.pop(write, None)
            write.queue = None
        self._droppable[write.object.group].pop(write, None)
        write.tiers.clear()
        self._end_if_over(write)

    def _start_writes(self, tier: TierState, queue: dict[ObjectWrite, None], now_s: float) -> None:
        for write in list(queue) if self._dropping else _first_ones(queue):
            if tier.breakers[Link.DEMOTE].trial:  # the rest waits for the result of a trial
                return
            key, group = write.object
            can_write, dropped_s = tier.can_write(now_s), self._dropping.get((tier.name, write.object))
            if can_write and dropped_s is not None:
                if now_s < dropped_s:
                    continue  # another thread may not have sent the drop yet
                can_write = False  # the drop hangs
            if can_write and not tier.has_room(Link.DEMOTE, self._sizes[group]):
                return
            del queue[write]
            write.queue = None
            self._droppable[group].pop(write, None)
            if not can_write:
                self._relay_later(write, tier)
                self._write_next(write, now_s)
                continue
            if tier.clear_suspect(write.object):  # a tier does not overwrite objects
                self._drop(tier, write.object, now_s)
            write.flights += 1
            self._transfer(Link.DEMOTE, write, tier, key, group, write.slot, write.origin, now_s)

    def _write_ended(self, flight: Flight, completion: Completion, write: ObjectWrite, now_s: float) -> None:
        tier, outcome = flight.tier, completion.outcome
        is_fault = None if outcome is Outcome.CANCELLED else completion.is_tier_fault
        assert isinstance(flight.command, Transfer)
        tier.ended(flight.command, self._sizes[write.object.group], now_s, is_late=flight.is_late, is_fault=is_fault)
        write.flights -= 1
        if outcome is Outcome.DONE and not tier.is_suspect(write.object):
            write.is_held = True
            tier.remember(write.object, now_s, is_present=True)
            if tier.number < self._held_by.get(write.object, 0):
                self.found([(write.object, tier)])
            if tier.rules.persists:
                write.source = tier
            if tier.rules.persists or flight.is_late:
                self._answer(write, Outcome.DONE)
        elif write.is_answered:
            self.followers_dropped += 1
        if flight.is_late:
            self._end_if_over(write)
        else:
            self._write_next(write, now_s)

    def _relay_later(self, write: ObjectWrite, tier: TierState) -> None:
        """`tier` gets the object of `write` once it can be written and a slot is free."""
        if write.source is None or write.source.number > tier.number:
            self.followers_dropped += write.is_answered
            return
        relays = self._relays[tier.name]
        relays[write.object] = write.origin, write.source
        if len(relays) > RELAYS_MAX:
            relays.popitem(last=False)
            self.followers_dropped += 1

    def _start_relays(self, tier: TierState, now_s: float) -> None:
        """Read objects that `tier` lacks into slots that no call wants."""
        relays = self._relays[tier.name]
        while relays and not self._slots_wanted and self._relaying < RELAYS_IN_FLIGHT:
            object_id, (origin, source) = next(iter(relays.items()))
            key, group = object_id
            size_bytes = self._sizes[group]
            is_free = tier.breakers[Link.DEMOTE].is_up() and tier.can_write(now_s) and source.can_read(now_s)
            if not is_free or not source.has_room(Link.PROMOTE, size_bytes) or self._followers[tier.name]:
                return
            if object_id in self._staged or (tier.name, object_id) in self._dropping:
                relays.move_to_end(object_id)
                return
            slot = self.staging.take_for_write(group)
            if slot is None:
                return
            del relays[object_id]
            write = ObjectWrite(object_id, origin, slot, deque([tier]), source=source, is_answered=True)
            self._staged[object_id] = write
            self._relaying += 1
            write.flights += 1
            self._transfer(Link.PROMOTE, write, source, key, group, slot, origin, now_s)

    def _relay_read(self, flight: Flight, completion: Completion, write: ObjectWrite, now_s: float) -> None:
        """The tier that has an object has delivered it, or not."""
        self._tier_read(flight, completion, write.object, now_s)
        self._relaying -= 1
        write.flights -= 1
        if completion.outcome is Outcome.DONE and not flight.is_late:
            write.is_held = True
            self._answer(write, Outcome.DONE)
            self._write_next(write, now_s)
            return
        self.followers_dropped += 1
        write.tiers.clear()
        self._end_if_over(write)

    def relays_waiting(self) -> dict[str, int]:
        """Objects that wait to be relayed, by tier."""
        return {name: len(relays) for name, relays in self._relays.items()}

    # ---- calls -----------------------------------------------------------------------------------------------------

    def abandon(self, call: ObjectCall) -> None:
        """The call returns. Its reads end without touching the caller's memory; its writes that have begun go on."""
        call.is_over = True
        self._slots_wanted.pop(call, None)
        begun = [read.flight.command.id for read in call.reads if read.flight is not None]
        if begun:
            self.output.commands.append(Cancel(tuple(begun)))
        for read in call.arrived:
            self.staging.give_from_read(read.object.group, read.slot)
        call.arrived.clear()
        if call.left:
            for write in list(self._staged.values()):
                if any(waiter is call for waiter, _ in write.waiting):
                    write.waiting = [it for it in write.waiting if it[0] is not call]
                    if not write.waiting and not write.is_answered:
                        write.is_answered = True
                        if write.queue is not None and not write.flights:
                            self._leave_queue(write)
        self._slot_is_free()

    @property
    def writes(self) -> int:
        """Objects on their way to a tier, or waiting to be relayed from and to tiers that are up."""
        waiting = 0
        for tier in self.tiers.all:
            if tier.breakers[Link.DEMOTE].is_up():
                relays = self._relays[tier.name].values()
                waiting += sum(source.breakers[Link.PROMOTE].is_up() for _, source in relays)
        return len(self._staged) + waiting

    @property
    def is_writing(self) -> bool:
        """Whether `writes` is above 0, mostly without a count."""
        return bool(self._staged) or self.writes > 0

    def advance(self, now_s: float) -> None:
        """Start what limits and slots allow, the fastest tier first."""
        if self.tiers.has_stopped:
            self._give_up(now_s)
        for tier in self.tiers.all:
            if self._reads[tier.name]:
                self._start_reads(tier, now_s)
            if self._writes[tier.name]:
                self._start_writes(tier, self._writes[tier.name], now_s)
            if self._followers[tier.name]:
                self._start_writes(tier, self._followers[tier.name], now_s)
            elif self._relays[tier.name]:
                self._start_relays(tier, now_s)

    def next_deadline(self) -> float | None:
        """The time at which `expire` has work to do."""
        while self._deadlines and self._deadlines[0][1] not in self._flights:
            heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def expire(self, now_s: float) -> None:
        """Count overdue commands as faults; their objects go on with the next tier."""
        while self._dropped and next(iter(self._dropped.values())) <= now_s:
            self._dropped.popitem(last=False)
        while self._deadlines and self._deadlines[0][0] <= now_s:
            flight = self._flights.get(heappop(self._deadlines)[1])
            if flight is not None and not flight.is_late:
                self._overdue(flight, now_s)

    def _give_up(self, now_s: float) -> None:
        """Calls wait no longer for reads from tiers whose reads have stopped."""
        self.tiers.has_stopped = False
        for flight in list(self._flights.values()):
            is_waiting = isinstance(flight.work, ObjectRead) and not flight.is_late
            if is_waiting and not flight.tier.breakers[Link.PROMOTE].is_up():
                self._overdue(flight, now_s)

    def _overdue(self, flight: Flight, now_s: float) -> None:
        """A command is overdue, or is given up."""
        flight.is_late = True
        self.output.counters.late += 1
        self.output.commands.append(Cancel((flight.command.id,)))
        if isinstance(flight.command, Probe):
            del self._flights[flight.command.id]
            flight.tier.record(Link.PROMOTE, flight.command.id, now_s, is_fault=True)
            self._answered(flight, None)
            return
        flight.tier.overdue(flight.command, now_s)
        work = flight.work
        if isinstance(work, ObjectRead) and work.flight is flight and not work.call.is_over:
            work.flight = None
            work.call.reads.discard(work)
            work.outcome = max(work.outcome, Outcome.FAILED, key=SEVERITY.__getitem__)
            self._try_next(work)
        elif isinstance(work, ObjectWrite) and flight.command.link is Link.DEMOTE:
            self._write_next(work, now_s)
        elif isinstance(work, ObjectWrite):
            self._answer(work, Outcome.FAILED)

    def complete(self, completion: Completion, now_s: float) -> None:
        """Handle the completion of a command."""
        self._observer.completed(completion)
        command = completion.command
        if isinstance(command, Drop):
            tier, dropped = self.tiers[command.tier], (command.tier, ObjectId(command.key, command.group))
            if completion.outcome is Outcome.DONE:
                tier.clear_suspect(dropped[1])
            elif completion.outcome is Outcome.FAILED:  # the bad copy may still be there
                tier.mark_suspect([dropped[1]])
            self._dropping.pop(dropped, None)
            self._dropped[dropped] = now_s + tier.rules.probe_deadline_s
            if len(self._dropped) > REMEMBERED_MAX:
                self._dropped.popitem(last=False)
            return
        flight = self._flights.pop(command.id, None) if isinstance(command, Transfer | Probe) else None
        if flight is None:
            return  # a probe that was overdue
        if isinstance(flight.work, ObjectRead):
            self._read_ended(flight, completion, flight.work, now_s)
        elif isinstance(flight.work, ObjectWrite):
            is_relay = isinstance(command, Transfer) and command.link is Link.PROMOTE
            (self._relay_read if is_relay else self._write_ended)(flight, completion, flight.work, now_s)
        else:
            is_done = completion.outcome is Outcome.DONE
            if is_done or completion.is_tier_fault:
                flight.tier.record(Link.PROMOTE, flight.command.id, now_s, is_fault=not is_done)
            else:
                flight.tier.breakers[Link.PROMOTE].inconclusive(flight.command.id)
            self._answered(flight, completion.present if is_done else None)

    def _answered(self, flight: Flight, present: Sequence[bool] | None) -> None:
        if isinstance(flight.work, Question):
            flight.work.present, flight.work.is_over = present, True
            flight.work.wake()

    def _drop(self, tier: TierState, object_id: ObjectId, now_s: float) -> None:
        drop = Drop(tier.name, *object_id)
        self._dropping[tier.name, object_id] = now_s + tier.rules.transfer_deadline_s
        self._observer.submitted(drop)
        self.output.commands.append(drop)

    def _transfer(
        self,
        link: Link,
        work: ObjectRead | ObjectWrite,
        tier: TierState,
        key: ChunkKey,
        group: int,
        slot: int,
        origin: Origin,
        now_s: float,
    ) -> Flight:
        deadline_s = now_s + tier.rules.transfer_deadline_s
        parent, depth, session = origin
        number = self.output.new_id()
        transfer = Transfer(number, link, key, group, slot, tier.name, None, (), parent, depth, deadline_s, session)
        flight = Flight(transfer, tier, work)
        tier.began(transfer, self._sizes[group])
        self._send(flight, deadline_s)
        return flight

    def _send(self, flight: Flight, deadline_s: float) -> None:
        self._flights[flight.command.id] = flight
        heappush(self._deadlines, (deadline_s, flight.command.id))
        self._observer.submitted(flight.command)
        self.output.commands.append(flight.command)

    def _slot_is_free(self) -> None:
        """A slot is free, or can be had."""
        if self._slots_wanted:
            waiting, self._slots_wanted = self._slots_wanted, {}
            for call in waiting:
                call.wake()


def _first_ones(queue: dict[ObjectWrite, None]) -> Iterator[ObjectWrite]:
    """The first of `queue`, again and again, while the caller removes it."""
    while queue:
        yield next(iter(queue))
