"""An engine that keeps asking: shared prefixes, growing turns, loads, stores, and changes of mind."""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from tests.sim.oracle import boundaries
from tests.sim.scenario import Mode
from tests.sim.trace import Kind
from tests.sim.world import Condition, Item, World

from kvtier.core.boundary import needed_chunks
from kvtier.core.cache import Cache
from kvtier.core.patience import Patience
from kvtier.types import ChunkKey, Hint, LoadDone, Lookup, NextTurn, Place, Prefix, Presence, RequestId, StoreDone

LOOKUPS_MAX = 8
SESSIONS = (None, "s1", "s2", "s3", "s4", "s5")
TELLS = 0.5
"""Share of the responses after which a session says who goes on."""
CONVERSATIONS_MAX = 10


@dataclass(slots=True, eq=False)
class Ticket:
    """One load or store, until its Done event. `blocks` maps (group, chunk) to the engine's block."""

    prefix: Prefix
    start_s: float
    blocks: dict[tuple[int, int], int]
    tokens: int = 0
    resident_tokens: int = 0
    patience: Patience | None = None

    def item(self, place: tuple[int, int]) -> Item:
        """The object at (group, chunk)."""
        return self.prefix.keys[place[1]], place[0]


@dataclass(slots=True, eq=False)
class Job:
    """One request."""

    request: RequestId
    prefix: Prefix
    session: str | None = None
    lookups: int = 0
    load: Ticket | None = None
    stores: list[Ticket] = field(default_factory=list[Ticket])
    answered: list[Ticket] = field(default_factory=list[Ticket])
    """Stores whose StoreDone came while another one was open: which of them it was cannot be told."""
    released_s: float | None = None


class Judge(Protocol):
    """What the engine tells whoever judges the core."""

    def asking(self, job: Job) -> None:
        """A lookup is about to be made: the probes that follow are this job's."""
        ...

    def looked_up(self, job: Job, lookup: Lookup) -> None:
        """A lookup was answered."""
        ...

    def load_begun(self, job: Job, ticket: Ticket) -> None:
        """A load is about to begin."""
        ...

    def load_done(self, job: Job, ticket: Ticket, done: LoadDone) -> None:
        """A load has ended; its blocks are as it left them."""
        ...

    def store_done(self, job: Job, ticket: Ticket, done: StoreDone) -> None:
        """A store has ended."""
        ...

    def released(self, job: Job) -> None:
        """The request was released."""
        ...


