"""Runs one seed, from the first request to the last answer."""

import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any
from unittest.mock import patch

from tests.sim.engine import SimEngine
from tests.sim.event_log import TICK_LATENESS_S_MAX, EventLog
from tests.sim.executor import OtherWriters, RankedExecutor, SimExecutor
from tests.sim.invariants import Counts, Invariants
from tests.sim.scenario import Mode, Scenario, draw
from tests.sim.trace import RecordKind, RunTrace
from tests.sim.world import Violation, World

from kvtier.core import operations, tier_searches, tier_state
from kvtier.core.cache import Cache
from kvtier.core.staging_core import ObjectCache
from kvtier.core.survey import Survey
from kvtier.policy.base import Evictor, Hinted, Use
from kvtier.policy.registry import make_evictor
from kvtier.types import Command, Event, LoadDone, NextTurn, Outcome, Probe, TierNotice, Transfer

POLL_S = 0.002
"""Answers within this time may reach the core together."""
STEPS_MAX_FACTOR = 60
"""A run that takes this many times its steps to drain has stalled. Each rank has steps of its own."""


@dataclass(frozen=True, slots=True)
class SeedReport:
    """Result of one seed."""

    seed: int
    steps: int
    digest: str
    """Digest of the trace, if requested. Equal runs have equal digests in any process."""
    failure: str | None
    """The broken invariant, or None."""
    where: str = ""
    """Stack trace of the failure."""
    trace: tuple[str, ...] = ()
    """Last lines of the trace of a failed run."""
    counts: Any = field(default_factory=Counts)
    """Counters: `Counts`, or `ObjectCounts` for object stores."""
    incidents: dict[str, int] = field(default_factory=dict[str, int])

    @property
    def is_good(self) -> bool:
        """Whether all invariants held."""
        return self.failure is None


def run(seed: int, steps: int | None = None, *, has_digest: bool = False, **overrides: object) -> SeedReport:
    """Run one seed. Every failure ends in the report, never in an exception.

    Args:
        seed: draws everything.
        steps: number of steps after which no new request arrives. None: drawn.
        has_digest: compute the digest of the trace, which is slower.
        overrides: fields of `Scenario` that replace the drawn ones.

    Raises:
        TypeError: an override is not a field of `Scenario`.
    """
    scenario = draw(seed, steps, **overrides)
    simulation = _Simulation(scenario, has_digest=has_digest)
    with (
        patch.object(operations, "WAITING_MAX", scenario.waiting),
        patch.object(tier_searches, "REQUESTS_MAX", scenario.requests),
        short_pauses(scenario),
    ):
        return report_of(simulation)


@contextmanager
def short_pauses(scenario: Scenario) -> Iterator[None]:
    """Shorten pauses after failed reads if copies die, so that a run may have several."""
    least_s = Random(f"pauses {scenario.seed}").choice((0.05, 0.3, 5.0)) if scenario.deaths else tier_state.PAUSE_S_MIN
    with (
        patch.object(tier_state, "PAUSE_S_MIN", least_s),
        patch.object(tier_state, "PAUSE_S_MAX", min(16 * least_s, tier_state.PAUSE_S_MAX)),
    ):
        yield


class _ObservedEvictor:
    """An evictor that logs evictions and hints."""

    def __init__(self, inner: Evictor, group: int, log: EventLog) -> None:
        self._inner = inner
        self._group = group
        self._log = log

    def added(self, use: Use) -> None:
        self._inner.added(use)

    def touched(self, use: Use) -> None:
        self._inner.touched(use)

    def removed(self, name: bytes) -> None:
        self._log.evicted(name, self._group)
        self._inner.removed(name)

    def expects(self, conversation: str, next_turn: NextTurn | None) -> None:
        if not self._group:
            self._log.hint_to_host(conversation, next_turn)
        if isinstance(self._inner, Hinted):
            self._inner.expects(conversation, next_turn)

    def victim(self, is_pinned: Callable[[bytes], bool]) -> bytes | None:
        return self._inner.victim(is_pinned)


class _RandomEvictor:
    """Evicts at random, because correctness must not depend on a policy."""

    def __init__(self, dice: Random) -> None:
        self._dice = dice
        self._names: dict[bytes, None] = {}

    def added(self, use: Use) -> None:
        self._names[use.name] = None

    def touched(self, use: Use) -> None:
        """Ignore the use."""

    def removed(self, name: bytes) -> None:
        self._names.pop(name, None)

    def victim(self, is_pinned: Callable[[bytes], bool]) -> bytes | None:
        free = [name for name in self._names if not is_pinned(name)]
        return self._dice.choice(free) if free else None


