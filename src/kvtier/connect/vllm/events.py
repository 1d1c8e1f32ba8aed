"""KV events: which of vLLM's blocks routers can find in kvtier's tiers (`--kv-events-config`).

The session's transfers show which chunks enter and leave each place. Requests map chunks to vLLM's block hashes. An
eviction from a shared directory by another server is not visible here, so ``STORAGE`` is only a hint.
"""

import logging
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kvtier.connect.vllm.vllm_types import Request
from kvtier.runtime.executor import Completion, Work
from kvtier.types import ChunkKey, Drop, Link, Outcome, Prefix, Transfer

logger = logging.getLogger(__name__)

CPU, STORAGE = "CPU", "STORAGE"
"""Media as vLLM names them (`vllm.distributed.kv_events`)."""

CHUNKS_MAX = 16_384
"""Chunks whose blocks are remembered, and movements that wait for the next step. Beyond it the oldest are dropped."""


class Moved(NamedTuple):
    """A chunk entered or left a place."""

    key: ChunkKey
    medium: str
    is_there: bool


class ChunkBlocks(NamedTuple):
    """Blocks of one chunk in vLLM."""

    hashes: tuple[Any, ...]
    parent: Any
    """Hash of the block before the first; None at the start."""
    tokens: "array[int]"
    """Tokens of the chunk. Routers compute hashes of their own from them."""
    adapter: str | None


class Movements:
    """Movements of one group's chunks. An `Observer`; `take` is for any thread.

    Args:
        group: number of a group whose objects are whole chunks.
    """

    def __init__(self, group: int) -> None:
        self._group = group
        self._slots: dict[int, ChunkKey] = {}
        self._moved: deque[Moved] = deque()
        self._has_dropped = False

    def submitted(self, command: Work) -> None:
        """Note the eviction of a slot's former object."""
        if (
            isinstance(command, Transfer)
            and command.link in (Link.GATHER, Link.PROMOTE)
            and command.group == self._group
        ):
            evicted = self._slots.pop(command.slot, None)
            if evicted is not None:
                self._note(evicted, CPU, is_there=False)

    def completed(self, completion: Completion) -> None:
        """Note a completed transfer or drop."""
        command = completion.command
        if completion.outcome is not Outcome.DONE:
            return
        if isinstance(command, Drop):
            if command.group == self._group:
                self._note(command.key, STORAGE, is_there=False)
        elif isinstance(command, Transfer) and command.group == self._group:
            if command.link in (Link.GATHER, Link.PROMOTE):
                self._slots[command.slot] = command.key
                self._note(command.key, CPU, is_there=True)
            elif command.link is Link.DEMOTE:
                self._note(command.key, STORAGE, is_there=True)

    def take(self) -> list[Moved]:
        """Movements since the last call. Any thread."""
        return [self._moved.popleft() for _ in range(len(self._moved))]

    @property
    def has_news(self) -> bool:
        """Whether `take` would return anything."""
        return bool(self._moved)

    def _note(self, key: ChunkKey, medium: str, *, is_there: bool) -> None:
        if len(self._moved) >= CHUNKS_MAX:
            self._moved.popleft()
            if not self._has_dropped:
                self._has_dropped = True
                logger.warning("over %d KV events wait for a step; the oldest are dropped (logged once)", CHUNKS_MAX)
        self._moved.append(Moved(key, medium, is_there))


class Events:
    """Turns movements of chunks into events about vLLM's blocks. Used by the scheduler's thread only.

    Args:
        movements: movements of the group that the events are about.
        hash_tokens: tokens per block hash of vLLM.
        table: number of the vLLM group.
        stored: makes a `BlockStored`.
        removed: makes a `BlockRemoved`.
        external: converts a block hash to the form that routers use.
    """

    def __init__(
        self,
        movements: Movements,
        *,
        hash_tokens: int,
        table: int,
        stored: Callable[..., Any],
        removed: Callable[..., Any],
        external: Callable[[Any], Any],
    ) -> None:
        self._movements = movements
        self._hash_tokens = hash_tokens
        self._table = table
        self._stored = stored
        self._removed = removed
        self._external = external
        self._known: OrderedDict[ChunkKey, ChunkBlocks] = OrderedDict()
        self._has_dropped = False

    def learn(self, request: Request, prefix: Prefix, first: int = 0) -> None:
        """Remember the blocks of a request's chunks, from number `first` on, before they move."""
        per_chunk = prefix.chunk_tokens // self._hash_tokens
        hashes: Sequence[Any] = request.block_hashes
        adapter = request.lora_request.name if request.lora_request is not None else None
        for chunk in range(first, min(len(prefix.keys), len(hashes) // per_chunk)):
            start, stop = chunk * per_chunk, (chunk + 1) * per_chunk
            tokens = request.all_token_ids[chunk * prefix.chunk_tokens : (chunk + 1) * prefix.chunk_tokens]
            parent = self._external(hashes[start - 1]) if start else None
            named = tuple(self._external(each) for each in hashes[start:stop])
            self._known[prefix.keys[chunk]] = ChunkBlocks(named, parent, array("I", tokens), adapter)
            self._known.move_to_end(prefix.keys[chunk])
        if len(self._known) > CHUNKS_MAX and not self._has_dropped:
            self._has_dropped = True
            logger.warning(
                "KV events cover the last %d chunks; events of older chunks reach no router (logged once)", CHUNKS_MAX
            )
        while len(self._known) > CHUNKS_MAX:
            self._known.popitem(last=False)

    def take(self) -> list[Any]:
        """Events since the last call, of vLLM's classes."""
        return [
            self._event(moved, blocks)
            for moved in self._movements.take()
            if (blocks := self._known.get(moved.key)) is not None
        ]

    @property
    def has_news(self) -> bool:
        """Whether `take` may return anything."""
        return self._movements.has_news

    def _event(self, moved: Moved, blocks: ChunkBlocks) -> Any:  # noqa: ANN401 - vLLM's class
        hashes = list(blocks.hashes)
        if not moved.is_there:
            return self._removed(block_hashes=hashes, medium=moved.medium, group_idx=self._table)
        return self._stored(
            block_hashes=hashes,
            parent_block_hash=blocks.parent,
            token_ids=list(blocks.tokens),
            block_size=self._hash_tokens,
            lora_id=None,
            medium=moved.medium,
            lora_name=blocks.adapter,
            group_idx=self._table,
        )
