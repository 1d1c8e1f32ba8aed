"""Replays one engine in virtual time, with the real core and planner over the engine's tiers.

For each request the node looks up the prompt, loads the chunks that the planner chooses, computes the rest in a
prefill, and stores the prompt's chunks. The engine's own prefix cache is not modeled, so every hit is a load.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, nsmallest

from kvtier.core.cache import Cache
from kvtier.core.host_residency import READABLE
from kvtier.core.limits import TierRules
from kvtier.core.planner import LoadPlan, Piece, Planner
from kvtier.policy.base import Use
from kvtier.tools.replay.results import PlanningStats, PrefillSpeed, best_split
from kvtier.tools.replay.virtual_tiers import EventQueue, ReplayLink, ReplayTier
from kvtier.types import (
    ChunkKey,
    Command,
    Direction,
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


@dataclass(slots=True, eq=False)
class NodeRequest:
    """The state of one request."""

    id: RequestId
    number: int
    arrived_s: float
    input_tokens: int
    prefix: Prefix
    session: str | None
    found: int = 0
    """Number of leading tokens that a load could deliver."""
    planner: int = 0
    """Index of the planner for this request."""
    plan: LoadPlan | None = None
    planned_s: float = 0.0
    ahead_s: float = 0.0
    """Backlog of the engine at planning time, in seconds."""
    best_s: float = 0.0
    """Seconds of the best split, counted from planning time."""
    sent: int = 0
    """Number of chunks of the request's load that were sent over the link to the engine."""
    delivered: int = 0
    sources: tuple[tuple[str, int], ...] = ()
    """Number of delivered tokens from each tier, as pairs (tier, tokens)."""
    first_token_s: float = -1.0


