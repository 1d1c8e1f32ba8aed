"""One engine with the real core above its tiers, in virtual time.

A request is looked up; what the product's planner expects to be loaded sooner than computed is loaded; the rest waits
for a prefill; then the prompt's chunks are stored. The engine's own prefix cache is not modelled: every hit is a load.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, nsmallest

from kvtier.core.cache import Cache
from kvtier.core.limits import Limits
from kvtier.core.planner import LoadPlan, Piece, Planner
from kvtier.core.residency import READABLE
from kvtier.policy.base import Held
from kvtier.replay.cost import Prefill
from kvtier.replay.links import Agenda, Link, Shelf
from kvtier.replay.split import best_split
from kvtier.types import (
    ChunkKey,
    Command,
    Drop,
    LoadDone,
    Lookup,
    Outcome,
    Place,
    Prefix,
    Presence,
    Probe,
    RequestId,
    StoreDone,
    Transfer,
)
from kvtier.types import Link as Way


@dataclass(slots=True, eq=False)
class Job:
    """One request on its way."""

    request: RequestId
    number: int
    arrived_s: float
    input_tokens: int
    prefix: Prefix
    session: str | None
    found: int = 0
    """Leading tokens that could have been loaded."""
    planner: int = 0
    """Which of the node's planners plans it."""
    plan: LoadPlan | None = None
    planned_s: float = 0.0
    ahead_s: float = 0.0
    """How long prompts before this one would keep the engine busy, when it was planned."""
    best_s: float = 0.0
    """What the best split would have taken from then on."""
    delivered: int = 0
    sources: tuple[tuple[str, int], ...] = ()
    """(place, tokens) of what was delivered."""
    first_token_s: float = -1.0


@dataclass(slots=True)
class NodeTally:
    """What has happened on a node; `Planning` says what its figures mean."""

    convoys: int = 0
    """Loads that found a part of what they want on its way for somebody else."""
    dropped_chunks: int = 0
    busy_s: float = 0.0
    requests: int = 0
    loads: int = 0
    cut_loads: int = 0
    trials: int = 0
    loaded_tokens: int = 0
    skipped_tokens: int = 0
    cut_tokens: int = 0
    predicted_load_s: float = 0.0
    load_s: float = 0.0
    recompute_s: float = 0.0
    taken_s: float = 0.0
    best_s: float = 0.0
    regret_s: float = 0.0
    regret_most_s: float = 0.0


