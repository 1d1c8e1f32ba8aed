"""Decides which prefixes to load, which chunks to store, and what to report to vLLM.

The methods, in the order of one engine step:

    matched      for each waiting request: how many tokens can be loaded   lookup, plan
    allocated    vLLM has allocated blocks for them                        the load starts
    orders       the step goes out to the workers                          blocks not to touch, loads that have ended
    finished     a request has ended                                       its last chunks are stored
    stepped      the step has returned                                     chunks that have become full are stored

A chunk is stored after the step that filled it has returned. Its forward has then run, so copies need no ordering
after it, and no store delays a step. All methods run in the scheduler's thread.
"""

import itertools
import logging
import sys
import time
from collections.abc import Callable
from typing import Any

from kvtier.connect.vllm.geometry import Geometry
from kvtier.connect.vllm.requests.keys import KeyMaker
from kvtier.connect.vllm.requests.kv_events import BlockEvent
from kvtier.connect.vllm.requests.request_events import RequestEvents
from kvtier.connect.vllm.requests.tracked import TrackedRequest
from kvtier.connect.vllm.requests.transfer_params import TransferParams
from kvtier.connect.vllm.scheduler.cache_invalidation import Invalidation
from kvtier.connect.vllm.scheduler.engine_cache import EngineCache
from kvtier.connect.vllm.scheduler.loads import Loads, OpenLoad
from kvtier.connect.vllm.scheduler.lookups import Lookups
from kvtier.connect.vllm.scheduler.prefix_protection import PrefixProtection
from kvtier.connect.vllm.scheduler.step_timer import StepTimer
from kvtier.connect.vllm.scheduler.stores import Stores, StoreSelection
from kvtier.connect.vllm.step_metadata import StepDone, StepOrders
from kvtier.connect.vllm.vllm_types import BlockTables, Request, SchedulerOutput
from kvtier.core.planner import Piece, Planner
from kvtier.runtime.observers.guards import ends_by_itself
from kvtier.runtime.rank_group import Ranks
from kvtier.runtime.session import Session
from kvtier.types import LoadDone, Prefix, Presence, StoreDone

logger = logging.getLogger(__name__)

ATTEMPTS_MAX = 3
"""Maximum number of loads of one request that may deliver less than planned. After that, the request is computed."""

DRAIN_PAUSE_S = 0.002
"""Seconds between two looks at the open stores while `drain` waits for them."""


