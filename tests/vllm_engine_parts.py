"""The parts of the small engine in `vllm_engine`: blocks, their pool, requests, steps and faults."""

import hashlib
import random
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

NULL = 0

GATE_S = 600.0


@dataclass(eq=False)
class Block:
    """Stands in for `KVCacheBlock`."""

    block_id: int
    ref_cnt: int = 0
    block_hash: tuple[int, ...] | None = None
    is_free: bool = True

    @property
    def next_free_block(self) -> "Block | None":
        return self if self.is_free else None


class Queue(OrderedDict[int, Block]):
    """Stands in for `FreeKVCacheBlockQueue`."""

    def iter_blocks_after(self, cursor: None) -> Iterator[Block]:
        assert cursor is None
        return iter(self.values())

    def remove(self, block: Block) -> None:
        del self[block.block_id]
        block.is_free = False

    def append(self, block: Block) -> None:
        self[block.block_id] = block
        block.is_free = True

    def prepend_n(self, blocks: Sequence[Block]) -> None:
        for block in reversed(blocks):
            self.append(block)
            self.move_to_end(block.block_id, last=False)


class Pool:
    """Stands in for `BlockPool`. It hands out blocks with a hash last, and others first."""

    def __init__(self, count: int, *, has_caching: bool) -> None:
        self.blocks = [Block(number) for number in range(count)]
        self.blocks[NULL].ref_cnt, self.blocks[NULL].is_free = 1, False
        self.has_caching = has_caching
        self.free_block_queue = Queue((block.block_id, block) for block in self.blocks[1:])
        self.cached: dict[tuple[int, ...], Block] = {}
        self.watchers: dict[int, Callable[[Block], None]] = {}
        self.num_gpu_blocks = count

    def get_num_free_blocks(self) -> int:
        return len(self.free_block_queue)

    def get_new_blocks(self, count: int) -> list[Block]:
        taken = [self.free_block_queue.popitem(last=False)[1] for _ in range(count)]
        for block in taken:
            block.is_free = False
            watcher = self.watchers.pop(block.block_id, None)
            if watcher is not None:
                watcher(block)
            if block.block_hash is not None:
                if self.cached.get(block.block_hash) is block:
                    del self.cached[block.block_hash]
                block.block_hash = None
            assert block.ref_cnt == 0
            block.ref_cnt = 1
        return taken

    def touch(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            if block.ref_cnt == 0:
                self.free_block_queue.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            block.ref_cnt -= 1
            assert block.ref_cnt >= 0
            if block.ref_cnt == 0:
                if block.block_hash is None or not self.has_caching:
                    self.free_block_queue.prepend_n([block])
                else:
                    self.free_block_queue.append(block)

    def unpin_blocks(self, blocks: Sequence[Block], on_reuse: Callable[[Block], None]) -> None:
        for block in blocks:
            block.ref_cnt -= 1
            self.watchers[block.block_id] = on_reuse
            if block.ref_cnt == 0:
                self.free_block_queue.append(block)

    def cache(self, block: Block, tokens: tuple[int, ...]) -> None:
        if self.has_caching and block.block_hash is None:
            block.block_hash = tokens
            self.cached.setdefault(tokens, block)

    def evict_blocks(self, blocks: set[int]) -> None:
        for block in (self.blocks[number] for number in blocks):
            if block.block_hash is not None and self.cached.get(block.block_hash) is block:
                del self.cached[block.block_hash]
            block.block_hash = None


@dataclass(eq=False, repr=False)
class Request:
    """The part of `vllm.v1.request.Request` that the connector uses."""

    request_id: str
    tokens: list[int]
    """Tokens known so far."""
    num_prompt_tokens: int
    most: int
    status: str = "WAITING"
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0
    skip_reading_prefix_cache: bool = False
    shared_prefix_boundary: int = 0
    lora_request: None = None
    cache_salt: str | None = None
    mm_features: list[Any] = field(default_factory=list)
    session_id: str | None = None
    kv_transfer_params: dict[str, object] | None = None
    tables: list[list[Block | None]] = field(default_factory=list)
    is_loading: bool = False
    is_loaded: bool = False
    is_failed: bool = False
    last_step: int = 0
    placeholders: int = 0
    """Number of tokens that steps in flight will add."""

    def __repr__(self) -> str:
        return f"{self.request_id} {self.status} {self.num_computed_tokens}/{self.num_tokens} loading {self.is_loading}"

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def all_token_ids(self) -> list[int]:
        return self.tokens

    @property
    def block_ids(self) -> list[list[int]]:
        return [[NULL if block is None else block.block_id for block in table] for table in self.tables]

    @property
    def is_finished(self) -> bool:
        return self.status.startswith("FINISHED")


@dataclass
class Step:
    """A step in flight."""

    number: int
    scheduled: dict[str, int]
    requests: dict[str, Request]
    starts: dict[str, int]
    tables: dict[str, list[list[Block | None]]]
    """The blocks at the start of the step. A request may end or be preempted while its step is in flight."""
    orders: Any
    results: Any = None
    bad_blocks: set[int] = field(default_factory=set)
    done: Any = None


class Faults:
    """A copier with faults.

    Args:
        copier: the real one.
        seed: seed of the faults.
        slow_s: gathers take up to this much longer, and scatters up to a tenth of it.
        failing: share of copies that fail.
        is_open: whether copies need not wait for the gate.
    """

    def __init__(self, copier: Any, seed: int, *, slow_s: float, failing: float, is_open: bool) -> None:
        self.copier = copier
        self.revoke = copier.revoke
        self.done = copier.done
        self._draw = random.Random(seed)
        self._lock = threading.Lock()
        self.slow_s, self.failing = slow_s, failing
        self.gate = threading.Event()
        """Copies wait until it is set."""
        if is_open:
            self.gate.set()

    def gather(self, request: Any, group: int, blocks: Any, payload: Any) -> Any:
        self._delay(self.slow_s)
        return self.copier.gather(request, group, blocks, payload)

    def scatter(self, request: Any, group: int, blocks: Any, payload: Any) -> Any:
        self._delay(self.slow_s / 10)
        return self.copier.scatter(request, group, blocks, payload)

    def _delay(self, most_s: float) -> None:
        assert self.gate.wait(GATE_S), "the gate was never opened"
        with self._lock:
            wait_s, luck = self._draw.random() * most_s, self._draw.random()
        time.sleep(wait_s)
        if luck < self.failing:
            raise OSError("an accident")


class LieError(AssertionError):
    """A block that vLLM believes to be filled has other bytes."""


class Memory:
    """The engine's KV, in which each page has a number that identifies its content."""

    def __init__(self, tensors: dict[str, torch.Tensor], blocks: int) -> None:
        self._tensors = tensors
        self._blocks = blocks
        self._pages: dict[tuple[str, int], npt.NDArray[np.int64]] = {}

    def write(self, table: Any, number: int, block: Block, tokens: list[int]) -> None:
        content = number_of(tokens)
        for layer in table.layers:
            self._page(layer, block)[:] = content ^ place_of(number, layer)

    def look(self, request: Request, table: Any, number: int, block: Block, truth: list[int]) -> None:
        content = number_of(truth[: (number + 1) * table.block_tokens])
        for layer in table.layers:
            if (self._page(layer, block) != content ^ place_of(number, layer)).any():
                raise LieError(f"{request.request_id}: block {number} ({block.block_id}) of {layer} is not its own")

    def _page(self, layer: str, block: Block) -> npt.NDArray[np.int64]:
        key = layer, block.block_id
        if key not in self._pages:
            page = self._tensors[layer].unflatten(0, (self._blocks, -1))[block.block_id]
            assert page.is_contiguous()
            self._pages[key] = page.view(-1).view(torch.int64).numpy()
        return self._pages[key]


def number_of(tokens: Sequence[int], *place: object) -> int:
    """Return a number that differs for other tokens or another place."""
    found = hashlib.blake2b(array("I", tokens).tobytes(), digest_size=7, key=repr(place).encode())
    return int.from_bytes(found.digest(), "little") + 1


@cache
def place_of(number: int, layer: str) -> int:
    """Return what makes the number of the same tokens differ from page to page."""
    return number_of((), number, layer)
