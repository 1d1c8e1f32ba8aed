"""One seed, from the first request to the last answer."""

import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from tests.sim.engine import Engine
from tests.sim.explain import TICK_LATENESS_S_MAX, Log
from tests.sim.judge import Counts, WorldJudge
from tests.sim.mover import Mover
from tests.sim.others import OtherWriters
from tests.sim.scenario import Mode, Scenario, draw
from tests.sim.trace import Kind, Trace
from tests.sim.world import Violation, World

from kvtier.core.cache import Cache
from kvtier.policy.adaptive import Adaptive
from kvtier.policy.base import Evictor, Held, Hinted
from kvtier.policy.fifo import Fifo
from kvtier.policy.lru import Lru
from kvtier.types import Command, Event, LoadDone, NextTurn, Outcome, Probe, TierNotice, Transfer

POLL_S = 0.002
"""What happens within so much of each other may be heard of at once."""
STEPS_MAX_FACTOR = 60
"""A run that takes this many times its steps to come to rest never will."""


@dataclass(frozen=True, slots=True)
class Report:
    """What one seed showed."""

    seed: int
    steps: int
    digest: str
    """Of the whole trace, when asked for: equal for equal runs, in any process."""
    failure: str | None
    """The promise that was broken, or None."""
    where: str = ""
    """Where it was seen, for whoever mends it."""
    trace: tuple[str, ...] = ()
    """The last lines of the trace of a failed run."""
    counts: Counts = field(default_factory=Counts)
    incidents: dict[str, int] = field(default_factory=dict[str, int])

    @property
    def is_good(self) -> bool:
        """Whether every promise was kept."""
        return self.failure is None


def run(seed: int, steps: int | None = None, *, has_digest: bool = False, **overrides: object) -> Report:
    """Run one seed; any mistake of the core ends in the report, never as an exception.

    Args:
        seed: draws everything.
        steps: steps before no new request arrives; drawn when None.
        has_digest: digest the trace, which takes a third of the time.
        overrides: fields of `Scenario` to set by hand.

    Raises:
        TypeError: an override is not a field of `Scenario`.
    """
    simulation = _Simulation(draw(seed, steps, **overrides), has_digest=has_digest)
    failure: str | None = None
    where = ""
    try:
        simulation.run()
    except Exception as error:  # noqa: BLE001  reported with its seed, which is what a simulator is for
        failure = f"{type(error).__name__}: {error}"
        where = traceback.format_exc()
    world = simulation.world
    return Report(
        seed,
        simulation.steps,
        world.trace.digest(),
        failure,
        where,
        world.trace.lines() if failure else (),
        simulation.judge.counts,
        dict(simulation.log.incident_counts),
    )


class _Watched:
    """An evictor that tells who left."""

    def __init__(self, inner: Evictor, group: int, log: Log) -> None:
        self._inner = inner
        self._group = group
        self._log = log

    def added(self, held: Held) -> None:
        self._inner.added(held)

    def touched(self, held: Held) -> None:
        self._inner.touched(held)

    def removed(self, name: bytes) -> None:
        self._log.evicted(name, self._group)
        self._inner.removed(name)

    def expects(self, session: str, next_turn: NextTurn | None) -> None:
        if not self._group:
            self._log.told_host(session, next_turn)
        if isinstance(self._inner, Hinted):
            self._inner.expects(session, next_turn)

    def victim(self, is_pinned: Callable[[bytes], bool]) -> bytes | None:
        return self._inner.victim(is_pinned)


class _AnyVictim:
    """Evicts whomever; no policy may be needed for correctness."""

    def __init__(self, dice: Random) -> None:
        self._dice = dice
        self._names: dict[bytes, None] = {}

    def added(self, held: Held) -> None:
        self._names[held.name] = None

    def touched(self, held: Held) -> None:
        """Of no interest."""

    def removed(self, name: bytes) -> None:
        self._names.pop(name, None)

    def victim(self, is_pinned: Callable[[bytes], bool]) -> bytes | None:
        free = [name for name in self._names if not is_pinned(name)]
        return self._dice.choice(free) if free else None


