"""A world for the planner: the real core, one tier whose speed changes, an engine whose costs are known, virtual time.

The world knows what the planner has to guess. So it can compute the planner's regret against computing everything, and
against the best boundary, which it finds by trying every one.
"""

import heapq
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from kvtier.core.cache import Cache
from kvtier.core.limits import Limits, TierRules
from kvtier.core.planner import LoadPlan, Piece, Planner
from kvtier.core.prefill_estimator import PrefillCosts
from kvtier.core.prefix import needed_chunks
from kvtier.layout import GroupLayout, History, KvLayout, Validity
from kvtier.policy.lru import Lru
from kvtier.types import (
    Cancel,
    ChunkKey,
    Direction,
    LoadDone,
    Outcome,
    Place,
    Prefix,
    Presence,
    Probe,
    RequestId,
    Transfer,
)

CHUNK = 256
CHUNK_BYTES = 1 << 20
STEP_TOKENS = 2048
DEVICE_S = 1e-4
"""Time of a copy from host memory to the engine."""
AGES_S = 1e6


class Speed(NamedTuple):
    """Speed of the tier from `since_s` on."""

    since_s: float
    first_s: float
    """Time before the first byte of an object."""
    chunks_per_s: float
    quota: int = 0
    """The most objects that end in each `period_s`, as in throttled groups and volumes. 0: no limit."""
    period_s: float = 1.0


@dataclass(slots=True)
class Tier:
    """Threads that read one object each, at the speed that holds when they begin."""

    speeds: Sequence[Speed]
    threads: int = 4
    free_s: list[float] = field(init=False)
    period: int = 0
    """The last period in which an object ended, and how many ended in it."""
    passed: int = 0

    def __post_init__(self) -> None:
        self.free_s = [0.0] * self.threads

    def read(self, now_s: float) -> tuple[float, float]:
        """Return when a read that is asked for now begins and when it ends."""
        begin_s = max(now_s, heapq.heappop(self.free_s))
        speed = next(speed for speed in reversed(self.speeds) if speed.since_s <= begin_s)
        end_s = begin_s + speed.first_s + self.threads / speed.chunks_per_s
        if speed.quota:
            end_s = self._within_quota(end_s, speed)
        heapq.heappush(self.free_s, end_s)
        return begin_s, end_s

    def _within_quota(self, end_s: float, speed: Speed) -> float:
        period = max(self.period, int(end_s / speed.period_s))
        if period > self.period:
            self.period, self.passed = period, 0
        elif self.passed >= speed.quota:
            self.period, self.passed = period + 1, 0
        self.passed += 1
        return max(end_s, self.period * speed.period_s)


@dataclass(slots=True)
class Answer:
    """One request up to its first token."""

    request: RequestId
    tokens: int
    plan: LoadPlan
    start_s: float
    recompute_s: float
    best_s: float
    """Time with the best of all boundaries, given the links' known future."""
    load_s: float = 0.0
    loaded: int = 0
    ttft_s: float = 0.0
    was_cut: bool = False

    @property
    def regret_s(self) -> float:
        """Regret against computing everything."""
        return self.ttft_s - self.recompute_s


