"""The scheduler's half: what is loaded, what is stored, and what vLLM is told about it.

In the order of one engine step:

    matched      for each request that waits: how much can be loaded       lookup, plan
    allocated    vLLM has made room for it                                 the load begins
    orders       the step goes out to the workers                          what they must keep off, and wait for
    finished     a request has ended                                       its last chunks are stored
    stepped      the step has come back                                    chunks that are full now are stored

A chunk is stored after the step that filled it has come back: the forward has run, nothing has to be ordered behind
it, and nothing of ours delays a step. Everything here runs in the scheduler's thread; only the courier has its own.
"""

import itertools
import logging
import time
from collections.abc import Callable, Collection
from typing import Any

from kvtier.connect.vllm.block_pool import Pins
from kvtier.connect.vllm.completions import CompletionInbox
from kvtier.connect.vllm.events import Events
from kvtier.connect.vllm.geometry import Geometry
from kvtier.connect.vllm.loads import Load, Loads
from kvtier.connect.vllm.meta import ASYNC_NOTE, SYNC_NOTE, Ended, StepDone, StepOrders
from kvtier.connect.vllm.prefix_protection import PrefixProtection
from kvtier.connect.vllm.sessions import Sessions
from kvtier.connect.vllm.step_timer import StepTimer
from kvtier.connect.vllm.stores import Stores
from kvtier.connect.vllm.tracked import Answer, Keys, Match, Tracked
from kvtier.connect.vllm.vllm_types import BlockTables, Request, SchedulerOutput
from kvtier.connect.vllm.worth import Worth
from kvtier.core.planner import Piece, Planner
from kvtier.runtime.base import Session
from kvtier.runtime.rank_group import Note, Ranks
from kvtier.runtime.recorder import Recorder
from kvtier.types import Hint, LoadDone, Lookup, Prefix, Presence, RequestId, StoreDone

logger = logging.getLogger(__name__)

SYNC_BYTES_MAX = 16 << 20
SYNC_S_MAX = 0.005
"""A load of at most so many bytes, all in host memory and expected to take at most so long, is waited for before the
forward: its request is computed in this step instead of the next but one. Others would wait for a larger one, too."""

PROBE_WAIT_S = 0.002
"""How long the lookups of a step may take before none of them waits for the tiers' answers any more. A local directory
answers in less; a step later costs more."""

ANSWER_S = 0.1
"""How long an answer counts for a request that vLLM has no room for, and asks about in every step."""

ATTEMPTS_MAX = 3
"""Loads of one request that may bring less than they promised; after them it is computed."""


