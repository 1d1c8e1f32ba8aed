"""KV events of vLLM and SGLang, as they publish them for routers, read as requests.

A file of batches, one after the other: msgpack as it comes over ZMQ, or JSON lines. A batch is ``[time, events, rank]``
or an object with `ts` and `events`; an event is ``[kind, fields…]`` or an object with `type`.

What they tell is which blocks an engine has *stored*, each with its hash and the one before it. So a request is seen by
what it added: its prompt is the chain up to there. What follows the last block of a request goes on with it: several
blocks at a time within `PROMPT_S` as prompt, one at a time within `ANSWER_S` as answer. What cannot be known: a prompt
that was there already, as a whole (unless the engine reports reuse, vLLM's ``kv_cache_report_mode: full``); the tokens
behind the last whole block; a next turn that comes that soon; which of two requests with the same prompt went on.
SGLang stores an answer when it is complete, which looks like another prompt.
"""

import json
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import numpy as np

from kvtier.errors import ConfigError
from kvtier.trace.formats.base import Request, Wrong
from kvtier.trace.formats.block_ids import REQUEST_BLOCKS_MAX, merged
from kvtier.trace.formats.request_lines import larger_block
from kvtier.trace.io import Place, damage_errors, is_msgpack, number, open_binary, short, text_lines, whole

PROMPT_S: Final = 2.0
"""Between two pieces of a prompt; what is stored later is another request's."""
ANSWER_S: Final = 10.0
"""Between two blocks of an answer."""
SECONDS_MAX: Final = 1e11
"""Of a time since 1970; what is more is in another unit."""
BATCH_BYTES_MAX: Final = 1 << 24
"""A batch takes up to 64 times its bytes in memory: 1 GiB."""
_ITEMS_MAX: Final = 1 << 20
"""Of one array or map of a batch: msgpack takes memory for as many as are announced."""
_FIELDS: Final = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name")
"""Of a `BlockStored` that is written as an array: the leading ones, in the order in which both engines have them."""
_PARTS: Final = ("ts", "events", "data_parallel_rank")
_STORED, _CLEARED = "BlockStored", "AllBlocksCleared"
_HISTORY: Final = (None, "full_attention", "mla_attention", "sink_full_attention")
"""Kinds of KV groups whose blocks stay: the others' do not tell prompts."""
_CONVENTION: Final = (
    "events tell what an engine stored: prompts that it had as a whole are missing, lengths are whole blocks, and what "
    "was generated counts as output"
)


class _Stored(NamedTuple):
    """Blocks that an engine's own memory has got."""

    batch: int
    time_s: float
    rank: object
    hashes: list[object]
    parent: object
    block_tokens: int
    group: object
    session: str | None


@dataclass(slots=True)
class _Open:
    """A request to which more may come."""

    time_s: float
    latest_s: float
    batch: int
    first_batch: int
    prompt_tip: int
    """Last block of its prompt; the chain leads to the others."""
    tip: tuple[object, int]
    session: str | None
    answer_blocks: int = 0

    def is_answering(self, stored: _Stored) -> bool:
        """Whether these blocks, if they are its own, are generated ones."""
        return len(stored.hashes) == 1 and stored.batch != self.batch

    def goes_on(self, stored: _Stored) -> bool:
        """Whether blocks that follow its last one are likely its own."""
        pause_s = stored.time_s - self.latest_s
        return pause_s <= (ANSWER_S if self.is_answering(stored) else -1.0 if self.answer_blocks else PROMPT_S)