class World:
    """An engine, and a tier that has every prompt. Requests do not slow down each other's computing, unless `is_one`.

    With `is_one` the engine computes one prompt at a time in order of arrival. A request's time without loads then
    includes the requests before it.
    """

    def __init__(
        self,
        costs: PrefillCosts,
        speeds: Sequence[Speed],
        *,
        groups: Sequence[Validity] = (History(),),
        threads: int = 4,
        slots: int = 64,
        is_one: bool = False,
    ) -> None:
        self._is_one = is_one
        self.free_s = 0.0
        """Time at which the engine has computed all prompts that are ready."""
        self.free_without_s = 0.0
        """The same time if there were no loads."""
        self.costs = costs
        self.tier = Tier(speeds, threads)
        self.planner = Planner(step_tokens=STEP_TOKENS)
        self.layout = KvLayout(CHUNK, tuple(GroupLayout(kind, (CHUNK_BYTES,), "test") for kind in groups))
        self.cache = Cache(
            layout=self.layout,
            slots=[slots] * len(groups),
            tiers=[TierRules(name="disk", transfer_deadline_s=AGES_S, probe_deadline_s=AGES_S)],
            evictor=Lru,
            limits=Limits(load_deadline_s=AGES_S),
        )
        self.now_s = 0.0
        self.answers: list[Answer] = []
        self._open: dict[RequestId, Answer] = {}
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._begin_s: dict[int, float] = {}

    def compute_s(self, tokens: int, context: int) -> float:
        """Return how long computing really takes."""
        steps = -(-tokens // STEP_TOKENS)
        pairs = Piece(tokens, context).pairs
        return steps * self.costs.per_step_s + tokens * self.costs.per_token_s + pairs * self.costs.per_pair_s

    def teach(self) -> None:
        """Show the planner computed prompts of all lengths."""
        for tokens in (256, 512, 1024, STEP_TOKENS):
            for context in (0, STEP_TOKENS, 8 * STEP_TOKENS, 32 * STEP_TOKENS):
                self.planner.prefilled([Piece(tokens, context)], self.compute_s(tokens, context))

    # ---- requests --------------------------------------------------------------------------------------------------

    def ask(self, *tokens: int) -> list[Answer]:
        """Send new prompts of these lengths all at once. The tier has all of each that it can."""
        asked = [self._begin(each, f"prompt {next(self._numbers)}") for each in tokens]
        while self._open:
            self._step()
        self.cache.check()
        self.now_s = max(self.now_s, *(answer.start_s + answer.ttft_s for answer in asked))
        self._run_until(self.now_s)
        self.answers += asked
        return asked

    def wait(self, seconds: float) -> None:
        """Let time pass without requests."""
        self._run_until(self.now_s + seconds)
        self.now_s += seconds

    def _begin(self, tokens: int, name: str) -> Answer:
        request = RequestId(f"{name} {next(self._numbers)}")
        chunks = (tokens - 1) // CHUNK
        prefix = Prefix(tuple(ChunkKey(f"{name} {chunk}".encode()) for chunk in range(chunks)), CHUNK)
        lookup = self.cache.lookup(request, prefix, self.now_s)
        self._settle()
        if lookup.presence is Presence.PROBING:
            lookup = self.cache.lookup(request, prefix, self.now_s)
        ahead_s = max(0.0, self.free_s - self.now_s)
        plan = self.planner.plan(lookup, tokens, ahead_s=ahead_s, now_s=self.now_s)
        recompute_s = self.compute_s(tokens, 0)
        if self._is_one:
            self.free_without_s = max(self.free_without_s, self.now_s) + recompute_s
            recompute_s = self.free_without_s - self.now_s
        answer = Answer(request, tokens, plan, self.now_s, recompute_s, self._best_s(chunks, tokens))
        if plan.tokens:
            places = [
                Place(index, chunk, (chunk,))
                for index, group in enumerate(self.layout.groups)
                for chunk in needed_chunks(group, prefix, plan.tokens)
            ]
            self._open[request] = answer
            self.planner.begun(plan, self.now_s)
            self.cache.load(request, prefix, plan.tokens, places, self.now_s, budget=plan.budget)
            self._settle()
        else:
            self._compute(answer)
        return answer

    def _best_s(self, chunks: int, tokens: int) -> float:
        tier = deepcopy(self.tier)
        best_s, latest_s = self.compute_s(tokens, 0), 0.0
        for number in range(1, chunks + 1):
            latest_s = max(latest_s, tier.read(self.now_s)[1] - self.now_s + DEVICE_S)
            best_s = min(best_s, latest_s + self.compute_s(tokens - number * CHUNK, number * CHUNK))
        return best_s

    def _ended(self, done: LoadDone) -> None:
        answer = self._open.pop(done.request)
        answer.load_s, answer.loaded, answer.was_cut = self.now_s - answer.start_s, done.tokens, done.was_cut
        self.planner.ended(answer.plan, done, answer.load_s, self.now_s)
        self._compute(answer)

    def _compute(self, answer: Answer) -> None:
        answer.ttft_s = answer.load_s + self.compute_s(answer.tokens - answer.loaded, answer.loaded)
        if self._is_one:
            waits_s = max(0.0, self.free_s - self.now_s)
            answer.ttft_s += waits_s
            self.free_s = answer.start_s + answer.ttft_s
        at = answer.loaded
        while at < answer.tokens:
            tokens = min(STEP_TOKENS, answer.tokens - at)
            self.planner.prefilled([Piece(tokens, at)], self.compute_s(tokens, at))
            at += tokens
        self.cache.release(answer.request, self.now_s)
        self._settle()

    # ---- the mover and the clock -----------------------------------------------------------------------------------

    def _step(self) -> None:
        """Process the next event."""
        deadline_s = self.cache.next_deadline()
        if not self._due or (deadline_s is not None and deadline_s <= self._due[0][0]):
            assert deadline_s is not None, "a request waits and nothing is in flight"
            self.now_s = max(self.now_s, deadline_s)
            self.cache.tick(self.now_s)
        else:
            self.now_s, _, act = heapq.heappop(self._due)
            act()
        self._settle()

    def _run_until(self, end_s: float) -> None:
        while self._due and self._due[0][0] <= end_s:
            self._step()

    def _settle(self) -> None:
        self.cache.advance(self.now_s)
        for command in self.cache.take_commands():
            if isinstance(command, Transfer):
                self._transfer(command)
            elif isinstance(command, Probe):
                self.cache.probed(command.id, [True] * len(command.objects), self.now_s)
            elif isinstance(command, Cancel):
                for number in command.ids:
                    if self._begin_s.get(number, self.now_s) > self.now_s:
                        del self._begin_s[number]
                        self._later(self.now_s, number, Outcome.CANCELLED)
        for event in self.cache.take_events():
            if isinstance(event, LoadDone):
                self._ended(event)

    def _transfer(self, transfer: Transfer) -> None:
        if transfer.direction is Direction.PROMOTE:
            self._begin_s[transfer.id], end_s = self.tier.read(self.now_s)
            self._later(end_s, transfer.id, Outcome.DONE)
        else:
            self._later(self.now_s + DEVICE_S, transfer.id, Outcome.DONE)

    def _later(self, at_s: float, number: int, outcome: Outcome) -> None:
        # A cancelled transfer is answered again when it would have ended. The core ignores that.
        heapq.heappush(self._due, (at_s, next(self._numbers), lambda: self.cache.complete(number, outcome, self.now_s)))
