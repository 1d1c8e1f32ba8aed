"""The scheduler side: which prefixes to load, which chunks to store, and what to report to vLLM.

In the order of one engine step:

    matched      for each waiting request: how many tokens can be loaded   lookup, plan
    allocated    vLLM has allocated blocks for them                        the load begins
    orders       the step goes out to the workers                          blocks to keep off, loads that have ended
    finished     a request has ended                                       its last chunks are stored
    stepped      the step has returned                                     chunks that are now full are stored

A chunk is stored after the step that filled it has returned. Then the forward has run, no copy must be ordered after
it, and no store delays a step. All methods run in the scheduler's thread.
"""

import itertools
import logging
import math
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvtier.connect.vllm.block_pool import BlockPins
from kvtier.connect.vllm.events import BlockEvent, Events
from kvtier.connect.vllm.geometry import Geometry
from kvtier.connect.vllm.loads import Loads, OpenLoad
from kvtier.connect.vllm.prefix_protection import PrefixProtection
from kvtier.connect.vllm.request_hints import NO_HINTS, OPTED_OUT, Problem, RequestHints, request_hints
from kvtier.connect.vllm.request_history import WEIGHTS_CHANGED, RequestHistory
from kvtier.connect.vllm.request_keys import Adapters
from kvtier.connect.vllm.requests import (
    LookupAnswer,
    PrefixMatch,
    TrackedRequest,
    announced_tokens,
    announcement_of,
    comes_from_another,
    unknown_fields,
    wants_announcement,
)
from kvtier.connect.vllm.stats import UNKNOWN_PLACE
from kvtier.connect.vllm.step_timer import StepTimer
from kvtier.connect.vllm.stores import Stores, StoreSelection
from kvtier.connect.vllm.vllm_types import BlockTables, Request, SchedulerOutput
from kvtier.connect.vllm.worker import IDLE_WAIT_S, StepDone, StepOrders
from kvtier.core.planner import Piece, Planner
from kvtier.keys.chain import Chain
from kvtier.observe import metric_definitions as table
from kvtier.runtime.guards import Feature, ends_by_itself
from kvtier.runtime.journal import Journal
from kvtier.runtime.rank_group import Ranks
from kvtier.runtime.session import Session
from kvtier.runtime.trace_recorder import Recorder
from kvtier.types import LoadDone, Lookup, Prefix, Presence, Priority, RequestId, StoreDone

logger = logging.getLogger(__name__)

PROBE_WAIT_S = 0.002
"""Time per step that lookups may wait for the tiers' answers. A local directory answers sooner. Without the answer
the request starts a step later, which costs more."""

ANSWER_S = 0.1
"""How long a lookup's answer is reused while vLLM asks about a request in every step but has no room for it. A lookup
of 64,000 tokens that are on a disk takes 1 ms."""

ATTEMPTS_MAX = 3
"""Loads of one request that may deliver less than planned. After these it is computed."""


@dataclass(slots=True)
class _Weights:
    """What is known of the engine's weights."""

    is_off: bool = False
    """They have changed since the last cache reset: nothing is loaded or stored."""
    stopped_by: str = ""
    """What keeps loads and stores stopped until `go_on`; empty: nothing."""
    are_mixed: bool = False
    """vLLM's own cache may hold KV of other weights."""
    reset_step: int = 0
    """First step after the last cache reset of an idle engine."""
    trusted_step: int = 0
    """First step in which the workers compare with the present weights."""

    @property
    def are_unsure(self) -> bool:
        """Whether nothing is loaded or stored."""
        return self.is_off or bool(self.stopped_by)