class EventBatches:
    """Reads such a file.

    Args:
        path: the file.
        block_tokens: tokens of a block to replay with, a multiple of the engine's own; None takes that.

    Raises:
        ConfigError: the file cannot be read, a batch is malformed, nothing was stored, or `block_tokens` does not fit.
    """

    has_blocks = True

    def __init__(self, path: Path, block_tokens: int | None = None) -> None:
        self._path = path
        self.name = str(path)
        self._unknown = self._cleared = 0
        """Of the last reading."""
        first = next(self._stored(), None)
        if first is None:
            raise ConfigError(f"trace {path}: no {_STORED} of an engine's own memory; allowed: at least one")
        self._own_tokens, self._group = first.block_tokens, first.group
        self.block_tokens, self._factor = larger_block(path, self._own_tokens, block_tokens)

    @property
    def notes(self) -> tuple[str, ...]:
        """See `Trace`."""
        notes = [_CONVENTION]
        if self._cleared:
            notes.append(f"the engine's cache was cleared {self._cleared} times, which a replay does not do")
        if self._unknown:
            notes.append(
                Wrong(f"{self._unknown} requests follow blocks that were stored before the file begins; they are cut")
            )
        return tuple(notes)

    def requests(self) -> Iterator[Request]:
        """The requests, in the order of their first blocks; times count from the first."""
        self._unknown = self._cleared = 0
        chains = _Chains()
        waiting: deque[_Open] = deque()
        tips: dict[tuple[object, int], list[_Open]] = {}
        began_s: float | None = None
        for stored in self._stored():
            if stored.group != self._group or stored.block_tokens != self._own_tokens or not stored.hashes:
                continue
            began_s = stored.time_s if began_s is None else began_s
            while waiting and stored.time_s - waiting[0].latest_s > ANSWER_S:
                yield self._closed(waiting.popleft(), chains, tips, began_s)
            parent = chains.find(stored.parent)
            going_on = None if parent is None else _continued(tips, (stored.rank, parent), stored)
            new = chains.extended(parent, stored.hashes)
            if going_on is None:
                if parent is None and stored.parent is not None:
                    self._unknown += 1
                tip = (stored.rank, new[-1])
                going_on = _Open(stored.time_s, stored.time_s, stored.batch, stored.batch, new[-1], tip, stored.session)
                waiting.append(going_on)
            elif going_on.is_answering(stored):
                going_on.answer_blocks += len(new)
            else:
                going_on.prompt_tip = new[-1]
            going_on.latest_s, going_on.batch = stored.time_s, stored.batch
            going_on.tip = (stored.rank, new[-1])
            tips.setdefault(going_on.tip, []).append(going_on)
        for each in waiting:
            yield self._closed(each, chains, tips, began_s or 0.0)

    def _closed(
        self, done: _Open, chains: "_Chains", tips: dict[tuple[object, int], list[_Open]], began_s: float
    ) -> Request:
        here = tips.get(done.tip, [])
        if done in here:
            here.remove(done)
        if not here:
            tips.pop(done.tip, None)
        path = chains.path(done.prompt_tip)
        if len(path) > REQUEST_BLOCKS_MAX:
            raise ConfigError(
                f"trace {self._path}, batch {done.first_batch}: a request of more than {REQUEST_BLOCKS_MAX} blocks; "
                "allowed: that"
            )
        blocks = np.asarray(path, np.int64)
        return Request(
            done.time_s - began_s,
            len(blocks) * self._own_tokens,
            done.answer_blocks * self._own_tokens,
            merged(blocks, self._factor),
            done.session,
            done.first_batch,
        )

    def _stored(self) -> Iterator[_Stored]:
        for batch_number, batch in _batches(self._path):
            with Place(self._path, batch_number, "batch"):
                time_s, events, rank = _parts(batch)
                found = [it for event in events if (it := self._read(event, batch_number, time_s, rank)) is not None]
            yield from found

    def _read(self, event: object, batch: int, time_s: float, rank: object) -> _Stored | None:
        kind, fields = _event(event)
        if kind == _CLEARED:
            self._cleared += 1
        is_own = str(fields.get("medium") or "GPU").upper() == "GPU"
        if kind != _STORED or not is_own or fields.get("kv_cache_spec_kind") not in _HISTORY:
            return None
        hashes, parent, session = (fields.get(it) for it in ("block_hashes", "parent_block_hash", "session_id"))
        if not isinstance(hashes, list):
            raise ConfigError(f"block_hashes of a {_STORED} is {short(hashes)}; allowed: a list")
        for name in (parent, *cast("list[object]", hashes)):
            if not isinstance(name, int | str | bytes | None):
                raise ConfigError(f"block hash {short(name)}; allowed: whole numbers, bytes or texts")
        return _Stored(
            batch,
            time_s,
            rank,
            cast("list[object]", hashes),
            parent,
            whole(fields, "block_size", least=1),
            fields.get("group_idx"),
            None if session is None else str(session),
        )


