"""Publishes KV events, so that routers learn which vLLM blocks are in kvtier's tiers (`--kv-events-config`).

The session's transfers and probes show which chunks enter and leave each place. Requests map chunks to vLLM's block
hashes. A tier evicts by itself, and other engines evict from a shared tier. So health checks ask the tiers whether
published chunks are still there. `docs/internals/routing.md` says what routers read from an event.

With the setting `events.token_ids`, sealed objects contain the tokens of their chunk and everything else that enters
its blocks' hashes. After a start, these are recalled (read back) from a tier's newest objects. The chunks are published
under the hashes that vLLM would compute.
"""

import json
import logging
import math
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from kvtier.codec.frame_header import EXTRAS_BYTES_MAX
from kvtier.connect.vllm.vllm_types import Request
from kvtier.core.host_residency import HOST
from kvtier.runtime.executor import Completion, Work
from kvtier.runtime.observers.guards import Observer
from kvtier.types import ChunkKey, ChunkRecord, Direction, Drop, Outcome, Prefix, Probe, Transfer

logger = logging.getLogger(__name__)

CPU, STORAGE = "CPU", "STORAGE"
"""Media as vLLM names them (`vllm.distributed.kv_events`, 0.32)."""

CHUNKS_MAX = 16_384
"""Maximum number of chunks in the table. Beyond this many, the least recently used one is withdrawn."""

MOVES_MAX = 65_536
"""Maximum number of movements that wait for the next step. Beyond that, the oldest are dropped, and the table is
compared with host memory."""

REPEATED_MAX = 64
"""Maximum number of chunks repeated in one step."""

RECALLED_MAX = 64
"""Maximum number of recalled chunks whose hashes are computed in one step."""

RECORDS_MAX = 16_384
"""Maximum number of recalled chunks that wait. Further ones are dropped."""

CHECKED, CHECKED_REMOTE = 256, 16
"""Chunks per health check of a local tier, and of a tier where each name may cost a request."""

REMOTE_CHECK_S = 10.0
"""Seconds between health checks that look for chunks in a remote tier."""

EXTRAS_DEPTH_MAX = 8
"""Greatest nesting depth of lists and tables in a chunk's extras. In vLLM 0.32 it is 6."""

Extras = tuple[Any, ...] | None
"""Everything except tokens that enters a block's hash, in vLLM's tagged form."""


def is_plain(value: object, depth: int = EXTRAS_DEPTH_MAX) -> bool:
    """Return whether vLLM can hash and publish `value`. One bad value would lose all events of a step.

    A request's extras come from its client. Those in a sealed object may come from any engine of the tenant.
    """
    if isinstance(value, str):
        # A lone surrogate cannot be encoded as UTF-8.
        return value.isascii() or not any("\ud800" <= each <= "\udfff" for each in value)
    if isinstance(value, int):
        return -(1 << 63) <= value < 1 << 64
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict):
        value = list(cast("dict[object, object]", value).items())
    if isinstance(value, list | tuple):
        return depth > 0 and all(is_plain(it, depth - 1) for it in cast("list[object]", value))
    return value is None or isinstance(value, bytes)


class Source(NamedTuple):
    """How the chunks of one tier are published."""

    medium: str
    is_remote: bool


class ChunkBlocks(NamedTuple):
    """The vLLM blocks of one chunk."""

    hashes: Sequence[Any]
    parent: Any
    """Hash of the block before the first, or None at the start of the prompt."""
    tokens: "array[int]"
    """Tokens of the chunk. Routers compute their own hashes from them."""
    extras: Sequence[Extras]
    """The extras of each block."""
    adapter: tuple[int | None, str] | None
    """The adapter's number in this engine, if it has been used here, and its name."""
    number: int
    """Number of the chunk in its prompt."""


class BlockEvent(NamedTuple):
    """Blocks of a chunk that entered or left a medium."""

    blocks: ChunkBlocks
    medium: str
    is_there: bool


@dataclass(slots=True, eq=False)
class _Chunk:
    blocks: ChunkBlocks | None = None
    """None until a request with this chunk arrives, or the chunk is recalled. Nothing is published before that."""
    places: set[str] = field(default_factory=set[str])
    """Host memory and tiers that have the chunk."""