class Engine:
    """Requests from arrival to release.

    Args:
        settle: hands over the core's commands and events at once.
        expected: hears what the core is about to hear of a session.
    """

    def __init__(
        self,
        world: World,
        cache: Cache,
        judge: Judge,
        settle: Callable[[], object],
        expected: Callable[[str, NextTurn | None], None],
    ) -> None:
        self._expected = expected
        # Dice of its own: what sessions say changes nothing else in a seed.
        self._chatter = Random(f"sessions {world.scenario.seed}")
        self._settle = settle
        self._world = world
        self._dice = world.dice
        self._scenario = world.scenario
        self._cache = cache
        self._judge = judge
        self.jobs: dict[RequestId, Job] = {}
        self._conversations: list[tuple[ChunkKey, ...]] = [()]
        for _ in range(self._scenario.prefilled):
            self._remember_in_a_tier(self._grown(()))
        self._idle_names: list[RequestId] = []
        self._count = 0

    def _remember_in_a_tier(self, prefix: Prefix) -> None:
        shelf = self._dice.choice(list(self._world.shelves.values()))
        for chunk in range(len(prefix.keys)):
            for group in range(len(self._scenario.slots)):
                is_flipped = self._dice.random() < self._scenario.faults.flipped * 0.5
                shelf.fill((prefix.keys[chunk], group), Condition.FLIPPED if is_flipped else Condition.GOOD)
        self._conversations.append(prefix.keys)

    @property
    def is_waiting(self) -> bool:
        """Whether some load or store is open."""
        return any(job.load or job.stores for job in self.jobs.values())

    # ---- a request's life ------------------------------------------------------------------------------------------

    def arrive(self) -> None:
        """A request arrives, and plans the next arrival."""
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
        job = self.jobs[request] = Job(request, self._prompt(), self._chatter.choice(SESSIONS))
        self._world.note(Kind.ARRIVE, request, len(job.prefix.keys))
        self._ask(job)

    def abort_some(self) -> None:
        """The engine loses interest in one of its requests, whatever that is doing."""
        jobs = [job for job in self.jobs.values() if job.released_s is None]
        if jobs:
            self._release(self._dice.choice(jobs))

    def end_all(self) -> None:
        """Release whatever is left."""
        for job in list(self.jobs.values()):
            if job.released_s is None:
                self._release(job)

    def _ask(self, job: Job) -> None:
        if job.released_s is not None:
            return
        now_s = self._world.now_s
        job.lookups += 1
        self._cache.tick(now_s)
        self._settle()
        self._judge.asking(job)
        lookup = self._cache.lookup(job.request, job.prefix, now_s)
        self._world.note(Kind.LOOKUP, job.request, lookup)
        self._settle()
        self._judge.looked_up(job, lookup)
        if self._dice.random() < 0.1:
            again = self._cache.lookup(job.request, job.prefix, now_s)
            assert again == lookup, f"the same lookup at the same moment: {lookup}, then {again}"
        is_patient = self._scenario.mode is not Mode.STORM or job.lookups < LOOKUPS_MAX
        if lookup.presence is Presence.PROBING and is_patient:
            self._world.later(self._dice.uniform(0.005, 0.08), lambda: self._ask(job))
        elif lookup.tokens and self._dice.random() < 0.95:
            wait_s = 0.0 if self._dice.random() < 0.6 else self._dice.uniform(0, 0.1)
            self._world.later(wait_s, lambda: self._load(job, lookup.tokens))
        else:
            self._compute(job)

    def _load(self, job: Job, tokens: int) -> None:
        if job.released_s is not None:
            return
        dice = self._dice
        if dice.random() < 0.15:
            # A shorter load may be one of things that nobody has: without faults only where less is never more.
            is_safe = self._scenario.mode is Mode.STORM or self._scenario.has_history_only
            tokens = dice.choice(list(boundaries(job.prefix, tokens))) if is_safe else tokens
        resident = dice.randint(0, tokens) if dice.random() < 0.3 else 0
        blocks: dict[tuple[int, int], int] = {}
        for index, group in enumerate(self._scenario.layout.groups):
            for chunk in needed_chunks(group, job.prefix, tokens):
                if (chunk + 1) * job.prefix.chunk_tokens > resident:
                    blocks[index, chunk] = self._world.new_block(None)
        patience = None
        if self._scenario.mode is not Mode.QUIET and dice.random() < 0.3:
            free_s = max(0.0, dice.uniform(-0.05, 0.05))
            patience = Patience(dice.uniform(0, 0.1), dice.uniform(0, 0.01), dice.uniform(0, 0.001), free_s)
        now_s = self._world.now_s
        ticket = job.load = Ticket(job.prefix, now_s, blocks, tokens, resident, patience)
        self._world.note(Kind.LOAD, job.request, tokens, resident, patience is not None, sorted(blocks))
        self._judge.load_begun(job, ticket)
        self._cache.load(
            job.request,
            job.prefix,
            tokens,
            _places(blocks),
            now_s,
            resident_tokens=resident,
            patience=patience,
            hint=Hint(job.session),
        )

    def _compute(self, job: Job) -> None:
        """The engine computes the rest of the prompt, and stores it; perhaps an answer as well."""
        if self._dice.random() < self._scenario.readers and len(self._conversations) > 3:
            self._world.later(self._dice.uniform(0, 0.05), lambda: self._release(job))
            return
        self._world.later(self._dice.uniform(0, 0.05), lambda: self._store(job, is_answer=False))

    def _store(self, job: Job, *, is_answer: bool) -> None:
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
            self._world.close_block(blocks.popitem()[1])  # so that their StoreDones can be told apart
        ticket = Ticket(job.prefix, self._world.now_s, blocks)
        job.stores.append(ticket)
        self._world.note(Kind.STORE, job.request, sorted(blocks))
        self._cache.store(job.request, job.prefix, _places(blocks), self._world.now_s, Hint(job.session))
        self._conversations.append(job.prefix.keys)
        if len(self._conversations) > CONVERSATIONS_MAX:
            del self._conversations[dice.randrange(CONVERSATIONS_MAX)]
        if not is_answer and dice.random() < 0.4:
            self._world.later(dice.uniform(0, 0.1), lambda: self._store(job, is_answer=True))
        elif scenario.mode is not Mode.QUIET and dice.random() < 0.2:
            self._world.later(dice.uniform(0, 0.05), lambda: self._release(job))

    def _release(self, job: Job) -> None:
        if job.released_s is not None:
            return
        self._settle()
        self._world.note(Kind.RELEASE, job.request)
        job.released_s = self._world.now_s
        self._cache.release(job.request, self._world.now_s)
        self._settle()
        self._judge.released(job)
        self._expect(job)
        self._forget_if_over(job)

    def _expect(self, job: Job) -> None:
        """Sessions say who goes on, now and then, and not always what is true."""
        if job.session is not None and self._chatter.random() < TELLS:
            next_turn = self._chatter.choice((*NextTurn, None))
            self._world.note(Kind.EXPECTS, job.session, next_turn)
            self._expected(job.session, next_turn)
            self._cache.expects(job.session, next_turn)
            self._settle()

    def _forget_if_over(self, job: Job) -> None:
        is_known = self.jobs.get(job.request) is job
        if is_known and job.released_s is not None and not job.load and not job.stores:
            del self.jobs[job.request]
            self._idle_names.append(job.request)

    # ---- what the core says ----------------------------------------------------------------------------------------

    def load_done(self, done: LoadDone) -> None:
        """A load has ended: its blocks are the engine's again."""
        job = self.jobs.get(done.request)
        assert job is not None, f"{done} for a request that waits for nothing"
        assert job.load is not None, f"{done} for a request that loads nothing"
        ticket, job.load = job.load, None
        self._judge.load_done(job, ticket, done)
        self._close(ticket)
        if job.released_s is None:
            self._compute(job)
        self._forget_if_over(job)

    def store_done(self, done: StoreDone) -> None:
        """A store has ended: its blocks are the engine's again."""
        job = self.jobs.get(done.request)
        assert job is not None, f"{done} for a request that waits for nothing"
        fitting = [ticket for ticket in job.stores if len(ticket.blocks) == done.held + done.dropped]
        assert fitting, f"{done} fits no store of the request"
        ticket = fitting[0]
        job.stores.remove(ticket)
        job.answered.append(ticket)
        if len(fitting) == 1 or not job.stores:
            for over in job.answered:
                self._close(over)
            job.answered.clear()
        self._judge.store_done(job, ticket, done)
        if (not job.stores and self._dice.random() < 0.9) or self._scenario.mode is Mode.QUIET:
            self._world.later(self._dice.uniform(0, 0.3), lambda: self._release_if_idle(job))
        self._forget_if_over(job)

    def _release_if_idle(self, job: Job) -> None:
        if not job.stores and not job.load:
            self._release(job)
        elif job.released_s is None:
            self._world.later(0.1, lambda: self._release_if_idle(job))

    def _close(self, ticket: Ticket) -> None:
        for block in ticket.blocks.values():
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
