"""Runs one seed of an object store's calls on the core. Searches, gets and puts share objects and end at any time.

The tiers, their faults and other writers are the same as in a session's seeds. A call begins, copies on command and
ends with one ObjectsDone: when every object has an outcome, at its deadline, or at an interrupt. The checks:

1. A get's memory has the right bytes where it is DONE, and nothing touches any call's memory after its end.
2. A call ends when it is released, except for copies in flight.
3. A put that is DONE is in a tier (in a persistent tier if there is one), unless something removed it meanwhile.
4. At the end every slot is free, and no direction has taken more than its share (`Cache.check`).
5. Without faults every put is DONE, and so is every get of what the tiers have.
"""

from dataclasses import dataclass, field, replace
from random import Random

from tests.sim.executor import OtherWriters, SimExecutor
from tests.sim.failed_reads import ReadRecord, is_read
from tests.sim.invariants import expect
from tests.sim.run import SeedReport, Simulation, report_of, short_pauses
from tests.sim.scenario import Mode, Scenario, draw
from tests.sim.trace import RecordKind
from tests.sim.world import Condition, Item, Violation

from kvtier.core.limits import TierRules
from kvtier.core.staging_core import ObjectCache
from kvtier.types import (
    ChunkKey,
    Command,
    Direction,
    Drop,
    Event,
    ObjectId,
    ObjectsDone,
    Origin,
    Outcome,
    Probe,
    RequestId,
    TierNotice,
    Transfer,
)

GOES_ON_AFTER_S = 30.0


@dataclass(slots=True, eq=False)
class SimCall:
    """One call until its ObjectsDone."""

    request: RequestId
    kind: str
    """``find``, ``find for put``, ``get`` or ``put``."""
    objects: list[ObjectId]
    blocks: list[int]
    began_s: float
    deadline_s: float | None
    there: set[ObjectId]
    """Objects that a tier had when the call began."""
    lost: set[Item] = field(default_factory=set[Item])
    """Objects that a tier has lost since the call began."""
    released_s: float | None = None


@dataclass(slots=True)
class ObjectCounts:
    """Counters of one run."""

    finds: int = 0
    gets: int = 0
    puts: int = 0
    got: int = 0
    kept: int = 0
    released: int = 0
    relays: int = 0


