"""A simulated engine: shared prefixes, growing conversations, loads, stores and aborts."""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from tests.sim.oracle import boundaries
from tests.sim.scenario import Mode
from tests.sim.trace import RecordKind
from tests.sim.world import Condition, Item, World

from kvtier.core.cache import Cache
from kvtier.core.load_budget import LoadBudget
from kvtier.core.prefix import needed_chunks
from kvtier.types import ChunkKey, LoadDone, Lookup, NextTurn, Place, Prefix, Presence, Priority, RequestId, StoreDone

if TYPE_CHECKING:
    from tests.sim.invariants import Invariants

LOOKUPS_MAX = 8
SESSIONS = (None, "s1", "s2", "s3", "s4", "s5")
HINTS = 0.5
"""Share of released requests after which the engine gives a next-turn hint."""
CONVERSATIONS_MAX = 10


@dataclass(slots=True, eq=False)
class Operation:
    """One load or store until its done event. `blocks` maps (group, chunk) to the engine's block."""

    prefix: Prefix
    start_s: float
    blocks: dict[tuple[int, int], int]
    tokens: int = 0
    resident_tokens: int = 0
    budget: LoadBudget | None = None

    def item(self, place: tuple[int, int]) -> Item:
        """Return the object at (group, chunk)."""
        return self.prefix.keys[place[1]], place[0]


@dataclass(slots=True, eq=False)
class SimJob:
    """One request of the engine."""

    request: RequestId
    prefix: Prefix
    conversation: str | None = None
    announced_tokens: int = 0
    began_s: float = 0.0
    lookups: int = 0
    load: Operation | None = None
    stores: list[Operation] = field(default_factory=list[Operation])
    answered: list[Operation] = field(default_factory=list[Operation])
    """Stores that ended while an indistinguishable one was open. Their blocks stay open until all have ended."""
    released_s: float | None = None


