"""Reads the KV events that vLLM and SGLang publish for routers, and infers requests from them.

The file is a sequence of batches: msgpack as published over ZMQ, or JSON lines. A batch is ``[time, events, rank]`` or
an object with `ts` and `events`. An event is ``[type, fields...]`` or an object with `type`.

Events name the blocks that an engine *stored*, each with its hash and its parent. A request is inferred from the
blocks that it added. Its prompt is the chain up to the last of these blocks. Later blocks that continue the chain
belong to the request: several together within `PROMPT_S` are prompt, and single ones within `OUTPUT_S` are output.

The events do not show requests whose whole prompt was cached, unless the engine reports reuse (vLLM's
``kv_cache_report_mode: full``). Nor do they show tokens after the last whole block, a next turn that follows within
these times, or which of two requests with the same prompt continued. SGLang stores a complete output at once, which
looks like a prompt.
"""

import json
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import numpy as np

from kvtier.errors import ConfigError, install_hint
from kvtier.tools.trace.formats.base import REQUEST_BLOCKS_MAX, TraceReader, TraceRequest, TraceWarning, merge_blocks
from kvtier.tools.trace.trace_files import (
    LineErrors,
    is_msgpack,
    number,
    open_binary,
    short,
    text_lines,
    whole,
)

PROMPT_S: Final = 2.0
"""Longest pause between two parts of a prompt."""
OUTPUT_S: Final = 10.0
"""Longest pause between two blocks of an output."""
SECONDS_MAX: Final = 1e11
"""Largest time in seconds since 1970. Larger times have another unit."""
BATCH_BYTES_MAX: Final = 1 << 24
"""Largest batch. In memory it takes up to 64 times as many bytes, 1 GiB."""
_ITEMS_MAX: Final = 1 << 20
"""Maximum number of items in one array or map. The limit exists because msgpack allocates the announced length."""
_BLOCK_STORED_FIELDS: Final = (
    *("type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
)
"""Order of the fields in an event that is an array. Both engines use the same order."""
_HISTORY: Final = (None, "full_attention", "mla_attention", "sink_full_attention")
"""Kinds of KV groups that keep all blocks of a prompt."""
_CONVENTION: Final = (
    "KV events: fully cached prompts are missing, lengths are whole blocks, and generated tokens count as output"
)

Tip = tuple[object, int]
"""The rank and the last block of a chain."""


class _StoredBlocks(NamedTuple):
    """A `BlockStored` event for GPU memory."""

    batch: int
    time_s: float
    rank: object
    hashes: list[object]
    parent: object
    block_tokens: int
    group: object
    session: str | None


@dataclass(slots=True, eq=False)
class _OpenRequest:
    """A request that later events may continue."""

    first: _StoredBlocks
    latest: _StoredBlocks
    prompt_end: int
    """Last block of the request's prompt."""
    tip: Tip
    output_blocks: int = 0

    def is_output(self, stored: _StoredBlocks) -> bool:
        """Return whether blocks that continue this request are output."""
        return len(stored.hashes) == 1 and stored.batch != self.latest.batch

    def is_continued_by(self, stored: _StoredBlocks) -> bool:
        """Return whether blocks stored after the request's last block belong to the request.

        A prompt does not grow after the first output.
        """
        pause_s = stored.time_s - self.latest.time_s
        return pause_s <= OUTPUT_S if self.is_output(stored) else pause_s <= PROMPT_S and not self.output_blocks


class KvEvents(TraceReader):
    """Reads a file of KV events.

    Args:
        path: the file.
        block_tokens: number of tokens per block, a multiple of the engine's; None means the engine's.

    Raises:
        ConfigError: the file cannot be read, a batch is malformed, nothing was stored, or `block_tokens` does not fit.
    """

    def __init__(self, path: Path, block_tokens: int | None = None) -> None:
        super().__init__(path)
        self._cleared = 0
        first = next(self._stored(), None)
        if first is None:
            raise ConfigError(f"trace {path}: no BlockStored event of GPU memory; allowed: at least one")
        self._own_tokens, self._group = first.block_tokens, first.group
        self._set_block_tokens(self._own_tokens, block_tokens)
        self.notes = (_CONVENTION,)

    def requests(self) -> Iterator[TraceRequest]:
        """Yield the requests in the order of their first events. Times count from the first request."""
        unknown = self._cleared = 0
        chains = _Chains()
        waiting: deque[_OpenRequest] = deque()
        tips: dict[Tip, list[_OpenRequest]] = {}
        began_s: float | None = None
        for stored in self._stored():
            if stored.group != self._group or stored.block_tokens != self._own_tokens or not stored.hashes:
                continue
            began_s = stored.time_s if began_s is None else began_s
            while waiting and stored.time_s - waiting[0].latest.time_s > OUTPUT_S:
                _remove(tips, waiting[0])
                yield self._closed(waiting.popleft(), chains, began_s)
            parent = chains.find(stored.parent)
            here = [] if parent is None else tips.get((stored.rank, parent), [])
            new = chains.extend(parent, stored.hashes)
            tip = (stored.rank, new[-1])
            if here and here[-1].is_continued_by(stored):
                request = here[-1]
                _remove(tips, request)
                if request.is_output(stored):
                    request.output_blocks += len(new)
                else:
                    request.prompt_end = new[-1]
                request.latest, request.tip = stored, tip
            else:
                unknown += parent is None and stored.parent is not None
                request = _OpenRequest(stored, stored, new[-1], tip)
                waiting.append(request)
            tips.setdefault(tip, []).append(request)
        yield from (self._closed(each, chains, began_s or 0.0) for each in waiting)
        self.notes = (_CONVENTION,)
        if self._cleared:
            self.notes += (f"the engine's cache was cleared {self._cleared} times, which is not replayed",)
        if unknown:
            text = (
                f"{unknown} requests follow blocks stored before the start of the file; the requests lack these blocks"
            )
            self.notes += (TraceWarning(text),)

    def _closed(self, done: _OpenRequest, chains: "_Chains", began_s: float) -> TraceRequest:
        path = chains.path(done.prompt_end)
        if len(path) > REQUEST_BLOCKS_MAX:
            raise ConfigError(
                f"trace {self.path}, batch {done.first.batch}: a request has too many blocks; allowed: at "
                f"most {REQUEST_BLOCKS_MAX}"
            )
        return TraceRequest(
            done.first.time_s - began_s,
            len(path) * self._own_tokens,
            done.output_blocks * self._own_tokens,
            merge_blocks(np.asarray(path, np.int64), self._factor),
            done.first.session,
            done.first.batch,
        )

    def _stored(self) -> Iterator[_StoredBlocks]:
        for batch_number, batch in _batches(self.path):
            with LineErrors(self.path, batch_number, "batch"):
                time_s, events, rank = _batch_fields(batch)
                found = [it for event in events if (it := self._read(event, batch_number, time_s, rank)) is not None]
            yield from found

    def _read(self, event: object, batch: int, time_s: float, rank: object) -> _StoredBlocks | None:
        fields = _fields(event, _BLOCK_STORED_FIELDS)
        kind = fields.get("type")
        if not isinstance(kind, str):
            raise ConfigError(f"{short(event)} is not an event; allowed: [kind, fields], or an object with type")
        self._cleared += kind == "AllBlocksCleared"
        is_gpu = str(fields.get("medium") or "GPU").upper() == "GPU"
        if kind != "BlockStored" or not is_gpu or fields.get("kv_cache_spec_kind") not in _HISTORY:
            return None
        hashes, parent, session = (fields.get(it) for it in ("block_hashes", "parent_block_hash", "session_id"))
        if not isinstance(hashes, list):
            raise ConfigError(f"block_hashes of a BlockStored is {short(hashes)}; allowed: a list")
        for name in (parent, *cast("list[object]", hashes)):
            if not isinstance(name, int | str | bytes | None):
                raise ConfigError(f"block hash {short(name)}; allowed: whole numbers, bytes or strings")
        return _StoredBlocks(
            batch,
            time_s,
            rank,
            cast("list[object]", hashes),
            parent,
            whole(fields, "block_size", least=1),
            fields.get("group_idx"),
            None if session is None else str(session),
        )


def _remove(tips: dict[Tip, list[_OpenRequest]], request: _OpenRequest) -> None:
    here = tips[request.tip]
    here.remove(request)
    if not here:
        del tips[request.tip]


class _Chains:
    """Blocks by number, with their parents. A hash that does not cover the prefix gets a block for each parent."""

    def __init__(self) -> None:
        self._latest: dict[object, int] = {}
        self._blocks: dict[tuple[int, object], int] = {}
        self._parents: list[int] = []

    def find(self, name: object) -> int | None:
        """Return the latest block with the hash `name`, if any."""
        return None if name is None else self._latest.get(name)

    def extend(self, parent: int | None, names: list[object]) -> list[int]:
        """Return the numbers of the blocks with the hashes `names`, which follow `parent`. Add blocks that are new."""
        before = -1 if parent is None else parent
        out: list[int] = []
        for name in names:
            block = self._blocks.setdefault((before, name), len(self._parents))
            if block == len(self._parents):
                self._parents.append(before)
            self._latest[name] = before = block
            out.append(block)
        return out

    def path(self, block: int) -> list[int]:
        """Return the chain up to `block`, but at most one block more than `REQUEST_BLOCKS_MAX`."""
        out: list[int] = []
        while block >= 0 and len(out) <= REQUEST_BLOCKS_MAX:
            out.append(block)
            block = self._parents[block]
        return out[::-1]


def _batches(path: Path) -> Iterator[tuple[int, object]]:
    """Yield batches with their numbers from 1. In JSON, the numbers are line numbers."""
    if not is_msgpack(path):
        for line_number, text in text_lines(path):
            with LineErrors(path, line_number, "batch"):
                batch: object = json.loads(text)
            yield line_number, batch
        return
    try:
        import msgpack as package  # noqa: PLC0415  an optional package
    except ImportError:
        raise ConfigError(
            f"trace {path} is msgpack, but msgpack is not installed: {install_hint('events')}, or use a JSON trace"
        ) from None
    msgpack: Any = package
    count = 0
    try:
        with open_binary(path) as stream:
            unpacker: Any = msgpack.Unpacker(
                stream,
                raw=False,
                strict_map_key=False,
                max_buffer_size=BATCH_BYTES_MAX,
                max_array_len=_ITEMS_MAX,
                max_map_len=_ITEMS_MAX,
            )
            for count, each in enumerate(unpacker, 1):
                yield count, cast("object", each)
            if unpacker.tell() != stream.tell():
                raise ConfigError(f"trace {path} is cut short after batch {count}")
    except (ValueError, TypeError, OSError, MemoryError, msgpack.exceptions.UnpackException) as error:
        text = str(error) or type(error).__name__
        raise ConfigError(
            f"trace {path}, after batch {count}: not msgpack: {text}; allowed: batches of at most {BATCH_BYTES_MAX} "
            f"bytes, arrays of at most {_ITEMS_MAX}"
        ) from error


def _batch_fields(batch: object) -> tuple[float, list[object], object]:
    fields = _fields(batch, ("ts", "events", "data_parallel_rank"))
    if "events" not in fields:
        raise ConfigError(f"{short(batch)} is not a batch; allowed: [time, events, rank], or ts and events")
    events, rank = fields["events"], fields.get("data_parallel_rank")
    if not isinstance(events, list):
        raise ConfigError(f"events is {short(events)}; allowed: a list")
    time_s = number(fields, "ts")
    if time_s > SECONDS_MAX:
        raise ConfigError(f"ts is {time_s:g}; allowed: seconds, as engines write them, not milliseconds")
    if not isinstance(rank, int | str | None):
        raise ConfigError(f"data_parallel_rank is {short(rank)}; allowed: a whole number")
    return time_s, cast("list[object]", events), rank


def _fields(value: object, names: Sequence[str]) -> dict[str, Any]:
    """Return the fields of an object, or of an array in the order of `names`; empty for anything else."""
    if isinstance(value, list):
        return dict(zip(names, cast("list[object]", value), strict=False))
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}
