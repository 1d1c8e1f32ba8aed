"""The core decides what to load, keep and move. It is pure and synchronous.

Callers pass the time. `take_commands` and `take_events` return what the core has decided. The consequences of
completions appear after the next `advance` or `tick`. The core has one owner, never blocks, and treats answers of lower
tiers as hints.

- Never lie: an object is readable only when READY or LEAVING, after its transfer was reported DONE. A reader of
  a slot holds a pin. The slot of an overdue promotion is not reused before its thread has ended.
- Never stall: see `transfer_scheduler`. Every wait has a deadline, which `tick` checks.
"""

from collections.abc import Callable, Collection, Sequence
from functools import cache
from operator import itemgetter

from kvtier.core.core_output import Output
from kvtier.core.hint_scheduler import Hints
from kvtier.core.host_residency import HOST, PRESENCE, READABLE, WAY_SHARE, HostMemory, Item
from kvtier.core.limits import Limits, TierRules
from kvtier.core.link_estimates import LinkEstimator
from kvtier.core.load_budget import LoadBudget
from kvtier.core.load_costs import CostModel, LookupQuery
from kvtier.core.operations import LoadOperation, OpenOperations, StoreOperation
from kvtier.core.prefix import Present, history_run, longest_boundary, lookup_sources, needed_chunks
from kvtier.core.survey import Survey
from kvtier.core.tier_searches import ProbeAnswers, Probes
from kvtier.core.tier_state import TierStates
from kvtier.core.tier_writes import TierWrites
from kvtier.core.transfer_scheduler import TransferScheduler
from kvtier.errors import BadCallError
from kvtier.layout import KvLayout
from kvtier.policy.base import Evictor
from kvtier.types import (
    ChunkKey,
    Command,
    Direction,
    Drop,
    Event,
    LoadOption,
    Lookup,
    NextTurn,
    Outcome,
    Place,
    Prefix,
    Presence,
    RequestId,
    Tell,
)

_GROUP_AND_CHUNK = itemgetter(0, 1)
"""Returns the group and chunk of a `Place` without running Python code."""

TRANSFER_SHARE = 0.25
"""Maximum share of the slots for promotions, and likewise for demotions. If all tiers hang, half of host memory stays
usable."""