class SimEngine:
    """Makes requests, from arrival to release.

    Args:
        observer: is notified of each answer, and of a load's end before its blocks are reused.
        settle: executes the core's commands and delivers its events.
        expected: called with each next-turn hint before the core gets it.
    """

    def __init__(
        self,
        world: World,
        cache: Cache,
        observer: "Invariants",
        settle: Callable[[], object],
        expected: Callable[[str, NextTurn | None], None],
    ) -> None:
        self._expected = expected
        # Hints have a generator of their own, so that they change nothing else in a seed.
        self._session_dice = Random(f"sessions {world.scenario.seed}")
        self._announce_dice = Random(f"announced {world.scenario.seed}")
        self._hint_dice = Random(f"hints {world.scenario.seed}")
        self._hints = 0
        self._settle = settle
        self._world = world
        self._dice = world.dice
        self._scenario = world.scenario
        self._cache = cache
        self._observer = observer
        self.jobs: dict[RequestId, SimJob] = {}
        self._conversations: list[tuple[ChunkKey, ...]] = [()]
        for _ in range(self._scenario.prefilled):
            self._fill_a_tier(self._grown(()))
        self._idle_names: list[RequestId] = []
        self._count = 0

    def _fill_a_tier(self, prefix: Prefix) -> None:
        tier = self._dice.choice(list(self._world.tiers.values()))
        for chunk in range(len(prefix.keys)):
            for group in range(len(self._scenario.slots)):
                is_flipped = self._dice.random() < self._scenario.faults.flipped * 0.5
                tier.fill((prefix.keys[chunk], group), Condition.FLIPPED if is_flipped else Condition.GOOD)
        self._conversations.append(prefix.keys)

    @property
    def is_waiting(self) -> bool:
        """Whether a load or store is open."""
        return any(job.load or job.stores for job in self.jobs.values())

    # ---- requests --------------------------------------------------------------------------------------------------

    def arrive(self) -> None:
        """Start a request, and schedule the next arrival."""
        if self._world.is_draining:
            return
        if self._scenario.mode is Mode.QUIET and (self.jobs or self._cache.in_flight):
            self._world.later(0.02, self.arrive)
            return
        self._world.later(self._dice.expovariate(1 / self._scenario.arrival_s), self.arrive)
        if self._idle_names and self._dice.random() < 0.3:
            request = self._idle_names.pop()
        else:
            self._count += 1
            request = RequestId(f"r{self._count}")
        job = self.jobs[request] = SimJob(request, self._prompt(), self._session_dice.choice(SESSIONS))
        job.began_s = self._world.now_s
        self._announce(job)
        self._world.note(RecordKind.ARRIVE, request, len(job.prefix.keys))
        self._look_up(job)

    def _announce(self, job: SimJob) -> None:
        """Sometimes let another engine announce chunks, and write none, some or all of them one by one."""
        dice, keys, scenario = self._announce_dice, job.prefix.keys, self._scenario
        if scenario.mode is Mode.QUIET or dice.random() >= scenario.announced:
            return  # in a quiet run nothing else writes
        job.announced_tokens = dice.randint(1, len(keys) + 2) * job.prefix.chunk_tokens
        written = dice.choice((0, len(keys) // 2, len(keys)))
        shared = [rules.name for rules in scenario.rules if rules.is_remote]
        delay_s = 0.0
        for key in keys[:written] if shared else ():
            delay_s += dice.expovariate(1 / 0.02)
            self._world.later(delay_s, lambda key=key: self._publish(shared[-1], key))

    def _publish(self, tier: str, key: ChunkKey) -> None:
        if not self._world.is_draining:
            for group in range(len(self._scenario.slots)):
                self._world.tiers[tier].fill((key, group), Condition.GOOD)

    def abort_some(self) -> None:
        """Abort one request in any state."""
        jobs = [job for job in self.jobs.values() if job.released_s is None]
        if jobs:
            self._release(self._dice.choice(jobs))

    def end_all(self) -> None:
        """Release all requests."""
        for job in list(self.jobs.values()):
            if job.released_s is None:
                self._release(job)

    def _look_up(self, job: SimJob) -> None:
        if job.released_s is not None:
            return
        now_s = self._world.now_s
        job.lookups += 1
        self._cache.tick(now_s)
        self._settle()
        lookup = self._ask(job)
        self._world.note(RecordKind.LOOKUP, job.request, lookup)
        self._settle()
        self._observer.looked_up(job, lookup)
        if self._dice.random() < 0.1:
            again = self._ask(job)
            assert again == lookup, f"the same lookup at the same moment: {lookup}, then {again}"
        is_patient = self._scenario.mode is not Mode.STORM or job.lookups < LOOKUPS_MAX
        if lookup.presence is Presence.PROBING and is_patient:
            self._world.later(self._dice.uniform(0.005, 0.08), lambda: self._look_up(job))
        elif lookup.tokens and self._dice.random() < 0.95:
            wait_s = 0.0 if self._dice.random() < 0.6 else self._dice.uniform(0, 0.1)
            self._world.later(wait_s, lambda: self._load(job, lookup.tokens))
        else:
            self._compute(job)

    def _ask(self, job: SimJob) -> Lookup:
        return self._cache.lookup(
            job.request,
            job.prefix,
            self._world.now_s,
            compute_s=self._world.scenario.waits,
            announced_tokens=job.announced_tokens,
        )

    def _load(self, job: SimJob, tokens: int) -> None:
        if job.released_s is not None:
            return
        dice = self._dice
        if dice.random() < 0.15:
            # With windows or states a shorter prefix may need chunks that no tier holds.
            is_safe = self._scenario.mode is Mode.STORM or self._scenario.has_history_only
            tokens = dice.choice(list(boundaries(job.prefix, tokens))) if is_safe else tokens
        resident = dice.randint(0, tokens) if dice.random() < 0.3 else 0
        blocks: dict[tuple[int, int], int] = {}
        for index, group in enumerate(self._scenario.layout.groups):
            for chunk in needed_chunks(group, job.prefix, tokens):
                if (chunk + 1) * job.prefix.chunk_tokens > resident:
                    blocks[index, chunk] = self._world.new_block(None)
        budget = None
        if self._scenario.mode is not Mode.QUIET and dice.random() < 0.3:
            free_s = max(0.0, dice.uniform(-0.05, 0.05))
            budget = LoadBudget(dice.uniform(0, 0.1), dice.uniform(0, 0.01), dice.uniform(0, 0.001), free_s)
        now_s = self._world.now_s
        operation = job.load = Operation(job.prefix, now_s, blocks, tokens, resident, budget)
        self._world.note(RecordKind.LOAD, job.request, tokens, resident, budget is not None, sorted(blocks))
        self._observer.load_begun(job, operation)
        self._cache.load(
            job.request,
            job.prefix,
            tokens,
            _places(blocks),
            now_s,
            resident_tokens=resident,
            budget=budget,
            conversation=job.conversation,
        )

    def _compute(self, job: SimJob) -> None:
        """Compute the rest of the prompt and store it."""
        if self._dice.random() < self._scenario.readers and len(self._conversations) > 3:
            self._world.later(self._dice.uniform(0, 0.05), lambda: self._release(job))
            return
        self._world.later(self._dice.uniform(0, 0.05), lambda: self._store(job, is_answer=False))

    def _store(self, job: SimJob, *, is_answer: bool) -> None:
        if job.released_s is not None:
            return
        dice, scenario = self._dice, self._scenario
        if is_answer:
            job.prefix = self._grown(job.prefix.keys)
        share = 1.0 if scenario.mode is not Mode.STORM or dice.random() < 0.7 else dice.random()
        blocks: dict[tuple[int, int], int] = {}
        for chunk in range(len(job.prefix.keys)):
            for group in range(len(scenario.layout.groups)):
                if dice.random() < share:
                    blocks[group, chunk] = self._world.new_block((job.prefix.keys[chunk], group))
        if blocks and any(len(other.blocks) == len(blocks) for other in job.stores):
            self._world.close_block(blocks.popitem()[1])  # so that the sizes distinguish their StoreDones
        operation = Operation(job.prefix, self._world.now_s, blocks)
        job.stores.append(operation)
        self._world.note(RecordKind.STORE, job.request, sorted(blocks))
        self._cache.store(job.request, job.prefix, _places(blocks), self._world.now_s, job.conversation)
        self._conversations.append(job.prefix.keys)
        if len(self._conversations) > CONVERSATIONS_MAX:
            del self._conversations[dice.randrange(CONVERSATIONS_MAX)]
        if not is_answer and dice.random() < 0.4:
            self._world.later(dice.uniform(0, 0.1), lambda: self._store(job, is_answer=True))
        elif scenario.mode is not Mode.QUIET and dice.random() < 0.2:
            self._world.later(dice.uniform(0, 0.05), lambda: self._release(job))

    def _release(self, job: SimJob) -> None:
        if job.released_s is not None:
            return
        self._settle()
        self._world.note(RecordKind.RELEASE, job.request)
        job.released_s = self._world.now_s
        self._cache.release(job.request, self._world.now_s)
        self._settle()
        self._observer.released(job)
        self._expect(job)
        self._hint(job)
        self._forget_if_over(job)

    def _expect(self, job: SimJob) -> None:
        """Sometimes give a true or false next-turn hint."""
        if job.conversation is not None and self._session_dice.random() < HINTS:
            next_turn = self._session_dice.choice((*NextTurn, None))
            self._world.note(RecordKind.EXPECTS, job.conversation, next_turn)
            self._expected(job.conversation, next_turn)
            self._cache.expects(job.conversation, next_turn)
            self._settle()

    def _hint(self, job: SimJob) -> None:
        """Sometimes retain, lower or prefetch a prefix: the request's or another."""
        dice, now_s = self._hint_dice, self._world.now_s
        if dice.random() >= self._scenario.hinted:
            return
        prefix = (
            job.prefix if dice.random() < 0.7 else Prefix(dice.choice(self._conversations), job.prefix.chunk_tokens)
        )
        what, seconds = dice.randrange(20), dice.choice((0.0, 0.05, 0.3, 2.0))
        self._world.note(RecordKind.HINT, what, seconds, len(prefix.keys))
        self._hints += 1
        if what < 8:
            self._cache.hints.retain(prefix, now_s + seconds, now_s, Priority.HIGH if what < 3 else Priority.NORMAL)
        elif what < 12:
            self._cache.hints.lower(prefix, job.conversation)
        elif what < 18:
            name = RequestId(f"p{self._hints}")
            self._observer.prefetched(name, prefix)
            self._cache.hints.prefetch(name, prefix, now_s + seconds, now_s, job.conversation)
        elif what < 19:
            self._cache.release(RequestId(f"p{self._hints - 1}"), now_s)
        else:
            self._cache.forget_hints()
        self._settle()

    def _forget_if_over(self, job: SimJob) -> None:
        is_known = self.jobs.get(job.request) is job
        if is_known and job.released_s is not None and not job.load and not job.stores:
            del self.jobs[job.request]
            self._idle_names.append(job.request)

    # ---- events of the core ----------------------------------------------------------------------------------------

    def load_done(self, done: LoadDone) -> None:
        """Note that a load has ended, so that the engine may reuse its blocks."""
        job = self.jobs.get(done.request)
        assert job is not None, f"{done} for a request that waits for nothing"
        assert job.load is not None, f"{done} for a request that loads nothing"
        operation, job.load = job.load, None
        self._observer.load_done(job, operation, done)
        self._close(operation)
        if job.released_s is None:
            self._compute(job)
        self._forget_if_over(job)

    def store_done(self, done: StoreDone) -> None:
        """Note that a store has ended, so that the engine may reuse its blocks."""
        job = self.jobs.get(done.request)
        assert job is not None, f"{done} for a request that waits for nothing"
        fitting = [operation for operation in job.stores if len(operation.blocks) == done.stored + done.dropped]
        assert fitting, f"{done} fits no store of the request"
        operation = fitting[0]
        job.stores.remove(operation)
        job.answered.append(operation)
        if len(fitting) == 1 or not job.stores:
            for over in job.answered:
                self._close(over)
            job.answered.clear()
        self._observer.store_done(job, operation, done)
        if (not job.stores and self._dice.random() < 0.9) or self._scenario.mode is Mode.QUIET:
            self._world.later(self._dice.uniform(0, 0.3), lambda: self._release_if_idle(job))
        self._forget_if_over(job)

    def _release_if_idle(self, job: SimJob) -> None:
        if not job.stores and not job.load:
            self._release(job)
        elif job.released_s is None:
            self._world.later(0.1, lambda: self._release_if_idle(job))

    def _close(self, operation: Operation) -> None:
        for block in operation.blocks.values():
            self._world.close_block(block)

    # ---- prompts ---------------------------------------------------------------------------------------------------

    def _prompt(self) -> Prefix:
        keys = self._dice.choice(self._conversations[-3:] if self._dice.random() < 0.5 else self._conversations)
        if self._dice.random() < 0.3:
            keys = keys[: self._dice.randint(0, len(keys))]
        return self._grown(keys)

    def _grown(self, keys: tuple[ChunkKey, ...]) -> Prefix:
        room = self._scenario.chunks_max - len(keys)
        for _ in range(self._dice.randint(0 if keys else 1, max(1, room)) if room > 0 else 0):
            parent = keys[-1] if keys else b""
            keys = (*keys, ChunkKey(parent + b"%d" % self._dice.randrange(self._scenario.branches)))
        return Prefix(keys, self._scenario.layout.chunk_tokens)


def _places(blocks: dict[tuple[int, int], int]) -> list[Place]:
    return [Place(group, chunk, (block,)) for (group, chunk), block in blocks.items()]