class Events(Observer):
    """The events of one group. This class also implements `ChunkTexts`, whose methods any thread may call.

    Args:
        group: number of a group whose objects are whole chunks.
        block_tokens: tokens per block of its vLLM group.
        hash_tokens: tokens per block hash of vLLM, a divisor of `block_tokens`.
        tiers: the tiers that are published.
        extras_of: returns what enters the hash of a block besides its tokens. It gets the request, the block's first
            token and the token after its last.
        hash_of: returns vLLM's hash of a block from its parent's hash (None without one), its tokens and its extras.
        repeat_s: seconds after which everything is published again, for routers that started later; 0 for never.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        group: int,
        block_tokens: int,
        hash_tokens: int,
        *,
        tiers: Mapping[str, Source],
        extras_of: Callable[[Request, int, int], Extras],
        hash_of: Callable[[Any, tuple[int, ...], Extras], Any],
        repeat_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.text_group = group
        self._group = group
        self._block_tokens = block_tokens
        self._step = block_tokens // hash_tokens
        self._tiers = {HOST: Source(CPU, is_remote=False), **tiers}
        self._extras_of = extras_of
        self._hash_of = hash_of
        self._repeat_s = repeat_s or float("inf")
        self._clock = clock
        self._slots: dict[int, ChunkKey] = {}
        self._moved: deque[tuple[ChunkKey, str, bool]] = deque(maxlen=MOVES_MAX)
        self._chunks: OrderedDict[ChunkKey, _Chunk] = OrderedDict()
        """The table, in order of use. Other threads may look up a key at any time, so no key is removed and inserted
        again."""
        self._listed: tuple[ChunkKey, ...] = ()
        """The keys of the table, as a separate tuple, because other threads must not iterate over the table."""
        self._has_changed = False
        """Whether keys have come or gone since `_listed` was made."""
        self._recalled: deque[tuple[ChunkRecord, str]] = deque()
        self._has_skipped = False
        """Whether a recalled chunk was left out because of its extras."""
        self._has_cleared = False
        """Whether keys have changed since the start. Tokens alone then do not decide whether a request finds a
        chunk."""
        self._events: list[BlockEvent] = []
        self._repeats: list[ChunkKey] = []
        """Chunks still to be repeated, in reverse order."""
        self._repeat_at_s = clock() + self._repeat_s
        self._checked: dict[str, tuple[int, float]] = {}
        """Position of each tier's next health check in the list, and its earliest time."""

    # ---- any thread ------------------------------------------------------------------------------------------------

    def submitted(self, command: Work) -> None:
        """Record the eviction of the object that the slot had before."""
        if (
            isinstance(command, Transfer)
            and command.direction in (Direction.GATHER, Direction.PROMOTE)
            and command.group == self._group
            and (evicted := self._slots.pop(command.slot, None)) is not None
        ):
            self._moved.append((evicted, HOST, False))

    def completed(self, completion: Completion) -> None:
        """Record a completed transfer, drop or probe."""
        command, outcome = completion.command, completion.outcome
        if isinstance(command, Probe):
            if outcome is Outcome.DONE and command.objects:
                answers = zip(command.objects, completion.present, strict=True)
                here = [(key, command.tier, is_there) for (key, group), is_there in answers if group == self._group]
                is_known = not self._moved  # else the table may be about to change
                self._moved.extend(it for it in here if not (is_known and self._is_listed(it[0], it[1]) is it[2]))
        elif not isinstance(command, Drop | Transfer) or command.group != self._group:
            return
        elif isinstance(command, Drop) or outcome in (Outcome.ABSENT, Outcome.CORRUPT):
            self._moved.append((command.key, command.tier, False))
        elif outcome is not Outcome.DONE:
            return
        elif command.direction is Direction.GATHER or (
            # No request finds what is in the staging area, or what arrived after its deadline.
            command.direction is Direction.PROMOTE and not command.is_relay and self._clock() < command.deadline_s
        ):
            self._slots[command.slot] = command.key
            self._moved.append((command.key, HOST, True))
        elif command.direction is Direction.DEMOTE:
            self._moved.append((command.key, command.tier, True))

    def renewed(self) -> None:
        """Record that host memory is empty."""
        self._moved.extend((key, HOST, False) for key in self._slots.values())
        self._slots.clear()

    def watched(self, tier: str) -> tuple[tuple[ChunkKey, int], ...]:
        """Return published chunks that the next health check of `tier` looks for, as (key, group)."""
        source = self._tiers.get(tier)
        if source is None:
            return ()
        keys, (start, at_s) = self._listed, self._checked.get(tier, (0, 0.0))
        if self._clock() < at_s:
            return ()
        start = start if start < len(keys) else 0
        stop = start + (CHECKED_REMOTE if source.is_remote else CHECKED)
        self._checked[tier] = stop, self._clock() + (REMOTE_CHECK_S if source.is_remote else 0.0)
        return tuple((key, self._group) for key in keys[start:stop] if self._is_listed(key, tier))

    def text_of(self, key: ChunkKey) -> bytes:
        """Return a chunk's token ids and extras, to be sealed in its object (`ChunkTexts`); empty if they are unknown.

        Extras are JSON: those that every block starts with, then further ones by block; empty if there are none.
        """
        chunk = self._chunks.get(key)
        # If a block has several hashes, each needs its own extras, but only those of the whole block are known.
        if chunk is None or chunk.blocks is None or self._has_cleared or self._step > 1:
            return b""
        extras = b""
        if any(chunk.blocks.extras):
            every = [each or () for each in chunk.blocks.extras]
            common = every[0][:1] if len({each[:1] for each in every}) == 1 else ()  # an adapter
            further = {number: each[len(common) :] for number, each in enumerate(every) if len(each) > len(common)}
            try:
                extras = json.dumps([common, further], separators=(",", ":")).encode()
            except TypeError:
                return b""
        return chunk.blocks.tokens.tobytes() + extras if len(extras) <= EXTRAS_BYTES_MAX else b""

    def recalled(self, records: Sequence[ChunkRecord], tier: str) -> None:
        """Receive chunks that a tier has, parents first; see `ChunkTexts`."""
        self._recalled.extend((record, tier) for record in records[: RECORDS_MAX - len(self._recalled)])

    # ---- the scheduler's thread ------------------------------------------------------------------------------------

    def learn(self, request: Request, prefix: Prefix, first: int = 0) -> None:
        """Remember the blocks of a request's chunks, from number `first` on."""
        per_chunk, size = prefix.chunk_tokens // self._block_tokens, self._block_tokens
        hashes: Sequence[Any] = request.block_hashes[self._step - 1 :: self._step]
        lora = request.lora_request
        for number in range(first, min(len(prefix.keys), len(hashes) // per_chunk)):
            chunk = self._use(prefix.keys[number], is_new=True)
            if chunk is None or chunk.blocks is not None:
                continue
            start, stop = number * per_chunk, (number + 1) * per_chunk
            extras = [self._extras_of(request, at * size, (at + 1) * size) for at in range(start, stop)]
            adapter = None if lora is None else (lora.lora_int_id, lora.lora_name)
            if not is_plain([extras, adapter]):
                continue
            chunk.blocks = ChunkBlocks(
                hashes[start:stop],
                hashes[start - 1] if start else None,
                array("I", request.all_token_ids[start * size : stop * size]),
                extras,
                adapter,
                number,
            )
            self._publish(chunk)
        for key in reversed(prefix.keys):  # a chunk is useless without its parents
            self._use(key)

    def take(self) -> list[BlockEvent]:
        """Return events since the last call, and some events that are due for repetition."""
        may_lack_moves = len(self._moved) == MOVES_MAX
        for _ in range(len(self._moved)):
            self._move(*self._moved.popleft())
        if may_lack_moves:  # including evictions from host memory, which no health check covers
            in_memory = set(self._slots.values())
            for key in [key for key in self._chunks if key not in in_memory]:
                self._move(key, HOST, is_there=False)
        for _ in range(min(RECALLED_MAX, len(self._recalled))):
            self._recall(*self._recalled.popleft())
        if self._clock() >= self._repeat_at_s and not self._repeats:  # else the last chunks would never be repeated
            self._repeat_at_s = self._clock() + self._repeat_s
            known = [(chunk.blocks.number, key) for key, chunk in self._chunks.items() if chunk.blocks and chunk.places]
            self._repeats = [key for _, key in sorted(known, reverse=True)]  # a router needs parents first
        for key in [self._repeats.pop() for _ in range(min(REPEATED_MAX, len(self._repeats)))]:
            if (chunk := self._chunks.get(key)) is not None:
                self._publish(chunk)
        if self._has_changed:
            self._listed, self._has_changed = tuple(self._chunks), False
        events, self._events = self._events, []
        return events

    def reset(self) -> None:
        """Withdraw everything, because no request finds it any more."""
        self._moved.clear()
        self._forget_texts()
        while self._chunks:
            self._forget(next(iter(self._chunks)))

    def clear(self, salt: str) -> None:
        """Withdraw all chunks of prompts with this `cache_salt`, or of prompts without one if `salt` is empty."""
        self._forget_texts()
        known = [(chunk.blocks, key) for key, chunk in self._chunks.items() if chunk.blocks is not None]
        gone: set[Any] = set()
        """Hashes of the last blocks of withdrawn chunks."""
        for blocks, key in sorted(known, key=lambda it: it[0].number):
            salts = [each[1] for each in blocks.extras[0] or () if each[0] == "cache_salt"]
            if blocks.parent in gone if blocks.number else (salts or [""]) == [salt]:
                gone.add(blocks.hashes[-1])
                self._forget(key)

    def _forget_texts(self) -> None:
        self._recalled.clear()
        self._has_cleared = True

    @property
    def has_news(self) -> bool:
        """Whether `take` may return anything."""
        is_due = bool(self._chunks) and self._clock() >= self._repeat_at_s
        return bool(self._moved or self._recalled or self._events or self._repeats or is_due)

    def _recall(self, record: ChunkRecord, tier: str) -> None:
        """Publish a recalled chunk if its parent is known.

        After keys have changed, an unknown chunk is left out, because requests may not find it.
        """
        known = self._chunks.get(record.key)
        if not self._has_cleared and (known is None or known.blocks is None):
            parent = None if record.parent is None else self._chunks.get(record.parent)
            blocks = None if record.parent is not None and parent is None else self._blocks_of(record, parent)
            chunk = None if blocks is None else self._use(record.key, is_new=True)
            if chunk is not None:
                chunk.blocks = blocks
        if record.key in self._chunks:
            self._move(record.key, tier, is_there=True)

    def _blocks_of(self, record: ChunkRecord, parent: "_Chunk | None") -> ChunkBlocks | None:
        """Return a recalled chunk's blocks, or None if its parent's hash or the form of its extras is unknown."""
        if parent is not None and parent.blocks is None:
            return None
        first = last = None if parent is None or parent.blocks is None else parent.blocks.hashes[-1]
        hashes: list[Any] = []
        try:
            tokens, size = array("I", record.tokens), self._block_tokens
            found: tuple[Any, Any] = json.loads(record.extras) if record.extras else ((), {})
            if not is_plain(found):
                raise ValueError("vLLM cannot publish them")  # noqa: TRY301 - one place leaves a record out
            common, further = found
            extras: list[Extras] = [
                tuple(map(tuple, (*common, *further.get(str(number), ())))) or None
                for number in range(len(tokens) // size)
            ]
            name = next((str(key[1]) for key in extras[0] or () if key[0] == "lora"), None)
            if any(len(key) < 2 for each in extras for key in each or ()):
                raise ValueError("a tag without a value")  # noqa: TRY301
            for number, each in enumerate(extras):
                last = self._hash_of(last, tuple(tokens[number * size : (number + 1) * size]), each)
                hashes.append(last)
        except Exception as error:  # noqa: BLE001 - another engine wrote them
            if not self._has_skipped:
                self._has_skipped = True
                logger.warning(
                    "the extra keys of a recalled chunk have an unknown form and are left out: %r (logged once)", error
                )
            return None
        return ChunkBlocks(hashes, first, tokens, extras, None if name is None else (None, name), record.depth)

    def _move(self, key: ChunkKey, place: str, is_there: bool) -> None:  # noqa: FBT001 - as it was noted
        if place not in self._tiers:
            return
        chunk = self._chunks.get(key) or (self._use(key, is_new=True) if is_there else None)
        if chunk is None:
            return
        before = self._media(chunk)
        (chunk.places.add if is_there else chunk.places.discard)(place)
        medium = self._tiers[place].medium
        if (medium in before) != (medium in self._media(chunk)) and chunk.blocks is not None:
            self._events.append(BlockEvent(chunk.blocks, medium, is_there))

    def _use(self, key: ChunkKey, *, is_new: bool = False) -> _Chunk | None:
        """Return the entry of `key` and move it to the end of the table. Add a missing entry only if `is_new`."""
        if key in self._chunks:
            self._chunks.move_to_end(key)
        elif is_new:
            if len(self._chunks) >= CHUNKS_MAX:
                self._forget(next(iter(self._chunks)))
            self._chunks[key], self._has_changed = _Chunk(), True
        return self._chunks.get(key)

    def _forget(self, key: ChunkKey) -> None:
        self._has_changed = True
        self._publish(self._chunks.pop(key), is_there=False)

    def _publish(self, chunk: _Chunk, *, is_there: bool = True) -> None:
        """Add an event for each medium that has the chunk. The chunk enters or leaves the medium."""
        if chunk.blocks is not None:
            self._events += [BlockEvent(chunk.blocks, medium, is_there) for medium in self._media(chunk)]

    def _is_listed(self, key: ChunkKey, place: str) -> bool:
        """Return whether the table has the chunk in a place. Any thread may ask."""
        chunk = self._chunks.get(key)
        return chunk is not None and place in chunk.places

    def _media(self, chunk: _Chunk) -> list[str]:
        return list(dict.fromkeys(self._tiers[place].medium for place in sorted(chunk.places)))