class _Simulation:
    def __init__(self, scenario: Scenario, *, has_digest: bool) -> None:
        self.scenario = scenario
        self.world = World(scenario, Trace(has_digest=has_digest))
        self.log = Log(self.world)
        self.steps = 0
        self._groups_made = 0
        self.cache = Cache(
            layout=scenario.layout,
            slots=scenario.slots,
            tiers=scenario.tiers,
            evictor=self._make_evictor,
            limits=scenario.limits,
            ranks=scenario.ranks,
        )
        self.log.cache = self.cache
        self.judge = WorldJudge(self.world, self.cache, self.log)
        self.engine = Engine(self.world, self.cache, self.judge, self._settle, self.log.expected)
        self.judge.begin()
        self.mover = Mover(self.world, self._complete, self._probed, self.log.incident)
        self.others = OtherWriters(self.world, self.mover)
        self._polls = Random(f"polls {scenario.seed}")
        self._late_share = self._polls.choice((0.0, 0.0, 0.5, 0.9))
        self._is_answer = False
        self._tick_lateness_s = (
            0.0 if self.world.dice.random() < 0.5 else self.world.dice.uniform(0, TICK_LATENESS_S_MAX)
        )

    def run(self) -> None:
        self.world.later(0.0, self.engine.arrive)
        while self.steps < self.scenario.steps and self._step():
            self._disturb()
        self.world.note(Kind.DRAIN)
        self.world.is_draining = True
        if self.scenario.mode is Mode.STORM:
            self.engine.end_all()
        self.cache.flush(self.world.now_s)
        self.world.release_parked()
        self._come_to_rest()
        self.engine.end_all()
        self._come_to_rest()
        self.judge.at_end()
        self.log.at_end()

    def _come_to_rest(self) -> None:
        self._settle()
        while self._step():
            if self.steps > self.scenario.steps * STEPS_MAX_FACTOR:
                raise Violation("the run does not come to rest")

    def _step(self) -> bool:
        """The next thing happens; returns whether there was one."""
        next_s, deadline_s = self.world.next_s(), self.cache.next_deadline()
        if deadline_s is not None:
            deadline_s = max(self.world.now_s, deadline_s + self._tick_lateness_s)
        if next_s is None and deadline_s is None:
            return False
        self.steps += 1
        if deadline_s is not None and (next_s is None or deadline_s <= next_s):
            self.world.now_s = deadline_s
            self.world.note(Kind.TICK)
            self.cache.tick(deadline_s)
            again_s = self.cache.next_deadline()
            if again_s is not None and again_s <= deadline_s:
                raise Violation(f"a deadline at {again_s} does not pass at {deadline_s}")
        else:
            self._happens()
            while self._is_heard_late(deadline_s):
                self._happens()
        self._settle()
        self.judge.after_step(is_waiting=self.engine.is_waiting)
        # A stray answer makes the core look again. What could go out has gone out, so there must be nothing to do (but
        # to give up on a tier: a question that is its trial leaves it to nobody else).
        self.cache.probed(-1, None, self.world.now_s)
        more = self._settle()
        if more and not self.log.down:
            raise Violation(f"the core had more to do and did not: {more}")
        return True

    def _happens(self) -> None:
        self._is_answer = False
        self.world.take()()

    def _is_heard_late(self, deadline_s: float | None) -> bool:
        """Whether the answer just given is heard of together with what happens next, as by who polls now and then.

        Only an answer: what the engine asks for is passed on at once.
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

    def _settle(self) -> list[Command | Event]:
        """Hand over commands and events until there are none; returns what there was."""
        self.cache.advance(self.world.now_s)
        handed_over: list[Command | Event] = []
        while True:
            commands, events = self.cache.take_commands(), self.cache.take_events()
            if not commands and not events:
                return handed_over
            handed_over += [*commands, *events]
            for event in events:
                self.world.trace.event(self.world.now_s, event)
                if isinstance(event, TierNotice):
                    self.log.notice(event)
                elif isinstance(event, LoadDone):
                    self.engine.load_done(event)
                else:
                    self.engine.store_done(event)
            for command in commands:
                self.world.trace.event(self.world.now_s, command)
                self.log.ordered(command, self.engine.jobs)
            self.mover.execute(commands)

    def _disturb(self) -> None:
        faults, dice = self.scenario.faults, self.world.dice
        if faults.aborts and dice.random() < faults.aborts * 0.2:
            self.engine.abort_some()
        if faults.other_writers and dice.random() < faults.other_writers:
            self.others.act()
        self._settle()

    def _complete(self, transfer: Transfer, rank: int, outcome: Outcome, is_fault: bool) -> None:
        self._is_answer = True
        self.world.note(Kind.ANSWER, transfer.id, rank, outcome, is_fault)
        self.log.answered(transfer, outcome, is_fault=is_fault)
        self.cache.complete(transfer.id, outcome, self.world.now_s, is_fault=is_fault)

    def _probed(self, probe: Probe, present: list[bool] | None) -> None:
        self._is_answer = True
        self.world.note(Kind.PROBE_ANSWER, probe.id, present)
        self.log.probed(probe, present)
        self.cache.probed(probe.id, present, self.world.now_s)

    def _make_evictor(self) -> Evictor:
        inner: Evictor
        if self.scenario.evictor == "lru":
            inner = Lru()
        elif self.scenario.evictor == "adaptive":
            inner = Adaptive()
        elif self.scenario.evictor == "fifo":
            inner = Fifo()
        else:
            inner = _AnyVictim(Random(f"evictor {self.scenario.seed}"))
        self._groups_made += 1
        return _Watched(inner, self._groups_made - 1, self.log)