class _Chains:
    """Blocks by number, each with the one before it. A hash that does not cover what is before it gets several."""

    def __init__(self) -> None:
        self._numbers: dict[object, int] = {}
        self._others: dict[tuple[int, object], int] = {}
        self._before: list[int] = []

    def find(self, name: object) -> int | None:
        """The block that was named last so; None: there is none."""
        return None if name is None else self._numbers.get(name)

    def extended(self, parent: int | None, names: list[object]) -> list[int]:
        """The blocks that follow `parent`, known or new."""
        before = -1 if parent is None else parent
        out: list[int] = []
        for name in names:
            block = self._numbers.get(name)
            if block is not None and self._before[block] != before:
                block = self._others.get((before, name))
            if block is None:
                block = len(self._before)
                self._before.append(before)
                if name in self._numbers:
                    self._others[before, name] = block
            self._numbers[name] = block
            out.append(block)
            before = block
        return out

    def path(self, block: int) -> list[int]:
        """All blocks up to this one, or `REQUEST_BLOCKS_MAX` and one more."""
        out: list[int] = []
        while block >= 0 and len(out) <= REQUEST_BLOCKS_MAX:
            out.append(block)
            block = self._before[block]
        return out[::-1]


def _continued(tips: dict[tuple[object, int], list[_Open]], tip: tuple[object, int], stored: _Stored) -> _Open | None:
    """The request that came last to this tip and goes on from there, taken away; None when there is none."""
    here = tips.get(tip)
    if not here or not here[-1].goes_on(stored):
        return None
    found = here.pop()
    if not here:
        del tips[tip]
    return found


def _batches(path: Path) -> Iterator[tuple[int, object]]:
    """Batches with their numbers from 1; in JSON, of their lines."""
    if not is_msgpack(path):
        for line_number, text in text_lines(path):
            with Place(path, line_number, "batch"):
                batch: object = json.loads(text)
            yield line_number, batch
        return
    try:
        import msgpack as package  # noqa: PLC0415  an extra, wanted only here
    except ImportError:
        raise ConfigError(
            f"trace {path} is msgpack, whose package is not installed; allowed: pip install 'kvtier[events]', or JSON"
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
                raise ConfigError(f"trace {path}: cut short after batch {count}")
    except (ValueError, TypeError, OSError, MemoryError, *damage_errors(), msgpack.exceptions.UnpackException) as error:
        told = str(error) or type(error).__name__
        raise ConfigError(
            f"trace {path}, after batch {count}: not msgpack: {told}; allowed: batches of at most {BATCH_BYTES_MAX} "
            f"bytes, arrays of at most {_ITEMS_MAX}"
        ) from error


def _parts(batch: object) -> tuple[float, list[object], object]:
    parts = _named(batch, _PARTS)
    if "events" not in parts:
        raise ConfigError(f"{short(batch)} is no batch; allowed: [time, events, rank], or ts and events")
    events = parts.get("events")
    if not isinstance(events, list):
        raise ConfigError(f"events is {short(events)}; allowed: a list")
    time_s = number(parts, "ts")
    if time_s > SECONDS_MAX:
        raise ConfigError(f"ts is {time_s:g}; allowed: seconds, as engines write them, not milliseconds")
    rank = parts.get("data_parallel_rank")
    if not isinstance(rank, int | str | None):
        raise ConfigError(f"data_parallel_rank is {short(rank)}; allowed: a whole number")
    return time_s, cast("list[object]", events), rank


def _event(event: object) -> tuple[str, dict[str, Any]]:
    fields = _named(event, ("type", *_FIELDS))
    kind = fields.get("type")
    if not isinstance(kind, str):
        raise ConfigError(f"{short(event)} is no event; allowed: [kind, fields], or an object with type")
    return kind, fields


def _named(value: object, names: Sequence[str]) -> dict[str, Any]:
    """The fields of what is written as an object or as an array; empty when it is neither."""
    if isinstance(value, list):
        return dict(zip(names, cast("list[object]", value), strict=False))
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}
