"""Hints about a prefix: retain it, evict it first, or bring it back by a given time. They affect only speed.

    retain     keeps its objects in host memory until a given time (`retention`)
    lower      makes those of its objects that only one conversation has used the first victims of eviction
    prefetch   brings its objects from lower tiers into host memory by a given time

A hint waits for the open stores of its prefix. Objects that are retained, or evicted until a prefetch brings them back,
are written to the lower tiers under any write policy.

A client chooses its hints and salts, and could pose as many clients, so clients have no separate shares. Instead, each
hint has a limit, and hints that are due earlier come first. The operator's calls do not compete with calls of clients.
Refused hints of clients are counted. The operator's calls return their results.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from kvtier.core.host_residency import READABLE, HostEntry, HostMemory
from kvtier.core.limits import Limits
from kvtier.core.link_estimates import LinkEstimator
from kvtier.core.operations import OpenOperations, PrefetchOperation, StoreOperation
from kvtier.core.prefix import longest_boundary, needed_chunks
from kvtier.core.retention import Retention
from kvtier.core.tier_searches import ProbeAnswers, Probes
from kvtier.core.tier_writes import TierWrites
from kvtier.layout import KvLayout
from kvtier.types import ChunkKey, Place, Prefix, Priority, RequestId

WAITING_HINTS_MAX = 256
"""Maximum number of hints that may wait for stores. Beyond that, the oldest are forgotten, the operator's last."""

PREFETCHES_MAX = 256
"""Maximum number of prefetches of clients that may be open or due later. The operator may have as many. Beyond that,
the prefetches that are due latest and have not begun are ignored."""

LEAD_S = 1.0
"""A prefetch begins this long before its due time, plus twice the expected time of its transfers."""

KEEP_S = 5.0
"""Prefetched objects are retained this long after their due time, plus the time from the call to the due time (or
`wait_s`, if that is longer)."""

SourceOf = Callable[[ProbeAnswers | None, ChunkKey, int], str | None]


class Wish(NamedTuple):
    """A hint that waits for the open stores of its prefix."""

    stores: list[StoreOperation]
    apply: Callable[[float], None]
    """Applies the hint. It takes the time."""
    priority: Priority


@dataclass(slots=True, eq=False)
class DuePrefetch:
    """A prefetch that has not begun, because it is due later or its probes are still open."""

    request: RequestId
    prefix: Prefix
    conversation: str | None
    at_s: float
    start_s: float
    deadline_s: float
    until_s: float
    """Time until which the objects that it brings are retained."""
    priority: Priority
    has_started: bool = field(default=False, init=False)


