"""KV events: which of vLLM's blocks routers can find in kvtier's tiers (`--kv-events-config`).

The session's transfers show which chunks enter and leave each place. Requests map chunks to vLLM's block hashes. An
eviction from a shared directory by another server is not visible here, so ``STORAGE`` is only a hint.
"""

from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from kvtier.connect.vllm.vllm_types import Request
from kvtier.runtime.executor import Completion, Work
from kvtier.types import ChunkKey, Direction, Drop, Outcome, Prefix, Transfer

CPU, STORAGE = "CPU", "STORAGE"
"""Media as vLLM names them (`vllm.distributed.kv_events`)."""

CHUNKS_MAX = 16_384
"""Chunks whose blocks are remembered, and movements that wait for the next step. Beyond it the oldest are dropped."""


class ChunkBlocks(NamedTuple):
    """Blocks of one chunk in vLLM."""

    hashes: Sequence[Any]
    parent: Any
    """Hash of the block before the first; None at the start."""
    tokens: "array[int]"
    """Tokens of the chunk. Routers compute hashes of their own from them."""
    adapter: str | None


class BlockEvent(NamedTuple):
    """A chunk's blocks entered or left a place."""

    blocks: ChunkBlocks
    table: int
    """Number of the vLLM group."""
    medium: str
    is_there: bool


class Events:
    """Events of one group. An `Observer`, whose two methods any thread may call; the scheduler's thread the others.

    Args:
        group: number of a group whose objects are whole chunks.
        table: number of its vLLM group.
        hash_tokens: tokens per block hash of vLLM.
    """

    def __init__(self, group: int, table: int, hash_tokens: int) -> None:
        self._group = group
        self._table = table
        self._hash_tokens = hash_tokens
        self._slots: dict[int, ChunkKey] = {}
        self._moved: deque[tuple[ChunkKey, str, bool]] = deque(maxlen=CHUNKS_MAX)
        self._known: OrderedDict[ChunkKey, ChunkBlocks] = OrderedDict()

    def submitted(self, command: Work) -> None:
        """Note the eviction of a slot's former object."""
        if (
            isinstance(command, Transfer)
            and command.direction in (Direction.GATHER, Direction.PROMOTE)
            and command.group == self._group
        ):
            evicted = self._slots.pop(command.slot, None)
            if evicted is not None:
                self._moved.append((evicted, CPU, False))

    def completed(self, completion: Completion) -> None:
        """Note a completed transfer or drop."""
        command = completion.command
        if completion.outcome is not Outcome.DONE or not isinstance(command, Drop | Transfer):
            return
        if command.group != self._group:
            return
        if isinstance(command, Drop):
            self._moved.append((command.key, STORAGE, False))
        elif command.direction in (Direction.GATHER, Direction.PROMOTE):
            self._slots[command.slot] = command.key
            self._moved.append((command.key, CPU, True))
        elif command.direction is Direction.DEMOTE:
            self._moved.append((command.key, STORAGE, True))

    def learn(self, request: Request, prefix: Prefix, first: int = 0) -> None:
        """Remember the blocks of a request's chunks, from number `first` on, before they move."""
        per_chunk = prefix.chunk_tokens // self._hash_tokens
        hashes: Sequence[Any] = request.block_hashes
        adapter = request.lora_request.name if request.lora_request is not None else None
        for chunk in range(first, min(len(prefix.keys), len(hashes) // per_chunk)):
            start, stop = chunk * per_chunk, (chunk + 1) * per_chunk
            tokens = request.all_token_ids[chunk * prefix.chunk_tokens : (chunk + 1) * prefix.chunk_tokens]
            parent = hashes[start - 1] if start else None
            self._known[prefix.keys[chunk]] = ChunkBlocks(hashes[start:stop], parent, array("I", tokens), adapter)
            self._known.move_to_end(prefix.keys[chunk])
        while len(self._known) > CHUNKS_MAX:
            self._known.popitem(last=False)

    def take(self) -> list[BlockEvent]:
        """Events since the last call."""
        moved = [self._moved.popleft() for _ in range(len(self._moved))]
        return [
            BlockEvent(self._known[key], self._table, medium, is_there)
            for key, medium, is_there in moved
            if key in self._known
        ]

    @property
    def has_news(self) -> bool:
        """Whether `take` may return anything."""
        return bool(self._moved)