class ReplayNode:
    """One engine.

    Args:
        events: the clock.
        cache: the core.
        planners: one planner per prefill server, as if the servers were engines that share host memory.
        object_bytes: size of one chunk.
        up, down: the links from host memory to the engine, and back.
        tiers: the lower tiers, by name.
        prefill: speed of each server.
        finished: called with each request at its first token.
    """

    def __init__(
        self,
        events: EventQueue,
        cache: Cache,
        planners: Sequence[Planner],
        *,
        object_bytes: int,
        up: ReplayLink,
        down: ReplayLink,
        tiers: dict[str, ReplayTier],
        prefill: PrefillSpeed,
        finished: Callable[[NodeRequest], None],
    ) -> None:
        self._events = events
        self._tick_margin_s = TierRules(name="").transfer_deadline_s
        self.cache = cache
        self._planners = planners
        self._object_bytes = object_bytes
        self.up, self.down = up, down
        self.tiers = tiers
        self._free_s = [0.0] * len(planners)
        self._prefill = prefill
        self._finished = finished
        self._probing: dict[RequestId, NodeRequest] = {}
        self._loading: dict[RequestId, NodeRequest] = {}
        self._due_s: dict[ChunkKey, float] = {}
        """Arrival times of transfers to host memory."""
        self._next_planner = -1
        self._tick_s = math.inf
        """Latest time for the next call of `Cache.tick`."""
        self.planning = PlanningStats()
        self.loads_of, self.trials_of = Counter[str](), Counter[str]()
        """Counts of loads and of trials, by the slowest tier of a load."""
        self.convoys = self.dropped_chunks = 0
        self.busy_s = 0.0

    def backlog_s(self) -> float:
        """Return the seconds until a prefill that is ready now would start."""
        return max(0.0, self._free_s[0] - self._events.now_s)

    def arrive(self, request: NodeRequest) -> None:
        """Start a request."""
        request.planner = self._next_planner = (self._next_planner + 1) % len(self._planners)
        self._look_up(request)
        self._drain()

    # ---- requests --------------------------------------------------------------------------------------------------

    def _look_up(self, request: NodeRequest) -> None:
        compute_s = self._planners[request.planner].waits_for_s(request.input_tokens, 0)
        answer = self.cache.lookup(request.id, request.prefix, self._events.now_s, compute_s=compute_s)
        if answer.presence is Presence.PROBING:
            self._probing[request.id] = request
            self._schedule_tick()
            return
        self._probing.pop(request.id, None)
        self._plan(request, answer)
        plan = request.plan
        if plan is None or not plan.tokens:
            self._compute(request)
            return
        chunks = plan.tokens // request.prefix.chunk_tokens
        self.convoys += any(
            self.cache.presence(request.prefix.keys[chunk], 0) is Presence.ARRIVING for chunk in range(chunks)
        )
        self.planning.loads += 1
        self.planning.trials += plan.is_trial
        self.loads_of[plan.source] += 1
        self.trials_of[plan.source] += plan.is_trial
        self._loading[request.id] = request
        self._planners[request.planner].begun(plan, self._events.now_s)
        self.cache.load(
            request.id,
            request.prefix,
            plan.tokens,
            _engine_places(chunks),
            self._events.now_s,
            budget=plan.budget,
            conversation=request.session,
        )
        self._schedule_tick()

    def _plan(self, request: NodeRequest, answer: Lookup) -> None:
        request.found, request.planned_s, request.ahead_s = answer.tokens, self._events.now_s, self.backlog_s()
        if not answer.tokens:
            return
        others_s = nsmallest(2, self._free_s)[1:]
        request.plan = self._planners[request.planner].plan(
            answer,
            request.input_tokens,
            ahead_s=request.ahead_s,
            beside_s=max(0.0, min(others_s, default=math.inf) - request.planned_s),
            now_s=request.planned_s,
        )
        self.planning.skipped_tokens += answer.tokens - request.plan.tokens
        request.best_s = best_split(
            self._arrivals_s(request.prefix, answer.tokens // request.prefix.chunk_tokens),
            chunk_tokens=request.prefix.chunk_tokens,
            input_tokens=request.input_tokens,
            ahead_s=request.ahead_s,
            prefill=self._prefill,
        )[1]

    def _arrivals_s(self, prefix: Prefix, chunks: int) -> Iterator[float]:
        """Yield the seconds until each leading chunk would arrive in the engine if all were loaded now.

        The links are FIFO queues. Chunks that running loads have not sent yet come first. The core submits only a few
        transfers at a time, so `ReplayLink.free_s` does not include these chunks.
        """
        now_s, entries = self._events.now_s, self.cache.host.entries[0]
        up_s = self.up.free_s
        queues_s = {name: tier.reads.free_s for name, tier in self.tiers.items()}
        due_s = dict(self._due_s)
        before = [key for it in self._loading.values() for key in _planned_keys(it)[it.sent :]]
        for place, key in enumerate([*before, *prefix.keys[:chunks]], -len(before)):
            entry = entries.get(key)
            if entry is not None and entry.residency in READABLE:
                here_s = now_s
            elif entry is not None or key in due_s:
                here_s = due_s.get(key, now_s)
            else:
                name = next((name for name, tier in self.tiers.items() if key in tier), None)
                if name is None:
                    if place >= 0:
                        return
                    continue
                reads = self.tiers[name].reads
                queues_s[name] = max(now_s, queues_s[name]) + self._object_bytes / reads.bytes_per_s
                due_s[key] = here_s = queues_s[name] + reads.latency_s
            up_s = max(up_s, here_s) + self._object_bytes / self.up.bytes_per_s
            if place >= 0:
                yield up_s + self.up.latency_s - now_s

    def _loaded(self, done: LoadDone) -> None:
        request = self._loading.pop(done.request)
        assert request.plan is not None, "every load is planned"
        now_s, planning = self._events.now_s, self.planning
        request.delivered, request.sources = done.tokens, done.sources
        load_s = now_s - request.planned_s
        self._planners[request.planner].ended(request.plan, done, load_s, now_s)
        planning.cut_loads += done.tokens < done.wanted_tokens
        planning.cut_tokens += done.wanted_tokens - done.tokens
        planning.loaded_tokens += done.tokens
        planning.predicted_load_s += request.plan.load_s
        planning.load_s += max(0.0, load_s - request.ahead_s)
        self._compute(request)

    def _compute(self, request: NodeRequest) -> None:
        now_s, planning = self._events.now_s, self.planning
        begun_s = max(heappop(self._free_s), now_s)
        took_s = self._prefill.seconds(request.delivered, request.input_tokens)
        heappush(self._free_s, begun_s + took_s)
        self.busy_s += took_s
        if request.found:
            taken_s = max(now_s - request.planned_s, request.ahead_s) + took_s
            # The actual split may be the best, because the core may interleave loads and cut a running load.
            best_s = min(request.best_s, taken_s)
            regret_s = taken_s - best_s
            planning.requests += 1
            planning.recompute_s += request.ahead_s + self._prefill.seconds(0, request.input_tokens)
            planning.taken_s += taken_s
            planning.best_s += best_s
            planning.regret_s += regret_s
            planning.regret_most_s = max(planning.regret_most_s, regret_s)
        self._events.at(begun_s + took_s, lambda: self._computed(request, took_s))

    def _computed(self, request: NodeRequest, took_s: float) -> None:
        if request.delivered < request.input_tokens:
            piece = Piece(request.input_tokens - request.delivered, request.delivered)
            self._planners[request.planner].prefilled([piece], took_s)
        request.first_token_s = self._events.now_s
        self._finished(request)
        if request.prefix.keys:
            places = _engine_places(len(request.prefix.keys))
            self.cache.store(request.id, request.prefix, places, self._events.now_s, request.session)
            self._schedule_tick()
        else:
            self.cache.release(request.id, self._events.now_s)
        self._drain()

    def _stored(self, done: StoreDone) -> None:
        self.dropped_chunks += done.dropped
        self.cache.release(done.request, self._events.now_s)

    # ---- commands and completions of the core ----------------------------------------------------------------------

    def _drain(self) -> None:
        """Handle commands and completions until the core has none."""
        cache, is_changed = self.cache, False
        while True:
            commands, events = cache.take_commands(), cache.take_events()
            if not commands and not events:
                break
            is_changed = True
            for command in commands:
                self._execute(command)
            for event in events:
                if isinstance(event, LoadDone):
                    self._loaded(event)
                elif isinstance(event, StoreDone):
                    self._stored(event)
        if is_changed and self._tick_s > self._events.now_s + self._tick_margin_s:
            self._schedule_tick()

    def _schedule_tick(self) -> None:
        """Call `Cache.tick` at the next deadline."""
        deadline_s = self.cache.next_deadline()
        if deadline_s is not None and deadline_s < self._tick_s:
            self._tick_s = deadline_s
            self._events.at(deadline_s, lambda: self._tick(deadline_s))

    def _tick(self, deadline_s: float) -> None:
        if deadline_s != self._tick_s:
            return  # an earlier tick replaced this one
        self._tick_s = math.inf
        # A deadline expires just after its time.
        self.cache.tick(self._events.now_s + 1e-6)
        self._retry_probing()
        self._drain()
        self._schedule_tick()

    def _retry_probing(self) -> None:
        for request in list(self._probing.values()):
            self._look_up(request)

    def _execute(self, command: Command) -> None:
        if isinstance(command, Transfer):
            self._move(command)
        elif isinstance(command, Probe):
            probe = command
            tier = self.tiers[probe.tier]
            self._events.at(self._events.now_s + tier.lookup_s, lambda: self._probed(probe, tier))
        elif isinstance(command, Drop):
            self.tiers[command.tier].drop(command.key)
        # Hints are ignored. So are cancellations, because every transfer starts at once.

    def _probed(self, probe: Probe, tier: ReplayTier) -> None:
        self.cache.probed(probe.id, [key in tier for key, _ in probe.objects], self._events.now_s)
        self.cache.advance(self._events.now_s)
        self._retry_probing()
        self._drain()

    def _move(self, transfer: Transfer) -> None:
        def complete(outcome: Outcome) -> None:
            self._due_s.pop(transfer.key, None)
            self.cache.complete(transfer.id, outcome, self._events.now_s)
            self.cache.advance(self._events.now_s)
            self._drain()

        use = Use(transfer.key, transfer.parent, transfer.conversation)
        if transfer.direction is Direction.GATHER:
            self._due_s[transfer.key] = self.down.send(self._object_bytes, lambda: complete(Outcome.DONE))
        elif transfer.direction is Direction.SCATTER:
            if (load := self._loading.get(transfer.request or RequestId(""))) is not None:
                load.sent += 1
            self.up.send(self._object_bytes, lambda: complete(Outcome.DONE))
        elif transfer.direction is Direction.DEMOTE:
            self.tiers[transfer.tier].write(use, lambda: complete(Outcome.DONE))
        else:
            self._due_s[transfer.key] = self.tiers[transfer.tier].read(use, complete)


def _planned_keys(request: NodeRequest) -> Sequence[ChunkKey]:
    """Return the keys of the chunks that the request's load delivers."""
    return request.prefix.keys[: request.plan.tokens // request.prefix.chunk_tokens] if request.plan else ()


def _engine_places(chunks: int) -> Sequence[Place]:
    return [Place(0, chunk, (chunk,)) for chunk in range(chunks)]


def key_of(block: int) -> ChunkKey:
    """Return the key of a trace's block."""
    return ChunkKey(block.to_bytes(32, "big"))
