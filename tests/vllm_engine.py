"""A minimal engine with vLLM's scheduling for a connector, in place of vLLM's scheduler and block pool.

It does what vLLM cannot be made to do on a CPU: overlapped steps, and a seed that chooses which request is preempted,
aborted or slow. The scheduler side, the worker, the copier, the core and its threads are real. The engine knows the
right bytes of every block, and checks them before each forward pass.
"""

import itertools
import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from tests.vllm_engine_parts import Block, Faults, LieError, Memory, Pool, Request, Step, number_of
from tests.vllm_recorded import recorded
from tests.waiting import wait_until

from kvtier.config.sections import Config, HostConfig, LimitsConfig
from kvtier.connect.vllm.geometry import Geometry
from kvtier.connect.vllm.requests.miss_reasons import RequestHistory
from kvtier.connect.vllm.requests.request_events import RequestEvents
from kvtier.connect.vllm.requests.transfer_params import TransferParams
from kvtier.connect.vllm.scheduler.block_pool import BlockPins
from kvtier.connect.vllm.scheduler.scheduler import Scheduler
from kvtier.connect.vllm.worker.copier import open_copier
from kvtier.connect.vllm.worker.worker_step import Worker
from kvtier.core.planner import Planner
from kvtier.keys.chain import Chain
from kvtier.layout import History, Window, engine_bytes, of_all_ranks
from kvtier.runtime.open import open_core
from kvtier.runtime.protocol import Note
from kvtier.runtime.rank import open_rank
from kvtier.runtime.rank_group import OpenRanks
from kvtier.types import RequestId

__all__ = ["LieError", "SmallEngine"]

DEADLINE_S = 120.0
PATIENT = LimitsConfig(load_deadline_s=600.0, store_deadline_s=600.0)
"""Limits that no machine is too slow for."""


