"""KV events: tells routers which of vLLM's blocks can be had from our tiers (`--kv-events-config`).

The session's transfers say what came to which place and what left host memory; requests say which of vLLM's blocks a
chunk is. What a shared directory evicts is not known here, so a router takes ``STORAGE`` for a hint, as we do.
"""

import logging
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kvtier.connect.vllm.vllm_types import Request
from kvtier.runtime.jobs import Completion, Work
from kvtier.types import ChunkKey, Drop, Link, Outcome, Prefix, Transfer

logger = logging.getLogger(__name__)

CPU, STORAGE = "CPU", "STORAGE"
"""Where KV is, in vLLM's words (`vllm.distributed.kv_events`)."""

CHUNKS_MAX = 16_384
"""Chunks whose blocks are remembered, and movements that wait for the next step; beyond it the oldest are forgotten."""


class Moved(NamedTuple):
    """A chunk came to a place, or left it."""

    key: ChunkKey
    medium: str
    is_there: bool


class Blocks(NamedTuple):
    """What vLLM calls one chunk."""

    hashes: tuple[Any, ...]
    parent: Any
    tokens: "array[int]"
    """Of the chunk; what routers compute their own hashes from."""
    adapter: str | None


class Movements:
    """Watches one group's transfers. An `Observer`, in the session's thread, but for `take`.

    Args:
        group: number of the group, one whose objects are whole chunks.
    """

    def __init__(self, group: int) -> None:
        self._group = group
        self._slots: dict[int, ChunkKey] = {}
        self._moved: deque[Moved] = deque()
        self._has_forgotten = False

    def submitted(self, command: Work) -> None:
        """A slot that is given to another object has lost the one before."""
        if isinstance(command, Transfer) and command.link in (Link.GATHER, Link.PROMOTE):
            self._leave(command)

    def completed(self, completion: Completion) -> None:
        """See `Observer`."""
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
        """What has moved since the last call. Any thread."""
        return [self._moved.popleft() for _ in range(len(self._moved))]

    @property
    def has_news(self) -> bool:
        """Whether something has moved."""
        return bool(self._moved)

    def _leave(self, command: Transfer) -> None:
        before = self._slots.pop(command.slot, None) if command.group == self._group else None
        if before is not None:
            self._note(before, CPU, is_there=False)

    def _note(self, key: ChunkKey, medium: str, *, is_there: bool) -> None:
        if len(self._moved) >= CHUNKS_MAX:
            self._moved.popleft()
            if not self._has_forgotten:
                self._has_forgotten = True
                logger.warning("%d KV events wait for a step; the oldest are dropped and reach no router", CHUNKS_MAX)
        self._moved.append(Moved(key, medium, is_there))


class Events:
    """Turns movements of chunks into events about vLLM's blocks. Belongs to the scheduler's thread.

    Args:
        movements: what has moved.
        hash_tokens: tokens of a block that has a hash of vLLM's.
        table: number of the vLLM group that the events are about.
        stored: makes a `BlockStored`.
        removed: makes a `BlockRemoved`.
        external: a hash of vLLM's as routers know it.
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
        self._known: OrderedDict[ChunkKey, Blocks] = OrderedDict()
        self._has_forgotten = False

    def learn(self, request: Request, prefix: Prefix, first: int = 0) -> None:
        """The chunks of a request from number `first` on may soon move."""
        per_chunk = prefix.chunk_tokens // self._hash_tokens
        hashes: Sequence[Any] = request.block_hashes
        adapter = request.lora_request.name if request.lora_request is not None else None
        for chunk in range(first, min(len(prefix.keys), len(hashes) // per_chunk)):
            start, stop = chunk * per_chunk, (chunk + 1) * per_chunk
            tokens = request.all_token_ids[chunk * prefix.chunk_tokens : (chunk + 1) * prefix.chunk_tokens]
            parent = self._external(hashes[start - 1]) if start else None
            named = tuple(self._external(each) for each in hashes[start:stop])
            self._known[prefix.keys[chunk]] = Blocks(named, parent, array("I", tokens), adapter)
            self._known.move_to_end(prefix.keys[chunk])
        if len(self._known) > CHUNKS_MAX and not self._has_forgotten:
            self._has_forgotten = True
            logger.warning("the blocks of %d chunks are remembered; events of older ones reach no router", CHUNKS_MAX)
        while len(self._known) > CHUNKS_MAX:
            self._known.popitem(last=False)

    def take(self) -> list[Any]:
        """The events since the last call, as vLLM's."""
        found: list[Any] = []
        for moved in self._movements.take():
            blocks = self._known.get(moved.key)
            if blocks is not None:
                found.append(self._event(moved, blocks))
        return found

    @property
    def has_news(self) -> bool:
        """Whether there are events that no step has published."""
        return self._movements.has_news

    def _event(self, moved: Moved, blocks: Blocks) -> Any:  # noqa: ANN401 - vLLM's class
        hashes = list(blocks.hashes)
        if not moved.is_there:
            return self._removed(block_hashes=hashes, medium=moved.medium, group_idx=self._table, ownership="kvtier")
        return self._stored(
            block_hashes=hashes,
            parent_block_hash=blocks.parent,
            token_ids=list(blocks.tokens),
            block_size=self._hash_tokens,
            lora_id=None,
            medium=moved.medium,
            lora_name=blocks.adapter,
            group_idx=self._table,
            ownership="kvtier",
        )
