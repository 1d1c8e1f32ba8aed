"""Executes commands as threads would: each rank in its own time, in any order, with the faults of the seed.

A slot that is written holds garbage from the first moment to the last; what is read is what is there when it is read.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tests.sim.scenario import Outage
from tests.sim.world import Condition, Content, Copy, Item, Shelf, Use, Violation, World

from kvtier.types import Cancel, Command, Drop, Link, Outcome, Probe, Transfer

DAMAGE = (Condition.FLIPPED, Condition.TRUNCATED, Condition.OTHER_KEY)
WRITES_SLOT = (Link.GATHER, Link.PROMOTE)
CANCELLED_IN_TIME = 0.7


@dataclass(slots=True, eq=False)
class Errand:
    """One rank's share of a transfer."""

    transfer: Transfer
    rank: int
    has_begun: bool = False
    is_cancelled: bool = False
    seen: Content = 0
    copy: Copy | None = None


class Mover:
    """The threads of all ranks.

    Args:
        complete: told of each rank's answer to a transfer, and whether the tier is at fault.
        probed: told of each rank's answer to a probe.
        incident: told of whatever may cost an object: what happened, and until when.
    """

    def __init__(
        self,
        world: World,
        complete: Callable[[Transfer, int, Outcome, bool], None],
        probed: Callable[[Probe, list[bool] | None], None],
        incident: Callable[[Item, str], None],
    ) -> None:
        self._world = world
        self._faults = world.scenario.faults
        self._complete = complete
        self._probed = probed
        self._incident = incident
        self._errands: dict[int, list[Errand]] = {}
        self._dropping: set[tuple[str, Item]] = set()
        self._tier_s = dict(zip(world.scenario.tiers, world.scenario.tier_s, strict=True))

    def execute(self, commands: Iterable[Command]) -> None:
        """Begin, or plan to begin, what is ordered."""
        for command in commands:
            if isinstance(command, Transfer):
                self._errands[command.id] = [Errand(command, rank) for rank in range(self._world.scenario.ranks)]
                for errand in self._errands[command.id]:
                    self._world.later(self._delay(command) * 0.3, lambda errand=errand: self._begin(errand))
            elif isinstance(command, Probe):
                for rank in range(self._world.scenario.ranks):
                    self._ask(command, rank)
            elif isinstance(command, Cancel):
                self._cancel(command)
            elif isinstance(command, Drop):
                self._dropping.add((command.tier, (command.key, command.group)))
                delay_s = self._world.dice.uniform(0, 0.05)
                self._world.later(delay_s, lambda drop=command: self._drop(drop))

    # ---- transfers -------------------------------------------------------------------------------------------------

    def _begin(self, errand: Errand) -> None:
        if errand.is_cancelled:
            return
        transfer = errand.transfer
        if transfer.link is Link.DEMOTE and (transfer.tier, (transfer.key, transfer.group)) in self._dropping:
            self._world.later(0.001, lambda: self._begin(errand))
            return
        errand.has_begun = True
        self._claim(errand)
        duration_s = self._delay(transfer) * 0.7
        if transfer.link in WRITES_SLOT:
            self._write_slot(errand, self._world.garbage())
        if transfer.link is Link.GATHER:
            errand.seen = self._world.blocks.content[errand.rank][transfer.blocks[0]]
        elif transfer.link is Link.SCATTER:
            errand.seen = self._read_slot(errand)
            self._world.blocks.content[errand.rank][transfer.blocks[0]] = self._world.garbage()
        elif transfer.link is Link.PROMOTE:
            errand.copy = self._world.shelves[transfer.tier].copies[errand.rank].get((transfer.key, transfer.group))
        if transfer.tier:
            outage = self._outage(transfer.tier, is_read=transfer.link is Link.PROMOTE)
            if outage is not None:
                self._suffer(errand, outage)
                return
            if self._world.dice.random() < self._faults.late:
                self._incident((transfer.key, transfer.group), "late")
                duration_s += (transfer.deadline_s - self._world.now_s) * self._world.dice.uniform(1.0, 4.0)
        self._world.later(max(0.0, duration_s), lambda: self._end(errand))

    def _suffer(self, errand: Errand, outage: Outage) -> None:
        transfer = errand.transfer
        item = (transfer.key, transfer.group)
        if not outage.hangs:
            self._world.later(0.001, lambda: self._answer(errand, Outcome.FAILED, is_fault=True))
        elif self._world.is_draining:
            self._world.later(0.1, lambda: self._end(errand))
        else:
            self._incident(item, "hangs")
            self._world.parked.append(lambda: self._end(errand))

    def _end(self, errand: Errand) -> None:
        transfer = errand.transfer
        chance = {Link.PROMOTE: self._faults.read_fails, Link.DEMOTE: self._faults.write_fails}
        if self._world.dice.random() < chance.get(transfer.link, self._faults.copy_fails):
            self._answer(errand, Outcome.FAILED, is_fault=bool(transfer.tier))
        elif transfer.link is Link.PROMOTE:
            self._end_promote(errand)
        elif transfer.link is Link.DEMOTE:
            self._end_demote(errand)
        elif transfer.link is Link.GATHER:
            now = self._world.blocks.content[errand.rank][transfer.blocks[0]]
            self._write_slot(errand, self._world.dice.choice((errand.seen, now)))
            self._answer(errand, Outcome.DONE)
        else:
            now = self._read_slot(errand)
            content = self._world.dice.choice((errand.seen, now))
            self._world.blocks.content[errand.rank][transfer.blocks[0]] = content
            self._answer(errand, Outcome.DONE)

    def _end_promote(self, errand: Errand) -> None:
        transfer = errand.transfer
        shelf = self._world.shelves[transfer.tier]
        now = shelf.copies[errand.rank].get((transfer.key, transfer.group))
        copy = self._world.dice.choice((errand.copy, now))  # the file was opened at the beginning, or at the end
        if copy is None:
            self._answer(errand, Outcome.ABSENT)
        elif copy.condition is not Condition.GOOD:
            self._answer(errand, Outcome.CORRUPT)
        else:
            self._write_slot(errand, copy.content)
            self._answer(errand, Outcome.DONE)

    def _end_demote(self, errand: Errand) -> None:
        transfer = errand.transfer
        item = (transfer.key, transfer.group)
        shelf = self._world.shelves[transfer.tier]
        copies = shelf.copies[errand.rank]
        room = self._world.scenario.tier_objects
        if item in copies:
            self._answer(errand, Outcome.DONE)  # left as it is, good or bad
            return
        if room is not None and len(copies) >= room:
            if not self._world.scenario.tier_evicts:
                self._answer(errand, Outcome.FAILED)  # refused, which is no fault
                return
            victim = next(iter(copies))
            self.remove(shelf, errand.rank, victim)
        is_flipped = self._world.dice.random() < self._faults.flipped
        condition = self._world.dice.choice(DAMAGE) if is_flipped else Condition.GOOD
        if is_flipped:
            self._incident(item, "flipped")
        copies[item] = Copy(self._read_slot(errand), condition)
        self._answer(errand, Outcome.DONE)

    def _answer(self, errand: Errand, outcome: Outcome, *, is_fault: bool = False) -> None:
        transfer = errand.transfer
        if errand.has_begun:
            self._unclaim(errand)
        if outcome is not Outcome.DONE:
            self._incident((transfer.key, transfer.group), outcome.value)
        left = self._errands[transfer.id]
        left.remove(errand)
        if not left:
            del self._errands[transfer.id]
        self._complete(transfer, errand.rank, outcome, is_fault)

    def _cancel(self, cancel: Cancel) -> None:
        for number in cancel.ids:
            for errand in self._errands.get(number, ()):
                is_in_time = self._world.dice.random() < CANCELLED_IN_TIME
                if not errand.has_begun and not errand.is_cancelled and is_in_time:
                    errand.is_cancelled = True
                    self._world.later(0.0005, lambda errand=errand: self._answer(errand, Outcome.CANCELLED))

    # ---- questions and orders --------------------------------------------------------------------------------------

    def _ask(self, probe: Probe, rank: int) -> None:
        dice, faults = self._world.dice, self._faults
        low, high = self._tier_s[probe.tier]
        outage = self._outage(probe.tier, is_read=True)
        delay_s = dice.uniform(low, high)
        fails = dice.random() < faults.probe_fails
        if outage is not None and not outage.hangs:
            fails = True
        elif outage is not None and not self._world.is_draining:
            self._world.parked.append(lambda: self._probed(probe, self._contains(probe, rank)))
            return
        elif dice.random() < faults.probe_late:
            delay_s += (probe.deadline_s - self._world.now_s) * dice.uniform(0.9, 3.0)
        self._world.later(delay_s, lambda: self._probed(probe, None if fails else self._contains(probe, rank)))

    def _contains(self, probe: Probe, rank: int) -> list[bool]:
        copies = self._world.shelves[probe.tier].copies[rank]
        return [item in copies for item in probe.objects]

    def _drop(self, drop: Drop) -> None:
        shelf, item = self._world.shelves[drop.tier], (drop.key, drop.group)
        self._dropping.discard((drop.tier, item))
        for rank in range(self._world.scenario.ranks):
            self.remove(shelf, rank, item, "dropped")

    def remove(self, shelf: Shelf, rank: int, item: Item, what: str = "removed") -> None:
        """One rank's copy goes."""
        if shelf.copies[rank].pop(item, None) is not None:
            self._incident(item, what)

    def damaged(self, item: Item) -> None:
        """Somebody damaged a copy."""
        self._incident(item, "damaged")

    # ---- slots and blocks ------------------------------------------------------------------------------------------

    def _use(self, errand: Errand) -> Use:
        return self._world.uses[errand.rank][errand.transfer.group][errand.transfer.slot]

    def _claim(self, errand: Errand) -> None:
        transfer, use = errand.transfer, self._use(errand)
        if transfer.link in WRITES_SLOT:
            if use.readers or use.writers:
                raise Violation(f"{transfer.link.value} {transfer.id} writes slot {transfer.slot}, which is in use")
            use.writers += 1
        else:
            if use.writers:
                raise Violation(f"{transfer.link.value} {transfer.id} reads slot {transfer.slot}, which is written")
            use.readers += 1
        self._check_blocks(transfer)

    def _unclaim(self, errand: Errand) -> None:
        use = self._use(errand)
        if errand.transfer.link in WRITES_SLOT:
            use.writers -= 1
        else:
            use.readers -= 1
        self._check_blocks(errand.transfer)

    def _check_blocks(self, transfer: Transfer) -> None:
        for block in transfer.blocks:
            if block not in self._world.blocks.open:
                raise Violation(f"{transfer.link.value} {transfer.id} touches block {block} after its Done")

    def _read_slot(self, errand: Errand) -> Content:
        return self._world.slots[errand.rank][errand.transfer.group][errand.transfer.slot]

    def _write_slot(self, errand: Errand, content: Content) -> None:
        self._world.slots[errand.rank][errand.transfer.group][errand.transfer.slot] = content

    # ---- delays ----------------------------------------------------------------------------------------------------

    def _delay(self, transfer: Transfer) -> float:
        low, high = self._tier_s[transfer.tier] if transfer.tier else self._world.scenario.device_s
        return self._world.dice.uniform(low, high)

    def _outage(self, tier: str, *, is_read: bool) -> Outage | None:
        now_s = self._world.now_s
        for outage in self._faults.outages:
            is_now = outage.tier == tier and outage.start_s <= now_s < outage.end_s
            if is_now and not (is_read and outage.spares_reads):
                return outage
        return None
