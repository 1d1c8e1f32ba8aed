"""Flows of requests, new weights and cache resets, on vLLM's own scheduler and block pool and kvtier's connector.

The forward is a stand-in: it writes into each page of the KV memory whose tokens these are and which weights computed
them, and looks at each page that it reads. So a thousand flows take a minute, and one page that is wrong is seen.
"""

import random
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

BLOCK, BLOCKS, VOCABULARY, LEAST_TOKEN = 32, 120, 1024, 3
STEP_TOKENS, REQUESTS_MAX, DEADLINE_S = 512, 6, 30.0
COPY_S = [0.004]
"""Copies take up to so much longer: some steps."""


class Page(NamedTuple):
    """What the forward has written into a page."""

    weights: int
    """The weights that it was computed with; -1: not with one alone."""
    age: int
    """Number of changes before the oldest weights that had a part in it."""
    tokens: int
    """Hash of all tokens up to its end."""
    number: int


class Work(NamedTuple):
    """What a step computes for a request."""

    name: str
    start: int
    end: int
    """Its first token, and the one after its last."""
    blocks: list[int]
    is_sampled: bool
    loaded: tuple[int, int]
    """The tokens before a load that it begins with, and with it."""


@dataclass
class Step:
    """A step that is under way."""

    output: Any
    work: list[Work]
    oldest: int
    """The oldest weights whose KV it may find."""
    first: int
    """The oldest page that may be loaded."""
    told: Any = None
    """The connector's part of the result, once the step is launched."""
    result: Any = None