class Cache:
    """The host memory of one engine, and the state of the lower tiers.

    Args:
        layout: the model's KV groups.
        slots: host slots of each group, at least two each.
        tiers: the lower tiers, fastest first.
        evictor: creates the evictor of a group in host memory.
        down: tiers that are not open yet.
        stages_only: whether host memory is only a staging area, as in `ObjectCache`.
    """

    def __init__(
        self,
        *,
        layout: KvLayout,
        slots: Sequence[int],
        tiers: Sequence[TierRules],
        evictor: Callable[[], Evictor],
        limits: Limits | None = None,
        down: Collection[str] = (),
        stages_only: bool = False,
    ) -> None:
        if len(slots) != len(layout.groups) or min(slots) < 2:
            raise ValueError(f"each of the {len(layout.groups)} groups needs at least 2 slots, got {slots}")
        self._layout, self._slots, self._rules, self._evictor = layout, slots, tiers, evictor
        self._limits = limits or Limits()
        self._stages_only = stages_only
        self._output = Output()
        self._begin(down)

    def _begin(self, down: Collection[str]) -> None:
        """Start with empty host memory, and with the tiers in `down` marked as down."""
        layout, slots, tiers, stages_only = self._layout, self._slots, self._rules, self._stages_only
        self._next_turns: dict[str, NextTurn | None] = {}
        """Next turns that wait for the stores of their conversations, because evictors must see the stores first."""
        self._may_move = False
        """Whether anything since the last `advance` may allow transfers to start."""
        self._output = Output(counters=self._output.counters, new_id=self._output.new_id)
        self.commands, self.events = self._output.commands, self._output.events
        """Commands and events that have not been taken yet."""
        self.counters = self._output.counters
        has_staging = any(rules.persists for rules in tiers[:-1])
        self.host = HostMemory(slots, self._evictor, layout, has_staging=has_staging, stages_only=stages_only)
        self._tiers = TierStates(tiers, int(min(slots) * _share(stages_only=stages_only)), self._output, down)
        order = [HOST, *self._tiers.by_name]
        self._estimators = {source: LinkEstimator() for source in order}
        self._probes = Probes(
            layout=layout,
            host=self.host,
            tiers=self._tiers,
            limits=self._limits,
            output=self._output,
            estimators=self._estimators,
        )
        self._tier_writes = TierWrites(self.host, self._tiers, self._limits, self._output)
        self._operations = OpenOperations(
            layout=layout,
            output=self._output,
            host=self.host,
            tier_writes=self._tier_writes,
            order=order,
        )
        self._transfers = TransferScheduler(
            limits=self._limits,
            output=self._output,
            host=self.host,
            tiers=self._tiers,
            probes=self._probes,
            tier_writes=self._tier_writes,
            operations=self._operations,
            estimators=self._estimators,
        )
        self.hints = Hints(
            layout=layout,
            limits=self._limits,
            host=self.host,
            probes=self._probes,
            tier_writes=self._tier_writes,
            operations=self._operations,
            estimators=self._estimators,
            source_of=self._source_of,
            refused=self._output.counters.refused_hints,
        )
        self._cost_model = CostModel(
            layout=layout,
            host=self.host,
            estimators=self._estimators,
            loads=self._operations.loads.values(),
            scatters=lambda: len(self._operations.scatters),
            first_tier=self._transfers.first_tier,
        )

    def renew(self) -> None:
        """Forget every object, operation, hint and answer, after an error in the middle of a decision.

        No earlier command may be in flight. Tiers that are down stay down until a trial. Ids and counters continue.
        """
        evictions = self.host.evictions
        ways = Direction.PROMOTE, Direction.DEMOTE
        self._begin([name for name in self.tier_names if not all(self.is_up(name, way) for way in ways)])
        self.host.evictions = evictions

    # ---- lookup ----------------------------------------------------------------------------------------------------

    def lookup(
        self,
        request: RequestId,
        prefix: Prefix,
        now_s: float,
        *,
        resident_tokens: int = 0,
        compute_s: float | None = None,
        announced_tokens: int = 0,
    ) -> Lookup:
        """Return how many leading tokens can be loaded, and send probes as in `Probes.search`.

        Args:
            request: name of the request.
            prefix: prefix of its prompt.
            now_s: the time.
            resident_tokens: leading tokens that the engine holds; the options do not include them.
            compute_s: expected time to compute the rest of the prompt, which bounds how long the request waits for
                remote tiers. If None, it waits until their deadlines.
            announced_tokens: leading tokens that another engine is storing in a remote tier. The request waits for them
                while more appear, for at most `Limits.announced_wait_s` and no longer than computing them would take.
        """
        self.tick(now_s)
        runs = [self._readable_run(group, prefix.keys) for group in range(len(self._layout.groups))]
        if self.host.has_history_only and min(runs) == len(prefix.keys):
            # Everything is in host memory, so boundary rules and tiers cannot change the result.
            tokens = len(prefix.keys) * prefix.chunk_tokens
            if not tokens:
                return NO_LOOKUP
            query = LookupQuery(prefix, resident_tokens, _in_host, runs)
            options = self._cost_model.options(query, tokens, tokens, now_s)
            return Lookup(tokens, tokens, Presence.READY, ((HOST, tokens),), options, tokens)
        known = self._probes.search(
            request, prefix, compute_s, now_s, resident_tokens=resident_tokens, announced_tokens=announced_tokens
        )
        ready = longest_boundary(self._layout.groups, prefix, self._is_ready(prefix), runs)

        @cache  # it is called for the boundary, the sources and the options
        def source_of(group: int, chunk: int) -> str | None:
            return self._source_of(known, prefix.keys[chunk], group)

        def is_available(group: int, chunk: int) -> bool:
            return source_of(group, chunk) is not None

        tokens = longest_boundary(self._layout.groups, prefix, is_available, runs)
        waits = False
        if known is not None and tokens < prefix.tokens:
            found = len(known.found_in)
            waits = self._probes.is_waiting(known, now_s)
            waits = waits or self._probes.awaits_announced(request, known, max(tokens, resident_tokens), now_s)
            if len(known.found_in) > found:  # remembered answers have found more without a probe
                return self.lookup(
                    request,
                    prefix,
                    now_s,
                    resident_tokens=resident_tokens,
                    compute_s=compute_s,
                    announced_tokens=announced_tokens,
                )
        if waits:
            presence = Presence.PROBING
        elif tokens > ready:
            presence = Presence.ARRIVING
        else:
            presence = Presence.READY if tokens else Presence.ABSENT
        order = [HOST, *self._tiers.by_name]
        sources = lookup_sources(self._layout.groups, prefix, tokens, lambda g, c: source_of(g, c) or HOST, order)
        options: tuple[LoadOption, ...] = ()
        if presence is not Presence.PROBING:
            options = self._cost_model.options(
                LookupQuery(prefix, resident_tokens, source_of, runs), ready, tokens, now_s
            )
        return Lookup(
            tokens, ready, presence, sources, options, self._history_tokens(prefix, tokens, is_available, runs)
        )

    def survey(self, prefix: Prefix, now_s: float) -> Survey:
        """Start a survey of the places that hold objects of `prefix`. It is complete when `unasked` is empty."""
        self.tick(now_s)
        return self._probes.survey(prefix, now_s)

    def host_tokens(self, prefix: Prefix, *, is_retained: bool = False) -> int:
        """Return how many leading tokens can be loaded from host memory alone.

        With `is_retained`, only objects that hints retain count.
        """
        entries = self.host.entries

        def is_there(group: int, chunk: int) -> bool:
            entry = entries[group].get(prefix.keys[chunk])
            return entry is not None and entry.residency in READABLE and entry.is_retained >= is_retained

        return longest_boundary(self._layout.groups, prefix, is_there)

    def presence(self, key: ChunkKey, group: int) -> Presence:
        """Return whether an object is in host memory, on its way there, or absent."""
        entry = self.host.entry(key, group)
        return Presence.ABSENT if entry is None else PRESENCE[entry.residency]

    @property
    def pending_count(self) -> int:
        """Number of objects that have pending writes or wait to be relayed between tiers that are up."""
        return self._tier_writes.count

    def relays_waiting(self) -> dict[str, int]:
        """Return how many objects wait to be relayed to each tier."""
        return self._tier_writes.relays_waiting()

    @property
    def in_flight(self) -> int:
        """Number of transfers and probes without an answer."""
        return len(self._transfers.flights) + len(self._probes)

    @property
    def tier_names(self) -> tuple[str, ...]:
        """Names of the lower tiers, fastest first."""
        return tuple(self._tiers.by_name)

    def is_up(self, tier: str, direction: Direction = Direction.PROMOTE) -> bool:
        """Return whether `tier` still gets reads, or writes if `direction` is DEMOTE. Repeated failures stop them."""
        return self._tiers.by_name[tier].breakers[direction].is_up()

    def check_tiers(self, now_s: float, watched: Callable[[str], tuple[Item, ...]] = lambda _tier: ()) -> None:
        """Send health checks to the tiers. Call it about once a second.

        Args:
            now_s: the time.
            watched: returns the objects that a tier's check asks for on behalf of observers; none by default.
        """
        self._probes.send_health_checks(now_s, watched)

    def next_deadline(self) -> float | None:
        """Return the time at which `tick` has work to do if no other call is made."""
        ends = [self._transfers.next_deadline(), self._probes.next_deadline()]
        if self.hints.are_given:
            ends.append(self.hints.next_deadline())
        return min((end for end in ends if end is not None), default=None)

    # ---- requests --------------------------------------------------------------------------------------------------

    def load(
        self,
        request: RequestId,
        prefix: Prefix,
        tokens: int,
        places: Sequence[Place],
        now_s: float,
        *,
        resident_tokens: int = 0,
        budget: LoadBudget | None = None,
        conversation: str | None = None,
    ) -> None:
        """Load the leading `tokens` into `places`. One LoadDone follows, early if the load exceeds its `budget`.

        Raises:
            BadCallError: the request has an open load; `tokens` is not a boundary; a place is outside the prefix, past
                `tokens` or named twice; a required object is not resident and has no place.
        """
        self._expire(now_s)  # not `advance`, because waiting operations could evict objects of this load
        if request in self._operations.loads:
            raise BadCallError(f"request {request!r} has a load under way")
        self._check_load(prefix, tokens, places, resident_tokens)
        load = LoadOperation(
            request=request,
            prefix=prefix,
            conversation=conversation,
            deadline_s=now_s + self._limits.load_deadline_s,
            tokens=tokens,
            resident_tokens=resident_tokens,
        )
        load.begin(now_s, budget, is_alone=not self._operations.loads)
        self._operations.begin_load(load, places, now_s)
        self._transfers.advance(now_s)

    def store(
        self, request: RequestId, prefix: Prefix, places: Sequence[Place], now_s: float, conversation: str | None = None
    ) -> None:
        """Store the chunks at `places`. One StoreDone follows.

        Raises:
            BadCallError: a place is outside the prefix.
        """
        self.tick(now_s)
        self._check_places(prefix, places)
        deadline_s = now_s + self._limits.store_deadline_s
        store = StoreOperation(request=request, prefix=prefix, conversation=conversation, deadline_s=deadline_s)
        self._operations.begin_store(store, places, now_s)
        self._transfers.advance(now_s)
        self._operations.end_if_finished(store)

    def release(self, request: RequestId, now_s: float) -> None:
        """Forget `request`, and drop its queued work. Its Done events follow when its last transfer has ended."""
        self._stop(request)
        self._transfers.advance(now_s)

    def expects(self, conversation: str, next_turn: NextTurn | None) -> None:
        """Note the kind of the conversation's next turn for the evictors of host memory and tiers.

        A later `advance` passes it to them, after the objects that the conversation is storing have reached them.
        """
        self._next_turns.pop(conversation, None)
        self._next_turns[conversation] = next_turn

    def forget_hints(self) -> None:
        """End every retention and prefetch."""
        self.hints.forget_all()
        for prefetch in list(self._operations.prefetches.values()):
            self._transfers.stop(prefetch)
        self._may_move = True

    def stop(self, now_s: float) -> None:
        """Release every request with an open load or store, and forget every hint."""
        self.forget_hints()
        for request in dict.fromkeys([*self._operations.loads, *(store.request for store in self._operations.stores)]):
            self._stop(request)
        self._transfers.advance(now_s)

    def flush(self, now_s: float) -> None:
        """Queue all pending writes under any write policy, and the writes that tiers missed while they were down."""
        self._tier_writes.flush(now_s)
        self._transfers.advance(now_s)

    def clear(self, now_s: float) -> tuple[int, int]:
        """End every hint, and free the slots of all objects that have neither a pin nor a pending write.

        Returns:
            How many objects have left host memory, and how many stay until their transfers end and space is needed.
        """
        self.tick(now_s)
        self.forget_hints()
        removed = self.host.clear()
        self._may_move = True
        self.advance(now_s)
        return removed, sum(map(len, self.host.entries))

    # ---- completions -----------------------------------------------------------------------------------------------

    def complete(self, transfer_id: int, outcome: Outcome, now_s: float, *, is_fault: bool = False) -> None:
        """Handle the completion of a transfer. A fault is a failure of the tier, not a refusal or cancellation."""
        self._may_move |= self._transfers.complete(transfer_id, outcome, now_s, is_fault=is_fault)

    def probed(self, probe_id: int, present: Sequence[bool] | None, now_s: float) -> None:
        """Handle the answer to a probe. `present` is None if the tier failed."""
        self._probes.answered(probe_id, present, now_s)
        self._may_move = True  # demotions may be waiting for a trial

    def dropped(self, drop: Drop, outcome: Outcome) -> None:
        """Handle the completion of a drop. If it failed, the bad copy may remain, and the next write drops it again."""
        item, tier_state = (drop.key, drop.group), self._tiers.by_name[drop.tier]
        if outcome is Outcome.FAILED:
            tier_state.mark_suspect([item])
        elif outcome is Outcome.DONE:
            tier_state.was_dropped(item)

    def advance(self, now_s: float) -> None:
        """Start the work that completions have made possible. One call serves many completions for the cost of one."""
        if self._may_move:
            self._may_move = False
            self._transfers.advance(now_s)
        while self.hints.are_given and self.hints.advance(now_s):
            self._transfers.advance(now_s)
        if self._next_turns:
            self._pass_next_turns()

    def tick(self, now_s: float) -> None:
        """Check deadlines, then `advance`."""
        self._expire(now_s)
        self.advance(now_s)

    def _expire(self, now_s: float) -> None:
        self._may_move |= self._probes.expire(now_s) | self._transfers.expire(now_s)
        if self.hints.are_given:
            self._may_move |= self.hints.expire(now_s)

    # ---- output ----------------------------------------------------------------------------------------------------

    def take_commands(self) -> list[Command]:
        """Return the commands since the last call."""
        taken = self._output.commands.copy()
        self._output.commands.clear()
        return taken

    def take_events(self) -> list[Event]:
        """Return the events since the last call."""
        taken = self._output.events.copy()
        self._output.events.clear()
        return taken

    def check(self) -> None:
        """Assert every invariant of the current state.

        Raises:
            AssertionError: an invariant does not hold, which is a bug in the core.
        """
        self.host.check()
        self._transfers.check()
        self.hints.check()

    def _pass_next_turns(self) -> None:
        storing = {store.conversation for store in self._operations.stores}
        for conversation in [conversation for conversation in self._next_turns if conversation not in storing]:
            next_turn = self._next_turns.pop(conversation)
            self.host.expects(conversation, next_turn)
            self._output.commands += [Tell(tier_state.name, conversation, next_turn) for tier_state in self._tiers.all]

    def _stop(self, request: RequestId) -> None:
        self.hints.forget(request)
        self._probes.forget(request)
        operations = self._operations
        for work in [*operations.loads.values(), *operations.prefetches.values(), *operations.stores]:
            if work.request == request:
                self._transfers.stop(work)

    # ---- helpers ---------------------------------------------------------------------------------------------------

    def _history_tokens(self, prefix: Prefix, tokens: int, is_available: Present, runs: Sequence[int]) -> int:
        """Return `Lookup.history_tokens` for a lookup that found `tokens`."""
        full = tokens // prefix.chunk_tokens
        if not any(self.host.is_history) or full >= len(prefix.keys):
            return tokens
        run = history_run(self._layout.groups, prefix, is_available, [max(run, full) for run in runs])
        return max(tokens, run * prefix.chunk_tokens)

    def _readable_run(self, group: int, keys: tuple[ChunkKey, ...]) -> int:
        readable = self.host.readable[group]
        for position, key in enumerate(keys):
            if key not in readable:
                return position
        return len(keys)

    def _is_ready(self, prefix: Prefix) -> Callable[[int, int], bool]:
        return lambda group, chunk: prefix.keys[chunk] in self.host.readable[group]

    def _source_of(self, known: ProbeAnswers | None, key: ChunkKey, group: int) -> str | None:
        entry = self.host.entry(key, group)
        if entry is not None:
            return HOST if entry.residency in READABLE else entry.source
        tier = known.found_in.get((key, group)) if known is not None else None
        return tier if tier is not None and self._tiers.by_name[tier].breakers[Direction.PROMOTE].is_up() else None

    def _check_places(self, prefix: Prefix, places: Sequence[Place]) -> None:
        chunks = len(prefix.keys)
        groups = len(self._layout.groups)
        for place in places:
            if not (0 <= place.group < groups and 0 <= place.chunk < chunks):
                raise BadCallError(f"{place} is outside the prefix, which has {groups} groups and {chunks} chunks")

    def _check_load(self, prefix: Prefix, tokens: int, places: Sequence[Place], resident_tokens: int) -> None:
        """Check that a load covers every object that its tokens require, because LoadDone relies on it."""
        groups = self._layout.groups
        try:
            needed = [
                (index, chunk) for index in range(len(groups)) for chunk in needed_chunks(groups[index], prefix, tokens)
            ]
        except ValueError as error:
            raise BadCallError(str(error)) from None
        self._check_places(prefix, places)
        named = set(map(_GROUP_AND_CHUNK, places))
        if len(named) != len(places):
            raise BadCallError(f"a load names {len(places) - len(named)} of its places twice")
        for _, chunk in named:
            end = (chunk + 1) * prefix.chunk_tokens
            if end > tokens:
                raise BadCallError(f"chunk {chunk} ends at {end}, past the {tokens} tokens of the load")
        for group, chunk in needed:
            if (group, chunk) not in named and (chunk + 1) * prefix.chunk_tokens > resident_tokens:
                what = f"a load of {tokens} tokens, of which {resident_tokens} are resident,"
                raise BadCallError(f"{what} needs chunk {chunk} of group {group}")


def _share(*, stages_only: bool) -> float:
    """Return the maximum share of the slots for promotions in flight, and for demotions in flight."""
    return WAY_SHARE if stages_only else TRANSFER_SHARE


def _in_host(_group: int, _chunk: int) -> str:  # pragma: no cover  never called for readable objects
    return HOST


NO_LOOKUP = Lookup(0, 0, Presence.ABSENT)