class SmallEngine:
    """One engine.

    Args:
        case: name of a recorded configuration.
        blocks: number of blocks in the pool.
        seed: seed of everything that is left to chance.
        is_overlapped: whether a step is put together before the previous one has come back.
        has_caching: whether vLLM's own prefix cache is on.
        config: kvtier's settings.
        step_tokens: most tokens of a step.
        defers_loads: whether a load begins only when the steps in flight have come back, as in vLLM 0.33.
        slow_s: gathers take up to this much longer, and scatters up to a tenth of it.
        failing: share of copies that fail.
        rest: share of steps before which all requested copies are made. In between none proceeds, so the seed decides
            how late they are, and not the machine. None: copies take their own time.
        is_protected: whether the setting `vllm.prefix_protection` is on.
        remembers: whether to keep the history of requests.
        events: KV events for routers.
        params: settings of `TransferParams`.
        roles: `stores` and `drafted_tokens` of the scheduler.
    """

    def __init__(
        self,
        case: str = "llama32",
        *,
        blocks: int = 120,
        seed: int = 0,
        is_overlapped: bool = False,
        has_caching: bool = True,
        config: Config | None = None,
        step_tokens: int = 1024,
        defers_loads: bool = False,
        slow_s: float = 0.0,
        failing: float = 0.0,
        rest: float | None = None,
        is_protected: bool = True,
        remembers: bool = False,
        events: Any = None,
        params: dict[str, Any] | None = None,
        **roles: Any,
    ) -> None:
        self.draw = random.Random(seed)
        self.dice = random.Random(seed)
        """Decides for each step. `draw` decides what users do, however many steps that takes."""
        engine = recorded(case, blocks)
        self.tensors = engine.tensors()
        self.blocks = blocks
        self.geometry = Geometry.of(engine.config)
        copier = open_copier(self.geometry, engine.config, self.tensors, engine.layers)
        self.rest = rest
        self.copier = Faults(copier, seed, slow_s=slow_s, failing=failing, is_open=rest is None)
        self.memory = Memory(self.tensors, blocks)
        config = config or Config(host=HostConfig(capacity_bytes="64MiB"))
        if config.limits == LimitsConfig():
            config = replace(config, limits=PATIENT)
        self.rank = open_rank(config, copier.pages.layout, bytes(32), self.copier)
        self.worker = Worker(copier.revoke)
        self.heard: set[RequestId] = set()  # loads whose end the worker knows
        self.rank.mover.on_note = self._hear
        ranks = OpenRanks(self.rank.mover, self.rank.slots, self.rank.tiers)
        self.opened = open_core(
            config, self.geometry.layout, bytes(32), ranks, on_close=self.rank.close, observer=events, texts=events
        )
        self.history = RequestHistory(self.opened.session, self.geometry, str) if remembers else None
        self.pool = Pool(blocks, has_caching=has_caching)
        self.scheduler = Scheduler(
            session=self.opened.session,
            ranks=ranks.executor,
            geometry=self.geometry,
            keys=SimpleNamespace(
                begin=lambda _request: Chain(bytes(32), self.geometry.chunk_tokens),
                adapters=SimpleNamespace(mixed=set(), read=lambda _: set(), named=lambda _: ()),
            ),
            planner=Planner(is_on=False),
            engine_cache=SimpleNamespace(
                tables=lambda name: self.requests[name].block_ids,
                resident=self._resident if is_protected else None,
                open_pins=lambda on_reuse: BlockPins(self.pool, on_reuse),
                has_prefix_caching=has_caching,
                restart=lambda _names: None,
            ),
            params=TransferParams(self.opened.session, **(params or {})),
            log=RequestEvents(self.opened, of_all_ranks([self.geometry.layout], engine_bytes), events, self.history),
            **roles,
        )
        self.announced: dict[str, Any] = {}
        """What each request's response tells another engine."""
        tables = [(table, group) for group in self.geometry.groups for table in group.tables]
        self.groups = [(table, group.validity) for table, group in sorted(tables, key=lambda each: each[0].number)]
        self.step_tokens, self.defers_loads = step_tokens, defers_loads
        self.deferred_loads: dict[str, tuple[int, int]] = {}
        self.depth = 2 if is_overlapped else 1
        self.under_way: deque[Step] = deque()
        self.requests: dict[str, Request] = {}
        self.waiting, self.running = list[Request](), list[Request]()
        self.deferred: list[tuple[int, list[Block]]] = []
        self.names = itertools.count()
        self.step_number = self.processed_step = 0
        self.loaded_tokens = self.preemptions = self.failures = self.reports = 0
        self.truth: dict[str, list[int]] = {}
        """All tokens of each request, including those not known yet."""

    # ---- what a user does ------------------------------------------------------------------------------------------

    def add(self, prompt: Sequence[int], new_tokens: int, **said: Any) -> Request:
        request = Request(f"r{next(self.names)}", list(prompt), len(prompt), len(prompt) + new_tokens, **said)
        self.requests[request.request_id] = request
        self.truth[request.request_id] = list(prompt)
        self.waiting.append(request)
        self.scheduler.arrived(request)
        return request

    def ask(self, prompt: Sequence[int], new_tokens: int, **said: Any) -> Request:
        """Run a request to its end, and return it."""
        request = self.add(prompt, new_tokens, **said)
        self.run()
        return request

    def abort(self, request: Request) -> None:
        if request.is_finished:
            return
        if request in self.running:
            self.running.remove(request)
        if request in self.waiting:
            self.waiting.remove(request)
        has_begun = self.deferred_loads.pop(request.request_id, None) is None
        is_held = request.is_loading and not request.is_loaded and has_begun
        request.status = "FINISHED_ABORTED"
        self._end(request, is_held=is_held)

    @property
    def has_work(self) -> bool:
        return bool(self.requests or self.under_way or self.scheduler.has_news)

    def step(self) -> None:
        """Run one iteration of the engine's core loop."""
        if self.rest is not None and self.dice.random() < self.rest:
            self.settle()
        if self.requests or self.scheduler.has_news:
            self.under_way.append(self._schedule())
        if self.under_way and (len(self.under_way) >= self.depth or not self.requests):
            # The workers may have finished it long ago, or only now that the next step has been put together.
            self._execute(self.under_way[0])
            self._update(self.under_way.popleft())
        if self.dice.random() < 0.5:
            for step in self.under_way:
                self._execute(step)

    def run(self) -> None:
        """Run until nothing is left to do."""
        until_s = time.monotonic() + DEADLINE_S
        while self.has_work:
            self.step()
            assert time.monotonic() < until_s, f"stalled: {self.requests}"

    def settle(self) -> None:
        """Wait until every copy has ended and been reported."""
        self.copier.gate.set()
        wait_until(self._is_settled, "the copies", DEADLINE_S, pause_s=1e-4)
        if self.rest is not None:
            self.copier.gate.clear()

    def _is_settled(self) -> bool:
        loads = {name for name, load in self.scheduler._loads._open.items() if not load.blocked_by}
        result = {event.request for event in list(self.scheduler._loads._events)}
        stores = self.scheduler._stores._read.keys() - self.scheduler._stores._unsent
        return result >= loads.union(stores) and self.heard >= loads

    def _hear(self, note: Note) -> None:
        self.worker.receive(note)
        self.heard.add(note.request)

    def forget(self) -> None:
        """Make the pool forget what it has cached, once all pending stores are done."""
        self.settle()
        self.idle()
        self.pool.evict_blocks(set(range(self.blocks)))

    def idle(self) -> None:
        """Run one more step with nothing to do."""
        step = self._schedule()
        self._execute(step)
        self._update(step)

    def close(self) -> None:
        self.copier.gate.set()
        self.opened.session.close(10.0)
        self.scheduler.close()

    def _resident(self, request: Request) -> list[list[int]]:
        return [[block.block_id for block in self._local_hit(request)]] * len(self.groups)

    # ---- a step goes out -------------------------------------------------------------------------------------------

    def _schedule(self) -> Step:
        scheduled: dict[str, int] = {}
        new: list[Any] = []
        resumed: set[str] = set()
        budget = self.step_tokens
        was_preempted = False
        for request in list(self.running):
            if request not in self.running:
                continue
            count = min(request.num_tokens + request.placeholders - request.num_computed_tokens, budget)
            if count <= 0 or request.num_tokens + request.placeholders >= request.most:
                continue
            while not self._allocate(request, count):
                if self.scheduler.has_freed_blocks():
                    break
                victim = self.running[-1]
                if victim.last_step > self.processed_step:
                    break  # its blocks would not be free at once
                self._preempt(victim)
                scheduled.pop(victim.request_id, None)
                was_preempted = True
                if victim is request:
                    break
            else:
                scheduled[request.request_id] = count
                budget -= count
        if not was_preempted:
            for request in list(self.waiting):
                if budget <= 0 or len(self.running) >= 6:
                    break
                count = self._admit(request, budget)
                if count is None:
                    continue
                if count < 0:
                    break
                (resumed.add if request.status == "PREEMPTED" else new.append)(request.request_id)
                request.status = "RUNNING"
                self.waiting.remove(request)
                self.running.append(request)
                scheduled[request.request_id] = count
                budget -= count
        if scheduled:
            self.step_number += 1
        output = SimpleNamespace(
            num_scheduled_tokens=scheduled,
            scheduled_new_reqs=[SimpleNamespace(req_id=name) for name in new],
            scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=resumed),
            kv_connector_block_state=None,
        )
        orders = self.scheduler.orders(output)
        requests = {name: self.requests[name] for name in scheduled}
        starts = {name: request.num_computed_tokens for name, request in requests.items()}
        for name, count in scheduled.items():
            request = requests[name]
            request.num_computed_tokens += count
            request.num_in_flight_tokens += count
            request.last_step = self.step_number
            if request.num_computed_tokens >= request.num_tokens + request.placeholders:
                request.placeholders += 1
        tables = {name: [list(table) for table in request.tables] for name, request in requests.items()}
        return Step(self.step_number if scheduled else 0, scheduled, requests, starts, tables, orders)

    def _admit(self, request: Request, budget: int) -> int | None:
        """Return the tokens to compute now of a waiting request. None: skip it. Below zero: stop."""
        if request.is_loading:
            if not request.is_loaded:
                return None
            self._arrived(request)
        elif request.num_in_flight_tokens:
            return None  # output from before its preemption is still to come
        if request.num_computed_tokens:
            count = min(request.num_tokens - request.num_computed_tokens, budget)
            return count if self._allocate(request, count) else -1
        hit = self._local_hit(request)
        resident = len(hit) * self.groups[0][0].block_tokens
        external = self.scheduler.matched(request, resident)
        if external is None:
            return None
        count = 0 if external else min(request.num_tokens - resident, budget)
        # All of it must fit beside all that others will need, because a request that waits with blocks cannot be
        # preempted.
        reserved = sum(self._lacking(other) for other in [*self.waiting, *self.running] if other.tables)
        idle = sum(block.is_free for block in hit)
        if self._lacking(request) - len(hit) * len(self.groups) + idle + reserved > len(self.pool.free_block_queue):
            return -1
        self.pool.touch(hit)
        request.tables = [list(hit) for _ in self.groups]
        for (table, validity), mine in zip(self.groups, request.tables, strict=True):
            self._extend(mine, table, validity, resident + external, resident + external)
        if external and self.defers_loads and self.step_number > self.processed_step:
            request.last_step = self.step_number
            self.deferred_loads[request.request_id] = (self.step_number, external)
        elif external:
            self._load(request, external)
        request.num_computed_tokens = resident + external
        if external:
            request.is_loading = True
            return None
        assert self._allocate(request, count)
        return count

    def _load(self, request: Request, external: int) -> None:
        self.scheduler.allocated(request, request.block_ids, external)
        self.loaded_tokens += external

    def _lacking(self, request: Request) -> int:
        """Return how many further blocks a request will need."""
        tables = request.tables or [[] for _ in self.groups]
        return sum(
            max(0, -(-request.num_tokens // table.block_tokens) - len(mine))
            for (table, _), mine in zip(self.groups, tables, strict=True)
        )

    def _local_hit(self, request: Request) -> list[Block]:
        if not self.pool.has_caching or any(isinstance(validity, Window) for _, validity in self.groups):
            return []
        size = self.groups[0][0].block_tokens
        hit: list[Block] = []
        for end in range(size, request.num_tokens, size):
            block = self.pool.cached.get(tuple(request.tokens[:end]))
            if block is None:
                break
            hit.append(block)
        return hit

    def _arrived(self, request: Request) -> None:
        """Note that a load was reported."""
        request.is_loading = request.is_loaded = False
        if request.is_failed and not request.num_computed_tokens:
            self._free(request)
        else:
            self._cache(request, request.num_computed_tokens)
        request.is_failed = False

    def _allocate(self, request: Request, count: int) -> bool:
        total = request.num_computed_tokens + count
        for (table, validity), mine in zip(self.groups, request.tables, strict=True):
            if isinstance(validity, Window):
                processed = request.num_computed_tokens - request.num_in_flight_tokens
                self._slide(mine, max(0, processed - validity.tokens) // table.block_tokens)
        needed = sum(
            max(0, -(-total // table.block_tokens) - len(mine))
            for (table, _), mine in zip(self.groups, request.tables, strict=True)
        )
        if needed > len(self.pool.free_block_queue):
            return False
        for (table, validity), mine in zip(self.groups, request.tables, strict=True):
            self._extend(mine, table, validity, total, 0)
        # As in vLLM, blocks are hashed when scheduled, before they are filled.
        self._cache(request, min(total, request.num_tokens))
        return True

    def _extend(self, mine: list[Block | None], table: Any, validity: Any, total: int, external: int) -> None:
        needed = -(-total // table.block_tokens) - len(mine)
        if isinstance(validity, Window) and external:
            skipped = max(0, external - validity.tokens) // table.block_tokens - len(mine)
            mine += [None] * max(0, skipped)
            needed -= max(0, skipped)
        mine += self.pool.get_new_blocks(max(0, needed))

    def _slide(self, mine: list[Block | None], first: int) -> None:
        gone = [block for block in mine[:first] if block is not None]
        mine[:first] = [None] * min(first, len(mine))
        self.pool.free_blocks(gone)

    def _cache(self, request: Request, tokens: int) -> None:
        for (table, validity), mine in zip(self.groups, request.tables, strict=True):
            if isinstance(validity, History):
                for number in range(tokens // table.block_tokens):
                    block = mine[number]
                    assert block is not None
                    self.pool.cache(block, tuple(request.tokens[: (number + 1) * table.block_tokens]))

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._free(request)
        request.status, request.num_computed_tokens, request.placeholders = "PREEMPTED", 0, 0
        self.waiting.insert(0, request)
        self.preemptions += 1

    def _free(self, request: Request) -> None:
        blocks = [block for table in request.tables for block in reversed(table) if block is not None]
        request.tables = []
        if request.last_step > self.processed_step:
            self.deferred.append((self.step_number, blocks))
        else:
            self.pool.free_blocks(blocks)

    # ---- the forward -----------------------------------------------------------------------------------------------

    def _execute(self, step: Step) -> None:
        if step.done is not None:
            return
        self.worker.begin(step.orders)
        for name, count in step.scheduled.items():
            self._forward(step, name, count)
        step.results = self.worker.results()
        step.bad_blocks = self.worker.take_bad_blocks()
        step.done = self.worker.done

    def _forward(self, step: Step, name: str, count: int) -> None:
        request, start, bad_blocks = step.requests[name], step.starts[name], step.bad_blocks
        truth = self.truth[request.request_id]
        end = start + count
        for (table, validity), mine in zip(self.groups, step.tables[name], strict=True):
            size = table.block_tokens
            first = max(0, start - validity.tokens) // size if isinstance(validity, Window) else 0
            for number in range(first, -(-end // size)):
                block = mine[number]
                assert block is not None, f"{request.request_id} has no block {number}"
                if (number + 1) * size <= start:
                    if block.block_id not in bad_blocks:
                        self.memory.look(request, table, number, block, truth)
                else:
                    self.memory.write(table, number, block, truth[: min(end, (number + 1) * size)])
        if end == len(truth) and len(truth) <= request.most:
            truth.append(number_of(truth) % 1000)

    # ---- a step comes back -----------------------------------------------------------------------------------------

    def _update(self, step: Step) -> None:
        if step.scheduled:
            self.processed_step = step.number
        while self.deferred and self.deferred[0][0] <= self.processed_step:
            self.pool.free_blocks(self.deferred.pop(0)[1])
        for name, (fence, external) in list(self.deferred_loads.items()):
            if fence <= self.processed_step:
                del self.deferred_loads[name]
                self._load(self.requests[name], external)
        for name in step.results[1]:
            request = self.requests.get(name)
            if request is not None and request.is_loading:
                request.num_computed_tokens, request.is_failed = 0, True
                self.failures += 1
        rescheduled = self._invalidate(step)
        for name, count in step.scheduled.items():
            request = step.requests[name]
            request.num_in_flight_tokens -= count
            if request.is_finished or request.status == "PREEMPTED" or name in rescheduled:
                continue
            truth = self.truth[name]
            if step.starts[name] + count >= request.num_tokens and request.placeholders:
                request.tokens.append(truth[request.num_tokens])
                request.placeholders -= 1
                if request.num_tokens >= request.most:
                    request.status = "FINISHED_STOPPED"
                    self.running.remove(request)
                    self._end(request, is_held=False)
        self.scheduler.stepped(step.done)
        for name in step.results[0]:
            request = self.requests[name]  # vLLM asserts that too
            self.reports += 1
            if request.is_finished:
                self._free(request)
                del self.requests[name]
            else:
                assert request.is_loading, f"{name} is reported and loads nothing"
                assert not request.is_loaded, f"{name} is reported twice"
                request.is_loaded = True

    def _invalidate(self, step: Step) -> set[str]:
        """Do what vLLM does with blocks that a load did not fill, if there is one group."""
        if not step.bad_blocks:
            return set()
        for request in self._truncated([request for request in self.waiting if request.is_loading], step):
            request.is_failed = True
        return {request.request_id for request in self._truncated(self.running, step)}

    def _truncated(self, requests: Sequence[Request], step: Step) -> list[Request]:
        """Return requests that have such a block. If several share one, only the first computes it."""
        ((table, _),) = self.groups
        found: list[Request] = []
        marked: set[int] = set()
        for request in requests:
            computed = request.num_computed_tokens - step.scheduled.get(request.request_id, 0)
            ids = request.block_ids[0][: -(-computed // table.block_tokens)]
            bad = [number for number, block in enumerate(ids) if block in step.bad_blocks]
            if bad:
                mine = [number for number in bad if ids[number] not in marked]
                marked.update(ids[number] for number in mine)
                request.num_computed_tokens = mine[0] * table.block_tokens if mine else computed
                request.placeholders = 0
                self.failures += 1
                found.append(request)
        return found

    def _end(self, request: Request, *, is_held: bool) -> None:
        self.announced[request.request_id] = self.scheduler.finished(request, request.block_ids)
        if not is_held:
            self._free(request)
            del self.requests[request.request_id]