class ObjectSimulation(Simulation):
    """Simulates calls of several threads on one `ObjectCache`."""

    def __init__(self, scenario: Scenario, *, has_digest: bool = False) -> None:
        super().__init__(scenario, has_digest=has_digest)
        self.cache = ObjectCache(layout=scenario.layout, slots=scenario.slots, tiers=scenario.rules)
        self.executor = SimExecutor(self.world, self._complete, self._probed, self._incident, self._dropped)
        self.others = OtherWriters(self.world, self.executor)
        self.counts = ObjectCounts()
        self.incidents = {}
        self.calls: dict[RequestId, SimCall] = {}
        self._flights: dict[int, Transfer] = {}
        self._probes: set[int] = set()
        self._is_storm = scenario.mode is Mode.STORM
        self._dice = Random(f"objects {scenario.seed}")
        self._keys = [ChunkKey(b"%d" % number) for number in range(self._dice.choice((4, 12, 40)))]
        self._count = 0
        self._threads = 1 if scenario.mode is Mode.QUIET else self._dice.randint(1, 6)
        self._next_health_s = 0.0
        self._reads = ReadRecord()
        self._undropped: set[tuple[str, ObjectId]] = set()
        """Bad copies that could not be dropped. The core knows that."""

    def run(self) -> None:
        for tier in self.world.tiers.values():
            for key in self._keys:
                if self._dice.random() < 0.3:
                    tier.fill((key, 0), Condition.GOOD)
        for _ in range(self._threads):
            self.world.later(self._dice.uniform(0, 0.05), self._call)
        self._settle()
        while self.steps < self.scenario.steps and self._step():
            self._disturb()
        self.world.is_draining = True
        self.world.release_parked()
        self._drain()
        for call in list(self.calls.values()):
            self._release(call)
        self._flush()
        self._at_end()

    # ---- calls -----------------------------------------------------------------------------------------------------

    def _call(self) -> None:
        """Let a thread of the engine begin a call, and another call after its end."""
        if self.world.is_draining:
            return
        dice = self._dice
        start = dice.randrange(len(self._keys))
        group = dice.randrange(len(self.scenario.slots))
        objects = [ObjectId(key, group) for key in self._keys[start : start + dice.randint(1, 12)]]
        if dice.random() < 0.2:
            objects += dice.choices(objects, k=dice.randint(1, 3))
        deadline_s = self.world.now_s + dice.uniform(0.005, 1.0) if self._is_storm and dice.random() < 0.6 else None
        self._begin(dice.choice(("find", "get", "get", "find for put")), objects, deadline_s)

    def _begin(self, kind: str, objects: list[ObjectId], deadline_s: float | None) -> None:
        self._count += 1
        now_s = self.world.now_s
        request = RequestId(f"c{self._count}")
        is_put = kind == "put"
        blocks = [self.world.new_block(each if is_put else None) for each in objects]
        there = {each for each in objects if self._holders(each)}
        call = self.calls[request] = SimCall(request, kind, objects, blocks, now_s, deadline_s, there)
        self.world.note(RecordKind.ARRIVE, request, len(objects))
        self.cache.tick(now_s)
        self._settle()
        if kind == "find":
            self.counts.finds += 1
            self.cache.lookup_objects(request, objects, now_s, is_run=self._dice.random() < 0.7)
        elif kind == "find for put":
            self.cache.lookup_for_put(request, objects, now_s)
        else:
            origins = [Origin(None, number, None) for number in range(len(objects))]
            self.counts.gets += not is_put
            self.counts.puts += is_put
            (self.cache.put if is_put else self.cache.get)(request, objects, origins, now_s)
        if deadline_s is not None:
            self.world.later(max(0.0, deadline_s - now_s), lambda: self._release(call))

    def _release(self, call: SimCall) -> None:
        if self.calls.get(call.request) is call and call.released_s is None:
            self.counts.released += 1
            call.released_s = self.world.now_s
            self.world.note(RecordKind.RELEASE, call.request)
            self.cache.release(call.request, self.world.now_s)
            self._settle()
            self._check_released()

    def _done(self, done: ObjectsDone) -> None:
        call = self.calls.pop(done.request, None)
        expect(call is not None, "one ObjectsDone for each call", done)
        assert call is not None
        expect(len(done.outcomes) == len(call.objects), "an outcome for each object", done)
        for transfer in self._flights.values():
            expect(transfer.request != call.request, "no copy after the end", transfer)
        for each, block, outcome in zip(call.objects, call.blocks, done.outcomes, strict=True):
            if call.kind == "get" and outcome is Outcome.DONE:
                self.counts.got += 1
                expect(self.world.holds_right(block, each), "the bytes of the object", each)
            if call.kind == "put" and outcome is Outcome.DONE:
                self.counts.kept += 1
                expect(each in call.lost or self._holders(each), "the object of a put in a tier", each)
            self._check_calm(call, each, outcome)
            self.world.close_block(block)
        missing = [each for each, it in zip(call.objects, done.outcomes, strict=True) if it is not Outcome.DONE]
        if call.kind == "find for put" and missing and call.released_s is None:
            # The same thread puts at once what the first tier lacks, as the store does.
            self.world.later(0.0, lambda: self._begin("put", missing, call.deadline_s))
        else:
            self.world.later(self._dice.uniform(0, 0.1), self._call)

    def _check_calm(self, call: SimCall, each: ObjectId, outcome: Outcome) -> None:
        if self._is_storm or call.released_s is not None:
            return
        if call.kind == "put":
            expect(outcome is Outcome.DONE, "every put DONE without faults", (each, outcome))
        elif call.kind == "get" and outcome is not Outcome.DONE:
            expect(outcome is Outcome.ABSENT, "a miss without faults", outcome)
            expect(each not in call.there, "an object that a tier holds", each)

    def _holders(self, each: ObjectId) -> list[str]:
        """Return the tiers with a copy that is good, or not known to be bad."""
        return [
            name
            for name, tier in self.world.tiers.items()
            if tier.holds(each) or (each in tier.copies and (name, each) not in self._undropped)
        ]

    # ---- steps -----------------------------------------------------------------------------------------------------

    def _step(self) -> bool:
        next_s, deadline_s = self.world.next_s(), self.cache.next_deadline()
        if next_s is None and deadline_s in (None, float("inf")):
            return False
        self.steps += 1
        if deadline_s is not None and (next_s is None or deadline_s <= next_s):
            self.world.now_s = max(self.world.now_s, deadline_s)
            self.cache.tick(self.world.now_s)
        else:
            self.world.take()()
        if self.world.now_s >= self._next_health_s:
            self._next_health_s = self.world.now_s + 1.0
            self.cache.check_tiers(self.world.now_s)
        self._settle()
        for flight in self._flights.values():
            if is_read(flight) and self.world.now_s > flight.deadline_s:
                self._reads.is_late(flight, self.world.now_s, 0.0)
        self.cache.check()
        self._check_readable()
        self._check_released()
        if self.calls and not self._flights and not self._probes:
            raise Violation(f"calls are open and nothing is in flight: {list(self.calls)}")
        self.cache.probed(-1, None, self.world.now_s)
        more = [each for each in self._settle() if not isinstance(each, TierNotice)]
        if more and not self._is_storm:
            raise Violation(f"the core had more to do and did not: {more}")
        return True

    def _happened(self, event: Event) -> None:
        if isinstance(event, ObjectsDone):
            self._done(event)
        elif isinstance(event, TierNotice) and event.is_up and event.way == "read":
            self._reads.is_back(event.tier)

    def _ordered(self, commands: list[Command]) -> list[Command]:
        for command in commands:
            if isinstance(command, Transfer):
                self._flights[command.id] = command
                if is_read(command):
                    self._reads.begins(command, self.world.now_s)
                self.counts.relays += command.direction is Direction.PROMOTE and self._is_relay(command)
            elif isinstance(command, Probe):
                self._probes.add(command.id)
            elif isinstance(command, Drop) and self._drop_fails(command):
                dropped = ObjectId(command.key, command.group)
                self._undropped.add((command.tier, dropped))
                self.cache.dropped(command, Outcome.FAILED)
                commands = [each for each in commands if each is not command]
        return [self._with_block(command) for command in commands]

    def _drop_fails(self, drop: Drop) -> bool:
        """Whether the tier cannot remove the bad copy. A mover runs one drop of an object at a time."""
        item = ObjectId(drop.key, drop.group)
        is_there = item in self.world.tiers[drop.tier].copies and not self.executor.is_dropping(drop.tier, item)
        return self._is_storm and is_there and self._dice.random() < 0.5

    def _with_block(self, command: Command) -> Command:
        """Give a copy the block of its object, which it names by position in the call."""
        if isinstance(command, Transfer) and command.request is not None:
            return command._replace(blocks=(self.calls[command.request].blocks[command.blocks[0]],))
        return command

    def _is_relay(self, command: Transfer) -> bool:
        return any(entry.slot == command.slot and entry.group == command.group for entry in self.cache.host.relayed)

    def _disturb(self) -> None:
        faults, dice = self.scenario.faults, self.world.dice
        if faults.aborts and self.calls and dice.random() < faults.aborts * 0.2:
            self._release(dice.choice(list(self.calls.values())))
        if faults.other_writers and dice.random() < faults.other_writers:
            self.others.act()
        self.others.kill()
        self._settle()

    def _flush(self) -> None:
        """Close the store: end what is open, and finish the writes."""
        self.cache.stop(self.world.now_s)
        self._drain()
        until_s = self.world.now_s + GOES_ON_AFTER_S
        while self.cache.pending_count and self.world.now_s < until_s:
            self.world.later(0.5, lambda: self.cache.check_tiers(self.world.now_s))
            self.cache.flush(self.world.now_s)
            self._drain()

    # ---- checks ----------------------------------------------------------------------------------------------------

    def _check_readable(self) -> None:
        for group, entries in enumerate(self.cache.host.entries):
            for key in self.cache.host.readable[group]:
                if not self.world.is_in_slot(entries[key].slot, (key, group)):
                    raise Violation(f"slot {entries[key].slot} of group {group} holds something else")

    def _check_released(self) -> None:
        """Check that only copies in flight are left of a released call."""
        copying = {transfer.request for transfer in self._flights.values()}
        for call in self.calls.values():
            if call.released_s is not None:
                expect(call.request in copying, "the end of a released call", call)

    def _at_end(self) -> None:
        cache = self.cache
        expect(not self.calls, "no call open at the end", list(self.calls))
        expect(cache.in_flight == 0 and not self._flights, "nothing in flight at the end", cache.in_flight)
        for group in range(len(self.scenario.slots)):
            expect(cache.host.used(group) == 0, "every slot free at the end", cache.host.entries[group])
        expect(not cache.host.lost, "no slot lost at the end", cache.host.lost)

    # ---- answers ---------------------------------------------------------------------------------------------------

    def _complete(self, transfer: Transfer, outcome: Outcome, is_fault: bool) -> None:
        del self._flights[transfer.id]
        if is_read(transfer):
            self._reads.read(transfer, outcome, self.world.now_s, is_fault=is_fault)
        elif transfer.direction is Direction.DEMOTE and outcome is Outcome.DONE:
            self._reads.written((transfer.tier, (transfer.key, transfer.group)), is_doubted=True)
        if transfer.direction is Direction.PROMOTE and outcome is Outcome.DONE:  # the copy is good, or was just now
            self._undropped.discard((transfer.tier, ObjectId(transfer.key, transfer.group)))
        self.world.note(RecordKind.ANSWER, transfer.id, outcome, is_fault)
        self.cache.complete(transfer.id, outcome, self.world.now_s, is_fault=is_fault)

    def _probed(self, probe: Probe, present: list[bool] | None) -> None:
        self._probes.discard(probe.id)
        self.world.note(RecordKind.PROBE_ANSWER, probe.id, present)
        self.cache.probed(probe.id, present, self.world.now_s)

    def _dropped(self, drop: Drop) -> None:
        self.cache.dropped(drop, Outcome.DONE)

    def _incident(self, item: Item, what: str) -> None:
        self.incidents[what] = self.incidents.get(what, 0) + 1
        for call in self.calls.values():
            call.lost.add(item)
        if what in {"removed", "dropped"}:
            self._undropped -= {(tier, ObjectId(*item)) for tier in self.world.tiers}


def run(seed: int, steps: int | None = None, *, has_digest: bool = False, **overrides: object) -> SeedReport:
    """Run one seed. Every failure ends in the report, as in `tests.sim.run.run`."""
    scenario = _scenario(seed, steps, **overrides)
    with short_pauses(scenario):
        return report_of(ObjectSimulation(scenario, has_digest=has_digest))


def _scenario(seed: int, steps: int | None, **overrides: object) -> Scenario:
    """Draw the scenario of `seed`, with at least one tier, and without a cap where nothing may be lost."""
    scenario = draw(seed, steps, **overrides)
    if not scenario.rules:
        scenario = replace(scenario, rules=(TierRules(name="disk"),), tier_s=((0.001, 0.02),))
    return scenario