class Simulation(ABC):
    """A world with the real core in it. A subclass makes the calls of an engine and checks the answers.

    Args:
        scenario: scenario of the seed.
        has_digest: compute the digest of the trace.
    """

    cache: Cache | ObjectCache
    executor: SimExecutor | RankedExecutor
    counts: Any
    incidents: dict[str, int]

    def __init__(self, scenario: Scenario, *, has_digest: bool = False) -> None:
        self.scenario = scenario
        self.world = World(scenario, RunTrace(has_digest=has_digest))
        self.steps = 0

    @abstractmethod
    def run(self) -> None:
        """Run the seed.

        Raises:
            Violation: the core broke a promise.
            AssertionError: its own checks failed.
        """

    @abstractmethod
    def _step(self) -> bool:
        """Process the next event or deadline. Return whether there was one."""

    @abstractmethod
    def _happened(self, event: Event) -> None:
        """Pass an event of the core on."""

    @abstractmethod
    def _ordered(self, commands: list[Command]) -> list[Command]:
        """Note the core's commands. Return those that the executor gets."""

    def _drain(self) -> None:
        while self._step():
            if self.steps > self.scenario.steps * STEPS_MAX_FACTOR * len(self.world.ranks):
                raise Violation("the run does not drain")

    def _settle(self) -> list[Command | Event]:
        """Deliver commands and events until there are none. Return them."""
        self.cache.advance(self.world.now_s)
        handed_over: list[Command | Event] = []
        while True:
            commands, events = self.cache.take_commands(), self.cache.take_events()
            if not commands and not events:
                return handed_over
            handed_over += [*commands, *events]
            for event in events:
                self.world.trace.event(self.world.now_s, event)
                self._happened(event)
            for command in commands:
                self.world.trace.event(self.world.now_s, command)
            self.executor.execute(self._ordered(commands))


def report_of(simulation: Simulation) -> SeedReport:
    """Run a simulation. Every failure ends in the report."""
    failure, where = None, ""
    try:
        simulation.run()
    except Exception as error:  # noqa: BLE001  reported with its seed, which is what a simulator is for
        failure, where = f"{type(error).__name__}: {error}", traceback.format_exc()
    trace = simulation.world.trace
    return SeedReport(
        simulation.scenario.seed,
        simulation.steps,
        trace.digest(),
        failure,
        where,
        trace.lines() if failure else (),
        simulation.counts,
        dict(simulation.incidents),
    )


