"""Executes commands in any order with the faults of the seed, and simulates other writers.

A slot has garbage from the start to the end of a write. A read returns the content at the time of the read.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf
from random import Random
from types import SimpleNamespace
from typing import Any

from tests.sim.scenario import Mode, Outage
from tests.sim.world import Condition, Content, Item, RankMemory, SimTier, SlotUse, StoredCopy, Violation, World

from kvtier.layout import ELSEWHERE
from kvtier.runtime.command_runner import CommandRunner
from kvtier.runtime.executor import Completion, Work
from kvtier.runtime.rank_group import RankGroup
from kvtier.types import Cancel, ChunkKey, Command, Direction, Drop, Outcome, Probe, Tell, Transfer

DAMAGE = (Condition.FLIPPED, Condition.TRUNCATED, Condition.OTHER_KEY)
WRITES_SLOT = (Direction.GATHER, Direction.PROMOTE)
CANCELLED_IN_TIME = 0.7


@dataclass(slots=True, eq=False)
class RunningTransfer:
    """One transfer from its command to its answer."""

    transfer: Transfer
    has_begun: bool = False
    is_cancelled: bool = False
    seen: Content = 0
    copy: StoredCopy | None = None


class SimExecutor:
    """Simulates the executor's threads of one rank.

    Args:
        memory: memory of the rank.
        complete: called with the outcome of each transfer, and whether the tier is at fault.
        probed: called with the answer to each probe.
        incident: called with each fault that may lose an object.
        dropped: called when a drop is done.
    """

    def __init__(
        self,
        world: World,
        complete: Callable[[Transfer, Outcome, bool], None],
        probed: Callable[[Probe, list[bool] | None], None],
        incident: Callable[[Item, str], None],
        dropped: Callable[[Drop], None] = lambda _drop: None,
        memory: RankMemory | None = None,
    ) -> None:
        self._world = world
        self._memory = memory or world.ranks[0]
        self._dropped = dropped
        self._faults = self._memory.traits.faults
        self._complete = complete
        self._probed = probed
        self._incident = incident
        self._tasks: dict[int, RunningTransfer] = {}
        self._dropping: set[tuple[str, Item]] = set()
        self._tier_s = dict(zip(world.scenario.tiers, world.scenario.tier_s, strict=True))

    def execute(self, commands: Iterable[Command]) -> None:
        """Schedule commands."""
        for command in commands:
            if isinstance(command, Transfer):
                task = self._tasks[command.id] = RunningTransfer(command)
                self._world.later(self._delay(command) * 0.3, lambda task=task: self._begin(task))
            elif isinstance(command, Probe):
                self._probe(command)
            elif isinstance(command, Cancel):
                self._cancel(command)
            elif isinstance(command, Drop):
                self._dropping.add((command.tier, (command.key, command.group)))
                delay_s = self._world.dice.uniform(0, 0.05)
                self._world.later(delay_s, lambda drop=command: self._drop(drop))

    # ---- transfers -------------------------------------------------------------------------------------------------

    def _begin(self, task: RunningTransfer) -> None:
        if task.is_cancelled:
            return
        transfer = task.transfer
        if transfer.group in self._memory.traits.lacks:
            raise Violation(f"{transfer.direction.value} {transfer.id} on a rank that lacks group {transfer.group}")
        if transfer.direction is Direction.DEMOTE and (transfer.tier, (transfer.key, transfer.group)) in self._dropping:
            self._world.later(0.001, lambda: self._begin(task))
            return
        task.has_begun = True
        self._claim(task)
        duration_s = self._delay(transfer) * 0.7
        if transfer.direction in WRITES_SLOT:
            self._write_slot(task, self._world.garbage())
        if transfer.direction is Direction.GATHER:
            task.seen = self._memory.blocks[transfer.blocks[0]]
        elif transfer.direction is Direction.SCATTER:
            task.seen = self._read_slot(task)
            self._memory.blocks[transfer.blocks[0]] = self._world.garbage()
        elif transfer.direction is Direction.PROMOTE:
            task.copy = self._memory.tiers[transfer.tier].copies.get((transfer.key, transfer.group))
        if transfer.tier:
            outage = self._outage(transfer.tier, is_read=transfer.direction is Direction.PROMOTE)
            if task.copy is not None and task.copy.death is not None:
                outage = task.copy.death
            if outage is not None:
                self._fail_or_hang(task, outage)
                return
            if self._world.dice.random() < self._faults.late:
                self._incident((transfer.key, transfer.group), "late")
                duration_s += (transfer.deadline_s - self._world.now_s) * self._world.dice.uniform(1.0, 4.0)
        self._world.later(max(0.0, duration_s), lambda: self._end(task))

    def _fail_or_hang(self, task: RunningTransfer, outage: Outage) -> None:
        transfer = task.transfer
        item = (transfer.key, transfer.group)
        if not outage.hangs:
            self._world.later(0.001, lambda: self._answer(task, Outcome.FAILED, is_fault=True))
        elif self._world.is_draining:
            self._world.later(0.1, lambda: self._end(task))
        else:
            self._incident(item, "hangs")
            self._world.parked.append(lambda: self._end(task))

    def _end(self, task: RunningTransfer) -> None:
        transfer = task.transfer
        chance = {Direction.PROMOTE: self._faults.read_fails, Direction.DEMOTE: self._faults.write_fails}
        if self._world.dice.random() < chance.get(transfer.direction, self._faults.copy_fails):
            self._answer(task, Outcome.FAILED, is_fault=bool(transfer.tier))
        elif transfer.direction is Direction.PROMOTE:
            self._end_promote(task)
        elif transfer.direction is Direction.DEMOTE:
            self._end_demote(task)
        elif transfer.direction is Direction.GATHER:
            now = self._memory.blocks[transfer.blocks[0]]
            self._write_slot(task, self._world.dice.choice((task.seen, now)))
            self._answer(task, Outcome.DONE)
        else:
            now = self._read_slot(task)
            content = self._world.dice.choice((task.seen, now))
            self._memory.blocks[transfer.blocks[0]] = content
            self._answer(task, Outcome.DONE)

    def _end_promote(self, task: RunningTransfer) -> None:
        transfer = task.transfer
        tier = self._memory.tiers[transfer.tier]
        now = tier.copies.get((transfer.key, transfer.group))
        copy = self._world.dice.choice((task.copy, now))  # the file was opened at the start or at the end
        if copy is None:
            self._answer(task, Outcome.ABSENT)
        elif copy.condition is not Condition.GOOD:
            self._answer(task, Outcome.CORRUPT)
        else:
            self._write_slot(task, copy.content)
            self._answer(task, Outcome.DONE)

    def _end_demote(self, task: RunningTransfer) -> None:
        transfer = task.transfer
        item = (transfer.key, transfer.group)
        tier = self._memory.tiers[transfer.tier]
        copies = tier.copies
        room = self._world.scenario.tier_objects
        if item in copies:
            self._answer(task, Outcome.DONE)  # an existing copy stays, whether good or bad
            return
        if room is not None and len(copies) >= room / self._memory.traits.share:
            if not self._world.scenario.tier_evicts:
                self._answer(task, Outcome.FAILED)  # a refusal is no fault
                return
            victim = next(iter(copies))
            self.remove(tier, victim)
        is_flipped = self._world.dice.random() < self._faults.flipped
        condition = self._world.dice.choice(DAMAGE) if is_flipped else Condition.GOOD
        if is_flipped:
            self._incident(item, "flipped")
        copies[item] = StoredCopy(self._read_slot(task), condition)
        self._answer(task, Outcome.DONE)

    def _answer(self, task: RunningTransfer, outcome: Outcome, *, is_fault: bool = False) -> None:
        transfer = task.transfer
        if task.has_begun:
            self._unclaim(task)
        if outcome is not Outcome.DONE:
            self._incident((transfer.key, transfer.group), outcome.value)
        del self._tasks[transfer.id]
        self._complete(transfer, outcome, is_fault)

    def _cancel(self, cancel: Cancel) -> None:
        for number in cancel.ids:
            task = self._tasks.get(number)
            if task is None:
                continue
            is_in_time = self._world.dice.random() < CANCELLED_IN_TIME
            if not task.has_begun and not task.is_cancelled and is_in_time:
                task.is_cancelled = True
                self._world.later(0.0005, lambda task=task: self._answer(task, Outcome.CANCELLED))

    # ---- probes and drops ---------------------------------------------------------------------------------------

    def _probe(self, probe: Probe) -> None:
        dice, faults = self._world.dice, self._faults
        low, high = self._tier_s[probe.tier]
        outage = self._outage(probe.tier, is_read=True)
        delay_s = dice.uniform(low, high) * self._memory.traits.pace
        fails = dice.random() < faults.probe_fails
        if outage is not None and not outage.hangs:
            fails = True
        elif outage is not None and not self._world.is_draining:
            self._world.parked.append(lambda: self._probed(probe, self._contains(probe)))
            return
        elif dice.random() < faults.probe_late:
            delay_s += (probe.deadline_s - self._world.now_s) * dice.uniform(0.9, 3.0)
        self._world.later(delay_s, lambda: self._probed(probe, None if fails else self._contains(probe)))

    def _contains(self, probe: Probe) -> list[bool]:
        copies = self._memory.tiers[probe.tier].copies
        return [item in copies for item in probe.objects]

    def _drop(self, drop: Drop) -> None:
        tier, item = self._memory.tiers[drop.tier], (drop.key, drop.group)
        self._dropping.discard((drop.tier, item))
        self.remove(tier, item, "dropped")
        self._dropped(drop)

    def remove(self, tier: SimTier, item: Item, what: str = "removed") -> None:
        """Remove a copy."""
        if tier.copies.pop(item, None) is not None:
            self._incident(item, what)

    def damaged(self, item: Item) -> None:
        """Record that a copy was damaged."""
        self._incident(item, "damaged")

    def is_dropping(self, tier: str, item: Item) -> bool:
        """Whether a drop of the object is pending."""
        return (tier, item) in self._dropping

    # ---- slots and blocks ------------------------------------------------------------------------------------------

    def _use(self, task: RunningTransfer) -> SlotUse:
        return self._memory.uses[task.transfer.group][task.transfer.slot]

    def _claim(self, task: RunningTransfer) -> None:
        transfer, use = task.transfer, self._use(task)
        if transfer.direction in WRITES_SLOT:
            if use.readers or use.writers:
                raise Violation(
                    f"{transfer.direction.value} {transfer.id} writes slot {transfer.slot}, which is in use"
                )
            use.writers += 1
        else:
            if use.writers:
                raise Violation(
                    f"{transfer.direction.value} {transfer.id} reads slot {transfer.slot}, which is written"
                )
            use.readers += 1
        self._check_blocks(transfer)

    def _unclaim(self, task: RunningTransfer) -> None:
        use = self._use(task)
        if task.transfer.direction in WRITES_SLOT:
            use.writers -= 1
        else:
            use.readers -= 1
        self._check_blocks(task.transfer)

    def _check_blocks(self, transfer: Transfer) -> None:
        for block in transfer.blocks:
            if block not in self._world.open_blocks:
                raise Violation(f"{transfer.direction.value} {transfer.id} touches block {block} after the end")

    def _read_slot(self, task: RunningTransfer) -> Content:
        return self._memory.slots[task.transfer.group][task.transfer.slot]

    def _write_slot(self, task: RunningTransfer, content: Content) -> None:
        self._memory.slots[task.transfer.group][task.transfer.slot] = content

    # ---- delays ----------------------------------------------------------------------------------------------------

    def _delay(self, transfer: Transfer) -> float:
        low, high = self._tier_s[transfer.tier] if transfer.tier else self._world.scenario.device_s
        return self._world.dice.uniform(low, high) * self._memory.traits.pace

    def _outage(self, tier: str, *, is_read: bool) -> Outage | None:
        now_s = self._world.now_s
        for outage in self._faults.outages:
            is_now = outage.tier == tier and outage.start_s <= now_s < outage.end_s
            if is_now and not (is_read and outage.spares_reads):
                return outage
        return None


class _SimRank(SimExecutor):
    """One of several ranks, as an `Executor`. The real `CommandRunner` decides what another rank does for this one."""

    lost = ""

    def __init__(self, world: World, memory: RankMemory, incident: Callable[[Item, str], None]) -> None:
        def answered(command: Work, outcome: Outcome, *, is_fault: bool = False, present: Iterable[bool] = ()) -> None:
            self._put(Completion(command, outcome, tuple(present), is_tier_fault=is_fault))
            self._ready()

        super().__init__(
            world,
            lambda transfer, outcome, is_fault: answered(transfer, outcome, is_fault=is_fault),
            lambda probe, present: answered(
                probe,
                Outcome.FAILED if present is None else Outcome.DONE,
                is_fault=present is None,
                present=present or (),
            ),
            incident,
            lambda drop: answered(drop, Outcome.DONE),
            memory,
        )
        layout, traits = world.scenario.layout, memory.traits
        copies = [
            ELSEWHERE if it in traits.lacks else int(traits.filled_by is not None) for it in range(len(layout.groups))
        ]
        stand_in: Any = SimpleNamespace(filled_elsewhere={group for group, copy in enumerate(copies) if copy})
        self._runner = CommandRunner(
            layout=layout.with_parts((None, copy) for copy in copies),
            model=b"",
            arena=stand_in,
            copier=stand_in,
            tiers=dict.fromkeys(world.scenario.tiers, stand_in),
            common={rules.name for rules in world.scenario.rules if rules.is_remote},
            forms={},
            clock=lambda: world.now_s,
        )

    def complete_to(self, put: Callable[[Completion], None], ready: Callable[[], None]) -> None:
        """Set where completions go."""
        self._put, self._ready = put, ready

    def submit(self, *commands: Command) -> None:
        """Run commands. A tier's hints are done at once, and what another rank does for this one is done soon.

        So is a second drop of an object. `Mover` refuses it, because one is enough.
        """
        for command in commands:
            is_second = isinstance(command, Drop) and self.is_dropping(command.tier, (command.key, command.group))
            if isinstance(command, Tell) or is_second:
                self._done(command)
            elif isinstance(command, Probe):
                self._asked(command)
            elif not isinstance(command, Cancel) and self._runner._is_elsewhere(command):
                self._done_soon(command)
            else:
                self.execute([command])

    def _asked(self, probe: Probe) -> None:
        asked: list[Probe] = []
        present = self._answer_to(probe, lambda own: asked.append(own) or [True] * len(own.objects))
        if asked:
            self.execute([probe])
        else:
            self._done_soon(probe, present)

    def _contains(self, probe: Probe) -> list[bool]:
        """Look up names. In a common store a rank finds what another has written of a group that it lacks."""

        def found(own: Probe) -> list[bool]:
            holders = [self._world.holders(group) for _, group in own.objects]
            stores = [(self._memory if self._memory in them else them[0]).tiers[own.tier] for them in holders]
            return [item in store.copies for item, store in zip(own.objects, stores, strict=True)]

        return self._answer_to(probe, found)

    def _answer_to(self, probe: Probe, look: Callable[[Probe], list[bool]]) -> list[bool]:
        """Return what the real rank answers. It calls `look` for the names that it looks up itself, if any."""
        runner: Any = self._runner
        runner._probe = lambda _tier, own: look(own)
        return list(runner._ask(SimpleNamespace(), probe).present)

    def _done_soon(self, command: Command, present: Iterable[bool] = ()) -> None:
        self._world.later(self._world.dice.uniform(0, 0.001), lambda: self._done(command, present))

    def _done(self, command: Any, present: Iterable[bool] = ()) -> None:
        self._put(Completion(command, Outcome.DONE, tuple(present)))
        self._ready()


class RankedExecutor:
    """The real `RankGroup` over simulated ranks. It takes the arguments of `SimExecutor`."""

    def __init__(
        self,
        world: World,
        complete: Callable[[Transfer, Outcome, bool], None],
        probed: Callable[[Probe, list[bool] | None], None],
        incident: Callable[[Item, str], None],
    ) -> None:
        self._complete, self._probed, self._incident = complete, probed, incident
        self._done: list[Completion] = []
        ranks: Any = [_SimRank(world, memory, incident) for memory in world.ranks]
        self._group = RankGroup(ranks, {rules.name for rules in world.scenario.rules if rules.is_remote})
        self._group.complete_to(self._done.append, self._deliver)

    def execute(self, commands: Iterable[Command]) -> None:
        """Schedule commands on every rank."""
        self._group.submit(*commands)

    def remove(self, tier: SimTier, item: Item, what: str = "removed") -> None:
        """Remove a copy of one rank."""
        if tier.copies.pop(item, None) is not None:
            self._incident(item, what)

    def damaged(self, item: Item) -> None:
        """Record that a copy of one rank was damaged."""
        self._incident(item, "damaged")

    def _deliver(self) -> None:
        done, self._done[:] = self._done[:], []
        for completion in done:
            command, outcome = completion.command, completion.outcome
            if isinstance(command, Transfer):
                if outcome is not Outcome.DONE:  # one rank may have failed earlier, and a slower one answers now
                    self._incident((command.key, command.group), "of a slower rank")
                self._complete(command, outcome, completion.is_tier_fault)
            elif isinstance(command, Probe):
                self._probed(command, list(completion.present) if outcome is Outcome.DONE else None)


class OtherWriters:
    """Simulates other processes that add, remove and damage objects unknown to the core, and copies that die.

    Each act concerns the tier of one rank.
    """

    def __init__(self, world: World, executor: "SimExecutor | RankedExecutor") -> None:
        self._world = world
        self._executor = executor
        self._deaths = Random(f"deaths {world.scenario.seed}")

    def kill(self) -> None:
        """Let a copy die with the seed's chance."""
        dice, scenario = self._deaths, self._world.scenario
        if scenario.mode is Mode.STORM and self._world.tiers and dice.random() < scenario.deaths:
            tier = dice.choice(list(self._memory(dice).tiers.values()))
            alive = [item for item in tier.copies if tier.holds(item)]
            if alive:
                item = dice.choice(alive)
                tier.copies[item].death = Outage(tier.name, 0.0, inf, hangs=dice.random() < 0.3)
                self._executor.damaged(item)

    def act(self) -> None:
        """Change one tier once."""
        dice = self._world.dice
        if not self._world.tiers:
            return
        tier = dice.choice(list(self._memory(dice).tiers.values()))
        act = dice.choice((self._add, self._remove, self._damage))
        act(tier)

    def _memory(self, dice: Random) -> RankMemory:
        ranks = self._world.ranks
        return ranks[0] if len(ranks) == 1 else dice.choice(ranks)

    def _add(self, tier: SimTier) -> None:
        scenario, dice = self._world.scenario, self._world.dice
        depth = dice.randint(1, scenario.chunks_max)
        key = ChunkKey(b"".join(b"%d" % dice.randrange(scenario.branches) for _ in range(depth)))
        group = dice.choice([group for group in range(len(scenario.slots)) if group not in tier.lacks])
        tier.copies[key, group] = StoredCopy((key, group))

    def _remove(self, tier: SimTier) -> None:
        if tier.copies:
            self._executor.remove(tier, self._world.dice.choice(list(tier.copies)))

    def _damage(self, tier: SimTier) -> None:
        sound = [item for item, copy in tier.copies.items() if copy.condition is Condition.GOOD]
        if sound:
            item = self._world.dice.choice(sound)
            tier.copies[item] = StoredCopy(0, self._world.dice.choice(DAMAGE))
            self._executor.damaged(item)