class Scheduler:
    """Decides for one engine.

    Args:
        session: of the core; its events are taken by a courier.
        ranks: the workers, to be told of loads that have ended.
        geometry: where chunks lie in block tables.
        begin_keys: who the chunks of a request are; None: it is not to be cached.
        planner: load or compute.
        tables: the block ids of a request, as vLLM has them now.
        resident: the block ids in vLLM's own cache that a request would be given now; None: without prefix protection
            (`PrefixProtection`).
        open_pins: vLLM's block pool, given who is to be told of blocks that are handed out again.
        bytes_per_token: of all groups and ranks.
        can_wait: a step may wait for a load, and vLLM takes its report of blocks that were not filled.
        has_prefix_caching: what one request has loaded, others find in vLLM's own cache.
        events: for routers, where somebody wants them.
        recorder: takes note of requests that have ended, where somebody wants a trace.
    """

    def __init__(
        self,
        *,
        session: Session,
        ranks: Ranks,
        geometry: Geometry,
        begin_keys: Callable[[Request], Keys | None],
        planner: Planner,
        tables: Callable[[str], BlockTables],
        resident: Callable[[Request], BlockTables] | None,
        open_pins: Callable[[Callable[[int], None]], Pins],
        bytes_per_token: float,
        can_wait: bool,
        has_prefix_caching: bool,
        events: Events | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self._session = session
        self._ranks = ranks
        self._geometry = geometry
        self._begin_keys = begin_keys
        self._planner = planner
        self._tables = tables
        # A load that is waited for fails by its blocks.
        self._sync_tokens_max = SYNC_BYTES_MAX / bytes_per_token if can_wait and geometry.can_load_in_part else 0
        self._has_prefix_caching = has_prefix_caching
        self._events = events
        self._recorder = recorder
        self._numbers = itertools.count()
        self._sessions = Sessions()
        self._requests: dict[str, Tracked] = {}
        self._step_timer = StepTimer(planner)
        self._worth = Worth(geometry)
        self._loads = Loads(session, geometry)
        self._stores = Stores(session, open_pins)
        self._protection = PrefixProtection(geometry, self._stores.pins, resident)
        self._completions = CompletionInbox(session, self._loads.report, self._tell)
        self._step = 0
        self._confirmed_step = 0
        self._due: dict[str, Tracked] = {}
        """Requests that may have a full chunk to store when their step comes back."""
        self._revoked: list[RequestId] = []
        self._ended: list[Ended] = []
        """Loads that have ended, for the next orders."""
        self._abandoned: set[RequestId] = set()
        """Loads that were open when something in kvtier raised."""
        self._probe_wait_s = PROBE_WAIT_S

    # ---- requests come and go --------------------------------------------------------------------------------------

    def arrived(self, request: Request) -> None:
        """VLLM has a new request."""
        said = self._sessions.said(request)
        tracked = Tracked(request, next(self._numbers), self._begin_keys(request), said)
        self._requests[request.request_id] = tracked
        self._protection.joined(tracked)

    def forget(self, request: Request) -> None:
        """A request has ended, after something in kvtier raised."""
        self._requests.pop(request.request_id, None)

    def finished(self, request: Request, tables: BlockTables) -> None:
        """A request has ended, whatever way."""
        self._settle()
        tracked = self._requests.pop(request.request_id, None)
        if tracked is None:
            return
        self._due.pop(tracked.id, None)
        self._protection.left(tracked.id)
        self._step_timer.forget(tracked.id)
        self._loads.took_off(tracked.id)
        if tracked.load is not None:
            # VLLM keeps the blocks of an asynchronous load until its end has been reported.
            self._planner.dropped(self._loads.drop(tracked.load).match.plan)
        else:
            self._store_full_chunks(tracked, tables)
        session, next_turn = tracked.said
        if session is not None and next_turn is not None:
            self._session.expects(session, next_turn)
        self._forget_offers(tracked)
        if tracked.answer is not None:
            self._session.release(tracked.question)
        if self._recorder is not None:
            earliest = next(iter(self._requests.values()), None)
            self._recorder.served(tracked.served(), None if earliest is None else earliest.arrived_s)

    # ---- what can be loaded ----------------------------------------------------------------------------------------

    def matched(self, request: Request, resident_tokens: int) -> tuple[int | None, bool]:
        """How many tokens beyond the `resident_tokens` that vLLM has can be loaded, and whether between steps.

        None: ask again later.
        """
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            return 0, False
        # It has no blocks, or none any more.
        if tracked.began_step is not None:
            self._protection.rejoined(tracked)
        tracked.began_step = tracked.match = None
        self._loads.took_off(tracked.id)
        self._forget_offers(tracked)
        self._worth.known(tracked, resident_tokens - resident_tokens % self._geometry.chunk_tokens)
        most = self._geometry.hit_tokens(request.num_tokens)
        if tracked.cap_tokens is not None:
            most = min(most, tracked.cap_tokens)
        if most > resident_tokens and tracked.keys is not None and not request.skip_reading_prefix_cache:
            prefix = tracked.prefix(most)
            if self._is_brought(prefix, resident_tokens):
                return None, False
            lookup = self._look_up(tracked, prefix, resident_tokens)
            if lookup.presence is Presence.PROBING:
                return None, False
            tracked.match = self._choose(tracked, prefix, lookup, resident_tokens)
        self._protection.make_room(tracked, request.num_tokens - resident_tokens)
        if tracked.match is None:
            self._step_timer.will_compute(tracked)
            return 0, False
        return tracked.match.external_tokens, tracked.match.is_async

    def _is_brought(self, prefix: Prefix, resident_tokens: int) -> bool:
        """Whether to wait for somebody else's load, after which vLLM will have most of this itself."""
        if not self._has_prefix_caching:
            return False
        shared = self._loads.brings(prefix, resident_tokens) - resident_tokens
        return 2 * shared >= prefix.tokens - resident_tokens

    def _look_up(self, tracked: Tracked, prefix: Prefix, resident_tokens: int) -> Lookup:
        known, now_s = tracked.answer, time.monotonic()
        if known is not None and known.counts_for(prefix, resident_tokens) and now_s < known.time_s + ANSWER_S:
            return known.lookup
        lookup = self._session.lookup(
            tracked.question, prefix, resident_tokens=resident_tokens, wait_s=max(0.0, self._probe_wait_s)
        )
        self._probe_wait_s -= time.monotonic() - now_s
        tracked.answer = Answer(prefix, resident_tokens, now_s, lookup)
        return lookup

    def _choose(self, tracked: Tracked, prefix: Prefix, lookup: Lookup, resident_tokens: int) -> Match | None:
        # What the cache has need not be stored; what vLLM has and the cache has lost is stored again.
        self._worth.known(tracked, lookup.tokens)
        self._worth.parted(tracked, lookup.history_tokens)
        if self._ranks.lost:
            return None
        plan = self._planner.plan(
            lookup,
            tracked.request.num_tokens,
            resident_tokens=resident_tokens,
            now_s=time.monotonic(),
            ahead_s=self._step_timer.ahead_s(tracked.id),
        )
        if plan.tokens <= resident_tokens:
            return None
        is_small = plan.tokens - resident_tokens <= self._sync_tokens_max and plan.load_s <= SYNC_S_MAX
        return Match(plan, prefix, lookup, is_async=not is_small or lookup.ready_tokens < plan.tokens)

    def sources(self, request: Request) -> list[tuple[str, int]]:
        """(place, tokens) of what a request loads."""
        tracked = self._requests.get(request.request_id)
        return [] if tracked is None or tracked.match is None else tracked.match.sources

    def allocated(self, request: Request, tables: BlockTables, external_tokens: int) -> None:
        """VLLM has allocated blocks for a request, of which `external_tokens` are to be loaded."""
        tracked = self._requests[request.request_id]
        match = tracked.match
        if match is None:
            raise AssertionError(f"{external_tokens} external tokens were never offered to {tracked.id}")
        load = self._loads.register(tracked, match, tables)
        load.is_void = match.external_tokens != external_tokens or match is tracked.outdated
        self._planner.begun(match.plan, time.monotonic())
        targets = self._loads.aim(load)
        self._revoked += self._stores.give_up_lost()
        blocked_by = self._stores.reading(targets)
        if blocked_by and match.is_async:
            load.blocked_by = blocked_by
            return
        load.is_void |= bool(blocked_by)  # while a worker waits, nobody would begin it
        self._start(load)

    def allocated_in_vain(self, request: Request, tables: BlockTables) -> None:
        """VLLM waits for a load, and something in kvtier has raised: `last_orders` reports the load."""
        tracked = self._requests[request.request_id]
        if tracked.match is not None and not self._loads.is_open(tracked):
            self._loads.register(tracked, tracked.match, tables)

    def _start(self, load: Load) -> None:
        if self._events is not None:
            self._events.learn(load.tracked.request, load.match.prefix)
        if not self._loads.start(load):
            self._completions.deliver(self._loads.nothing(load))

    # ---- a step goes out -------------------------------------------------------------------------------------------

    def orders(self, output: SchedulerOutput) -> StepOrders:
        """What the workers need to know for a step that vLLM has just put together."""
        self._settle()
        self._step += 1
        self._probe_wait_s = PROBE_WAIT_S
        self._protection.step_ends()
        self._note_beginnings(output)
        pieces: list[Piece] = []
        for name, tokens in output.num_scheduled_tokens.items():
            tracked = self._requests.get(name)
            if tracked is not None:
                pieces.append(self._step_timer.scheduled(tracked, tokens))
                if pieces[-1].context_tokens + tokens >= tracked.handed_tokens + self._geometry.chunk_tokens:
                    self._due[name] = tracked
        self._step_timer.went(self._step, pieces, time.monotonic(), is_plain=not self._loads.awaited)
        self._stores.yield_idle()
        self._revoked += self._stores.give_up_lost()
        self._ended += self._completions.take_ended()
        orders = StepOrders(
            self._step,
            revoked=tuple(self._revoked),
            awaited=tuple(self._loads.awaited),
            ended=tuple(self._ended),
            is_waiting=not output.num_scheduled_tokens and bool(self._loads),
        )
        self._loads.reported(self._ended)
        # Only now, when nothing can raise any more: otherwise `last_orders` has to report them.
        self._revoked.clear()
        self._ended.clear()
        self._loads.awaited.clear()
        return orders

    def last_orders(self) -> StepOrders:
        """Orders after something in kvtier raised: nothing is begun any more, and vLLM waits for no load.

        When it raises, nothing is lost: the next call reports the same.
        """
        self._ended += self._completions.take_ended()
        ended = [each for each in self._ended if each.load not in self._abandoned]
        lost = self._loads.unreported(ended)
        revoked = (*self._revoked, *self._stores.open, *(each.load for each in lost))
        orders = StepOrders(self._step + 1, revoked, tuple(self._loads.awaited), (*ended, *lost))
        self._abandoned.update([each.load for each in lost])
        self._loads.abandon()
        self._revoked.clear()
        self._ended.clear()
        self._step += 1
        return orders

    @property
    def is_awaited(self) -> bool:
        """Whether the forward of the next step reads blocks that a load is to fill."""
        return bool(self._loads.awaited)

    def let_go(self) -> None:
        """After `last_orders`, which revoke every store: give vLLM its blocks back."""
        self._stores.abandon()
        for tracked in self._requests.values():
            self._forget_offers(tracked)

    def _note_beginnings(self, output: SchedulerOutput) -> None:
        """Requests that get their first step with the blocks which they have now, and states that vLLM names."""
        new = (data.req_id for data in output.scheduled_new_reqs)
        for name in itertools.chain(new, output.scheduled_cached_reqs.resumed_req_ids):
            tracked = self._requests.get(name)
            if tracked is None:
                continue
            tracked.began_step = self._step
            self._protection.left(name)
            self._loads.took_off(name)
            if tracked.loaded_s is not None:
                self._planner.waited(self._idle_s(time.monotonic()) - tracked.loaded_s)
                tracked.loaded_s = None
        if not self._geometry.has_states or output.kv_connector_block_state is None:
            return
        for name, offers in output.kv_connector_block_state.boundary_state_offloads.items():
            tracked = self._requests.get(name)
            if tracked is not None and tracked.keys is not None:
                usable = self._worth.offers(offers, tracked)
                # They are filled by this step, and must not be given away before it has come back.
                self._stores.pin([block for _, block, _ in usable])
                tracked.offers += usable

    def _forget_offers(self, tracked: Tracked) -> None:
        if tracked.offers:
            self._stores.unpin([block for _, block, _ in tracked.offers])
            tracked.offers.clear()

    def has_freed_blocks(self) -> bool:
        """VLLM has no block left for a running request; whether it can have some now, so that none is preempted."""
        return self._stores.yield_idle(is_thorough=True)

    # ---- a step comes back -----------------------------------------------------------------------------------------

    def stepped(self, done: StepDone) -> None:
        """The forward of step `done` has run on every worker, and vLLM has taken its output."""
        self._confirmed_step = done.step
        self._step_timer.came_back(done.step, time.monotonic())
        self._settle()
        self._stores.yield_idle()
        for name, tracked in list(self._due.items()):
            if tracked.began_step is not None and tracked.began_step <= done.step:
                was_stored = self._store_full_chunks(tracked, self._tables(name))
                if was_stored or not tracked.request.num_in_flight_tokens:
                    del self._due[name]

    def hide(self, bad_blocks: Collection[int]) -> None:
        """Hide blocks that were not filled, and those behind them, from vLLM's cache. See `Worker.take_bad_blocks`.

        VLLM hashes the blocks of a load that is waited for before it has ended. When it fails they are computed, and
        stay hashed. If their request goes before that, another one would find bytes that were never written.
        """
        for name in self._requests:
            for table in self._tables(name):
                first = next((number for number, block in enumerate(table) if block in bad_blocks), len(table))
                self._stores.hide(table[first:])

    def _store_full_chunks(self, tracked: Tracked, tables: BlockTables) -> bool:
        """Store the chunks that are full now and were not handed over before; whether there were any."""
        computed = tracked.computed_tokens(self._confirmed_step)
        end = computed - computed % self._geometry.chunk_tokens
        if tracked.keys is None or end <= tracked.handed_tokens:
            return False
        first = tracked.handed_tokens // self._size
        places = self._worth.hand_over(tracked, end, tables)
        if places:
            hint = Hint(tracked.said.session, seconds_saved_per_token=self._planner.seconds_per_token)
            prefix = tracked.prefix(end)
            if self._events is not None:
                self._events.learn(tracked.request, prefix, first)
            self._stores.begin(tracked.id, prefix, places, hint)
        self._forget_offers(tracked)
        return True

    # ---- what has ended --------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        for event in self._completions.take_events():
            if isinstance(event, LoadDone):
                self._load_ended(event)
            elif isinstance(event, StoreDone):
                self._stores.ended(event)
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
        self._planner.ended(plan, done, load.ended_s - load.began_s, load.ended_s)
        tracked.loaded_s = self._idle_s(load.ended_s) if load.match.is_async else None
        if load.match.is_async and not load.is_void and done.tokens >= plan.tokens:
            self._loads.land(load)
        if plan.tokens < tracked.request.num_tokens:
            self._step_timer.will_compute(tracked)
        if done.tokens < plan.tokens:
            # What is missing is computed, and stored again; and no second load is to run into the same hole.
            self._worth.known(tracked, max(done.tokens, plan.resident_tokens) // self._size * self._size)
            self._session.release(tracked.question)
            tracked.answer = None
            tracked.attempts += 1
            is_last = done.was_cut or tracked.attempts >= ATTEMPTS_MAX
            tracked.cap_tokens = 0 if is_last else min((chunk for _, chunk in done.failed), default=0) * self._size

    def _idle_s(self, at_s: float) -> float:
        """A clock that stands still while the engine computes: a request that waits for others has lost nothing."""
        return at_s - self._step_timer.computed_s(at_s)

    @property
    def _size(self) -> int:
        return self._geometry.chunk_tokens

    def _tell(self, ended: Ended) -> None:
        """In the courier's thread."""
        subject = ASYNC_NOTE if ended.is_async else SYNC_NOTE
        self._ranks.tell(Note(subject, ended.load, ended.bad_blocks, ended.is_failed))

    # ---- other -----------------------------------------------------------------------------------------------------

    def forget_all(self) -> None:
        """Everything cached before now is not to be found any more: vLLM resets its caches."""
        self._loads.forget_landed()
        for tracked in self._requests.values():
            # The numbers that a running request has computed belong to what was before.
            has_old_blocks = tracked.request.num_computed_tokens > 0
            if tracked.load is not None:
                load = self._loads.void(tracked.load)
                # Its request is computed anew from where vLLM's own blocks end. One that has ended may be taken as it
                # is: the courier sets the time before it looks whether the load is void.
                has_old_blocks = load.match.plan.resident_tokens > 0 or load.ended_s > 0
            if tracked.answer is not None:
                self._session.release(tracked.question)  # nothing else will: its answer is forgotten
            tracked.renew(None if has_old_blocks else self._begin_keys(tracked.request))

    @property
    def has_news(self) -> bool:
        """Whether a step is due although there is nothing to compute: blocks to be given back, events to be told."""
        return self._stores.has_pins or (self._events is not None and self._events.has_news)

    def take_events(self) -> list[Any]:
        """What routers are to be told, as vLLM's events."""
        return [] if self._events is None else self._events.take()

    def close(self) -> None:
        """End the courier."""
        self._completions.close()