class Scheduler:
    """The decisions for one engine.

    Args:
        session: the session, with its own thread; only `Loads` polls it.
        ranks: the workers; they get a note for each ended load.
        geometry: location of chunks in block tables.
        begin_keys: makes a request's keys; None: do not cache the request.
        planner: decides between loading and computing.
        tables: the current block ids of a request.
        resident: the block ids in vLLM's own cache that match a request; None: no prefix protection.
        open_pins: opens vLLM's block pool, given the callback for reused blocks.
        object_bytes: bytes of an object of each group, without padding, on all workers together.
        has_prefix_caching: other requests find loaded blocks in vLLM's own cache.
        stores: False: a decode engine that only loads.
        announces: True: a prefill engine, whose responses say what it has stored. False: only those do whose request
            wants it. None: none do, because no other engine finds it.
        events: KV events for routers, if enabled.
        recorder: records finished requests, if enabled.
        journal: gets a line for each request that has ended, if enabled.
        history: remembers the last requests, if enabled.
        drafted_tokens: a step with a longer request leaves draft KV unwritten; see `support.drafted_tokens`.
        is_alone: False: beside another connector, which passes KV between engines. Requests that come with
            `do_remote_prefill` are the other's to load, and nothing is announced or waited for.
        restart: see `OwnCache.restart`.
        adapters: identities of the engine's adapters, if it has any.
        allows_high_priority: requests may retain KV with a high priority.
        unknown_change: called when the weights have changed, or may have, and no call says when they are complete.
    """

    def __init__(
        self,
        *,
        session: Session,
        ranks: Ranks,
        geometry: Geometry,
        begin_keys: Callable[[Request], Chain | None],
        planner: Planner,
        tables: Callable[[str], BlockTables],
        resident: Callable[[Request], BlockTables] | None,
        open_pins: Callable[[Callable[[int], None]], BlockPins],
        object_bytes: Sequence[int],
        has_prefix_caching: bool,
        stores: bool = True,
        announces: bool | None = False,
        events: Events | None = None,
        recorder: Recorder | None = None,
        journal: Journal | None = None,
        history: RequestHistory | None = None,
        drafted_tokens: int = sys.maxsize,
        is_alone: bool = True,
        restart: Callable[[Collection[str]], None] = lambda _: None,
        adapters: Adapters | None = None,
        allows_high_priority: bool = False,
        unknown_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._session, self._ranks, self._geometry = session, ranks, geometry
        self._begin_keys, self._planner, self._tables = begin_keys, planner, tables
        self._object_bytes = object_bytes
        self._has_prefix_caching = has_prefix_caching
        self._is_storing = stores
        self._is_alone, self._allows_high_priority = is_alone, allows_high_priority
        self._announces = announces if is_alone else None
        self._restart, self._unknown_change = restart, unknown_change
        self._weights = _Weights()
        self._own_is_empty = False
        """vLLM's own cache was reset, and no step has been scheduled since."""
        self.has_run = False
        """A step has computed something since loads and stores were stopped: perhaps with other weights."""
        self.is_encoder_empty = True
        """vLLM's cache of encoded images and other items was reset, and no step has computed anything since."""
        self._is_reset = False
        """Other engines have other keys since a cache reset."""
        self._guards = guards = session.guards
        self._events = events and guards.around(Feature.EVENTS, events, take=(), has_news=False)
        self._has_cleared = False
        """Routers were told to forget everything, because the events have ended."""
        self._recorder, self._journal = recorder, journal
        self._history = history and guards.around(Feature.HISTORY, history)
        self._cleared_salts: set[str] = set()
        """Other engines have other keys for their requests, as for all since a cache reset."""
        self._wishes: deque[str | None] = deque()
        """Salts to clear, None for all: from other threads, for the next call of this one."""
        self._drafted_tokens = drafted_tokens
        self._has_undrafted = False
        """vLLM's own cache may hold blocks of a step without the draft model."""
        self._adapters = adapters
        self._mixed_adapters: set[int] = set() if adapters is None else adapters.mixed
        self._numbers = itertools.count()
        self._warned: set[str] = set()
        self._requests: dict[str, TrackedRequest] = {}
        self._step_timer = StepTimer(planner)
        self._selection = StoreSelection(geometry)
        self._loads = Loads(session, geometry, ranks.send_note)
        self._stores = Stores(session, open_pins)
        self._protection = PrefixProtection(geometry, self._stores.pins, resident)
        self._step = 0
        self._confirmed_step = 0
        self._hinted: list[TrackedRequest] = []
        """Requests that have ended and whose hints the session does not know yet."""
        self._due: dict[str, TrackedRequest] = {}
        """Requests that may have a full chunk to store when their step returns."""
        self._revoked: list[RequestId] = []
        self._probe_wait_s = PROBE_WAIT_S
        self._is_busy = False
        """The last step computed something."""

    # ---- requests begin and end ------------------------------------------------------------------------------------

    def arrived(self, request: Request) -> None:
        """Track a new request."""
        has_said = request.kv_transfer_params is not None or getattr(request, "kv_hints", None) is not None
        otherwise = OPTED_OUT if has_said else NO_HINTS, 0
        hints, announced = self._guards.run(Feature.HINTS, self._said_by, request, otherwise=otherwise)
        self._clear_wished()
        tracked = TrackedRequest(request, next(self._numbers), self._keys_of(request), hints)
        tracked.announced_tokens = 0 if self._has_own_keys(request) or not self._is_alone else announced
        self._requests[request.request_id] = tracked
        if self._history is not None and not hints.opt_out:
            self._history.arrived(tracked, is_off=self._weights.are_unsure)
        self._protection.joined(tracked)

    def _said_by(self, request: Request) -> tuple[RequestHints, int]:
        """The hints of a request, and the leading tokens that another engine has announced."""
        hints, problems = request_hints(request)
        announced, lie = announced_tokens(request)
        who, outcome = "a request that opts out", "nothing of it is stored"
        if not hints.opt_out:
            who, outcome = f"request {request.request_id}", "ignored"
            unknown = unknown_fields(request) if self._is_alone else ""
            problems += [Problem("tokens", lie), Problem("unknown", unknown)]
        if hints.priority == "high" and not self._allows_high_priority:
            hints = hints._replace(priority="normal")
            text = "priority = 'high'; allowed: 'low', 'normal'; with vllm.allow_high_priority = true also 'high'"
            problems.append(Problem("high priority", text))
            count = partial(self._session.metrics.add, table.REFUSED_HINTS, reason="priority")
            self._guards.run(Feature.METRICS, count, otherwise=None)
        for field, text in problems:
            if text and field not in self._warned:
                self._warned.add(field)
                logger.warning("%s: %s; %s (logged once)", who, text, outcome)
        return hints, announced

    def _keys_of(self, request: Request) -> Chain | None:
        keys = self._begin_keys(request)  # identifies an adapter, also while kvtier is off
        return None if self._weights.are_unsure else keys

    def _prefix_of(self, tracked: TrackedRequest, tokens: int) -> Prefix | None:
        """The chunks within the leading `tokens`; None for a request that is not cached.

        A moment without memory ends the caching of this one request, before anything has changed.
        """
        try:
            return None if tracked.keys is None else tracked.prefix(tokens)
        except Exception as error:
            if not ends_by_itself(error):
                raise
            tracked.keys = None
            logger.warning("request %s is not cached any more: %r", tracked.name, error)
            return None

    def forget(self, request: Request) -> None:
        """End a request after an internal error."""
        self._requests.pop(request.request_id, None)

    def finished(self, request: Request, tables: BlockTables) -> dict[str, Any] | None:
        """End a request: finished or aborted. Returns `kv_transfer_params` of its response."""
        self._settle()
        tracked = self._requests.pop(request.request_id, None)
        if tracked is None:
            return None
        self._due.pop(tracked.id, None)
        self._protection.left(tracked.id)
        self._step_timer.forget(tracked.id)
        self._loads.forget_landed(tracked.id)
        if tracked.load is not None:
            # Blocks of an asynchronous load stay allocated in vLLM until its end has been reported.
            self._planner.dropped(self._loads.drop(tracked.load).match.plan)
        else:
            self._store_full_chunks(tracked, tables)
        hints = tracked.hints
        if hints.conversation is not None and hints.next_turn is not None:
            self._session.expects(hints.conversation, hints.next_turn)
        if tracked.keys is not None and hints.concern_the_end:
            self._hinted.append(tracked)
        self._forget_offers(tracked)
        if tracked.answer is not None:
            self._session.release(tracked.question)
        self._note_end(tracked)
        if hints.opt_out:  # nothing is announced, and the proxy passes this on
            return {"store": False} if self._announces or wants_announcement(request) else None
        if not self._is_storing or tracked.keys is None or self._announces is None or self._has_own_keys(request):
            return None
        if not self._announces and not wants_announcement(request):
            return None
        return announcement_of(min(tracked.published_tokens, request.num_prompt_tokens))

    def _note_end(self, tracked: TrackedRequest) -> None:
        """Pass an ended request on to the recording, the journal and the history, unless it opts out."""
        run = self._guards.run
        if tracked.hints.opt_out:
            return
        if (recorder := self._recorder) is not None:
            earliest = next(iter(self._requests.values()), None)
            since_s = None if earliest is None else earliest.arrived_s
            run(Feature.RECORDER, lambda: recorder.served(tracked.served(), since_s), otherwise=None)
        if (journal := self._journal) is not None:
            account, request = tracked.account, tracked.request
            run(Feature.JOURNAL, lambda: journal.ended(account.line(request, tracked.arrived_s)), otherwise=None)
        if self._history is not None:
            self._history.ended(tracked)

    # ---- what can be loaded ----------------------------------------------------------------------------------------

    def matched(self, request: Request, resident_tokens: int) -> int | None:
        """How many tokens beyond vLLM's `resident_tokens` can be loaded; None: ask again in a later step."""
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            return 0
        self._clear_wished()
        # The request has no blocks, or was preempted.
        if tracked.began_step is not None:
            self._protection.rejoined(tracked)
        tracked.began_step = tracked.match = None
        self._loads.forget_landed(tracked.id)
        self._forget_offers(tracked)
        self._mark_cached(tracked, resident_tokens, resident_tokens)
        if resident_tokens and (self._weights.are_mixed or _adapter_of(request) in self._mixed_adapters):
            tracked.renew(None)
        self._guards.run(Feature.JOURNAL, tracked.account.resident, resident_tokens, otherwise=None)
        most = self._geometry.hit_tokens(request.num_tokens)
        if tracked.cap_tokens is not None:
            most = min(most, tracked.cap_tokens)
        if tracked.hints.max_load_tokens is not None:
            most = min(most, resident_tokens + tracked.hints.max_load_tokens)
            most -= most % self._geometry.chunk_tokens
        is_ours = self._is_alone or not comes_from_another(request)
        is_wanted = most > resident_tokens and is_ours and not request.skip_reading_prefix_cache
        if is_wanted and (prefix := self._prefix_of(tracked, most)) is not None:
            if self._is_being_loaded(prefix, resident_tokens):
                return None
            lookup = self._look_up(tracked, prefix, resident_tokens)
            if lookup.presence is Presence.PROBING:
                return None
            tracked.match = self._choose(tracked, prefix, lookup, resident_tokens)
        self._protection.make_room(tracked, request.num_tokens - resident_tokens)
        if tracked.match is None:
            self._step_timer.will_compute(tracked)
            return 0
        return tracked.match.external_tokens

    def _mark_cached(self, tracked: TrackedRequest, tokens: int, resident_tokens: int) -> None:
        """Store what is behind these leading tokens, and nothing that vLLM holds if it may lack draft KV."""
        size = self._geometry.chunk_tokens
        whole = -(-resident_tokens // size) * size if self._has_undrafted else 0
        self._selection.mark_cached(tracked, max(whole, tokens - tokens % size))

    def _is_being_loaded(self, prefix: Prefix, resident_tokens: int) -> bool:
        """Whether another request's load will give vLLM at least half of the missing tokens."""
        if not self._has_prefix_caching:
            return False
        shared = self._loads.covered_tokens(prefix, resident_tokens) - resident_tokens
        return 0 < prefix.tokens - resident_tokens <= 2 * shared

    def _look_up(self, tracked: TrackedRequest, prefix: Prefix, resident_tokens: int) -> Lookup:
        known, now_s = tracked.answer, time.monotonic()
        if (
            known is not None
            and known.prefix is prefix
            and known.resident_tokens == resident_tokens
            and known.lookup.presence is not Presence.PROBING
            and now_s < known.time_s + ANSWER_S
        ):
            return known.lookup
        announced = tracked.announced_tokens if tracked.announced_tokens > resident_tokens else 0
        lookup = self._session.lookup(
            tracked.question,
            prefix,
            resident_tokens=resident_tokens,
            compute_s=self._planner.waits_for_s(tracked.request.num_tokens - resident_tokens, resident_tokens),
            announced_tokens=announced,
            # Announced chunks may take long, and other requests need the step.
            wait_s=0.0 if announced and known is not None and self._is_busy else max(0.0, self._probe_wait_s),
        )
        self._probe_wait_s -= time.monotonic() - now_s
        tracked.answer = LookupAnswer(prefix, resident_tokens, now_s, lookup)
        return lookup

    def _choose(
        self, tracked: TrackedRequest, prefix: Prefix, lookup: Lookup, resident_tokens: int
    ) -> PrefixMatch | None:
        # Cached tokens need not be stored. Tokens that vLLM has and the cache has lost are stored again.
        self._mark_cached(tracked, lookup.tokens, resident_tokens)
        tracked.junction_tokens = lookup.history_tokens
        if self._history is not None and lookup.tokens < prefix.tokens:
            self._history.missed(tracked, self._ranks.lost)
        if self._ranks.lost:
            return None
        plan = self._planner.plan(
            lookup,
            tracked.request.num_tokens,
            resident_tokens=resident_tokens,
            now_s=time.monotonic(),
            ahead_s=self._step_timer.ahead_s(tracked.id),
        )
        self._guards.run(Feature.JOURNAL, tracked.account.chosen, lookup, plan, self._planner, otherwise=None)
        if plan.tokens <= resident_tokens:
            return None
        return PrefixMatch(plan, prefix)

    def allocated(self, request: Request, tables: BlockTables, external_tokens: int) -> None:
        """Begin the load of `external_tokens`, now that vLLM has allocated their blocks."""
        tracked = self._requests[request.request_id]
        match = tracked.match
        if match is None:
            raise AssertionError(f"{external_tokens} external tokens were never offered to {tracked.name}")
        load = self._loads.register(tracked, match, tables)
        load.is_void = match.external_tokens != external_tokens or match is tracked.outdated
        self._planner.begun(match.plan, time.monotonic())
        self._guards.run(Feature.JOURNAL, tracked.account.load_begins, match.external_tokens, otherwise=None)
        targets = self._loads.locate(load)
        self._revoked += self._stores.cancel_lost()
        load.blocked_by = self._stores.reading(targets)
        if not load.blocked_by:
            self._start(load)

    def hit_sources(self, request: Request, tokens: int, names: Mapping[str, str]) -> dict[str, int]:
        """What `names` calls the slowest place that each of the `tokens` of a load needs, as its plan says.

        What is only announced has no place yet.
        """
        tracked = self._requests[request.request_id]
        assert tracked.match is not None
        end, options = tracked.match.plan.tokens, tracked.answer.lookup.options if tracked.answer else ()
        options = sorted(options, key=lambda it: it.tokens)
        places = [*(names.get(it.source, it.source) for it in options), UNKNOWN_PLACE]
        bounds = [end - tokens, *(max(end - tokens, min(it.tokens, end)) for it in options), end]
        found = Counter[str]()
        for place, (start, stop) in zip(places, itertools.pairwise(bounds), strict=True):
            found[place] += stop - start
        return +found

    def allocated_after_error(self, request: Request, tables: BlockTables) -> None:
        """Register a load that vLLM waits for after an internal error. `last_orders` reports it as failed."""
        tracked = self._requests[request.request_id]
        if tracked.match is not None and tracked.load is None:
            self._loads.register(tracked, tracked.match, tables)

    def _start(self, load: OpenLoad) -> None:
        if self._events is not None and not load.is_void and not load.tracked.hints.opt_out:
            self._events.learn(load.tracked.request, load.match.prefix)
        self._loads.start(load)

    # ---- a step goes out -------------------------------------------------------------------------------------------

    def orders(self, output: SchedulerOutput) -> StepOrders:
        """Metadata for the workers of the step that vLLM has just scheduled."""
        self._settle()
        self._step += 1
        self._own_is_empty = False
        self._probe_wait_s = PROBE_WAIT_S
        self._is_busy = bool(output.num_scheduled_tokens)
        self.has_run = self.has_run or self._is_busy
        self.is_encoder_empty = self.is_encoder_empty and not self._is_busy
        self._protection.step_ends()
        self._note_beginnings(output)
        pieces: list[Piece] = []
        scheduled = {name: it for name in output.num_scheduled_tokens if (it := self._requests.get(name)) is not None}
        for name, tracked in scheduled.items():
            tokens = output.num_scheduled_tokens[name]
            pieces.append(self._step_timer.scheduled(tracked, tokens))
            if pieces[-1].context_tokens + tokens >= tracked.handed_tokens + self._geometry.chunk_tokens:
                self._due[name] = tracked
        if any(piece.context_tokens + piece.tokens > self._drafted_tokens for piece in pieces):
            self._has_undrafted = True
            for tracked, piece in zip(scheduled.values(), pieces, strict=True):
                # One that begins now may share blocks that this step computes for another.
                drafted_tokens = 0 if tracked.began_step == self._step else piece.context_tokens
                tracked.drafted_tokens = min(tracked.drafted_tokens, drafted_tokens)
        self._step_timer.step_began(self._step, pieces, time.monotonic())
        self._stores.yield_idle()
        self._revoked += self._stores.cancel_lost()
        ended = self._loads.reports()
        orders = StepOrders(
            self._step,
            revoked=tuple(self._revoked),
            ended=ended,
            is_empty=not self._is_busy,
            is_waiting=not self._is_busy and bool(self._loads),
            is_off=self._weights.are_unsure,
            is_reset=self._step == self._weights.reset_step,
            named={
                it.adapter.lora_int_id: self._adapters.named(it.adapter.lora_int_id)
                for it in ended
                if it.adapter is not None and self._adapters is not None
            },
        )
        # Last, when nothing can raise any more: after an error `last_orders` reports them.
        self._loads.reported(ended)
        self._revoked.clear()
        return orders

    def last_orders(self) -> StepOrders:
        """Orders after an internal error: they end every open load and revoke every store.

        If it raises, nothing is lost: the next call reports the same.
        """
        ended = self._loads.last_reports()
        revoked = (*self._revoked, *self._stores.open, *(each.load for each in ended))
        orders = StepOrders(self._step + 1, revoked, ended)
        self._loads.abandon()
        self._revoked.clear()
        self._step += 1
        return orders

    def unpin_all(self) -> None:
        """Give vLLM all pinned blocks back, after `last_orders` has revoked every store."""
        self._stores.abandon()
        for tracked in self._requests.values():
            self._forget_offers(tracked)

    def _note_beginnings(self, output: SchedulerOutput) -> None:
        """Record the requests that begin or resume in this step, and pin the states that vLLM offers."""
        new = (data.req_id for data in output.scheduled_new_reqs)
        for name in itertools.chain(new, output.scheduled_cached_reqs.resumed_req_ids):
            tracked = self._requests.get(name)
            if tracked is None:
                continue
            tracked.began_step = self._step
            tracked.account.has_begun = True
            self._protection.left(name)
            self._loads.forget_landed(name)
            if tracked.loaded_s is not None:
                self._planner.record_overhead(self._idle_s(time.monotonic()) - tracked.loaded_s)
                tracked.loaded_s = None
        if not self._geometry.has_states or output.kv_connector_block_state is None:
            return
        for name, offers in output.kv_connector_block_state.boundary_state_offloads.items():
            tracked = self._requests.get(name)
            if tracked is not None and tracked.keys is not None and self._is_storing and tracked.stores_up_to(1):
                usable = self._selection.usable(offers, tracked)
                # This step fills them, and they must not be freed before it has returned.
                self._stores.pins.pin([block for _, block, _ in usable])
                tracked.offers += usable

    def _forget_offers(self, tracked: TrackedRequest) -> None:
        if tracked.offers:
            self._stores.pins.unpin([block for _, block, _ in tracked.offers])
            tracked.offers.clear()

    def has_freed_blocks(self) -> bool:
        """Free the blocks that only stores hold, before vLLM preempts a request; whether there were any."""
        return self._stores.yield_idle(is_thorough=True)

    # ---- a step returns --------------------------------------------------------------------------------------------

    def stepped(self, done: StepDone) -> None:
        """Store full chunks: every worker has run step `done`, and vLLM has processed its output."""
        self._confirmed_step = done.step
        self._step_timer.step_ended(done.step, time.monotonic())
        if done.changed and done.step >= self._weights.trusted_step and not self._weights.stopped_by:
            self.weights_change(done.changed)
        if done.adapters and self._adapters is not None:
            self._doubt(self._adapters.read(done.adapters))
        self._settle()
        self._stores.yield_idle()
        for name, tracked in list(self._due.items()):
            if tracked.began_step is not None and tracked.began_step <= done.step:
                was_stored = self._store_full_chunks(tracked, self._tables(name))
                if was_stored or not tracked.request.num_in_flight_tokens:
                    del self._due[name]
        self._stores.send()
        self._give_hints()

    def _give_hints(self) -> None:
        """Pass on the hints of requests that have ended: the session knows their last stores now."""
        for tracked in self._hinted:
            self._guards.run(Feature.HINTS, self._give_hint, tracked, otherwise=None)
        self._hinted.clear()

    def _give_hint(self, tracked: TrackedRequest) -> None:
        session, hints, conversation = self._session, tracked.hints, tracked.hints.conversation
        prefix = tracked.prefix(tracked.request.num_tokens)
        priority = Priority.HIGH if hints.priority == "high" else Priority.NORMAL
        if priority or hints.retain_s is not None:
            session.retain(prefix, math.inf if hints.retain_s is None else hints.retain_s, priority)
        elif hints.priority == "low":
            session.lower(prefix, conversation)
        if hints.prefetch_in_s is not None:
            name = RequestId(f"P{tracked.number}/{tracked.id}")
            session.prefetch(name, prefix, hints.prefetch_in_s, conversation)

    def _store_full_chunks(self, tracked: TrackedRequest, tables: BlockTables) -> bool:
        """Store the chunks that have become full since the last call; whether there were any."""
        computed = tracked.computed_tokens(self._confirmed_step)
        end = tracked.stores_up_to(computed)
        end -= end % self._geometry.chunk_tokens
        if end <= tracked.handed_tokens or not self._is_storing:
            return False
        prefix = self._prefix_of(tracked, end)
        if prefix is None:
            return False
        first = tracked.handed_tokens // self._geometry.chunk_tokens
        places = self._selection.take(tracked, end, tables)
        if places:
            if self._events is not None:
                self._events.learn(tracked.request, prefix, first)
            self._stores.begin(tracked.id, prefix, places, tracked.hints.conversation)
            tracked.account.stored_tokens += end - first * self._geometry.chunk_tokens
        self._forget_offers(tracked)
        return True

    # ---- completions -----------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        self._clear_wished()
        for event in self._loads.take_events():
            if isinstance(event, LoadDone):
                self._load_ended(event)
            elif isinstance(event, StoreDone):
                self._stores.forget(event.request)
                for load in self._loads.unblocked(event.request):
                    self._start(load)

    def _load_ended(self, done: LoadDone) -> None:
        load = self._loads.ended(done)
        if load is None:
            return
        self._session.release(load.name)
        if load.is_dropped:
            return
        plan, tracked = load.match.plan, load.tracked
        seconds = load.ended_s - load.began_s
        ended = done, seconds, load.places, self._object_bytes
        self._guards.run(Feature.JOURNAL, tracked.account.load_ended, *ended, otherwise=None)
        self._planner.ended(plan, done, seconds, load.ended_s)
        tracked.loaded_s = self._idle_s(load.ended_s)
        if not load.is_void and done.tokens >= plan.tokens:
            self._loads.landed(load)
        if plan.tokens < tracked.request.num_tokens:
            self._step_timer.will_compute(tracked)
        if done.tokens < plan.tokens:
            # Missing tokens are computed and stored again. The cap keeps a second load from the same hole.
            size = self._geometry.chunk_tokens
            self._mark_cached(tracked, max(done.tokens, plan.resident_tokens), plan.resident_tokens)
            self._session.release(tracked.question)
            tracked.answer = None
            tracked.announced_tokens = 0  # the request has waited once
            tracked.attempts += 1
            is_last = done.was_cut or tracked.attempts >= ATTEMPTS_MAX
            tracked.cap_tokens = 0 if is_last else min((chunk for _, chunk in done.failed), default=0) * size

    def _idle_s(self, at_s: float) -> float:
        """A clock that stops while the engine computes: a load that overlaps this adds no latency."""
        return at_s - self._step_timer.computed_s(at_s)

    # ---- other -----------------------------------------------------------------------------------------------------

    def weights_change(self, what: str) -> None:
        """Stop loads and stores until the next reset: the weights are, or may be, others from now on.

        Args:
            what: has changed them, for the log.
        """
        self._unknown_change()
        if self._weights.is_off:
            return
        self._weights.is_off = True
        logger.warning(
            "the weights have changed, or may have (%s): kvtier loads and stores nothing. All prompts are computed. "
            "It goes on after reset_prefix_cache(reset_connector=True), with KV of its own, and after a restart",
            what,
        )
        self._cancel_all()

    def stop(self, why: str, *, drains_s: float) -> None:
        """Stop loads and stores until `go_on`.

        Args:
            why: what stops them, for `problem`.
            drains_s: longest wait for open stores. No step may be under way.
        """
        until_s = time.monotonic() + drains_s
        if drains_s and not self._weights.is_off:
            self._stores.send()
        while self._stores.open and time.monotonic() < until_s:
            self._settle()
            time.sleep(IDLE_WAIT_S)
        self.has_run = self.has_run and self.is_paused
        self._weights.stopped_by = why
        self._cancel_all()

    def mixes_weights(self) -> None:
        """Store nothing that follows on vLLM's own KV until vLLM resets it. That KV was computed with other weights."""
        self._weights.are_mixed = self._weights.are_mixed or not (self._own_is_empty or self._stores.pins.is_blank)

    def go_on(self, *, has_own_keys: bool, cleared_salts: Collection[str]) -> None:
        """Load and store again. The workers know which weights are the present ones.

        Args:
            has_own_keys: other engines have other keys.
            cleared_salts: other engines have other keys for requests with these salts.
        """
        self._weights.stopped_by = ""
        self._weights.trusted_step = self._step + 1
        self._renew()
        self._is_reset = has_own_keys
        self._cleared_salts.update(cleared_salts)

    @property
    def is_paused(self) -> bool:
        """Whether loads and stores are stopped until `go_on`."""
        return bool(self._weights.stopped_by)

    def _cancel_all(self) -> None:
        self._revoked += self._stores.cancel_all()
        self._stores.yield_idle(is_thorough=True)
        self._renew()
        self._restart_waiting()

    def _restart_waiting(self) -> None:
        """Let the requests that wait for a load, or have one and have not begun, start anew without it."""
        waiting = {name: it for name, it in self._requests.items() if it.match is not None and it.began_step is None}
        for tracked in waiting.values():
            if tracked.load is not None:
                self._loads.void(tracked.load)
        self._loads.forget_all_landed()
        self._restart(waiting)

    def own_reset_begins(self, is_running: bool) -> None:  # noqa: FBT001 - one fact
        """Give vLLM all blocks back that no running request uses: it is about to reset its own cache.

        Args:
            is_running: requests are running, so that vLLM will keep its cache.
        """
        self._stores.yield_idle(is_thorough=True)
        if not is_running:
            for tracked in self._requests.values():
                if not tracked.request.num_in_flight_tokens:
                    self._forget_offers(tracked)
            self._restart_waiting()

    def own_reset_ended(self, was_reset: bool) -> None:  # noqa: FBT001
        """Record whether vLLM has reset its own cache."""
        self._own_is_empty = was_reset
        self._weights.are_mixed = self._weights.are_mixed and not was_reset

    def _doubt(self, adapters: set[int]) -> None:
        """Stop naming KV by adapters whose files, as the workers have read them, kvtier has not identified."""
        if adapters:
            self._mixed_adapters |= adapters
            # Stores of the step that has returned hold what it has computed, and were not sent yet.
            self._revoked += self._stores.cancel_all()
            self._renew_keys([it for it in self._requests.values() if _adapter_of(it.request) in adapters])

    def item_doubted(self, identifier: str) -> None:
        """End the caching of open requests with this image or other item: vLLM may go on with what another one was."""
        requests = self._requests.values()
        self._renew_keys([it for it in requests if identifier in {item.identifier for item in it.request.mm_features}])

    def reset(self) -> bool:
        """Make everything cached before now unreachable: vLLM resets its caches.

        False after a change of weights, if vLLM has kept its own cache, with KV of those before.
        """
        is_empty = self._own_is_empty or self._stores.pins.is_idle
        if self._weights.is_off and not is_empty:
            return False
        self._weights.is_off = False
        if is_empty:  # else a change that is noticed later may have come before
            self._weights.reset_step = self._weights.trusted_step = self._step + 1
            self._has_undrafted = False
            self._mixed_adapters.clear()
        self._renew()
        return True

    def clear(self, salt: str | None) -> None:
        """Renew the keys of open requests with this salt (``""``: without one; None: of all). Any thread.

        Later requests have new keys already. Those that are open get theirs before they are looked up again. All hints
        end now: an idle engine takes its next step later, and a pin of another salt may come before.
        """
        self._wishes.append(salt)
        self._session.forget_hints()

    def _clear_wished(self) -> None:
        while self._wishes:
            salt = self._wishes.popleft()
            if salt is None:
                self._renew()
            else:
                self._cleared_salts.add(salt)
                self._hinted.clear()
                if self._events is not None:
                    self._events.clear(salt)
                self._renew_keys([it for it in self._requests.values() if (it.request.cache_salt or "") == salt])

    def _has_own_keys(self, request: Request) -> bool:
        """Whether other engines have other keys for the request."""
        return self._is_reset or (request.cache_salt or "") in self._cleared_salts

    def _renew(self) -> None:
        self._hinted.clear()
        self._session.forget_hints()
        self._is_reset = True
        self._cleared_salts.clear()
        if self._events is not None:
            self._events.reset()
        self._renew_keys(self._requests.values())

    def _renew_keys(self, requests: Iterable[TrackedRequest]) -> None:
        self._loads.forget_all_landed()
        for tracked in requests:
            tracked.announced_tokens = 0
            # Blocks that a running request has computed belong to the time before the reset.
            has_old_blocks = tracked.request.num_computed_tokens > 0
            if tracked.load is not None:
                load = self._loads.void(tracked.load)
                # The request is computed again from the end of vLLM's own blocks. A load that has ended may already be
                # reported as complete: `Loads` sets its end time before it checks whether the load is void.
                has_old_blocks = load.match.plan.resident_tokens > 0 or load.ended_s > 0
            if tracked.answer is not None:
                self._session.release(tracked.question)
            tracked.renew(None if has_old_blocks else self._keys_of(tracked.request))

    @property
    def problem(self) -> str:
        """Why nothing is loaded or stored; empty in normal operation. Any thread."""
        return self._ranks.lost or (WEIGHTS_CHANGED if self._weights.is_off else self._weights.stopped_by)

    @property
    def has_news(self) -> bool:
        """Whether an idle engine should take a step: to free pinned blocks, publish events or clear. Any thread."""
        has_events = self._events is not None and (self._events.has_news or self._must_clear)
        return has_events or bool(self._wishes) or self._stores.has_pins

    @property
    def _must_clear(self) -> bool:
        """Whether an error has ended the events, and routers still believe what was published."""
        return not self._has_cleared and self._guards.has_ended(Feature.EVENTS)

    def take_events(self, form: Callable[[BlockEvent], Any], *, is_off: bool = False) -> list[Any] | None:
        """KV events for routers, at the end of a step. After an internal error all chunks are withdrawn.

        None, once: the error was in the events, so what was published is unknown. All of it is to be withdrawn, that
        of vLLM's own cache, too.

        Args:
            form: makes vLLM's form of an event.
            is_off: there was an error in the connector.
        """
        if not is_off:
            self._clear_wished()
        if self._events is None:
            return []
        if is_off or self._session.fault_record.failure:
            self._events.reset()
        events = self._events
        found = self._guards.run(Feature.EVENTS, lambda: list(map(form, events.take())), otherwise=[])
        if self._must_clear:
            self._has_cleared = True
            return None
        return found

    def close(self) -> None:
        """Stop the thread that polls the session."""
        self._loads.close()


def _adapter_of(request: Request) -> int | None:
    return None if request.lora_request is None else request.lora_request.lora_int_id