class Hints:
    """The hints that wait, the prefetches that are due, and the objects that are retained.

    Args:
        source_of: returns the source of an object, from the answers to a request's probes; None if none is known.
        estimators: one for the link of host memory, and one for the link of each tier.
        refused: counts the refused hints of requests, by reason (`Counters`).
    """

    def __init__(
        self,
        *,
        layout: KvLayout,
        limits: Limits,
        host: HostMemory,
        probes: Probes,
        tier_writes: TierWrites,
        operations: OpenOperations,
        estimators: dict[str, LinkEstimator],
        source_of: SourceOf,
        refused: dict[str, int],
    ) -> None:
        self._layout = layout
        self._limits = limits
        self._host = host
        self._probes = probes
        self._tier_writes = tier_writes
        self._operations = operations
        self._estimators = estimators
        self._source_of = source_of
        self._refused = refused
        self.retention = Retention(host, limits.retained_share, limits.hint_share, refused)
        self._wishes: list[Wish] = []
        self._due: dict[RequestId, DuePrefetch] = {}
        self.are_given = False
        """Whether any hint has been given. Until then, `advance`, `expire` and `next_deadline` need not be called."""

    # ---- calls -----------------------------------------------------------------------------------------------------

    def retain(self, prefix: Prefix, until_s: float, now_s: float, priority: Priority = Priority.NORMAL) -> None:
        """Keep the objects of `prefix` in host memory until `until_s`, within the shares and `retain_s` of `Limits`.

        Beyond the share, the oldest retention of the lowest priority ends. Lower tiers also get the objects.
        """
        until_s = min(until_s, now_s + self._limits.retain_s)
        self._wish(prefix, lambda at_s: self._retain(prefix, until_s, at_s, priority), priority)

    def end(self, prefix: Prefix) -> None:
        """Let the objects of `prefix` in host memory be evicted again, whichever hint retained them."""
        self._wish(prefix, lambda _at_s: self.retention.end(prefix), Priority.OPERATOR)

    def lower(self, prefix: Prefix, conversation: str | None = None) -> None:
        """Let those objects of `prefix` that no other conversation has used be evicted first.

        If `conversation` is None, only objects that one operation without a conversation has used are affected.
        """
        self._wish(prefix, lambda at_s: self._lower(prefix, conversation, at_s, is_kept=False))

    def prefetch(
        self,
        request: RequestId,
        prefix: Prefix,
        at_s: float,
        now_s: float,
        conversation: str | None = None,
        *,
        wait_s: float = 0.0,
        priority: Priority = Priority.NORMAL,
    ) -> None:
        """Load the objects of `prefix` that lower tiers hold into host memory by `at_s`, and retain them there.

        Until then, objects that only `conversation` has used are written to lower tiers and evicted first. A prefetch
        ends without an event, at the latest after `Cache.release` of its `request`. It may be late by `wait_s` or
        `KEEP_S`, whichever is longer.
        """
        prefix = self._bounded(prefix, priority)
        if not prefix.keys or request in self._due or request in self._operations.prefetches:
            return
        at_s = min(at_s, now_s + self._limits.retain_s)
        if not self._has_place(at_s, priority):
            return
        until_s = min(at_s + max(wait_s, at_s - now_s) + KEEP_S, now_s + self._limits.retain_s)
        # A prefetch that has begun keeps its place, so its deadline is not extended to the end of the retention.
        deadline_s = min(at_s + max(wait_s, KEEP_S), until_s)
        start_s = max(now_s, at_s - self._lead_s(prefix, now_s))
        self.are_given = True
        self._due[request] = DuePrefetch(request, prefix, conversation, at_s, start_s, deadline_s, until_s, priority)
        if start_s > now_s and len(self._estimators) > 1:
            self._wish(prefix, lambda at_s: self._lower(prefix, conversation, at_s, is_kept=True))

    def forget(self, request: RequestId) -> None:
        """Forget a prefetch that has not begun."""
        if self._due.pop(request, None) is not None:
            self._probes.forget(request)

    def forget_all(self) -> None:
        """Forget every hint, and end every retention."""
        self._wishes.clear()
        for request in list(self._due):
            self.forget(request)
        self.retention.end_all()

    # ---- time ------------------------------------------------------------------------------------------------------

    def advance(self, now_s: float) -> bool:
        """Apply hints whose stores have ended, and begin prefetches. Return whether transfers may start."""
        stores, waiting = self._operations.stores, list[Wish]()
        may_move = False
        for wish in self._wishes:
            if any(store in stores for store in wish.stores):
                waiting.append(wish)
            else:
                wish.apply(now_s)
                may_move = True
        self._wishes = waiting
        for due in [due for due in self._due.values() if due.start_s <= now_s]:
            may_move |= self._begin(due, now_s)
        while self._operations.prefetched:
            self._end(self._operations.prefetched.pop(), now_s)
            may_move = True
        return may_move

    def expire(self, now_s: float) -> bool:
        """End retentions whose time has come. Return whether transfers may start."""
        return self.retention.expire(now_s)

    def next_deadline(self) -> float | None:
        """Return the time at which `advance` or `expire` has work to do."""
        ends = [due.deadline_s if due.has_started else due.start_s for due in self._due.values()]
        end = self.retention.next_deadline()
        return min(ends if end is None else [*ends, end], default=None)

    def check(self) -> None:
        """Assert that retentions, waiting hints and prefetches are consistent.

        Raises:
            AssertionError: they are inconsistent, which is a bug in the core.
        """
        self.retention.check()
        assert len(self._wishes) <= WAITING_HINTS_MAX, "too many hints wait"
        assert not self._due.keys() & self._operations.prefetches.keys(), "a prefetch has begun twice"

    # ---- applying hints --------------------------------------------------------------------------------------------

    def _wish(self, prefix: Prefix, apply: Callable[[float], None], priority: Priority = Priority.NORMAL) -> None:
        self.are_given = True
        keys = set(prefix.keys)
        stores = [store for store in self._operations.stores if store.prefix.keys and store.prefix.keys[-1] in keys]
        self._wishes.append(Wish(stores, apply, priority))
        if len(self._wishes) > WAITING_HINTS_MAX:
            dropped = min(self._wishes, key=lambda it: it.priority)  # the oldest of the lowest priority
            self._wishes.remove(dropped)
            self._refused["waiting"] += dropped.priority is not Priority.OPERATOR

    def _has_place(self, at_s: float, priority: Priority) -> bool:
        """Return whether a prefetch that is due at `at_s` gets a place. It may displace one that is due later."""
        is_operators = priority is Priority.OPERATOR
        due = [it for it in self._due.values() if (it.priority is Priority.OPERATOR) is is_operators]
        begun = [it.priority is Priority.OPERATOR for it in self._operations.prefetches.values()]
        if len(due) + begun.count(is_operators) < PREFETCHES_MAX:
            return True
        self._refused["prefetches"] += not is_operators
        latest = max(due, key=lambda it: it.at_s, default=None)
        if latest is None or latest.at_s <= at_s:
            return False
        self.forget(latest.request)
        return True

    def _retain(self, prefix: Prefix, until_s: float, now_s: float, priority: Priority) -> None:
        if until_s > now_s:
            for entry in self.retention.retain(prefix, until_s, priority):
                self._tier_writes.keep(entry, now_s)

    def _lower(self, prefix: Prefix, conversation: str | None, now_s: float, *, is_kept: bool) -> None:
        for entry in self._own(prefix, conversation):
            if is_kept:
                self._tier_writes.keep(entry, now_s)
            self._host.lower(entry)

    def _own(self, prefix: Prefix, conversation: str | None) -> list[HostEntry]:
        """Return the readable objects of `prefix` that no other conversation has used."""
        found = [entries.get(key) for entries in self._host.entries for key in reversed(prefix.keys)]
        return [
            entry
            for entry in found
            if entry is not None
            and entry.residency in READABLE
            and entry.conversation == conversation
            and not entry.is_shared
            and (conversation is not None or entry.uses == 1)
        ]

    def _lead_s(self, prefix: Prefix, now_s: float) -> float:
        """Return how many seconds before its due time a prefetch begins."""
        size_bytes = len(prefix.keys) * sum(self._host.object_bytes)
        links = list(self._estimators.values())[1:]
        return LEAD_S + 2 * max((it.seconds(size_bytes, 0, now_s)[1] for it in links if it.is_known), default=0.0)

    def _begin(self, due: DuePrefetch, now_s: float) -> bool:
        """Ask the tiers, or begin the prefetch once they have answered. Return whether it has begun or is over."""
        due.has_started = True
        prefix = due.prefix
        known = self._probes.search(due.request, prefix, None, now_s) if now_s < due.deadline_s else None
        if known is not None and self._probes.is_waiting(known, now_s):
            return False
        del self._due[due.request]
        groups = self._layout.groups
        tokens = longest_boundary(
            groups, prefix, lambda group, chunk: self._source_of(known, prefix.keys[chunk], group) is not None
        )
        prefetch = PrefetchOperation(
            request=due.request,
            prefix=prefix,
            conversation=due.conversation,
            deadline_s=due.deadline_s,
            tokens=tokens,
            resident_tokens=0,
            priority=due.priority,
            until_s=due.until_s,
        )
        places = [
            Place(group, chunk, ())
            for group in range(len(groups))
            for chunk in needed_chunks(groups[group], prefix, tokens)
        ]
        self._operations.begin_prefetch(prefetch, places if now_s < due.deadline_s else [], now_s)
        return True

    def _bounded(self, prefix: Prefix, priority: Priority) -> Prefix:
        """Return the leading chunks that may be retained. If a request's hint names more, count it as refused."""
        limits = zip(self.retention.most_of(priority), self._host.is_history, strict=True)
        most = min([most for most, is_history in limits if is_history], default=len(prefix.keys))
        self._refused["retained"] += len(prefix.keys) > most and priority is not Priority.OPERATOR
        return prefix if len(prefix.keys) <= most else Prefix(prefix.keys[:most], prefix.chunk_tokens)

    def _end(self, prefetch: PrefetchOperation, now_s: float) -> None:
        self._probes.forget(prefetch.request)
        if not prefetch.is_over:
            self._retain(prefetch.prefix, prefetch.until_s, now_s, prefetch.priority)