class Node:
    """One engine.

    Args:
        agenda: the clock.
        cache: the core.
        planners: decide what is loaded, each for one of the prompts that are computed at a time, as if these were
            engines that share host memory; they learn how fast these compute.
        object_bytes: of one chunk.
        up, down: the ways from host memory to the engine and back.
        shelves: the lower tiers by name.
        prefill: how fast each is computed.
        finished: told of each job whose first token is there.
    """

    def __init__(
        self,
        agenda: Agenda,
        cache: Cache,
        planners: Sequence[Planner],
        *,
        object_bytes: int,
        up: Link,
        down: Link,
        shelves: dict[str, Shelf],
        prefill: Prefill,
        finished: Callable[[Job], None],
    ) -> None:
        self._agenda = agenda
        self._soonest_s = Limits().transfer_deadline_s
        self.cache = cache
        self._planners = planners
        self._object_bytes = object_bytes
        self.up, self.down = up, down
        self.shelves = shelves
        self._free_s = [0.0] * len(planners)
        self._prefill = prefill
        self._finished = finished
        self._probing: dict[RequestId, Job] = {}
        self._loading: dict[RequestId, Job] = {}
        self._storing: dict[RequestId, Job] = {}
        self._due_s: dict[ChunkKey, float] = {}
        """When what is on its way to host memory will be there."""
        self._turn = -1
        self._tick_s = math.inf
        """When the core's clock is looked at next, at the latest."""
        self.tally = NodeTally()

    def backlog_s(self) -> float:
        """How long a prompt that is ready now would wait for its prefill."""
        return max(0.0, self._free_s[0] - self._agenda.now_s)

    def arrive(self, job: Job) -> None:
        """A request comes in."""
        job.planner = self._turn = (self._turn + 1) % len(self._planners)
        self._ask(job)
        self._settle()

    # ---- a request's life ------------------------------------------------------------------------------------------

    def _ask(self, job: Job) -> None:
        answer = self.cache.lookup(job.request, job.prefix, self._agenda.now_s)
        if answer.presence is Presence.PROBING:
            self._probing[job.request] = job
            self._watch()
            return
        self._probing.pop(job.request, None)
        self._plan(job, answer)
        plan = job.plan
        if plan is None or not plan.tokens:
            self._compute(job)
            return
        chunks = plan.tokens // job.prefix.chunk_tokens
        self.tally.convoys += any(
            self.cache.presence(job.prefix.keys[chunk], 0) is Presence.ARRIVING for chunk in range(chunks)
        )
        self.tally.loads += 1
        self.tally.trials += plan.is_trial
        self._loading[job.request] = job
        self._planners[job.planner].begun(plan, self._agenda.now_s)
        self.cache.load(
            job.request,
            job.prefix,
            plan.tokens,
            _places(chunks),
            self._agenda.now_s,
            budget=plan.budget,
            session=job.session,
        )
        self._watch()

    def _plan(self, job: Job, answer: Lookup) -> None:
        job.found, job.planned_s, job.ahead_s = answer.tokens, self._agenda.now_s, self.backlog_s()
        if not answer.tokens:
            return
        others_s = nsmallest(2, self._free_s)[1:]
        job.plan = self._planners[job.planner].plan(
            answer,
            job.input_tokens,
            ahead_s=job.ahead_s,
            beside_s=max(0.0, min(others_s, default=math.inf) - job.planned_s),
            now_s=job.planned_s,
        )
        self.tally.skipped_tokens += answer.tokens - job.plan.tokens
        job.best_s = best_split(
            self._arrivals_s(job.prefix, answer.tokens // job.prefix.chunk_tokens),
            chunk_tokens=job.prefix.chunk_tokens,
            input_tokens=job.input_tokens,
            ahead_s=job.ahead_s,
            prefill=self._prefill,
        ).seconds

    def _arrivals_s(self, prefix: Prefix, chunks: int) -> Iterator[float]:
        """When each leading chunk would be in the engine if all were asked for now."""
        now_s, entries = self._agenda.now_s, self.cache.host.entries[0]
        up_s = self.up.free_s
        queues_s = {name: shelf.reads.free_s for name, shelf in self.shelves.items()}
        for key in prefix.keys[:chunks]:
            entry = entries.get(key)
            if entry is not None:
                here_s = now_s if entry.residency in READABLE else self._due_s.get(key, now_s)
            else:
                name = next((name for name, shelf in self.shelves.items() if key in shelf), None)
                if name is None:
                    return
                reads = self.shelves[name].reads
                queues_s[name] = max(now_s, queues_s[name]) + self._object_bytes / reads.bytes_per_s
                here_s = queues_s[name] + reads.latency_s
            up_s = max(up_s, here_s) + self._object_bytes / self.up.bytes_per_s
            yield up_s + self.up.latency_s - now_s

    def _loaded(self, done: LoadDone) -> None:
        job = self._loading.pop(done.request)
        assert job.plan is not None, "what was loaded was planned"
        now_s, tally = self._agenda.now_s, self.tally
        job.delivered, job.sources = done.tokens, done.sources
        load_s = now_s - job.planned_s
        self._planners[job.planner].ended(job.plan, done, load_s, now_s)
        tally.cut_loads += done.tokens < done.wanted_tokens
        tally.cut_tokens += done.wanted_tokens - done.tokens
        tally.loaded_tokens += done.tokens
        tally.predicted_load_s += job.plan.load_s
        tally.load_s += max(0.0, load_s - job.ahead_s)
        self._compute(job)

    def _compute(self, job: Job) -> None:
        now_s, tally = self._agenda.now_s, self.tally
        begun_s = max(heappop(self._free_s), now_s)
        took_s = self._prefill.seconds(job.delivered, job.input_tokens)
        heappush(self._free_s, begun_s + took_s)
        tally.busy_s += took_s
        if job.found:
            taken_s = max(now_s - job.planned_s, job.ahead_s) + took_s
            regret_s = max(0.0, taken_s - job.best_s)
            tally.requests += 1
            tally.recompute_s += job.ahead_s + self._prefill.seconds(0, job.input_tokens)
            tally.taken_s += taken_s
            tally.best_s += job.best_s
            tally.regret_s += regret_s
            tally.regret_most_s = max(tally.regret_most_s, regret_s)
        self._agenda.at(begun_s + took_s, lambda: self._computed(job, took_s))

    def _computed(self, job: Job, took_s: float) -> None:
        if job.delivered < job.input_tokens:
            self._planners[job.planner].prefilled([Piece(job.input_tokens - job.delivered, job.delivered)], took_s)
        job.first_token_s = self._agenda.now_s
        self._finished(job)
        if job.prefix.keys:
            self._storing[job.request] = job
            places = _places(len(job.prefix.keys))
            self.cache.store(job.request, job.prefix, places, self._agenda.now_s, job.session)
            self._watch()
        else:
            self.cache.release(job.request, self._agenda.now_s)
        self._settle()

    def _stored(self, done: StoreDone) -> None:
        self._storing.pop(done.request)
        self.tally.dropped_chunks += done.dropped
        self.cache.release(done.request, self._agenda.now_s)

    # ---- the core's commands ---------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Obey and listen until the core has nothing to say."""
        cache, was_told = self.cache, False
        while True:
            commands, events = cache.take_commands(), cache.take_events()
            if not commands and not events:
                break
            was_told = True
            for command in commands:
                self._obey(command)
            for event in events:
                if isinstance(event, LoadDone):
                    self._loaded(event)
                elif isinstance(event, StoreDone):
                    self._stored(event)
        if was_told and self._tick_s > self._agenda.now_s + self._soonest_s:
            self._watch()

    def _watch(self) -> None:
        """Look at the clock again when the next deadline has passed."""
        deadline_s = self.cache.next_deadline()
        if deadline_s is not None and deadline_s < self._tick_s:
            self._tick_s = deadline_s
            self._agenda.at(deadline_s, lambda: self._tick(deadline_s))

    def _tick(self, deadline_s: float) -> None:
        if deadline_s != self._tick_s:
            return  # an earlier one came in between
        self._tick_s = math.inf
        # Deadlines are passed when they are over, not at their very moment.
        self.cache.tick(self._agenda.now_s + 1e-6)
        self._ask_again()
        self._settle()
        self._watch()

    def _ask_again(self) -> None:
        for job in list(self._probing.values()):
            self._ask(job)

    def _obey(self, command: Command) -> None:
        if isinstance(command, Transfer):
            self._move(command)
        elif isinstance(command, Probe):
            probe = command
            shelf = self.shelves[probe.tier]
            self._agenda.at(self._agenda.now_s + shelf.latency_s, lambda: self._probed(probe, shelf))
        elif isinstance(command, Drop):
            self.shelves[command.tier].drop(command.key)
        # A replay expects nothing of anybody. A cancellation comes too late for what is on its way, and all is at once.

    def _probed(self, probe: Probe, shelf: Shelf) -> None:
        self.cache.probed(probe.id, [key in shelf for key, _ in probe.objects], self._agenda.now_s)
        self.cache.advance(self._agenda.now_s)
        self._ask_again()
        self._settle()

    def _move(self, transfer: Transfer) -> None:
        def answer(outcome: Outcome) -> None:
            self._due_s.pop(transfer.key, None)
            self.cache.complete(transfer.id, outcome, self._agenda.now_s)
            self.cache.advance(self._agenda.now_s)
            self._settle()

        if transfer.link is Way.GATHER:
            self._due_s[transfer.key] = self.down.send(self._object_bytes, lambda: answer(Outcome.DONE))
        elif transfer.link is Way.SCATTER:
            self.up.send(self._object_bytes, lambda: answer(Outcome.DONE))
        elif transfer.link is Way.DEMOTE:
            self.shelves[transfer.tier].write(
                Held(transfer.key, transfer.parent, transfer.session), lambda: answer(Outcome.DONE)
            )
        else:
            self._due_s[transfer.key] = self.shelves[transfer.tier].read(
                Held(transfer.key, transfer.parent, transfer.session), answer
            )


def _places(chunks: int) -> Sequence[Place]:
    return [Place(0, chunk, (chunk,)) for chunk in range(chunks)]


def key_of(block: int) -> ChunkKey:
    """The key of a trace's block."""
    return ChunkKey(block.to_bytes(32, "big"))