class Scheduler:
    """Decides for one engine what is loaded and stored.

    Args:
        session: the session, which has its own thread. Only `Loads` polls it.
        ranks: the workers, which get a note for each load that has ended.
        geometry: locates chunks in block tables.
        keys: makes the keys of requests.
        planner: decides between loading and computing.
        engine_cache: vLLM's own prefix cache.
        params: what requests pass to kvtier.
        log: observes the requests.
        stores: False for a decode engine that only loads.
        drafted_tokens: maximum length of the requests of a step that writes draft KV; see `support.drafted_tokens`.
    """

    def __init__(
        self,
        *,
        session: Session,
        ranks: Ranks,
        geometry: Geometry,
        keys: KeyMaker,
        planner: Planner,
        engine_cache: EngineCache,
        params: TransferParams,
        log: RequestEvents,
        stores: bool = True,
        drafted_tokens: int = sys.maxsize,
    ) -> None:
        self._session, self._ranks, self._geometry, self._planner = session, ranks, geometry, planner
        self._keys, self._own_cache, self._params, self._log = keys, engine_cache, params, log
        self._is_storing, self._drafted_tokens = stores, drafted_tokens
        self._numbers = itertools.count()
        self.requests: dict[str, TrackedRequest] = {}
        """The open requests, by vLLM's id."""
        self._step_timer = StepTimer(planner)
        self._lookups = Lookups(session, ranks, planner, self._step_timer, log)
        self._selection = StoreSelection(geometry)
        self._loads = Loads(session, geometry, ranks.send_note)
        self._stores = Stores(session, engine_cache.open_pins)
        self._protection = PrefixProtection(geometry, self._stores.pins, engine_cache.resident)
        self.invalidation = Invalidation(
            session, keys, self.requests, self._loads, self._stores, params, log, engine_cache.restart
        )
        self._step = 0
        self._confirmed_step = 0
        self._due: dict[str, TrackedRequest] = {}
        """Requests that may have a full chunk to store when their step returns."""

    # ---- requests begin and end ------------------------------------------------------------------------------------

    def arrived(self, request: Request) -> None:
        """Track a new request."""
        hints, announced = self._params.read(request)
        self.invalidation.clear_wished()
        tracked = TrackedRequest(request, next(self._numbers), self.invalidation.keys_of(request), hints)
        tracked.account.loss = self._params.loss_of(request)
        tracked.announced_tokens = 0 if self.invalidation.has_own_keys(request) else announced
        self.requests[request.request_id] = tracked
        self._log.arrived(tracked, self.invalidation.problem)
        self._protection.joined(tracked)

    def _prefix_of(self, tracked: TrackedRequest, tokens: int) -> Prefix | None:
        """Return the chunks in the leading `tokens`, or None if the request is not cached.

        A brief lack of memory ends the caching of this one request, before anything has changed.
        """
        try:
            return None if tracked.keys is None else tracked.prefix(tokens)
        except Exception as error:
            if not ends_by_itself(error):
                raise
            tracked.keys = None
            logger.warning("request %s is no longer cached: %r", tracked.name, error)
            return None

    def finished(self, request: Request, tables: BlockTables) -> dict[str, Any] | None:
        """End a request, finished or aborted. Return the `kv_transfer_params` of its response."""
        self._take_completions()
        tracked = self.requests.pop(request.request_id, None)
        if tracked is None:
            return None
        self._due.pop(tracked.id, None)
        self._protection.left(tracked.id)
        self._step_timer.forget(tracked.id)
        self._loads.landed.pop(tracked.id, None)
        if tracked.load is not None:
            # vLLM keeps blocks of an asynchronous load allocated until the end of the load has been reported.
            self._planner.dropped(self._loads.drop(tracked.load).match.plan)
        else:
            self._store_full_chunks(tracked, tables)
        self._params.ended(tracked)
        self._stores.forget_offers(tracked)
        if tracked.answer is not None:
            self._session.release(tracked.question)
        earliest = next(iter(self.requests.values()), None)
        self._log.ended(tracked, None if earliest is None else earliest.arrived_s)
        has_keys = tracked.keys is not None and not self.invalidation.has_own_keys(request)
        return self._params.response(tracked, is_found=self._is_storing and has_keys)

    # ---- lookups ---------------------------------------------------------------------------------------------------

    def matched(self, request: Request, resident_tokens: int) -> int | None:
        """Return how many tokens beyond vLLM's `resident_tokens` can be loaded, or None to be asked again later."""
        tracked = self.requests.get(request.request_id)
        if tracked is None:
            return 0
        self.invalidation.clear_wished()
        # The request has no blocks yet, or was preempted.
        if tracked.began_step is not None:
            self._protection.rejoined(tracked)
        tracked.began_step = tracked.match = None
        self._step_timer.forget(tracked.id)
        self._loads.landed.pop(tracked.id, None)
        self._stores.forget_offers(tracked)
        self._mark_cached(tracked, resident_tokens, resident_tokens)
        if resident_tokens and self.invalidation.is_own_kv_mixed(request):
            tracked.renew(None)
        self._log.resident(tracked, resident_tokens)
        most = self._geometry.hit_tokens(request.num_tokens)
        if tracked.cap_tokens is not None:
            most = min(most, tracked.cap_tokens)
        if tracked.hints.max_load_tokens is not None:
            most = min(most, resident_tokens + tracked.hints.max_load_tokens)
            most -= most % self._geometry.chunk_tokens
        is_ours = self._params.is_ours(request)
        is_wanted = most > resident_tokens and is_ours and not request.skip_reading_prefix_cache
        if is_wanted and (prefix := self._prefix_of(tracked, most)) is not None:
            if self._is_being_loaded(prefix, resident_tokens):
                return None
            lookup = self._lookups.look_up(tracked, prefix, resident_tokens)
            if lookup.presence is Presence.PROBING:
                return None
            # Cached tokens need not be stored. Tokens that vLLM has and the cache has lost are stored again.
            self._mark_cached(tracked, lookup.tokens, resident_tokens)
            tracked.junction_tokens = lookup.history_tokens
            tracked.match = self._lookups.choose(tracked, prefix, lookup, resident_tokens)
        self._protection.make_room(tracked, request.num_tokens - resident_tokens)
        if tracked.match is None:
            self._step_timer.will_compute(tracked)
            return 0
        return tracked.match.external_tokens

    def _mark_cached(self, tracked: TrackedRequest, tokens: int, resident_tokens: int) -> None:
        """Record that the leading `tokens` need not be stored, nor vLLM's own tokens if these may lack draft KV."""
        size = self._geometry.chunk_tokens
        whole = -(-resident_tokens // size) * size if self.invalidation.has_undrafted else 0
        self._selection.mark_cached(tracked, max(whole, tokens - tokens % size))

    def _is_being_loaded(self, prefix: Prefix, resident_tokens: int) -> bool:
        """Return whether another request's load will give vLLM at least half of the missing tokens."""
        if not self._own_cache.has_prefix_caching:
            return False
        shared = self._loads.covered_tokens(prefix, resident_tokens) - resident_tokens
        return 0 < prefix.tokens - resident_tokens <= 2 * shared

    def allocated(self, request: Request, tables: BlockTables, external_tokens: int) -> None:
        """Start the load of `external_tokens`, now that vLLM has allocated their blocks."""
        tracked = self.requests[request.request_id]
        match = tracked.match
        if match is None:
            raise AssertionError(f"{external_tokens} external tokens were never offered to {tracked.name}")
        load = self._loads.register(tracked, match, tables)
        load.is_void = match.external_tokens != external_tokens or match is tracked.outdated
        self._planner.begun(match.plan, time.monotonic())
        self._log.allocated(tracked, match.external_tokens)
        targets = self._loads.locate(load)
        self._stores.cancel_lost()
        load.blocked_by = self._stores.reading(targets)
        if not load.blocked_by:
            self._start(load)

    def allocated_after_error(self, request: Request, tables: BlockTables) -> None:
        """Register a load that vLLM waits for after an internal error. `last_orders` reports it as failed."""
        tracked = self.requests[request.request_id]
        if tracked.match is not None and tracked.load is None:
            self._loads.register(tracked, tracked.match, tables)

    def _start(self, load: OpenLoad) -> None:
        if not load.is_void:
            self._log.load_started(load.tracked, load.match.prefix)
        self._loads.start(load)

    # ---- a step goes out -------------------------------------------------------------------------------------------

    def orders(self, output: SchedulerOutput) -> StepOrders:
        """Return metadata for the workers of the step that vLLM has just scheduled."""
        self._take_completions()
        self._step += 1
        is_busy = bool(output.num_scheduled_tokens)
        self.invalidation.step_goes_out(self._step, is_busy=is_busy)
        self._lookups.step_goes_out(is_busy=is_busy)
        self._protection.step_ends()
        self._note_beginnings(output)
        pieces: list[Piece] = []
        scheduled = {name: it for name in output.num_scheduled_tokens if (it := self.requests.get(name)) is not None}
        for name, tracked in scheduled.items():
            tokens = output.num_scheduled_tokens[name]
            pieces.append(self._step_timer.scheduled(tracked, tokens))
            if pieces[-1].context_tokens + tokens >= tracked.handed_tokens + self._geometry.chunk_tokens:
                self._due[name] = tracked
        if any(piece.context_tokens + piece.tokens > self._drafted_tokens for piece in pieces):
            self.invalidation.has_undrafted = True
            for tracked, piece in zip(scheduled.values(), pieces, strict=True):
                # A request that starts now may share blocks that this step computes for another.
                drafted_tokens = 0 if tracked.began_step == self._step else piece.context_tokens
                tracked.drafted_tokens = min(tracked.drafted_tokens, drafted_tokens)
        self._step_timer.step_began(self._step, pieces, time.monotonic())
        self._stores.yield_idle()
        self._stores.cancel_lost()
        ended = self._loads.reports()
        orders = StepOrders(
            self._step,
            revoked=tuple(self._stores.revoked),
            ended=ended,
            is_empty=not is_busy,
            is_waiting=not is_busy and bool(self._loads),
            is_off=self.invalidation.is_off,
            is_reset=self._step == self.invalidation.reset_step,
            named={
                it.adapter.lora_int_id: self._keys.adapters.named(it.adapter.lora_int_id)
                for it in ended
                if it.adapter is not None
            },
        )
        # Do this last, when nothing can raise any more. After an error `last_orders` reports them.
        self._loads.reported(ended)
        self._stores.revoked.clear()
        return orders

    def last_orders(self) -> StepOrders:
        """Return orders after an internal error. They end every open load and revoke every store.

        Nothing is lost if this raises, because the next call reports the same loads and stores.
        """
        ended = self._loads.last_reports()
        revoked = (*self._stores.revoked, *self._stores.open, *(each.load for each in ended))
        orders = StepOrders(self._step + 1, revoked, ended)
        self._loads.abandon()
        self._stores.revoked.clear()
        self._step += 1
        return orders

    def unpin_all(self) -> None:
        """Return all pinned blocks to vLLM, after `last_orders` has revoked every store."""
        self._stores.abandon()
        for tracked in self.requests.values():
            self._stores.forget_offers(tracked)

    def _note_beginnings(self, output: SchedulerOutput) -> None:
        """Record the requests that start or resume in this step, and pin the states that vLLM offers."""
        new = (data.req_id for data in output.scheduled_new_reqs)
        for name in itertools.chain(new, output.scheduled_cached_reqs.resumed_req_ids):
            tracked = self.requests.get(name)
            if tracked is None:
                continue
            tracked.began_step = self._step
            self._log.began(tracked)
            self._protection.left(name)
            self._loads.landed.pop(name, None)
            if tracked.loaded_s is not None:
                self._planner.record_overhead(self._idle_s(time.monotonic()) - tracked.loaded_s)
                tracked.loaded_s = None
        if not self._geometry.has_states or output.kv_connector_block_state is None:
            return
        for name, offers in output.kv_connector_block_state.boundary_state_offloads.items():
            tracked = self.requests.get(name)
            if tracked is not None and tracked.keys is not None and self._is_storing and tracked.stores_up_to(1):
                usable = self._selection.usable(offers, tracked)
                # This step fills them, and they must not be freed before it has returned.
                self._stores.pins.pin([it.block for it in usable])
                tracked.offers += usable

    def has_freed_blocks(self) -> bool:
        """Free blocks that only stores use, before vLLM preempts a request. Return whether there were any."""
        return self._stores.yield_idle(is_thorough=True)

    # ---- a step returns --------------------------------------------------------------------------------------------

    def stepped(self, done: StepDone) -> None:
        """Store full chunks. Every worker has run step `done`, and vLLM has processed its output."""
        self._confirmed_step = done.step
        self._step_timer.step_ended(done.step, time.monotonic())
        self.invalidation.stepped(done)
        self._take_completions()
        self._stores.yield_idle()
        for name, tracked in list(self._due.items()):
            if tracked.began_step is not None and tracked.began_step <= done.step:
                was_stored = self._store_full_chunks(tracked, self._own_cache.tables(name))
                if was_stored or not tracked.request.num_in_flight_tokens:
                    del self._due[name]
        self._stores.send()
        self._params.pass_on()

    def _store_full_chunks(self, tracked: TrackedRequest, tables: BlockTables) -> bool:
        """Store the chunks that have become full since the last call. Return whether there were any."""
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
            self._log.stored(tracked, prefix, first)
            self._stores.begin(tracked.id, prefix, places, tracked.hints.conversation)
        self._stores.forget_offers(tracked)
        return True

    # ---- completions -----------------------------------------------------------------------------------------------

    def _take_completions(self) -> None:
        self.invalidation.clear_wished()
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
        self._log.load_ended(tracked, done, seconds, load.places)
        self._planner.ended(plan, done, seconds, load.ended_s)
        tracked.loaded_s = self._idle_s(load.ended_s)
        if not load.is_void and done.tokens >= plan.tokens:
            self._loads.landed[tracked.id] = load
        if plan.tokens < tracked.request.num_tokens:
            self._step_timer.will_compute(tracked)
        if done.tokens < plan.tokens:
            # Missing tokens are computed and stored again. The cap prevents another load up to the same hole.
            size = self._geometry.chunk_tokens
            self._mark_cached(tracked, max(done.tokens, plan.resident_tokens), plan.resident_tokens)
            self._session.release(tracked.question)
            tracked.answer = None
            tracked.announced_tokens = 0  # the request has waited once already
            tracked.attempts += 1
            is_last = done.was_cut or tracked.attempts >= ATTEMPTS_MAX
            tracked.cap_tokens = 0 if is_last else min((chunk for _, chunk in done.failed), default=0) * size

    def _idle_s(self, at_s: float) -> float:
        """Convert a time to a clock that stops while the engine computes, because a load adds no latency meanwhile."""
        return at_s - self._step_timer.computed_s(at_s)

    # ---- other -----------------------------------------------------------------------------------------------------

    def drain(self, wait_s: float) -> None:
        """Wait up to `wait_s` for open stores. No step may be under way."""
        until_s = time.monotonic() + wait_s
        if not self.invalidation.is_off:
            self._stores.send()
        while self._stores.open and time.monotonic() < until_s:
            self._take_completions()
            time.sleep(DRAIN_PAUSE_S)

    @property
    def has_news(self) -> bool:
        """Whether an idle engine should take a step for freed blocks, events or cleared keys. Any thread may ask."""
        return self._log.has_news or bool(self.invalidation.wishes) or self._stores.has_pins

    def take_events(self, form: Callable[[BlockEvent], Any], *, is_off: bool = False) -> list[Any] | None:
        """Renew keys that a clear has made invalid, then return KV events (`RequestEvents.take_events`)."""
        if not is_off:
            self.invalidation.clear_wished()
        return self._log.take_events(form, is_off=is_off)

    def close(self) -> None:
        """Stop the thread that polls the session."""
        self._loads.close()
