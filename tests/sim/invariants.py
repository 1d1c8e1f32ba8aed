"""Compares the core's answers with the simulated memory and tiers. No answer may be wrong, late or missing."""

from dataclasses import dataclass
from functools import partial
from math import inf

from tests.sim.engine import Operation, SimJob
from tests.sim.event_log import EventLog
from tests.sim.oracle import boundaries, longest, needed
from tests.sim.scenario import Mode
from tests.sim.world import Item, Violation, World

from kvtier.core.cache import Cache
from kvtier.core.host_residency import READABLE, Residency
from kvtier.core.limits import WritePolicy
from kvtier.types import ChunkKey, LoadDone, Lookup, Prefix, Presence, RequestId, StoreDone

SLACK_S = 0.05
"""Virtual time that an answer may take beyond the copies in flight. It covers late ticks."""

ROUNDING_S = 1e-9
"""Tolerance of sums of times."""


@dataclass(slots=True)
class Counts:
    """Counters of one run."""

    lookups: int = 0
    loads: int = 0
    announced_waits: int = 0
    loads_short: int = 0
    loads_cut: int = 0
    stores: int = 0
    prefetches: int = 0
    tokens_loaded: int = 0
    held: int = 0
    dropped: int = 0


class Invariants:
    """Checks lookups, loads and stores."""

    def __init__(self, world: World, cache: Cache, log: EventLog) -> None:
        self._world = world
        self._cache = cache
        self._log = log
        self._scenario = world.scenario
        self._groups = world.scenario.layout.groups
        self._acknowledged: set[Item] = set()
        self._first_seen: dict[SimJob, set[Item]] = {}
        self.counts = Counts()

    def begin(self) -> None:
        """Count everything in the tiers as stored."""
        self._acknowledged.update(item for tier in self._world.tiers.values() for item in tier.copies)

    def prefetched(self, request: RequestId, prefix: Prefix) -> None:
        """Note that the engine asks for a prefetch."""
        self.counts.prefetches += 1
        self._log.prefetched(request, prefix)

    def released(self, job: SimJob) -> None:
        """Forget the probe answers of the request."""
        self._log.forgotten(job.request)

    # ---- lookups ---------------------------------------------------------------------------------------------------

    def looked_up(self, job: SimJob, lookup: Lookup) -> None:
        """Check that a lookup reports exactly what host memory has and the tiers answered."""
        self.counts.lookups += 1
        log, host, prefix = self._log, self._cache.host, job.prefix

        def is_ready(group: int, chunk: int) -> bool:
            return prefix.keys[chunk] in host.readable[group]

        def is_held(group: int, chunk: int, *, is_sure: bool = False) -> bool:
            key = prefix.keys[chunk]
            tiers = log.holders(job.request, (key, group), is_sure=is_sure)
            return key in host.entries[group] or any(map(log.is_read, tiers))

        expect(lookup.ready_tokens == longest(self._groups, prefix, is_ready), "ready tokens", lookup)
        tokens = longest(self._groups, prefix, is_held)
        if log.is_unsure(job.request) or self._scenario.has_remote:  # an answer of a round stands for others too
            expect(lookup.tokens in [0, *boundaries(prefix)], "tokens of a lookup", lookup)
        else:
            least = longest(self._groups, prefix, partial(is_held, is_sure=True))
            expect(least <= lookup.tokens <= tokens, f"tokens of a lookup, {least} to {tokens} expected", lookup)
            expect(lookup.tokens in [0, *boundaries(prefix)], "tokens of a lookup", lookup)
        expect(lookup.ready_tokens <= lookup.tokens, "ready tokens above tokens", lookup)
        expect(sum(count for _, count in lookup.sources) == lookup.tokens, "sources of a lookup", lookup)
        presence = Presence.ABSENT
        if lookup.tokens:
            presence = Presence.READY if lookup.tokens == lookup.ready_tokens else Presence.ARRIVING
        is_open = log.is_asking(job.request)
        if lookup.presence is Presence.PROBING and lookup.tokens < job.announced_tokens:
            self.counts.announced_waits += 1
            is_open |= self._may_wait(job)
        expect(lookup.presence is presence or (is_open and lookup.presence is Presence.PROBING), "presence", lookup)
        self._compare_with_history(job, lookup)

    def _may_wait(self, job: SimJob) -> bool:
        """Whether a request without an open probe may wait for announced chunks."""
        bound_s = min(self._scenario.limits.announced_wait_s, self._scenario.waits or inf)
        return self._world.now_s - job.began_s < bound_s

    def _compare_with_history(self, job: SimJob, lookup: Lookup) -> None:
        is_sampled = self._scenario.has_remote and not self._scenario.has_history_only  # four boundaries are probed
        if self._scenario.mode is Mode.STORM or is_sampled or self._scenario.waits is not None:
            return
        if self._scenario.announced:
            return  # the core remembers an absence, but another engine has written since
        items = [(key, group) for key in job.prefix.keys for group in range(len(self._groups))]
        seen = self._first_seen.setdefault(job, {item for item in items if self._world.is_in_a_tier(item)})
        if lookup.presence is Presence.PROBING:
            return
        least = longest(self._groups, job.prefix, lambda group, chunk: (job.prefix.keys[chunk], group) in seen)
        expect(lookup.tokens >= least, f"a lookup without faults, at least {least} are in a tier", lookup)
        is_exact = self._scenario.limits.write_policy is not WritePolicy.SELECTIVE and self._scenario.tiers
        if self._scenario.mode is Mode.QUIET and is_exact:
            tokens = self._restorable(job)
            expect(lookup.tokens == tokens, f"a quiet lookup, {tokens} were stored", lookup)

    def _restorable(self, job: SimJob) -> int:
        stored = self._acknowledged
        return longest(self._groups, job.prefix, lambda group, chunk: (job.prefix.keys[chunk], group) in stored)

    # ---- loads -----------------------------------------------------------------------------------------------------

    def load_begun(self, job: SimJob, operation: Operation) -> None:
        """Record what is available, to explain later what does not arrive."""
        self.counts.loads += 1
        self._log.load_begun(job, operation)

    def load_done(self, job: SimJob, operation: Operation, done: LoadDone) -> None:
        """Check that delivered chunks are in the blocks, missing ones have a reason, and the load ended in time."""
        prefix, world = job.prefix, self._world
        failed = set(done.failed)
        expect(done.wanted_tokens == operation.tokens, "wanted tokens", done)
        expect(len(failed) == len(done.failed) and failed <= set(operation.blocks), "failed chunks", done)

        def is_there(group: int, chunk: int) -> bool:
            return (group, chunk) not in failed and (
                (group, chunk) in operation.blocks or (chunk + 1) * prefix.chunk_tokens <= operation.resident_tokens
            )

        for group, chunk in needed(self._groups, prefix, done.tokens):
            block = operation.blocks.get((group, chunk))
            if block is None:
                expect(
                    (chunk + 1) * prefix.chunk_tokens <= operation.resident_tokens,
                    f"chunk {chunk} was not requested",
                    done,
                )
            elif not world.holds_right(block, operation.item((group, chunk))):
                raise Violation(f"wrong bytes in the engine: group {group} chunk {chunk} of {done}")
        least = min(operation.resident_tokens, operation.tokens)
        tokens = max(least, longest(self._groups, prefix, is_there, operation.tokens))
        expect(done.tokens == tokens, f"tokens of a load, {tokens} expected", done)
        expect(
            sum(count for _, count in done.sources) == max(0, tokens - operation.resident_tokens),
            "sources of a load",
            done,
        )
        self._log.explain(job, operation, done)
        self._expect_patience(job, operation, done)
        self._in_time(job, operation.start_s + self._scenario.limits.load_deadline_s, done)
        self.counts.loads_cut += done.was_cut
        self.counts.tokens_loaded += done.tokens
        self.counts.loads_short += done.tokens < done.wanted_tokens

    def _expect_patience(self, job: SimJob, operation: Operation, done: LoadDone) -> None:
        """Check that a load is cut exactly when its regret, from the arrival times, has risen by the allowance."""
        arrivals, budget = self._log.arrivals.pop(operation), operation.budget
        if budget is None:
            expect(not done.was_cut, "a load without budget to go on", done)
            return
        here = [set[ChunkKey]() for _ in self._groups]
        lowest_s = end_s = 0.0
        is_over_due = False
        for time_s, (key, group) in [*arrivals, (self._world.now_s, (ChunkKey(b""), 0))]:
            end_s = operation.start_s + budget.free_s + lowest_s + budget.allowance_s + self._worth(operation, here)
            if time_s >= end_s - ROUNDING_S:
                is_over_due = True
                break
            here[group].add(key)
            costly_s = max(0.0, time_s - operation.start_s - budget.free_s)
            lowest_s = min(lowest_s, costly_s - self._worth(operation, here))
        expect(is_over_due or not done.was_cut, "not to be cut while it pays", done)
        latest_s = end_s + self._scenario.device_s[1] + SLACK_S
        expect(job.released_s is not None or self._world.now_s <= latest_s or not is_over_due, "to be cut", done)

    def _worth(self, operation: Operation, here: list[set[ChunkKey]]) -> float:
        """Return the compute time that the leading chunks which have arrived save."""
        if operation.budget is None or not self._scenario.has_history_only:
            return 0.0
        size, keys = operation.prefix.chunk_tokens, operation.prefix.keys
        chunks = operation.resident_tokens // size
        while chunks < len(keys) and all(keys[chunks] in of_group for of_group in here):
            chunks += 1
        return operation.budget.saved_s(operation.resident_tokens, chunks * size)

    # ---- stores ----------------------------------------------------------------------------------------------------

    def store_done(self, job: SimJob, operation: Operation, done: StoreDone) -> None:
        """Check that acknowledged chunks are readable, or were evicted since."""
        self.counts.stores += 1
        self.counts.held += done.stored
        self.counts.dropped += done.dropped
        items = [operation.item(place) for place in operation.blocks]
        kept = sum(
            key in self._cache.host.readable[group] or self._log.evicted_s(key, group) >= operation.start_s
            for key, group in items
        )
        expect(done.stored <= kept, f"an acknowledged store, {kept} are readable", done)
        if self._scenario.mode is Mode.QUIET:
            expect(done.dropped == 0, "a quiet store drops nothing", done)
            self._acknowledged.update(items)
        self._in_time(job, operation.start_s + self._scenario.limits.store_deadline_s, done)

    def _in_time(self, job: SimJob, end_s: float, done: LoadDone | StoreDone) -> None:
        if job.released_s is not None:
            end_s = min(end_s, job.released_s)
        latest_s = end_s + self._scenario.device_s[1] + SLACK_S
        expect(self._world.now_s <= latest_s, f"to end by {latest_s:.3f} at the latest", done)

    # ---- after each step -------------------------------------------------------------------------------------------

    def after_step(self, *, is_waiting: bool) -> None:
        """Check what must hold at any time."""
        self._cache.check()
        self._log.check_budgets()
        self._check_readable()
        self._check_waiting()
        if is_waiting and not self._log.transfers and not self._log.probes:
            raise Violation("a load or store is open and nothing is in flight")

    def _check_readable(self) -> None:
        for group, entries in enumerate(self._cache.host.entries):
            for key, entry in entries.items():
                if entry.residency in READABLE and not self._world.is_in_slot(entry.slot, (key, group)):
                    raise Violation(f"slot {entry.slot} of group {group} is readable and holds something else")

    def _check_waiting(self) -> None:
        for entries in self._cache.host.entries:
            for entry in entries.values():
                if entry.residency is Residency.PROMOTING and not self._log.is_read(entry.source):
                    raise Violation(f"a load waits for tier {entry.source}, whose reads have stopped")

    def at_end(self) -> None:
        """Check that nothing is in flight, pinned or unanswered."""
        cache = self._cache
        expect(cache.in_flight == 0 and not self._log.transfers, "nothing in flight at the end", cache.in_flight)
        expect(not cache.host.lost, "no slot lost at the end", cache.host.lost)
        expect(cache.next_deadline() is None, "no deadline at the end", cache.next_deadline())
        for group, entries in enumerate(cache.host.entries):
            expect(all(entry.residency in READABLE and not entry.pins for entry in entries.values()), "slots", group)
            expect(cache.host.used(group) == len(entries), "slots free or readable", group)


def expect(holds: object, what: str, seen: object) -> None:
    if not holds:
        raise Violation(f"{what}: {seen}")