class _Simulation(Simulation):
    def __init__(self, scenario: Scenario, *, has_digest: bool) -> None:
        super().__init__(scenario, has_digest=has_digest)
        self.log = EventLog(self.world)
        self.incidents = self.log.incident_counts
        self._groups_made = 0
        self.cache = Cache(
            layout=scenario.layout,
            slots=scenario.slots,
            tiers=scenario.rules,
            evictor=self._make_evictor,
            limits=scenario.limits,
        )
        self.log.cache = self.cache
        self.invariants = Invariants(self.world, self.cache, self.log)
        self.counts = self.invariants.counts
        self.engine = SimEngine(self.world, self.cache, self.invariants, self._settle, self.log.expected)
        self.invariants.begin()
        made = SimExecutor if len(self.world.ranks) == 1 else RankedExecutor
        self.executor = made(self.world, self._complete, self._probed, self.log.incident)
        self.others = OtherWriters(self.world, self.executor)
        self._polls = Random(f"polls {scenario.seed}")
        self._late_share = self._polls.choice((0.0, 0.0, 0.5, 0.9))
        self._operators = Random(f"operators {scenario.seed}")
        self._surveys = list[Survey]()
        self._is_answer = False
        self._tick_lateness_s = (
            0.0 if self.world.dice.random() < 0.5 else self.world.dice.uniform(0, TICK_LATENESS_S_MAX)
        )

    def run(self) -> None:
        self.world.later(0.0, self.engine.arrive)
        while self.steps < self.scenario.steps and self._step():
            self._disturb()
        self.world.note(RecordKind.DRAIN)
        self.world.is_draining = True
        if self.scenario.mode is Mode.STORM:
            self.engine.end_all()
        self.cache.flush(self.world.now_s)
        self.world.release_parked()
        self._settle()
        self._drain()
        self.engine.end_all()
        self._settle()
        self._drain()
        self.invariants.at_end()
        self.log.at_end()

    def _step(self) -> bool:
        """Process the next event or deadline. Return whether there was one."""
        next_s, deadline_s = self.world.next_s(), self.cache.next_deadline()
        if deadline_s is not None:
            deadline_s = max(self.world.now_s, deadline_s + self._tick_lateness_s)
        if next_s is None and deadline_s is None:
            return False
        self.steps += 1
        if deadline_s is not None and (next_s is None or deadline_s <= next_s):
            self.world.now_s = deadline_s
            self.world.note(RecordKind.TICK)
            self.cache.tick(deadline_s)
            again_s = self.cache.next_deadline()
            if again_s is not None and again_s <= deadline_s:
                raise Violation(f"a deadline at {again_s} does not pass at {deadline_s}")
        else:
            self._happens()
            while self._comes_together(deadline_s):
                self._happens()
        self._settle()
        self.invariants.after_step(is_waiting=self.engine.is_waiting)
        # An unknown answer makes the core advance again. It must have nothing left to do, except to stop using a tier
        # for which this probe would have been the trial.
        self.cache.probed(-1, None, self.world.now_s)
        more = self._settle()
        if more and not self.log.down:
            raise Violation(f"the core had more to do and did not: {more}")
        return True

    def _happens(self) -> None:
        self._is_answer = False
        self.world.take()()

    def _comes_together(self, deadline_s: float | None) -> bool:
        """Whether the last answer and the next event reach the core together, as with polling.

        Only answers wait. Calls of the engine are passed on at once.
        """
        next_s = self.world.next_s()
        if (
            not self._is_answer
            or next_s is None
            or next_s > self.world.now_s + POLL_S
            or (deadline_s is not None and deadline_s <= next_s)
        ):
            return False
        return self._polls.random() < self._late_share

    def _happened(self, event: Event) -> None:
        if isinstance(event, TierNotice):
            self.log.notice(event)
        elif isinstance(event, LoadDone):
            self.engine.load_done(event)
        else:
            self.engine.store_done(event)

    def _ordered(self, commands: list[Command]) -> list[Command]:
        for command in commands:
            self.log.ordered(command, self.engine.jobs)
        return commands

    def _disturb(self) -> None:
        faults, dice = self.scenario.faults, self.world.dice
        if faults.aborts and dice.random() < faults.aborts * 0.2:
            self.engine.abort_some()
        if faults.other_writers and dice.random() < faults.other_writers:
            self.others.act()
        self.others.kill()
        if self._operators.random() < self.scenario.operators:
            self._operate()
        self._settle()

    def _operate(self) -> None:
        """Survey a prompt or clear host memory, and check each complete survey."""
        dice, now_s = self._operators, self.world.now_s
        for survey in [it for it in self._surveys if not it.unasked]:
            self._surveys.remove(survey)
            if survey.tokens % survey.prefix.chunk_tokens or set(survey.found) != set(self.scenario.tiers):
                raise Violation(f"a survey found {survey.tokens} tokens in {sorted(survey.found)}")
        if dice.random() < 0.3:
            removed, kept = self.cache.clear(now_s)
            if kept != sum(map(len, self.cache.host.entries)):
                raise Violation(f"clearing removed {removed} and says that {kept} are left")
        elif self.engine.jobs:
            job = dice.choice(list(self.engine.jobs.values()))
            self._surveys.append(self.cache.survey(job.prefix, now_s))
            if dice.random() < 0.3:
                self._surveys.pop().stop()

    def _complete(self, transfer: Transfer, outcome: Outcome, is_fault: bool) -> None:
        self._is_answer = True
        self.world.note(RecordKind.ANSWER, transfer.id, outcome, is_fault)
        self.log.answered(transfer, outcome, is_fault=is_fault)
        self.cache.complete(transfer.id, outcome, self.world.now_s, is_fault=is_fault)

    def _probed(self, probe: Probe, present: list[bool] | None) -> None:
        self._is_answer = True
        self.world.note(RecordKind.PROBE_ANSWER, probe.id, present)
        self.log.probed(probe, present)
        self.cache.probed(probe.id, present, self.world.now_s)

    def _make_evictor(self) -> Evictor:
        name = self.scenario.evictor
        inner = _RandomEvictor(Random(f"evictor {self.scenario.seed}")) if name == "random" else make_evictor(name)
        self._groups_made += 1
        return _ObservedEvictor(inner, self._groups_made - 1, self.log)