class Flows:
    """An engine without its model.

    Args:
        core: vLLM's `EngineCore`.
        seed: of everything that is left to chance.
        depth: steps under way at once. With more than one they are asynchronous: 2 as with one stage, 3 as with a
            pipeline of two. One is scheduled before those before it have returned. The workers'
            connector is mostly called at once, and the forward runs later, mostly when its result is waited for.
        updates: draw updates of weights and sleep, too. They reset caches often, and then hide what a control breaks.
    """

    def __init__(self, core: Any, seed: int, *, depth: int, updates: bool = True) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        self.core, self.scheduler, self.worker = core, core.scheduler, get_kv_transfer_group()
        self.depth, self.updates = depth, updates
        (self.memory,) = core.model_executor.driver_worker.worker.model_runner.kv_caches
        self.draw = random.Random(seed)
        self.pages: list[Page] = []
        self.weights = self.latest = self.age = self.oldest = 0
        """The present weights, the last new ones, the number of changes, and that of the oldest KV in vLLM itself."""
        worker = core.model_executor.driver_worker.worker
        module = import_module("kvtier.connect.vllm.worker.weight_changes")
        worker.reload_weights = partial(setattr, self, "weights")
        module.digest_of = lambda *_: self.weights.to_bytes(32, "big")
        self.first = 0
        """The oldest page that may be loaded."""
        self.texts: dict[str, list[int]] = {}
        self.loads: dict[str, tuple[int, int]] = {}
        """The tokens of requests that have not begun: before a load, and with it."""
        self.under_way: deque[Step] = deque()
        self.seen: Counter[str] = Counter()
        connector = self.scheduler.connector
        matched, inner = connector.get_num_new_matched_tokens, connector.update_state_after_alloc

        def asked(request: Any, resident: int) -> tuple[int | None, bool]:
            self.loads.pop(request.request_id, None)
            return matched(request, resident)

        def allocated(request: Any, blocks: Any, external: int) -> None:
            inner(request, blocks, external)
            if external:
                end = external + sum(it.block_hash is not None for it in blocks.blocks[0]) * BLOCK
                self.loads[request.request_id] = end - external, end

        connector.get_num_new_matched_tokens, connector.update_state_after_alloc = asked, allocated
        common = [[self.draw.randrange(LEAST_TOKEN, VOCABULARY) for _ in range(1200)] for _ in range(3)]
        self.prompts = [
            [*text[: self.draw.randrange(260, 1100)], self.draw.randrange(LEAST_TOKEN, VOCABULARY)]
            for text in common
            for _ in range(3)
        ]

    # ---- what users do ---------------------------------------------------------------------------------------------

    def flow(self) -> None:
        """Some requests, then new weights and resets in any order, with requests that begin and end in between."""
        acts = [self.add] * 4 + [self.steps] * 6 + [self.settle] * 2 + [self.reset] * 3 + [self.change, self.abort]
        acts += [self.update, self.sleep] if self.updates else []
        for act in (self.add, self.steps, *self.draw.choices(acts, k=self.draw.randrange(3, 12))):
            act()
        if self.draw.random() < 0.5:
            self.finish()

    def add(self) -> None:
        """Ask for some prompts."""
        from vllm.v1.request import Request

        from vllm import SamplingParams

        for _ in range(self.draw.randrange(1, 4)):
            if len(self.scheduler.requests) >= REQUESTS_MAX:
                return
            name, prompt = f"r{len(self.texts)}", self.draw.choice(self.prompts)
            sampling = SamplingParams(temperature=0, max_tokens=self.draw.randrange(1, 20), ignore_eos=True)
            hasher = self.core.request_block_hasher
            request = Request(name, list(prompt), sampling, None, block_hasher=hasher)
            self.texts[name] = list(prompt)
            self.scheduler.add_request(request)

    def abort(self) -> None:
        """End one request, or all."""
        from vllm.v1.request import RequestStatus

        names = [name for name, it in self.scheduler.requests.items() if not it.is_finished()]
        if names:
            gone = names if self.draw.random() < 0.5 else [self.draw.choice(names)]
            self.scheduler.finish_requests(gone, RequestStatus.FINISHED_ABORTED)

    def change(self) -> None:
        """Other weights, by a call that vLLM passes on to its workers."""
        self.launch()
        self.core.model_executor.collective_rpc(lambda worker: None)
        self.age += 1
        self.weights = self.latest = self.latest + 1
        self.seen["changes with loads"] += self.count("REMOTE") > 0
        if self.draw.random() < 0.7:
            self.reset()

    def update(self) -> None:
        """Other weights, or the same, in flight and by a call that says when they are complete."""
        self.launch()
        self.age += 1
        new = self.draw.choice((self.weights, 0, self.latest + 1))
        self.latest = max(self.latest, new)
        self.core.model_executor.collective_rpc("reload_weights", args=(new,))
        self.seen["updates with running"] += self.count("running") > 0

    def sleep(self) -> None:
        """All memory goes away, and comes back with the weights of before or with others."""
        while self.under_way:  # vLLM waits until no step is under way
            self.end_step()
        self.add()
        self.step()
        while self.under_way:
            self.end_step()
        level, loads = self.draw.choice((1, 2)), self.count("REMOTE")
        self.core.sleep(level, self.draw.choice(("abort", "keep")))
        self.seen["sleeps with loads"] += loads > 0
        self.memory.fill_(-1.0)
        self.oldest = self.age
        if self.draw.random() < 0.5:
            self.steps()
        if level == 2:
            self.core.wake_up(["weights"])
            self.update()
        self.memory.fill_(-1.0)
        self.core.wake_up()

    def reset(self) -> None:
        """One of vLLM's resets, whose error or False a loop may swallow, or try once more."""
        for _ in range(self.draw.choice((1, 1, 2))):
            preempts, everywhere = self.draw.random() < 0.5, self.draw.random() < 0.3
            self.seen["resets before a forward"] += any(it.result is None for it in self.under_way)
            is_due = preempts or not self.scheduler.running
            for kind in ("running", "REMOTE", "deferred", "pins"):
                self.seen[f"resets with {kind}"] += self.count(kind) > 0
            try:
                was_reset = self.scheduler.reset_prefix_cache(preempts, everywhere)
            except RuntimeError:
                was_reset = None
            if was_reset is not is_due:
                kinds = {kind: self.count(kind) for kind in ("running", "REMOTE", "deferred", "pins")}
                raise AssertionError(f"reset({preempts}, {everywhere}) is {was_reset}: {kinds}")
            self.seen[f"resets that are {was_reset}"] += 1
            if was_reset:
                self.oldest = self.age
                self.first = len(self.pages) if everywhere else self.first
            if self.draw.random() < 0.5:
                self.steps()

    def count(self, kind: str) -> int:
        """Requests that run, wait for a load, or have ended with blocks; or blocks that only stores hold."""
        if kind == "running":
            return len(self.scheduler.running)
        if kind == "deferred":
            return len(self.scheduler.deferred_frees)
        if kind == "pins":
            return sum(it.ref_cnt > 0 for it in self.scheduler.kv_cache_manager.block_pool.blocks[1:])
        return sum(kind in str(it.status) for it in self.scheduler.requests.values())

    # ---- what the engine does --------------------------------------------------------------------------------------

    def steps(self) -> None:
        """Some steps."""
        for _ in range(self.draw.choice((1, 2, 3, 5, 8))):
            self.step()

    def settle(self) -> None:
        """Give copies time."""
        time.sleep(COPY_S[0] * self.draw.random() * 2)
        self.step()

    def launch(self) -> None:
        """Run the forwards of all steps that are under way: they come before what is called in the workers next."""
        for step in self.under_way:
            self.execute(step)

    def finish(self) -> None:
        """Step until nothing is left to do."""
        until_s = time.monotonic() + DEADLINE_S
        while self.scheduler.has_requests() or self.under_way:
            self.step()
            if time.monotonic() > until_s:
                kinds = {kind: self.count(kind) for kind in ("running", "REMOTE", "deferred", "pins")}
                requests = [(it.request_id, str(it.status)) for it in self.scheduler.requests.values()]
                free = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
                raise AssertionError(f"stalled: {requests}, {kinds}, {free} free blocks")

    def step(self) -> None:
        """What the engine's core does again and again."""
        has_more = self.scheduler.has_requests()
        if has_more:
            self.under_way.append(self.scheduled())
            if self.depth > 1 and self.draw.random() < 0.7:  # else a worker in another process is behind
                self.seen["orders before a forward"] += self.under_way[0].result is None and len(self.under_way) > 1
                for step in self.under_way:
                    step.told = step.told or self.tell(step.output, lambda: None)
            if self.draw.random() < (0.2 if self.depth > 1 else 0.5):
                self.execute(self.under_way[-1])
        if self.under_way and (len(self.under_way) >= self.depth or not has_more):
            self.end_step()

    def end_step(self) -> None:
        """The first step that is under way returns."""
        step = self.under_way[0]
        result = self.execute(step)
        self.under_way.popleft()
        self.scheduler.update_from_output(step.output, result)
        for request in self.scheduler._inflight_prefills:
            (held,) = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)
            assert held, f"{request.request_id} has no blocks, and those it will need are kept from all others"

    def scheduled(self) -> Step:
        """The next step."""
        output = self.scheduler.schedule()
        self.seen["preemptions"] += len(output.preempted_req_ids or ())
        work = []
        for name, count in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            (blocks,) = self.scheduler.kv_cache_manager.get_block_ids(name)
            end, loaded = request.num_computed_tokens, self.loads.pop(name, (0, 0))
            work.append(Work(name, end - count, end, list(blocks), not request.is_prefill_chunk, loaded))
        return Step(output, work, self.oldest, self.first)

    def tell(self, output: Any, forward: Callable[[], None]) -> Any:
        """What the workers' connector says of a step: vLLM's calls in their order, around the launch of the forward."""
        from vllm.v1.outputs import KVConnectorOutput

        orders, worker = output.kv_connector_metadata, self.worker
        worker.handle_preemptions(orders)
        worker.bind_connector_metadata(orders)
        forward()
        worker.wait_for_save()
        results = worker.get_transfer_results(output.finished_req_ids)
        told = KVConnectorOutput(
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=worker.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
        )
        worker.clear_connector_metadata()
        return told

    def execute(self, step: Step) -> Any:
        """The forward of a step, after those before it; its result."""
        from vllm.v1.outputs import ModelRunnerOutput

        for other in self.under_way:
            if other is step:
                break
            self.execute(other)
        if step.result is not None:
            return step.result
        sampled: list[list[int]] = []

        def forward() -> None:
            sampled.extend([token] if work.is_sampled else [] for work, token in self.forward(step))

        if step.told is None:
            step.told = self.tell(step.output, forward)
        else:
            forward()
        names = [it.name for it in step.work]
        indices = {name: number for number, name in enumerate(names)}
        step.result = ModelRunnerOutput(names, indices, sampled, kv_connector_output=step.told)
        return step.result

    def forward(self, step: Step) -> Iterator[tuple[Work, int]]:
        """Look at the pages before each request's `start`, and write those up to `end`; the tokens that come next."""
        for work in step.work:
            name, start, end, blocks, _, (first, last) = work
            text = self.texts[name]
            while len(text) <= end:
                text.append(LEAST_TOKEN + hash(tuple(text)) % (VOCABULARY - LEAST_TOKEN))
            weights, age = self.weights, self.age
            for number in range(-(-start // BLOCK)):
                page = self.look(blocks[number])
                assert page.tokens == hash(tuple(text[: min(start, (number + 1) * BLOCK)])), (
                    f"{name}: foreign KV {number}"
                )
                if first <= number * BLOCK < min(last, start):
                    self.seen["loaded pages"] += 1
                    self.seen["pages of earlier"] += page.age < self.age
                    assert page.weights == self.weights, f"{name}: block {number} was loaded, of {page}"
                    assert page.number >= step.first, f"{name}: block {number} was loaded, of before a reset"
                    page = self.pages[page.number] = page._replace(age=self.age)  # as if it was computed now
                assert page.age >= step.oldest, f"{name}: block {number} is of {page}, reset at {step.oldest}"
                weights, age = weights if weights == page.weights else -1, min(age, page.age)
            for number in range(start // BLOCK, -(-end // BLOCK)):
                self.memory[blocks[number]] = float(len(self.pages))
                tokens = hash(tuple(text[: min(end, (number + 1) * BLOCK)]))
                self.pages.append(Page(weights, age, tokens, len(self.pages)))
            yield work, text[end]

    def look(self, block: int) -> Page:
        """What a page holds."""
        found = self.memory[block].flatten()
        number = round(found[0].item())
        assert bool((found == found[0]).all()), f"block {block} is torn"
        return self.pages[number]


def run(checkpoint: str, seed: int, flows: int, depth: int, needs: Sequence[str], sabotage: str) -> None:
    """Run `flows` flows in a process of their own, and up to four times as many more until each of `needs` was seen.

    Args:
        checkpoint: of a model with one layer.
        seed: of all flows.
        flows: their number.
        depth: see `Flows`.
        needs: names of counts that must not be 0.
        sabotage: name of a function below, or of `sabotage`.

    Raises:
        AssertionError: a reset did not do what it does without a connector, or a page is wrong.
    """
    from settings import connector
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.engine.core import EngineCore

    from vllm import LLM

    inner = EngineCore._initialize_kv_caches

    def initialize(core: Any, config: Any) -> Any:
        found = inner(core, config)
        config.scheduler_config.async_scheduling = depth > 1  # which vLLM's workers for CPUs cannot do
        type(config).max_concurrent_batches = property(lambda _: depth)
        return found

    EngineCore._initialize_kv_caches = initialize  # type: ignore[method-assign]
    _slow(random.Random(seed))
    if sabotage:
        (globals().get(sabotage) or getattr(import_module("sabotage"), sabotage))()
    llm = LLM(
        checkpoint,
        kv_transfer_config=connector(None, host__capacity_bytes="4MiB"),
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        max_model_len=2048,
        block_size=BLOCK,
        num_gpu_blocks_override=BLOCKS,
        max_num_batched_tokens=STEP_TOKENS,
        kv_cache_memory_bytes=16 << 20,
    )
    updates = not sabotage or sabotage in UPDATES
    world = Flows(llm.llm_engine.engine_core.engine_core, seed, depth=depth, updates=updates)
    assert isinstance(world.scheduler, AsyncScheduler) is (depth > 1)
    for number in range(5 * flows):  # on a busy machine copies end late, and some moments are rare
        if number >= flows and all(world.seen[name] for name in needs):
            break
        try:
            world.flow()
        except AssertionError as error:
            raise AssertionError(f"flow {number} of seed {seed}: {error}") from error
    world.finish()
    print("flows:", dict(world.seen), flush=True)
    assert not world.scheduler.connector._is_broken
    assert all(world.seen[name] for name in needs), world.seen
    llm.llm_engine.engine_core.shutdown()


def _slow(draw: random.Random) -> None:
    """Copies take some steps."""
    from kvtier.connect.vllm.worker.cpu_copy import CpuPageCopy

    def late(inner: Callable[..., Any]) -> Callable[..., Any]:
        def copy(self: CpuPageCopy, *arguments: Any) -> Any:
            time.sleep(COPY_S[0] * draw.random())
            return inner(self, *arguments)

        return copy

    CpuPageCopy.gather = late(CpuPageCopy.gather)  # type: ignore[method-assign]
    CpuPageCopy.scatter = late(CpuPageCopy.scatter)  # type: ignore[method-assign]


# ---- controls: what is broken on purpose ---------------------------------------------------------------------------


def keep_pins() -> None:
    """Blocks go back to vLLM only when their stores have ended."""
    from kvtier.connect.vllm.scheduler.stores import Stores

    inner = Stores.yield_idle
    Stores.yield_idle = lambda self, *, is_thorough=False: not is_thorough and inner(self)  # type: ignore[method-assign]


def unwatched() -> None:
    """Blocks go back to vLLM, and nobody looks whether they are handed out while a store reads them."""
    from kvtier.connect.vllm.scheduler.block_pool import BlockPins

    COPY_S[0] = 0.05  # long after the blocks are needed again
    BlockPins._reused = lambda self, block: None  # type: ignore[method-assign]


def keep_loads() -> None:
    """Requests that wait for loads go on waiting."""
    from kvtier.connect.vllm.scheduler.engine_cache import EngineCache

    EngineCache.restart = lambda self, names: None  # type: ignore[method-assign]


def forget_mixing() -> None:
    """What follows on vLLM's own KV of other weights is stored."""
    from kvtier.connect.vllm.scheduler.cache_invalidation import Invalidation

    Invalidation.mixes_weights = lambda self: None  # type: ignore[method-assign]


def undo_more() -> None:
    """A change that is not known has no name of its own when the reset of a sleep is undone."""
    from kvtier.connect.vllm.requests.keys import KeyMaker

    KeyMaker.unknown_weights = lambda self: None  # type: ignore[method-assign]


UPDATES = ("forget_mixing", "undo_more")
"""Controls that only updates of weights and sleep show."""

if __name__ == "__main__":
    run(*sys.argv[1:2], *map(int, sys.argv[2:5]), (), *sys.argv[5:6] or [""])
