"""One engine with the real core above its tiers, in virtual time.

A request is looked up; what is expected to be loaded sooner than computed is loaded; the rest waits for a prefill; then
the prompt's chunks are stored. The engine's own prefix cache is not modelled: every hit is a load.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from kvtier.core.cache import Cache
from kvtier.policy.base import Held
from kvtier.replay.cost import Prefill
from kvtier.replay.links import Agenda, Link, Shelf
from kvtier.types import (
    ChunkKey,
    Command,
    Drop,
    Hint,
    LoadDone,
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
    hint: Hint
    delivered: int = 0
    first_token_s: float = -1.0


@dataclass(slots=True)
class NodeTally:
    """What has happened on a node."""

    hit_tokens: dict[str, int] = field(default_factory=dict[str, int])
    """By the place that the bytes came from."""
    loads: int = 0
    cut_loads: int = 0
    convoys: int = 0
    """Requests that found a part of what they want on its way for somebody else, or joined a load."""
    skipped_tokens: int = 0
    """That could have been loaded, but computing them was expected to be sooner."""
    dropped_chunks: int = 0
    busy_s: float = 0.0


class Node:
    """One engine.

    Args:
        agenda: the clock.
        cache: the core.
        object_bytes: of one chunk.
        up, down: the ways from host memory to the engine and back.
        shelves: the lower tiers by name.
        servers: prompts that are computed at the same time.
        prefill: how fast each is computed.
        finished: told of each job whose first token is there.
    """

    def __init__(
        self,
        agenda: Agenda,
        cache: Cache,
        *,
        object_bytes: int,
        up: Link,
        down: Link,
        shelves: dict[str, Shelf],
        servers: int,
        prefill: Prefill,
        finished: Callable[[Job], None],
    ) -> None:
        self._agenda = agenda
        self.cache = cache
        self._object_bytes = object_bytes
        self.up, self.down = up, down
        self.shelves = shelves
        self._free_s = [0.0] * servers
        self._prefill = prefill
        self._finished = finished
        self._probing: dict[RequestId, Job] = {}
        self._loading: dict[RequestId, Job] = {}
        self._storing: dict[RequestId, Job] = {}
        self._tick_s = -1.0
        self.tally = NodeTally()

    def backlog_s(self) -> float:
        """How long a prompt that is ready now would wait for its prefill."""
        return max(0.0, self._free_s[0] - self._agenda.now_s)

    def arrive(self, job: Job) -> None:
        """A request comes in."""
        self._ask(job)
        self._settle()

    # ---- a request's life ------------------------------------------------------------------------------------------

    def _ask(self, job: Job) -> None:
        answer = self.cache.lookup(job.request, job.prefix, self._agenda.now_s)
        if answer.presence is Presence.PROBING:
            self._probing[job.request] = job
            return
        self._probing.pop(job.request, None)
        best_tokens, best_s = 0, self._prefill.seconds(0, job.input_tokens)
        for offer in answer.offers:
            took_s = offer.seconds + self._prefill.seconds(offer.tokens, job.input_tokens)
            if took_s < best_s:
                best_tokens, best_s = offer.tokens, took_s
        self.tally.skipped_tokens += answer.tokens - best_tokens
        if not best_tokens:
            self._compute(job)
            return
        chunks = best_tokens // job.prefix.chunk_tokens
        self.tally.convoys += any(
            self.cache.presence(job.prefix.keys[chunk], 0) is Presence.ARRIVING for chunk in range(chunks)
        )
        self.tally.loads += 1
        self._loading[job.request] = job
        self.cache.load(job.request, job.prefix, best_tokens, _places(chunks), self._agenda.now_s)

    def _loaded(self, done: LoadDone) -> None:
        job = self._loading.pop(done.request)
        job.delivered = done.tokens
        self.tally.cut_loads += done.tokens < done.wanted_tokens
        for place, tokens in done.sources:
            self.tally.hit_tokens[place] = self.tally.hit_tokens.get(place, 0) + tokens
        self._compute(job)

    def _compute(self, job: Job) -> None:
        begun_s = max(heappop(self._free_s), self._agenda.now_s)
        took_s = self._prefill.seconds(job.delivered, job.input_tokens)
        heappush(self._free_s, begun_s + took_s)
        self.tally.busy_s += took_s
        self._agenda.at(begun_s + took_s, lambda: self._computed(job))

    def _computed(self, job: Job) -> None:
        job.first_token_s = self._agenda.now_s
        self._finished(job)
        if job.prefix.keys:
            self._storing[job.request] = job
            places = _places(len(job.prefix.keys))
            self.cache.store(job.request, job.prefix, places, self._agenda.now_s, job.hint)
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
        while True:
            commands, events = self.cache.take_commands(), self.cache.take_events()
            if not commands and not events:
                break
            for command in commands:
                self._obey(command)
            for event in events:
                if isinstance(event, LoadDone):
                    self._loaded(event)
                elif isinstance(event, StoreDone):
                    self._stored(event)
        deadline_s = self.cache.next_deadline()
        if deadline_s is not None and (self._tick_s < self._agenda.now_s or deadline_s < self._tick_s):
            self._tick_s = deadline_s
            self._agenda.at(deadline_s, self._tick)

    def _tick(self) -> None:
        self._tick_s = -1.0
        # Deadlines are passed when they are over, not at their very moment.
        self.cache.tick(self._agenda.now_s + 1e-6)
        self._ask_again()
        self._settle()

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
        # A cancellation comes too late for what is on its way, and all is on its way at once.

    def _probed(self, probe: Probe, shelf: Shelf) -> None:
        self.cache.probed(probe.id, [key in shelf for key, _ in probe.objects], self._agenda.now_s)
        self._ask_again()
        self._settle()

    def _move(self, transfer: Transfer) -> None:
        def answer(outcome: Outcome) -> None:
            self.cache.complete(transfer.id, outcome, self._agenda.now_s)
            self._settle()

        if transfer.link is Way.GATHER:
            self.down.send(self._object_bytes, lambda: answer(Outcome.DONE))
        elif transfer.link is Way.SCATTER:
            self.up.send(self._object_bytes, lambda: answer(Outcome.DONE))
        elif transfer.link is Way.DEMOTE:
            self.shelves[transfer.tier].write(self._held(transfer), lambda: answer(Outcome.DONE))
        else:
            self.shelves[transfer.tier].read(self._held(transfer), answer)

    def _held(self, transfer: Transfer) -> Held:
        hint = transfer.hint
        saved_s = hint.seconds_saved_per_token
        return Held(
            transfer.key,
            transfer.parent,
            transfer.depth,
            self._object_bytes,
            transfer.group,
            self._agenda.now_s,
            hint.session,
            hint.turn,
            saved_s,
        )


def _places(chunks: int) -> Sequence[Place]:
    return [Place(0, chunk, (chunk,)) for chunk in range(chunks)]


def key_of(block: int) -> ChunkKey:
    """The key of a trace's block."""
    return ChunkKey(block.to_bytes(32, "big"))
