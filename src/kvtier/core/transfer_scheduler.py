"""Decides which transfers start, and handles their completions.

Deadlock cannot occur because no operation holds a slot while it waits for another slot. Readable objects are scattered
immediately, in any order. A promotion takes one slot, which can be reused after its scatters. Stores use the slots that
loads do not need, and wait for a bounded time. A relay uses a slot of the staging area.
"""

from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import product

from kvtier.core.core_output import Output
from kvtier.core.host_residency import HOST, READABLE, Change, HostEntry, HostMemory, Residency
from kvtier.core.limits import Limits
from kvtier.core.link_estimates import LinkEstimator
from kvtier.core.operations import COPYING, LoadOperation, OpenOperations, StoreOperation, WorkItem
from kvtier.core.tier_searches import Probes
from kvtier.core.tier_state import TierState, TierStates
from kvtier.core.tier_writes import TierWrites
from kvtier.types import SEVERITY, Cancel, Direction, Drop, Outcome, Transfer

# Constants for hot paths: up to Python 3.11, a member lookup on the class costs as much as two calls.
GATHER, SCATTER, DEMOTE, PROMOTE = Direction.GATHER, Direction.SCATTER, Direction.DEMOTE, Direction.PROMOTE
PROMOTING = Residency.PROMOTING
DONE, CANCELLED, CORRUPT = Outcome.DONE, Outcome.CANCELLED, Outcome.CORRUPT
ANSWERS = (DONE, CORRUPT, Outcome.ABSENT)

COPY_DEADLINE_S = 10.0
"""A gather or scatter must begin within this time."""


@dataclass(slots=True, eq=False)
class InFlightTransfer:
    """One transfer in flight."""

    transfer: Transfer
    entry: HostEntry
    item: WorkItem | None = None
    """The item that is gathered for a store or scattered for a load."""
    relay_to: str = ""
    """The tier to which the object is relayed; empty if it is not relayed."""
    outcome: Outcome = Outcome.DONE
    is_fault: bool = False
    is_late: bool = False
    is_cancelled: bool = False
    """Whether a Cancel was sent. It may come too late."""
    is_blamed: bool = False
    """Whether it is a promotion past its deadline, so that the tier is not asked for the object again for a time."""
    is_doubted: bool = False
    """Whether this promotion alone made the copy suspect."""


class TransferScheduler:
    """All transfers in flight between the engine, host memory and the lower tiers."""

    def __init__(
        self,
        *,
        limits: Limits,
        host: HostMemory,
        tiers: TierStates,
        probes: Probes,
        tier_writes: TierWrites,
        operations: OpenOperations,
        estimators: dict[str, LinkEstimator],
        output: Output,
    ) -> None:
        self.flights: dict[int, InFlightTransfer] = {}
        self._limits = limits
        self._output = output
        self._host = host
        self._tiers = tiers
        self._probes = probes
        self._tier_writes = tier_writes
        self._operations = operations
        self._estimators = estimators
        self._out = {GATHER: 0, SCATTER: 0}
        self._deadlines: list[tuple[float, int]] = []
        """Heap of (time, transfer)."""

    def stop(self, work: LoadOperation | StoreOperation) -> None:
        """Stop `work`, and cancel transfers that only a stopped load needs. `work` ends after its last transfer."""
        self._operations.stop(work)
        if isinstance(work, StoreOperation):
            return
        waiters = self._operations.waiters
        unwanted = [
            flight
            for flight in self.flights.values()
            if (flight.item is not None and flight.item.work is work)
            or (flight.transfer.direction is PROMOTE and not flight.entry.is_staged and not waiters.get(flight.entry))
        ]
        self._cancel([flight for flight in unwanted if not flight.is_cancelled])

    def _cancel(self, flights: list[InFlightTransfer]) -> None:
        for flight in flights:
            flight.is_cancelled = True
        if flights:
            self._output.commands.append(Cancel(tuple(flight.transfer.id for flight in flights)))

    # ---- time ------------------------------------------------------------------------------------------------------

    def expire(self, now_s: float) -> bool:
        """Give up transfers past their deadline, and stop operations past their deadline or budget.

        Return whether anything changed.
        """
        changed = False
        while self._deadlines and self._deadlines[0][0] <= now_s:
            flight = self.flights.get(heappop(self._deadlines)[1])
            if flight is None:
                continue
            if flight.transfer.direction is PROMOTE:
                flight.is_blamed = True
                self._read_failed(flight, now_s)
            if not flight.is_late:
                self._overdue(flight, now_s)
                changed = True
        for work in self._operations.overdue(now_s):
            if isinstance(work, LoadOperation):
                work.was_cut = now_s < work.deadline_s
                if not work.has_led:
                    self._record_lead(work, self._leading_source(work), now_s)
            self.stop(work)
            changed = True
        return changed

    def next_deadline(self) -> float | None:
        """Return the time at which `expire` has work to do if nothing else happens; None if there is no deadline."""
        while self._deadlines and self._deadlines[0][1] not in self.flights:
            heappop(self._deadlines)
        ends = self._operations.deadlines()
        if self._deadlines:
            ends.append(self._deadlines[0][0])
        return min(ends, default=None)

    # ---- completions -----------------------------------------------------------------------------------------------

    def complete(self, transfer_id: int, outcome: Outcome, now_s: float, *, is_fault: bool) -> bool:
        """Handle a completion. Return whether its transfer was in flight."""
        flight = self.flights.pop(transfer_id, None)
        if flight is None:
            return False
        flight.outcome, flight.is_fault = outcome, is_fault
        direction = flight.transfer.direction
        if direction is GATHER:
            self._gathered(flight, now_s)
        elif direction is SCATTER:
            self._scattered(flight, now_s)
        elif direction is DEMOTE:
            self._demoted(flight, now_s)
        else:
            self._promoted(flight, now_s)
        if self._host.stages_only:
            if direction is DEMOTE:
                self._tier_writes.relay_missed(flight.entry)
            self._host.leave_if_written(flight.entry)
            if self._host.unkept:
                self._end_puts()
            self._tier_writes.can_wait(flight.entry)
        return True

    def _end_puts(self) -> None:
        """End the puts whose objects have reached a tier, or whose last write has ended."""
        unkept = self._host.unkept
        while unkept:
            self._operations.written(unkept.pop())

    def _gathered(self, flight: InFlightTransfer, now_s: float) -> None:
        self._out[GATHER] -= 1
        item, entry = flight.item, flight.entry
        assert item is not None
        if flight.outcome is DONE:
            self._tier_writes.mark_pending(entry, now_s)
            self._host.arrived(entry)
        else:
            self._host.failed(entry)
        self._operations.gathered(item, entry, is_stored=flight.outcome is DONE)

    def _scattered(self, flight: InFlightTransfer, now_s: float) -> None:
        self._out[SCATTER] -= 1
        self._record_transfer(HOST, flight, now_s)
        item, entry = flight.item, flight.entry
        assert item is not None
        load = item.work
        assert isinstance(load, LoadOperation)
        self._host.unpin(entry)
        if flight.outcome is DONE:
            had_led = load.has_led
            self._operations.delivered(load, item, entry, now_s)
            if not had_led:
                self._record_lead(load, item.source, now_s)
        else:
            self._operations.fail(item)

    def _promoted(self, flight: InFlightTransfer, now_s: float) -> None:
        tier_state, entry = self._tier_ended(flight, now_s)
        self._record_transfer(tier_state.name, flight, now_s)
        if tier_state.has_doubts or flight.outcome is not DONE:
            self._judge_copy(flight, tier_state, now_s)
        if flight.is_late:
            self._host.reclaim(entry)
        elif entry.is_staged:
            if flight.outcome is DONE:
                self._tier_writes.staged(entry, flight.relay_to)
            else:
                self._tier_writes.unstaged(entry, Change.FAILED)
        elif flight.outcome is DONE:
            self._host.arrived(entry)
            self._tier_writes.promoted(entry, now_s)
            self._operations.arrived(entry)
        else:
            self._host.failed(entry)
            self._operations.retry(entry, "" if flight.outcome is CANCELLED else tier_state.name, flight.outcome)

    def _tier_ended(self, flight: InFlightTransfer, now_s: float) -> tuple[TierState, HostEntry]:
        tier_state, entry = self._tiers.by_name[flight.transfer.tier], flight.entry
        is_fault = None if flight.outcome is CANCELLED else flight.is_fault
        size_bytes = self._host.object_bytes[entry.group]
        tier_state.ended(flight.transfer, size_bytes, now_s, is_late=flight.is_late, is_fault=is_fault)
        return tier_state, entry

    def _judge_copy(self, flight: InFlightTransfer, tier_state: TierState, now_s: float) -> None:
        """Record what a promotion shows about the tier's copy: absent, bad, or good."""
        entry = flight.entry
        item = (entry.key, entry.group)
        waiters = () if self._host.stages_only else self._operations.waiters.get(entry, ())
        self._judge_read(flight, tier_state, now_s)
        if flight.outcome is CORRUPT:
            self._output.counters.corrupt += 1
            self._output.commands.append(Drop(tier_state.name, entry.key, entry.group))
            if self._host.stages_only:  # the tier may report or keep the copy until the object is written again
                tier_state.mark_suspect([item])
            for waiter in waiters:
                if isinstance(waiter.work, LoadOperation):
                    tier_state.mark_suspect((item.key, item.place.group) for item in waiter.work.todo)
        if flight.outcome is CORRUPT or flight.outcome is Outcome.ABSENT:
            for waiter in waiters:  # the rest of the prefix may be lost, too
                tier_state.forget(product(waiter.work.prefix.keys, range(len(self._host.slots))))
            tier_state.remember(item, now_s, is_present=False)
            self._tier_writes.lost(item, tier_state.name)

    def _judge_read(self, flight: InFlightTransfer, tier_state: TierState, now_s: float) -> None:
        """Record whether the tier's copy can be read. If not, pause its reads."""
        item, outcome = (flight.entry.key, flight.entry.group), flight.outcome
        if outcome is DONE or outcome is CORRUPT or (flight.is_doubted and outcome is CANCELLED):
            tier_state.clear_suspect(item)  # a late read that was cancelled waited behind others and read nothing
        elif flight.is_fault and not flight.is_blamed:
            self._read_failed(flight, now_s)  # the tier has a copy that cannot be read, as on a bad block
        if flight.is_blamed and outcome is not CANCELLED:
            tier_state.late_read_ended(item, now_s)
        elif flight.is_blamed or outcome in ANSWERS:
            tier_state.read_answered(item)

    def _read_failed(self, flight: InFlightTransfer, now_s: float) -> None:
        """Pause reads of a copy after a failed or late promotion, even for requests that found the copy before."""
        item, tier_state = (flight.entry.key, flight.entry.group), self._tiers.by_name[flight.transfer.tier]
        flight.is_doubted = not tier_state.is_suspect(item)
        tier_state.read_failed(item, now_s, is_stuck=flight.is_blamed)
        self._probes.lost(item, tier_state.name)
        self._tier_writes.lost(item, tier_state.name)

    def _demoted(self, flight: InFlightTransfer, now_s: float) -> None:
        tier_state, entry = self._tier_ended(flight, now_s)
        is_done, is_fault = flight.outcome is DONE, flight.is_fault
        if is_done:
            tier_state.replaced((entry.key, entry.group))
        self._tier_writes.ended(
            entry, tier_state, now_s, is_done=is_done, is_late=flight.is_late, is_fault=is_fault and not is_done
        )

    def _record_transfer(self, source: str, flight: InFlightTransfer, now_s: float) -> None:
        size_bytes = self._host.object_bytes[flight.entry.group]
        self._estimators[source].ended(size_bytes, now_s, is_moved=flight.outcome is DONE)

    def _record_lead(self, load: LoadOperation, source: str, now_s: float) -> None:
        """Record how long `load` took to get its first usable chunk, or how long it ran without one.

        A load is recorded only if no other load was open at its start.
        """
        if load.is_alone and self._host.has_history_only and (load.has_led or load.was_cut):
            self._estimators[source].record_lead(now_s - load.begun_s, has_come=load.has_led)

    def _leading_source(self, load: LoadOperation) -> str:
        """Return the source of the first chunk that `load` still needs."""
        key = load.prefix.keys[load.run]
        entry = self._host.entry(key, 0)
        if entry is not None:
            return HOST if entry.residency in READABLE else entry.source
        return next(iter(self._probes.tiers_for(load.request, (key, 0))), HOST)

    def _overdue(self, flight: InFlightTransfer, now_s: float) -> None:
        """Let operations continue without a transfer that is overdue or given up. Its thread may still be running."""
        flight.is_late = True
        self._output.counters.late += 1
        transfer, entry = flight.transfer, flight.entry
        self._tiers.by_name[transfer.tier].overdue(transfer, now_s)
        if entry.is_staged:
            if transfer.direction is PROMOTE:
                self._tier_writes.unstaged(entry, Change.LATE)
        elif transfer.direction is PROMOTE:
            self._host.late(entry)
            self._operations.retry(entry, transfer.tier)
        else:
            self._host.stuck(entry)
            self._end_puts()
        self._cancel([flight])

    # ---- starting transfers ----------------------------------------------------------------------------------------

    def advance(self, now_s: float) -> None:
        """Start the transfers that limits and slots allow: scatters first, then promotions, gathers and demotions."""
        if self._tiers.has_stopped:
            self._give_up(now_s)
        if self._operations.scatters:
            self._advance_scatters(now_s)
        # A started transfer may unblock another operation, and a dropped write frees a slot, so repeat until neither
        # happens.
        may_start_more = True
        while may_start_more:
            loads = self._operations.loads
            is_starving, has_promoted = self._advance_loads(now_s) if loads else (False, False)
            may_gather = bool(self._operations.stores) and (not is_starving or self._host.stages_only)
            has_gathered = may_gather and self._advance_stores(now_s)
            has_dropped = self._advance_demotions(now_s)
            has_relayed = self._host.has_staging and self._advance_relays(now_s)
            # Gets are tried again after a promotion, because the queues of two tiers may name the same object, and
            # after a relay, because it may have taken a slot that a get needs.
            is_again = self._host.stages_only and (has_promoted or has_relayed)
            is_again |= has_dropped or (has_promoted and len(loads) > 1)
            may_start_more = is_again or (has_gathered and bool(loads))
        while self._operations.prefetches and self._advance_prefetches(now_s):
            pass
        if self._operations.scatters:
            self._advance_scatters(now_s)

    def _give_up(self, now_s: float) -> None:
        """Give up the promotions from tiers whose reads have stopped, so that loads and stores do not wait for them."""
        self._tiers.has_stopped = False
        for flight in list(self.flights.values()):
            tier = flight.transfer.tier
            if flight.entry.residency is PROMOTING and not self._tiers.by_name[tier].breakers[PROMOTE].is_up():
                self._overdue(flight, now_s)

    def _advance_scatters(self, now_s: float) -> None:
        queue, estimator = self._operations.scatters, self._estimators[HOST]
        for _ in range(min(len(queue), self._limits.scatters - self._out[SCATTER])):
            item = queue.popleft()
            entry = item.entry
            assert entry is not None
            self._out[SCATTER] += 1
            estimator.began(self._host.object_bytes[entry.group], now_s)
            self._send(SCATTER, entry, now_s, item=item)

    def _advance_loads(self, now_s: float) -> tuple[bool, bool]:
        """Start promotions for loads. Return whether a load lacks a slot, and whether a promotion started."""
        if self._host.stages_only:
            return False, self._advance_gets(now_s)
        is_starving = has_promoted = False
        for load in list(self._operations.loads.values()):
            while load.todo:
                item = load.todo[0]
                group = item.place.group
                entry = self._host.entry(item.key, group)
                tier_state = self._next_tier(item, now_s) if entry is None else None
                if tier_state is not None:
                    if not tier_state.has_room(PROMOTE, self._host.object_bytes[group]):
                        is_starving |= not self._host.has_room(group)
                        break
                    slot = self._tier_writes.slot_for_load(group, len(load.todo))
                    if slot is None:
                        is_starving = True
                        break
                    entry = self._promote(item, slot, tier_state, now_s)
                    has_promoted = True
                load.todo.popleft()
                if entry is None:
                    self._operations.fail(item)
                else:
                    self._operations.found(item, entry)
        return is_starving, has_promoted

    def _advance_prefetches(self, now_s: float) -> bool:
        """Promote objects of prefetches while no load wants promotions. Return whether a promotion started.

        Prefetches of the operator come first. Prefetches use up to half of a tier's limit and drop no pending writes.
        """
        if any(load.todo for load in self._operations.loads.values()):
            return False
        has_promoted = False
        for prefetch in sorted(self._operations.prefetches.values(), key=lambda it: -it.priority):
            while prefetch.todo:
                item, group = prefetch.todo[0], prefetch.todo[0].place.group
                entry = self._host.entry(item.key, group)
                tier_state = self._next_tier(item, now_s) if entry is None else None
                if tier_state is not None:
                    is_idle = 2 * tier_state.out[PROMOTE] < tier_state.limit[PROMOTE]
                    can_read = is_idle and tier_state.has_room(PROMOTE, self._host.object_bytes[group])
                    slot = self._host.take_slot(group) if can_read else None
                    if slot is None:
                        break
                    entry = self._promote(item, slot, tier_state, now_s)
                    has_promoted = True
                prefetch.todo.popleft()
                if entry is None:
                    self._operations.fail(item)
                else:
                    self._operations.found(item, entry)
            self._operations.end_if_finished(prefetch)
        return has_promoted

    def _advance_gets(self, now_s: float) -> bool:
        """Start promotions for gets, which take turns.

        Return whether a promotion started, or an object was passed on to the next tier.
        """
        loads, by_name = self._operations.loads, self._tiers.by_name
        has_promoted = False
        full: set[int] = set()
        for get in list(loads.values()):
            for tier, items in get.aside.items():
                if items and not by_name[tier].can_load():
                    get.todo.extend(items)
                    items.clear()
            while get.todo:
                item = get.todo.popleft()
                entry = self._host.entry(item.key, item.place.group)
                tier_state = self._next_tier(item, now_s) if entry is None else None
                if entry is not None:
                    self._operations.found(item, entry)
                elif tier_state is not None:
                    get.aside.setdefault(tier_state.name, deque()).append(item)
                else:
                    self._operations.fail(item)
            started = [self._promote_from(get, by_name[tier], full, now_s) for tier in get.aside]
            if any(started):
                has_promoted = True
                loads[get.request] = loads.pop(get.request)
        return has_promoted

    def _promote_from(self, get: LoadOperation, tier_state: TierState, full: set[int], now_s: float) -> bool:
        """Promote objects of a get from one tier, and add groups without a slot to `full`.

        Returns:
            Whether a promotion started, or an object was passed on to the next tier because its reads from this one are
            paused.
        """
        items, has_promoted = get.aside[tier_state.name], False
        while items:
            item, group = items[0], items[0].place.group
            entry = self._host.entry(item.key, group)
            if entry is None:
                if tier_state.is_left_alone((item.key, group), now_s):
                    get.todo.append(items.popleft())
                    has_promoted = True
                    continue
                if group in full or not tier_state.has_room(PROMOTE, self._host.object_bytes[group]):
                    break
                slot = self._tier_writes.slot_for_load(group, len(items))
                if slot is None:
                    full.add(group)
                    break
                entry = self._promote(item, slot, tier_state, now_s)
                has_promoted = True
            self._operations.found(items.popleft(), entry)
        return has_promoted

    def first_tier(self, load: LoadOperation) -> str:
        """Return the first tier to try for the next promotion of `load`, which must have one."""
        item = load.todo[0]
        return self._probes.tiers_for(load.request, (item.key, item.place.group))[0]

    def _next_tier(self, item: WorkItem, now_s: float) -> TierState | None:
        which = (item.key, item.place.group)
        for tier in self._probes.tiers_for(item.work.request, which):
            tier_state = self._tiers.by_name[tier]
            if tier in item.tried or not tier_state.can_load():
                continue
            if not (tier_state.has_doubts and tier_state.is_left_alone(which, now_s)):
                return tier_state
            item.outcome = max(item.outcome, Outcome.ABSENT, key=SEVERITY.__getitem__)
        return None

    def _promote(self, item: WorkItem, slot: int, tier_state: TierState, now_s: float) -> HostEntry:
        entry = self._new_entry(item, slot)
        entry.source = entry.origin = tier_state.name
        self._host.enter(entry, Change.PROMOTE)
        self._estimators[tier_state.name].began(self._host.object_bytes[entry.group], now_s)
        self._send(PROMOTE, entry, now_s, tier=tier_state.name)
        return entry

    def _advance_stores(self, now_s: float) -> bool:
        """Start gathers for stores. Return whether a gather started."""
        if self._host.stages_only:
            return self._advance_puts(now_s)
        has_gathered = False
        full: set[int] = set()
        for store in list(self._operations.stores):
            while store.todo:
                item = store.todo[0]
                group = item.place.group
                if group in full:
                    break  # there is no slot for an earlier store, so none for this one
                entry = self._host.entry(item.key, group)
                if entry is not None:
                    self._operations.found(self._operations.take(store), entry)
                    continue
                if self._out[GATHER] >= self._limits.stores_in_flight:
                    return has_gathered
                slot = self._tier_writes.slot_for_store(group, self._operations.wanted)
                if slot is None:
                    full.add(group)
                    break
                self._gather(item, slot, now_s)
                has_gathered = True
            if not store.todo:
                self._operations.end_if_finished(store)
            elif len(full) == len(self._host.slots):
                break
        return has_gathered

    def _advance_puts(self, now_s: float) -> bool:
        """Start gathers for puts, which take turns and wait for gets of their objects.

        Return whether a gather started.
        """
        stores = self._operations.stores
        gathered = 0
        for put in list(stores):
            passed_over, before = list[WorkItem](), gathered
            while put.todo:
                item = put.todo[0]
                entry = self._host.entry(item.key, item.place.group)
                if entry is not None and entry.is_read:
                    passed_over.append(put.todo.popleft())
                elif entry is not None:
                    self._operations.found(self._operations.take(put), entry)
                else:
                    slot = self._tier_writes.slot_for_store(item.place.group, self._operations.wanted)
                    if slot is None:
                        break
                    self._gather(item, slot, now_s)
                    gathered += 1
            put.todo.extend(passed_over)
            if not put.todo:
                self._operations.end_if_finished(put)
            elif gathered > before:  # the other puts come first next time
                del stores[put]
                stores[put] = None
        return gathered > 0

    def _gather(self, item: WorkItem, slot: int, now_s: float) -> None:
        entry = self._new_entry(item, slot)
        self._host.enter(entry, Change.GATHER)
        self._out[GATHER] += 1
        self._send(GATHER, entry, now_s, item=self._operations.take(item.work))

    def _advance_demotions(self, now_s: float) -> bool:
        """Start demotions. Return whether a pending write was dropped, which may free a slot."""
        dropped = self._output.counters.demotions_dropped
        queues = self._tier_writes.queues
        for tier_state in self._tiers.all:
            queued = queues[tier_state.name].queued
            while queued and (entry := self._tier_writes.next_write(tier_state, now_s)) is not None:
                self._demote(entry, tier_state, now_s)
        if self._host.unkept:
            self._end_puts()
        return self._output.counters.demotions_dropped > dropped

    def _demote(self, entry: HostEntry, tier_state: TierState, now_s: float) -> None:
        if tier_state.clear_suspect((entry.key, entry.group)):  # a tier does not overwrite objects
            self._output.commands.append(Drop(tier_state.name, entry.key, entry.group))
        self._send(DEMOTE, entry, now_s, tier=tier_state.name)

    def _advance_relays(self, now_s: float) -> bool:
        """Relay objects from faster tiers to slower ones. Return whether a relay started."""
        has_started = False
        is_loading = any(load.todo or any(load.aside.values()) for load in self._operations.loads.values())
        is_loading |= self._host.stages_only and self._operations.wanted > 0  # puts also wait for slots
        for tier_state in self._tiers.all:
            while (relay := self._tier_writes.next_relay(tier_state, now_s, is_loading=is_loading)) is not None:
                has_started = True
                entry, source = relay
                if source is None:
                    self._demote(entry, tier_state, now_s)
                else:
                    self._estimators[source.name].began(self._host.object_bytes[entry.group], now_s)
                    self._send(PROMOTE, entry, now_s, tier=source.name, relay_to=tier_state.name)
        return has_started

    def _new_entry(self, item: WorkItem, slot: int) -> HostEntry:
        work, (group, depth, _) = item.work, item.place
        if work.origins:
            return HostEntry(item.key, group, slot, *work.origins[depth])
        parent = work.prefix.keys[depth - 1] if depth and self._host.is_history[group] else None
        return HostEntry(item.key, group, slot, parent, depth, work.conversation)

    def _send(
        self,
        direction: Direction,
        entry: HostEntry,
        now_s: float,
        *,
        tier: str = "",
        item: WorkItem | None = None,
        relay_to: str = "",
    ) -> None:
        if item is not None:
            item.become(COPYING)
        output = self._output
        tier_state = self._tiers.by_name[tier] if tier else None
        limit_s = COPY_DEADLINE_S if tier_state is None else tier_state.rules.transfer_deadline_s
        transfer = Transfer(  # positional, because keywords take half as long again and this runs for every object
            output.new_id(),
            direction,
            entry.key,
            entry.group,
            entry.slot,
            tier,
            None if item is None else item.work.request,
            () if item is None else item.place.blocks,
            entry.parent,
            entry.depth,
            now_s + limit_s,
            entry.conversation,
            b"",
            entry.is_staged,
        )
        self.flights[transfer.id] = InFlightTransfer(transfer, entry, item, relay_to)
        if tier_state is not None:
            tier_state.began(transfer, self._host.object_bytes[entry.group])
            # Only tier transfers are given up when overdue. A device copy uses a slot and blocks until it ends.
            heappush(self._deadlines, (transfer.deadline_s, transfer.id))
        output.commands.append(transfer)

    def check(self) -> None:
        """Assert that pins and limits match the transfers in flight.

        Raises:
            AssertionError: they do not match, which is a bug in the core.
        """
        pins: dict[HostEntry, int] = {}
        writing: set[tuple[HostEntry, str]] = set()
        for item in self._operations.scatters:
            if item.entry is not None:
                pins[item.entry] = pins.get(item.entry, 0) + 1
        out = dict.fromkeys(Direction, 0)
        for flight in self.flights.values():
            direction, entry = flight.transfer.direction, flight.entry
            out[direction] += 1
            if entry.is_staged:
                assert direction is PROMOTE or entry in self._host.relayed, (
                    "a slot of the staging area is read after its end"
                )
            elif direction is SCATTER or direction is DEMOTE:
                if direction is DEMOTE:
                    assert (entry, flight.transfer.tier) not in writing, "an object is written twice at once"
                    writing.add((entry, flight.transfer.tier))
                pins[entry] = pins.get(entry, 0) + 1
                assert entry.residency in READABLE, "a slot that is not readable is read"
                assert entry.slot == flight.transfer.slot, "a slot was reused while it is read"
        for entries in self._host.entries:
            for entry in entries.values():
                assert entry.pins == pins.get(entry, 0), "pins do not match the readers"
        assert out[GATHER] == self._out[GATHER] <= self._limits.stores_in_flight, "too many gathers"
        assert out[SCATTER] == self._out[SCATTER] <= self._limits.scatters, "too many scatters"
        self._tiers.check(out)
        self._tier_writes.check(writing)
        self._operations.check({flight.item for flight in self.flights.values() if flight.item is not None})
